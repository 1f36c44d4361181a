"""Merge results files of one sweep that was measured in parts, such as the tasks of a job array.

The result is the file that one process would have written. It does not depend on the order of the parts, and to put
the same parts into it again changes nothing.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.output_file import attach_scales, plain
from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.trial import FAILED, OK
from hpcdist.errors import StorageError, UsageError

_LINKS: Final = ("CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST")  # how HDF5 ties samples to their scales
_OF_A_TRIAL: Final = ("name", "ranks", "recipe")  # what one id cannot have two of
_OF_A_REPEAT: Final = ("status", "started_utc", "git_commit", "mpi_library")
_OF_A_START: Final = ("created_utc", "hosts", "git_commit")  # differ between parts, or are looked at more closely
_AND: Final = " | "  # between the values of parts that differ

_Key = tuple[str, str]  # id of a trial, name of the group of its repeat


@dataclass(frozen=True)
class _Repeat:
    """A repeat in the file at ``path``; ``digest`` is that of all that the file says of it."""

    path: Path
    status: str
    started_utc: str
    git_commit: str
    mpi_library: str
    digest: str


@dataclass(frozen=True)
class _Part:
    """Contents of a results file: attributes of its root and its trials, and its repeats."""

    path: Path
    provenance: Mapping[str, str]
    trials: Mapping[str, Mapping[str, Any]]
    repeats: Mapping[_Key, _Repeat]


@dataclass(frozen=True)
class MergeSummary:
    """Number of repeats that the file has now, and the differences of machines and versions of its parts."""

    ok: int
    failed: int
    differences: tuple[str, ...]


def merge(output: Path, paths: Sequence[Path], *, mixed: bool = False) -> MergeSummary:
    """Put the results at ``paths`` into those at ``output``, which need not exist (local).

    Of two tries of one repeat a good one counts, and of two failed ones the later. Raises StorageError for files that
    are missing or cannot be read or written, and UsageError for two good tries of one repeat that are not the same, for
    a trial that is another one under the same id, and, unless they may be ``mixed``, for trials of different commits of
    hpcdist. ``output`` is then as it was before.
    """
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise StorageError(
            f"{', '.join(missing)}: no such file; its trial was not recorded: run it, or leave the file out"
        )
    apart = [path for path in paths if not (output.exists() and path.samefile(output))]
    parts = [_read(path) for path in (*([output] if output.exists() else []), *apart)]
    chosen = _chosen(parts)
    trials = _trials(parts)
    commits = {repeat.git_commit for repeat in chosen.values()}
    if len(commits) > 1 and not mixed:
        raise UsageError(
            f"the trials are of different commits of hpcdist, and cannot be compared: {_AND.join(sorted(commits))}; "
            "measure them again with one, or take them as they are with --mixed"
        )
    provenance = _provenance(parts)
    before = parts[0] if output.exists() else _Part(output, {}, {}, {})
    if (before.provenance, before.trials) != (provenance, trials) or _digests(before.repeats) != _digests(chosen):
        _write(
            output,
            provenance,
            trials,
            {key: chosen_repeat for key, chosen_repeat in chosen.items() if chosen_repeat.path != output},
        )
    statuses = [repeat.status for repeat in chosen.values()]
    return MergeSummary(statuses.count(OK), statuses.count(FAILED), tuple(_differences(parts, chosen.values())))


def _read(path: Path) -> _Part:
    results.read(path)  # it is whole
    with results.FORMAT.read(path) as (provenance, groups):
        trials, repeats = {}, {}
        for trial, group in groups.items():
            trials[trial] = {name: plain(group.attrs[name]) for name in (*_OF_A_TRIAL, "position")}
            for name, member in group.items():
                attributes = {key: str(member.attrs[key]) for key in _OF_A_REPEAT}
                repeats[trial, name] = _Repeat(path=path, digest=_digest(member), **attributes)
    return _Part(path, {name: str(value) for name, value in provenance.items()}, trials, repeats)


def _chosen(parts: Sequence[_Part]) -> dict[_Key, _Repeat]:
    """Return the try of every repeat that counts. Raises UsageError."""
    chosen: dict[_Key, _Repeat] = {}
    for key, attempt in itertools.chain.from_iterable(part.repeats.items() for part in parts):
        other = chosen.setdefault(key, attempt)
        if attempt.digest == other.digest:
            continue
        if attempt.status == other.status == OK:
            trial, repeat = key
            raise UsageError(
                f"{other.path} and {attempt.path} hold different results of {repeat} of trial {trial}; "
                "which one counts cannot be told: leave one of the files out"
            )
        chosen[key] = max(
            other, attempt, key=lambda candidate: (candidate.status == OK, candidate.started_utc, candidate.digest)
        )
    return chosen


def _trials(parts: Sequence[_Part]) -> dict[str, Mapping[str, Any]]:
    """Return the attributes of every trial, at the first of its positions in the sweep file. Raises UsageError."""
    trials: dict[str, Mapping[str, Any]] = {}
    of: dict[str, Path] = {}
    for part in parts:
        for trial, attributes in part.trials.items():
            other = trials.setdefault(trial, attributes)
            place = of.setdefault(trial, part.path)
            for name in _OF_A_TRIAL:
                if other[name] != attributes[name]:
                    raise UsageError(
                        f"trial {trial} has the {name} {other[name]!r} in {place} and {attributes[name]!r} in "
                        f"{part.path}; these are not parts of one sweep"
                    )
            trials[trial] = {**other, "position": min(other["position"], attributes["position"])}
    return trials


def _provenance(parts: Sequence[_Part]) -> dict[str, str]:
    """Return where the parts come from: what they agree on, all hosts, and all values of what differs."""
    provenance: dict[str, str] = {}
    for name in dict.fromkeys(name for part in parts for name in part.provenance):
        separator = "," if name == "hosts" else _AND
        values = {value for part in parts for value in part.provenance.get(name, "").split(separator) if value}
        provenance[name] = min(values) if name == "created_utc" else separator.join(sorted(values))
    return provenance


def _differences(parts: Sequence[_Part], chosen: Iterable[_Repeat]) -> Iterator[str]:
    for name, value in _provenance(parts).items():
        if _AND in value and name not in _OF_A_START and not name.startswith("slurm_"):
            yield f"{name}: {value}"
    libraries = {repeat.mpi_library for repeat in chosen if repeat.mpi_library}
    if len(libraries) > 1:
        yield f"mpi_library: {_AND.join(sorted(libraries))}"


def _digests(repeats: Mapping[_Key, _Repeat]) -> dict[_Key, str]:
    return {key: repeat.digest for key, repeat in repeats.items()}


def _write(
    output: Path,
    provenance: Mapping[str, str],
    trials: Mapping[str, Mapping[str, Any]],
    repeats: Mapping[_Key, _Repeat],
) -> None:
    with results.FORMAT.edit(output, provenance) as groups:
        groups.parent.attrs.update(provenance)
        for trial, attributes in trials.items():
            groups.require_group(trial).attrs.update(attributes)
        for path in dict.fromkeys(repeat.path for repeat in repeats.values()):
            with results.FORMAT.read(path) as (_, source):
                for (trial, name), repeat in repeats.items():
                    if repeat.path == path:
                        if name in groups[trial]:
                            del groups[trial][name]
                        _copy(source[trial][name], groups[trial].create_group(name))


def _copy(source: Any, target: Any) -> None:
    """Copy a repeat; its scales are tied anew, since HDF5 copies no reference into another file."""
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
    """Return the attributes that are no links, as h5py takes them again: it reads texts as objects."""
    own = {name: value for name, value in member.attrs.items() if name not in _LINKS}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
        for name, value in own.items()
    }


def _digest(repeat: Any) -> str:
    """Return one text for all that a repeat holds, which another file would have only for the same."""
    digest = hashlib.blake2b(digest_size=16)
    members = {"": repeat, **dict(repeat.items())}
    for name in sorted(members):
        member = members[name]
        attributes = sorted((key, plain(value)) for key, value in _attributes(member).items())
        digest.update(repr((name, attributes)).encode())
        if hasattr(member, "shape"):
            values = member[...]
            digest.update(repr((values.dtype.str, values.shape)).encode() + values.tobytes())
    return digest.hexdigest()
