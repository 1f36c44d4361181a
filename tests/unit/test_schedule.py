"""Operation lists: order, and where an exchange's reductions are placed."""

from hpcdist.arrays.ranges import Range
from hpcdist.strategies.schedule.generators import compute, forward_only, gathered, interleave
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.placement import Placement, looped


def whole(units: int) -> Placement:
    return Placement((range(units),), (0,))


def test_sequential_is_forward_then_backward_of_each_microbatch() -> None:
    assert [str(op) for op in compute("sequential", 2, whole(2))] == [
        "FORWARD(0, 0)", "FORWARD(0, 1)", "BACKWARD(0, 1)", "BACKWARD(0, 0)",
        "FORWARD(1, 0)", "FORWARD(1, 1)", "BACKWARD(1, 1)", "BACKWARD(1, 0)",
    ]  # fmt: skip


def test_reductions_come_as_early_as_their_gradients_are_complete() -> None:
    units = {0: Range(0, 10), 1: Range(10, 20), 2: Range(20, 30)}
    exchange = [
        Operation(Kind.REDUCE, range=Range(15, 30)),
        Operation(Kind.REDUCE, range=Range(0, 15)),
        Operation(Kind.AGREE),
        Operation(Kind.APPLY, range=Range(0, 30)),
    ]
    steps = interleave(compute("sequential", 2, whole(3)), exchange, units)
    assert [str(op) for op in steps[-8:]] == [
        "FORWARD(1, 2)", "BACKWARD(1, 2)", "BACKWARD(1, 1)", "REDUCE([15:30])", "BACKWARD(1, 0)", "REDUCE([0:15])",
        "AGREE()", "APPLY([0:30])",
    ]  # fmt: skip


def test_no_reduction_before_the_last_microbatch() -> None:
    steps = interleave(
        compute("sequential", 3, whole(1)), [Operation(Kind.REDUCE, range=Range(0, 4))], {0: Range(0, 4)}
    )
    assert [op.kind for op in steps].index(Kind.REDUCE) == len(steps) - 1


def test_a_unit_is_gathered_for_each_use_and_a_shared_one_for_all_of_them() -> None:
    apart = gathered(compute("sequential", 1, whole(2)), {0: [0], 1: [1]})
    assert [str(op) for op in apart] == [
        "GATHER(0, 0)", "FORWARD(0, 0)", "FREE(0, 0)", "GATHER(0, 1)", "FORWARD(0, 1)", "FREE(0, 1)",
        "GATHER(0, 1)", "BACKWARD(0, 1)", "FREE(0, 1)", "GATHER(0, 0)", "BACKWARD(0, 0)", "FREE(0, 0)",
    ]  # fmt: skip
    tied = [str(op) for op in gathered(compute("sequential", 2, whole(3)), {0: [0], 1: [1], 2: [0, 2]})]
    assert tied.count("GATHER(0, 0)") == tied.count("FREE(0, 0)") == 1
    assert tied[0] == "GATHER(0, 0)" and tied[len(tied) // 2 - 1] == "FREE(0, 0)", "once in each micro-batch"
    assert tied.count("GATHER(1, 2)") == 2
    evaluation = [str(op) for op in gathered(forward_only(whole(3)), {0: [0], 1: [1], 2: [0, 2]})]
    assert evaluation.index("FREE(0, 0)") > evaluation.index("FORWARD(0, 2)")


def test_every_microbatch_is_reduced_where_gradients_do_not_stay() -> None:
    exchange = [Operation(Kind.REDUCE, range=Range(0, 4)), Operation(Kind.AGREE)]
    steps = interleave(compute("sequential", 2, whole(1)), exchange, {0: Range(0, 4)}, every_microbatch=True)
    assert [str(op) for op in steps] == [
        "FORWARD(0, 0)", "BACKWARD(0, 0)", "REDUCE(0, [0:4])", "FORWARD(1, 0)", "BACKWARD(1, 0)", "REDUCE(1, [0:4])",
        "AGREE()",
    ]  # fmt: skip


def test_the_previous_stage_does_not_wait_for_a_reduction() -> None:
    steps = interleave(
        compute("1f1b", 1, looped([range(1), range(1, 2)], 2), 1),
        [Operation(Kind.REDUCE, range=Range(4, 8))],
        {1: Range(4, 8)},
    )
    assert [str(op) for op in steps] == [
        "RECV_ACTIVATION(0, 1)", "FORWARD(0, 1)", "BACKWARD(0, 1)", "SEND_GRADIENT(0, 1)", "REDUCE([4:8])",
    ]  # fmt: skip
