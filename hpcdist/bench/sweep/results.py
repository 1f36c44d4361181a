"""Results file of a sweep: one HDF5 file with every measured figure and every failed trial.

    /                            provenance
    /trials/<id>                 name, ranks, recipe (TOML): one configuration
    /trials/<id>/repeat-<n>      status, exit_code, reason, wall_s, ...; iteration, rank, step_s (iteration, rank), ...
    /trials/<id>/repeat-<n>/summary

The file is opened, appended to and closed for each trial, all or nothing (`hpcdist.hdf5.files.edit`).
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
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import ITERATION, TrialOutcome
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files

SCHEMA: Final = "hpcdist.bench"
VERSION: Final = 1
TRIALS: Final = "trials"
SUMMARY: Final = "summary"
RANK: Final = "rank"  # the scale of what is measured on each rank
LOCK: Final = ".lock"  # the file beside the results while a sweep runs, whose name ends so
_REPEAT: Final = "repeat-"
NOT_PROVENANCE: Final = ("schema", "schema_version", "NX_class")


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
        name.unlink(missing_ok=True)  # while it is held: whoever opened it in time sees that it has lost its name
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


def check_place(path: Path) -> None:
    """Raise StorageError when results could not be written at ``path``; changes nothing."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "may not be written" if folder.is_dir() else "is no directory"
        raise StorageError(f"{path}: cannot be written: {folder} {reason}")


def prepare(path: Path, provenance: Mapping[str, str]) -> None:
    """Make the file at ``path``, or see that the one there is a results file. Raises StorageError."""
    if path.exists():
        files.open_read(path, SCHEMA, VERSION).close()
        return
    with files.edit(path, SCHEMA, VERSION) as file:
        file.attrs.update({**provenance, "NX_class": "NXroot"})
        file.create_group(TRIALS).attrs["NX_class"] = "NXentry"


def append(path: Path, trial: SweepTrial, position: int, repeat: int, outcome: TrialOutcome, git_commit: str) -> None:
    """Put one trial into the prepared file ``path``, in place of an earlier try of the same.

    ``position`` is that of the configuration in its sweep. Raises StorageError; the file is then as it was before.
    """
    if not path.exists():
        raise StorageError(f"{path}: cannot be written: it has been removed while the sweep ran")
    with files.edit(path, SCHEMA, VERSION) as file:
        group = file.require_group(f"{TRIALS}/{trial.id}")
        group.attrs.update({"name": trial.name, "ranks": trial.ranks, "recipe": trial.recipe, "position": position})
        name = f"{_REPEAT}{repeat}"
        if name in group:
            del group[name]
        _write(group.create_group(name), trial.ranks, outcome, git_commit)


def _write(group: Any, ranks: int, outcome: TrialOutcome, git_commit: str) -> None:
    attributes = {
        name: getattr(outcome, name) for name in ("status", "started_utc", "exit_code", "reason", "stderr_tail")
    }
    group.attrs.update(
        {**attributes, "wall_s": outcome.wall_s, "git_commit": git_commit, "mpi_library": outcome.mpi_library}
    )
    group.attrs["hpcdist_version"] = __version__
    if not outcome.samples:
        return
    group.attrs.update({"NX_class": "NXdata", "signal": "step_s", "axes": [ITERATION, "rank"]})
    group.create_group(SUMMARY).attrs.update(dict(_flat(outcome.summary)))
    group.create_dataset(RANK, data=np.arange(ranks))
    for name, sample in outcome.samples.items():
        dataset = group.create_dataset(name, data=sample.values)
        dataset.attrs.update({"units": sample.units, "long_name": sample.meaning})
    attach_scales(group)


def attach_scales(group: Any) -> None:
    """Make iteration and rank the scales of all samples in the group of a repeat."""
    scales = (ITERATION, RANK)
    for name in scales:
        group[name].make_scale(name)
    for name, member in group.items():
        if name not in (SUMMARY, *scales):
            for dim, scale in zip(member.dims, scales, strict=False):
                dim.attach_scale(group[scale])


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
    with files.open_read(path, SCHEMA, VERSION) as file:
        try:
            provenance = {name: _plain(value) for name, value in file.attrs.items() if name not in NOT_PROVENANCE}
            groups = sorted(file[TRIALS].values(), key=lambda group: (group.attrs["ranks"], group.attrs["position"]))
            return SweepResults(provenance, tuple(_configuration(group) for group in groups))
        except files.FAILURES as error:
            raise StorageError(f"{path}: is damaged: {error}") from error


def _configuration(group: Any) -> SweepConfiguration:
    repeats = [_repeat(int(name.removeprefix(_REPEAT)), member) for name, member in group.items()]
    return SweepConfiguration(
        group.name.rpartition("/")[2],
        str(group.attrs["name"]),
        int(group.attrs["ranks"]),
        str(group.attrs["recipe"]),
        tuple(sorted(repeats, key=lambda repeat: repeat.number)),
    )


def _repeat(number: int, group: Any) -> TrialRepeat:
    attributes = group.attrs
    return TrialRepeat(
        number,
        str(attributes["status"]),
        int(attributes["exit_code"]),
        str(attributes["reason"]),
        float(attributes["wall_s"]),
        str(attributes["git_commit"]),
        str(attributes.get("hpcdist_version", "")),
        {name: _plain(value) for name, value in group[SUMMARY].attrs.items()} if SUMMARY in group else {},
        {name: member[...] for name, member in group.items() if name not in (SUMMARY, RANK)},
    )


def _plain(value: Any) -> Any:
    plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return None if isinstance(plain, float) and math.isnan(plain) else plain
