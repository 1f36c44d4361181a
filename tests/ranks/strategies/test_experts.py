"""Mixtures of experts over MPI: every layout matches one process, all-to-all bytes, and blame for bad values.


HPCDIST_TEST_LAYOUTS=all makes 20 steps in each of the products of all axes.
"""

import numpy as np
import pytest

from harness.combinations import covering
from harness.trainings import (
    SMALL,
    TOLERANCE,
    blamed_ranks,
    difference,
    losses,
    recipe_keys,
    run_single_process,
    small_trainer,
)
from hpcdist.comm.record.timing import count_traffic
from hpcdist.strategies.expert import shared
from hpcdist.training.run.loop import mean_validation_loss

STEPS, CELLS = 20, 64
KEYS = {**SMALL, "run.steps": STEPS} | recipe_keys(
    "layers=2 hidden=16 experts=4 expert_hidden=24 balance_loss=0.05 balance_rate=0.01 z_loss=0.001 algorithm=ring"
)
# name -> keys, ranks
LAYOUTS = {
    "data": ("microbatches=2", (1, 2, 3, 4)),
    "zero3": ("strategy=zero3", (2, 3, 4)),
    "expert": ("expert=2", (2, 4)),
    "expert, zero1, dropping": ("expert=2 strategy=zero1 capacity_factor=1.0", (2, 4)),
    "expert, zero3, shared": ("expert=2 strategy=zero3 shared_experts=1 router=sigmoid", (2, 4)),
    "expert beside shared memory": ("expert=2 algorithm=node_shared", (2, 4)),
    "expert between nodes": ("expert=4 algorithm=hierarchical ranks_per_node=2", (4,)),
    "expert of all": ("expert=4 microbatches=4", (4,)),
    "tensor": ("tensor=2 sequence_parallel=true", (2, 4)),
    "tensor x expert": ("tensor=2 expert=2 strategy=zero1", (4,)),
    "pipeline x expert": ("pipeline=2 microbatches=2 expert=2 strategy=zero1", (4,)),
    "context, dropping": ("parallel.context=2 data.context=26 capacity_factor=1.0", (2, 4)),
    "context of all, packed": ("parallel.context=0 data.context=42 data.packed=true document_end=32", (2, 3, 4)),
    "context x expert, zero3": ("parallel.context=2 expert=2 strategy=zero3 data.context=26", (2, 4)),
    "context x expert of all": ("parallel.context=2 expert=4 data.context=26 capacity_factor=1.0", (4,)),
}


def keys_of(comm, name):
    keys, sizes = LAYOUTS[name]
    if comm.size not in sizes:
        pytest.skip(f"{name} is for {sizes} ranks")
    return recipe_keys(keys.replace("parallel.context=0", f"parallel.context={comm.size}"))


@pytest.mark.parametrize("mode", ["float64", "float32"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except(
    *("data-float32", "expert-float64", "expert beside shared memory-float64", "expert, zero3, shared-float64"),
    "context x expert, zero3-float64",
)
def test_rank_mixtures_equal_one_process(comm, folder, name, mode):
    keys = {**KEYS, **keys_of(comm, name), "precision.mode": mode}
    if each := keys.get("communication.ranks_per_node"):
        comm.declared_node = comm.rank // each  # as at the start of a job
    single, together = (
        run_single_process({**keys, "data.path": folder / "text.txt"}, STEPS),
        small_trainer(comm, folder, keys),
    )
    assert single.losses[-1] < single.losses[0] - 0.1, "the model learns"
    np.testing.assert_allclose(losses(together, STEPS), single.losses, rtol=TOLERANCE[mode])
    assert difference(together, single.state) <= 10 * TOLERANCE[mode]
    np.testing.assert_allclose(mean_validation_loss(together), single.validation, rtol=TOLERANCE[mode])
    together.close()


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(CELLS))
def test_rank_products_of_all_axes_equal_one_process(comm, folder, monkeypatch, number):
    """Products of 2 and 3 run on the first of the 4 ranks.

    In some cells all tokens go to one expert, or to experts of one rank.
    """
    monkeypatch.setattr(shared, "WORTH_ROWS", 0)  # experts are lent wherever it evens out loads
    if comm.size != 4:
        pytest.skip("for 4 ranks")
    cells = comm.broadcast_object(covering((2, 3, 4), CELLS) if comm.rank == 0 else None)
    assert len(cells) == CELLS, "all of them are run"
    cell, path = cells[number], folder / "text.txt"
    expected = comm.broadcast_object(cell.alone(path) if comm.rank == 0 else None)
    part = comm.split(0 if comm.rank < cell.ranks else None, comm.rank, "product")
    if part is not None:
        cell.check(cell.trained(part, path), expected)
        part.free()


def test_rank_bytes_of_distributed_experts_match_the_closed_form(comm, folder, monkeypatch):
    """Gradients of an expert are not sent if each rank has different experts.

    Rows are sent and returned, forward and backward.
    """
    if comm.size == 1:
        pytest.skip("nothing travels")
    keys = {"parallel.expert": comm.size, "model.experts": 2 * comm.size, "model.hidden": 64, "run.global_batch": 12}
    trainer = small_trainer(comm, folder, {**KEYS, **keys})
    losses(trainer, 1)  # communicators are split and scratch memory taken
    axis, travelled = trainer.model.operations.experts.travel.axis, []
    exchange = axis.exchange

    def exchange_and_count(rows, arrived, sent, received):
        travelled.append(int(sent.sum() - sent[comm.rank]) * rows.shape[1] * rows.itemsize)
        exchange(rows, arrived, sent, received)

    monkeypatch.setattr(axis, "exchange", exchange_and_count)
    with count_traffic(comm) as traffic:
        losses(trainer, 2, first=1)
    segments = trainer.context.layout.segments
    dense = sum(each.spec.size for each in segments if not each.spec.expert) * trainer.model.dtype.itemsize
    assert not traffic.unknown
    assert len(travelled) == 4 * trainer.recipe.model.layers  # all-to-alls
    others = (comm.size - 1) / comm.size
    assert traffic.sent_bytes == pytest.approx(2 * dense * others + sum(travelled), rel=0.01, abs=2048)
    rows = sum(comm.allgather_object(sum(travelled)))  # where loads are even
    choices = trainer.router.loads.sum()
    assert rows == pytest.approx(4 * choices * 64 * trainer.model.dtype.itemsize * others, rel=0.35)


@pytest.mark.parametrize("algorithm", ["ring", "node_shared"])
def test_rank_bad_value_is_blamed_on_the_rank_that_made_it(comm, folder, monkeypatch, algorithm):
    """A NaN that is sent to experts of other ranks, or computed with borrowed experts, is not blamed on them."""
    if comm.size not in (2, 4):
        pytest.skip("for 2 or 4 ranks")
    trainer = small_trainer(comm, folder, {**KEYS, "parallel.expert": 2, "communication.algorithm": algorithm})
    monkeypatch.setattr(shared, "WORTH_ROWS", 0)
    if comm.rank == comm.size - 1:
        trainer.exchange.parameters_at(1).view("1.experts.up.weight")[...] = np.nan
    assert blamed_ranks(trainer) == [comm.size - 1]
