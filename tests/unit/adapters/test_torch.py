"""A wrapped PyTorch module is the module: its values, its gradients, its memory, its randomness."""

import copy
import gc
import os
import sys
import weakref

import numpy as np
import pytest

from harness import jobs

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from harness.models import pytorch as torch_models
from harness.models.passes import Passes
from hpcdist.adapters.torch.model import load, wrap
from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import UsageError
from hpcdist.models.stage import Draw
from hpcdist.training.data import microbatches as microbatches_of


class Bench(Passes):
    """A wrapped model, with stores that hold all of it."""

    def step(self, x, y, microbatches=1, draw=None):
        """Return the mean loss; its gradients are in ``gradient``."""
        scale = 1 / (len(x) * self.model.tokens_per_sample)
        return scale * super().step(microbatches_of((x, y), microbatches), scale, draw)


def perceptron(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 3)).to(dtype)


def convnet(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Conv1d(1, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(30, 3),
    ).to(dtype)


def points(rng, samples, dtype=np.float32):
    return rng.standard_normal((samples, 5)).astype(dtype), rng.integers(0, 3, samples)


def seed_of(rng):
    return int(rng.integers(1 << 31))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("build", [perceptron, convnet])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("draw", [None, Draw(3, 1, 0)], ids=["evaluating", "training"])
def test_gradients_are_those_of_autograd(build, dtype, bound, microbatches, draw, rng):
    """Also where an evaluation is followed by a backward, which then records what the forward did not."""
    seed, wide = seed_of(rng), getattr(torch, dtype)
    module, twin = build(seed, wide), build(seed, wide)
    x, y = points(rng, 9, dtype)
    bench = Bench(wrap(module, functional.cross_entropy))
    loss = bench.step(x, y, microbatches, draw)
    expected = functional.cross_entropy(twin(torch.from_numpy(x)), torch.from_numpy(y))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=bound)
    whole = np.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in twin.parameters()))
    for (name, parameter), segment in zip(twin.named_parameters(), bench.model.layout.segments, strict=True):
        assert segment.key.split(".", 1)[1] == name
        difference = np.linalg.norm(
            bench.gradient.view(segment.key).astype(np.float64) - parameter.grad.double().numpy()
        )
        assert difference <= bound * whole, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.full_except("True")
def test_a_language_model_with_a_shared_table(tied, rng):
    seed = seed_of(rng)
    module, twin = torch_models.gpt(seed, tied=tied), torch_models.gpt(seed, tied=tied)
    x, y = torch_models.tokens(rng, 4)
    model = torch_models.wrapped(module, x)
    assert model.stages[3].tied == ({"3.logits.weight": "0.0.tokens.weight"} if tied else {})
    bench = Bench(model)
    loss = bench.step(x, y, 2, Draw(0, 1, 0))
    inputs, targets = torch.from_numpy(x.astype(np.int64)), torch.from_numpy(y.astype(np.int64))
    expected = torch_models.token_loss(twin(inputs), targets)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    named = dict(twin.named_parameters())
    assert [segment.key.split(".", 1)[1] for segment in model.layout.segments] == list(named)
    for segment in model.layout.segments:
        theirs = named[segment.key.split(".", 1)[1]].grad.numpy()
        np.testing.assert_allclose(bench.gradient.view(segment.key), theirs, atol=1e-6)


def test_initial_values_are_those_of_the_module(rng):
    module = perceptron(seed_of(rng))
    before = {name: parameter.detach().clone().numpy() for name, parameter in module.named_parameters()}
    model = wrap(module, functional.cross_entropy)
    store = FlatStore(model.layout, model.dtype)
    model.initialise(store, 0)
    for name, values in before.items():
        layer = {"0": 0, "2": 1, "4": 2}[name[0]]
        np.testing.assert_array_equal(store.view(f"{layer}.{name}"), values)
    shrunk = [(segment.spec.name, segment.spec.adapted) for segment in model.layout.segments]
    assert shrunk == [(name, name.endswith("weight")) for name in before]


def test_which_tensors_decay_can_be_chosen():
    model = wrap(perceptron(0), functional.cross_entropy, adapted=lambda name, parameter: name == "2.bias")
    assert [segment.spec.name for segment in model.layout.segments if segment.spec.adapted] == ["2.bias"]


def test_parameters_and_gradients_are_views(rng):
    """The same bytes, before and after `zero_grad`, in the first and in later micro-batches."""
    module = perceptron(seed_of(rng))
    bench = Bench(wrap(module, functional.cross_entropy))
    x, y = points(rng, 6)
    for _ in range(2):
        bench.step(x, y, 2, Draw(0, 1, 0))
        for parameter, segment in zip(module.parameters(), bench.model.layout.segments, strict=True):
            assert parameter.data_ptr() == bench.store.view(segment.key).ctypes.data, segment.key
            assert parameter.grad.data_ptr() == bench.gradient.view(segment.key).ctypes.data, segment.key
        module.zero_grad(set_to_none=True)
    bench.store.array[...] = 0.5
    assert all(bool((parameter == 0.5).all()) for parameter in module.parameters())


def test_activations_go_from_stage_to_stage_without_a_copy(rng):
    module = perceptron(seed_of(rng))
    seen = []
    for layer in (0, 2, 4):
        module[layer].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].data_ptr()))
    for layer in (1, 3, 4):
        module[layer].register_forward_hook(lambda _, inputs, output: seen.append(output.data_ptr()))
    bench = Bench(wrap(module, functional.cross_entropy))
    x, _ = points(rng, 6)
    logits = bench.forward(x, Draw(0, 1, 0))
    assert seen[0] == x.ctypes.data
    assert seen[1] == seen[2]
    assert seen[3] == seen[4]
    assert seen[5] == logits.ctypes.data


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_come_and_go(tied, rng):
    """Between forward and backward their memory holds something else, and they lie elsewhere."""
    module = torch_models.gpt(seed_of(rng), tied=tied)
    x, y = torch_models.tokens(rng, 3)
    bench = Bench(torch_models.wrapped(module, x))
    bench.step(x, y, 1, Draw(0, 1, 0))
    expected = bench.gradient.array.copy()
    bench.begin_step()
    bench.loss(bench.forward(x, Draw(0, 1, 0)), y)
    elsewhere = FlatStore(bench.model.layout, bench.model.dtype)
    elsewhere.copy_from(bench.store)
    bench.store.array[...] = np.nan
    bench.parameters = bench.model.bind(elsewhere)
    bench.backward(1 / y.size)
    np.testing.assert_array_equal(bench.gradient.array, expected)
    del module, bench.store
    gc.collect()


def test_a_module_that_was_moved_is_bound_again(rng):
    """As when the user has loaded other values into it."""
    module = perceptron(seed_of(rng))
    bench = Bench(wrap(module, functional.cross_entropy))
    x, y = points(rng, 4)
    loss = bench.step(x, y, 1, Draw(0, 1, 0))
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert bench.step(x, y, 1, Draw(0, 1, 0)) == loss


def test_what_is_written_over_is_noticed(rng):
    """A graph that saved a tensor, and a module that changes it later, must not give a wrong gradient."""

    class Careless(nn.Linear):
        def forward(self, x):
            z = torch.exp(super().forward(x))
            z.add_(1)
            return z

    bench = Bench(wrap([Careless(5, 3)], functional.cross_entropy))
    x, y = points(rng, 4)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*Careless"):
        bench.step(x, y, 1, Draw(0, 1, 0))


def test_a_forward_without_a_backward_leaves_nothing(rng):
    """Reference cycles through a graph would stay: Python's collector does not see them."""
    kept = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = torch.tanh(super().forward(x))
            kept.append(weakref.ref(y))
            return y * y

    bench = Bench(wrap([Watched(5, 4), Watched(4, 3)], functional.cross_entropy))
    x, _ = points(rng, 4)
    for _ in range(2):
        bench.forward(x, Draw(0, 1, 0))
        for layer in (0, 1):
            bench.arena.saved(layer).release()
    gc.collect()
    assert len(kept) == 4
    assert [reference() for reference in kept] == [None] * 4


def dropping(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))


def test_what_is_dropped_follows_from_seed_step_and_sample(rng):
    model = wrap(dropping(seed_of(rng)), functional.mse_loss)
    bench = Bench(model)
    x = np.ones((3, 5), np.float32)

    def outputs(*draw):
        y = bench.forward(x, Draw(*draw)).copy()
        for stage in model.stages:
            bench.arena.saved(stage.layer).release()
        return y == 0

    first = outputs(7, 2, 0)
    torch.rand(5)  # what others draw changes nothing
    np.testing.assert_array_equal(outputs(7, 2, 0), first)
    for other in ((8, 2, 0), (7, 3, 0), (7, 2, 3)):
        assert (outputs(*other) != first).any(), other
    assert 0.3 < first.mean() < 0.7


def test_layers_drop_differently():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    with torch.no_grad():
        for layer in (0, 2):
            module[layer].weight.copy_(torch.eye(64))
            module[layer].bias.fill_(1.0)
    seen = []
    for layer in (1, 3):
        module[layer].register_forward_hook(lambda _, inputs, output: seen.append(output != 0))
    Bench(wrap(module, functional.mse_loss)).forward(np.ones((2, 64), np.float32), Draw(0, 1, 0))
    assert bool((seen[0] & ~seen[1]).any()), "the second layer keeps all that the first has kept"


def test_the_generator_of_the_user_is_left_alone(rng):
    bench = Bench(wrap(dropping(0), functional.mse_loss))
    before = torch.get_rng_state()
    bench.forward(np.ones((3, 5), np.float32), Draw(0, 1, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropping_is_off_in_an_evaluation(rng):
    module = dropping(seed_of(rng))
    bench = Bench(wrap(module, functional.mse_loss))
    x, y = points(rng, 6)[0], rng.standard_normal((6, 64)).astype(np.float32)
    bench.step(x, y, 1, Draw(0, 1, 0))
    assert all(child.training for child in module)
    found = bench.model.evaluate(bench.parameters, x, y, bench.arena)
    assert not any(child.training for child in module)
    module.eval()
    expected = functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert found / 6 == pytest.approx(expected, rel=1e-6)
    bench.step(x, y, 1, Draw(0, 2, 0))
    assert all(child.training for child in module)


def test_a_nested_module_stays_in_the_mode_that_the_user_chose(rng):
    """Whatever an example, an evaluation or a later `train` did; a `train` of the user's own is called."""

    class Block(nn.Module):
        def __init__(self, frozen):
            super().__init__()
            self.inner, self.drop = nn.Linear(5, 5), nn.Dropout(0.5)
            self.drop.train(not frozen)
            self.told = []

        def train(self, mode=True):
            self.told.append(mode)
            return super().train(mode)

        def forward(self, x):
            return self.drop(self.inner(x))

    shared = nn.Dropout(0.5)
    modules = [Block(frozen=True), shared, Block(frozen=False), shared, nn.Linear(5, 3)]
    x, y = points(rng, 6)

    def modes():
        return [modules[0].training, modules[0].drop.training, shared.training, modules[2].drop.training]

    bench = Bench(wrap(modules, functional.cross_entropy, example=x))
    assert modes() == [True, False, True, True] and modules[0].told == [False, True]
    for number in (1, 2):
        bench.step(x, y, 1, Draw(0, number, 0))
        assert modes() == [True, False, True, True]
        bench.model.evaluate(bench.parameters, x, y, bench.arena)
        assert modes() == [False] * 4
    modules[0].train()
    bench.step(x, y, 1, Draw(0, 3, 0))
    assert modes() == [True, False, True, True]


def test_a_model_in_evaluation_mode_is_trained(rng):
    module = dropping(0).eval()
    x = points(rng, 6)[0]
    bench = Bench(wrap(module, functional.mse_loss, example=x))
    assert not any(child.training for child in module)
    bench.step(x, rng.standard_normal((6, 64)).astype(np.float32), 1, Draw(0, 1, 0))
    assert all(child.training for child in module)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int32, np.int64])
def test_integers_of_any_type_are_tokens(dtype, rng):
    module = torch_models.gpt(seed_of(rng))
    x, y = torch_models.tokens(rng, 3)
    bench = Bench(torch_models.wrapped(module, x))
    expected = bench.model.evaluate(bench.parameters, x, y, bench.arena)
    inputs = x.astype(dtype)
    inputs.flags.writeable = False  # as a file that is mapped
    assert bench.model.evaluate(bench.parameters, inputs, y.astype(dtype), bench.arena) == expected


def test_real_inputs_take_the_type_of_the_parameters(rng):
    bench = Bench(wrap(perceptron(0), functional.cross_entropy))
    x, y = points(rng, 3, np.float64)
    x32 = x.astype(np.float32)
    found = bench.model.evaluate(bench.parameters, x, y, bench.arena)
    assert found == bench.model.evaluate(bench.parameters, x32, y, bench.arena)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions(reduction, rng):
    """Both are the mean over all predictions of a step, however it is cut."""
    seed = seed_of(rng)
    x, y = torch_models.tokens(rng, 5)

    def loss(logits, targets):
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

    model = wrap(torch_models.gpt(seed), loss, reduction=reduction, tokens_per_sample=torch_models.CONTEXT)
    found = Bench(model).step(x, y, 3, Draw(0, 1, 0))  # 2, 2 and 1 samples
    logits = torch_models.gpt(seed)(torch.from_numpy(x.astype(np.int64)))
    expected = torch_models.token_loss(logits, torch.from_numpy(y.astype(np.int64)))
    assert found == pytest.approx(expected.item(), rel=1e-6)


def test_nan_and_infinity_stay_visible(rng):
    bench = Bench(wrap([nn.Linear(5, 8), nn.Linear(8, 3)], functional.cross_entropy))
    x, y = points(rng, 4)
    for bad in (np.nan, np.inf):
        x[1, 2] = bad
        assert not np.isfinite(bench.forward(x, Draw(0, 1, 0))[1]).any()
        for stage in bench.model.stages:
            bench.arena.saved(stage.layer).release()
        assert not np.isfinite(bench.step(x, y, 1, Draw(0, 1, 0)))
        assert not np.isfinite(bench.gradient.array).all()


def test_shapes_between_stages_are_known_from_an_example(rng):
    x, _ = torch_models.tokens(rng, 2)
    model = torch_models.wrapped(torch_models.gpt(0), x)
    context, hidden = torch_models.CONTEXT, torch_models.HIDDEN
    shapes = [stage.output_shape(5) for stage in model.stages]
    assert shapes == [(5, context, hidden)] * 3 + [(5, context, torch_models.VOCABULARY)]


def test_modules_without_tensors_belong_to_the_stage_before():
    module = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model = wrap(module, functional.cross_entropy)
    assert [stage.name for stage in model.stages] == [
        "0 (Unflatten) + 1 (Flatten) + 2 (Linear) + 3 (ReLU)",
        "4 (Linear)",
    ]


def test_a_module_alone_is_one_stage_and_a_list_several(rng):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = perceptron(3)

        def forward(self, x):
            return self.inner(x)

    x, y = points(rng, 4)
    benches = [Bench(wrap(made, functional.cross_entropy)) for made in (Whole(), perceptron(3), list(perceptron(3)))]
    keys = [[segment.key for segment in bench.model.layout.segments] for bench in benches]
    assert keys[0] == [f"0.inner.{name}" for name, _ in perceptron(3).named_parameters()]
    assert keys[2] == keys[1] == ["0.0.weight", "0.0.bias", "1.2.weight", "1.2.bias", "2.4.weight", "2.4.bias"]
    losses = [bench.step(x, y, 1, Draw(0, 1, 0)) for bench in benches]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("gather", [list, nn.ModuleList, lambda modules: nn.Sequential(*modules)])
def test_modules_of_one_stage_have_names_of_their_own(gather, rng):
    """A head that shares the table brings no tensor along, so it goes with the norm, whose weight is another."""
    torch.manual_seed(seed_of(rng))
    embedding, norm, head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    modules = [embedding, nn.Sequential(nn.Linear(4, 4), nn.GELU()), norm, head]
    twin = copy.deepcopy(nn.Sequential(*modules))
    given = gather(modules)
    model = wrap(given, functional.cross_entropy)
    keys = [segment.key for segment in model.layout.segments]
    assert keys == ["0.0.weight", "1.1.0.weight", "1.1.0.bias", "2.2.weight", "2.2.bias"]
    assert model.stages[2].tied == {"3.weight": "0.0.weight"}
    x, y = rng.integers(0, 7, 6), rng.integers(0, 7, 6)
    bench = Bench(model)
    loss = bench.step(x, y, 2, Draw(0, 1, 0))
    expected = functional.cross_entropy(twin(torch.from_numpy(x)), torch.from_numpy(y))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for key, parameter in zip(keys, twin.parameters(), strict=True):
        np.testing.assert_allclose(bench.gradient.view(key), parameter.grad.numpy(), rtol=1e-5, atol=1e-6)
    trained = {key: rng.standard_normal(bench.store.view(key).shape).astype(np.float32) for key in keys}
    load(given, trained)
    for key, parameter in zip(keys, (p for m in modules for p in m.parameters() if m is not head), strict=True):
        np.testing.assert_array_equal(parameter.detach().numpy(), trained[key])
    assert head.weight is embedding.weight


def test_a_module_that_is_used_twice_runs_twice(rng):
    torch.manual_seed(seed_of(rng))
    square, double = nn.Linear(5, 5), nn.Softplus()
    module = nn.Sequential(square, double, nn.Linear(5, 5), double, square, nn.Linear(5, 3))
    twin = copy.deepcopy(module)
    model = wrap(module, functional.cross_entropy)
    x, y = points(rng, 4)
    expected = functional.cross_entropy(twin(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert Bench(model).step(x, y, 1, Draw(0, 1, 0)) == pytest.approx(expected, rel=1e-6)


def test_products_of_a_forward_are_counted(rng):
    """Two operations for each weight and token, and those of attention; none without an example."""
    x, _ = torch_models.tokens(rng, 3)
    model = torch_models.wrapped(torch_models.gpt(0), x)
    tokens, hidden = torch_models.CONTEXT, torch_models.HIDDEN
    block = 2 * tokens * 12 * hidden * hidden + 4 * tokens * tokens * hidden
    head = 2 * tokens * hidden * torch_models.VOCABULARY
    assert [stage.forward_flops for stage in model.stages] == [0, block, block, head]
    assert [stage.forward_flops for stage in wrap(torch_models.gpt(0), torch_models.token_loss).stages] == [None] * 4


def test_the_example_is_an_input_of_any_size(rng):
    x, _ = points(rng, 2)
    model = wrap(perceptron(0), functional.cross_entropy, example=x)
    np.testing.assert_array_equal(model.stages[0].example_input(5), x[[0, 1, 0, 1, 0]])
    assert model.stages[1].example_input(3).shape == (3, 8)


FAULTS = """
import resource
import numpy as np, torch
from torch import nn
from hpcdist.adapters.torch import model as adapter
from hpcdist.arrays.store import FlatStore
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import Draw
torch.set_num_threads(1)
stages = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
model = adapter.wrap(stages, lambda outputs, targets: (outputs - targets).square().mean())
values, sums = FlatStore(model.layout, model.dtype), FlatStore(model.layout, model.dtype)
model.initialise(values, 0)
parameters, gradients, arena = model.bind(values), model.bind_gradients(sums), Arena()
x = np.ones((16384, 64), np.float32)  # 4 MiB, and 32 times as much in activations
found = []
for step in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for one in gradients:
        one.begin_step()
    logits = model.forward(parameters, x, arena, 0, Draw(0, step, 0))
    model.loss.forward(logits, x, model.operations, arena.saved(7))
    model.backward(parameters, gradients, 1e-6, arena)
    del logits
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are those of glibc's heap")
@pytest.mark.full
def test_a_step_works_in_the_memory_of_the_last_one():
    """No page of activations, thousands of them, is faulted in anew after the first steps."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = jobs.run([sys.executable, "-c", FAULTS], env=kept)
    assert done.returncode == 0, done.stderr
    faults = [int(word) for word in done.stdout.split()]
    assert faults[0] > 20_000, "the activations are smaller than this test thinks"
    assert sorted(faults[3:])[2] < 500, faults


class Masked(nn.Module):
    """Tokens and their mask to sums of embeddings."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5)

    def forward(self, tokens, mask, scale=None):
        found = self.table(tokens) * mask.unsqueeze(-1)
        return (found if scale is None else found * scale[:, None, None]).sum(dim=1)


def masked(seed):
    torch.manual_seed(seed)
    return nn.Sequential(Masked(), nn.Linear(5, 3))


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_several_inputs_and_targets(kind, rng):
    """All are arguments of the first module, cut into micro-batches together; targets come to the loss as they are."""
    seed = seed_of(rng)
    arrays = {"tokens": rng.integers(0, 11, (6, 4)), "mask": rng.random((6, 4)) < 0.7, "scale": rng.random(6)}
    y = {"classes": rng.integers(0, 3, 6), "weights": rng.random(6).astype(np.float32)}
    given = (arrays, y) if kind == "dict" else (tuple(arrays.values()), tuple(y.values()))

    def loss(outputs, targets):
        classes, weights = targets.values() if kind == "dict" else targets
        return (functional.cross_entropy(outputs, classes, reduction="none") * weights).mean()

    model = wrap(masked(seed), loss, example=given)
    assert model.stages[0].output_shape(7) == (7, 5)
    assert len(model.stages[0].example_input(9)) == len(model.loss.example_targets(9)) == 9
    bench = Bench(model)
    x, targets = map(backend.as_array, given)
    found = bench.step(x, targets, 3, Draw(0, 1, 0))
    twin = masked(seed)
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    expected = loss(
        twin[1](twin[0](**tensors | {"scale": tensors["scale"].float()})),
        {name: torch.from_numpy(values) for name, values in y.items()}
        if kind == "dict"
        else tuple(map(torch.from_numpy, y.values())),
    )
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    for segment in model.layout.segments:
        theirs = dict(twin.named_parameters())[segment.spec.name].grad.numpy()
        np.testing.assert_allclose(bench.gradient.view(segment.key), theirs, atol=1e-6)


def test_inputs_that_the_first_module_does_not_take(rng):
    bench = Bench(wrap(masked(0), functional.cross_entropy))
    tokens, mask = rng.integers(0, 11, (6, 4)), np.ones((6, 4), np.float32)
    with pytest.raises(UsageError, match=r"0 \(Masked\) cannot be called with inputs by name, tokens, maske: "):
        bench.forward(backend.as_array({"tokens": tokens, "maske": mask}))
    with pytest.raises(UsageError, match=r"0 \(Masked\) cannot be called with 4 input\(s\): too many"):
        bench.forward(backend.as_array((tokens, mask, mask[:, 0], mask)))
    with pytest.raises(UsageError, match=r"cannot be called with 1 input\(s\): missing a required argument: 'mask'"):
        bench.forward(tokens)


def test_a_type_error_of_a_module_itself_is_passed_on():
    class Careless(nn.Linear):
        def forward(self, x):
            return super().forward(x + "1")

    with pytest.raises(TypeError, match="unsupported operand"):
        Bench(wrap([Careless(5, 3)], functional.cross_entropy)).forward(np.ones((2, 5), np.float32))
