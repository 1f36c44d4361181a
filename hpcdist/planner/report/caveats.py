"""Caveats of a plan, the decisive ones first: its own flags, and the assumptions in the cluster's file."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits.unsupported import unsupported
from hpcdist.planner.report.quantities import bytes_in_both, counted

# What decides whether an answer holds, by words of its flags, and behind all others what always has to be said.
_FIRST: Final = (
    ("does not fit into the memory",),
    ("extrapolated",),
    ("not built in this version", "in this version"),
    ("was held against an estimate", "estimates were compared", "MFU is limited", "ZeRO-3: published"),
    ("an allocator that leaves cracks", "messages that hide"),
)
_LAST: Final = (("neither --steps nor --tokens",), ("not known", "left out"), ("assumption",), ("assumed in the file",))
_NUMBER: Final = re.compile(r"[0-9][0-9.,e+-]*")


def ordered(flags: Iterable[str], layouts: Iterable[ParallelLayout] = ()) -> tuple[str, ...]:
    """Return each of the flags once, those first that decide whether the answer holds (local).

    ``layouts`` are those of the plan: what this version cannot run of them is known by its text.
    """
    cannot = {text for layout in layouts for text in unsupported(layout)}
    return tuple(sorted(dict.fromkeys(flags), key=lambda flag: _place(flag, flag in cannot)))


def by_row(
    rows: Sequence[Iterable[str]], common: Iterable[str] = (), layouts: Iterable[ParallelLayout] = ()
) -> list[str]:
    """Return the flags of several plans once, with the rows, from 1, that those of only some are of (local).

    Flags that differ in their numbers alone are one, with the numbers of its first row. ``common`` ones may be of all.
    """
    first: dict[str, str] = {}
    of: dict[str, list[int]] = {}
    same: dict[str, bool] = {}
    for number, flags in enumerate(rows, 1):
        for flag in dict.fromkeys(flags):
            alike = _NUMBER.sub("#", flag)
            told = first.setdefault(alike, flag)
            same[alike] = same.get(alike, True) and told == flag
            if number not in of.setdefault(alike, []):
                of[alike].append(number)
    texts = {first[alike]: _rows(numbers, same[alike], len(rows)) for alike, numbers in of.items()}
    others = [flag for flag in common if _NUMBER.sub("#", flag) not in of]
    return [texts.get(flag, "") + flag for flag in ordered((*others, *texts), layouts)]


def layout_caveats(found: PlanEstimate) -> tuple[str, ...]:
    """Return what a plan tells of its layout and batch: memory that is not there, waits, what has no effect (local)."""
    memory, flags = found.memory, []
    if not memory.fits:
        missing = bytes_in_both(memory.bytes - memory.limit_bytes)
        flags.append(
            f"it does not fit into the memory: {missing} are missing, and the rest is told as if they were there"
        )
    return (*flags, *_uneven(found.layout, found.global_batch), *_no_effect(found.layout))


def assumption_line(cluster: Cluster) -> tuple[str, ...]:
    """Return in one line which sections of the cluster's file hold assumptions; nothing where none does (local)."""
    sections = list(dict.fromkeys(text.partition(":")[0] for text in toml_file.assumptions(cluster)))
    if not sections:
        return ()
    is_shipped = cluster.name in toml_file.names()
    where = f"`hpcdist plan clusters {cluster.name}`" if is_shipped else "[sources] in it"
    return (f"assumed in the file of {cluster.name}, at least in part: {', '.join(sections)}; {where} says what",)


def _place(flag: str, is_unbuilt: bool) -> int:
    if is_unbuilt:
        return 2
    for places, start in ((_FIRST, 0), (_LAST, len(_FIRST) + 1)):
        for place, words in enumerate(places, start):
            if any(word in flag for word in words):
                return place
    return len(_FIRST)


def _rows(numbers: Sequence[int], is_same: bool, of: int) -> str:
    """Return what stands before a flag of these rows; nothing where it is, word for word, of all."""
    if is_same and len(numbers) == of:
        return ""
    if is_same or len(numbers) == 1:
        return f"{'row' if len(numbers) == 1 else 'rows'} {', '.join(map(str, numbers))}: "
    return f"row {numbers[0]}, and with other numbers {', '.join(map(str, numbers[1:]))}: "


def _uneven(layout: ParallelLayout, global_batch: int) -> tuple[str, ...]:
    """Return who waits where the samples do not divide into replicas, and these into micro-batches."""
    each, more = divmod(global_batch, layout.data)
    size = layout.microbatch
    if more:
        said = f"{counted(global_batch, 'sample')} on {counted(layout.data, 'replica')}: "
        most, least = -(-(each + 1) // size), -(-each // size)
        verb = "computes" if more == 1 else "compute"
        if most > least:
            return (f"{said}{more} {verb} {counted(most, 'micro-batch')} while the others, with {least}, wait",)
        return (f"{said}{more} {verb} {counted(each + 1, 'sample')} while the others have {each}",)
    if each > size and each % size:
        return (f"{counted(each, 'sample')} of a replica in micro-batches of {size}: the last one has {each % size}",)
    return ()


def _no_effect(layout: ParallelLayout) -> tuple[str, ...]:
    """Return what was asked for and changes nothing on so few devices."""
    found = []
    if layout.tensor == 1 and layout.tensor_overlap:
        found.append(f"tensor_overlap = {layout.tensor_overlap:g} has no effect with one tensor device")
    if layout.data * layout.context == 1 and layout.servers == 0:
        asked = (("algorithm", layout.algorithm, "auto"), ("compression", layout.compression, "none"))
        found += [f"{name} = {value} has no effect with one replica" for name, value, none in asked if value != none]
    return tuple(found)
