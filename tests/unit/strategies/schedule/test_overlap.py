"""Lists whose exchanges start early: their bounds, their proof, and the rejection of broken lists."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist.arrays.ranges import Range
from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import ENDS, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.operation_list import (
    compute_operations,
    insert_exchange,
    insert_gathers,
    insert_polls,
    overlap_reductions,
    prefetch_gathers,
)
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


def most_in_flight(steps, begins, ends):
    result = under_way = 0
    for op in steps:
        under_way += (op.kind is begins) - (op.kind is ends)
        result = max(result, under_way)
    assert under_way == 0
    return result


def separate_needs(units):
    return {unit: [unit] for unit in range(units)}


def tied_needs(units):
    return separate_needs(units) | {units - 1: [0, units - 1]}


@settings(max_examples=80, deadline=None)
@given(
    units=st.integers(2, 6),
    microbatches=st.integers(1, 4),
    needs_of=st.sampled_from([separate_needs, tied_needs]),
    schedule=st.sampled_from(["sequential", "gpipe", "1f1b"]),
    ahead=st.integers(0, 8),
    in_flight=st.sampled_from([1, 2, 3, None]),
)
@pytest.mark.full
def test_early_exchanges_are_bounded_ordered_and_proven(units, microbatches, needs_of, schedule, ahead, in_flight):
    needs = needs_of(units)
    plain = zero3(units, microbatches, needs, schedule)
    ranges = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(units)}
    early = insert_polls(prefetch_gathers(overlap_reductions(plain, ranges, needs, in_flight), ahead))
    proof, before = prove([early] * 3, units, microbatches, needs), prove([plain] * 3, units, microbatches, needs)
    assert most_in_flight(early, Kind.START_GATHER, Kind.WAIT_GATHER) <= ahead
    assert before.gathered[0] <= proof.gathered[0] <= before.gathered[0] + ahead
    if in_flight is not None:
        assert most_in_flight(early, Kind.START, Kind.WAIT) <= in_flight

    def order(steps, *kinds):
        return [(op.microbatch, op.unit, op.range) for op in steps if op.kind in kinds]

    # The same exchanges in the same order, begun and ended; and nothing else has moved.
    for kinds in ((Kind.START_GATHER, Kind.GATHER), (Kind.WAIT_GATHER, Kind.GATHER)):
        assert order(early, *kinds) == order(plain, Kind.GATHER)
    for kind in (Kind.START, Kind.WAIT):
        assert order(early, kind) == order(plain, Kind.REDUCE)
    added = {*ENDS, *ENDS.values(), Kind.POLL, Kind.GATHER, Kind.REDUCE}
    assert [op for op in early if op.kind not in added] == [op for op in plain if op.kind not in added]


def test_list_that_gathers_one_unit_ahead():
    steps = prefetch_gathers(
        insert_gathers(compute_operations("sequential", 1, StagePlacement((range(2),), (0,))), separate_needs(2)), 1
    )
    assert " ".join(str(op) for op in steps) == (
        "START_GATHER(0, 0) WAIT_GATHER(0, 0) START_GATHER(0, 1) FORWARD(0, 0) FREE(0, 0) "
        "WAIT_GATHER(0, 1) START_GATHER(0, 0) FORWARD(0, 1) BACKWARD(0, 1) FREE(0, 1) "
        "WAIT_GATHER(0, 0) BACKWARD(0, 0) FREE(0, 0)"
    )


def test_kept_units_and_gathers_after_the_update_are_not_moved():
    steps = [*zero3(2, 1, separate_needs(2)), Operation(Kind.GATHER, unit=0)]
    assert prefetch_gathers(steps, 0) == steps
    assert prefetch_gathers(steps, 2)[-1] == steps[-1]
    whole = [op for op in steps if op.kind is not Kind.FREE]
    assert prefetch_gathers(whole, 2) == whole


Break = Callable[[list[Operation]], object]


def index_of(steps, text):
    return [str(op) for op in steps].index(text)


def move(text, to):
    def change(steps):
        op = steps.pop(index_of(steps, text))
        steps.insert(index_of(steps, to), op)

    return change


@cases(
    "damage, match",
    (
        lambda steps: steps.pop(index_of(steps, "WAIT_GATHER(0, 1)")),
        r"FORWARD\(0, 1\) uses unit 1 while the gather",
    ),
    (
        lambda steps: steps.pop(index_of(steps, "START_GATHER(0, 1)")),
        r"WAIT_GATHER\(0, 1\) waits for a gather that was not started",
    ),
    (move("WAIT_GATHER(0, 1)", "FREE(0, 1)"), r"FORWARD\(0, 1\) uses unit 1 while the gather"),
    (move("START_GATHER(0, 1)", "START_GATHER(0, 0)"), r"the same order"),
    (lambda steps: steps.insert(0, Operation(Kind.START_GATHER, 0, 0)), r"START_GATHER\(0, 0\) comes while"),
    (
        lambda steps: steps.insert(index_of(steps, "FORWARD(0, 0)"), Operation(Kind.START_GATHER, 0, 0)),
        r"FORWARD\(0, 0\) uses unit 0 while the gather of this unit is in flight; put the WAIT_GATHER",
    ),
    (
        lambda steps: steps.insert(index_of(steps, "APPLY([0:40])"), Operation(Kind.START_GATHER, unit=0)),
        r"APPLY\(\[0:40\]\) changes parameters that START_GATHER\(0\) is still sending",
    ),
    (lambda steps: steps.append(Operation(Kind.START_GATHER, unit=0)), r"START_GATHER\(0\) is never completed"),
    (move("WAIT(0, [80:120])", "AGREE()"), r"BACKWARD\(1, 2\) writes gradients that START\(0, \[80:120\]\)"),
)
def test_broken_lists_are_rejected(damage, match):
    units = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(3)}
    lists = [
        prefetch_gathers(overlap_reductions(zero3(3, 2, separate_needs(3)), units, separate_needs(3), 1), 1)
        for _ in range(2)
    ]
    prove(lists, 3, 2, separate_needs(3))
    damage(lists[1])
    with pytest.raises(ScheduleError, match=rf"rank \d.*({match})"):
        prove(lists, 3, 2, separate_needs(3))


def test_use_of_a_kept_unit_during_its_gather_is_rejected():
    kept = [op for op in zero3(2, 1, separate_needs(2)) if op.kind not in (Kind.GATHER, Kind.FREE)]
    kept += [Operation(Kind.GATHER, unit=unit) for unit in range(2)]
    prove([kept, kept], 2, 1, separate_needs(2))
    at = index_of(kept, "FORWARD(0, 1)")
    ends = [Operation(kind, unit=1) for kind in (Kind.START_GATHER, Kind.WAIT_GATHER)]
    before = [*kept[:at], *ends, *kept[at:]]
    prove([before, before], 2, 1, separate_needs(2))
    around = [*kept[:at], ends[0], kept[at], ends[1], *kept[at + 1 :]]
    with pytest.raises(ScheduleError, match=r"FORWARD\(0, 1\) uses unit 1 while the gather"):
        prove([around, around], 2, 1, separate_needs(2))


def test_row_sums_of_tensor_ranks_wait_for_all_reductions():
    ranges = {unit: Range(UNIT * unit, UNIT * (unit + 1)) for unit in range(2)}
    reduces = [Operation(Kind.REDUCE, range=part) for part in ranges.values()]
    result = overlap_reductions([*reduces, Operation(Kind.SUM_ROWS), Operation(Kind.AGREE)], ranges, separate_needs(2))
    assert [op.kind for op in result] == [*[Kind.START] * 2, *[Kind.WAIT] * 2, Kind.SUM_ROWS, Kind.AGREE]
