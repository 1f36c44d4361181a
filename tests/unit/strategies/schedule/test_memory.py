"""Peak bytes of gathered parameters in schedules: a layer, or the whole stage if it is kept for the step."""

import pytest

from harness import trainings
from harness.inputs import write_text
from harness.trainings import assemble_trainer, recipe_keys
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.core.operations import Kind

RUN = recipe_keys(
    "pipeline=2 strategy=zero3 microbatches=3 zero.keep_gradients=true global_batch=12 layers=4 tied=false"
)


@pytest.mark.parametrize("keep", ["false", "true"])
@pytest.mark.full_except("true")
def test_split_backward_holds_no_more_parameters(tmp_path, rng, keep):
    text = write_text(tmp_path / "text.txt", rng)

    def body(comm, schedule):
        keys = {"data.path": text, "parallel.schedule": schedule, "zero.keep_parameters": keep}
        trainer = assemble_trainer(comm, RUN | keys)
        assert trainer.ledger is not None
        trainings.run_steps(trainer, 2)
        gathers = sum(op.kind is Kind.GATHER for op in trainer.operations)
        return trainer.ledger.peak["parameters"], gathers, len(trainer.context.units)

    joint = run_threads(4, lambda comm: body(comm, "1f1b"))
    for schedule in ("zb-h1", "zb-h2"):
        for (one, _, _), (split, gathers, units) in zip(
            joint, run_threads(4, lambda comm, schedule=schedule: body(comm, schedule)), strict=True
        ):
            assert split == one
            assert (gathers == units) == (keep == "true")
