"""Steady steps as CUDA graphs on the double: the bits of a run without graphs, with far fewer calls from Python."""

import re
import threading
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from harness.trainings import LAYOUTS, Trained, assemble_trainer, assert_rejected, recipe_keys
from hpcdist.arrays import backend
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.strategies.core.operations import COMPUTE
from hpcdist.strategies.schedule.graphs import WARM_UP
from stubs.gpu import cuda_double

STEPS = WARM_UP + 3
GRAPHS = {"run.device": "gpu", "run.cuda_graph": "true", "run.steps": STEPS}
ZB_H1 = {**LAYOUTS["1f1b"][1], "parallel.schedule": "zb-h1"}
ONE_LAYER = recipe_keys("layers=1 parallel.microbatches=2")
WORKING = recipe_keys("precision.activations=working")
CASES = {
    "allreduce": (2, {**LAYOUTS["allreduce"][1], **ONE_LAYER}),
    "1f1b": (2, {**LAYOUTS["1f1b"][1], **ONE_LAYER}),
    "dropout, bfloat16": (1, {**ONE_LAYER, **WORKING, "precision.mode": "bfloat16", "model.dropout": 0.2}),
}
FULL = {
    "zero1": (2, {**LAYOUTS["zero1"][1], **ONE_LAYER}),
    "zero3, float16 copies": (2, {**LAYOUTS["zero3"][1], **ONE_LAYER, "precision.mode": "float16"}),
    "zb-h1, dropout": (2, {**ZB_H1, "model.dropout": 0.2}),
}
MATRIX = {
    "one rank": (1, LAYOUTS["allreduce"][1]),
    "zero3": (2, LAYOUTS["zero3"][1]),
    "recomputed layers, dropout": (1, {"parallel.recompute": "true", "model.dropout": 0.2}),
    "1f1b, recomputing": (2, LAYOUTS["1f1b, recomputing"][1]),
    "gpipe": (2, LAYOUTS["gpipe"][1]),
    "pipeline of 4": (4, LAYOUTS["pipeline of 4"][1]),
    "interleaved": (2, {**LAYOUTS["1f1b"][1], **recipe_keys("parallel.schedule=interleaved chunks=2 microbatches=2")}),
    "zb-h1": (2, ZB_H1),
    "1f1b x zero1": (4, LAYOUTS["1f1b x zero1"][1]),
    "a server": (2, LAYOUTS["a server"][1]),
    "local sgd": (2, {**LAYOUTS["allreduce"][1], "parallel.strategy": "local_sgd"}),
    "topk": (2, {**LAYOUTS["allreduce"][1], "communication.compression": "topk"}),
    "the options of Llama": (1, recipe_keys("positions=rotary norm=rms activation=swiglu kv_heads=1 model.bias=false")),
    "encoder": (1, recipe_keys("kind=encoder model.dropout=0.1")),
    "mlp": (1, recipe_keys("kind=mlp model.dropout=0.1 tied=false")),
    "window": (1, recipe_keys("window=5")),
    "zero3 on the host": (2, {**LAYOUTS["zero3"][1], **recipe_keys("offload_optimizer=host offload_parameters=host")}),
    "noise scale": (2, {**LAYOUTS["allreduce"][1], "run.noise_scale_every_steps": 1}),
    "float16 activations": (1, {**WORKING, "precision.mode": "float16"}),
}


class Counted(Trained):
    """A run that counts the calls of each step: kernels, captured kernels, and graphs."""

    def __init__(self, comm, settings):
        self.steps, self.scales, self._name = [], [], threading.current_thread().name
        super().__init__(comm, settings, self._before, self._after)

    def _now(self):
        return Counter({kind: n for (thread, kind), n in cuda_double.ISSUED.items() if thread == self._name})

    def _before(self):
        self._start = self._now()

    def _after(self):
        self.steps.append(self._now() - self._start)
        self.scales.append(self.trainer.executor.outcome.loss_scale)


def check_bits(plain, graphs):
    for want, got in zip(plain, graphs, strict=True):
        assert got.losses == want.losses and got.validation == want.validation
        assert got.state.keys() == want.state.keys()
        assert all(got.state[key].tobytes() == want.state[key].tobytes() for key in want.state)


def run_without_and_with_graphs(ranks, settings, steps=STEPS):
    """Return the runs of all ranks without graphs, and with graphs."""
    on = {**settings, **GRAPHS, "run.steps": steps}
    off = {**on, "run.cuda_graph": "false"}
    return [
        run_threads(ranks, lambda comm, local_data=local_data: Counted(comm, local_data)) for local_data in (off, on)
    ]


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(pytest.param(name, marks=pytest.mark.full) for name in FULL),
        *(pytest.param(name, marks=(pytest.mark.full, pytest.mark.matrix)) for name in MATRIX),
    ],
)
def test_graphs_have_the_bits_of_single_kernels(gpu, words, case):
    ranks, keys = {**CASES, **FULL, **MATRIX}[case]
    plain, graphs = run_without_and_with_graphs(ranks, {**words, **keys})
    check_bits(plain, graphs)
    assert len(set(plain[0].losses)) == STEPS
    for one, other in zip(plain, graphs, strict=True):
        operations = sum(op.kind in COMPUTE for op in other.trainer.operations)
        for step, calls in enumerate(other.steps):
            assert (calls["graph"] > 0) == (step >= WARM_UP and operations > 0)
        assert not any(calls["captured"] for calls in other.steps[WARM_UP + 1 :]), "captured once"
        assert other.steps[-1]["graph"] <= operations  # a micro-batch may have no samples
        if operations:
            assert other.steps[-1]["kernel"] + other.steps[-1]["graph"] < one.steps[-1]["kernel"]


@pytest.mark.full
def test_steady_step_with_graphs_needs_few_calls_and_little_memory(gpu, words):
    """This includes a deeper model: the number of calls depends on micro-batches, not on layers.

    Memory used only by graphs is counted.
    """
    (plain,), (graphs,) = run_without_and_with_graphs(1, {**words, "model.layers": 4, "parallel.microbatches": 1})
    assert graphs.steps[-1]["graph"] == 2 * 6
    assert graphs.steps[-1]["kernel"] < plain.steps[-1]["kernel"] - 4 * 40
    more = [run.trainer.ledger.current["activations"] for run in (plain, graphs)]
    assert 0 < graphs.trainer.executor._stages._launches._recorder.nbytes <= more[1] - more[0]


@pytest.mark.full
def test_new_loss_scale_is_captured_again(gpu, words):
    plain, graphs = run_without_and_with_graphs(
        1, {**words, **recipe_keys("precision.mode=float16 growth_interval=4 layers=1")}, 11
    )
    check_bits(plain, graphs)
    scales = [0.0, *graphs[0].scales, 0.0]
    changed = [step for step, (before, now) in enumerate(pairwise(scales)) if before != now]
    captured = [first + WARM_UP for first, end in pairwise(changed) if end - first > WARM_UP]
    assert [step for step, calls in enumerate(graphs[0].steps) if calls["captured"]] == captured
    assert len(captured) > 1


@pytest.mark.matrix
@pytest.mark.full
def test_growing_batches_are_captured_again(gpu, words):
    plain, graphs = run_without_and_with_graphs(
        1, {**words, "run.batch_warmup": "[16, 4]", "parallel.microbatches": 2}, 4 + STEPS
    )
    check_bits(plain, graphs)
    captured = [step for step, calls in enumerate(graphs[0].steps) if calls["captured"]]
    assert captured == [WARM_UP, 4 + WARM_UP]


@pytest.mark.full
def test_evaluation_between_steps_does_not_change_the_graphs(gpu, words):
    """It needs more memory than a step, including shared scratch memory."""

    def train(comm, on):
        keys = {**words, **GRAPHS, "run.cuda_graph": on, "run.global_batch": 2, "run.validation_samples": 0}
        trainer, losses = assemble_trainer(comm, keys), []
        with trainer.batches(STEPS) as batches:
            for step, batch in enumerate(batches, start=1):
                losses.append(trainer.step(step, trainer.cut(trainer.place(batch)), np.zeros(2)).loss)
                if step > WARM_UP:  # for the first time once there are graphs
                    more = tuple(np.tile(array, (8, 1)) for array in batch)
                    losses.append(trainer.evaluate([[trainer.place(more)]]))
        return losses, backend.to_host(trainer.exchange.parameters.array).tobytes()

    assert train(solo(), "true") == train(solo(), "false")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("run.device=cpu", "run.cuda_graph = true has no effect with run.device = 'cpu'"),
        ("parallel.tensor=2", "parallel.tensor = 2: its ranks send messages within a layer"),
        ("parallel.context=2", "parallel.context = 2: its ranks send messages within a layer"),
        ("model.experts=4", "the host waits for the number of tokens of each"),
        ("model.experts=4 parallel.expert=2", "run.cuda_graph"),
        (
            "data.packed=true",
            "documents begin at different positions in every sample; set run.cuda_graph = false, or data.packed",
        ),
        ("model.kind=import model.factory=a:b", "is not built in this version"),
    ],
)
def test_options_that_graphs_do_not_support_are_rejected(keys, why):
    assert "run.cuda_graph" in assert_rejected(
        {"run.device": "gpu", "run.cuda_graph": "true", **recipe_keys(keys)}, re.escape(why)
    )
