"""The trace of a run: which files become which steps of which ranks, and what they tell, as plain figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hpcdist.errors import StorageError, UsageError
from hpcdist.telemetry import clocks, corrections, critical, matching, ranklog, timeline
from hpcdist.telemetry.corrections import Corrections
from hpcdist.telemetry.critical import Gap, Link, Overlap
from hpcdist.telemetry.ranklog import Logs, RankLog, ranks_text, steps_text
from hpcdist.telemetry.timeline import Piece, Timeline

LAST: Final = 20  # steps, where none are asked for
MOST: Final = 250_000  # spans and calls: with arrows a file has 100 MB then, and viewers still take it


@dataclass(frozen=True)
class StepPath:
    """The critical path of one step, from the first thing on it to the end of the step on its last rank."""

    step: int
    links: tuple[Link, ...]

    @property
    def took_ns(self) -> int:
        """Its length."""
        return self.links[-1].end_ns - self.links[0].begin_ns if self.links else 0


@dataclass(frozen=True)
class Trace:
    """Everything that is known of some steps of a run."""

    run_dir: Path
    world: int
    timeline: Timeline
    corrections: Corrections
    pieces: Mapping[int, Sequence[Piece]]
    paths: tuple[StepPath, ...]
    overlaps: Mapping[int, Overlap]
    gaps: tuple[Gap, ...]  # the longest waits
    notes: tuple[str, ...]

    @property
    def waits(self) -> dict[tuple[int, int], int]:
        """Who waited for whom, in ns."""
        return critical.waits(self.pieces)


def collect(run_dir: Path, steps: range | None = None, ranks: Sequence[int] | None = None, most: int = MOST) -> Trace:
    """Read the run in ``run_dir``: its ``steps`` (None: the last ones that all ranks have) on ``ranks`` (None: all).

    At most ``most`` spans and calls are taken. Raises UsageError where there are no such steps or ranks, StorageError
    where no file can be read.
    """
    logs = ranklog.load(run_dir)
    notes = list(logs.notes)
    matches = matching.match(logs.ranks, logs.world)
    found = corrections.find(logs.ranks, _sessions(run_dir, notes), matches)
    chosen = _of_ranks(logs, ranks)
    numbers, said = ranklog.chosen_steps(list(chosen.values()), steps, LAST)
    notes += [*said, *found.notes]
    numbers, chosen = _bounded(chosen, numbers, most, notes)
    tail = steps is None and not all(log.ended for log in chosen.values())
    if tail and numbers:
        notes.append(f"the run did not end: what came after {steps_text(numbers[-1:])} is shown, too")
    # The others are needed for who was waited for, and are left out of what is shown.
    whole = timeline.build(logs.ranks if numbers else chosen, numbers, matches, found, tail=tail)
    cut = timeline.pieces(whole)
    shown = timeline.select(whole, chosen)
    notes += _clock_notes(whole)
    paths = tuple(StepPath(step, tuple(_path(whole, cut, step))) for step in numbers)
    transfers = _transfers(whole)
    overlaps = {rank: critical.overlap(row, transfers.get(rank, ())) for rank, row in cut.items() if rank in chosen}
    gaps = tuple(critical.gaps(cut, chosen))
    own = {rank: row for rank, row in cut.items() if rank in chosen}
    return Trace(run_dir, logs.world, shown, found, own, paths, overlaps, gaps, tuple(notes))


def _sessions(run_dir: Path, notes: list[str]) -> tuple[clocks.Session, ...]:
    path = run_dir / "metrics.h5"
    if not path.exists():
        return ()
    try:
        return clocks.read(path)
    except StorageError as error:
        notes.append(f"without measured clocks: {error}")
        return ()


def _of_ranks(logs: Logs, ranks: Sequence[int] | None) -> dict[int, RankLog]:
    if ranks is None:
        return dict(logs.ranks)
    missing = [rank for rank in ranks if rank not in logs.ranks]
    if missing:
        raise UsageError(
            f"{ranks_text(missing)}: no record; the run has {ranks_text(sorted(logs.ranks))} of {logs.world}"
        )
    return {rank: logs.ranks[rank] for rank in sorted(set(ranks))}


def _bounded(
    logs: dict[int, RankLog], steps: tuple[int, ...], most: int, notes: list[str]
) -> tuple[tuple[int, ...], dict[int, RankLog]]:
    """Return fewer steps, then fewer ranks, where there is too much to show."""
    before, there = steps, sum(_size(log, steps) for log in logs.values())
    while there > most and len(steps) > 1:
        steps = steps[-max(1, min(len(steps) - 1, len(steps) * most // there)) :]
        there = sum(_size(log, steps) for log in logs.values())
    if len(steps) < len(before):
        notes.append(
            f"only {steps_text(steps)} of {steps_text(before)}: more than {most} spans and calls are too many for a "
            "viewer; choose with --steps or --ranks"
        )
    if there > most:
        kept: dict[int, RankLog] = {}
        room = most
        for rank, log in logs.items():
            room -= _size(log, steps)
            if room < 0 and kept:
                break
            kept[rank] = log
        notes.append(f"only {ranks_text(sorted(kept))}: more than {most} spans and calls are too many for a viewer")
        logs = kept
    return steps, logs


def _size(log: RankLog, steps: Sequence[int]) -> int:
    there = [log.steps[step] for step in steps if step in log.steps]
    if not there:
        return len(log.spans) + len(log.calls)
    begin, end = there[0][0], there[-1][1]
    spans = sum(begin <= span.begin_ns < end for span in log.spans)
    return spans + sum(begin <= call.begin_ns < end for call in log.calls)


def _clock_notes(whole: Timeline) -> list[str]:
    notes = []
    if whole.order.wrong:
        notes.append(f"clocks: {whole.order}")
    if unmatched := whole.matches.unmatched:
        notes.append(f"of {unmatched} sends and receives it cannot be told where they belong: no arrows for them")
    return notes


def _path(whole: Timeline, cut: Mapping[int, Sequence[Piece]], step: int) -> list[Link]:
    own = {
        rank: timeline.in_step(cut[rank], *line.steps[step])
        for rank, line in whole.lines.items()
        if rank in cut and step in line.steps
    }
    return critical.critical_path(own)


def _transfers(whole: Timeline) -> dict[int, list[tuple[int, int]]]:
    """Return by rank when something was on its way to it or from it: not while somebody had not come yet."""
    found: dict[int, list[tuple[int, int]]] = {rank: [] for rank in whole.lines}
    for message in whole.matches.messages:
        send, receive = message.send, message.receive
        found[receive.rank].append((max(send.begin_ns, receive.begin_ns), receive.end_ns))
        found[send.rank].append((send.begin_ns, min(receive.end_ns, send.end_ns)))
    for meeting in whole.matches.meetings:
        last = meeting.released_by()
        for call in meeting.calls:
            begin = call.begin_ns if last is None else max(call.begin_ns, last.begin_ns)
            found[call.rank].append((begin, call.end_ns))
    return found


def only(trace: Trace, step: int) -> Trace:
    """Return what is known of one of the steps. Raises UsageError where it is not among them."""
    if step not in trace.timeline.steps:
        raise UsageError(f"step {step} is not in the trace, which has {steps_text(trace.timeline.steps) or 'no steps'}")
    lines = {}
    for rank, line in trace.timeline.lines.items():
        if step in line.steps:
            begin, end = line.steps[step]
            spans = tuple(one for one in line.spans if one.begin_ns < end and one.end_ns > begin)
            calls = tuple(one for one in line.calls if one.begin_ns < end and one.end_ns > begin)
            lines[rank] = replace(line, spans=spans, calls=calls, steps={step: (begin, end)})
    cut = {rank: timeline.in_step(trace.pieces[rank], *line.steps[step]) for rank, line in lines.items()}
    paths = tuple(path for path in trace.paths if path.step == step)
    return replace(trace, timeline=replace(trace.timeline, lines=lines, steps=(step,)), pieces=cut, paths=paths)


def figures(trace: Trace) -> dict[str, Any]:
    """Return what the trace tells, as JSON values; seconds, None for what is not known."""
    links = [link for path in trace.paths for link in path.links]
    of_rank, of_phase, of_name = critical.shares(links)
    whole = sum(of_rank.values())
    waited = trace.waits
    steps = len(trace.paths)
    return {
        "run": str(trace.run_dir),
        "world": trace.world,
        "ranks": sorted(trace.timeline.lines),
        "steps": list(trace.timeline.steps),
        "critical_path_s": [path.took_ns / 1e9 for path in trace.paths],
        "critical_path_by_rank": {rank: ns / whole for rank, ns in of_rank.most_common() if rank >= 0},
        "critical_path_transfer": of_rank[-1] / whole if whole else None,
        "critical_path_by_phase": {name: ns / whole for name, ns in of_phase.most_common()},
        "critical_path_by_operation": {name: ns / whole for name, ns in of_name.most_common()},
        "communication": {
            rank: {
                "hidden_s": one.hidden_ns / 1e9,
                "exposed_s": one.exposed_ns / 1e9,
                "waited_s": one.waited_ns / 1e9,
                "hidden_share": one.hidden_share,
            }
            for rank, one in trace.overlaps.items()
        },
        "waited_s": [{"rank": rank, "for": by, "seconds": ns / 1e9} for (rank, by), ns in _largest(waited)],
        "waited_for_s": {rank: ns / 1e9 for rank, ns in critical.by_culprit(waited).items()},
        "longest_waits": [
            {"rank": gap.rank, "for": gap.by, "in": gap.name, "doing": gap.doing, "seconds": gap.waited_ns / 1e9}
            for gap in trace.gaps
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


def clock_figures(trace: Trace) -> list[dict[str, Any]]:
    """Return how the clock of each host was put right, as JSON values."""
    found = []
    for host, ranks in timeline.hosts(trace.timeline).items():
        clock = trace.corrections.clocks[host]
        line = trace.timeline.lines[ranks[0]]
        bounds = [trace.timeline.bounds_ns[rank] for rank in ranks]
        known = [bound for bound in bounds if bound is not None]
        found.append(
            {
                "host": line.name,
                "ranks": ranks,
                "reference": host == trace.corrections.reference,
                "source": clock.source if clock.readings else "reference",
                "offset_s": clock.offset_at(trace.timeline.begin_ns) / 1e9,
                "drift_ppm": clock.drift_ppm,
                "bound_s": max(known) / 1e9 if len(known) == len(bounds) else None,
                "readings": len(clock.readings),
            }
        )
    return found


def _largest(waited: Mapping[tuple[int, int], int], most: int = 20) -> list[tuple[tuple[int, int], int]]:
    return sorted(waited.items(), key=lambda pair: (-pair[1], pair[0]))[:most]
