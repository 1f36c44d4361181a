"""Every exchange with every compressor: a pair trains, or it is rejected with the keys to change."""

import re

import numpy as np
import pytest

from harness.combinations import SMALL
from harness.trainings import outcomes, trainer_of
from hpcdist.comm.config import COMPRESSIONS
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.training.recipe import recipe as recipes

STEPS = 2
SERVED = {"parallel.strategy": "parameter_server"}
COLOCATED = SERVED | {"parameter_server.placement": "colocated"}
EXCHANGES = {
    "allreduce": {},
    "allreduce, in a pipeline": {"parallel.pipeline": 2, "parallel.microbatches": 4},
    "allreduce, on a tensor axis": {"parallel.tensor": 2},
    "allreduce, by sequence": {"parallel.tensor": 2, "parallel.sequence_parallel": "true"},
    "allreduce, float64": {"precision.mode": "float64"},
    "allreduce, float16": {"precision.mode": "float16"},
    "allreduce, bfloat16": {"precision.mode": "bfloat16"},
    "allreduce, by a thread": {"communication.algorithm": "ring", "communication.overlap": "thread"},
    "allreduce, delayed": {"communication.overlap": "thread", "communication.delayed": "true"},
    "allreduce, logical shards": {"run.logical_shards": 8},
    "allreduce, recomputed": {"run.recompute_every_steps": 1},
    "allreduce, noise measured": {"run.noise_scale_every_steps": 1},
    "zero1": {"parallel.strategy": "zero1"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero2, accumulating": {"parallel.strategy": "zero2", "parallel.microbatches": 2},
    "zero3": {"parallel.strategy": "zero3"},
    "zero3, in a pipeline": {"parallel.strategy": "zero3", "parallel.pipeline": 2, "parallel.microbatches": 4},
    "a dedicated server": SERVED,
    "colocated servers": COLOCATED,
    "servers by shared memory": COLOCATED | {"parameter_server.transport": "shared"},
    "servers by windows": COLOCATED | {"parameter_server.transport": "rma"},
    "asynchronous servers": SERVED | {"parameter_server.consistency": "asp"},
    "servers of bounded staleness": SERVED | {"parameter_server.consistency": "ssp", "parameter_server.staleness": 2},
    "backup workers": SERVED | {"parameter_server.backup_workers": 1},
    "gossip": {"parallel.strategy": "gossip"},
    "local SGD": {"parallel.strategy": "local_sgd", "decentralised.period": 2},
}
NAMES = [name for name in COMPRESSIONS if name != "none"]
OWN = {
    "topk": {"compression.density": 0.1},
    "randomk": {"compression.density": 0.1},
    "powersgd": {"compression.rank": 2},
    "dgc": {"compression.density": 0.1, "optimizer.name": "sgd", "optimizer.momentum": 0.9},
    "onebit": {"compression.warmup_steps": 1, "optimizer.clip_norm": 0},
}
# Pairs of which the mission is that they work; nothing else in this file says that anything does.
WORKING = {
    (exchange, name)
    for exchange in ("allreduce", "zero1", "zero2", "zero3", "a dedicated server", "colocated servers")
    for name in ("float16", "bfloat16", "int8", "int4", "adaptive", "qsgd", "sign")
} | {("allreduce", name) for name in NAMES}
WORKING |= {(f"zero{stage}", "auto") for stage in (1, 2, 3)}


def rejection(keys):
    """Return the reason why a recipe is invalid, or "" if it is valid."""
    try:
        recipes.load(None, [f"{key}={value}" for key, value in keys.items()], {})
    except ConfigurationError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.matrix_except(*EXCHANGES.keys() - {"allreduce, in a pipeline", "allreduce, float16", "zero1", "zero2"})
@pytest.mark.full_except("allreduce, delayed")
def test_each_pair_trains_or_is_rejected_with_the_reason(exchange, shared_text):
    """The error names recipe keys: the rejecting keys and the keys to change."""
    for name in NAMES:
        keys = SMALL | {"model.dropout": 0, "data.path": shared_text, "communication.compression": name}
        keys |= OWN.get(name, {}) | EXCHANGES[exchange]
        output = rejection(keys)
        if output:
            assert (exchange, name) not in WORKING, output
            assert re.search(r"(compression|optimizer)\S* = ", output), output
            assert re.search(r"set |choose |use |leave", output) and len(output) > 60, output
            continue

        def run(comm, keys=keys):
            trainer = trainer_of(comm, keys)
            result = [done[0] for done in outcomes(trainer, STEPS, 0)]
            return result, bool(np.isfinite(trainer.exchange.parameters.array).all())

        of_a_replica = keys.get("parallel.pipeline", 1) * keys.get("parallel.tensor", 1)
        ranks = 3 if SERVED.items() <= keys.items() else 2 * of_a_replica
        for result, finite in run_threads(ranks, run):
            assert finite and np.isfinite(result).all() and all(0 < loss < 10 for loss in result), (name, result)
