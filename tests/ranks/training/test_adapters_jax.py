"""Models of JAX over real messages: what plain JAX and optax compute on one process."""

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
def test_rank_jax(comm, rng, strategy):
    """Three steps: losses to 1e-5, params to 1e-4 of the largest, in float32."""
    keys = {"parallel.strategy": strategy, "parallel.microbatches": 2}
    if strategy == "pipeline":
        keys |= {"parallel.strategy": "allreduce", "parallel.pipeline": comm.size, "parallel.microbatches": 4}
    functions, params = models.mlp(rng, depth=3)
    batches = [models.rows(rng, 8) for _ in range(3)]

    def loss(params, batch):
        return models.squares(models.composed(functions, params, batch[0]), batch[1]).mean()

    losses, after = models.plain(params, loss, batches)

    def build():
        return adapter.wrap(functions, params, models.squares, example=batches[0])

    found = models.train(comm, build, batches, keys)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    model = build()
    for own, wanted in zip(
        jax.tree_util.tree_leaves(model.trees(found.tensors)), jax.tree_util.tree_leaves(after), strict=True
    ):
        np.testing.assert_allclose(own, wanted, atol=1e-4 * np.abs(wanted).max())
