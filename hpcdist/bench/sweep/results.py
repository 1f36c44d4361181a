"""Results file of a sweep: one HDF5 file with every measured figure and every failed trial.

    /                            provenance
    /trials/<id>                 name, ranks, recipe (TOML): one configuration
    /trials/<id>/repeat-<n>      status, exit_code, reason, wall_s, ...; iteration, rank, step_s (iteration, rank), ...
    /trials/<id>/repeat-<n>/summary

The file is opened, appended to and closed for each trial, all or nothing (`hpcdist.bench.output_file`).
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
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import ITERATION, OK, TrialOutcome
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.reporting import atomic
from hpcdist.reporting.atomic import check_folder

SCHEMA: Final = "hpcdist.bench"
VERSION: Final = 1
TRIALS: Final = "trials"
FORMAT: Final = ResultsFormat(SCHEMA, VERSION, TRIALS)
SUMMARY: Final = "summary"
RANK: Final = "rank"  # the scale of what is measured on each rank
SCALES: Final = (ITERATION, RANK)
LOCK: Final = ".lock"  # the file beside the results while a sweep runs, whose name ends so
_REPEAT: Final = "repeat-"
check_place: Final = check_folder  # of results that may be there, and are appended to


@dataclass(frozen=True)
class TrialRepeat:
    """One start of a configuration; ``samples`` are (iteration, rank) or (iteration,), NaN where not measured."""

    number: int
    status: str
    exit_code: int
    reason: str
    wall_s: float
    git_commit: str
    hpcdist_version: str
    summary: Mapping[str, Any]  # flat: "peak_bytes.gradients"; None where not measured
    samples: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class SweepConfiguration:
    """A recipe on a number of ranks, and its repeats by number."""

    id: str
    name: str
    ranks: int
    recipe: str
    repeats: tuple[TrialRepeat, ...]

    @property
    def good(self) -> list[TrialRepeat]:
        """Repeats that ended well."""
        return [repeat for repeat in self.repeats if repeat.status == OK]

    @property
    def failed(self) -> list[TrialRepeat]:
        """Repeats that did not."""
        return [repeat for repeat in self.repeats if repeat.status != OK]

    def figures(self, name: str) -> list[Any]:
        """Return a figure of the summaries of the good repeats that measured it."""
        return [value for repeat in self.good if (value := repeat.summary.get(name)) is not None]


def status_text(ok: int, failed: int) -> str:
    """Return the numbers of repeats by the way they ended."""
    return ", ".join([f"{ok} ok"] * (ok > 0) + [f"{failed} failed"] * (failed > 0))


@dataclass(frozen=True)
class SweepResults:
    """A results file in memory; configurations in the order of their sweep, few ranks first."""

    provenance: Mapping[str, str]
    configurations: tuple[SweepConfiguration, ...]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep every other sweep from the results at ``path``, without waiting; a lock ends with its process at the latest.

    Raises StorageError when another has them, or when the directory cannot be written.
    """
    name = path.with_name(path.name + LOCK)
    try:
        held = _lock(name)
    except BlockingIOError:
        raise StorageError(f"another sweep writes {path}; wait for its end, or choose another --output") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {name.name} cannot be locked: {error.strerror}") from error
    try:
        yield
    finally:
        atomic.discard(name)  # while it is held: whoever opened it in time sees that it has lost its name
        os.close(held)


def _lock(name: Path) -> int:
    """Return the descriptor of the locked file ``name``. Raises BlockingIOError when somebody else has it."""
    while True:
        held = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), os.stat(name)):
                return held
        except FileNotFoundError:
            pass  # removed by the one that held it: try again with a new file
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def prepare(path: Path, provenance: Mapping[str, str]) -> None:
    """Make the file at ``path``, or see that the one there is a results file. Raises StorageError."""
    if path.exists():
        files.open_read(path, SCHEMA, VERSION).close()
        return
    with FORMAT.edit(path, provenance):
        pass


def append(path: Path, trial: SweepTrial, position: int, repeat: int, outcome: TrialOutcome, git_commit: str) -> None:
    """Put one trial into the prepared file ``path``, in place of an earlier try of the same.

    ``position`` is that of the configuration in its sweep. Raises StorageError; the file is then as it was before.
    """
    if not path.exists():
        raise StorageError(f"{path}: cannot be written: it has been removed while the sweep ran")
    with FORMAT.edit(path, {}) as groups:
        group = groups.require_group(trial.id)
        group.attrs.update({"name": trial.name, "ranks": trial.ranks, "recipe": trial.recipe, "position": position})
        name = f"{_REPEAT}{repeat}"
        if name in group:
            del group[name]
        _write(group.create_group(name), outcome, git_commit)


def _write(group: Any, outcome: TrialOutcome, git_commit: str) -> None:
    output_file.write_record(group, outcome)
    group.attrs.update({"git_commit": git_commit, "hpcdist_version": __version__})
    if not outcome.samples:
        return
    group.create_group(SUMMARY).attrs.update(dict(_flat(outcome.summary)))
    columns = {
        name: (sample.values, SampleColumn(sample.meaning, *SCALES[: sample.values.ndim], units=sample.units))
        for name, sample in sorted(outcome.samples.items(), key=lambda item: item[0] != "step_s")  # what a viewer shows
    }
    output_file.write_samples(group, columns)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the scalars of a summary by dotted name: NaN for None, and nothing that HDF5 has no attribute for."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is None:
            yield prefix + name, math.nan
        elif isinstance(value, str | bool | int | float) and name != "run_dir":  # a directory that is gone
            yield prefix + name, value


def statuses(path: Path) -> dict[tuple[str, int], str]:
    """Return the status of every trial in the file by (id, repeat). Raises StorageError."""
    return {
        (configuration.id, repeat.number): repeat.status
        for configuration in read(path).configurations
        for repeat in configuration.repeats
    }


def read(path: Path) -> SweepResults:
    """Read a results file; its sweep may be under way. Raises StorageError."""
    with FORMAT.read(path) as (provenance, trials):
        groups = sorted(trials.values(), key=lambda group: (group.attrs["ranks"], group.attrs["position"]))
        return SweepResults(provenance, tuple(_configuration(group) for group in groups))


def _configuration(group: Any) -> SweepConfiguration:
    repeats = [_repeat(int(name.removeprefix(_REPEAT)), member) for name, member in group.items()]
    repeats.sort(key=lambda repeat: repeat.number)
    name = group.name.rpartition("/")[2]
    return output_file.read_record(group, SweepConfiguration, id=name, repeats=tuple(repeats))


def _repeat(number: int, group: Any) -> TrialRepeat:
    return output_file.read_record(
        group,
        TrialRepeat,
        number=number,
        hpcdist_version=str(group.attrs.get("hpcdist_version", "")),
        summary={name: plain(value) for name, value in group[SUMMARY].attrs.items()} if SUMMARY in group else {},
        samples={name: member[...] for name, member in group.items() if name not in (SUMMARY, RANK)},
    )
