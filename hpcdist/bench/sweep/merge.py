"""Merging of results files that hold parts of one sweep, such as the tasks of a job array.

The merged file equals the file of a single process that measures the whole sweep. It does not depend on the order of
the parts, and merging the same parts again does not change it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.output_file import attach_scales, plain
from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.trial import FAILED, OK
from hpcdist.errors import StorageError, UsageError

_SCALE_LINKS: Final = ("CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST")  # HDF5 attributes of dimension scales
_TRIAL_ATTRIBUTES: Final = ("name", "ranks", "recipe")  # equal in all parts that hold the trial
_EXPECTED_DIFFERENCES: Final = ("created_utc", "hosts", "git_commit")  # provenance that `MergeSummary` omits
_SEPARATOR: Final = " | "  # between different values of one provenance attribute

_Key = tuple[str, str]  # trial id, and name of the repeat's HDF5 group


@dataclass(frozen=True)
class _Repeat:
    path: Path = field(compare=False)
    digest: str
    status: str
    started_utc: str
    git_commit: str
    mpi_library: str


@dataclass(frozen=True)
class _Part:
    path: Path
    provenance: Mapping[str, str]
    trials: Mapping[str, Mapping[str, Any]]
    repeats: Mapping[_Key, _Repeat]


@dataclass(frozen=True)
class MergeSummary:
    """Result of a merge: numbers of successful and failed runs, and a text for each provenance value that differs."""

    ok: int
    failed: int
    differences: tuple[str, ...]


def merge(output: Path, paths: Sequence[Path], *, mixed: bool = False) -> MergeSummary:
    """Merge sweep results files into ``output``. Raises UsageError for different commits, unless ``mixed``. Local."""
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise StorageError(f"{', '.join(missing)}: no such file; run the trials of these files, or leave the files out")
    is_new = not output.exists()
    inputs = paths if is_new else [output, *(path for path in paths if not path.samefile(output))]
    parts = [_read(path) for path in inputs]
    repeats, trials, provenance = _repeats(parts), _trials(parts), _provenance(parts)
    commits = {repeat.git_commit for repeat in repeats.values()}
    if len(commits) > 1 and not mixed:
        raise UsageError(
            f"the trials are from different commits of hpcdist, {_SEPARATOR.join(sorted(commits))}, and cannot be "
            "compared; measure all trials with one commit, or accept the difference with --mixed"
        )
    if is_new or (parts[0].provenance, parts[0].trials, parts[0].repeats) != (provenance, trials, repeats):
        new_repeats = {key: repeat for key, repeat in repeats.items() if repeat.path != output}
        _write(_Part(output, provenance, trials, new_repeats))
    statuses = [repeat.status for repeat in repeats.values()]
    libraries = {repeat.mpi_library for repeat in repeats.values() if repeat.mpi_library}
    versions = [*provenance.items(), ("mpi_library", _SEPARATOR.join(sorted(libraries)))]
    differences = tuple(f"{name}: {value}" for name, value in versions if _is_difference(name, value))
    return MergeSummary(statuses.count(OK), statuses.count(FAILED), differences)


def _read(path: Path) -> _Part:
    results.read(path)  # raises StorageError for a damaged file
    with results.FORMAT.read(path) as (provenance, groups):
        trials, repeats = {}, {}
        for trial, group in groups.items():
            trials[trial] = {name: plain(group.attrs[name]) for name in (*_TRIAL_ATTRIBUTES, "position")}
            for name, member in group.items():
                attributes = ("status", "started_utc", "git_commit", "mpi_library")
                repeats[trial, name] = _Repeat(path, _digest(member), *(str(member.attrs[key]) for key in attributes))
    return _Part(path, {name: str(value) for name, value in provenance.items()}, trials, repeats)


def _repeats(parts: Sequence[_Part]) -> dict[_Key, _Repeat]:
    repeats: dict[_Key, _Repeat] = {}
    for key, repeat in (item for part in parts for item in part.repeats.items()):
        other = repeats.setdefault(key, repeat)
        if repeat != other and repeat.status == other.status == OK:
            raise UsageError(
                f"{other.path} and {repeat.path} hold different successful results for {key[1]} of trial {key[0]}; "
                "leave out one of the two files"
            )
        repeats[key] = max(other, repeat, key=lambda result: (result.status == OK, result.started_utc, result.digest))
    return repeats


def _trials(parts: Sequence[_Part]) -> dict[str, Mapping[str, Any]]:
    trials: dict[str, Mapping[str, Any]] = {}
    paths: dict[str, Path] = {}
    for part in parts:
        for trial, attributes in part.trials.items():
            first, path = trials.setdefault(trial, attributes), paths.setdefault(trial, part.path)
            for name in _TRIAL_ATTRIBUTES:
                if first[name] != attributes[name]:
                    raise UsageError(
                        f"trial {trial} has the {name} {first[name]!r} in {path} and {attributes[name]!r} in "
                        f"{part.path}; merge only parts of one sweep"
                    )
            trials[trial] = {**first, "position": min(first["position"], attributes["position"])}
    return trials


def _provenance(parts: Sequence[_Part]) -> dict[str, str]:
    provenance: dict[str, str] = {}
    for name in dict.fromkeys(name for part in parts for name in part.provenance):
        separator = "," if name == "hosts" else _SEPARATOR
        values = {value for part in parts for value in part.provenance.get(name, "").split(separator) if value}
        provenance[name] = min(values) if name == "created_utc" else separator.join(sorted(values))
    return provenance


def _is_difference(name: str, value: str) -> bool:
    return _SEPARATOR in value and name not in _EXPECTED_DIFFERENCES and not name.startswith("slurm_")


def _write(changes: _Part) -> None:
    with results.FORMAT.edit(changes.path, changes.provenance) as groups:
        groups.parent.attrs.update(changes.provenance)
        for trial, attributes in changes.trials.items():
            groups.require_group(trial).attrs.update(attributes)
        for path in dict.fromkeys(repeat.path for repeat in changes.repeats.values()):
            with results.FORMAT.read(path) as (_, source):
                for trial, name in (key for key, repeat in changes.repeats.items() if repeat.path == path):
                    if name in groups[trial]:
                        del groups[trial][name]
                    _copy(source[trial][name], groups[trial].create_group(name))


def _copy(source: Any, target: Any) -> None:
    # Scales are attached again: HDF5 cannot copy references to a file.
    target.attrs.update(_attributes(source))
    for name, member in source.items():
        if name == results.SUMMARY:
            target.create_group(name).attrs.update(_attributes(member))
        else:
            target.create_dataset(name, data=member[...]).attrs.update(_attributes(member))
    if results.RANK in target:
        samples = {name: member.ndim for name, member in target.items() if name not in (results.SUMMARY, results.RANK)}
        attach_scales(target, {name: results.SCALES[:dims] for name, dims in samples.items()})


def _attributes(member: Any) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
        for name, value in member.attrs.items()
        if name not in _SCALE_LINKS
    }


def _digest(repeat: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, member in sorted({"": repeat, **repeat}.items()):
        attributes = sorted((key, plain(value)) for key, value in _attributes(member).items())
        digest.update(repr((name, attributes)).encode())
        if hasattr(member, "shape"):
            values = member[...]
            digest.update(repr((values.dtype.str, values.shape)).encode() + values.tobytes())
    return digest.hexdigest()
