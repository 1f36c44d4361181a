"""Large-batch options in whole runs: the same weights under every exchange, and rates that follow the batch."""

import numpy as np
import pytest

from harness.trainings import difference, losses, recipe_keys, run_single_process, trainer_of
from hpcdist.comm.threads.communicator import run_threads, solo

STEPS = 4
SMALL = {
    "model.layers": 1,
    "model.hidden": 16,
    "model.heads": 2,
    "data.context": 8,
    "precision.mode": "float64",
    "run.steps": STEPS,
    "run.global_batch": 10,
    "optimizer.warmup_samples": 25,  # two updates and a half
}
OPTIONS = {
    "lamb": {
        "optimizer.name": "lamb",
        "optimizer.normalize_gradient": "true",
        "optimizer.clip_norm": 0,
        "optimizer.bias_correction": "false",
        "optimizer.trust_ratio_min": 0.05,
        "optimizer.trust_ratio_max": 0.2,
        "optimizer.epsilon": 1e-3,  # so that the scale of the gradient matters
        "optimizer.base_batch": 5,
        "optimizer.scaling": "sqrt",
    },
    "lars": recipe_keys("optimizer.name=lars optimizer.base_batch=5 optimizer.scaling=linear"),
}
SERVER = {"parallel.strategy": "parameter_server"}
# name -> (ranks, keys)
LAYOUTS = {
    "allreduce": (3, {"communication.algorithm": "ring"}),
    "zero1": (3, {"parallel.strategy": "zero1"}),
    "zero2": (2, {"parallel.strategy": "zero2", "parallel.microbatches": 2}),
    "zero3": (3, {"parallel.strategy": "zero3"}),
    "1f1b x zero1": (4, {"parallel.strategy": "zero1", "parallel.pipeline": 2, "parallel.microbatches": 2}),
    "tensor": (2, {"parallel.tensor": 2}),
    "two servers": (4, {**SERVER, "parameter_server.servers": 2}),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("zero1-lars")
def test_large_batch_options_match_under_every_exchange(layout, options, shared_text):
    ranks, keys = LAYOUTS[layout]
    settings = {**SMALL, "data.path": shared_text, **OPTIONS[options]}
    expected = run_single_process(settings, STEPS)

    def body(comm):
        trainer = trainer_of(comm, {**settings, **keys})
        return losses(trainer, STEPS), difference(trainer, expected.state)

    for result, apart in run_threads(ranks, body):
        np.testing.assert_allclose(result, expected.losses, rtol=1e-10)
        assert apart < 1e-9
    plain = run_single_process({**settings, "optimizer.normalize_gradient": "false"}, STEPS).losses
    assert options == "lars" or plain != expected.losses


def train(shared_text, **keys):
    trainer = trainer_of(
        solo(), {**SMALL, "data.path": shared_text, **{key.replace("__", "."): v for key, v in keys.items()}}
    )
    return trainer, losses(trainer, STEPS)


def test_scaled_rate_equals_an_explicit_rate(shared_text):
    scaled, result = train(
        shared_text,
        optimizer__learning_rate=2e-3,
        optimizer__base_batch=40,
        optimizer__scaling="linear",
        optimizer__decay="constant",
    )
    plain, expected = train(shared_text, optimizer__learning_rate=5e-4, optimizer__decay="constant")
    assert result == expected and len(set(result)) == STEPS
    rates = [scaled.learning_rate(step) for step in range(1, 5)]
    assert rates == pytest.approx([2e-4, 4e-4, 5e-4, 5e-4])  # 10, 20, 30 and 40 of 25 samples
    assert rates == [plain.learning_rate(step) for step in range(1, 5)]
    assert scaled.exchange.update.optimizer.learning_rate == rates[-1]
