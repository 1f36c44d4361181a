"""Operation lists of one rank: pure functions that put compute, exchange and pipeline together into its step.

`compute_operations` expands the passes of a schedule, `insert_gathers` and `insert_exchange` add the operations of an
exchange. `overlap_reductions`, `prefetch_gathers` and `insert_polls` rewrite a list so that exchanges go on behind
the computation. What is started is waited for in the same order, so that a list without these passes and one with
them exchange the same buffers in the same order, and end with the same bits.

`ScheduleText` is a schedule that a user writes, one line of passes for each rank (F3.1 B3.1 ...): `read` parses and
proves it, `dump` writes it, `generated` makes it of a built-in schedule.
"""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hpcdist.arrays.ranges import Range
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.strategies.schedule.generate.passes import LETTERS, Pass, Passes, expand, spell
from hpcdist.strategies.schedule.generate.registry import SCHEDULES, check_schedule
from hpcdist.strategies.schedule.operations import (
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
from hpcdist.strategies.schedule.verify import liveness

PLACEMENTS: Final = {"looped": looped, "folded": folded}
_PASSES: Final = {letter: way for way, letter in LETTERS.items()}
_TOKEN: Final = re.compile(rf"([{''.join(_PASSES)}])(\d+)(?:\.(\d+))?")
_LINE: Final = 110  # characters


@dataclass(frozen=True)
class ScheduleText:
    """Content of a schedule file: the name of its placement, the chunks of each rank, and its passes."""

    placement: str
    chunks: int
    passes: tuple[Passes, ...]

    @property
    def splits(self) -> bool:
        """Whether a backward is done in two passes."""
        return any(way is Kind.BACKWARD_WEIGHT for steps in self.passes for way, _, _ in steps)

    @property
    def keeps(self) -> bool:
        """Whether activations have to stay: for a second pass, or as the input of a neighbouring chunk."""
        return self.splits or self.placement == "folded"

    def place(self, parts: Sequence[range]) -> StagePlacement:
        """Return the placement of ``parts`` of consecutive units, `chunks` for each rank."""
        return PLACEMENTS[self.placement](parts, len(self.passes))


def read(text: str, ranks: int, microbatches: int, name: str = "the schedule file") -> ScheduleText:
    """Return the schedule in ``text``, the contents of the file ``name`` (local).

    Raises ConfigurationError, with line, rank and token, where it is not one of ``ranks`` and ``microbatches``.
    """
    header: dict[str, str] = {}
    passes: list[Passes] = []
    lines: list[str] = []
    for number, line in _lines(text):
        key, equals, value = (part.strip() for part in line.partition("="))
        if equals:
            if key not in ("placement", "chunks") or key in header or passes:
                raise ConfigurationError(
                    f"{name}, line {number}: {line!r}; before the ranks, and once each, come placement = looped or "
                    "folded, and chunks = their number on every rank"
                )
            header[key] = value
        else:
            lines.append(f"{name}, line {number}, rank {len(passes)}")
            passes.append([_pass(token, lines[-1]) for token in line.split()])
    placement, chunks = header.get("placement", "looped"), header.get("chunks", "1")
    if placement not in PLACEMENTS or not chunks.isdecimal() or int(chunks) < 1:
        raise ConfigurationError(
            f"{name}: placement = {placement}, chunks = {chunks}; the first is looped or folded, the second 1 or more"
        )
    if placement == "folded" and chunks != "2":
        raise ConfigurationError(
            f"{name}: placement = folded with chunks = {chunks}; forth and back is 2 on every rank"
        )
    if len(passes) != ranks:
        raise ConfigurationError(f"{name} has the passes of {len(passes)} ranks, one a line; the pipeline has {ranks}")
    if int(chunks) > min(map(len, passes)):
        raise ConfigurationError(
            f"{name}: chunks = {chunks}, more than the {min(map(len, passes))} passes of a rank; every micro-batch "
            "goes through each of them"
        )
    schedule = ScheduleText(placement, int(chunks), tuple(passes))
    units = [range(unit, unit + 1) for unit in range(ranks * schedule.chunks)]
    try:
        liveness.prove(passes, schedule.place(units), microbatches, lines)
    except ScheduleError as error:
        raise ConfigurationError(str(error)) from error  # whoever wrote the file can change it
    return schedule


def generated(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> ScheduleText:
    """Return one of `SCHEDULES` as a schedule text (local). Raises ConfigurationError where it cannot run so."""
    chunks = check_schedule(schedule, ranks, microbatches, chunks)
    row = SCHEDULES[schedule]
    passes = tuple(row.passes(rank, ranks, microbatches, chunks) for rank in range(ranks))
    return ScheduleText("folded" if row.folded else "looped", chunks, passes)


def dump(written: ScheduleText, comment: str = "") -> str:
    """Return the text that `read` takes back."""
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
    """Yield (number of its first line, line) of all non-empty lines, continued ones joined."""
    begun, first = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.partition("#")[0].strip()
        first = first or number
        begun += " " + line.removesuffix("\\")
        if not line.endswith("\\"):
            if begun.strip():
                yield first, begun.strip()
            begun, first = "", 0


def _pass(token: str, where: str) -> Pass:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ConfigurationError(
            f"{where}: {token!r} is no pass; one is F, B, I or W, a micro-batch and a chunk of the rank, as F3.1"
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
    """Return the compute operations of ``rank`` in the pipeline, and its messages to the others.

    ``schedule`` is one of `SCHEDULES`, or has the passes of every rank, as a file of them has.
    """
    if isinstance(schedule, str):
        chunks = len(placement.chunks) // placement.stages
        passes = SCHEDULES[schedule].passes(rank, placement.stages, microbatches, chunks)
    else:
        passes = schedule[rank]
    return expand(passes, placement, rank, recompute=recompute)


def evaluation_operations(placement: StagePlacement, rank: int = 0) -> list[Operation]:
    """Return the operations that evaluate one batch, as micro-batch 0."""
    return expand([(Kind.FORWARD, 0, chunk) for chunk in range(len(placement.of(rank)))], placement, rank)


def insert_gathers(
    steps: Sequence[Operation], needs: Mapping[int, Sequence[int]], *, keep: bool = False
) -> list[Operation]:
    """Put GATHER and FREE around the compute operations of ``steps`` that use parameters.

    ``needs`` maps each unit to the units whose parameters it uses, itself included. A unit that only it uses is
    gathered before each of its operations and freed behind it, unless the next one is its own again, as the backward of
    the last unit of a model: 2 m gathers a step, up to 3 m with a second forward, for m micro-batches, and memory for
    one unit. One that several use stays from the first of them in a micro-batch to the last, and on to the last of
    every micro-batch that begins before. With ``keep`` each unit stays from its first use in the list to its last: 1
    gather, memory for all of them.
    """
    users = Counter(unit for used in needs.values() for unit in used)
    using = [index for index, op in enumerate(steps) if op.kind in USES]
    # (unit, micro-batch, or where it has one user only its place in ``using``) -> where in ``using``
    uses: dict[tuple[int, int], list[int]] = {}
    for place, index in enumerate(using):
        for unit in needs[steps[index].unit]:
            span = 0 if keep else steps[index].microbatch if users[unit] > 1 else place
            uses.setdefault((unit, span), []).append(place)
    gathers: dict[int, list[int]] = {}  # before which operation -> units
    frees: dict[int, list[int]] = {}  # behind which operation -> units
    for unit in users:
        spans = sorted((where[0], where[-1]) for (used, _), where in uses.items() if used == unit)
        end = -2
        for first, last in spans:
            if first > end + 1:
                gathers.setdefault(using[first], []).append(unit)
            else:
                frees[using[end]].remove(unit)  # still there, or needed again at once: it stays
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
    """Put the operations of an exchange among ``steps``, those of `EXCHANGED` as early as their gradients are complete.

    The gradients of a range are complete after the last BACKWARD or BACKWARD_WEIGHT, and COPY_GRADIENT, of every unit
    that the range touches; ``units`` maps unit to range. With ``every_microbatch`` they are reduced after the backward
    of each micro-batch; where ``exchange`` has an ADD of the range, they are added up after all but the last, and then
    reduced. That cannot be where a backward is split and its halves lie apart (`verify` refuses it): the first ones of
    later micro-batches would write among what is reduced. All other operations follow in their order behind the last of
    ``steps``, but for a MIX_START at the beginning of ``exchange``, which stays at the beginning.
    """
    complete: dict[tuple[int, int], int] = {}  # (micro-batch, unit) -> where its gradients are complete
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
                    at += 1  # the previous stage waits for it, nobody for the reduction
                due.setdefault(at, []).append(Operation(op.kind, microbatch, range=op.part))
        else:
            rest.append(op)
    operations: list[Operation] = first
    for index, op in enumerate(steps):
        operations += [op, *due.get(index, [])]
    return operations + rest


NEEDS_SUMS = (Kind.SUM_ROWS, Kind.AGREE, Kind.DIRECTION)  # come behind all reductions


def overlap_reductions(
    steps: Sequence[Operation],
    units: Mapping[int, Range],
    needs: Mapping[int, Collection[int]],
    most: int | None = None,
) -> list[Operation]:
    """Turn each REDUCE of ``steps`` into a START in its place and a WAIT as late as can be.

    That is before SUM_ROWS and AGREE, or before a BACKWARD writes again where something is under way: ``units`` are the
    ranges of this rank, and ``needs`` maps each unit to those whose gradients its backward adds to. With ``most`` there
    are never more under way: where whole gradients are freed by WAIT, this bounds their memory to that of one more.
    """
    operations: list[Operation] = []
    under_way: deque[Operation] = deque()

    def wait() -> None:
        operations.append(replace(under_way.popleft(), kind=Kind.WAIT))

    for op in steps:
        if op.kind is Kind.REDUCE:
            while most is not None and len(under_way) >= most:
                wait()
            op = replace(op, kind=Kind.START)
            under_way.append(op)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            written = [units[unit] for unit in needs[op.unit] if unit in units]
            while any(part.intersect(other.range) for other in under_way if other.range for part in written):
                wait()
        elif op.kind in NEEDS_SUMS:
            while under_way:
                wait()
        operations.append(op)
    while under_way:
        wait()
    return operations


def prefetch_gathers(steps: Sequence[Operation], ahead: int) -> list[Operation]:
    """Turn each GATHER of a unit that is freed again into a START_GATHER and, in its place, a WAIT_GATHER.

    A gather starts as soon as the one ``ahead`` of it in the list has been waited for, so that at most ``ahead`` are
    under way, and as many more units in memory; but not before the same unit was freed, and not before the parameters
    are new (behind AGREE no gather moves). 0 leaves the list as it is.
    """
    agreed = next((index for index, op in enumerate(steps) if op.kind is Kind.AGREE), len(steps))
    freed = {op.unit for op in steps[:agreed] if op.kind is Kind.FREE}
    if not ahead or not freed:
        return list(steps)
    waiting = deque(op for op in steps[:agreed] if op.kind is Kind.GATHER and op.unit in freed)
    operations: list[Operation] = []
    under_way: list[Operation] = []
    there: set[int] = set()  # units in memory, or on their way there

    def start() -> None:
        while waiting and len(under_way) < ahead and waiting[0].unit not in there:
            gather = waiting.popleft()
            there.add(gather.unit)
            under_way.append(gather)
            operations.append(replace(gather, kind=Kind.START_GATHER))

    for op in steps[:agreed]:
        if op.kind is Kind.GATHER and op.unit in freed:
            start()  # the first of all, and those that had to wait for a FREE right before
            under_way.remove(op)
            operations.append(replace(op, kind=Kind.WAIT_GATHER))
            start()
        else:
            operations.append(op)
            if op.kind is Kind.FREE:
                there.discard(op.unit)
                start()
    return operations + list(steps[agreed:])


def insert_polls(steps: Sequence[Operation]) -> list[Operation]:
    """Put POLL behind each operation that computes while something is under way that was started."""
    operations: list[Operation] = []
    under_way = sum(op.kind is Kind.SETTLE for op in steps)  # from the step before
    for op in steps:
        operations.append(op)
        under_way += (op.kind in ENDS) - (op.kind in ENDS.values())
        if under_way and op.kind in COMPUTE:
            operations.append(Operation(Kind.POLL))
    return operations
