"""Summary of a trace for `hpcdist trace`: selected steps and ranks of a run, as figures and as text."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.constants import METRICS_FILE
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting.units import counted, format_bytes, format_seconds
from hpcdist.telemetry.metrics import side_tables
from hpcdist.telemetry.trace import clock_correction, critical_path, matching, rank_log, timeline
from hpcdist.telemetry.trace.clock_correction import ClockCorrections
from hpcdist.telemetry.trace.critical_path import CommunicationOverlap, PathSegment
from hpcdist.telemetry.trace.matching import MatchedMessage
from hpcdist.telemetry.trace.rank_log import RankLog, RankLogs, ranks_text, steps_text
from hpcdist.telemetry.trace.timeline import RunTimeline, TimelinePiece

DEFAULT_STEPS: Final = 20
MAX_PIECES: Final = 250_000  # spans and calls: a file of about 100 MB, which viewers can still open


@dataclass(frozen=True)
class StepPath:
    """Critical path of one step: the sequence of operations and transfers that determines the end of the step."""

    step: int
    links: tuple[PathSegment, ...]

    @property
    def took_ns(self) -> int:
        return self.links[-1].end_ns - self.links[0].begin_ns if self.links else 0


@dataclass(frozen=True)
class Trace:
    """Timeline of some steps of a run, with critical paths, overlaps and waits."""

    run_dir: Path
    world: int
    timeline: RunTimeline
    corrections: ClockCorrections
    pieces: Mapping[int, Sequence[TimelinePiece]]  # consecutive intervals of each rank, with one activity each
    paths: tuple[StepPath, ...]
    overlaps: Mapping[int, CommunicationOverlap]
    longest_waits: Sequence[tuple[TimelinePiece, str]]  # with the activity of the awaited rank
    notes: tuple[str, ...]

    @property
    def waits(self) -> dict[tuple[int, int], int]:
        """Dict {(waiting rank, awaited rank): total waiting time in ns}."""
        return critical_path.waited_for(self.pieces)


def collect(
    run_dir: Path, steps: range | None = None, ranks: Sequence[int] | None = None, max_intervals: int = MAX_PIECES
) -> Trace:
    """Return the trace of the run in ``run_dir``, by default of the last steps and all ranks. Raises HpcdistError."""
    logs = rank_log.load(run_dir)
    notes = list(logs.notes)
    matches = matching.match(logs.ranks, logs.world)
    corrections = clock_correction.find_corrections(logs.ranks, _sessions(run_dir, notes), matches)
    chosen = _of_ranks(logs, ranks)
    numbers, selection_notes = rank_log.select_steps(list(chosen.values()), steps, DEFAULT_STEPS)
    notes += [*selection_notes, *corrections.notes]
    numbers, chosen = _bounded(chosen, numbers, max_intervals, notes)
    tail = steps is None and not all(log.ended for log in chosen.values())
    if tail and numbers:
        notes.append(f"the run did not end: what came after {steps_text(numbers[-1:])} is shown, too")
    # All ranks are needed to find the causes of waits; ranks that were not selected are not shown.
    full_timeline = timeline.build(logs.ranks if numbers else chosen, numbers, matches, corrections, tail=tail)
    pieces = timeline.pieces(full_timeline)
    shown = timeline.select(full_timeline, chosen)
    notes += _clock_notes(full_timeline)
    paths = tuple(StepPath(step, tuple(_path(full_timeline, pieces, step))) for step in numbers)
    transfers = _transfers(full_timeline)
    overlaps = {
        rank: critical_path.communication_overlap(row, transfers.get(rank, ()))
        for rank, row in pieces.items()
        if rank in chosen
    }
    longest = critical_path.longest_waits(pieces, chosen)
    selected = {rank: row for rank, row in pieces.items() if rank in chosen}
    return Trace(run_dir, logs.world, shown, corrections, selected, paths, overlaps, longest, tuple(notes))


def _sessions(run_dir: Path, notes: list[str]) -> tuple[side_tables.ClockSession, ...]:
    path = run_dir / METRICS_FILE
    if not path.exists():
        return ()
    try:
        return side_tables.read_clocks(path)
    except StorageError as error:
        notes.append(f"without measured clocks: {error}")
        return ()


def _of_ranks(logs: RankLogs, ranks: Sequence[int] | None) -> dict[int, RankLog]:
    if ranks is None:
        return dict(logs.ranks)
    missing = [rank for rank in ranks if rank not in logs.ranks]
    if missing:
        raise UsageError(
            f"there is no record of {ranks_text(missing)}; choose from the recorded {ranks_text(sorted(logs.ranks))} "
            f"(the run had {logs.world} ranks)"
        )
    return {rank: logs.ranks[rank] for rank in sorted(set(ranks))}


def _bounded(
    logs: dict[int, RankLog], steps: tuple[int, ...], max_intervals: int, notes: list[str]
) -> tuple[tuple[int, ...], dict[int, RankLog]]:
    before, there = steps, sum(_size(log, steps) for log in logs.values())
    while there > max_intervals and len(steps) > 1:
        steps = steps[-max(1, min(len(steps) - 1, len(steps) * max_intervals // there)) :]
        there = sum(_size(log, steps) for log in logs.values())
    if len(steps) < len(before):
        notes.append(
            f"only {steps_text(steps)} of {steps_text(before)}: more than {max_intervals} spans and calls are too "
            "many for a viewer; choose with --steps or --ranks"
        )
    if there > max_intervals:
        fitting: dict[int, RankLog] = {}
        room = max_intervals
        for rank, log in logs.items():
            room -= _size(log, steps)
            if room < 0 and fitting:
                break
            fitting[rank] = log
        notes.append(
            f"only {ranks_text(sorted(fitting))}: more than {max_intervals} spans and calls are too many for a viewer"
        )
        logs = fitting
    return steps, logs


def _size(log: RankLog, steps: Sequence[int]) -> int:
    there = [log.steps[step] for step in steps if step in log.steps]
    if not there:
        return len(log.spans) + len(log.calls)
    begin, end = there[0][0], there[-1][1]
    spans = sum(begin <= span.begin_ns < end for span in log.spans)
    return spans + sum(begin <= call.begin_ns < end for call in log.calls)


def _clock_notes(full_timeline: RunTimeline) -> list[str]:
    notes = []
    if full_timeline.order.wrong:
        notes.append(f"clocks: {full_timeline.order}")
    if unmatched := full_timeline.matches.unmatched:
        notes.append(f"{unmatched} sends and receives have no counterpart in the records: no arrows for them")
    return notes


def _path(full_timeline: RunTimeline, pieces: Mapping[int, Sequence[TimelinePiece]], step: int) -> list[PathSegment]:
    step_pieces = {
        rank: timeline.in_step(pieces[rank], *line.steps[step])
        for rank, line in full_timeline.lines.items()
        if rank in pieces and step in line.steps
    }
    return critical_path.critical_path(step_pieces)


def _transfers(full_timeline: RunTimeline) -> dict[int, list[tuple[int, int]]]:
    transfers: dict[int, list[tuple[int, int]]] = {rank: [] for rank in full_timeline.lines}
    for message in full_timeline.matches.messages:
        send, receive = message.send, message.receive
        transfers[receive.rank].append((max(send.begin_ns, receive.begin_ns), receive.end_ns))
        transfers[send.rank].append((send.begin_ns, min(receive.end_ns, send.end_ns)))
    for meeting in full_timeline.matches.meetings:
        last = meeting.released_by()
        for call in meeting.calls:
            begin = call.begin_ns if last is None else max(call.begin_ns, last.begin_ns)
            transfers[call.rank].append((begin, call.end_ns))
    return transfers


def of_step(trace: Trace, step: int) -> Trace:
    """Return a copy of ``trace`` that is limited to ``step``."""
    lines = {}
    for rank, line in trace.timeline.lines.items():
        if step in line.steps:
            begin, end = line.steps[step]
            spans = tuple(entry for entry in line.spans if entry.begin_ns < end and entry.end_ns > begin)
            calls = tuple(entry for entry in line.calls if entry.begin_ns < end and entry.end_ns > begin)
            lines[rank] = replace(line, spans=spans, calls=calls, steps={step: (begin, end)})
    pieces = {rank: timeline.in_step(trace.pieces[rank], *line.steps[step]) for rank, line in lines.items()}
    paths = tuple(path for path in trace.paths if path.step == step)
    return replace(trace, timeline=replace(trace.timeline, lines=lines, steps=(step,)), pieces=pieces, paths=paths)


def figures(trace: Trace) -> dict[str, Any]:
    """Return the results of a trace as a dict of JSON values. Times are in seconds. Unknown values are None."""
    links = [link for path in trace.paths for link in path.links]
    of_rank, of_phase, of_name = critical_path.path_shares(links)
    path_ns = sum(of_rank.values())
    waited = trace.waits
    by_cause: Counter[int] = Counter()
    for (_, by), ns in waited.items():
        by_cause[by] += ns
    longest_first = sorted(waited.items(), key=lambda pair: (-pair[1], pair[0]))[:20]
    steps = len(trace.paths)
    return {
        "run": str(trace.run_dir),
        "world": trace.world,
        "ranks": sorted(trace.timeline.lines),
        "steps": list(trace.timeline.steps),
        "critical_path_s": [path.took_ns / 1e9 for path in trace.paths],
        "critical_path_by_rank": {rank: ns / path_ns for rank, ns in of_rank.most_common() if rank >= 0},
        "critical_path_transfer": of_rank[-1] / path_ns if path_ns else None,
        "critical_path_by_phase": {name: ns / path_ns for name, ns in of_phase.most_common()},
        "critical_path_by_operation": {name: ns / path_ns for name, ns in of_name.most_common()},
        "communication": {
            rank: {
                "hidden_s": overlap.hidden_ns / 1e9,
                "exposed_s": overlap.exposed_ns / 1e9,
                "waited_s": overlap.waited_ns / 1e9,
                "hidden_share": overlap.hidden_share,
            }
            for rank, overlap in trace.overlaps.items()
        },
        "message_paths": _message_paths(trace),
        "waited_s": [{"rank": rank, "for": by, "seconds": ns / 1e9} for (rank, by), ns in longest_first],
        "waited_for_s": {rank: ns / 1e9 for rank, ns in by_cause.most_common()},
        "longest_waits": [
            {"rank": wait.rank, "for": wait.by, "in": wait.name, "doing": doing, "seconds": wait.waited_ns / 1e9}
            for wait, doing in trace.longest_waits
        ],
        "wait_s_per_step": sum(waited.values()) / 1e9 / steps / len(trace.pieces) if steps and trace.pieces else None,
        "clocks": clock_figures(trace),
        "order": {
            "pairs": trace.timeline.order.pairs,
            "wrong": trace.timeline.order.wrong,
            "most_s": trace.timeline.order.most_ns / 1e9,
            "beyond_bound": trace.timeline.order.beyond,
        },
        "messages": len(trace.timeline.matches.messages),
        "collectives": len(trace.timeline.matches.meetings),
        "messages_without_counterpart": trace.timeline.matches.unmatched,
        "notes": list(trace.notes),
    }


def _message_paths(trace: Trace) -> list[dict[str, Any]]:
    paths: dict[tuple[int, int, str], list[MatchedMessage]] = defaultdict(list)
    for message in trace.timeline.matches.messages:
        paths[message.send.rank, message.receive.rank, message.send.comm].append(message)
    rows = []
    for (sender, receiver, comm), messages in paths.items():
        in_flight = critical_path.union(
            [(max(m.send.begin_ns, m.receive.begin_ns), m.receive.end_ns) for m in messages]
        )
        whole_ns = sum(end - begin for begin, end in in_flight)
        hidden_ns = critical_path.communication_overlap(trace.pieces.get(receiver, ()), in_flight).hidden_ns
        rows.append(
            {
                "from": sender,
                "to": receiver,
                "comm": comm,
                "messages": len(messages),
                "sent_bytes": sum(max(0, m.send.sent_bytes) for m in messages),
                "hidden_share": hidden_ns / whole_ns if whole_ns else None,
            }
        )
    return sorted(rows, key=lambda row: (-row["sent_bytes"], row["from"], row["to"]))


def clock_figures(trace: Trace) -> list[dict[str, Any]]:
    """Return a list of dicts of JSON values, one per host in ``trace``, about the correction of the host's clock."""
    rows = []
    for host, ranks in timeline.hosts(trace.timeline).items():
        clock = trace.corrections.clocks[host]
        line = trace.timeline.lines[ranks[0]]
        bounds = [trace.timeline.bounds_ns[rank] for rank in ranks]
        finite = [bound for bound in bounds if bound is not None]
        rows.append(
            {
                "host": line.name,
                "ranks": ranks,
                "reference": host == trace.corrections.reference,
                "source": clock.source if clock.readings else "reference",
                "offset_s": clock.offset_at(trace.timeline.begin_ns) / 1e9,
                "drift_ppm": clock.drift_ppm,
                "bound_s": max(finite) / 1e9 if len(finite) == len(bounds) else None,
                "readings": len(clock.readings),
            }
        )
    return rows


MAX_SHOWN: Final = 8  # largest number of rows of a table
CLOCK_SOURCES: Final = {"measured": "round trips", "messages": "the ends of messages and collectives"}


def format_text(values: Mapping[str, Any]) -> str:
    """Return ``values``, a result of `figures`, as text for the terminal."""
    steps = steps_text(values["steps"]) if values["steps"] else "no whole step"
    lines = [
        f"{values['run']}: {steps} of {counted(len(values['ranks']), 'rank')} (of {values['world']})",
        *_path_lines(values),
        *_communication_lines(values),
        *_message_lines(values),
        *_wait_lines(values),
        *_clock_lines(values),
    ]
    lines += [f"note       {note}" for note in values["notes"]]
    return "\n".join(lines)


def _format_percent(share: float | None) -> str:
    return "not known" if share is None else f"{share:.1%}"


def _path_lines(values: Mapping[str, Any]) -> list[str]:
    took = values["critical_path_s"]
    if not took:
        return ["critical path  not known: there is no whole step"]
    middle = sorted(took)[len(took) // 2]
    lines = [f"critical path  {format_seconds(middle)} a step (median of {len(took)})"]
    shares = [
        f"rank {rank} {_format_percent(share)}"
        for rank, share in list(values["critical_path_by_rank"].items())[:MAX_SHOWN]
    ]
    lines.append(f"  by rank      {', '.join(shares)}, transfers {_format_percent(values['critical_path_transfer'])}")
    phases = values["critical_path_by_phase"].items()
    lines.append(f"  by phase     {', '.join(f'{name} {_format_percent(share)}' for name, share in phases)}")
    operations = list(values["critical_path_by_operation"].items())[:MAX_SHOWN]
    lines.append(f"  by operation {', '.join(f'{name} {_format_percent(share)}' for name, share in operations)}")
    return lines


def _communication_lines(values: Mapping[str, Any]) -> list[str]:
    ranks = values["communication"]
    if not ranks:
        return []
    lines = ["communication  in flight during computation, exposed, of that waiting for others:"]
    rows = sorted(ranks.items(), key=lambda item: -item[1]["exposed_s"])
    for rank, row in rows[:MAX_SHOWN]:
        share = "" if row["hidden_share"] is None else f" ({_format_percent(row['hidden_share'])} hidden)"
        parts = [format_seconds(row[name]) for name in ("hidden_s", "exposed_s", "waited_s")]
        lines.append(f"  rank {rank:<7} {parts[0]:>9} {parts[1]:>9} {parts[2]:>9}{share}")
    if len(rows) > MAX_SHOWN:
        lines.append(f"  and {len(rows) - MAX_SHOWN} more ranks; --json lists them")
    return lines


def _message_lines(values: Mapping[str, Any]) -> list[str]:
    rows = values["message_paths"]
    if not rows:
        return []
    lines = ["messages       and the share of their time in flight in which their receiver computed"]
    lines += [
        f"  rank {row['from']} to rank {row['to']} on {row['comm']}: {counted(row['messages'], 'message')}, "
        f"{format_bytes(row['sent_bytes'])} ({_format_percent(row['hidden_share'])} hidden)"
        for row in rows[:MAX_SHOWN]
    ]
    if len(rows) > MAX_SHOWN:
        lines.append(f"  and {len(rows) - MAX_SHOWN} more; --json lists them")
    return lines


def _wait_lines(values: Mapping[str, Any]) -> list[str]:
    waited: Sequence[Mapping[str, Any]] = values["waited_s"]
    if not values["steps"]:
        return []
    if not waited:
        return ["waits          no rank waited for another"]
    blamed = list(values["waited_for_s"].items())[:MAX_SHOWN]
    mean = f" ({format_seconds(values['wait_s_per_step'])} a step on each rank)"
    lines = [f"waited for     {', '.join(f'rank {rank} {format_seconds(s)}' for rank, s in blamed)}{mean}"]
    lines += [
        f"  rank {wait['rank']} for rank {wait['for']}: {format_seconds(wait['seconds'])}"
        for wait in waited[:MAX_SHOWN]
    ]
    lines.append("longest waits")
    lines += [
        f"  {format_seconds(wait['seconds']):>9}  rank {wait['rank']} in {wait['in']} for rank {wait['for']} "
        f"({wait['doing']})"
        for wait in values["longest_waits"]
    ]
    return lines


def _clock_lines(values: Mapping[str, Any]) -> list[str]:
    clocks = values["clocks"]
    if len(clocks) < 2:
        return ["clocks         one node: one clock"]
    order = values["order"]
    lines = [f"clocks         {counted(len(clocks), 'node')}; of {order['pairs']} causes, {order['wrong']} come late"]
    for clock in clocks[:MAX_SHOWN]:
        if clock["reference"]:
            what = "the reference"
        else:
            bound = "not known" if clock["bound_s"] is None else f"+-{format_seconds(clock['bound_s'])}"
            drift = "" if clock["drift_ppm"] is None else f", drift {clock['drift_ppm']:+.2f} ppm"
            ahead = "ahead" if clock["offset_s"] >= 0 else "behind"
            source = CLOCK_SOURCES.get(clock["source"], clock["source"])
            what = f"{format_seconds(abs(clock['offset_s']))} {ahead}, {bound}{drift}, by {source}"
        lines.append(f"  {clock['host']} ({ranks_text(clock['ranks'])}): {what}")
    if len(clocks) > MAX_SHOWN:
        lines.append(f"  and {len(clocks) - MAX_SHOWN} more nodes; --json lists them")
    return lines
