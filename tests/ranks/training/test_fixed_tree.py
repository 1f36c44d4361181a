"""The deterministic mode over real messages: any number of ranks trains with the bits of one process."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import digest, losses_and_norms, recipe_keys, small_trainer, state_bits
from hpcdist.arrays.ranges import split
from hpcdist.collectives.algorithms.fixed_tree import FixedTree, shards_of
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.strategies.schedule.replica_check import check_replicas
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 5
SAMPLES = 24
SHARDS = 12  # one partial sum a rank on 3 ranks, several on 2 and 4


_trainer = partial(
    small_trainer,
    **recipe_keys(f"hidden=32 data.context=16 global_batch={SAMPLES} validation_samples=50 logical_shards={SHARDS}"),
)


@pytest.mark.parametrize(("shards", "dtype"), [(8, np.float32), (12, np.float64), (13, np.float16)])
def test_rank_fixed_tree_sums_have_the_bits_of_one_process(comm, shards, dtype, rng):
    inputs = rng.standard_normal((shards, 10_001)).astype(dtype)

    def reduce_over(over, shares=None):
        tree = FixedTree(over, shards)
        local_slice = shards_of(shards, over.size)[over.rank]
        for shard in range(local_slice.start, local_slice.stop):
            tree.add(shard, inputs[shard])
        buffer = np.empty_like(inputs[0])
        if shares is None:
            tree.reduce(buffer)
        else:
            tree.reduce_scatter(buffer, shares)
        return buffer

    shares = split(inputs.shape[1], comm.size, inputs.itemsize)[::-1]
    with count_traffic(comm) as traffic:
        together, scattered = reduce_over(comm), reduce_over(comm, shares)
    expected, local_slice = reduce_over(solo()), shares[comm.rank].slice
    assert (
        together.tobytes() == expected.tobytes() and scattered[local_slice].tobytes() == expected[local_slice].tobytes()
    )
    assert comm.checked or not traffic.unknown


@cases(
    "keys",
    {"optimizer.clip_norm": 0.1},
    {"optimizer.name": "lamb", "optimizer.clip_norm": 0.1, "model.tied": "true"},
    {"optimizer.name": "lars", "precision.mode": "float64", "communication.bucket_bytes": 2000},
    {"model.kind": "mlp", "optimizer.name": "sgd", "run.logical_shards": 8},
)
@pytest.mark.full_except("keys0", "keys1")
def test_rank_deterministic_training_has_the_bits_of_one_process(comm, folder, keys):
    alone, together = _trainer(solo(), folder, keys), _trainer(comm, folder, keys)
    assert losses_and_norms(together, STEPS) == losses_and_norms(alone, STEPS)
    assert digest(together) == digest(alone)
    assert mean_validation_loss(together) == mean_validation_loss(alone)
    check_replicas(comm, together.exchange.parameters, STEPS)


@cases(
    "way, keys",
    ({"parallel.strategy": "zero1"}, {"optimizer.name": "lars"}),
    ({"parallel.strategy": "zero2", "zero.shared_parameters": "true"}, {"optimizer.name": "adamw"}),
    ({"parallel.strategy": "zero3"}, {"optimizer.name": "lamb", "model.tied": "true", "precision.mode": "float64"}),
    ({"parallel.strategy": "zero3", "zero.persistent_below": 1000}, {"optimizer.name": "sgd"}),
    ({"parallel.strategy": "zero3", "zero.parameters": 2}, {"optimizer.name": "lamb"}),
)
@pytest.mark.full_except("way0-keys0", "way3-keys3")
def test_rank_deterministic_zero_has_the_bits_of_one_process(comm, folder, way, keys):
    if comm.size % way.get("zero.parameters", 1):
        pytest.skip("pairs of ranks")
    keys = {"optimizer.clip_norm": 0.1, **keys}
    alone, together = _trainer(solo(), folder, keys), _trainer(comm, folder, keys | way)
    assert losses_and_norms(together, 3) == losses_and_norms(alone, 3)
    assert mean_validation_loss(together) == mean_validation_loss(alone)
    assert state_bits(together) == state_bits(alone)
    together.close()
    alone.close()


def test_rank_resume_on_another_number_of_ranks_has_the_same_bits(comm, folder):
    whole = _trainer(solo(), folder, {})
    losses = losses_and_norms(whole, 9)
    together = _trainer(comm, folder, {})
    first = losses_and_norms(together, 3)
    saved = CheckpointSaver(together, folder / "checkpoints").save(3)
    comm.barrier()
    mine = folder / f"alone-{comm.rank}"
    alone = _trainer(solo(), folder, {}, resume=saved)  # from all ranks to one
    second = losses_and_norms(alone, 6)
    back = CheckpointSaver(alone, mine).save(6)
    resumed = _trainer(comm, folder, {}, resume=Path(comm.broadcast_object(str(back))))  # and from one to all
    assert resumed.first_step == 6
    assert first + second + losses_and_norms(resumed, 9) == losses
    assert digest(resumed) == digest(whole)
