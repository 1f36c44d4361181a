"""Operation lists: their order, and the places of an exchange's reductions."""

from hpcdist.arrays.ranges import Range
from hpcdist.strategies.core.operations import USES, Kind, Operation, StagePlacement, looped
from hpcdist.strategies.schedule.operation_list import (
    compute_operations,
    evaluation_operations,
    insert_exchange,
    insert_gathers,
)


def whole(units):
    return StagePlacement((range(units),), (0,))


def test_sequential_is_forward_then_backward_of_each_microbatch():
    assert [str(op) for op in compute_operations("sequential", 2, whole(2))] == [
        "FORWARD(0, 0)", "FORWARD(0, 1)", "BACKWARD(0, 1)", "BACKWARD(0, 0)",
        "FORWARD(1, 0)", "FORWARD(1, 1)", "BACKWARD(1, 1)", "BACKWARD(1, 0)",
    ]  # fmt: skip


def test_reductions_follow_immediately_on_complete_gradients():
    units = {0: Range(0, 10), 1: Range(10, 20), 2: Range(20, 30)}
    exchange = [
        Operation(Kind.REDUCE, range=Range(15, 30)),
        Operation(Kind.REDUCE, range=Range(0, 15)),
        Operation(Kind.AGREE),
        Operation(Kind.APPLY, range=Range(0, 30)),
    ]
    steps = insert_exchange(compute_operations("sequential", 2, whole(3)), exchange, units)
    assert [str(op) for op in steps[-8:]] == [
        "FORWARD(1, 2)", "BACKWARD(1, 2)", "BACKWARD(1, 1)", "REDUCE([15:30])", "BACKWARD(1, 0)", "REDUCE([0:15])",
        "AGREE()", "APPLY([0:30])",
    ]  # fmt: skip


def test_no_reduction_before_the_last_microbatch():
    steps = insert_exchange(
        compute_operations("sequential", 3, whole(1)), [Operation(Kind.REDUCE, range=Range(0, 4))], {0: Range(0, 4)}
    )
    assert [op.kind for op in steps].index(Kind.REDUCE) == len(steps) - 1


def test_units_are_gathered_per_use_and_shared_units_once():
    apart = insert_gathers(compute_operations("sequential", 2, whole(3)), {0: [0], 1: [1], 2: [2]})
    assert [str(op) for op in apart[:11]] == [
        "GATHER(0, 0)", "FORWARD(0, 0)", "FREE(0, 0)", "GATHER(0, 1)", "FORWARD(0, 1)", "FREE(0, 1)",
        "GATHER(0, 2)", "FORWARD(0, 2)", "BACKWARD(0, 2)", "FREE(0, 2)", "GATHER(0, 1)",
    ]  # fmt: skip
    between = [str(op) for op in apart].index("BACKWARD(0, 0)")
    assert [str(op) for op in apart[between - 1 : between + 3]] == [
        "GATHER(0, 0)", "BACKWARD(0, 0)", "FORWARD(1, 0)", "FREE(1, 0)"
    ]  # fmt: skip
    tied = [
        str(op) for op in insert_gathers(compute_operations("sequential", 2, whole(3)), {0: [0], 1: [1], 2: [0, 2]})
    ]
    assert (tied[0], tied[-1]) == ("GATHER(0, 0)", "FREE(1, 0)"), "through both micro-batches, which follow each other"
    for unit, times in ((0, 1), (1, 4), (2, 2)):
        assert sum(text.startswith("GATHER") and text.endswith(f" {unit})") for text in tied) == times
    evaluation = [str(op) for op in insert_gathers(evaluation_operations(whole(3)), {0: [0], 1: [1], 2: [0, 2]})]
    assert evaluation.index("FREE(0, 0)") > evaluation.index("FORWARD(0, 2)")


def test_kept_units_are_gathered_once():
    place = looped([range(2), range(2, 4)], 2)
    for rank, units in enumerate(place.chunks):
        steps = compute_operations("zb-h1", 3, place, rank)
        once = insert_gathers(steps, {unit: [unit] for unit in units}, keep=True)
        assert sorted(op.unit for op in once if op.kind is Kind.GATHER) == list(units)
        assert [op for op in once if op.kind not in (Kind.GATHER, Kind.FREE)] == steps
        last = [index for index, op in enumerate(once) if op.kind is Kind.BACKWARD_INPUT][-1]
        assert {op.kind for op in once[last + 1 :]} - {Kind.SEND_GRADIENT} == {Kind.FREE, Kind.BACKWARD_WEIGHT}
        each = insert_gathers(steps, {unit: [unit] for unit in units})
        there = set()
        for op in each:
            if op.kind is Kind.GATHER:
                there.add(op.unit)
            elif op.kind is Kind.FREE:
                there.remove(op.unit)
            else:
                assert len(there) <= 1 and (op.kind not in USES or op.unit in there)


def test_every_microbatch_is_reduced_if_gradients_are_not_kept():
    exchange = [Operation(Kind.REDUCE, range=Range(0, 4)), Operation(Kind.AGREE)]
    steps = insert_exchange(
        compute_operations("sequential", 2, whole(1)), exchange, {0: Range(0, 4)}, every_microbatch=True
    )
    assert [str(op) for op in steps] == [
        "FORWARD(0, 0)", "BACKWARD(0, 0)", "REDUCE(0, [0:4])", "FORWARD(1, 0)", "BACKWARD(1, 0)", "REDUCE(1, [0:4])",
        "AGREE()",
    ]  # fmt: skip


def test_gradient_message_precedes_the_reduction():
    steps = insert_exchange(
        compute_operations("1f1b", 1, looped([range(1), range(1, 2)], 2), 1),
        [Operation(Kind.REDUCE, range=Range(4, 8))],
        {1: Range(4, 8)},
    )
    assert [str(op) for op in steps] == [
        "RECV_ACTIVATION(0, 1)", "FORWARD(0, 1)", "BACKWARD(0, 1)", "SEND_GRADIENT(0, 1)", "REDUCE([4:8])",
    ]  # fmt: skip
