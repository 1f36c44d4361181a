"""Mixtures of experts on ranks: every layout is the run of one process, losses of the router and biases included."""

import numpy as np
import pytest

from harness.trainings import SMALL, difference, losses_and_norms, recipe_keys, state, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.training.run.loop import mean_validation_loss

STEPS = 6
MIXTURE = {**SMALL, "run.steps": STEPS, "precision.mode": "float64", "optimizer.clip_norm": 0.3} | recipe_keys(
    "layers=2 hidden=12 experts=4 expert_hidden=10 dropout=0.1 balance_loss=0.1 z_loss=0.01 global_batch=10 tied=true "
    "validation_samples=7"
)
ROUTERS = {
    "softmax": {},
    "biased": recipe_keys("router=sigmoid balance_loss=0 balance_rate=0.02 shared_experts=1 experts_per_token=3"),
    "dropping": recipe_keys("capacity_factor=0.75 experts_per_token=1 activation=swiglu"),
}
# layout -> ranks, keys of the layout, router, keys of both runs
LAYOUTS = {
    "allreduce": (3, "algorithm=ring", "softmax", ""),
    "accumulating": (2, "microbatches=3", "biased", "optimizer.name=lamb"),
    "zero1": (3, "strategy=zero1", "dropping", "optimizer.name=lars learning_rate=1"),
    "zero2": (2, "strategy=zero2 microbatches=2", "biased", "optimizer.name=sgd learning_rate=0.5"),
    "zero3": (4, "strategy=zero3 zero.parameters=2", "softmax", "optimizer.name=lamb"),
    "zero3, recomputed": (2, "strategy=zero3 recompute=true", "biased", ""),
    "servers": (2, "strategy=parameter_server parameter_server.placement=colocated", "biased", ""),
    "1f1b": (4, "pipeline=2 microbatches=2 recompute=true", "biased", "global_batch=8"),
    "zb-h1": (2, "pipeline=2 schedule=zb-h1 microbatches=3", "dropping", "global_batch=9"),
    "tensor": (2, "tensor=2", "biased", "optimizer.name=lamb"),
    "tensor by rows": (2, "tensor=2 sequence_parallel=true microbatches=2", "dropping", ""),
    "tensor x expert": (4, "tensor=2 expert=2", "softmax", "optimizer.name=lamb"),
    "tensor by rows x expert x zero1": (4, "tensor=2 expert=2 strategy=zero1 sequence_parallel=true", "biased", ""),
    "expert": (2, "expert=2 algorithm=ring", "softmax", "optimizer.name=lamb"),
    "expert of one sample less": (4, "expert=2 microbatches=3", "biased", "optimizer.name=lars learning_rate=1"),
    "expert x zero1": (4, "expert=2 strategy=zero1", "dropping", "optimizer.name=lamb"),
    "expert x zero2": (4, "expert=4 strategy=zero2 microbatches=2", "softmax", ""),
    "expert x zero3": (4, "expert=2 strategy=zero3 recompute=true", "biased", "optimizer.name=lamb"),
    "expert x 1f1b": (4, "expert=2 pipeline=2 microbatches=2", "biased", "global_batch=8"),
    "expert x zb-h1 x zero1": (
        4,
        "expert=2 pipeline=2 strategy=zero1 schedule=zb-h1 microbatches=3",
        "dropping",
        "global_batch=6",
    ),
    "interleaved": (2, "pipeline=2 schedule=interleaved chunks=2 microbatches=2", "softmax", "layers=3"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(b"%d plus %d is %d. " % (i % 7, i % 5, i % 7 + i % 5) for i in range(400)))
    return path


def router_of(trainer):
    """Return biases, loads of the last step and its figures. The same on all ranks."""
    assert trainer.router.last is not None
    return trainer.model.operations.experts.state.bias, trainer.router.loads, np.array(trainer.router.last)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except("accumulating", "zero1", "zero3", "1f1b")
def test_a_layout_is_the_run_of_one_process(text, name):
    ranks, layout, router, more = LAYOUTS[name]
    common = {**MIXTURE, "data.path": text, **ROUTERS[router], **recipe_keys(more)}
    (single,) = run_threads(1, lambda comm: run(comm, common))
    assert single[1][-1][0] < single[1][0][0] - 0.01, "the model learns"
    for own in run_threads(ranks, lambda comm: run(comm, common | recipe_keys(layout))):
        check(own, single)


def run(comm, keys):
    """Train; return state, losses and norms, validation loss and router."""
    trainer = trainer_of(comm, keys)
    steps = losses_and_norms(trainer, STEPS)
    result = state(trainer), steps, mean_validation_loss(trainer), router_of(trainer)
    assert not any(trainer.executor.arena._uses), "what activations lay in is given back"
    trainer.close()
    return result


def check(own, single):
    mine, steps, validation, router = own
    np.testing.assert_allclose(steps, single[1], rtol=1e-12)
    assert difference(mine, single[0]) <= 1e-12
    np.testing.assert_allclose(validation, single[2], rtol=1e-12)
    for ours, theirs in zip(router[:2], single[3][:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(router[2], single[3][2], rtol=1e-12)
