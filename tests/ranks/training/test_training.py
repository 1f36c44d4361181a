"""The same recipe on any number of ranks is the same run: losses, weights, and resume from a checkpoint."""

import numpy as np
import pytest

from harness.trainings import TOLERANCE, dotted_keys, losses, small_trainer
from hpcdist import collectives
from hpcdist.comm.threads.communicator import solo
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 50
KEYS = {"model.hidden": 32, "data.context": 16, "run.steps": STEPS, "run.global_batch": 7, "optimizer.warmup_steps": 5}


def _trainer(comm, folder, resume=None, **keys):
    return small_trainer(comm, folder, KEYS | dotted_keys(keys), resume)


def _losses(trainer, last=STEPS):
    return losses(trainer, last)


@pytest.mark.parametrize("mode", ["float32", "float64"])
@pytest.mark.parametrize("algorithm", sorted(collectives.ALLREDUCE))
@pytest.mark.full_except("all_to_all-float32", "circulant-float64")
def test_rank_losses_equal_one_process(comm, folder, algorithm, mode):
    alone = _losses(_trainer(solo(), folder, precision__mode=mode))
    together = _losses(_trainer(comm, folder, precision__mode=mode, communication__algorithm=algorithm))
    assert alone[-1] < alone[0] - 0.5, "the model learns"
    np.testing.assert_allclose(together, alone, rtol=TOLERANCE[mode])


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb", "muon"])
def test_rank_accumulation_and_optimizers_equal_one_process(comm, folder, name):
    keys = {"precision__mode": "float64", "optimizer__name": name, "model__tied": "true"}
    alone = _trainer(solo(), folder, **keys)
    together = _trainer(comm, folder, parallel__microbatches=3, communication__algorithm="ring", **keys)
    np.testing.assert_allclose(_losses(together), _losses(alone), rtol=1e-11)
    difference = np.linalg.norm(together.exchange.parameters.array - alone.exchange.parameters.array)
    assert difference <= 1e-9 * np.linalg.norm(alone.exchange.parameters.array)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb", "muon"])
@pytest.mark.full_except("lamb", "lars")
def test_rank_resume_is_bit_identical(comm, folder, name):
    keys = {"optimizer__name": name, "communication__algorithm": "ring"}
    whole = _trainer(comm, folder, **keys)
    expected = _losses(whole)
    half = _trainer(comm, folder, **keys)
    first = _losses(half, STEPS // 2)
    resumed = _trainer(comm, folder, resume=CheckpointSaver(half, folder / "checkpoints").save(STEPS // 2), **keys)
    assert resumed.first_step == STEPS // 2
    assert first + _losses(resumed) == expected
    assert resumed.exchange.parameters.array.tobytes() == whole.exchange.parameters.array.tobytes()
    assert all(
        store.array.tobytes() == whole.exchange.update.slots()[slot].array.tobytes()
        for slot, store in resumed.exchange.update.slots().items()
    )


@pytest.mark.parametrize("axis", ["zero3", "tensor"])
def test_rank_muon_over_shards_equals_one_process(comm, folder, axis):
    keys = {"precision__mode": "float64", "optimizer__name": "muon", "model__hidden": 48, "model__heads": 12}
    layout = {"parallel__strategy": "zero3"} if axis == "zero3" else {"parallel__tensor": comm.size}
    together = _trainer(comm, folder, **keys, **layout)
    np.testing.assert_allclose(_losses(together, 12), _losses(_trainer(solo(), folder, **keys), 12), rtol=1e-11)


def test_rank_declared_nodes_reach_the_data_axis(comm, folder):
    declared = comm.dup()
    declared.declared_node = comm.rank // 2  # as communication.ranks_per_node = 2 does at the start of a job
    together = _trainer(declared, folder, precision__mode="float64", communication__algorithm="hierarchical")
    assert together.data_axis.nodes().count == -(-comm.size // 2)
    np.testing.assert_allclose(_losses(together), _losses(_trainer(solo(), folder, precision__mode="float64")), 1e-12)


def test_rank_checkpoint_moves_to_another_number_of_ranks(comm, folder):
    together = _trainer(comm, folder, precision__mode="float64")
    first = _losses(together, STEPS // 2)
    saved = CheckpointSaver(together, folder / "checkpoints").save(STEPS // 2)
    comm.barrier()
    alone = _trainer(solo(), folder, resume=saved, precision__mode="float64")
    assert alone.exchange.parameters.array.tobytes() == together.exchange.parameters.array.tobytes()
    reference = _losses(_trainer(solo(), folder, precision__mode="float64"))
    np.testing.assert_allclose(first + _losses(alone), reference, rtol=1e-12)


def test_rank_validation_loss_does_not_depend_on_the_ranks(comm, folder):
    alone = mean_validation_loss(_trainer(solo(), folder, precision__mode="float64"))
    together = mean_validation_loss(_trainer(comm, folder, precision__mode="float64"))
    assert np.isfinite(alone)
    np.testing.assert_allclose(together, alone, rtol=1e-12)
