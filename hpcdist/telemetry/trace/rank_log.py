"""Rank logs: steps, spans and calls of each rank from the files in ``recorder/``, by its node's clock."""

import re
import struct
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hpcdist.comm.record import flight_recorder
from hpcdist.comm.record import spans as record_spans
from hpcdist.comm.record.flight_recorder import CommunicatorCall, RankRecord
from hpcdist.comm.record.spans import RankSpans, Span
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting.units import format_ranges

_NO_SPANS: Final = "the run had telemetry.trace = false, or an earlier version made it"
NO_STEP: Final = -1
_UPTIME_NS: Final = 10 * 365 * 86_400_000_000_000
_MOST_RANKS: Final = 1 << 22
_TOGETHER_NS: Final = 60_000_000_000
_BOUNDARY_NS: Final = 1_000_000_000  # a longer gap after a step separates lives of a job
_NONBLOCKING: Final = re.compile("(^|_)i(send|recv|allreduce|reduce_scatter|all_gather)$")
_METRICS: Final = re.compile(r"/rows[\d.]*$")  # communicators of metrics, on which no rank waits
_IN_THREADS: Final = re.compile("/(background|torch)")  # communicators whose calls run in threads


@dataclass(frozen=True, slots=True)
class RecordedCall(CommunicatorCall):
    """Recorded communication call of a rank. The begin and end times are in ns of the same clock."""

    rank: int
    step: int  # in which the call began, or `NO_STEP`
    begin_ns: int
    end_ns: int
    is_open: bool = False  # not ended at the last heartbeat, at ``end_ns``

    @property
    def is_asynchronous(self) -> bool:
        """True if the rank can do other work during the call, which is nonblocking or in a background thread."""
        return bool(_NONBLOCKING.search(self.op) or _IN_THREADS.search(self.comm))


@dataclass(frozen=True)
class RankLog:
    """Log of one rank: time spans, communication calls and steps, in ns of the monotonic clock of the rank's host."""

    rank: int
    world: int
    host: str  # boot id or name
    name: str
    wall_ns: int  # wall-clock time minus monotonic time
    spans: tuple[Span, ...] = ()
    calls: tuple[RecordedCall, ...] = ()
    steps: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # begin and end of each step
    covered_ns: int = 0  # calls before this time may be missing
    ended: bool = False  # True if the rank finished without an error

    @property
    def comms(self) -> frozenset[str]:
        """Set of the names of the communicators that this rank used."""
        return frozenset(call.comm for call in self.calls)


@dataclass(frozen=True)
class RankLogs:
    """Logs of a run by rank, and notes for the user about missing or skipped files."""

    world: int
    ranks: Mapping[int, RankLog]
    notes: tuple[str, ...]


def load(run_dir: Path) -> RankLogs:
    """Read the record files of a run, and skip damaged files. Raises UsageError or StorageError if no file remains."""
    folder = run_dir / "recorder" if (run_dir / "recorder").is_dir() else run_dir
    paths = sorted([*folder.glob("rank-*.spans"), *folder.glob("rank-*.rec")])
    if not paths:
        raise UsageError(f"{run_dir} has no record files (recorder/rank-*.spans, *.rec); give the directory of a run")
    notes: list[str] = []
    spans: dict[int, RankSpans] = {}
    records: dict[int, RankRecord] = {}
    for path in paths:
        try:
            if path.suffix == ".spans":
                read = record_spans.read(path)
                spans[_own_rank(read)] = read
            else:
                record = flight_recorder.read(path)
                records[_own_rank(record)] = record
        except StorageError as error:
            notes.append(f"left out: {error}")
        except (ValueError, LookupError, struct.error) as error:  # invalid texts or numbers
            notes.append(f"left out: {path} is damaged: {error!r}")
    if not spans and not records:
        raise StorageError(f"{run_dir}: none of its {len(paths)} record files can be read: {notes[0]}")
    _, world = max([(s.wall_ns, s.world) for s in spans.values()] + [(r.started_ns, r.world) for r in records.values()])
    # A larger, earlier run may have left other files.
    logs = {rank: rank_log(spans.get(rank), records.get(rank)) for rank in sorted({*spans, *records}) if rank < world}
    notes += _missing(world, logs, spans, records)
    return RankLogs(world, logs, tuple(notes))


def _own_rank(contents: RankSpans | RankRecord) -> int:
    if not contents.rank < contents.world <= _MOST_RANKS:
        raise StorageError(
            f"{contents.path} is damaged: its header says rank {contents.rank} of {contents.world} ranks, which is out "
            "of range; delete the file"
        )
    return contents.rank


def _missing(world: int, logs: Collection[int], spans: Collection[int], records: Collection[int]) -> list[str]:
    notes = []
    for what, there in (("record", logs), ("messages", records), ("spans", spans)):
        lacking = [rank for rank in range(world) if rank not in there and (what == "record" or rank in logs)]
        if lacking and len(lacking) < world:
            notes.append(f"no {what} of {ranks_text(lacking)}")
    if not spans:
        notes.append(f"no spans: {_NO_SPANS}; only its messages are known")
    if not records:
        notes.append("no flight recorder: only what ranks did is known, not their messages")
    return notes


def rank_log(spans: RankSpans | None, record: RankRecord | None) -> RankLog:
    """Build the log of a rank from its time ``spans``, its ``record`` of communication calls, or both. Local."""
    if spans is not None and record is not None and abs(record.started_ns - spans.wall_ns) > _TOGETHER_NS:
        # Both files of a start are created together: one is from an earlier start, and the newer one is used.
        spans, record = (None, record) if record.started_ns > spans.wall_ns else (spans, None)
    steps = {} if spans is None else _steps(spans.spans)
    calls: tuple[RecordedCall, ...] = ()
    covered, ended = 0, False
    if record is not None:
        calls = _calls(record, steps)
        wrapped = bool(record.events) and record.events[0].index > 1
        covered = calls[0].begin_ns if wrapped else 0
        ended = "finished" in record.notes
    if spans is None:
        assert record is not None
        return RankLog(
            record.rank, record.world, record.host, record.host, record.clock_ns, (), calls, {}, covered, ended
        )
    valid_spans = tuple(span for span in spans.spans if span.phase != "step" and _is_sound(span.begin_ns, span.end_ns))
    wall = spans.wall_ns - spans.monotonic_ns
    return RankLog(spans.rank, spans.world, spans.boot_id, spans.host, wall, valid_spans, calls, steps, covered, ended)


def _is_sound(begin_ns: int, end_ns: int) -> bool:
    # Damaged files contain impossible times.
    return 0 <= begin_ns <= end_ns < _UPTIME_NS


def _steps(spans: Sequence[Span]) -> dict[int, tuple[int, int]]:
    bounds: dict[int, tuple[int, int]] = {}
    before = NO_STEP
    for span in spans:
        begin, end = span.begin_ns, span.end_ns
        if span.phase != "step" or not _is_sound(begin, end):
            continue
        if before in bounds and before == span.step - 1 and begin - bounds[before][1] < _BOUNDARY_NS:
            # A step ends when the next step begins.
            begin = max(bounds[before][0], min(begin, bounds[before][1]))
            bounds[before] = bounds[before][0], begin
        bounds[span.step] = begin, max(begin, end)
        before = span.step
    return bounds


def _calls(record: RankRecord, steps: Mapping[int, tuple[int, int]]) -> tuple[RecordedCall, ...]:
    ordered = sorted((begin, end, step) for step, (begin, end) in steps.items())
    begins = [begin for begin, _, _ in ordered]
    clock, last = record.clock_ns, record.last_sign_ns
    calls = []
    for event in record.events:
        if _METRICS.search(event.comm):
            continue
        begin = event.started_ns - clock
        place = bisect_right(begins, begin) - 1
        step = ordered[place][2] if place >= 0 and begin < ordered[place][1] else NO_STEP
        is_open = event.ended_ns is None
        end = (last if event.ended_ns is None else event.ended_ns) - clock
        if not _is_sound(begin, begin if is_open else end):
            continue
        calls.append(
            RecordedCall(
                event.comm, event.op, event.dtype, event.count, event.sent_bytes, event.peer, event.tag, event.sequence,
                event.site, record.rank, step, begin, max(begin, end), is_open,
            )
        )  # fmt: skip
    return tuple(calls)


def select_steps(logs: Sequence[RankLog], requested: range | None, last: int) -> tuple[tuple[int, ...], list[str]]:
    """Return a pair: the recorded steps in ``requested`` (None: the ``last`` steps), and notes. Raises UsageError."""
    stepping = [log for log in logs if log.steps]
    if not stepping:
        if requested is not None:
            raise UsageError(f"the records contain no steps, because {_NO_SPANS}; remove the option --steps")
        return (), []
    common = sorted(set.intersection(*(set(log.steps) for log in stepping)))
    if not common:
        return (), ["no step is known of all ranks: the last operations of each rank are shown"]
    notes = []
    if requested is not None:
        chosen = [step for step in common if step in requested]
        if not chosen:
            raise UsageError(
                f"steps {requested.start} to {requested.stop - 1} are not recorded on all ranks; records keep only the "
                f"last steps of a run, so choose from steps {common[0]} to {common[-1]}"
            )
        if len(chosen) < len(requested):
            notes.append(
                f"of the steps {requested.start} to {requested.stop - 1}, {len(chosen)} are still in the records"
            )
    else:
        complete_steps = [step for step in common if all(log.steps[step][0] >= log.covered_ns for log in stepping)]
        chosen = (complete_steps or common[-1:])[-last:]
    partly = [step for step in chosen if any(log.steps[step][0] < log.covered_ns for log in stepping)]
    if partly:
        notes.append(f"the messages of {steps_text(partly)} are no longer all in the records")
    return tuple(chosen), notes


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers as "rank 3", or "ranks 0-3, 7"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(sorted(ranks), ', ')}"


def steps_text(steps: Sequence[int]) -> str:
    """Format step numbers as "step 3", or "steps 5-24"."""
    return f"step{'s' if len(steps) > 1 else ''} {format_ranges(sorted(steps), ', ')}"
