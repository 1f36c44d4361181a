"""Operation lists of one rank: pure functions that combine compute, exchange and pipeline into a step.

Overlapping the exchange with computation keeps the same bits.
"""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hpcdist.arrays.ranges import Range
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.strategies.core.operations import (
    COMPUTE,
    ENDS,
    EXCHANGED,
    USES,
    Kind,
    Operation,
    StagePlacement,
    folded,
    looped,
)
from hpcdist.strategies.schedule.passes import LETTERS, Pass, Passes, expand, spell
from hpcdist.strategies.schedule.registry import SCHEDULES, check_schedule
from hpcdist.strategies.schedule.verify import liveness

PLACEMENTS: Final = {"looped": looped, "folded": folded}
_PASSES: Final = {letter: way for way, letter in LETTERS.items()}
_TOKEN: Final = re.compile(rf"([{''.join(_PASSES)}])(\d+)(?:\.(\d+))?")
_LINE: Final = 110  # characters


@dataclass(frozen=True)
class ScheduleText:
    """Content of a pipeline schedule file: the placement of model chunks on ranks, and the passes of each rank."""

    # A file has one line of passes per rank, such as "F3.1 B3.1": forward and backward of micro-batch 3, chunk 1.
    placement: str
    chunks: int
    passes: tuple[Passes, ...]

    @property
    def splits(self) -> bool:
        """True if backward passes are split into input gradients and weight gradients."""
        return any(kind is Kind.BACKWARD_WEIGHT for steps in self.passes for kind, _, _ in steps)

    @property
    def keeps(self) -> bool:
        """True if the schedule keeps all activations until the backward pass and does not support recomputation."""
        return self.splits or self.placement == "folded"

    def place(self, parts: Sequence[range]) -> StagePlacement:
        """Return the placement of model chunks on the ranks. ``parts``: range of layers of each chunk."""
        return PLACEMENTS[self.placement](parts, len(self.passes))


def read(text: str, ranks: int, microbatches: int, name: str = "the schedule file") -> ScheduleText:
    """Parse ``text``, the content of the schedule file ``name``, and return a `ScheduleText`. Local.

    Raises ConfigurationError if the text is invalid or not for ``ranks`` ranks and ``microbatches`` micro-batches.
    """
    header: dict[str, str] = {}
    passes: list[Passes] = []
    lines: list[str] = []
    for number, line in _lines(text):
        key, equals, value = (part.strip() for part in line.partition("="))
        if equals:
            if key not in ("placement", "chunks") or key in header or passes:
                raise ConfigurationError(
                    f"{name}, line {number}: {line!r} is not allowed here; the only settings are 'placement = looped', "
                    "'placement = folded' and 'chunks = N' (N chunks per rank), each at most once and before all passes"
                )
            header[key] = value
        else:
            lines.append(f"{name}, line {number}, rank {len(passes)}")
            passes.append([_pass(token, lines[-1]) for token in line.split()])
    placement, chunks = header.get("placement", "looped"), header.get("chunks", "1")
    if placement not in PLACEMENTS or not chunks.isdecimal() or int(chunks) < 1:
        raise ConfigurationError(
            f"{name}: placement = {placement}, chunks = {chunks}; placement must be looped or folded, and chunks must "
            "be an integer of at least 1"
        )
    if placement == "folded" and chunks != "2":
        raise ConfigurationError(f"{name}: placement = folded with chunks = {chunks} is not supported; set chunks = 2")
    if len(passes) != ranks:
        raise ConfigurationError(
            f"{name} has {len(passes)} lines of passes, expected {ranks}: one line for each pipeline rank"
        )
    if int(chunks) > min(map(len, passes)):
        raise ConfigurationError(
            f"{name}: chunks = {chunks}, but the shortest line has only {min(map(len, passes))} passes. Every line "
            f"needs passes through all {chunks} chunks of its rank; reduce chunks, or add the missing passes"
        )
    schedule = ScheduleText(placement, int(chunks), tuple(passes))
    units = [range(unit, unit + 1) for unit in range(ranks * schedule.chunks)]
    try:
        liveness.prove(passes, schedule.place(units), microbatches, lines)
    except ScheduleError as error:
        raise ConfigurationError(str(error)) from error
    return schedule


def generated(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> ScheduleText:
    """Return the built-in schedule named ``schedule`` as a `ScheduleText`. Local.

    Raises ConfigurationError if the schedule does not support these numbers of ranks, micro-batches and chunks.
    """
    chunks = check_schedule(schedule, ranks, microbatches, chunks)
    row = SCHEDULES[schedule]
    passes = tuple(row.passes(rank, ranks, microbatches, chunks) for rank in range(ranks))
    return ScheduleText("folded" if row.folded else "looped", chunks, passes)


def dump(written: ScheduleText, comment: str = "") -> str:
    """Return the text of a schedule file with the schedule ``written``, preceded by the comment ``comment``.

    `dump` is the inverse of `read`.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"placement = {written.placement}", f"chunks = {written.chunks}"]
    for steps in written.passes:
        row = ""
        for token in map(spell, steps):
            if len(row) + len(token) > _LINE:
                lines.append(f"{row} \\")
                row = " "
            row += f" {token}" if row else token
        lines.append(row)
    return "\n".join(lines) + "\n"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    joined, first = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.partition("#")[0].strip()
        first = first or number
        joined += " " + line.removesuffix("\\")
        if not line.endswith("\\"):
            if joined.strip():
                yield first, joined.strip()
            joined, first = "", 0


def _pass(token: str, location: str) -> Pass:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ConfigurationError(
            f"{location}: {token!r} is not a pass; write a letter (F, B, I or W), the number of the micro-batch, a dot "
            "and the number of the local chunk, such as F3.1"
        )
    letter, microbatch, chunk = match.groups(default="0")
    return _PASSES[letter], int(microbatch), int(chunk)


def compute_operations(
    schedule: str | Sequence[Passes],
    microbatches: int,
    placement: StagePlacement,
    rank: int = 0,
    *,
    recompute: bool = False,
) -> list[Operation]:
    """Return a list of operations: all passes and messages of pipeline rank ``rank`` in one step.

    ``schedule``: name of the schedule, or the passes of each rank. ``placement``: assignment of layers to ranks.
    """
    if isinstance(schedule, str):
        chunks = len(placement.chunks) // placement.stages
        passes = SCHEDULES[schedule].passes(rank, placement.stages, microbatches, chunks)
    else:
        passes = schedule[rank]
    return expand(passes, placement, rank, recompute=recompute)


def evaluation_operations(placement: StagePlacement, rank: int = 0) -> list[Operation]:
    """Return a list of the operations with which pipeline rank ``rank`` evaluates one batch.

    ``placement``: assignment of layers to ranks.
    """
    return expand([(Kind.FORWARD, 0, chunk) for chunk in range(len(placement.of(rank)))], placement, rank)


def insert_gathers(
    steps: Sequence[Operation], needs: Mapping[int, Sequence[int]], *, keep: bool = False
) -> list[Operation]:
    """Return ``steps`` with GATHER and FREE operations around the compute operations that use sharded parameters.

    ``needs``: for each layer, the layers whose sharded parameters the layer uses when it computes.
    """
    # Parameters stay gathered from their first to their last use in a micro-batch or, with ``keep``, in the whole list:
    # fewer gathers, but more memory.
    users = Counter(unit for used in needs.values() for unit in used)
    using = [index for index, op in enumerate(steps) if op.kind in USES]
    # (unit, micro-batch, or for a unit with one user the position in ``using``) -> positions in ``using``
    uses: dict[tuple[int, int], list[int]] = {}
    for position, index in enumerate(using):
        for unit in needs[steps[index].unit]:
            span = 0 if keep else steps[index].microbatch if users[unit] > 1 else position
            uses.setdefault((unit, span), []).append(position)
    gathers: dict[int, list[int]] = {}  # operation index -> units to gather before it
    frees: dict[int, list[int]] = {}  # operation index -> units to free after it
    for unit in users:
        spans = sorted((positions[0], positions[-1]) for (used, _), positions in uses.items() if used == unit)
        end = -2
        for first, last in spans:
            if first > end + 1:
                gathers.setdefault(using[first], []).append(unit)
            else:
                frees[using[end]].remove(unit)  # used again: the unit stays
            end = max(end, last)
            frees.setdefault(using[end], []).append(unit)
    operations: list[Operation] = []
    for index, op in enumerate(steps):
        operations += [Operation(Kind.GATHER, op.microbatch, unit) for unit in sorted(gathers.get(index, ()))]
        operations.append(op)
        operations += [Operation(Kind.FREE, op.microbatch, unit) for unit in sorted(frees.get(index, ()))]
    return operations


def insert_exchange(
    steps: Sequence[Operation],
    exchange: Sequence[Operation],
    units: Mapping[int, Range],
    *,
    every_microbatch: bool = False,
) -> list[Operation]:
    """Insert the operations ``exchange``, which sum gradients and update parameters, into ``steps``. Return the result.

    ``units``: range of each layer in the flat parameter vector.
    """
    # Operations of the types `EXCHANGED` follow as soon as the gradients of their range are complete, after the last or
    # after every micro-batch. MIX_START comes first, all others last. A range with an ADD is added up over the
    # micro-batches, and reduced once.
    complete: dict[tuple[int, int], int] = {}  # (micro-batch, unit) -> index at which its gradients are complete
    for index, op in enumerate(steps):
        if op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.COPY_GRADIENT):
            complete[op.microbatch if every_microbatch else -1, op.unit] = index
    rounds = sorted({microbatch for microbatch, _ in complete})
    added = {op.range for op in exchange if op.kind is Kind.ADD}
    due: dict[int, list[Operation]] = {}
    rest = []
    first = [op for op in exchange[:1] if op.kind is Kind.MIX_START]
    for op in exchange[len(first) :]:
        if op.kind in EXCHANGED:
            touched = [unit for unit, part in units.items() if part.intersect(op.part)]
            turns = rounds[:-1] if op.kind is Kind.ADD else rounds[-1:] if op.part in added else rounds
            for microbatch in turns:
                at = max(complete[microbatch, unit] for unit in touched)
                if at + 1 < len(steps) and steps[at + 1].kind is Kind.SEND_GRADIENT:
                    at += 1  # the previous stage waits for the message, and no rank for the reduction
                due.setdefault(at, []).append(Operation(op.kind, microbatch, range=op.part))
        else:
            rest.append(op)
    operations: list[Operation] = first
    for index, op in enumerate(steps):
        operations += [op, *due.get(index, [])]
    return operations + rest


NEEDS_SUMS = (Kind.SUM_ROWS, Kind.AGREE, Kind.DIRECTION)  # kinds that come after all reductions


def overlap_reductions(
    steps: Sequence[Operation],
    units: Mapping[int, Range],
    needs: Mapping[int, Collection[int]],
    limit: int | None = None,
) -> list[Operation]:
    """Return ``steps`` with each REDUCE split into a nonblocking START and a WAIT, which comes as late as possible.

    ``units``: flat parameter range of each layer. ``limit``: maximum number of reductions in flight, or None.
    ``needs[i]``: the layers whose gradients the backward pass of layer i writes.
    """
    operations: list[Operation] = []
    in_flight: deque[Operation] = deque()

    def wait() -> None:
        operations.append(replace(in_flight.popleft(), kind=Kind.WAIT))

    for op in steps:
        if op.kind is Kind.REDUCE:
            while limit is not None and len(in_flight) >= limit:
                wait()
            op = replace(op, kind=Kind.START)
            in_flight.append(op)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            written = [units[unit] for unit in needs[op.unit] if unit in units]
            while any(part.intersect(other.range) for other in in_flight if other.range for part in written):
                wait()
        elif op.kind in NEEDS_SUMS:
            while in_flight:
                wait()
        operations.append(op)
    while in_flight:
        wait()
    return operations


def prefetch_gathers(steps: Sequence[Operation], ahead: int) -> list[Operation]:
    """Return ``steps`` with each GATHER of a layer that is freed later split into a START_GATHER and a WAIT_GATHER.

    The WAIT_GATHER replaces the GATHER. The START_GATHER comes up to ``ahead`` gathers earlier.
    """
    agreed = next((index for index, op in enumerate(steps) if op.kind is Kind.AGREE), len(steps))
    freed = {op.unit for op in steps[:agreed] if op.kind is Kind.FREE}
    if not ahead or not freed:
        return list(steps)
    waiting = deque(op for op in steps[:agreed] if op.kind is Kind.GATHER and op.unit in freed)
    operations: list[Operation] = []
    in_flight: list[Operation] = []
    resident: set[int] = set()  # units in memory or in flight

    def start() -> None:
        while waiting and len(in_flight) < ahead and waiting[0].unit not in resident:
            gather = waiting.popleft()
            resident.add(gather.unit)
            in_flight.append(gather)
            operations.append(replace(gather, kind=Kind.START_GATHER))

    for op in steps[:agreed]:
        if op.kind is Kind.GATHER and op.unit in freed:
            start()  # for the first gather, and gathers that waited for the FREE right before
            in_flight.remove(op)
            operations.append(replace(op, kind=Kind.WAIT_GATHER))
            start()
        else:
            operations.append(op)
            if op.kind is Kind.FREE:
                resident.discard(op.unit)
                start()
    return operations + list(steps[agreed:])


def insert_polls(steps: Sequence[Operation]) -> list[Operation]:
    """Return ``steps`` with a POLL after each compute operation during which communication is in flight."""
    operations: list[Operation] = []
    in_flight = sum(op.kind is Kind.SETTLE for op in steps)  # from the previous step
    for op in steps:
        operations.append(op)
        in_flight += (op.kind in ENDS) - (op.kind in ENDS.values())
        if in_flight and op.kind in COMPUTE:
            operations.append(Operation(Kind.POLL))
    return operations
