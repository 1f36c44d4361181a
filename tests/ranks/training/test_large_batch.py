"""Large batches over real messages: growing batches, rates that follow them, and the gradient noise."""

import numpy as np
import pytest

from harness.trainings import recipe_keys, run_steps, trainer_of
from hpcdist.comm.threads.communicator import solo

STEPS = 5
KEYS = {"run.batch_warmup": [16, 8, 48, 16]} | recipe_keys(
    f"layers=1 hidden=16 heads=2 data.context=8 precision.mode=float64 steps={STEPS} global_batch=24 "
    "optimizer.name=lamb optimizer.trust_ratio_max=10.0 optimizer.normalize_gradient=true optimizer.base_batch=8 "
    "optimizer.scaling=sqrt optimizer.warmup_samples=30"
)


def _train(comm, keys):
    trainer = trainer_of(comm, keys)
    return trainer, run_steps(trainer, STEPS)


@pytest.mark.parametrize("strategy", ["allreduce", "zero2"])
def test_growing_batches_have_noise_and_scaled_rates(comm, tmp_path, strategy):
    path = comm.broadcast_object(tmp_path / "text.txt")
    if comm.rank == 0:
        path.write_text(" ".join("".join(word) for word in np.random.default_rng(5).choice(list("abcdefgh"), (600, 4))))
    comm.barrier()
    keys = {**KEYS, "data.path": path}
    ways = {"parallel.strategy": strategy, "parallel.microbatches": 2, "communication.algorithm": "ring"}
    trainer, steps = _train(comm, {**keys, **ways, "run.noise_scale_every_steps": 2})
    assert trainer.noise is not None
    _, alone = _train(solo(), keys)
    np.testing.assert_allclose([step.loss for step in steps], [step.loss for step in alone], rtol=1e-9)
    # The noise of steps 2 and 4, of 8 and 16 samples: all small batches are of one size.
    small = [row[1] for row in trainer.noise.taken()]
    count = 2 * comm.size if strategy == "zero2" and comm.size > 1 else comm.size if comm.size > 1 else 2
    assert small == pytest.approx([8 / count, 16 / count])
    output = comm.allgather_object(trainer.noise.smoothed.state())
    assert all(other == output[0] for other in output) and output[0]["weight"] > 0
