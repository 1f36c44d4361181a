"""Runs that are stopped and go on: every exchange, schedule and precision of which the bits can be compared."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from harness.trainings import recipe_keys, recipe_of
from hpcdist.errors import ConfigurationError

HALF = 3  # steps before the kill, and behind it
SMALL = recipe_keys(
    "layers=2 hidden=8 heads=2 dropout=0.1 data.context=4 global_batch=8 steps=20 optimizer.warmup_steps=4 "
    "optimizer.clip_norm=0.5"
)

SERVED = {"parallel.strategy": "parameter_server"}
COLOCATED = SERVED | {"parameter_server.placement": "colocated"}
GOSSIP, LOCAL = {"parallel.strategy": "gossip"}, {"parallel.strategy": "local_sgd", "decentralised.period": 2}
ZERO1, ZERO2, ZERO3 = ({"parallel.strategy": f"zero{stage}"} for stage in (1, 2, 3))
POLL, THREAD = ({"communication.algorithm": "ring", "communication.overlap": kind} for kind in ("poll", "thread"))
SHARDS = {"run.logical_shards": 8}

EXCHANGES: dict[str, dict[str, Any]] = {
    "native": {"communication.algorithm": "native"},
    "ring": {"communication.algorithm": "ring"},
    "node shared": {"communication.algorithm": "node_shared"},
    "polled": POLL,
    "by a thread": THREAD,
    "delayed, polled": POLL | {"communication.delayed": "true"},
    "delayed, by a thread": THREAD | {"communication.delayed": "true"},
    "compressed to int8": {"communication.compression": "int8"},
    "compressed to top-k": {"communication.compression": "topk", "compression.density": 0.1},
    "compressed to random-k": {"communication.compression": "randomk", "compression.density": 0.2},
    "compressed by QSGD": {"communication.compression": "qsgd", "compression.error_feedback": "false"},
    "compressed to factors": {"communication.compression": "powersgd", "compression.rank": 2},
    "DGC": {"communication.compression": "dgc", "compression.density": 0.1},
    "1-bit Adam": {"communication.compression": "onebit", "compression.warmup_steps": 2},
    "zero1": ZERO1,
    "zero1, by a thread": ZERO1 | {"communication.overlap": "thread"},
    "zero1, shared": ZERO1 | {"zero.shared_parameters": "true"},
    "zero2": ZERO2,
    "zero2, kept": ZERO2 | {"zero.keep_gradients": "true"},
    "zero2, polled": ZERO2 | {"communication.overlap": "poll"},
    "zero3": ZERO3,
    "zero3, kept": ZERO3 | {"zero.keep_gradients": "true", "zero.keep_parameters": "true"},
    "zero3, persistent": ZERO3 | {"zero.persistent_below": 80},
    "zero3, ahead": ZERO3 | {"zero.prefetch": 1, "communication.overlap": "thread"},
    "zero3, states in files": ZERO3 | {"zero.offload_optimizer": "file", "zero.offload_directory": "/tmp"},
    "dedicated server": SERVED,
    "colocated servers": COLOCATED,
    "servers by shared memory": COLOCATED | {"parameter_server.transport": "shared"},
    "servers by windows": COLOCATED | {"parameter_server.transport": "rma"},
    "gossip": GOSSIP,
    "gossip, adapt first": GOSSIP | {"decentralised.order": "adapt_first", "decentralised.graph": "exponential"},
    "gossip, one peer": GOSSIP | {"decentralised.graph": "one_peer"},
    "local sgd": LOCAL,
    "local sgd, moments averaged": LOCAL | {"decentralised.moments": "average"},
    "DiLoCo": LOCAL | {"decentralised.outer_momentum": 0.9, "decentralised.outer_learning_rate": 0.7},
    "allreduce, logical shards": SHARDS,
    "zero3, logical shards": SHARDS | ZERO3,
    "servers, logical shards": SHARDS | COLOCATED,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "accumulated": {"parallel.microbatches": 2},
    "gpipe": recipe_keys("pipeline=2 schedule=gpipe microbatches=4"),
    "1f1b": recipe_keys("pipeline=2 microbatches=4"),
    "1f1b, recomputed": recipe_keys("pipeline=2 microbatches=4 recompute=true"),
    "interleaved": recipe_keys("pipeline=2 schedule=interleaved chunks=2 microbatches=2"),
    "zb-h1": recipe_keys("pipeline=2 schedule=zb-h1 microbatches=4"),
    "zb-h2": recipe_keys("pipeline=2 schedule=zb-h2 microbatches=4"),
    "zb-v": recipe_keys("pipeline=2 schedule=zb-v microbatches=4"),
}
TENSOR: dict[str, dict[str, Any]] = {
    "": {},
    "tensor": {"parallel.tensor": 2, "model.dropout": 0},
    "sequence": {"parallel.tensor": 2, "parallel.sequence_parallel": "true", "model.dropout": 0},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    mode: {"precision.mode": mode} | ({"precision.growth_interval": 2} if mode == "float16" else {})
    for mode in ("float32", "float64", "bfloat16", "float16")
}
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer.name": "lamb"},
    recipe_keys("optimizer.name=sgd optimizer.momentum=0.9 tied=true"),
    {"optimizer.name": "lars"},
)


TABLES = EXCHANGES, SCHEDULES, TENSOR, PRECISIONS
COMBINATIONS = tuple(product(*TABLES))


def legal(numbers: Iterable[int] = range(len(COMBINATIONS))) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those of the combinations ``numbers`` that a recipe may have, each with one of the optimizers."""
    for number in numbers:
        names, keys = COMBINATIONS[number], dict(SMALL)
        for table, name in zip(TABLES, names, strict=True):
            keys |= table[name]
        for optimizer in OPTIMIZERS[number % len(OPTIMIZERS) :] + OPTIMIZERS:
            try:
                recipe_of(keys | optimizer)
            except ConfigurationError:
                continue
            yield ", ".join(name for name in names if name), keys | optimizer
            break


def ranks_of(keys: dict[str, Any]) -> int:
    product_of_axes = keys.get("parallel.pipeline", 1) * keys.get("parallel.tensor", 1)
    return 2 * product_of_axes if product_of_axes > 1 else 3


# Products of data, pipeline and tensor ranks, small, that train on a GPU, the double or the real one: every schedule is
# there, every ZeRO stage inside of a pipeline with and without what it may keep, both ways to cut activations over
# tensor ranks, dropout, recomputing, uneven micro-batches, and stages cut by measured seconds.
PRODUCT_STEPS = 2
PRODUCT: dict[str, object] = {"run.steps": PRODUCT_STEPS} | recipe_keys(
    "hidden=8 dropout=0.2 data.context=5 global_batch=6 validation_samples=2 microbatches=3"
)
PIPELINE_PRODUCT: dict[str, object] = {**PRODUCT, "parallel.pipeline": 2}
KEEP_BOTH = {"zero.keep_gradients": "true", "zero.keep_parameters": "true"}
BY_ROWS = {"parallel.tensor": 2, "parallel.sequence_parallel": "true"}
# A product: its ranks, and its keys.
PRODUCTS: dict[str, tuple[int, dict[str, object]]] = {
    "interleaved, recomputing": (
        2,
        PIPELINE_PRODUCT | recipe_keys("schedule=interleaved chunks=2 recompute=true microbatches=2"),
    ),
    "tensor": (2, PRODUCT | recipe_keys("tensor=2 microbatches=2")),
    "zb-v, tied": (2, {**PIPELINE_PRODUCT, "parallel.schedule": "zb-v"}),
    "gpipe x zero3, kept": (
        4,
        {**PIPELINE_PRODUCT, "parallel.schedule": "gpipe", "parallel.strategy": "zero3", **KEEP_BOTH},
    ),
    "1f1b x zero2": (4, PIPELINE_PRODUCT | recipe_keys("strategy=zero2 tied=false")),
    "zb-h2, measured": (2, PIPELINE_PRODUCT | recipe_keys("schedule=zb-h2 partition=measured")),
    "zb-h1 x tensor by rows": (4, {**PIPELINE_PRODUCT, "parallel.schedule": "zb-h1", **BY_ROWS}),
    "zero3 x tensor by rows": (4, {**PRODUCT, "parallel.strategy": "zero3", **BY_ROWS}),
    "zb-h1 x servers": (
        4,
        PIPELINE_PRODUCT | recipe_keys("schedule=zb-h1 strategy=parameter_server parameter_server.placement=colocated"),
    ),
}
