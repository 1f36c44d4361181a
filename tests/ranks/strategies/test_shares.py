"""Samples split unevenly over real ranks on nodes of unequal size: the run equals the run with even shares."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.inputs import write_text
from harness.trainings import assemble_trainer, losses, recipe_keys
from hpcdist.training.data import SampleShares

STEPS = 6
LAYOUTS = {
    "zero3 over nodes": recipe_keys("algorithm=hierarchical strategy=zero3"),
    "servers over nodes": recipe_keys(
        "algorithm=hierarchical strategy=parameter_server parameter_server.placement=colocated"
    ),
}


def _text(comm, tmp_path):
    path = comm.broadcast_object(str(tmp_path / "text.txt"))
    if comm.rank == 0:
        write_text(Path(path), np.random.default_rng(7))
    comm.barrier()
    return path


def _losses(comm, settings, *, uneven):
    trainer = assemble_trainer(comm, settings)
    if uneven:
        trainer = replace(trainer, shares=SampleShares(trainer.recipe.run.global_batch, trainer.data_axis.size))
        samples = trainer.recipe.run.global_batch
        for batch in range(1, STEPS):  # one rank has all samples, every rank in turn
            trainer.shares.change(batch, tuple(samples * (rank == batch % comm.size) for rank in range(comm.size)))
    actual_losses = losses(trainer, STEPS)
    trainer.close()
    return actual_losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_without_a_sample_still_takes_part(comm, tmp_path, name):
    declared = comm.dup()
    declared.declared_node = comm.rank // 2  # type: ignore[attr-defined]  # of 3 ranks: a node of 2, and one of 1
    settings = {"data.path": _text(comm, tmp_path), "precision.mode": "float64", **LAYOUTS[name]}
    even = _losses(declared, settings, uneven=False)
    np.testing.assert_allclose(_losses(declared, settings, uneven=True), even, rtol=1e-12)
