"""Training over data x tensor: steps, norms, checkpoints and rejections, for every gradient exchange."""

from dataclasses import replace

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases, on_threads
from harness.trainings import assert_rejected, check_training, losses, recipe_keys, run_single_process, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import DivergenceError, ScheduleError
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation
from hpcdist.strategies.schedule.replica_check import check_tensor_axis
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 10
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
KEYS = {
    "model.layers": 1,
    "model.hidden": 24,
    "model.heads": 4,
    "model.vocabulary": 257,  # uneven over 2, 3 and 4 ranks
    "data.context": 12,
    "run.steps": STEPS,
    "run.global_batch": 5,
    "run.validation_samples": 20,
    "optimizer.warmup_steps": 3,
    "optimizer.clip_norm": 0.7,
    "communication.algorithm": "node_shared",
    "precision.mode": "float64",
}


CASES = {
    "1x1x2": (2, {"parallel.tensor": 2}),
    "1x1x2 by rows": (2, recipe_keys("tensor=2 sequence_parallel=true")),
    "1x1x2 in float32": (2, recipe_keys("tensor=2 precision.mode=float32")),
    "1x1x3 by rows, tied": (3, recipe_keys("tensor=3 sequence_parallel=true heads=6 tied=true")),
    "1x1x4 tied, dropping": (4, recipe_keys("tensor=4 tied=true dropout=0.1")),
    "1x1x4 by rows, accumulating": (4, recipe_keys("tensor=4 sequence_parallel=true microbatches=2")),
    "2x1x2 with zero1": (4, recipe_keys("tensor=2 strategy=zero1")),
    "2x1x2 with zero2 by rows": (4, recipe_keys("tensor=2 strategy=zero2 sequence_parallel=true")),
    "2x1x2 with zero3 by rows, tied": (
        4,
        recipe_keys("tensor=2 strategy=zero3 sequence_parallel=true tied=true microbatches=2"),
    ),
    "1x2x2 by rows, tied": (
        4,
        recipe_keys("tensor=2 pipeline=2 sequence_parallel=true tied=true microbatches=5 dropout=0.2"),
    ),
    "1x2x2 zb-v by rows": (
        4,
        recipe_keys("tensor=2 pipeline=2 schedule=zb-v sequence_parallel=true microbatches=5 layers=2 dropout=0.2"),
    ),
    "1x2x2 recomputing by rows": (
        4,
        recipe_keys("tensor=2 pipeline=2 sequence_parallel=true microbatches=5 recompute=true dropout=0.2"),
    ),
    "2x1x2 overlapping by rows": (4, recipe_keys("tensor=2 overlap=thread sequence_parallel=true")),
    "2x1x2 lamb with zero3": (4, recipe_keys("tensor=2 strategy=zero3 optimizer.name=lamb")),
    "2x1x2 lars by rows": (4, recipe_keys("tensor=2 optimizer.name=lars sequence_parallel=true")),
    "2x1x2 offloading": (
        4,
        recipe_keys("tensor=2 strategy=zero1 zero.offload_optimizer=file zero.offload_directory=."),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.matrix_except(
    *("1x1x2", "1x1x2 in float32", "1x1x3 by rows, tied", "1x1x4 by rows, accumulating", "2x1x2 with zero1"),
    *("2x1x2 with zero3 by rows, tied", "1x2x2 zb-v by rows", "2x1x2 overlapping by rows", "2x1x2 lars by rows"),
    "2x1x2 offloading",
)
@pytest.mark.full_except("2x1x2 overlapping by rows")
def test_tensor_training_matches_one_process(case, shared_text):
    ranks, changed = CASES[case]
    keys = KEYS | {"data.path": shared_text} | changed
    if "zero.offload_directory" in keys:
        keys["zero.offload_directory"] = shared_text.parent
    expected, tolerance = run_single_process(keys, STEPS), TOLERANCE[str(keys["precision.mode"])]
    assert expected.losses[0] - expected.losses[-1] > 100 * tolerance * expected.losses[0], "so that a wrong step shows"

    def body(comm):
        together = trainer_of(comm, keys)
        assert together.proof is not None and together.model.layout.parameters > 12000
        check_training(together, expected, STEPS, tolerance)
        check_tensor_axis(together.context.tensor, together.exchange.parameters, STEPS)
        together.close()

    run_threads(ranks, body)


def test_node_aligned_partitions_agree_on_all_tensor_ranks(shared_text):
    keys = KEYS | {"data.path": shared_text, "parallel.tensor": 2, "parallel.sequence_parallel": "true"}
    keys |= {"parallel.strategy": "zero1", "communication.algorithm": "hierarchical"}
    expected = run_single_process(keys, 2)

    def body(comm):
        together = trainer_of(comm, keys)
        assert [len(ranks) for ranks in together.context.data.nodes().members] == [[3, 1], [2, 2]][comm.rank % 2]
        np.testing.assert_allclose(losses(together, 2), expected.losses, rtol=1e-12)
        check_tensor_axis(together.context.tensor, together.exchange.parameters, 2)

    run_threads(8, body, 5)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.full_except("lamb")
def test_training_checkpoints_move_between_tensor_degrees(optimizer, shared_text, tmp_path):
    keys = KEYS | {"data.path": shared_text, "optimizer.name": optimizer}
    expected, path, result = run_single_process(keys, 12).losses, None, []
    layouts = ((1, {}), (2, {"parallel.tensor": 2}), (4, {"parallel.tensor": 2, "parallel.strategy": "zero3"}))
    layouts += ((4, {"parallel.tensor": 4, "parallel.sequence_parallel": "true"}), (1, {}))

    def body(comm, changed, path, last):
        trainer = trainer_of(comm, keys | changed, path)
        assert trainer.first_step == max(0, last - 2)
        return losses(trainer, last), CheckpointSaver(trainer, tmp_path).save(last)

    for number, (ranks, changed) in enumerate(layouts, 1):
        (more, path), *_ = run_threads(ranks, lambda comm, c=changed, p=path, n=2 * number: body(comm, c, p, n))
        result += more
    np.testing.assert_allclose(result, expected[:10], rtol=1e-12)


def test_resumed_tensor_training_has_the_same_bits(shared_text, tmp_path):
    keys = KEYS | {"data.path": shared_text, "parallel.tensor": 2, "parallel.sequence_parallel": "true"}

    def body(comm):
        whole = losses(trainer_of(comm, keys), 8)
        half = trainer_of(comm, keys)
        return whole == losses(half, 3) + losses(trainer_of(comm, keys, CheckpointSaver(half, tmp_path).save(3)), 8)

    assert run_threads(2, body) == [True, True]


@on_threads(4)
def test_replica_check_names_a_diverging_tensor(comm, shared_text):
    keys = KEYS | {"data.path": shared_text, "parallel.tensor": 2, "parallel.strategy": "zero1"}
    trainer = trainer_of(comm, keys)
    if comm.rank == 3:
        trainer.exchange.parameters.view("1.norm2.scale")[1] += 1e-9
    store, tensor = trainer.exchange.parameters, trainer.context.tensor
    if comm.rank < 2:
        check_tensor_axis(tensor, store, 4)
        return
    with pytest.raises(
        DivergenceError, match=r"step 4.*1\.norm2\.scale of shape \(24,\): no majority of the 2 ranks has equal bits"
    ):
        check_tensor_axis(tensor, store, 4)


@pytest.mark.parametrize("by_rows", ["false", "true"])
@pytest.mark.parametrize(
    ("value", "output"), [(np.nan, "parameter 1.down.weight"), (1e308, "output of layer 1 in micro-batch 0")]
)
@on_threads(2)
def test_only_the_tensor_rank_with_a_bad_value_is_named(comm, by_rows, value, output, shared_text):
    keys = KEYS | {"data.path": shared_text, "parallel.tensor": 2, "parallel.sequence_parallel": by_rows}
    trainer = trainer_of(comm, keys)
    if comm.rank == 1:
        trainer.exchange.parameters.view("1.up.bias")[...] = 100
        trainer.exchange.parameters.view("1.down.weight")[...] = value
    assert f". rank 1: {output}. Nothing" in trainings.failure_reason(trainer)


@cases(
    "changed, output",
    ({"parallel.tensor": 3}, r"parallel.tensor = 3 with model.heads = 4: .* \[1, 2, 4\]"),
    ({"parallel.tensor": 2, "model.kind": "mlp"}, "parallel.tensor = 2 with model.kind = 'mlp'"),
    ({"parallel.sequence_parallel": "true"}, "parallel.sequence_parallel = true with parallel.tensor = 1"),
    ({"parallel.tensor": 2, "parallel.strategy": "local_sgd"}, "to one of allreduce, zero1"),
    ({"parallel.tensor": 2, "parallel.strategy": "parameter_server"}, "parameter_server.placement = 'dedicated'"),
    ({"parallel.tensor": 2, "run.logical_shards": 2}, "run.logical_shards = 2 with parallel.tensor = 2"),
    ({"parallel.tensor": 2, "data.shares": "measured"}, "data.shares = 'measured' with parallel.tensor = 2"),
)
def test_incompatible_tensor_options_are_rejected(changed, output):
    assert_rejected({"model.heads": 4, "model.hidden": 24, "data.context": 12, **changed}, output)


def test_proof_covers_the_tensor_axis(shared_text):
    keys = KEYS | {"data.path": shared_text, "parallel.tensor": 2, "parallel.sequence_parallel": "true"}
    keys |= {"parallel.microbatches": 2}

    def body(comm):
        trainer = trainer_of(comm, keys)
        return trainer.operations, trainer.context.ranges

    lists, (units, *_) = zip(*run_threads(4, body), strict=True)
    grid, (first, *others) = ProcessGrid(data=2, tensor=2), lists

    def prove(changed):
        return verify([changed, *others], grid=grid, units=units, microbatches=2, needs={0: (), 1: ()})

    assert prove(first).meetings > verify(lists[::2], grid=ProcessGrid(data=2), units=units, microbatches=2).meetings
    rows = Operation(Kind.SUM_ROWS)
    assert first.count(rows) == 1
    at = first.index(rows)
    early = [rows, *(op for op in first if op != rows)]
    with pytest.raises(ScheduleError, match=r"rank 0: .* comes after SUM_ROWS\(\)"):
        prove(early)
    with pytest.raises(ScheduleError, match=r"SUM_ROWS\(\) occurs 2 times"):
        prove([*first[:at], rows, *first[at:]])
    with pytest.raises(ScheduleError, match=r"rank 0: SUM_ROWS\(\) comes after AGREE\(\)"):
        prove([*first[:at], first[at + 1], rows, *first[at + 2 :]])
    with pytest.raises(ScheduleError, match=r"rank 1 waits in SUM_ROWS\(\) for rank 0"):
        prove([*first[:at], *first[at + 1 :]])
    swapped = [replace(op, microbatch=1 - op.microbatch) if op.kind in COMPUTE else op for op in first]
    with pytest.raises(ScheduleError, match="must call their collectives in the same order"):
        prove(swapped)
