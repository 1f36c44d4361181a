"""Checks of one rank's list: every pass, gradient, sum, norm and update is there once and in a legal order.

Each function looks at one aspect of the list, and asks no other rank; a violation is a ScheduleError. `check_mixing`
proves that parameters are left alone while they are on their way to neighbours (gossip), and mixed once.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace

from hpcdist.arrays.ranges import Range, coverage
from hpcdist.strategies.schedule.generate.passes import expand
from hpcdist.strategies.schedule.operations import COMPUTE, EXCHANGED, MESSAGES, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.verify import liveness
from hpcdist.strategies.schedule.verify.liveness import NOWHERE, RankProgram, is_covered, range_text

MIXING_CHANGES = (Kind.APPLY, Kind.MIX, Kind.AVERAGE)  # the parameters


def check_mixing(share: RankProgram) -> None:
    """Raise ScheduleError where a MIX_START has no MIX_WAIT, a MIX has none either, or what is sent changes."""
    under_way: list[Operation] = []
    arrived: list[Range | None] = []
    for _, op in share.where(Kind.MIX_START, Kind.MIX_WAIT, *MIXING_CHANGES):
        if op.kind is Kind.MIX_START:
            under_way.append(op)
        elif op.kind is Kind.MIX_WAIT:
            begun = next((other for other in under_way if other.range == op.range), None)
            if begun is None:
                raise share.refuse(f"{op} waits for what was not started, or was waited for before")
            under_way.remove(begun)
            arrived.append(op.range)
        else:
            sent = next((other for other in under_way if _meet(op, other)), None)
            if sent is not None:
                raise share.refuse(f"{op} changes what {sent}, still under way, sends")
            if op.kind is Kind.MIX:
                if op.range not in arrived:
                    raise share.refuse(f"{op} has nothing of its neighbours to mix with: no MIX_WAIT of its range")
                arrived.remove(op.range)
    if under_way:
        raise share.refuse(f"{under_way[0]} is never waited for")
    if arrived:
        raise share.refuse(f"{Operation(Kind.MIX_WAIT, range=arrived[0])} brings what is never mixed")


COMPLETES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)  # the gradients of a unit, of one micro-batch
WRITES = (*COMPLETES, Kind.BACKWARD_INPUT)  # gradients
BEFORE_SUM = (*WRITES, *EXCHANGED, Kind.COMBINE, Kind.WAIT, Kind.SETTLE, Kind.COPY_GRADIENT)
BEFORE_AGREE = (*BEFORE_SUM, Kind.SUM_ROWS, Kind.COLLECT)
AFTER_AGREE = (
    *(Kind.DIRECTION, Kind.NORMS, Kind.APPLY, Kind.PUBLISH, Kind.COPY_VALUE, Kind.REFRESH, Kind.COMMIT),
    *(Kind.MIX, Kind.AVERAGE, Kind.COMPRESS),
)
# (what, what of its range comes before it, whether all of its range must have it)
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
# Each element of each at most once.
ONCE = (Kind.DIRECTION, Kind.APPLY, Kind.COLLECT, Kind.PUBLISH, Kind.PULL, Kind.COMPRESS)


def check(share: RankProgram) -> None:
    """Raise ScheduleError when the list of ``share`` is no training step."""
    _check_passes(share)
    _check_gradients(share)
    _check_rounds(share)
    _check_sums(share)
    _check_waits(share)
    _check_settled(share)
    # The sums of the tensor axis are of complete gradients, and norms of all directions.
    _check_once(share, Kind.SUM_ROWS, behind=BEFORE_SUM)
    _check_update(share)
    _check_once(share, Kind.AGREE, behind=BEFORE_AGREE, before=AFTER_AGREE)
    _check_compressed(share)
    _check_once(share, Kind.NORMS, behind=(Kind.DIRECTION,), before=(Kind.APPLY,))
    _check_copies(share)
    liveness.check_liveness(share)
    check_mixing(share)


def _check_passes(share: RankProgram) -> None:
    """Check that each micro-batch goes once through all units, forward and back, with its messages."""
    of: dict[int, list[Operation]] = {microbatch: [] for microbatch in range(share.microbatches)}
    for _, op in share.where(*COMPUTE, *MESSAGES):
        if not share.units or op.microbatch not in of:
            raise share.refuse(f"{op} belongs to none of its {share.microbatches if share.units else 0} micro-batches")
        of[op.microbatch].append(op)
    if share.place is None:
        return
    for microbatch, steps in of.items():
        _check_weights(share, steps)
        passed = [op for op in steps if op.kind is not Kind.BACKWARD_WEIGHT]
        for got, want in zip([*passed, None], [*_expected(share.place, microbatch, passed), None], strict=False):
            if got != want:
                raise share.refuse(
                    f"micro-batch {microbatch} comes to {got or 'its end'} where {want or 'its end'} is due"
                )


def _expected(place: tuple[StagePlacement, int], microbatch: int, steps: Sequence[Operation]) -> list[Operation]:
    """Return the passes of a micro-batch over the chunks of a rank, split and computed again as in ``steps``."""
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


def _check_weights(share: RankProgram, steps: Sequence[Operation]) -> None:
    """Check that each BACKWARD_INPUT has one BACKWARD_WEIGHT behind it."""
    begun: set[int] = set()
    for op in steps:
        if op.kind is Kind.BACKWARD_INPUT:
            begun.add(op.unit)
        elif op.kind is Kind.BACKWARD_WEIGHT:
            if op.unit not in begun:
                raise share.refuse(f"{op} has no BACKWARD_INPUT before it, or comes twice")
            begun.remove(op.unit)
    if begun:
        unit, microbatch = min(begun), steps[0].microbatch
        raise share.refuse(f"{Operation(Kind.BACKWARD_INPUT, microbatch, unit)} has no BACKWARD_WEIGHT behind it")


def _check_gradients(share: RankProgram) -> None:
    """Check that gradients are exchanged once, complete: after the last BACKWARD of a unit, or after each."""
    exchanged = share.where(*EXCHANGED)
    places = [index for index, _ in exchanged]
    for unit, whole in share.units.items():
        # The list falls into stretches between the backwards of the unit: before the first (number 0), behind each.
        backwards = [index for index, op in share.where(*COMPLETES) if op.unit == unit]
        for number, start in enumerate([-1, *backwards]):
            stop = [*backwards, len(share.steps)][number]
            parts = [op for _, op in exchanged[bisect(places, start) : bisect(places, stop)]]
            ranges = [op.range for op in parts if op.range is not None]
            for piece, times in coverage(whole, ranges):
                # Exchanged once behind the last backward or, without accumulation, behind every one.
                last = number == len(backwards)
                due = int(last or (number > 0 and not share.accumulates))
                if times == due or (times == 0 and share.alone):
                    continue
                named = [op for op in parts if op.touches(piece)]
                if times == 0:
                    raise share.refuse(f"the gradient of unit {unit} in {range_text(piece)} is never exchanged")
                if due == 0:
                    raise share.refuse(f"{named[0]} comes before {share.steps[stop]}, which adds to its gradients")
                raise share.refuse(f"{named[1]} exchanges the gradients of {range_text(piece)} a second time")


def _check_rounds(share: RankProgram) -> None:
    """Check that an exchange of one micro-batch has gradients of no other: backwards do not overlap."""
    if share.accumulates:
        return
    microbatches_in = {unit: set[int]() for unit in share.units}  # whose gradients are in memory, by unit
    taken: set[int] = set()  # units whose gradients were exchanged since they were written
    for _, op in share.where(*WRITES, *EXCHANGED):
        if op.kind in WRITES:
            for unit in {op.unit, *share.needs.get(op.unit, ())} & microbatches_in.keys():
                if unit in taken:  # what was exchanged is overwritten, not added to
                    microbatches_in[unit].clear()
                taken.discard(unit)
                microbatches_in[unit].add(op.microbatch)
            continue
        for unit, part in share.units.items():
            if op.touches(part):
                taken.add(unit)
                if microbatches_in[unit] - {op.microbatch}:
                    raise share.refuse(
                        f"{op} exchanges gradients of unit {unit} of micro-batches {sorted(microbatches_in[unit])} "
                        "together; one has to be complete before the next is begun, or all are added up first"
                    )


def _check_sums(share: RankProgram) -> None:
    """Check that a sum is reduced once, and that partial sums of a reduction are combined once."""
    combined = share.ranges(Kind.COMBINE)
    for unit, whole in share.units.items() if share.combines else ():
        for piece, times in coverage(whole, combined):
            if times != 1:
                raise share.refuse(
                    f"the gradient of unit {unit} in {range_text(piece)} has {times} COMBINE over all replicas, not 1"
                )
    reduced = share.ranges(Kind.REDUCE, Kind.PUSH)
    for _, op in share.where(Kind.ADD):
        if op.range is not None and any(times != 1 for _, times in coverage(op.range, reduced)):
            raise share.refuse(f"{op} adds to a sum that needs one REDUCE of all of its range, or PUSH")


def _check_waits(share: RankProgram) -> None:
    """Check that a started operation is waited for once: until then nobody may write in its range."""
    under_way: list[Operation] = []
    for _, op in share.where(Kind.START, Kind.WAIT, *WRITES):
        if op.kind is Kind.START:
            under_way.append(op)
        elif op.kind in WRITES:
            written = [share.units[unit] for unit in {op.unit, *share.needs.get(op.unit, ())} if unit in share.units]
            for begun in under_way:
                if begun.range and any(begun.range.intersect(part) for part in written):
                    raise share.refuse(f"{op} writes where {begun} is still under way")
        else:
            same = [other for other in under_way if (other.range, other.microbatch) == (op.range, op.microbatch)]
            if not same:
                raise share.refuse(f"{op} waits for what was not started, or was waited for before")
            under_way.remove(same[0])
    if under_way:
        raise share.refuse(f"{under_way[0]} is never waited for")


def _check_settled(share: RankProgram) -> None:
    """Check that a deferred gradient is settled once in the next step, whose list is the same."""
    deferred, settled = ([op for _, op in share.where(kind)] for kind in (Kind.DEFER, Kind.SETTLE))
    for operations, others, why in (
        (deferred, settled, "is never settled"),
        (settled, deferred, "settles what none defers"),
    ):
        for op in operations:
            if sum(other.range == op.range for other in others) != 1:
                raise share.refuse(f"{op} {why}, or more than once")


def _check_once(share: RankProgram, kind: Kind, *, behind: Sequence[Kind], before: Sequence[Kind] = ()) -> None:
    """Check that a list has ``kind`` at most once: behind all operations of some kinds, and before all of others."""
    places = share.where(kind)
    if len(places) > 1:
        raise share.refuse(f"{places[0][1]} comes twice in one step")
    for place, own in places:
        for index, op in share.where(*behind, *before):
            if index > place and op.kind in behind:
                raise share.refuse(f"{op} comes after {own}")
            if index < place and op.kind in before:
                raise share.refuse(f"{op} comes before {own}")


def _check_update(share: RankProgram) -> None:
    """Check that directions come before steps, both once."""
    for kind in ONCE:
        seen: list[Range] = []
        for _, op in share.where(kind):
            twice = any(op.part.intersect(other) for other in seen)
            if twice:
                raise share.refuse(f"{op} covers elements that an earlier {kind.name} of this rank covers")
            seen.append(op.part)
    for later, earlier, whole in ORDERS:
        for index, op in share.where(later):
            others = [(at, other) for at, other in share.where(earlier) if _meet(op, other)]
            late = next((other for at, other in others if at > index), None)
            if late is not None:
                raise share.refuse(f"{op} comes before {late}")
            if whole and not is_covered(op.range or NOWHERE, [other.range for _, other in others if other.range]):
                raise share.refuse(f"{op} has no {earlier.name} of all of its range before it")


def _check_compressed(share: RankProgram) -> None:
    """Check that payloads travel after the agreement and before the update."""
    compressed = share.where(Kind.COMPRESS)
    if compressed and not share.where(Kind.AGREE):
        raise share.refuse(f"{compressed[0][1]} sends what nobody has agreed on: no AGREE() comes before it")
    travelled = share.ranges(Kind.COMPRESS)
    for _, op in share.where(Kind.DIRECTION) if compressed else ():
        if not is_covered(op.range or NOWHERE, travelled):
            raise share.refuse(f"{op} has no COMPRESS of all of its range before it")


def _check_copies(share: RankProgram) -> None:
    """Check that gradients of tied copies are complete when sent, and added before their owner's are exchanged."""
    for index, copy in share.where(Kind.COPY_GRADIENT):
        for at, op in share.where(*WRITES):
            if copy.unit in (op.unit, *share.needs.get(op.unit, ())) and at > index:
                raise share.refuse(f"{copy} comes before {op}, which adds to its gradients")
        owned = share.units.get(copy.unit, NOWHERE)
        for at, op in share.where(*EXCHANGED):
            if op.touches(owned) and at < index and share.accumulates:
                raise share.refuse(f"{op} comes before {copy}, which adds to its gradients")
    for index, copy in share.where(Kind.COPY_VALUE):
        owned = share.units.get(copy.unit, NOWHERE)
        for at, op in share.where(Kind.APPLY):
            if op.touches(owned) and at > index:
                raise share.refuse(f"{copy} comes before {op}, which changes what it sends")


def _meet(first: Operation, second: Operation) -> bool:
    return second.range is not None and first.touches(second.range)
