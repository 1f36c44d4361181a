"""Stages that pass on several values, and modules that `wrap` cuts at their children, match plain PyTorch."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from harness.models import pytorch as torch_models
from harness.models.passes import Passes
from harness.models.pytorch import CONTEXT, HIDDEN, VOCABULARY, Block, Layout, Training, compare, tokens
from hpcdist.adapters.torch.model import load, wrap
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.stage import Draw
from hpcdist.strategies.pipeline.partition import check_units

DRAW = Draw(0, 1, 0)


class Whole(nn.Module):
    """A language model in one module, with a table that the head shares, skips, and positions from the inputs."""

    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.body = nn.Sequential(nn.LayerNorm(2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN), nn.GELU())
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("shift", torch.full((HIDDEN,), 0.1))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, weights=None):
        samples, context = tokens.shape
        positions = torch.arange(context, device=tokens.device)
        skip = x = self.table(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x) if weights is None else block(x) * weights
        x = self.body(torch.cat([x, skip], dim=-1)).view(samples, context, -1)
        return self.head(x * self.scale.exp() + self.shift + self.places(positions)) + (tokens == 1).unsqueeze(-1)


class Begins(torch_models.Embed):
    """Returns a dict: floats, integers, a mask that all samples share, a number and constants."""

    def forward(self, tokens):
        mask = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
        floats = super().forward(tokens)
        return {"x": floats, "more": (tokens, mask, self.positions.sum(), len(tokens), None, "causal")}


class Continues(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, values):
        ids, mask, total, samples, nothing, kind = values["more"]
        assert (mask.dtype, mask.shape, ids.dtype) == (torch.bool, (CONTEXT, CONTEXT), torch.int64)
        assert (type(samples), samples, nothing, kind) == (int, len(ids), None, "causal")
        x = values["x"] + torch.tanh(mask.float() @ self.linear(values["x"])) * (ids > 3).unsqueeze(-1)
        return values | {"x": x * (1 + total)}


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, values):
        return self.logits(values["x"])


def passing(seed):
    torch.manual_seed(seed)
    return nn.Sequential(Begins(), Continues(), Continues(), Ends())


def whole(seed):
    torch.manual_seed(seed)
    return Whole()


@pytest.mark.parametrize("build", [passing, whole])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, Layout(pipeline=2, microbatches=2, schedule="1f1b")),
        (2, Layout(strategy="zero3", microbatches=2)),
        pytest.param(1, Layout(), marks=pytest.mark.full),
        pytest.param(2, Layout(pipeline=2, microbatches=3, recompute=True), marks=pytest.mark.full),
        pytest.param(4, Layout(pipeline=2, strategy="zero1", microbatches=2), marks=pytest.mark.full),
        pytest.param(2, Layout(pipeline=2, microbatches=4, schedule="interleaved", chunks=2), marks=pytest.mark.full),
        pytest.param(2, Layout(pipeline=2, microbatches=4, schedule="zb-h1"), marks=pytest.mark.full),
    ],
    ids=lambda one: one if isinstance(one, int) else f"{one.strategy}-{one.pipeline}-{one.schedule}-{one.recompute}",
)
def test_layouts_match_pytorch(build, ranks, layout, rng):
    seed = int(rng.integers(1 << 31))
    batches = [tokens(rng, 12) for _ in range(4)]
    models = [torch_models.wrap_model(build(seed), batches[0][0], cut=build is whole) for _ in range(ranks)]
    twins = [build(seed) for _ in range(ranks)]
    assert len(models[0].stages) >= 4
    run_threads(
        ranks, lambda comm: compare(Training(comm, models[comm.rank], layout), lambda: twins[comm.rank], batches, 2e-5)
    )


def test_cut_module_keeps_names_and_parameters(rng):
    module = whole(0)
    x, _ = tokens(rng, 4)
    model = torch_models.wrap_model(module, x, cut=True)
    groups = ["table", "places to blocks.0", "blocks.1", "blocks.2", "body.0 to body.1", "scale"]  # over 1 % each
    assert [stage.name for stage in model.stages] == [f"module ({group})" for group in groups]
    assert model.stages[-1].tied["head.weight"] == "0.table.weight"
    named = dict(module.named_parameters())
    for stage in model.stages:
        assert all(named[name] is parameter for name, parameter in stage.modules.owned.items())
    trained = {s.key: rng.standard_normal(s.spec.shape).astype(np.float32) for s in model.layout.segments}
    load(module, trained)
    for key, values in trained.items():
        np.testing.assert_array_equal(named[key.partition(".")[2]].detach().numpy(), values)
    with pytest.raises(UsageError, match="lack the tensor scale"):
        load(module, {key: values for key, values in trained.items() if not key.endswith("scale")})


def squares(outputs, targets):
    outputs = outputs["y"] if isinstance(outputs, dict) else outputs
    return (outputs - targets).square().mean()


class Layers(nn.Module):
    """Base class of modules whose forward decides whether they can be cut."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(5, 5), nn.Linear(5, 5), nn.Dropout(0.5)

    def after(self, x):
        return self.two(x)


class Branches(Layers):
    def forward(self, x):
        return self.after(self.one(x) if x.sum() > 0 else x)


class Freezes(Layers):
    def forward(self, x):
        with torch.no_grad():
            x = self.one(x)
        return self.after(x)


class AsksForTraining(Layers):
    def forward(self, x):
        return self.after(functional.dropout(self.one(x), 0.5, self.training))


class Remembers(Layers):
    def forward(self, x):
        self.seen = self.one(x)
        return self.after(self.seen)


class Draws(Layers):
    def forward(self, x):
        return self.after(self.one(x) + torch.rand(5))


class Ignores(Layers):
    def forward(self, x):
        self.one(x)
        return self.two(self.two.bias + torch.zeros(2, 5))


class Single(Layers):
    def forward(self, x):
        return self.drop(self.one(x))


class Spares(Layers):
    def __init__(self):
        super().__init__()
        self.three = nn.Linear(5, 5)

    def forward(self, x):
        return self.after(self.one(x))


class Straight(Layers):
    def forward(self, x):
        return self.after(self.drop(torch.relu(self.one(x))))


class Reads(Layers):
    """Returns a dict with numbers."""

    def forward(self, x):
        return {"y": self.after(self.one(x)), "sizes": x.shape}


def hooked():
    module = Straight()
    module.register_forward_hook(lambda *arguments: None)
    return module


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Branches, "torch.fx cannot trace its forward (TraceError: symbolically traced variables"),
        (Freezes, "its forward uses no_grad"),
        (AsksForTraining, "its forward depends on self.training"),
        (Remembers, "its forward sets the attribute seen of Remembers"),
        (Draws, "its forward draws random numbers of a fixed size"),
        (Ignores, "some of its child modules use no output"),
        (Single, "its forward calls only one child module with parameters"),
        (Spares, "its traced forward does not use the parameter three.weight"),
        (hooked, "the module Straight itself has hooks"),
    ],
)
def test_module_that_cannot_be_cut_stays_one_stage_with_the_reason(build, reason):
    module = build().eval()
    attributes = vars(module).keys() - {"seen"}
    model = wrap(module, squares, example=np.ones((2, 5), np.float32), cut=True)
    assert len(model.stages) == 1
    assert model.stages[0].uncut.startswith(f"wrap could not cut the module: {reason}")
    assert vars(module).keys() - {"seen"} == attributes and not any(part.training for part in module.modules())
    with pytest.raises(ConfigurationError, match="more units. wrap could not cut the module: "):
        check_units(1, 2, 1, model.stages[0].uncut)


def test_cut_without_example_or_of_a_list_is_rejected():
    for module, options in ((Straight(), {}), ([nn.Linear(5, 5)], {"example": np.ones((2, 5), np.float32)})):
        with pytest.raises(UsageError, match="cut=True needs one module, and example=x"):
            wrap(module, squares, cut=True, **options)


def test_modes_hooks_and_outputs_of_a_cut_module_match_pytorch(rng):
    """Child modules keep their hooks and modes, and the loss gets the dict that the module returns."""
    module, calls = Reads(), []
    module.two.register_forward_hook(lambda *arguments: calls.append(module.two.training))
    module.drop.eval()
    x, y = rng.standard_normal((2, 6, 5)).astype(np.float32)
    bench = Passes(wrap(module, squares, example=x[:1], cut=True))
    calls.clear()
    loss = bench.step([(x[:4], y[:4]), (x[4:], y[4:])], 1 / 6, DRAW)
    assert calls == [True, True] and not module.drop.training
    loss += bench.model.evaluate(bench.parameters, x, y, bench.arena)
    assert calls == [True, True, False]
    expected = squares(module(torch.from_numpy(x)), torch.from_numpy(y))
    assert loss / 12 == pytest.approx(expected.item(), rel=1e-6)
    for stage in bench.model.stages:
        stage.guard("the reason")
    with pytest.raises(UsageError, match="was called outside of a step: the reason"):
        module(torch.from_numpy(x))
    bench.step([(x, y)], 1 / 6, DRAW)
    assert wrap(Straight(), squares, example=x, cut=True).stages[0].uncut == ""


def test_loss_of_several_outputs_that_is_not_a_mean_is_rejected(rng):
    model = wrap(Reads(), lambda outputs, targets: outputs["y"].square().sum().sqrt().mean(), example=np.ones((2, 5)))
    with pytest.raises(UsageError, match="is not a mean over samples|hides the weight"):
        Passes(model).step([(rng.standard_normal((6, 5)).astype(np.float32), np.zeros(6))], 1.0, DRAW)


class PassesOn(nn.Linear):
    """Passes on its output and ``function(x)``."""

    def __init__(self, function):
        super().__init__(5, 5)
        self.function = function

    def forward(self, x):
        return super().forward(x), self.function(x)


class Takes(nn.Linear):
    def __init__(self, function):
        super().__init__(5, 5)
        self.function = function

    def forward(self, values):
        return super().forward(self.function(*values))


@pytest.mark.parametrize(
    ("passes", "takes", "message"),
    [
        (lambda x: x.long() + 2**24, lambda y, x: y, r"returns torch.int64 values, and its .* cannot hold them"),
        (lambda x: x.double(), lambda y, x: y, r"returns torch.float64 values"),
        (lambda x: x.T, lambda y, x: y, r"returns a tensor \(5, 3\) of floats for 3 samples, expected \(5, 4\)"),
        (lambda x: float(x.sum()), lambda y, x: y, r"returns 15.0, but it first returned 20.0"),
        (lambda x: [None] * len(x), lambda y, x: y, r"but it first returned TreeSpec"),
        (lambda x: {3}, lambda y, x: y, r"returns a set"),
        (lambda x: x, lambda y, x: y.relu_(), r"stage 1, 1 \(Takes\), overwrites its input"),
    ],
)
def test_invalid_values_between_stages_are_rejected(passes, takes, message):
    bench = Passes(wrap([PassesOn(passes), Takes(takes)], squares))
    ones = [np.ones((samples, 5), np.float32) for samples in (4, 3)]
    with pytest.raises(UsageError, match=message):
        bench.step(zip(ones, ones, strict=True), 1.0, DRAW)


class Mixed(nn.Module):
    """Computes in bfloat16 under autocast, which it turns on itself if ``inside`` is True."""

    def __init__(self, *, inside):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3))
        self.inside = inside

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            return self.body(x)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_has_the_bits_of_pytorch(inside, rng):
    """Also if one autocast spans a change of the parameters, and around the backward pass."""
    torch.manual_seed(0)
    module = Mixed(inside=inside)
    twin = copy.deepcopy(module)
    x, y = rng.standard_normal((8, 5)).astype(np.float32), rng.integers(0, 3, 8)
    bench = Passes(wrap(module, functional.cross_entropy))
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        for _ in range(2):
            loss = bench.step([(x, y)], 1 / 8, DRAW) / 8
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside, cache_enabled=False):
                outputs = twin(torch.from_numpy(x))
                assert outputs.dtype == torch.bfloat16
                expected = functional.cross_entropy(outputs.float() if inside else outputs, torch.from_numpy(y))
            with torch.autocast("cpu", enabled=False):
                expected.backward()
            assert loss == expected.item()
            assert bench.model.evaluate(bench.parameters, x, y, bench.arena) / 8 == loss
            for name, parameter in twin.named_parameters():
                np.testing.assert_array_equal(bench.gradient.view(f"0.{name}"), parameter.grad.numpy())
                bench.store.view(f"0.{name}")[...] += 1
                parameter.data += 1
            twin.zero_grad()


@pytest.mark.parametrize(
    "layout",
    [Layout(strategy="zero3"), Layout(strategy="zero1"), Layout(), Layout(pipeline=2, microbatches=2)],
    ids=["zero3", "zero1", "allreduce", "pipeline"],
)
@pytest.mark.full_except("zero3")
def test_autocast_of_several_stages_is_close_to_pytorch(layout, rng):
    batches = [tokens(rng, 12) for _ in range(4)]
    models = [torch_models.wrap_model(whole(3), batches[0][0], cut=True) for _ in range(2)]
    twins = [whole(3) for _ in range(2)]

    def body(comm):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as PyTorch needs it around an update
            compare(Training(comm, models[comm.rank], layout), lambda: twins[comm.rank], batches, 2e-2)

    run_threads(2, body)


class Net(nn.Module):
    """Equal blocks, whose shared code PyTorch compiles once."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Residual() for _ in range(10)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.body(x)


def compiled_cut(net):
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


@pytest.mark.parametrize(
    ("compiled", "cut"),
    [
        (compiled_cut, True),
        pytest.param(lambda net: torch.compile(net, backend="aot_eager"), False, marks=pytest.mark.full),
    ],
)
def test_compiled_modules_match_pytorch_and_are_compiled_once(compiled, cut, rng):
    """Once for training and once for evaluation, while steps write and move the parameters."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    x, y = rng.standard_normal((8, 5)).astype(np.float32), rng.integers(0, 3, 8)
    module = compiled(net)
    bench = Passes(wrap(module, functional.cross_entropy, example=x, cut=cut))
    assert {s.key.partition(".")[2] for s in bench.model.layout.segments} == dict(twin.named_parameters()).keys()
    assert len(bench.model.stages) == (12 if cut else 1)
    for number in range(3):
        bench.begin_step()
        loss = bench.loss(bench.forward(x, Draw(0, number, 0)), y)
        moved = FlatStore(bench.model.layout, bench.model.dtype)
        moved.copy_from(bench.store)
        bench.store.array[...] = np.nan
        bench.store, bench.parameters = moved, bench.model.bind(moved)
        bench.backward(1 / 8)
        expected = functional.cross_entropy(twin(torch.from_numpy(x)), torch.from_numpy(y))
        expected.backward()
        assert loss / 8 == pytest.approx(expected.item(), rel=1e-6)
        assert bench.model.evaluate(bench.parameters, x, y, bench.arena) == pytest.approx(loss, rel=1e-6)
        named = dict(twin.named_parameters())
        for segment in bench.model.layout.segments:
            theirs = named[segment.key.partition(".")[2]]
            np.testing.assert_allclose(bench.gradient.view(segment.key), theirs.grad.numpy(), rtol=1e-4, atol=1e-6)
            bench.store.view(segment.key)[...] -= 0.1 * theirs.grad.numpy()
            theirs.data -= 0.1 * theirs.grad
        twin.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    load(module, {segment.key: bench.store.view(segment.key) for segment in bench.model.layout.segments})
    np.testing.assert_array_equal(net.first.bias.detach().numpy(), bench.store.view("0.first.bias"))
