"""Any legal order of a pipeline on any placement gives gradients with the bits of one process."""

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.pipelines import SAMPLES, Plan, parts, random_legal_order, run
from harness.rank_run import seat
from hpcdist import models
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import CommunicationError, ScheduleError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import build_executor
from hpcdist.strategies.core.operations import Kind, folded, looped
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.schedule import messages
from hpcdist.strategies.schedule.operation_list import generated
from stubs import late_messages

LAYERS = 4  # of a gpt: six units


def step(comm, plan, model, dtype):
    """Return the loss of one step, and the gradients of the local tensors."""
    noise = np.random.default_rng(11)
    if model.kind == "gpt":
        tokens = noise.integers(0, model.vocabulary, (SAMPLES, 9))
        samples = tokens[:, :-1], tokens[:, 1:]
    else:
        samples = noise.standard_normal((SAMPLES, 5)).astype(dtype), noise.integers(0, 3, SAMPLES)
    loss, _, gradients = run(comm, plan, built=build_model(model, dtype), samples=samples)
    return loss, gradients


def build_model(model, dtype="float32"):
    return models.build(model, dtype, context=8, features=5, classes=3)


@cache
def alone(model, microbatches, dtype):
    units = len(build_model(model).stages)
    passes = [(way, microbatch, 0) for microbatch in range(microbatches) for way in (Kind.FORWARD, Kind.BACKWARD)]
    plan = Plan(looped([range(units)], 1), (passes,), microbatches)
    return run_threads(1, lambda comm: step(comm, plan, model, dtype))[0]


def compare(plan, model, dtype="float32", *, exact=True, late=False):
    """Compare with one process. ``late`` messages are read and written at the last moment."""
    loss, expected = alone(model, plan.microbatches, dtype)
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        if late:
            late_messages.install(patch)
        ranks = run_threads(plan.placement.stages, lambda comm: step(comm, plan, model, dtype))
    for local_data, gradients in ranks:
        assert local_data == loss
        assert not results.keys() & gradients.keys()
        results |= gradients
    assert results.keys() == expected.keys()
    for key, values in expected.items():
        if exact:
            assert results[key] == values, key
        else:
            of = np.frombuffer(values, dtype)
            np.testing.assert_allclose(np.frombuffer(results[key], dtype), of, rtol=1e-10, atol=1e-14, err_msg=key)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32), split=st.booleans(), late=st.booleans(), kind=st.sampled_from(["gpt", "mlp"]))
@pytest.mark.full
def test_any_legal_order_has_the_same_gradients(seed, split, late, kind):
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 2, 3])
    model = ModelConfig(kind=kind, layers=LAYERS if kind == "gpt" else 6, hidden=8, heads=2, vocabulary=19)
    units = len(build_model(model).stages)
    chunks = ranks * draw.choice([1, 2]) if units >= 2 * ranks else ranks
    fold = chunks == 2 * ranks and draw.random() < 0.5
    placement = (folded if fold else looped)(parts(units, chunks, draw), ranks)
    microbatches = draw.choice([1, 2, 5, 8])  # of 7 samples: the last of 8 is empty
    passes = random_legal_order(placement, microbatches, split, draw)
    apart = all(placement.crosses(chunk.start) for chunk in placement.chunks[1:])  # what is run again starts there
    recompute = not split and apart and draw.random() < 0.5
    compare(Plan(placement, passes, microbatches, recompute), model, late=late)


@pytest.mark.parametrize("split", [False, True])
def test_tied_tensors_of_any_placement_have_the_same_gradient(split):
    model = ModelConfig(layers=LAYERS, hidden=8, heads=2, vocabulary=19, tied=True)
    for seed in range(4):
        draw = random.Random(seed)
        placement = (looped, folded)[seed % 2](parts(LAYERS + 2, 4, draw), 2)
        compare(
            Plan(placement, random_legal_order(placement, 3, split, draw), 3),
            model,
            "float64",
            exact=False,
            late=seed > 1,
        )


def test_swapped_microbatches_with_the_same_tag_are_rejected(monkeypatch):
    monkeypatch.setattr(messages, "LARGEST_TAG", messages.TIES - 1 + 2 * 2 * (LAYERS + 2))  # 2 micro-batches apart
    model = ModelConfig(layers=LAYERS, hidden=8, heads=2, vocabulary=19)
    placement = looped([range(2), range(2, LAYERS + 2)], 2)
    compare(Plan(placement, generated("zb-h1", 2, 5).passes, 5), model)
    turned = tuple(
        [(way, (2, 1, 0)[microbatch], 0) for way, microbatch, _ in row] for row in generated("1f1b", 2, 3).passes
    )
    refused = r"pipeline rank \d: (SEND|RECV)_ACTIVATION\(0, 2\) and the earlier \w+\(2, 2\) have the same message tag"
    with pytest.raises(ScheduleError, match=refused):
        compare(Plan(placement, turned, 3), model)


def test_ranks_that_disagree_on_a_shape_do_not_start():
    def build(comm):
        model = models.build(ModelConfig(layers=2, hidden=8 * (1 + comm.rank), heads=2), context=8)
        placement = looped([range(2), range(2, 4)], 2)
        context = seat(comm, model, OptimizerConfig(), data=solo(), pipeline=comm, placement=placement)
        build_executor(context, catalogue.allreduce(context))

    with pytest.raises(CommunicationError, match="disagree on the shapes of activation messages"):
        run_threads(2, build)
