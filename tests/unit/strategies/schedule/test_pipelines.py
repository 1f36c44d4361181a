"""Passes of one rank: the textbook orders, and their expansion into operations."""

from hpcdist.strategies.core.operations import Kind, looped
from hpcdist.strategies.schedule.operation_list import compute_operations, insert_gathers
from hpcdist.strategies.schedule.passes import expand, gpipe, one_f_one_b


def short(passes):
    return " ".join(f"{'F' if direction is Kind.FORWARD else 'B'}{microbatch}" for direction, microbatch, _ in passes)


def test_gpipe_fills_then_drains():
    assert short(gpipe(1, 4, 3)) == "F0 F1 F2 B0 B1 B2"


def test_one_f_one_b_of_four_stages():
    """The figure of the paper: warm-up of 3, 2, 1 and 0 forwards, then backward and forward alternate."""
    assert [short(one_f_one_b(stage, 4, 5)) for stage in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ]


def test_one_f_one_b_with_fewer_microbatches_than_stages():
    assert [short(one_f_one_b(stage, 4, 2)) for stage in range(4)] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


def two_units_per_stage(stages):
    """Return two units for each stage."""
    return looped([range(2 * stage, 2 * stage + 2) for stage in range(stages)], stages)


def ends(stage, stages):
    return [str(op) for op in expand(one_f_one_b(stage, stages, 1), two_units_per_stage(stages), stage)]


def test_expand_adds_messages_around_the_units():
    assert ends(1, 3) == [
        "RECV_ACTIVATION(0, 2)", "FORWARD(0, 2)", "FORWARD(0, 3)", "SEND_ACTIVATION(0, 4)",
        "RECV_GRADIENT(0, 4)", "BACKWARD(0, 3)", "BACKWARD(0, 2)", "SEND_GRADIENT(0, 2)",
    ]  # fmt: skip


def test_expand_sends_nothing_beyond_the_ends():
    assert ends(0, 1) == ["FORWARD(0, 0)", "FORWARD(0, 1)", "BACKWARD(0, 1)", "BACKWARD(0, 0)"]
    assert ends(0, 2) == [
        "FORWARD(0, 0)", "FORWARD(0, 1)", "SEND_ACTIVATION(0, 2)",
        "RECV_GRADIENT(0, 2)", "BACKWARD(0, 1)", "BACKWARD(0, 0)",
    ]  # fmt: skip
    assert ends(1, 2) == [
        "RECV_ACTIVATION(0, 2)", "FORWARD(0, 2)", "FORWARD(0, 3)",
        "BACKWARD(0, 3)", "BACKWARD(0, 2)", "SEND_GRADIENT(0, 2)",
    ]  # fmt: skip


def test_recompute_precedes_the_gradient_and_is_omitted_if_useless():
    two = looped([range(1), range(1, 2)], 2)
    first = [str(op) for op in expand(one_f_one_b(0, 2, 2), two, 0, recompute=True)]
    assert first == [
        "FORWARD(0, 0)", "SEND_ACTIVATION(0, 1)", "FORWARD(1, 0)", "SEND_ACTIVATION(1, 1)",
        "FORWARD(0, 0, again)", "RECV_GRADIENT(0, 1)", "BACKWARD(0, 0)",
        "FORWARD(1, 0, again)", "RECV_GRADIENT(1, 1)", "BACKWARD(1, 0)",
    ]  # fmt: skip
    last = expand(one_f_one_b(1, 2, 2), two, 1, recompute=True)
    assert not any(op.recompute for op in last), "each micro-batch goes back right after it came"
    for stage in range(2):
        twice = expand(gpipe(stage, 2, 3), two_units_per_stage(2), stage, recompute=True)
        assert [op.unit for op in twice if op.recompute] == [2 * stage, 2 * stage + 1] * 3
        assert all(op.kind is Kind.FORWARD for op in twice if op.recompute)
        assert [op for op in twice if not op.recompute] == expand(gpipe(stage, 2, 3), two_units_per_stage(2), stage)


def test_recomputation_gathers_units_again():
    """Inner units are gathered for each use.

    The ends of a chunk stay gathered if the next pass uses them immediately.
    """
    three = looped([range(3), range(3, 6)], 2)
    for recompute, each in ((False, [8, 8, 7]), (True, [9, 12, 8])):
        steps = insert_gathers(
            compute_operations("gpipe", 4, three, recompute=recompute), {unit: [unit] for unit in range(3)}
        )
        units = [op.unit for op in steps if op.kind is Kind.GATHER]
        assert [units.count(unit) for unit in range(3)] == each
