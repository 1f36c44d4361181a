"""Tables of several plans, a line each, and the caveats of plans.

`search_table` shows the result of a search, `comparison_table` a layout on several clusters. Caveats are the flags of a
plan, what its layout and batch bring with them (`layout_caveats`), and the assumptions in the file of the cluster
(`assumption_line`); `ordered` puts the decisive ones first.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits.unsupported import unsupported
from hpcdist.planner.report.compare import slowdown_line
from hpcdist.planner.report.quantities import (
    between,
    bytes_in_both,
    counted,
    decimal,
    figures,
    large_count,
    nbytes,
    seconds,
    share,
    wrapped,
)
from hpcdist.reporting import table as text_table

if TYPE_CHECKING:
    from hpcdist.planner.search.best_layouts import SearchResult

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
HEADS: Final = ("step", "MFU", "HFU", "memory", "of", "J/step", "data", "pipe", "tensor", "ctx", "micro", "ways")
_SHORT: Final = {"parameter_server": "servers"}
_LEFT: Final = ("ways", "cluster", "layout", "")  # columns of words


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
            earliest = first.setdefault(alike, flag)
            same[alike] = same.get(alike, True) and earliest == flag
            if number not in of.setdefault(alike, []):
                of[alike].append(number)
    texts = {first[alike]: _rows(numbers, same[alike], len(rows)) for alike, numbers in of.items()}
    others = [flag for flag in common if _NUMBER.sub("#", flag) not in of]
    return [texts.get(flag, "") + flag for flag in ordered((*others, *texts), layouts)]


def layout_caveats(estimate: PlanEstimate) -> tuple[str, ...]:
    """Return what a plan tells of its layout and batch: memory that is not there, waits, what has no effect (local)."""
    memory, flags = estimate.memory, []
    if not memory.fits:
        missing = bytes_in_both(memory.bytes - memory.limit_bytes)
        flags.append(
            f"it does not fit into the memory: {missing} are missing, and the rest is told as if they were there"
        )
    return (*flags, *_uneven(estimate.layout, estimate.global_batch), *_no_effect(estimate.layout))


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
    """Return the prefix of a flag that only these rows have; nothing where all have it, word for word."""
    if is_same and len(numbers) == of:
        return ""
    if is_same or len(numbers) == 1:
        return f"{'row' if len(numbers) == 1 else 'rows'} {', '.join(map(str, numbers))}: "
    return f"row {numbers[0]}, and with other numbers {', '.join(map(str, numbers[1:]))}: "


def _uneven(layout: ParallelLayout, global_batch: int) -> tuple[str, ...]:
    """Return which replicas wait, where samples do not divide into replicas, and these into micro-batches."""
    each, more = divmod(global_batch, layout.data)
    size = layout.microbatch
    if more:
        batch = f"{counted(global_batch, 'sample')} on {counted(layout.data, 'replica')}: "
        most, least = -(-(each + 1) // size), -(-each // size)
        verb = "computes" if more == 1 else "compute"
        if most > least:
            return (f"{batch}{more} {verb} {counted(most, 'micro-batch')} while the others, with {least}, wait",)
        return (f"{batch}{more} {verb} {counted(each + 1, 'sample')} while the others have {each}",)
    if each > size and each % size:
        return (f"{counted(each, 'sample')} of a replica in micro-batches of {size}: the last one has {each % size}",)
    return ()


def _no_effect(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the settings that change nothing on so few devices."""
    flags = []
    if layout.tensor == 1 and layout.tensor_overlap:
        flags.append(f"tensor_overlap = {layout.tensor_overlap:g} has no effect with one tensor device")
    if layout.data * layout.context == 1 and layout.servers == 0:
        asked = (("algorithm", layout.algorithm, "auto"), ("compression", layout.compression, "none"))
        flags += [f"{name} = {value} has no effect with one replica" for name, value, none in asked if value != none]
    return tuple(flags)


def row(estimate: PlanEstimate) -> list[str]:
    """Return the cells of an estimate, in the order of HEADS (local)."""
    layout, memory = estimate.layout, estimate.memory
    return [
        seconds(estimate.step_s) + between(estimate.step_range_s),
        share(estimate.mfu) + ("*" if estimate.is_capped else ""),
        share(estimate.hfu),
        nbytes(memory.bytes) + ("" if memory.fits else "!"),
        nbytes(memory.limit_bytes),
        decimal(estimate.energy.joules, "J"),
        *(f"{degree:,}" for degree in (layout.data, layout.pipeline, layout.tensor, layout.context)),
        f"{layout.microbatches(estimate.global_batch)} x {layout.microbatch}",
        strategy_cell(layout),
    ]


def strategy_cell(layout: ParallelLayout) -> str:
    """Return strategy, schedule and so on of a layout, in a few words (local)."""
    parts = [_SHORT.get(layout.strategy, layout.strategy)]
    if layout.servers:
        parts[0] = f"{layout.servers} servers"
    if layout.pipeline > 1:
        parts.append(layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else ""))
    return ", ".join([*parts, *layout.options])


def aligned(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table: words to the left, numbers to the right (local)."""
    return text_table.aligned([heads, *rows], [place for place, head in enumerate(heads) if head in _LEFT])


def search_table(result: "SearchResult", notes: Sequence[str] = (), again: str | None = None) -> str:
    """Return what a search has found: a table, why each beats the next, and what was refused (local).

    ``again`` is the command that plans the first of them.
    """
    devices = counted(result.devices, "device")
    space = f"{large_count(result.layouts)} layouts on {devices}, {result.estimated:,} of them planned"
    plans = [ranked.estimate for ranked in result.found]
    kernels = f"; kernels and memory of {plans[0].layout.implementation}" if plans else ""
    lines = [*capped_rows(plans), f"least {result.objective} among {space}{kernels}"]
    lines += [f"no layout fits: {reason}" for reason in result.nothing]
    if result.found:
        unit = result.found[0].unit
        heads = ("#", *((f"{result.objective} ({unit})",) if result.objective != "time" else ()), *HEADS)
        rows = []
        for place, ranked in enumerate(result.found, 1):
            value = [figures(ranked.value, 4)] if result.objective != "time" else []
            rows.append([str(place), *value, *row(ranked.estimate)])
        lines += ["", *aligned(heads, rows), ""]
        lines += [
            *((f"row 1 in full: {again}", "") if again else ()),
            "why each is ahead of the next, and what limits it",
        ]
        for place, ranked in enumerate(result.found, 1):
            reasons = [line for reason in (*ranked.why, *ranked.limits) for line in wrapped(reason, "    ")]
            lines += [f"{place:>2}{reasons[0][2:]}", *reasons[1:]] if reasons else []
    refused = []
    for item in result.refused:
        what = item.of.removesuffix("s") if item.count == 1 else item.of
        refused.append(f"{item.limit}: {large_count(item.count)} {what}, such as: {item.example}")
    lines += ["", "refused", *(line for text in refused for line in wrapped(text, "  "))] if refused else []
    if any(not plan.memory.fits for plan in plans):
        lines.append("!  does not fit")
    flags = by_row(
        [(*plan.flags, *layout_caveats(plan)) for plan in plans],
        (*result.flags, *notes),
        [plan.layout for plan in plans],
    )
    flag_lines = [line for flag in flags for line in wrapped(f"note: {flag}")]
    return "\n".join([*lines, *(["", *flag_lines] if flag_lines else [])])


def capped_rows(plans: Sequence[PlanEstimate]) -> list[str]:
    """Return in one line which rows have an MFU that nobody has measured; nothing where there is none (local)."""
    rows = [str(place) for place, plan in enumerate(plans, 1) if plan.is_capped]
    if not rows:
        return []
    most = max(plan.modelled_mfu for plan in plans)
    limit = " and ".join(dict.fromkeys(share(plan.mfu) for plan in plans if plan.is_capped))
    whose = f"row{'s' if len(rows) > 1 else ''} {', '.join(rows)}"
    line = f"* MFU of {whose} limited to {limit}, the best published on such devices: formulas give up to {share(most)}"
    return [line]


def comparison_table(rows: Sequence[tuple[str, PlanEstimate]]) -> list[str]:
    """Return a table of (cluster, estimate), and what makes the fastest that fits faster than each other (local).

    Rates are relative to the first; steps of other batches take other samples, and are not set against each other.
    """
    first = rows[0][1]
    cells = []
    for place, (cluster, estimate) in enumerate(rows, 1):
        rate = (estimate.global_batch / estimate.step_s) / (first.global_batch / first.step_s)
        *numbers, last = row(estimate)
        cells.append([str(place), cluster, f"{estimate.layout.devices:,}", *numbers, f"{rate:.2f}x", last])
    lines = aligned(("#", "cluster", "devices", *HEADS[:-1], "speed", HEADS[-1]), cells)
    if any(not estimate.memory.fits for _, estimate in rows):
        lines.append("!  does not fit into the memory of a device")
    fitting = [place for place, (_, estimate) in enumerate(rows) if estimate.memory.fits]
    if fitting:
        best = min(fitting, key=lambda place: rows[place][1].step_s / rows[place][1].global_batch)
        for place, (_, estimate) in enumerate(rows):
            if place != best and estimate.global_batch == rows[best][1].global_batch:
                lines += wrapped(f"{best + 1} against {place + 1}: {slowdown_line(rows[best][1], estimate)}")
    return lines
