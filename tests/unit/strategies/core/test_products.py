"""Any layout that a recipe may request matches one process: random layouts on at most four ranks."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.trainings import check_training, run_single_process, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.schedule.replica_check import check_tensor_axis

STEPS = 3
GRIDS = ((2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 3), (1, 1, 4), (3, 1, 1), (1, 3, 1))  # data, pipeline, tensor
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
STRATEGIES = ("allreduce", "zero1", "zero2", "zero3", "parameter_server")
KEYS = {
    "data.context": 7,  # with five samples or seven, no number of rows is even
    "run.steps": STEPS,
    "run.validation_samples": 5,
    "optimizer.warmup_steps": 2,
    "optimizer.clip_norm": 0.5,
    "precision.mode": "float64",
}


@st.composite
def layouts(draw):
    """Return a number of ranks, and the keys of a run on them."""
    data, pipeline, tensor = draw(st.sampled_from(GRIDS))
    strategy, microbatches = draw(st.sampled_from(STRATEGIES)), draw(st.sampled_from((1, 3, 4)))
    keys = {
        "model.layers": 6 if pipeline > 1 else 2,
        "model.heads": 6 if tensor == 3 else 4,
        "model.hidden": 24,
        "model.vocabulary": draw(st.sampled_from((256, 257, 259))),
        "model.tied": draw(st.sampled_from(("false", "true"))),
        "model.dropout": draw(st.sampled_from((0.0, 0.3))),
        "optimizer.name": draw(st.sampled_from(("adamw", "lamb"))),
        "parallel.data": data,
        "parallel.pipeline": pipeline,
        "parallel.tensor": tensor,
        "parallel.strategy": strategy,
        "parallel.microbatches": microbatches,
        "run.global_batch": 2 * data * microbatches if pipeline > 1 else draw(st.sampled_from((5, 7))),
    }
    schedule = draw(st.sampled_from(SCHEDULES)) if pipeline > 1 else "sequential"
    if pipeline > 1:
        keys["parallel.schedule"] = schedule
        keys["parallel.chunks"] = 2 if schedule == "interleaved" else 1
        assume(schedule != "interleaved" or microbatches >= pipeline)
        if schedule in ("gpipe", "1f1b", "interleaved") and microbatches > 1:
            keys["parallel.recompute"] = draw(st.sampled_from(("false", "true")))
    if tensor > 1:
        keys["parallel.sequence_parallel"] = draw(st.sampled_from(("false", "true")))
    if strategy in ("zero2", "zero3"):
        once = pipeline > 1 and (keys["model.tied"] == "true" or schedule.startswith("zb"))
        keys["zero.keep_gradients"] = "true" if once else draw(st.sampled_from(("false", "true")))
    if strategy == "parameter_server":
        keys["parameter_server.placement"] = "colocated"
    elif pipeline == 1 and draw(st.booleans()):
        keys["communication.overlap"] = "thread"
    return data * pipeline * tensor, keys


@settings(max_examples=12)
@given(layout=layouts())
@pytest.mark.full
def test_random_products_match_one_process(shared_text, layout):
    ranks, changed = layout
    keys = KEYS | {"data.path": shared_text} | changed
    expected = run_single_process(keys, STEPS)

    def body(comm):
        together = trainer_of(comm, keys)
        check_training(together, expected, STEPS, 1e-12)
        check_tensor_axis(together.context.tensor, together.exchange.parameters, STEPS)
        assert not any(together.executor.arena._uses), "what activations lay in is given back"
        together.close()

    run_threads(ranks, body)
