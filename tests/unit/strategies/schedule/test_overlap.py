"""Lists whose exchanges start early: what they bound, that they are proven, and that broken ones are refused."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist.arrays.ranges import Range
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.generate.operation_list import (
    compute_operations,
    insert_exchange,
    insert_gathers,
    insert_polls,
    overlap_reductions,
    prefetch_gathers,
)
from hpcdist.strategies.schedule.operations import ENDS, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.verify.proof import verify

UNIT = 40
Needs = dict[int, list[int]]


def zero3(units, microbatches, needs, schedule="sequential"):
    ranges = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(units)}
    steps = insert_gathers(compute_operations(schedule, microbatches, StagePlacement((range(units),), (0,))), needs)
    reduces = [Operation(Kind.REDUCE, range=ranges[unit]) for unit in reversed(range(units))]
    update = [Operation(kind, range=part) for kind in (Kind.DIRECTION, Kind.APPLY) for part in ranges.values()]
    return insert_exchange(steps, [*reduces, Operation(Kind.AGREE), *update], ranges, every_microbatch=True)


def prove(lists, units, microbatches, needs):
    ranges = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(units)}
    return verify(
        lists,
        grid=ProcessGrid(data=len(lists)),
        units=ranges,
        microbatches=microbatches,
        needs=needs,
        accumulates=False,
    )


def most(steps, begins, ends):
    """The most that are under way at once."""
    found = under_way = 0
    for op in steps:
        under_way += (op.kind is begins) - (op.kind is ends)
        found = max(found, under_way)
    assert under_way == 0
    return found


def own(units):
    return {unit: [unit] for unit in range(units)}


def tied(units):
    return own(units) | {units - 1: [0, units - 1]}


@settings(max_examples=80, deadline=None)
@given(
    units=st.integers(2, 6),
    microbatches=st.integers(1, 4),
    needs_of=st.sampled_from([own, tied]),
    schedule=st.sampled_from(["sequential", "gpipe", "1f1b"]),
    ahead=st.integers(0, 8),
    in_flight=st.sampled_from([1, 2, 3, None]),
)
@pytest.mark.full
def test_what_is_started_is_bounded_in_order_and_proven(units, microbatches, needs_of, schedule, ahead, in_flight):
    needs = needs_of(units)
    plain = zero3(units, microbatches, needs, schedule)
    ranges = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(units)}
    early = insert_polls(prefetch_gathers(overlap_reductions(plain, ranges, needs, in_flight), ahead))
    proof, before = prove([early] * 3, units, microbatches, needs), prove([plain] * 3, units, microbatches, needs)
    assert most(early, Kind.START_GATHER, Kind.WAIT_GATHER) <= ahead
    assert before.gathered[0] <= proof.gathered[0] <= before.gathered[0] + ahead
    if in_flight is not None:
        assert most(early, Kind.START, Kind.WAIT) <= in_flight

    def order(steps, *kinds):
        return [(op.microbatch, op.unit, op.range) for op in steps if op.kind in kinds]

    # The same exchanges in the same order, begun and ended; and nothing else has moved.
    for kinds in ((Kind.START_GATHER, Kind.GATHER), (Kind.WAIT_GATHER, Kind.GATHER)):
        assert order(early, *kinds) == order(plain, Kind.GATHER)
    for kind in (Kind.START, Kind.WAIT):
        assert order(early, kind) == order(plain, Kind.REDUCE)
    added = {*ENDS, *ENDS.values(), Kind.POLL, Kind.GATHER, Kind.REDUCE}
    assert [op for op in early if op.kind not in added] == [op for op in plain if op.kind not in added]


def test_one_unit_ahead_reads_as_it_says():
    steps = prefetch_gathers(
        insert_gathers(compute_operations("sequential", 1, StagePlacement((range(2),), (0,))), own(2)), 1
    )
    assert " ".join(str(op) for op in steps) == (
        "START_GATHER(0, 0) WAIT_GATHER(0, 0) START_GATHER(0, 1) FORWARD(0, 0) FREE(0, 0) "
        "WAIT_GATHER(0, 1) START_GATHER(0, 0) FORWARD(0, 1) BACKWARD(0, 1) FREE(0, 1) "
        "WAIT_GATHER(0, 0) BACKWARD(0, 0) FREE(0, 0)"
    )


def test_what_stays_gathered_or_comes_behind_the_update_is_left_alone():
    steps = [*zero3(2, 1, own(2)), Operation(Kind.GATHER, unit=0)]
    assert prefetch_gathers(steps, 0) == steps
    assert prefetch_gathers(steps, 2)[-1] == steps[-1]
    whole = [op for op in steps if op.kind is not Kind.FREE]
    assert prefetch_gathers(whole, 2) == whole


Break = Callable[[list[Operation]], object]


def where(steps, text):
    return [str(op) for op in steps].index(text)


def move(text, to):
    def change(steps):
        op = steps.pop(where(steps, text))
        steps.insert(where(steps, to), op)

    return change


@cases(
    "damage, match",
    (lambda own: own.pop(where(own, "WAIT_GATHER(0, 1)")), r"FORWARD\(0, 1\) uses unit 1, which is not gathered"),
    (lambda own: own.pop(where(own, "START_GATHER(0, 1)")), r"WAIT_GATHER\(0, 1\) waits for what was not started"),
    (move("WAIT_GATHER(0, 1)", "FREE(0, 1)"), r"FORWARD\(0, 1\) uses unit 1, which is not gathered then"),
    (move("START_GATHER(0, 1)", "START_GATHER(0, 0)"), r"the same order"),
    (lambda own: own.insert(0, Operation(Kind.START_GATHER, 0, 0)), r"START_GATHER\(0, 0\) comes while"),
    (
        lambda own: own.insert(where(own, "FORWARD(0, 0)"), Operation(Kind.START_GATHER, 0, 0)),
        r"FORWARD\(0, 0\) uses unit 0, which is not gathered then: no WAIT_GATHER before it",
    ),
    (
        lambda own: own.insert(where(own, "APPLY([0:40])"), Operation(Kind.START_GATHER, unit=0)),
        r"APPLY\(\[0:40\]\) changes what START_GATHER\(0\), still under way, sends",
    ),
    (lambda own: own.append(Operation(Kind.START_GATHER, unit=0)), r"START_GATHER\(0\) is never waited for"),
    (move("WAIT(0, [80:120])", "AGREE()"), r"BACKWARD\(1, 2\) writes where START\(0, \[80:120\]\) is still under"),
)
def test_broken_lists_are_refused(damage, match):
    units = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(3)}
    lists = [prefetch_gathers(overlap_reductions(zero3(3, 2, own(3)), units, own(3), 1), 1) for _ in range(2)]
    prove(lists, 3, 2, own(3))
    damage(lists[1])
    with pytest.raises(ScheduleError, match=rf"rank \d: .*({match})"):
        prove(lists, 3, 2, own(3))


def test_a_unit_that_is_kept_is_not_used_while_it_is_gathered():
    kept = [op for op in zero3(2, 1, own(2)) if op.kind not in (Kind.GATHER, Kind.FREE)]
    kept += [Operation(Kind.GATHER, unit=unit) for unit in range(2)]
    prove([kept, kept], 2, 1, own(2))
    at = where(kept, "FORWARD(0, 1)")
    ends = [Operation(kind, unit=1) for kind in (Kind.START_GATHER, Kind.WAIT_GATHER)]
    before = [*kept[:at], *ends, *kept[at:]]
    prove([before, before], 2, 1, own(2))
    around = [*kept[:at], ends[0], kept[at], ends[1], *kept[at + 1 :]]
    with pytest.raises(ScheduleError, match=r"FORWARD\(0, 1\) uses unit 1, which is not gathered then"):
        prove([around, around], 2, 1, own(2))


def test_sums_are_waited_for_before_the_rows_of_tensor_ranks_are_summed():
    ranges = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(2)}
    reduces = [Operation(Kind.REDUCE, range=part) for part in ranges.values()]
    found = overlap_reductions([*reduces, Operation(Kind.SUM_ROWS), Operation(Kind.AGREE)], ranges, own(2))
    assert [op.kind for op in found] == [*[Kind.START] * 2, *[Kind.WAIT] * 2, Kind.SUM_ROWS, Kind.AGREE]
