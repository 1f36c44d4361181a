"""Every exchange in lock-step matches one process: all optimizers, both precisions, on 1 to 4 ranks.


The runs make 50 steps with clipping and accumulation, of a small classifier on threads. `tests/ranks` repeats some over
MPI. In float32 only 3 ranks are tested, or all with HPCDIST_TEST_LAYOUTS=all.
"""

import os
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from harness.rank_run import CLASSES, FEATURES, RankRun
from harness.trainings import TOLERANCE
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import server_exchange as served
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.lockstep import LockStepExchange

SAMPLES, STEPS, MICROBATCHES = 10, 50, 2  # uneven over 3 and 4 ranks
MODEL = ModelConfig(kind="mlp", layers=1, hidden=7)
ALL = os.environ.get("HPCDIST_TEST_LAYOUTS") == "all"
COMMON = OptimizerConfig(warmup_steps=3, clip_norm=0.4)
OPTIMIZERS = {
    "sgd": replace(COMMON, name="sgd", learning_rate=0.2),
    "adamw": replace(COMMON, name="adamw", learning_rate=1e-2),
    "lars": replace(COMMON, name="lars", learning_rate=2.0),
    "lamb": replace(COMMON, name="lamb", learning_rate=2e-2),
}
COLOCATED = ParameterServerConfig(placement="colocated")
# How the exchange of a rank is made, and who serves where somebody does.
WAYS = {
    "allreduce": (catalogue.allreduce, None),
    "zero1": (partial(catalogue.zero, stage=1), None),
    "zero2": (partial(catalogue.zero, stage=2), None),
    "zero3": (partial(catalogue.zero, stage=3), None),
    "shared parameters": (partial(catalogue.zero, stage=1, config=ZeroConfig(shared_parameters=True)), None),
    "bsp": (partial(served, config=COLOCATED), COLOCATED),
}


def run_of(comm, way, optimizer, dtype):
    make, servers = WAYS[way]
    keys = {"microbatches": MICROBATCHES, "servers": servers, "total_steps": STEPS, "bucket_bytes": 400}
    return RankRun(comm, make, config=MODEL, dtype=dtype, optimizer=OPTIMIZERS[optimizer], **keys)


@cache
def data(dtype):
    """Return samples whose class is a function of the features."""
    rng = np.random.default_rng(7)
    inputs = np.tile(rng.standard_normal((STEPS // 10, SAMPLES, FEATURES)), (10, 1, 1))
    targets = (inputs @ rng.standard_normal((FEATURES, CLASSES))).argmax(axis=2)
    return inputs.astype(dtype), targets


def train(comm, way, optimizer, dtype):
    run, losses = run_of(comm, way, optimizer, dtype), []
    for inputs, targets in zip(*data(dtype), strict=True):
        parts = [*zip(run.share(inputs), run.share(targets), strict=True)]
        losses.append(run.run(parts, SAMPLES).loss)
    weights = np.concatenate([values for (kind, _), values in sorted(run.state().items()) if kind == "parameters"])
    run.exchange.close()
    return losses, weights


@cache
def alone(optimizer, dtype):
    return train(solo(), "allreduce", optimizer, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.full_except("shared parameters-sgd-float32")
def test_exchange_matches_one_process(way, optimizer, dtype):
    losses, weights = alone(optimizer, dtype)
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), "the model learns"
    for size in (1, 2, 3, 4) if ALL or dtype == "float64" else (3,):
        for ours, kept in run_threads(size, lambda comm: train(comm, way, optimizer, dtype)):
            np.testing.assert_allclose(ours, losses, rtol=TOLERANCE[dtype], err_msg=f"{size} ranks")
            apart = np.linalg.norm(kept.astype(np.float64) - weights) / np.linalg.norm(weights.astype(np.float64))
            assert apart <= TOLERANCE[dtype], f"{size} ranks: {apart:.1e}"


def test_ssp_with_bound_0_is_bsp():
    """Not only the numbers are equal: it is the same exchange."""
    zero = ParameterServerConfig(placement="colocated", consistency="ssp", staleness=0)

    def body(comm, config):
        made = served(run_of(comm, "bsp", "lamb", "float64").context, config)
        return type(made), made.plan()

    kinds = [run_threads(3, lambda comm, config=config: body(comm, config)) for config in (COLOCATED, zero)]
    assert kinds[0] == kinds[1] and kinds[0][0][0] is LockStepExchange
