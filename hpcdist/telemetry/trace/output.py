"""Outputs of a trace: the file in the Chrome trace format (also for Perfetto), and the plot of one step.

The file has a process for each node, and two or more threads for each rank. The bars of a thread must nest, so
overlapping calls use further threads. Times are in microseconds since the begin of the trace, to the nanosecond.
"""

import gzip
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import atomic, plotting
from hpcdist.reporting.plotting import GanttBar, GanttStyle
from hpcdist.telemetry.trace import summary as traces
from hpcdist.telemetry.trace.critical_path import PathSegment
from hpcdist.telemetry.trace.rank_log import RecordedCall
from hpcdist.telemetry.trace.summary import Trace, clock_figures
from hpcdist.telemetry.trace.timeline import RunTimeline, TimelinePiece, hosts

# Threads of a rank are (rank + 1) * THREADS + n: n from 0 for spans, from COMMUNICATES for blocking calls, from
# NONBLOCKING for other calls.
THREADS: Final = 1000
COMMUNICATES: Final = 200
NONBLOCKING: Final = 400
SENDING: Final = "bytes being sent"
# Names of the palette of chrome://tracing. Perfetto colours by name, which also gives one colour per operation.
COLOURS: Final = {
    "compute": "good",
    "communication": "thread_state_iowait",
    "update": "rail_response",
    "data": "rail_load",
    "checkpoint": "olive",
    "validation": "rail_animation",
    "other": "grey",
    "step": "generic_work",
    "collective": "thread_state_uninterruptible",
    "message": "thread_state_iowait",
}
# Operations whose bytes count as in flight from begin to end.
_SENDS: Final = frozenset({"send", "isend", "sendrecv", "put"})


@dataclass(frozen=True)
class _Row:
    begin_ns: int
    end_ns: int
    name: str
    category: str
    args: dict[str, Any]
    call: RecordedCall | None = None


def lanes(bars: Sequence[tuple[int, int]]) -> list[int]:
    """Return a list of one row number per (begin, end) in sorted ``bars``. Bars of a row are disjoint or nested."""
    stacks: list[list[int]] = []
    numbers = []
    for begin, end in bars:
        for lane, stack in enumerate(stacks):  # noqa: B007 - used after the loop
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or stack[-1] >= end:
                break
        else:
            lane = len(stacks)
            stacks.append([])
        stacks[lane].append(end)
        numbers.append(lane)
    return numbers


def events(timeline: RunTimeline) -> Iterator[dict[str, Any]]:
    """Yield the dicts, one per event, that a Chrome trace file stores for ``timeline``."""
    zero = timeline.begin_ns
    processes = {rank: number for number, ranks in enumerate(hosts(timeline).values(), 1) for rank in ranks}
    threads: dict[int, int] = {}  # thread of a call, by its id
    for number, ranks in enumerate(hosts(timeline).values(), 1):
        name = f"node {timeline.lines[ranks[0]].name}"
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for rank in ranks:
            base, calls = (rank + 1) * THREADS, timeline.lines[rank].calls
            blocking, nonblocking = ([call for call in calls if call.is_asynchronous is flag] for flag in (False, True))
            for first, label, rows in (
                (0, "computes", _spans(timeline, rank)),
                (COMMUNICATES, "communicates", _calls(blocking)),
                (NONBLOCKING, "has in flight", _calls(nonblocking)),
            ):
                if rows or first < NONBLOCKING:
                    yield from _threads(rows, number, base + first, f"rank {rank} {label}", zero, threads)
        yield from _sending(timeline, ranks, number, zero)
    yield from _arrows(timeline, processes, threads, zero)


def _threads(
    rows: Sequence[_Row], pid: int, first: int, label: str, zero: int, threads: dict[int, int]
) -> Iterator[dict[str, Any]]:
    lane_numbers = lanes([(row.begin_ns, row.end_ns) for row in rows])
    for lane in range(max(lane_numbers, default=0) + 1):
        tid, name = first + lane, label if lane == 0 else f"{label} ({lane + 1})"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for row, lane in zip(rows, lane_numbers, strict=True):
        if row.call is not None:
            threads[id(row.call)] = first + lane
        yield {
            "ph": "X", "name": row.name, "cat": row.category, "pid": pid, "tid": first + lane,
            "ts": (row.begin_ns - zero) / 1000, "dur": (row.end_ns - row.begin_ns) / 1000,
            "cname": COLOURS.get(row.category, COLOURS["communication"]), "args": row.args,
        }  # fmt: skip


def _spans(timeline: RunTimeline, rank: int) -> list[_Row]:
    line = timeline.lines[rank]
    rows = [_Row(begin, end, f"step {step}", "step", {"step": step}) for step, (begin, end) in line.steps.items()]
    for span in line.spans:
        numbers = {"step": span.step, "microbatch": span.microbatch, "unit": span.unit}
        args = {name: number for name, number in numbers.items() if number >= 0}
        rows.append(_Row(span.begin_ns, span.end_ns, span.name, span.phase, args))
    # Sorting is stable: at equal times the step, which comes first, encloses the span.
    return sorted(rows, key=lambda row: (row.begin_ns, -row.end_ns))


def _calls(calls: Iterable[RecordedCall]) -> list[_Row]:
    rows = []
    for call in calls:
        args: dict[str, Any] = {"comm": call.comm, "number": call.sequence, "elements": call.count, "dtype": call.dtype}
        if call.sent_bytes >= 0:
            args["sent_bytes"] = call.sent_bytes
        if call.peer >= 0:
            args["root" if call.collective else "peer"] = call.peer
        if not call.collective:
            args["tag"] = call.tag
        args["at"] = call.site
        if call.is_open:
            args["unfinished"] = True
        category = "collective" if call.collective else "message"
        rows.append(_Row(call.begin_ns, call.end_ns, call.op, category, args, call))
    return sorted(rows, key=lambda row: (row.begin_ns, -row.end_ns))


def _arrows(
    timeline: RunTimeline, processes: Mapping[int, int], threads: Mapping[int, int], zero: int
) -> Iterator[dict[str, Any]]:
    pairs: list[tuple[str, RecordedCall, RecordedCall]] = [
        ("message", message.send, message.receive)
        for message in timeline.matches.messages
        if not message.receive.is_open
    ]
    for meeting in timeline.matches.meetings:
        last = meeting.released_by()
        if last is not None:
            pairs += [("last to come", last, call) for call in meeting.calls if call is not last and not call.is_open]
    for number, (name, cause, effect) in enumerate(pairs):
        common = {"name": name, "cat": name, "id": number}
        at = max(effect.begin_ns, effect.end_ns - 1)  # inside of the target bar
        for phase, call, ns in (("s", cause, cause.begin_ns), ("f", effect, at)):
            place = {"pid": processes[call.rank], "tid": threads[id(call)], "ts": (ns - zero) / 1000}
            yield common | {"ph": phase, **place} | ({"bp": "e"} if phase == "f" else {})


def _sending(timeline: RunTimeline, ranks: Sequence[int], pid: int, zero: int) -> Iterator[dict[str, Any]]:
    changes: dict[int, int] = defaultdict(int)
    for rank in ranks:
        for call in timeline.lines[rank].calls:
            if call.op in _SENDS and call.sent_bytes > 0:
                changes[call.begin_ns] += call.sent_bytes
                changes[call.end_ns] -= call.sent_bytes
    in_flight = 0
    for ns in sorted(changes):
        in_flight += changes[ns]
        yield {"ph": "C", "name": SENDING, "pid": pid, "ts": (ns - zero) / 1000, "args": {"bytes": in_flight}}


def metadata(trace: Trace, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of the trace file as a dict: ``description`` of the run, clock corrections, and notes."""
    return {
        "run": str(trace.run_dir),
        **description,
        "world": trace.world,
        "ranks": sorted(trace.timeline.lines),
        "steps": list(trace.timeline.steps),
        "time": f"microseconds since {trace.timeline.begin_ns} ns of the monotonic clock of rank 0's node",
        "clocks": clock_figures(trace),
        "order": str(trace.timeline.order),
        "notes": list(trace.notes),
    }


def write(trace: Trace, file: Path, description: Mapping[str, Any]) -> int:
    """Write ``trace`` and ``description`` to ``file``, compressed if its suffix is .gz. Return the number of events."""
    try:
        with (
            atomic.replacing(file) as raw,
            gzip.open(raw, "wb") if file.suffix == ".gz" else nullcontext(raw) as compressed,
            io.TextIOWrapper(compressed, encoding="utf-8") as out,
        ):
            count = _write(out, events(trace.timeline), metadata(trace, description))
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}; choose another file") from error
    return count


def _write(out: IO[str], trace_events: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> int:
    out.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(about) + ',"traceEvents":[')
    count = 0
    for event in trace_events:
        out.write((",\n" if count else "\n") + json.dumps(event, separators=(",", ":")))
        count += 1
    out.write("\n]}\n")
    return count


ROWS: Final = 32  # largest number of ranks; those on the critical path and with the longest waits are drawn
STYLES: Final = {
    "forward": GanttStyle("#b9d6ea"),
    "backward": GanttStyle("#6ba3cf"),
    "compute": GanttStyle("#8fb8d4"),
    "update": GanttStyle("#2f6690"),
    "communication": GanttStyle("#f2a65a"),
    "waits": GanttStyle("#fbe3cb"),
    "data": GanttStyle("#8ab17d"),
    "checkpoint": GanttStyle("#6d597a"),
    "validation": GanttStyle("#b56576"),
    "other": GanttStyle("#d9d9d9"),
}
MEANINGS: Final = {
    "compute": "computes",
    "waits": "waits for another rank",
    "data": "waits for data",
    "other": "between operations",
}
_WIDE: Final = 14.0  # inches
_PATH: Final = "#222222"


def draw(trace: Trace, file: Path) -> int:
    """Plot the step of ``trace`` whose critical path has the median length. Return the number of this step.

    ``file``: file to write the plot to. Raises UsageError if ``trace`` has no steps.
    """
    matplotlib = plotting.check_plot(file)
    if not trace.paths:
        raise UsageError(f"{trace.run_dir} has no complete record of any selected step; select other steps")
    drawn = sorted(trace.paths, key=lambda path: path.took_ns)[(len(trace.paths) - 1) // 2]
    step_trace = traces.of_step(trace, drawn.step)
    rows = _rows(step_trace, drawn.links)
    figure = matplotlib.Figure(figsize=(_WIDE, 1.6 + 0.34 * max(3, len(rows))), layout="constrained")
    axes = figure.subplots()
    zero = min(line.steps[drawn.step][0] for line in step_trace.timeline.lines.values())
    end = max(line.steps[drawn.step][1] for line in step_trace.timeline.lines.values())
    unit, scale = ("ms", 1e6) if end - zero < 10_000_000_000 else ("s", 1e9)
    bars = [bar for row, rank in enumerate(rows) for bar in _bars(row, step_trace.pieces[rank], zero, scale)]
    used = plotting.draw_gantt(axes, bars, STYLES)
    path = _path(axes, drawn.links, rows, zero, scale)
    axes.set_xlim(0, (end - zero) / scale)
    plotting.label_rows(axes, [f"rank {rank}" for rank in rows])
    axes.set_xlabel(f"time in the step ({unit})")
    left_out = len(step_trace.timeline.lines) - len(rows)
    title = f"{trace.run_dir.name}, step {drawn.step}: {drawn.took_ns / scale:.4g} {unit}"
    axes.set_title(title + (f" ({left_out} ranks not drawn)" if left_out else ""), fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [*plotting.kind_handles(used, STYLES, MEANINGS), path]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False)
    plotting.save(figure, file)
    return drawn.step


def _rows(trace: Trace, links: Sequence[PathSegment]) -> list[int]:
    ranks = sorted(trace.timeline.lines)
    if len(ranks) <= ROWS:
        return ranks
    weight: dict[int, int] = defaultdict(int)
    for link in links:
        weight[link.rank] += 1000 * link.took_ns
    for (rank, by), ns in trace.waits.items():
        weight[rank] += ns
        weight[by] += ns
    return sorted(sorted(ranks, key=lambda rank: -weight[rank])[:ROWS])


def _bars(row: int, pieces: Sequence[TimelinePiece], zero: int, scale: float) -> Iterator[GanttBar]:
    for piece in pieces:
        edges_ns = (piece.begin_ns, piece.begin_ns + piece.waited_ns, piece.end_ns)
        begin, works, end = ((ns - zero) / scale for ns in edges_ns)
        if works > begin:
            yield GanttBar(row, begin, works, "waits")
        if end > works:
            yield GanttBar(row, works, end, _kind(piece))


def _kind(piece: TimelinePiece) -> str:
    if piece.phase != "compute":
        return piece.phase
    first = piece.name.partition("_")[0].lower()
    return first if first in ("forward", "backward") and " to " not in piece.name else "compute"


def _path(axes: Any, links: Sequence[PathSegment], rows: Sequence[int], zero: int, scale: float) -> Any:
    heights = {rank: number + 0.44 for number, rank in enumerate(rows)}
    xs: list[float] = []
    ys: list[float] = []
    for number, link in enumerate(links):
        if link.rank not in heights:
            continue
        # A transfer begins on the previous rank of the path.
        source = links[number - 1].rank if link.travels and number else link.rank
        xs += [(link.begin_ns - zero) / scale, (link.end_ns - zero) / scale]
        ys += [heights.get(source, heights[link.rank]), heights[link.rank]]
    return axes.plot(xs, ys, color=_PATH, linewidth=1.4, solid_capstyle="round", zorder=3, label="critical path")[0]
