"""Tables of several plans, one row per plan, and the warnings ("flags") of plans in order of importance.

`search_table` prints the result of a search, `comparison_table` the same model with several layouts or clusters.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from hpcdist.planner.checks import unsupported
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
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
    slowdown_line,
    wrapped,
)
from hpcdist.reporting import table as text_table

if TYPE_CHECKING:
    from hpcdist.planner.search.best_layouts import SearchResult

# Phrases of flags, the most important first. Flags with none of these phrases have the rank of ().
_ORDER: Final = (
    ("does not fit into the memory",),
    ("extrapolated",),
    ("in this version",),
    ("was never measured on", "uncalibrated:", "was compared with", "MFU is limited", "ZeRO-3: published"),
    ("an allocator that leaves cracks", "messages that hide"),
    (),
    ("neither --steps nor --tokens", "is assumed, because no recipe"),
    ("not known", "left out"),
    ("assumption",),
    ("assumed in the cluster file",),
)
_UNSUPPORTED: Final = 2  # rank of the messages of `unsupported`
_NUMBER: Final = re.compile(r"[0-9][0-9.,e+-]*")
HEADS: Final = ("step", "MFU", "HFU", "memory", "of", "J/step", "data", "pipe", "tensor", "ctx", "micro", "strategy")
_LEFT: Final = ("strategy", "cluster")  # left-aligned columns


def ordered(flags: Iterable[str], layouts: Iterable[ParallelLayout] = ()) -> tuple[str, ...]:
    """Return the warnings ``flags`` without duplicates, the most important first.

    ``layouts``: planned layouts. Warnings that hpcdist cannot run a planned layout count as important.
    """
    unsupported_texts = {text for layout in layouts for text in unsupported(layout)}

    def rank(flag: str) -> int:
        if flag in unsupported_texts:
            return _UNSUPPORTED
        ranks = (index for index, phrases in enumerate(_ORDER) if any(phrase in flag for phrase in phrases))
        return next(ranks, _ORDER.index(()))

    return tuple(sorted(dict.fromkeys(flags), key=rank))


def by_row(
    rows: Sequence[Iterable[str]], shared_flags: Iterable[str] = (), layouts: Iterable[ParallelLayout] = ()
) -> list[str]:
    """Return the warnings of a table of plans, the most important first, each with the numbers of the table rows.

    ``rows``: warnings of each table row. ``shared_flags``: warnings that hold for every row. ``layouts``: planned
    layouts.
    """
    flags_by_pattern: dict[str, dict[int, str]] = {}  # flag without its numbers -> row number -> flag
    for number, flags in enumerate(rows, 1):
        for flag in flags:
            flags_by_pattern.setdefault(_NUMBER.sub("#", flag), {}).setdefault(number, flag)
    prefixes = {next(iter(flags.values())): _rows(flags, len(rows)) for flags in flags_by_pattern.values()}
    others = [flag for flag in shared_flags if _NUMBER.sub("#", flag) not in flags_by_pattern]
    return [prefixes.get(flag, "") + flag for flag in ordered((*others, *prefixes), layouts)]


def _rows(flags: Mapping[int, str], num_rows: int) -> str:
    numbers = list(map(str, flags))
    is_same = len(set(flags.values())) == 1
    if is_same and len(numbers) == num_rows:
        return ""
    if is_same:
        return f"row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: "
    return f"row {numbers[0]}, and with other numbers row{'s' if len(numbers) > 2 else ''} {', '.join(numbers[1:])}: "


def layout_caveats(estimate: PlanEstimate) -> tuple[str, ...]:
    """Return warnings about the plan ``estimate``: missing memory, idle replicas, and options without effect."""
    memory, layout, flags = estimate.memory, estimate.layout, []
    if not memory.fits:
        missing = bytes_in_both(memory.bytes - memory.limit_bytes)
        flags.append(f"the plan does not fit into the memory: {missing} are missing; all other results ignore this")
    flags += _uneven(layout, estimate.global_batch)
    if layout.tensor == 1 and layout.tensor_overlap:
        flags.append(f"tensor_overlap = {layout.tensor_overlap:g} has no effect with one tensor device")
    if layout.data * layout.context == 1 and layout.servers == 0:
        options = (("algorithm", layout.algorithm, "auto"), ("compression", layout.compression, "none"))
        flags += [f"{name} = {value} has no effect with one replica" for name, value, off in options if value != off]
    return tuple(flags)


def assumption_line(cluster: Cluster) -> tuple[str, ...]:
    """Return a tuple with one line about the assumptions in the cluster file, or () if the file has none."""
    sections = list(dict.fromkeys(text.partition(":")[0] for text in toml_file.assumptions(cluster)))
    if not sections:
        return ()
    command, names = f"`hpcdist plan clusters {cluster.name}` prints", ", ".join(sections)
    source = command if cluster.name in toml_file.names() else "its section [sources] has"
    return (f"assumed in the cluster file of {cluster.name}, at least in part: {names}; {source} the details",)


def _uneven(layout: ParallelLayout, global_batch: int) -> tuple[str, ...]:
    samples, rest = divmod(global_batch, layout.data)
    size = layout.microbatch
    if rest:
        batch = f"{counted(global_batch, 'sample')} on {counted(layout.data, 'replica')}: {counted(rest, 'replica')}"
        most, least = -(-(samples + 1) // size), -(-samples // size)
        verb = "computes" if rest == 1 else "compute"
        if most > least:
            return (f"{batch} {verb} {counted(most, 'micro-batch')}, while the others compute {least} and wait",)
        return (f"{batch} {verb} {counted(samples + 1, 'sample')}, while the others compute {samples}",)
    if samples > size and samples % size:
        batch = f"{counted(samples, 'sample')} per replica"
        return (f"{batch} in micro-batches of {size}: the last micro-batch has {samples % size}",)
    return ()


def row(estimate: PlanEstimate) -> list[str]:
    """Return the cells of a table row for the plan ``estimate``, in the order of the column names `HEADS`."""
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
    """Return a short text of strategy, pipeline schedule and options of ``layout``, such as "zero1, zb-v x2"."""
    parts = [f"{layout.servers} servers" if layout.servers else layout.strategy]
    if layout.pipeline > 1:
        parts.append(layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else ""))
    return ", ".join([*parts, *layout.options])


def aligned(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as a list of lines. ``heads``: column names. ``rows``: cells. Numbers are right-aligned."""
    return text_table.aligned([heads, *rows], [column for column, head in enumerate(heads) if head in _LEFT])


def search_table(result: "SearchResult", notes: Sequence[str] = (), replan_command: str | None = None) -> str:
    """Return a text of a search ``result``: table, reasons for the order of its rows, rejected layouts, ``notes``.

    ``replan_command``: command that plans the best layout, to be printed, or None.
    """
    devices = counted(result.devices, "device")
    space = f"{large_count(result.layouts)} layouts on {devices}, {result.estimated:,} of them planned"
    is_by_time = result.objective == "time"
    plans = [ranked.estimate for ranked in result.found]
    programs = " and ".join(dict.fromkeys(plan.layout.implementation for plan in plans))
    kernels = f"; kernels and memory of {programs}" if plans else ""
    lines = [*capped_rows(plans), f"least {result.objective} among {space}{kernels}"]
    lines += [f"no layout fits: {reason}" for reason in result.nothing]
    if result.found:
        heads = ("#", *(() if is_by_time else (f"{result.objective} ({result.found[0].unit})",)), *HEADS)
        values = [[] if is_by_time else [figures(ranked.value, 4)] for ranked in result.found]
        rows = [[str(index + 1), *value, *row(plans[index])] for index, value in enumerate(values)]
        lines += [
            "",
            *aligned(heads, rows),
            "",
            *((f"command to plan row 1: {replan_command}", "") if replan_command else ()),
        ]
        lines += _alike(plans)
        lines.append("why each row is better than the next row, and what limits it")
        for number, ranked in enumerate(result.found, 1):
            reasons = [line for reason in (*ranked.why, *ranked.limits) for line in wrapped(reason, "    ")]
            lines += [f"{number:>2}{reasons[0][2:]}", *reasons[1:]] if reasons else []
    refused = []
    for item in result.refused:
        noun = item.of.removesuffix("s") if item.count == 1 else item.of
        refused.append(f"{item.limit}: {large_count(item.count)} {noun}, for example: {item.example}")
    lines += ["", "refused", *(line for text in refused for line in wrapped(text, "  "))] if refused else []
    if any(not plan.memory.fits for plan in plans):
        lines.append("!  does not fit")
    flags_by_row = [(*plan.flags, *layout_caveats(plan)) for plan in plans]
    flags = by_row(flags_by_row, (*result.flags, *notes), [plan.layout for plan in plans])
    flag_lines = [line for flag in flags for line in wrapped(f"note: {flag}")]
    return "\n".join([*lines, *(["", *flag_lines] if flag_lines else [])])


def _alike(plans: Sequence[PlanEstimate]) -> list[str]:
    # Rows whose range contains the planned step of row 1.
    first = plans[0].step_s
    rows = [str(row) for row, plan in enumerate(plans, 1) if plan.step_range_s and plan.step_range_s[0] <= first]
    if len(rows) < 2:
        return []
    return [f"rows {', '.join(rows)} cannot be told apart: the step of row 1 is within their ranges", ""]


def capped_rows(plans: Sequence[PlanEstimate]) -> list[str]:
    """Return [line that names the table rows whose MFU is lowered to the best published MFU], or []."""
    capped = {str(number): plan for number, plan in enumerate(plans, 1) if plan.is_capped}
    if not capped:
        return []
    limits = " and ".join(dict.fromkeys(share(plan.mfu) for plan in capped.values()))
    numbers = f"row{'s' if len(capped) > 1 else ''} {', '.join(capped)}"
    most = share(max(plan.modelled_mfu for plan in plans))
    return [f"* MFU of {numbers} limited to {limits}, the best published on such devices: formulas give up to {most}"]


def comparison_table(rows: Sequence[tuple[str, PlanEstimate]]) -> list[str]:
    """Return lines: a table of ``rows`` (cluster name, plan), and the reasons why the fastest plan is faster."""
    first = rows[0][1]
    cells = []
    for number, (cluster, estimate) in enumerate(rows, 1):
        rate = (estimate.global_batch / estimate.step_s) / (first.global_batch / first.step_s)
        *numbers, last = row(estimate)
        cells.append([str(number), cluster, f"{estimate.layout.devices:,}", *numbers, f"{rate:.2f}x", last])
    lines = aligned(("#", "cluster", "devices", *HEADS[:-1], "speed", HEADS[-1]), cells)
    if any(not estimate.memory.fits for _, estimate in rows):
        lines.append("!  does not fit into the memory of a device")
    fitting = [(number, estimate) for number, (_, estimate) in enumerate(rows, 1) if estimate.memory.fits]
    if fitting:
        best_number, best = min(fitting, key=lambda item: item[1].step_s / item[1].global_batch)
        for number, (_, estimate) in enumerate(rows, 1):
            if number != best_number and estimate.global_batch == best.global_batch:
                lines += wrapped(f"row {best_number} compared with row {number}: {slowdown_line(best, estimate)}")
    return lines
