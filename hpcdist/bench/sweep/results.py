"""Results file of a sweep: one HDF5 file with the measurements of each trial and the reasons of failures.

    /                            provenance
    /trials/<id>                 name, ranks, recipe (TOML): one configuration
    /trials/<id>/repeat-<n>      status, exit_code, reason, wall_s, ...; iteration, rank, step_s (iteration, rank), ...
    /trials/<id>/repeat-<n>/summary

Each trial is appended atomically: `hpcdist.bench.output_file` opens, changes and closes the file.
"""

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import __version__
from hpcdist.bench import output_file
from hpcdist.bench.output_file import ResultsFormat, SampleColumn, plain
from hpcdist.bench.sweep.definition import SweepTrial, flat
from hpcdist.bench.sweep.trial import ITERATION, OK, TrialOutcome
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.reporting import atomic

SCHEMA: Final = "hpcdist.bench"
VERSION: Final = 1
TRIALS: Final = "trials"
FORMAT: Final = ResultsFormat(SCHEMA, VERSION, TRIALS)
SUMMARY: Final = "summary"
RANK: Final = "rank"  # dimension scale of samples that are measured on each rank
SCALES: Final = (ITERATION, RANK)
_REPEAT: Final = "repeat-"
check_place: Final = atomic.check_folder


@dataclass(frozen=True)
class TrialRepeat:
    """One run of a sweep configuration. ``samples``: {quantity: array of shape (iteration, rank) or (iteration,)}."""

    number: int
    status: str
    exit_code: int
    reason: str
    wall_s: float
    git_commit: str
    hpcdist_version: str
    summary: Mapping[str, Any]  # by dotted key such as "peak_bytes.gradients"; None is a missing value
    samples: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class SweepConfiguration:
    """Sweep configuration: a recipe as TOML text, a number of MPI ranks, and its runs (``repeats``)."""

    id: str
    name: str
    ranks: int
    recipe: str
    repeats: tuple[TrialRepeat, ...]

    @property
    def good(self) -> list[TrialRepeat]:
        """List of the runs with the status "ok"."""
        return [repeat for repeat in self.repeats if repeat.status == OK]

    @property
    def failed(self) -> list[TrialRepeat]:
        """List of the runs with the status "failed"."""
        return [repeat for repeat in self.repeats if repeat.status != OK]

    def figures(self, name: str) -> list[Any]:
        """Return a list of the values ``name`` in the summaries of successful runs. Missing values are omitted."""
        return [value for repeat in self.good if (value := repeat.summary.get(name)) is not None]


def status_text(ok: int, failed: int) -> str:
    """Format the numbers of ok and failed runs, such as "2 ok, 1 failed". A number 0 is omitted."""
    return ", ".join([f"{ok} ok"] * (ok > 0) + [f"{failed} failed"] * (failed > 0))


@dataclass(frozen=True)
class SweepResults:
    """Content of a sweep results file. Configurations are sorted by number of ranks, then by index in the sweep."""

    provenance: Mapping[str, str]
    configurations: tuple[SweepConfiguration, ...]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the results file ``path`` for the ``with`` block. Raises StorageError if another process holds the lock."""
    lock = path.with_name(path.name + ".lock")
    try:
        descriptor = _lock(lock)
    except BlockingIOError:
        raise StorageError(f"another sweep writes {path}; wait for that sweep, or choose another --output") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: cannot lock the file {lock.name}: {error.strerror}") from error
    try:
        yield
    finally:
        atomic.discard(lock)  # before the unlock: a process that waits at this file then sees that the name is gone
        os.close(descriptor)


def _lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # the previous holder removed the file: create a new file
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def prepare(path: Path, provenance: Mapping[str, str]) -> None:
    """Create the results file ``path`` with the attributes ``provenance``, or check the format of an existing file."""
    if path.exists():
        files.open_read(path, SCHEMA, VERSION).close()
    else:
        with FORMAT.edit(path, provenance):
            pass


def append(path: Path, trial: SweepTrial, position: int, repeat: int, outcome: TrialOutcome, git_commit: str) -> None:
    """Write ``outcome``, the result of run ``repeat`` of ``trial``, to the results file ``path``. Raises StorageError.

    ``position``: index of the trial in the sweep. ``git_commit``: commit of hpcdist that ran the trial.
    """
    if not path.exists():
        raise StorageError(f"{path} cannot be written: the file was removed while the sweep ran; run the sweep again")
    with FORMAT.edit(path, {}) as trials:
        configuration = trials.require_group(trial.id)
        configuration.attrs.update(name=trial.name, ranks=trial.ranks, recipe=trial.recipe, position=position)
        name = f"{_REPEAT}{repeat}"
        if name in configuration:
            del configuration[name]
        group = configuration.create_group(name)
        output_file.write_record(group, outcome)
        group.attrs.update(git_commit=git_commit, hpcdist_version=__version__)
        if outcome.samples:
            summary = group.create_group(SUMMARY).attrs
            for key, value in flat(outcome.summary):
                if isinstance(value, str | bool | int | float | None) and key != "run_dir":  # a temporary directory
                    summary[key] = math.nan if value is None else value
            columns = {
                name: (sample.values, SampleColumn(sample.meaning, *SCALES[: sample.values.ndim], units=sample.units))
                for name, sample in sorted(outcome.samples.items(), key=lambda item: item[0] != "step_s")
            }
            output_file.write_samples(group, columns)  # HDF5 viewers show the first column, step_s


def statuses(path: Path) -> dict[tuple[str, int], str]:
    """Return {(trial id, run number): "ok" or "failed"} for all runs in the file ``path``. Raises StorageError."""
    return {
        (configuration.id, repeat.number): repeat.status
        for configuration in read(path).configurations
        for repeat in configuration.repeats
    }


def read(path: Path) -> SweepResults:
    """Read the results file ``path``. A running sweep may still append to the file. Raises StorageError."""
    with FORMAT.read(path) as (provenance, trials):
        groups = sorted(trials.values(), key=lambda group: (group.attrs["ranks"], group.attrs["position"]))
        return SweepResults(provenance, tuple(_configuration(group) for group in groups))


def _configuration(group: Any) -> SweepConfiguration:
    numbers = sorted(int(name.removeprefix(_REPEAT)) for name in group)
    repeats = tuple(_repeat(number, group[f"{_REPEAT}{number}"]) for number in numbers)
    return output_file.read_record(group, SweepConfiguration, id=group.name.rpartition("/")[2], repeats=repeats)


def _repeat(number: int, group: Any) -> TrialRepeat:
    return output_file.read_record(
        group,
        TrialRepeat,
        number=number,
        hpcdist_version=str(group.attrs.get("hpcdist_version", "")),
        summary={name: plain(value) for name, value in group[SUMMARY].attrs.items()} if SUMMARY in group else {},
        samples={name: member[...] for name, member in group.items() if name not in (SUMMARY, RANK)},
    )
