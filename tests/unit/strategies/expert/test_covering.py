"""Products of data, pipeline, tensor, context and expert ranks with ZeRO: each cell is the run of one process.

The cells have every pair of values of the parameters that go together. HPCDIST_TEST_LAYOUTS=all makes 20 steps in each.
"""

import os
from itertools import combinations

import numpy as np
import pytest

from harness.trainings import SMALL, TOLERANCE, difference, losses, recipe_keys, recipe_of, state, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.training.recipe.requirements import grid_of_recipe

STEPS = 20 if os.environ.get("HPCDIST_TEST_LAYOUTS") == "all" else 4
CELLS = 80
KEYS = {**SMALL, "run.steps": 20} | recipe_keys(
    "layers=3 hidden=12 experts=4 expert_hidden=8 z_loss=0.01 global_batch=12 dropout=0.1 optimizer.clip_norm=0.5 "
    "data.context=22"
)
RANKS = {"1": 1, "2": 2, "3": 3, "4": 4, "6": 6, "8": 8}
PARAMETERS = {
    "ranks": tuple(RANKS),
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
    "router": (
        "balance_loss=0.1",
        "router=sigmoid balance_loss=0 balance_rate=0.01 shared_experts=1",
        "capacity_factor=0.75 experts_per_token=1",
        "experts_per_token=1 balance_loss=0 balance_rate=1e-9",  # forced: all tokens to one expert
    ),
    "optimizer": ("optimizer.name=adamw", "optimizer.name=lamb", "optimizer.name=sgd learning_rate=0.1"),
    "algorithm": ("algorithm=ring", "algorithm=node_shared"),
    "mode": ("precision.mode=float64", "precision.mode=float32"),
}
FORCED = PARAMETERS["router"][3]


def keys_of(cell):
    return KEYS | recipe_keys(" ".join(cell[1:]))


def is_legal(cell):
    try:
        grid_of_recipe(recipe_of(keys_of(cell)), RANKS[cell[0]])
    except ConfigurationError:
        return False
    return True


def covering():
    """Return cells, drawn the same every time: those with most new pairs first, until there are enough."""
    rng = np.random.default_rng(28)
    drawn = {tuple(values[rng.integers(len(values))] for values in PARAMETERS.values()) for _ in range(4000)}
    legal = [cell for cell in sorted(drawn) if is_legal(cell)]
    pairs = [set(combinations(enumerate(cell), 2)) for cell in legal]
    missing, chosen = set().union(*pairs), list[int]()
    while missing or len(chosen) < CELLS:
        left = [number for number in range(len(legal)) if number not in chosen]
        # Of equal ones those where experts are shared out, and samples cut.
        axes = [sum("=1" not in legal[number][place] for place in (1, 4)) for number in range(len(legal))]
        chosen.append(max(left, key=lambda number: (len(missing & pairs[number]), axes[number])))
        missing -= pairs[chosen[-1]]
    return [legal[number] for number in chosen]


def trained(comm, cell, keys):
    trainer = trainer_of(comm, keys)
    if cell[list(PARAMETERS).index("router")] == FORCED:
        trainer.model.operations.experts.state.bias[:, 3] = 100
    result = losses(trainer, STEPS), state(trainer)
    trainer.close()
    return result


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(CELLS // 10))
def test_a_product_is_the_run_of_one_process(text, part):
    """Ten cells each: which there are is decided when the first is run, not when tests are collected."""
    cells = covering()
    for cell in cells[part * 10 :][: 10 if part + 1 < CELLS // 10 else len(cells)]:
        keys = keys_of(cell) | {"data.path": text}
        alone = {key: value for key, value in keys.items() if not key.startswith(("parallel.", "zero."))}
        ((expected, weights),) = run_threads(1, lambda comm, keys=alone, cell=cell: trained(comm, cell, keys))
        tolerance = TOLERANCE[cell[-1].partition("=")[2]]
        for own, mine in run_threads(RANKS[cell[0]], lambda comm, k=keys, c=cell: trained(comm, c, k)):
            np.testing.assert_allclose(own, expected, rtol=tolerance, err_msg=" ".join(cell))
            assert difference(mine, weights) <= 10 * tolerance, " ".join(cell)
