"""Whole steps as lists, for any schedule under any exchange, and their results: names instead of numbers.


`build` makes the lists as the trainer does. `perform` runs them by independent rules without the verifier: a rank may
only read values that exist, and the new value of a parameter is the set of all its contributions. Two steps that end
with the same values are the same step.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcdist.arrays.ranges import Range, cut, split
from hpcdist.strategies.core.grid import ProcessGrid, ShardingDegrees
from hpcdist.strategies.core.operations import Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.operation_list import compute_operations, insert_exchange, insert_gathers
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.strategies.schedule.verify.proof import Proof, verify

UNIT = 24  # elements of a unit: not a multiple of the cuts
# exchange -> (units are gathered and freed, and stay to the end of the step, gradients are added up first)
EXCHANGES = {
    "allreduce": (False, False, True),
    "zero1": (False, False, True),
    "zero2": (False, False, False),
    "zero3": (True, False, False),
    "zero3 keep_gradients": (True, False, True),
    "zero3 keep_parameters": (True, True, False),
    "zero3 keep both": (True, True, True),
}


@dataclass
class Step:
    """The lists of all ranks, and the data for their verification."""

    grid: ProcessGrid
    microbatches: int
    placement: StagePlacement
    accumulates: bool
    degrees: ShardingDegrees | None
    lists: list[list[Operation]] = field(default_factory=list)

    @property
    def units(self) -> dict[int, Range]:
        return {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in self.placement.units}

    def verify(self) -> Proof:
        return verify(
            self.lists,
            grid=self.grid,
            units=self.units,
            microbatches=self.microbatches,
            accumulates=self.accumulates,
            degrees=self.degrees,
            placement=self.placement,
        )


def is_supported(schedule: str, exchange: str) -> bool:
    """Return True if the exchange supports the schedule. W may not be late if micro-batches are reduced one by one."""
    return EXCHANGES[exchange][2] or not SCHEDULES[schedule].splits


def build(
    schedule: str, exchange: str, ranks: int, microbatches: int, chunks: int, data: int = 2, each: int = 1
) -> Step:
    """Return the step of ``ranks`` x ``data``, with ``each`` units in a chunk."""
    parts = [range(each * number, each * (number + 1)) for number in range(ranks * chunks)]
    placement = SCHEDULES[schedule].place(parts, ranks)
    gathers, keep, accumulates = EXCHANGES[exchange]
    degrees = None
    if exchange != "allreduce":
        degrees = ShardingDegrees(data if gathers else 1, 1 if accumulates else data, data)
    step = Step(ProcessGrid(data=data, pipeline=ranks), microbatches, placement, accumulates, degrees)
    for rank in range(step.grid.size):
        place = step.grid.coordinates(rank)
        local_values = {unit: step.units[unit] for chunk in placement.of(place["pipeline"]) for unit in chunk}
        steps = compute_operations(schedule, microbatches, placement, place["pipeline"])
        if gathers:
            steps = insert_gathers(steps, {unit: [unit] for unit in local_values}, keep=keep)
        plan = _plan(exchange, list(local_values.values()), data, place["data"])
        step.lists.append(insert_exchange(steps, plan, local_values, every_microbatch=not accumulates))
    return step


def _plan(exchange: str, units: Sequence[Range], data: int, number: int) -> list[Operation]:
    if exchange == "allreduce":  # buckets that do not end where units end
        cuts = list(units)
        reduces = [bucket for part in reversed(_merged(units)) for bucket in reversed(list(cut(part, UNIT * 3 // 2)))]
    else:
        cuts = [split(part.size, data, 8)[number].shift(part.start) for part in units]
        reduces = list(reversed(units))
    update = [Operation(kind, range=part) for kind in (Kind.DIRECTION, Kind.APPLY) for part in cuts if part]
    half = len(update) // 2
    plan = [Operation(Kind.REDUCE, range=part) for part in reduces]
    plan += [Operation(Kind.AGREE), *update[:half], Operation(Kind.NORMS), *update[half:]]
    if exchange in ("zero1", "zero2"):
        plan += [Operation(Kind.GATHER, unit=part.start // UNIT) for part in units]
    return plan


def _merged(units: Sequence[Range]) -> list[Range]:
    result: list[Range] = []
    for part in units:
        if result and result[-1].stop == part.start:
            part = Range(result.pop().start, part.stop)
        result.append(part)
    return result


class HazardError(Exception):
    """A value is read that does not exist or is not finished."""


def perform(step: Step) -> list[dict[int, object]]:
    """Return the final values of each rank, by element. Raises HazardError."""
    return _Machine(step).run()


class _Rank:
    def __init__(self, pipeline: int, data: int) -> None:
        self.pipeline, self.data = pipeline, data
        self.inputs: set[tuple[int, int]] = set()  # (micro-batch, unit): the input of the unit is here
        self.activations: set[tuple[int, int]] = set()
        self.dys: set[tuple[int, int]] = set()  # the gradient of the input of the unit is here
        self.between: set[tuple[int, int]] = set()  # the halves of a backward
        self.gradients: dict[int, Counter[object]] = {}  # by element
        self.sums: dict[int, Counter[object]] = {}
        self.directions: dict[int, object] = {}
        self.values: dict[int, object] = {}  # values of whole local units, and of this rank's cut
        self.there: set[int] = set()  # units
        self.agreed: object = None
        self.norms: object = None
        self.under_way: list[tuple[Operation, object]] = []


class _Machine:
    def __init__(self, step: Step) -> None:
        self.step = step
        bounds = {bound for part in step.units.values() for bound in (part.start, part.stop)}
        bounds |= {b for ops in step.lists for op in ops if op.range for b in (op.range.start, op.range.stop)}
        self.elements = sorted(bounds)[:-1]  # the first of each run that nobody cuts
        places = [step.grid.coordinates(rank) for rank in range(step.grid.size)]
        self.ranks = [_Rank(place["pipeline"], place["data"]) for place in places]
        self.freed = [{op.unit for op in ops if op.kind is Kind.FREE} for ops in step.lists]
        self.own = [  # elements that a rank steps
            {e for op in ops if op.kind is Kind.APPLY for e in self.within(op.range)} for ops in step.lists
        ]
        for index, rank in enumerate(self.ranks):
            for chunk in step.placement.of(rank.pipeline):
                for unit in chunk:
                    if unit not in self.freed[index]:
                        rank.there.add(unit)
                    rank.values |= dict.fromkeys(self.within(step.units[unit]), "old")
        self.mail: set[tuple[Kind, int, int, int]] = set()
        self.present: dict[object, dict[int, tuple[Operation, object]]] = {}
        self.counts: Counter[object] = Counter()  # meetings of a rank

    def within(self, part: Range | None) -> list[int]:
        assert part is not None
        return [element for element in self.elements if element in part]

    def run(self) -> list[dict[int, object]]:
        programs = [self.program(index) for index in range(len(self.ranks))]
        waiting = dict.fromkeys(range(len(programs)))
        moving = True
        while moving:
            moving = False
            for index in list(waiting):
                try:
                    while next(programs[index]):
                        moving = True
                except StopIteration:
                    del waiting[index]
                    moving = True
        if waiting or self.mail:
            raise HazardError(f"ranks {sorted(waiting)} wait, and {self.mail} was never received")
        results = []
        for index, rank in enumerate(self.ranks):
            if any(rank.gradients.values()) or rank.under_way or rank.between or rank.activations:
                raise HazardError(f"rank {index} has something left")
            kept = [e for e in rank.values if e in self.own[index] or e // UNIT not in self.freed[index]]
            results.append({element: rank.values[element] for element in kept} | {-1: rank.agreed})
        return results

    def program(self, index: int) -> Iterator[bool]:
        """Run the list of a rank. Yield True after progress, and False if it has to wait."""
        rank = self.ranks[index]
        for op in self.step.lists[index]:
            if op.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
                send = Kind.SEND_ACTIVATION if op.kind is Kind.RECV_ACTIVATION else Kind.SEND_GRADIENT
                letter = send, rank.data, op.microbatch, op.unit
                while letter not in self.mail:
                    yield False
                self.mail.remove(letter)
                (rank.inputs if op.kind is Kind.RECV_ACTIVATION else rank.dys).add((op.microbatch, op.unit))
            elif op.kind in (Kind.REDUCE, Kind.GATHER, Kind.NORMS, Kind.AGREE, Kind.WAIT, Kind.WAIT_GATHER):
                yield from self.meet(index, op)
            else:
                self.alone(index, rank, op)
            yield True

    def alone(self, index: int, rank: _Rank, op: Operation) -> None:
        at, last = (op.microbatch, op.unit), self.step.placement.units[-1]
        if op.kind is Kind.FORWARD:
            self.use(rank, op)
            if (op.unit and at not in rank.inputs) or at in rank.activations:
                raise HazardError(f"{op} has no input")
            rank.inputs.discard(at)
            rank.activations.add(at)
            rank.inputs.add((op.microbatch, op.unit + 1))
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self.use(rank, op)
            if at not in rank.activations or (op.unit < last and (op.microbatch, op.unit + 1) not in rank.dys):
                raise HazardError(f"{op} has nothing to take back")
            rank.activations.remove(at)
            rank.dys.discard((op.microbatch, op.unit + 1))
            rank.dys.add(at)
            self.write(rank, op, "input")
            if op.kind is Kind.BACKWARD:
                self.write(rank, op, "weight")
            else:
                rank.between.add(at)
        elif op.kind is Kind.BACKWARD_WEIGHT:
            if at not in rank.between:
                raise HazardError(f"{op} has nothing to work on")
            rank.between.remove(at)
            self.write(rank, op, "weight")
        elif op.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            here = rank.inputs if op.kind is Kind.SEND_ACTIVATION else rank.dys
            letter = op.kind, rank.data, *at
            if at not in here or letter in self.mail:
                raise HazardError(f"{op} has nothing to send")
            here.remove(at)
            self.mail.add(letter)
        elif op.kind is Kind.FREE:
            rank.there.remove(op.unit)
        elif op.kind is Kind.DIRECTION:
            for element in self.within(op.range):
                rank.directions[element] = rank.agreed, frozenset(rank.sums.get(element, Counter()).items())
        elif op.kind is Kind.APPLY:
            for element in self.within(op.range):
                rank.values[element] = rank.values[element], rank.directions[element], rank.norms
        elif op.kind in (Kind.START, Kind.START_GATHER):
            rank.under_way.append((op, self.sent(rank, op)))
        else:
            assert op.kind is Kind.POLL, op

    def use(self, rank: _Rank, op: Operation) -> None:
        values = {rank.values[element] for element in self.within(self.step.units[op.unit])}
        if op.unit not in rank.there or values != {"old"}:
            raise HazardError(f"{op} uses parameters that are not there, or new")

    def write(self, rank: _Rank, op: Operation, half: str) -> None:
        for element in self.within(self.step.units[op.unit]):
            rank.gradients.setdefault(element, Counter())[rank.data, op.microbatch, half] += 1

    def sent(self, rank: _Rank, op: Operation) -> object:
        """Return the current contribution of a rank to a collective."""
        if op.range is not None:
            return {e: Counter(rank.gradients.get(e, {})) for e in self.within(op.range)}
        return {e: rank.values[e] for e in self.within(self.step.units[op.unit])}

    def meet(self, index: int, op: Operation) -> Iterator[bool]:
        rank = self.ranks[index]
        if op.kind in (Kind.WAIT, Kind.WAIT_GATHER):
            begun = next((one for one in rank.under_way if (one[0].range, one[0].unit) == (op.range, op.unit)), None)
            if begun is None or begun[1] != self.sent(rank, op):
                raise HazardError(f"{op}: what was sent has changed, or nothing was")
            rank.under_way.remove(begun)
        members = [
            other for other, one in enumerate(self.ranks) if op.kind is Kind.AGREE or one.pipeline == rank.pipeline
        ]
        key = (op.kind is Kind.AGREE, rank.pipeline * (op.kind is not Kind.AGREE))
        self.counts[index, key] += 1
        there = self.present.setdefault((key, self.counts[index, key]), {})
        there[index] = op, self.contribution(rank, op)
        while len(there) < len(members):
            yield False
        if len({str(other) for other, _ in there.values()}) > 1:
            raise HazardError(f"{op} meets another operation")
        self.take(index, rank, op, [there[member][1] for member in sorted(members)], sorted(members))

    def contribution(self, rank: _Rank, op: Operation) -> object:
        if op.kind in (Kind.REDUCE, Kind.WAIT, Kind.GATHER, Kind.WAIT_GATHER):
            return self.sent(rank, op)
        if op.kind is Kind.NORMS:
            return frozenset(rank.directions.items())
        return frozenset((e, frozenset(sums.items())) for e, sums in rank.sums.items())

    def take(self, index: int, rank: _Rank, op: Operation, theirs: list[object], members: list[int]) -> None:
        if op.kind in (Kind.REDUCE, Kind.WAIT):
            for element in self.within(op.range):
                total = sum((one[element] for one in theirs), Counter())
                rank.sums[element] = rank.sums.get(element, Counter()) + total
                rank.gradients[element] = Counter()
        elif op.kind in (Kind.GATHER, Kind.WAIT_GATHER):
            if op.unit in self.freed[index]:
                if op.unit in rank.there:
                    raise HazardError(f"{op} gathers what is there")
                rank.there.add(op.unit)
            for member, values in zip(members, theirs, strict=True):
                for element, value in values.items():
                    if element in self.own[member]:
                        rank.values[element] = value
        elif op.kind is Kind.NORMS:
            rank.norms = frozenset(theirs)
        else:
            rank.agreed = frozenset(theirs)
