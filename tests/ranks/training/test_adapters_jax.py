"""JAX models over real messages: the results of plain JAX and optax on one process."""

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax

from harness.models import jax as models
from hpcdist.adapters.jax import model as adapter

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3", "pipeline"])
@pytest.mark.full
def test_rank_jax_training_matches_plain_jax(comm, rng, strategy):
    """Three steps: losses agree to 1e-5, params to 1e-4 of the largest value, in float32."""
    keys = {"parallel.strategy": strategy, "parallel.microbatches": 2}
    if strategy == "pipeline":
        keys |= {"parallel.strategy": "allreduce", "parallel.pipeline": comm.size, "parallel.microbatches": 4}
    functions, params = models.mlp(rng, depth=3)
    batches = [models.rows(rng, 8) for _ in range(3)]

    def loss(params, batch):
        return models.squares(models.compose(functions, params, batch[0]), batch[1]).mean()

    losses, after = models.train_plain(params, loss, batches)

    def build():
        return adapter.wrap(functions, params, models.squares, example=batches[0])

    result = models.train(comm, build, batches, keys)
    assert result.losses == pytest.approx(losses, rel=1e-5)
    model = build()
    for local_data, expected in zip(
        jax.tree_util.tree_leaves(model.trees(result.tensors)), jax.tree_util.tree_leaves(after), strict=True
    ):
        np.testing.assert_allclose(local_data, expected, atol=1e-4 * np.abs(expected).max())
