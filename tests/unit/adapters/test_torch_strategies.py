"""Under every layout, a wrapped PyTorch model learns the same values as a plain PyTorch script."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from harness.models.pytorch import Layout, Training, compare, gpt, tokens, wrap_model
from hpcdist.adapters.torch.model import wrap
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.pipeline import costs as pipeline_costs
from hpcdist.strategies.pipeline.costs import unit_costs

STEPS, SAMPLES, BOUND = 5, 12, 2e-5
PIPELINES = [
    Layout(pipeline=2, microbatches=3, schedule="gpipe"),
    Layout(pipeline=2, microbatches=3, schedule="1f1b"),
    Layout(pipeline=2, microbatches=3, schedule="1f1b", recompute=True),
    Layout(pipeline=2, microbatches=4, schedule="interleaved", chunks=2),
    Layout(pipeline=2, microbatches=4, schedule="zb-h1"),
    Layout(pipeline=4, microbatches=2, schedule="1f1b"),
]


def train_and_compare(ranks, layout, rng, bound=BOUND, **options):
    """Train on ``ranks`` threads and compare each rank with a plain PyTorch twin."""
    seed = int(rng.integers(1 << 31))
    batches = [tokens(rng, SAMPLES) for _ in range(STEPS)]
    # Build the models before the threads start: threads share the generator of the initial values.
    models = [wrap_model(gpt(seed, **options), batches[0][0]) for _ in range(ranks)]
    twins = [gpt(seed, **options) for _ in range(ranks)]
    run_threads(
        ranks, lambda comm: compare(Training(comm, models[comm.rank], layout), lambda: twins[comm.rank], batches, bound)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3"])
@pytest.mark.full_except("allreduce-1-1-False")
def test_data_parallel_strategies_match_pytorch(strategy, ranks, microbatches, tied, rng):
    train_and_compare(ranks, Layout(strategy=strategy, microbatches=microbatches), rng, tied=tied)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", PIPELINES, ids=lambda one: f"{one.schedule} of {one.pipeline} {one.recompute}")
@pytest.mark.full_except("1f1b of 2 True-False")
def test_pipelines_match_pytorch(layout, tied, rng):
    train_and_compare(layout.pipeline, layout, rng, tied=tied)


@pytest.mark.parametrize(("strategy", "tied"), [("zero1", True), ("zero2", False), ("zero3", False)])
@pytest.mark.full_except("zero2-False")
def test_pipelines_with_sharded_stages_match_pytorch(strategy, tied, rng):
    train_and_compare(4, Layout(strategy=strategy, pipeline=2, microbatches=2), rng, tied=tied)


@pytest.mark.parametrize("strategy", ["allreduce", "zero3"])
@pytest.mark.full_except("allreduce")
def test_bfloat16_working_copies_match_pytorch(strategy, rng):
    """Parameters are widened only while they are used. bfloat16 has 8 bits of precision, the master copy has all."""
    train_and_compare(2, Layout(strategy=strategy, microbatches=2, working="bfloat16"), rng, bound=2e-2, tied=True)


def train_layout(ranks, layout, seed, batches, **options):
    """Return the losses of every rank and the final parameters."""
    models = [wrap_model(gpt(seed, **options), batches[0][0]) for _ in range(ranks)]

    def body(comm):
        training = Training(comm, models[comm.rank], layout, seed=9)
        return [training.advance(x, y).loss for x, y in batches], training.parameters()

    return run_threads(ranks, body)


@pytest.mark.full
def test_recomputed_forward_has_the_same_dropout(rng):
    """Recomputation keeps the losses bit for bit. A pipeline drops the same elements as one process."""
    seed, batches = int(rng.integers(1 << 31)), [tokens(rng, SAMPLES) for _ in range(STEPS)]
    plain, again = (
        train_layout(2, Layout(pipeline=2, microbatches=3, recompute=recompute), seed, batches, dropout=0.3)
        for recompute in (False, True)
    )
    assert plain[0][0] == again[0][0]
    for key, values in plain[0][1].items():
        np.testing.assert_array_equal(again[0][1][key], values)
    alone = train_layout(1, Layout(microbatches=3), seed, batches, dropout=0.3)
    np.testing.assert_allclose(plain[0][0], alone[0][0], rtol=1e-6)
    calm = train_layout(1, Layout(microbatches=3), seed, batches)
    assert abs(calm[0][0][0] - alone[0][0][0]) > 1e-4, "nothing was dropped"


def test_evaluation_between_steps_matches_pytorch(rng):
    """An evaluation is collective over a pipeline and over gathered units. It drops nothing and leaves no memory."""
    seed, batches = int(rng.integers(1 << 31)), [tokens(rng, SAMPLES) for _ in range(2)]
    x, y = batches[0]
    expected = gpt(seed).eval()(torch.from_numpy(x.astype(np.int64)))
    loss = functional.cross_entropy(expected.flatten(0, 1), torch.from_numpy(y.astype(np.int64)).flatten())
    for ranks, layout in ((2, Layout(pipeline=2, microbatches=2)), (2, Layout(strategy="zero3"))):
        models = [wrap_model(gpt(seed, dropout=0.5), x) for _ in range(ranks)]

        def body(comm, models=models, layout=layout):
            training = Training(comm, models[comm.rank], layout)
            result = training.executor.evaluate(x, y)
            assert not training.executor.arena._live
            training.advance(*batches[1])
            training.executor.evaluate(x, y)
            return result

        result = max(run_threads(ranks, body))
        assert result / y.size == pytest.approx(loss.item(), rel=1e-6)


def test_memory_of_remote_stages_is_freed(rng):
    batches = [tokens(rng, SAMPLES) for _ in range(3)]
    modules = [gpt(1) for _ in range(2)]
    models = [wrap_model(module, batches[0][0]) for module in modules]

    def body(comm):
        training = Training(comm, models[comm.rank], Layout(pipeline=2, microbatches=2))
        for x, y in batches:
            training.advance(x, y)
        return [sum(parameter.numel() for parameter in stage.parameters()) for stage in modules[comm.rank]]

    sizes = [sum(parameter.numel() for parameter in stage.parameters()) for stage in gpt(1)]
    first, second = run_threads(2, body)
    assert first == [*sizes[:2], 0, 0]
    assert second == [0, 0, *sizes[2:]]


class Poisoned(nn.Linear):
    """A linear layer that returns NaN for large inputs if it is ``armed``."""

    def __init__(self, armed):
        super().__init__(4, 4)
        self.armed = armed

    def forward(self, x):
        y = super().forward(x)
        return y * float("nan") if self.armed and bool((x.detach().abs() > 50).any()) else y


def test_nonfinite_output_is_reported_with_its_stage(rng):
    """The executor computes the step again, and names the stage and its module."""
    x, y = rng.standard_normal((6, 4)).astype(np.float32), rng.integers(0, 4, 6)
    x[4] = 1000.0
    module = nn.Sequential(nn.Linear(4, 4), Poisoned(armed=True), nn.Linear(4, 4))
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(4))
    model = wrap(module, functional.cross_entropy, example=x)

    def body(comm):
        training = Training(comm, model, Layout(microbatches=3))
        with pytest.raises(NonFiniteError):
            training.advance(x, y)
        batches = list(zip(np.array_split(x, 3), np.array_split(y, 3), strict=True))
        return training.executor.inspect(training.operations, batches)

    assert run_threads(1, body) == ["output of layer 1, 1 (Poisoned), in micro-batch 2"]


def test_passes_can_be_measured_before_training(rng):
    """A pipeline balanced by measured seconds does this. The measurement leaves the initial values unchanged."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    before = {name: value.clone().numpy() for name, value in module.state_dict().items()}
    x, y = rng.standard_normal((2, 2, 4)).astype(np.float32)
    model = wrap(module, functional.mse_loss, example=(x, y[:, :2]))
    assert model.loss.example_targets(3).tolist() == y[[0, 1, 0], :2].tolist()
    result = pipeline_costs.measure(model, samples=3)
    assert len(result) == 2
    assert all(one.forward > 0 and one.backward > 0 for one in result)
    store = FlatStore(model.layout, model.dtype)
    model.initialise(store, 0)
    for segment in model.layout.segments:
        np.testing.assert_array_equal(store.view(segment.key), before[segment.spec.name])


def test_pipeline_costs_use_counted_flops(rng):
    """An embedding has no matrix product, attention has. The backward takes twice as many operations."""
    x, _ = tokens(rng, 2)
    model = wrap_model(gpt(0), x)
    costs = unit_costs(model, samples=3)
    assert [cost.forward_flop for cost in costs] == [3 * stage.forward_flops for stage in model.stages]
    assert [cost.input_flop for cost in costs[1:]] == [2 * cost.forward_flop for cost in costs[1:]]
    assert [cost.weight_flop for cost in costs] == [0] * 4
