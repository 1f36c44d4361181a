"""Checks of one rank's list: every pass, gradient, sum, norm and update occurs once and in a legal order."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace

from hpcdist.arrays.ranges import Range, coverage
from hpcdist.strategies.core.operations import COMPUTE, EXCHANGED, MESSAGES, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.passes import expand
from hpcdist.strategies.schedule.verify import liveness
from hpcdist.strategies.schedule.verify.liveness import NOWHERE, RankProgram, is_covered, range_text

MIXING_CHANGES = (Kind.APPLY, Kind.MIX, Kind.AVERAGE)  # kinds that change parameters


def check_mixing(program: RankProgram) -> None:
    """Raise ScheduleError if the gossip operations (MIX_START, MIX_WAIT, MIX) in ``program`` have a wrong order."""
    # MIX_START starts the exchange with neighbours, MIX_WAIT waits for their parameters, MIX averages. Parameters must
    # not change between MIX_START and MIX_WAIT.
    in_flight: list[Operation] = []
    arrived: list[Range | None] = []
    for _, op in program.where(Kind.MIX_START, Kind.MIX_WAIT, *MIXING_CHANGES):
        if op.kind is Kind.MIX_START:
            in_flight.append(op)
        elif op.kind is Kind.MIX_WAIT:
            start = next((other for other in in_flight if other.range == op.range), None)
            if start is None:
                raise program.refuse(
                    f"{op} waits for an exchange that was not started, or for which another MIX_WAIT has already "
                    "waited; put one MIX_START of the same parameter range before each MIX_WAIT"
                )
            in_flight.remove(start)
            arrived.append(op.range)
        else:
            sent = next((other for other in in_flight if _meet(op, other)), None)
            if sent is not None:
                raise program.refuse(
                    f"{op} changes parameters that {sent} is still sending; put the MIX_WAIT that completes {sent} "
                    f"before {op}"
                )
            if op.kind is Kind.MIX:
                if op.range not in arrived:
                    raise program.refuse(
                        f"{op} has no neighbour parameters to mix with, because no MIX_WAIT of the same parameter "
                        f"range precedes it; put this MIX_WAIT before {op}"
                    )
                arrived.remove(op.range)
    if in_flight:
        raise program.refuse(
            f"{in_flight[0]} is never completed; put a MIX_WAIT of the same parameter range after {in_flight[0]}"
        )
    if arrived:
        raise program.refuse(
            f"the parameters that {Operation(Kind.MIX_WAIT, range=arrived[0])} receives are never used; put a MIX of "
            "the same parameter range after this MIX_WAIT"
        )


COMPLETES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # kinds that complete a unit's gradients for a micro-batch
WRITES = (*COMPLETES, Kind.BACKWARD_INPUT)  # kinds that write gradients
BEFORE_SUM = (*WRITES, *EXCHANGED, Kind.COMBINE, Kind.WAIT, Kind.SETTLE, Kind.COPY_GRADIENT)
BEFORE_AGREE = (*BEFORE_SUM, Kind.SUM_ROWS, Kind.COLLECT)
AFTER_AGREE = (
    *(Kind.DIRECTION, Kind.NORMS, Kind.APPLY, Kind.PUBLISH, Kind.COPY_VALUE, Kind.REFRESH, Kind.COMMIT),
    *(Kind.MIX, Kind.AVERAGE, Kind.COMPRESS),
)
# (later kind, earlier kind on overlapping ranges, whether the earlier one must cover the whole range)
ORDERS = (
    (Kind.REDUCE, Kind.ADD, False),
    (Kind.PUSH, Kind.ADD, False),
    (Kind.COMBINE, Kind.REDUCE, False),
    (Kind.DIRECTION, Kind.REDUCE, False),
    (Kind.DIRECTION, Kind.COMBINE, False),
    (Kind.DIRECTION, Kind.WAIT, False),
    (Kind.DIRECTION, Kind.SETTLE, False),
    (Kind.DIRECTION, Kind.COLLECT, False),
    (Kind.DIRECTION, Kind.COMPRESS, False),
    (Kind.APPLY, Kind.DIRECTION, True),
    (Kind.PUBLISH, Kind.APPLY, True),
    (Kind.MIX, Kind.DIRECTION, True),
    (Kind.AVERAGE, Kind.DIRECTION, True),
)
# Kinds that may cover each element at most once.
ONCE = (Kind.DIRECTION, Kind.APPLY, Kind.COLLECT, Kind.PUBLISH, Kind.PULL, Kind.COMPRESS)


def check(program: RankProgram) -> None:
    """Raise ScheduleError if ``program`` is not a valid list of one rank's operations in a training step."""
    _check_passes(program)
    _check_gradients(program)
    _check_rounds(program)
    _check_sums(program)
    _check_waits(program)
    _check_settled(program)
    # Sums over the tensor axis need complete gradients, and norms need all directions.
    _check_once(program, Kind.SUM_ROWS, after=BEFORE_SUM)
    _check_update(program)
    _check_once(program, Kind.AGREE, after=BEFORE_AGREE, before=AFTER_AGREE)
    _check_compressed(program)
    _check_once(program, Kind.NORMS, after=(Kind.DIRECTION,), before=(Kind.APPLY,))
    _check_copies(program)
    liveness.check_liveness(program)
    check_mixing(program)


def _check_passes(program: RankProgram) -> None:
    steps_of: dict[int, list[Operation]] = {microbatch: [] for microbatch in range(program.microbatches)}
    for _, op in program.where(*COMPUTE, *MESSAGES):
        if not program.units or op.microbatch not in steps_of:
            raise program.refuse(
                f"{op} belongs to micro-batch {op.microbatch}, but this rank has "
                f"{program.microbatches if program.units else 0} micro-batches, numbered from 0; correct the operation "
                "list"
            )
        steps_of[op.microbatch].append(op)
    if program.place is None:
        return
    for microbatch, steps in steps_of.items():
        _check_weights(program, steps)
        passed = [op for op in steps if op.kind is not Kind.BACKWARD_WEIGHT]
        for actual, expected in zip(
            [*passed, None], [*_expected(program.place, microbatch, passed), None], strict=False
        ):
            if actual != expected:
                raise program.refuse(
                    f"wrong operation of micro-batch {microbatch}: found {actual or 'the end of the list'}, expected "
                    f"{expected or 'the end of the list'}; correct the operation list"
                )


def _expected(place: tuple[StagePlacement, int], microbatch: int, steps: Sequence[Operation]) -> list[Operation]:
    chunks = place[0].of(place[1])
    split = {op.unit for op in steps if op.kind is Kind.BACKWARD_INPUT}
    recomputed = {op.unit for op in steps if op.recompute}
    expected = expand([(Kind.FORWARD, microbatch, chunk) for chunk in range(len(chunks))], *place)
    for chunk in reversed(range(len(chunks))):
        units = chunks[chunk]
        if recomputed.intersection(units):
            expected += [Operation(Kind.FORWARD, microbatch, unit, recompute=True) for unit in units]
        for op in expand([(Kind.BACKWARD, microbatch, chunk)], *place):
            halved = op.kind is Kind.BACKWARD and op.unit in split
            expected.append(replace(op, kind=Kind.BACKWARD_INPUT) if halved else op)
    return expected


def _check_weights(program: RankProgram, steps: Sequence[Operation]) -> None:
    started: set[int] = set()
    for op in steps:
        if op.kind is Kind.BACKWARD_INPUT:
            started.add(op.unit)
        elif op.kind is Kind.BACKWARD_WEIGHT:
            if op.unit not in started:
                raise program.refuse(
                    f"{op} has no BACKWARD_INPUT; put one BACKWARD_INPUT of the same unit and micro-batch before each "
                    "BACKWARD_WEIGHT"
                )
            started.remove(op.unit)
    if started:
        unit, microbatch = min(started), steps[0].microbatch
        raise program.refuse(
            f"{Operation(Kind.BACKWARD_INPUT, microbatch, unit)} has no BACKWARD_WEIGHT; put a BACKWARD_WEIGHT of the "
            "same unit and micro-batch after this BACKWARD_INPUT"
        )


def _check_gradients(program: RankProgram) -> None:
    exchanged = program.where(*EXCHANGED)
    indices = [index for index, _ in exchanged]
    for unit, whole in program.units.items():
        # Sections of the list between the backward passes of the unit: number 0 comes before the first.
        backwards = [index for index, op in program.where(*COMPLETES) if op.unit == unit]
        for number, start in enumerate([-1, *backwards]):
            stop = [*backwards, len(program.steps)][number]
            parts = [op for _, op in exchanged[bisect(indices, start) : bisect(indices, stop)]]
            ranges = [op.range for op in parts if op.range is not None]
            for piece, times in coverage(whole, ranges):
                last = number == len(backwards)
                due = int(last or (number > 0 and not program.accumulates))
                if times == due or (times == 0 and program.alone):
                    continue
                named = [op for op in parts if op.touches(piece)]
                if times == 0:
                    raise program.refuse(
                        f"the gradient of unit {unit} in the parameter range {range_text(piece)} is never exchanged; "
                        f"exchange this range once, after the backward pass of unit {unit}"
                    )
                if due == 0:
                    raise program.refuse(
                        f"{named[0]} exchanges gradients to which the later {program.steps[stop]} still adds; put "
                        f"{named[0]} after {program.steps[stop]}"
                    )
                raise program.refuse(
                    f"{named[1]} exchanges the gradients of the parameter range {range_text(piece)} a second time; "
                    "exchange each range once"
                )


def _check_rounds(program: RankProgram) -> None:
    if program.accumulates:
        return
    microbatches_in = {unit: set[int]() for unit in program.units}  # unit -> micro-batches of its gradients
    taken: set[int] = set()  # units whose gradients were exchanged after the last write
    for _, op in program.where(*WRITES, *EXCHANGED):
        if op.kind in WRITES:
            for unit in program.used_by(op.unit) & microbatches_in.keys():
                if unit in taken:  # exchanged gradients are overwritten, not added to
                    microbatches_in[unit].clear()
                taken.discard(unit)
                microbatches_in[unit].add(op.microbatch)
            continue
        for unit, part in program.units.items():
            if op.touches(part):
                taken.add(unit)
                if microbatches_in[unit] - {op.microbatch}:
                    raise program.refuse(
                        f"{op} exchanges the gradients of unit {unit} summed over the micro-batches "
                        f"{sorted(microbatches_in[unit])}; exchange the gradients of each micro-batch before the next "
                        "backward pass of this unit, or add them up with ADD"
                    )


def _check_sums(program: RankProgram) -> None:
    combined = program.ranges(Kind.COMBINE)
    for unit, whole in program.units.items() if program.combines else ():
        for piece, times in coverage(whole, combined):
            if times != 1:
                raise program.refuse(
                    f"the gradient of unit {unit} in the parameter range {range_text(piece)} is summed over the "
                    f"replicas by {times} COMBINE operations; expected exactly one"
                )
    reduced = program.ranges(Kind.REDUCE, Kind.PUSH)
    for _, op in program.where(Kind.ADD):
        if op.range is not None and any(times != 1 for _, times in coverage(op.range, reduced)):
            raise program.refuse(
                f"{op} needs operations REDUCE or PUSH that cover every part of its parameter range exactly once; "
                "correct the ranges of the REDUCE or PUSH operations"
            )


def _check_waits(program: RankProgram) -> None:
    in_flight: list[Operation] = []
    for _, op in program.where(Kind.START, Kind.WAIT, *WRITES):
        if op.kind is Kind.START:
            in_flight.append(op)
        elif op.kind in WRITES:
            written = [program.units[unit] for unit in program.used_by(op.unit) if unit in program.units]
            for start in in_flight:
                if start.range and any(start.range.intersect(part) for part in written):
                    raise program.refuse(
                        f"{op} writes gradients that {start} is still exchanging; put the WAIT that completes {start} "
                        f"before {op}"
                    )
        else:
            same = [other for other in in_flight if (other.range, other.microbatch) == (op.range, op.microbatch)]
            if not same:
                raise program.refuse(
                    f"{op} waits for an exchange that was not started, or for which another WAIT has already waited; "
                    "put one START of the same range and micro-batch before each WAIT"
                )
            in_flight.remove(same[0])
    if in_flight:
        raise program.refuse(
            f"{in_flight[0]} is never completed; put a WAIT of the same range and micro-batch after {in_flight[0]}"
        )


def _check_settled(program: RankProgram) -> None:
    deferred, settled = ([op for _, op in program.where(kind)] for kind in (Kind.DEFER, Kind.SETTLE))
    # A SETTLE runs in the step after its DEFER.
    for operations, others, partner in ((deferred, settled, Kind.SETTLE), (settled, deferred, Kind.DEFER)):
        for op in operations:
            if sum(other.range == op.range for other in others) != 1:
                raise program.refuse(f"{op} needs exactly one {partner.name} of the same parameter range in the list")


def _check_once(program: RankProgram, kind: Kind, *, after: Sequence[Kind], before: Sequence[Kind] = ()) -> None:
    entries = program.where(kind)
    if len(entries) > 1:
        raise program.refuse(f"{entries[0][1]} occurs {len(entries)} times in one step; keep one {kind.name}")
    for position, only in entries:
        for index, op in program.where(*after, *before):
            if index > position and op.kind in after:
                raise program.refuse(
                    f"{op} comes after {only}, but every {op.kind.name} must come before the {kind.name}"
                )
            if index < position and op.kind in before:
                raise program.refuse(
                    f"{op} comes before {only}, but every {op.kind.name} must come after the {kind.name}"
                )


def _check_update(program: RankProgram) -> None:
    for kind in ONCE:
        seen: list[Range] = []
        for _, op in program.where(kind):
            twice = any(op.part.intersect(other) for other in seen)
            if twice:
                raise program.refuse(
                    f"{op} overlaps the parameter range of an earlier {kind.name}; the ranges of all {kind.name} "
                    "operations of a rank must be disjoint"
                )
            seen.append(op.part)
    for later, earlier, whole in ORDERS:
        for index, op in program.where(later):
            others = [(at, other) for at, other in program.where(earlier) if _meet(op, other)]
            late = next((other for at, other in others if at > index), None)
            if late is not None:
                raise program.refuse(
                    f"{op} comes before {late}, but a {later.name} must come after every {earlier.name} of an "
                    "overlapping parameter range"
                )
            if whole and not is_covered(op.range or NOWHERE, [other.range for _, other in others if other.range]):
                raise program.refuse(
                    f"the parameter range of {op} is not covered by earlier {earlier.name} operations; add a "
                    f"{earlier.name} for the missing part of this range"
                )


def _check_compressed(program: RankProgram) -> None:
    compressed = program.where(Kind.COMPRESS)
    if compressed and not program.where(Kind.AGREE):
        raise program.refuse(
            f"{compressed[0][1]} sends gradients, but the list has no AGREE(), in which the ranks agree on the step's "
            "loss, norm, overflow and stop requests; add an AGREE() before the first COMPRESS"
        )
    travelled = program.ranges(Kind.COMPRESS)
    for _, op in program.where(Kind.DIRECTION) if compressed else ():
        if not is_covered(op.range or NOWHERE, travelled):
            raise program.refuse(
                f"the parameter range of {op} is not covered by COMPRESS operations; add a COMPRESS for the missing "
                "part of this range"
            )


def _check_copies(program: RankProgram) -> None:
    for index, copy in program.where(Kind.COPY_GRADIENT):
        for at, op in program.where(*WRITES):
            if copy.unit in program.used_by(op.unit) and at > index:
                raise program.refuse(
                    f"{copy} sends gradients to which the later {op} still adds; put {copy} after {op}"
                )
        owned = program.units.get(copy.unit, NOWHERE)
        for at, op in program.where(*EXCHANGED):
            if op.touches(owned) and at < index and program.accumulates:
                raise program.refuse(
                    f"{op} exchanges gradients to which the later {copy} still adds; put {op} after {copy}"
                )
    for index, copy in program.where(Kind.COPY_VALUE):
        owned = program.units.get(copy.unit, NOWHERE)
        for at, op in program.where(Kind.APPLY):
            if op.touches(owned) and at > index:
                raise program.refuse(
                    f"{copy} sends parameter values that the later {op} changes; put {copy} after {op}"
                )


def _meet(first: Operation, second: Operation) -> bool:
    return second.range is not None and first.touches(second.range)
