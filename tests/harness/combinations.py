"""Runs that are stopped and resumed, for every exchange, schedule and precision, and products of all rank axes."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.trainings import (
    LAYOUT_KEYS,
    TOLERANCE,
    State,
    difference,
    losses,
    recipe_keys,
    recipe_of,
    state,
    trainer_of,
)
from harness.trainings import SMALL as SMALL_TRAINING
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError
from hpcdist.training.recipe.requirements import grid_of_recipe

HALF = 3  # steps before the kill, and after it
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


def legal_combinations(numbers: Iterable[int] = range(len(COMBINATIONS))) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the combinations in ``numbers`` that a recipe may have, each with one of the optimizers."""
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


# Products of data, pipeline, tensor, context and expert ranks with ZeRO, all of mixtures: cells of a covering design.
CELL_STEPS = 20 if os.environ.get("HPCDIST_TEST_LAYOUTS") == "all" else 4
CELL: dict[str, Any] = {**SMALL_TRAINING, "run.steps": 20} | recipe_keys(
    "layers=3 hidden=12 experts=4 expert_hidden=8 z_loss=0.01 global_batch=12 dropout=0.1 optimizer.clip_norm=0.5 "
    "data.context=22"
)
ROUTERS = (
    "balance_loss=0.1",
    "router=sigmoid balance_loss=0 balance_rate=0.01 shared_experts=1",
    "capacity_factor=0.75 experts_per_token=1",
    "experts_per_token=1 balance_loss=0 balance_rate=1e-9",
    "experts_per_token=2 balance_loss=0 balance_rate=1e-9",
)
FORCED = {ROUTERS[3]: [3], ROUTERS[4]: [2, 3]}  # experts that all tokens go to: of one rank, which lends one of two
CELL_PARAMETERS = {
    "expert": ("expert=1", "expert=2", "expert=4"),
    "pipeline": ("pipeline=1", "pipeline=2", "pipeline=2 schedule=gpipe", "pipeline=2 schedule=zb-h1"),
    "tensor": ("tensor=1", "tensor=2", "tensor=2 sequence_parallel=true"),
    "context": (
        "parallel.context=1",
        "parallel.context=2",
        "parallel.context=2 context_method=all_to_all",
        "parallel.context=3",
        "parallel.context=4",
    ),
    "data": ("packed=false", "packed=true document_end=32"),
    "strategy": (
        "strategy=allreduce",
        "strategy=zero1",
        "strategy=zero2 keep_gradients=true",
        "strategy=zero3 keep_gradients=true",
    ),
    "microbatches": ("microbatches=1", "microbatches=2", "microbatches=3"),
    "recompute": ("recompute=false", "recompute=true"),
    "router": ROUTERS,
    "optimizer": ("optimizer.name=adamw", "optimizer.name=lamb", "optimizer.name=sgd learning_rate=0.1"),
    "algorithm": ("algorithm=ring", "algorithm=node_shared", "algorithm=hierarchical ranks_per_node=2"),
    "mode": ("precision.mode=float64", "precision.mode=float32"),
}


class Cell(NamedTuple):
    """A combination to test: a number of ranks, and a value of each of `CELL_PARAMETERS`."""

    ranks: int
    values: tuple[str, ...]

    @property
    def keys(self) -> dict[str, Any]:
        """Return the recipe keys of the cell."""
        return CELL | recipe_keys(" ".join(self.values))

    @property
    def is_legal(self) -> bool:
        """Return True if a recipe may have these keys."""
        try:
            grid_of_recipe(recipe_of(self.keys), self.ranks)
        except ConfigurationError:
            return False
        return True

    def trained(self, comm: Communicator, path: Path, *, alone: bool = False) -> tuple[list[float], State]:
        """Return the losses and the state after `CELL_STEPS` steps. ``alone`` ignores the layout. Collective."""
        keys = self.keys | {"data.path": path}
        if alone:
            keys = {key: value for key, value in keys.items() if not key.startswith(LAYOUT_KEYS)}
        elif each := keys.get("communication.ranks_per_node"):
            comm.declared_node = comm.rank // each  # type: ignore[attr-defined]  # as at the start of a job
        trainer = trainer_of(comm, keys)
        for router in FORCED.keys() & {*self.values}:
            trainer.model.operations.experts.state.bias[:, FORCED[router]] = 100  # type: ignore[union-attr]
        result = losses(trainer, CELL_STEPS), state(trainer)
        trainer.close()
        return result

    def alone(self, path: Path) -> tuple[list[float], State]:
        """Return the losses and the state of one process. Local."""
        return self.trained(solo(), path, alone=True)

    def check(self, local_data: tuple[list[float], State], expected: tuple[list[float], State]) -> None:
        """Compare the result of a rank with the result of one process. Local."""
        tolerance, name = TOLERANCE[self.values[-1].partition("=")[2]], " ".join(self.values)
        np.testing.assert_allclose(local_data[0], expected[0], rtol=tolerance, err_msg=name)
        assert difference(local_data[1], expected[1]) <= 10 * tolerance, name


@cache
def covering(sizes: Sequence[int], count: int) -> list[Cell]:
    """Return at least ``count`` cells on ``sizes`` ranks that cover every legal pair of values.


    The random choice is the same in every run. Cells with the most new pairs come first.
    """
    rng = np.random.default_rng(28)
    parameters = [tuple(map(str, sizes)), *CELL_PARAMETERS.values()]
    drawn = {tuple(values[rng.integers(len(values))] for values in parameters) for _ in range(4000)}
    legal = [cell for cell in (Cell(int(row[0]), row[1:]) for row in sorted(drawn)) if cell.is_legal]
    pairs = [set(combinations(enumerate((cell.ranks, *cell.values)), 2)) for cell in legal]
    missing, chosen = set().union(*pairs), list[int]()
    while missing or len(chosen) < count:
        left = [number for number in range(len(legal)) if number not in chosen]
        # Of equal ones those where experts are shared out, and samples cut.
        axes = [sum("=1" not in legal[number].values[place] for place in (0, 3)) for number in range(len(legal))]
        chosen.append(max(left, key=lambda number: (len(missing & pairs[number]), axes[number])))
        missing -= pairs[chosen[-1]]
    return [legal[number] for number in chosen]
