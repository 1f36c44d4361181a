"""Operation lists: order, and where an exchange's reductions are placed."""

from hpcdist.arrays.ranges import Range
from hpcdist.strategies.schedule.generators import interleave, sequential
from hpcdist.strategies.schedule.operations import Kind, Operation


def test_sequential_is_forward_then_backward_of_each_microbatch() -> None:
    assert [str(op) for op in sequential(2, 2)] == [
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
    steps = interleave(sequential(3, 2), exchange, units)
    assert [str(op) for op in steps[-8:]] == [
        "FORWARD(1, 2)", "BACKWARD(1, 2)", "BACKWARD(1, 1)", "REDUCE([15:30])", "BACKWARD(1, 0)", "REDUCE([0:15])",
        "AGREE()", "APPLY([0:30])",
    ]  # fmt: skip


def test_no_reduction_before_the_last_microbatch() -> None:
    steps = interleave(sequential(1, 3), [Operation(Kind.REDUCE, range=Range(0, 4))], {0: Range(0, 4)})
    assert [op.kind for op in steps].index(Kind.REDUCE) == len(steps) - 1
