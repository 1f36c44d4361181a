"""Operation lists: their order, and the places of an exchange's reductions."""

import pytest

from harness import trainings
from harness.inputs import write_text
from harness.trainings import assemble_trainer, recipe_keys
from hpcdist.arrays.ranges import Range
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.core.operations import USES, Kind, Operation, StagePlacement, looped
from hpcdist.strategies.schedule.operation_list import (
    compute_operations,
    evaluation_operations,
    insert_exchange,
    insert_gathers,
)
from hpcdist.strategies.schedule.passes import expand, gpipe, one_f_one_b


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


RUN = recipe_keys(
    "pipeline=2 strategy=zero3 microbatches=3 zero.keep_gradients=true global_batch=12 layers=4 tied=false"
)


@pytest.mark.parametrize("keep", ["false", "true"])
@pytest.mark.full_except("true")
def test_split_backward_holds_no_more_parameters(tmp_path, rng, keep):
    text = write_text(tmp_path / "text.txt", rng)

    def body(comm, schedule):
        keys = {"data.path": text, "parallel.schedule": schedule, "zero.keep_parameters": keep}
        trainer = assemble_trainer(comm, RUN | keys)
        assert trainer.ledger is not None
        trainings.run_steps(trainer, 2)
        gathers = sum(op.kind is Kind.GATHER for op in trainer.operations)
        return trainer.ledger.peak["parameters"], gathers, len(trainer.context.units)

    joint = run_threads(4, lambda comm: body(comm, "1f1b"))
    for schedule in ("zb-h1", "zb-h2"):
        for (one, _, _), (split, gathers, units) in zip(
            joint, run_threads(4, lambda comm, schedule=schedule: body(comm, schedule)), strict=True
        ):
            assert split == one
            assert (gathers == units) == (keep == "true")
