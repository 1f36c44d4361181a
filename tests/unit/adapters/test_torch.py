"""A wrapped PyTorch module: its values, gradients, memory and random numbers equal the plain module's."""

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
    """A wrapped model, with stores for all of its parameters and gradients."""

    def step(self, x, y, microbatches=1, draw=None):
        """Return the mean loss. The gradients are in ``gradient``."""
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


def draw_seed(rng):
    return int(rng.integers(1 << 31))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("build", [perceptron, convnet])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("draw", [None, Draw(3, 1, 0)], ids=["evaluating", "training"])
def test_gradients_match_autograd(build, dtype, bound, microbatches, draw, rng):
    """A backward after an evaluation works too: it runs the forward again to record a graph."""
    seed, wide = draw_seed(rng), getattr(torch, dtype)
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
def test_language_model_with_tied_table_matches_autograd(tied, rng):
    seed = draw_seed(rng)
    module, twin = torch_models.gpt(seed, tied=tied), torch_models.gpt(seed, tied=tied)
    x, y = torch_models.tokens(rng, 4)
    model = torch_models.wrap_model(module, x)
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


def test_initial_values_come_from_the_module(rng):
    module = perceptron(draw_seed(rng))
    before = {name: parameter.detach().clone().numpy() for name, parameter in module.named_parameters()}
    model = wrap(module, functional.cross_entropy)
    store = FlatStore(model.layout, model.dtype)
    model.initialise(store, 0)
    for name, values in before.items():
        layer = {"0": 0, "2": 1, "4": 2}[name[0]]
        np.testing.assert_array_equal(store.view(f"{layer}.{name}"), values)
    shrunk = [(segment.spec.name, segment.spec.adapted) for segment in model.layout.segments]
    assert shrunk == [(name, name.endswith("weight")) for name in before]


def test_adapted_selects_tensors_with_weight_decay():
    model = wrap(perceptron(0), functional.cross_entropy, adapted=lambda name, parameter: name == "2.bias")
    assert [segment.spec.name for segment in model.layout.segments if segment.spec.adapted] == ["2.bias"]


def test_module_parameters_and_gradients_are_views_of_the_stores(rng):
    """Parameters and gradients keep their memory before and after `zero_grad`, in every micro-batch."""
    module = perceptron(draw_seed(rng))
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


def test_activations_pass_between_stages_without_copy(rng):
    module = perceptron(draw_seed(rng))
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
def test_parameters_may_move_between_forward_and_backward(tied, rng):
    """Between forward and backward, the parameters' memory is overwritten and the parameters move to other memory."""
    module = torch_models.gpt(draw_seed(rng), tied=tied)
    x, y = torch_models.tokens(rng, 3)
    bench = Bench(torch_models.wrap_model(module, x))
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


def test_module_with_replaced_parameters_is_bound_again(rng):
    """For example after the user has loaded other values into the module."""
    module = perceptron(draw_seed(rng))
    bench = Bench(wrap(module, functional.cross_entropy))
    x, y = points(rng, 4)
    loss = bench.step(x, y, 1, Draw(0, 1, 0))
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert bench.step(x, y, 1, Draw(0, 1, 0)) == loss


def test_inplace_change_of_saved_tensor_is_rejected(rng):
    """If a module changes a saved tensor in place, the backward fails and does not give a wrong gradient."""

    class Careless(nn.Linear):
        def forward(self, x):
            z = torch.exp(super().forward(x))
            z.add_(1)
            return z

    bench = Bench(wrap([Careless(5, 3)], functional.cross_entropy))
    x, y = points(rng, 4)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*Careless"):
        bench.step(x, y, 1, Draw(0, 1, 0))


def test_forward_without_backward_keeps_no_tensors(rng):
    """Reference cycles through an autograd graph would stay: Python's garbage collector does not see them."""
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


def dropout_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))


def test_dropout_depends_on_seed_step_and_sample(rng):
    model = wrap(dropout_module(draw_seed(rng)), functional.mse_loss)
    bench = Bench(model)
    x = np.ones((3, 5), np.float32)

    def outputs(*draw):
        y = bench.forward(x, Draw(*draw)).copy()
        for stage in model.stages:
            bench.arena.saved(stage.layer).release()
        return y == 0

    first = outputs(7, 2, 0)
    torch.rand(5)  # other users of the global generator change nothing
    np.testing.assert_array_equal(outputs(7, 2, 0), first)
    for other in ((8, 2, 0), (7, 3, 0), (7, 2, 3)):
        assert (outputs(*other) != first).any(), other
    assert 0.3 < first.mean() < 0.7


def test_layers_have_different_dropout_masks():
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
    assert bool((seen[0] & ~seen[1]).any()), "the second layer keeps every element that the first has kept"


def test_forward_does_not_change_the_global_generator(rng):
    bench = Bench(wrap(dropout_module(0), functional.mse_loss))
    before = torch.get_rng_state()
    bench.forward(np.ones((3, 5), np.float32), Draw(0, 1, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_off_in_evaluation(rng):
    module = dropout_module(draw_seed(rng))
    bench = Bench(wrap(module, functional.mse_loss))
    x, y = points(rng, 6)[0], rng.standard_normal((6, 64)).astype(np.float32)
    bench.step(x, y, 1, Draw(0, 1, 0))
    assert all(child.training for child in module)
    result = bench.model.evaluate(bench.parameters, x, y, bench.arena)
    assert not any(child.training for child in module)
    module.eval()
    expected = functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert result / 6 == pytest.approx(expected, rel=1e-6)
    bench.step(x, y, 1, Draw(0, 2, 0))
    assert all(child.training for child in module)


def test_nested_module_keeps_the_training_mode_of_the_user(rng):
    """Neither an example, an evaluation nor a later `train` changes the mode. An overridden `train` is called."""

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

    def training_modes():
        return [modules[0].training, modules[0].drop.training, shared.training, modules[2].drop.training]

    bench = Bench(wrap(modules, functional.cross_entropy, example=x))
    assert training_modes() == [True, False, True, True] and modules[0].told == [False, True]
    for number in (1, 2):
        bench.step(x, y, 1, Draw(0, number, 0))
        assert training_modes() == [True, False, True, True]
        bench.model.evaluate(bench.parameters, x, y, bench.arena)
        assert training_modes() == [False] * 4
    modules[0].train()
    bench.step(x, y, 1, Draw(0, 3, 0))
    assert training_modes() == [True, False, True, True]


def test_model_in_evaluation_mode_is_switched_to_training(rng):
    module = dropout_module(0).eval()
    x = points(rng, 6)[0]
    bench = Bench(wrap(module, functional.mse_loss, example=x))
    assert not any(child.training for child in module)
    bench.step(x, rng.standard_normal((6, 64)).astype(np.float32), 1, Draw(0, 1, 0))
    assert all(child.training for child in module)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int32, np.int64])
def test_tokens_may_have_any_integer_type(dtype, rng):
    module = torch_models.gpt(draw_seed(rng))
    x, y = torch_models.tokens(rng, 3)
    bench = Bench(torch_models.wrap_model(module, x))
    expected = bench.model.evaluate(bench.parameters, x, y, bench.arena)
    inputs = x.astype(dtype)
    inputs.flags.writeable = False  # like an array of a memory-mapped file
    assert bench.model.evaluate(bench.parameters, inputs, y.astype(dtype), bench.arena) == expected


def test_float_inputs_are_cast_to_the_parameter_type(rng):
    bench = Bench(wrap(perceptron(0), functional.cross_entropy))
    x, y = points(rng, 3, np.float64)
    x32 = x.astype(np.float32)
    result = bench.model.evaluate(bench.parameters, x, y, bench.arena)
    assert result == bench.model.evaluate(bench.parameters, x32, y, bench.arena)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_mean_and_sum_reductions_give_the_mean_loss(reduction, rng):
    """Both reductions give the mean over all predictions of a step, for any micro-batches."""
    seed = draw_seed(rng)
    x, y = torch_models.tokens(rng, 5)

    def loss(logits, targets):
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)

    model = wrap(torch_models.gpt(seed), loss, reduction=reduction, tokens_per_sample=torch_models.CONTEXT)
    result = Bench(model).step(x, y, 3, Draw(0, 1, 0))  # 2, 2 and 1 samples
    logits = torch_models.gpt(seed)(torch.from_numpy(x.astype(np.int64)))
    expected = torch_models.token_loss(logits, torch.from_numpy(y.astype(np.int64)))
    assert result == pytest.approx(expected.item(), rel=1e-6)


def test_nonfinite_input_gives_nonfinite_loss_and_gradient(rng):
    bench = Bench(wrap([nn.Linear(5, 8), nn.Linear(8, 3)], functional.cross_entropy))
    x, y = points(rng, 4)
    for bad in (np.nan, np.inf):
        x[1, 2] = bad
        assert not np.isfinite(bench.forward(x, Draw(0, 1, 0))[1]).any()
        for stage in bench.model.stages:
            bench.arena.saved(stage.layer).release()
        assert not np.isfinite(bench.step(x, y, 1, Draw(0, 1, 0)))
        assert not np.isfinite(bench.gradient.array).all()


def test_example_gives_shapes_between_stages(rng):
    x, _ = torch_models.tokens(rng, 2)
    model = torch_models.wrap_model(torch_models.gpt(0), x)
    context, hidden = torch_models.CONTEXT, torch_models.HIDDEN
    shapes = [stage.output_shape(5) for stage in model.stages]
    assert shapes == [(5, context, hidden)] * 3 + [(5, context, torch_models.VOCABULARY)]


def test_modules_without_tensors_join_the_previous_stage():
    module = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model = wrap(module, functional.cross_entropy)
    assert [stage.name for stage in model.stages] == [
        "0 (Unflatten) + 1 (Flatten) + 2 (Linear) + 3 (ReLU)",
        "4 (Linear)",
    ]


def test_single_module_is_one_stage_and_list_is_several(rng):
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
def test_modules_of_one_stage_keep_distinct_names(gather, rng):
    """The head shares the table and has no tensor of its own, so it joins the stage of the norm."""
    torch.manual_seed(draw_seed(rng))
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


def test_reused_module_runs_twice(rng):
    torch.manual_seed(draw_seed(rng))
    square, double = nn.Linear(5, 5), nn.Softplus()
    module = nn.Sequential(square, double, nn.Linear(5, 5), double, square, nn.Linear(5, 3))
    twin = copy.deepcopy(module)
    model = wrap(module, functional.cross_entropy)
    x, y = points(rng, 4)
    expected = functional.cross_entropy(twin(torch.from_numpy(x)), torch.from_numpy(y)).item()
    assert Bench(model).step(x, y, 1, Draw(0, 1, 0)) == pytest.approx(expected, rel=1e-6)


def test_forward_flops_are_counted(rng):
    """Two operations per weight and token, plus the operations of attention. Without an example the count is None."""
    x, _ = torch_models.tokens(rng, 3)
    model = torch_models.wrap_model(torch_models.gpt(0), x)
    tokens, hidden = torch_models.CONTEXT, torch_models.HIDDEN
    block = 2 * tokens * 12 * hidden * hidden + 4 * tokens * tokens * hidden
    head = 2 * tokens * hidden * torch_models.VOCABULARY
    assert [stage.forward_flops for stage in model.stages] == [0, block, block, head]
    assert [stage.forward_flops for stage in wrap(torch_models.gpt(0), torch_models.token_loss).stages] == [None] * 4


def test_example_input_has_any_number_of_samples(rng):
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
from hpcdist.models.arena import Arena
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
def test_steps_reuse_memory_without_page_faults():
    """After the first steps, activations cause no new page faults."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = jobs.run([sys.executable, "-c", FAULTS], env=kept)
    assert done.returncode == 0, done.stderr
    faults = [int(word) for word in done.stdout.split()]
    assert faults[0] > 20_000, "the activations are too small for this test"
    assert sorted(faults[3:])[2] < 500, faults


class Masked(nn.Module):
    """Sums of the embeddings of the tokens that a mask selects."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5)

    def forward(self, tokens, mask, scale=None):
        result = self.table(tokens) * mask.unsqueeze(-1)
        return (result if scale is None else result * scale[:, None, None]).sum(dim=1)


def masked_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(Masked(), nn.Linear(5, 3))


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_several_inputs_and_targets(kind, rng):
    """All inputs are arguments of the first module, cut into micro-batches together. The loss gets all targets."""
    seed = draw_seed(rng)
    arrays = {"tokens": rng.integers(0, 11, (6, 4)), "mask": rng.random((6, 4)) < 0.7, "scale": rng.random(6)}
    y = {"classes": rng.integers(0, 3, 6), "weights": rng.random(6).astype(np.float32)}
    given = (arrays, y) if kind == "dict" else (tuple(arrays.values()), tuple(y.values()))

    def loss(outputs, targets):
        classes, weights = targets.values() if kind == "dict" else targets
        return (functional.cross_entropy(outputs, classes, reduction="none") * weights).mean()

    model = wrap(masked_module(seed), loss, example=given)
    assert model.stages[0].output_shape(7) == (7, 5)
    assert len(model.stages[0].example_input(9)) == len(model.loss.example_targets(9)) == 9
    bench = Bench(model)
    x, targets = map(backend.as_array, given)
    result = bench.step(x, targets, 3, Draw(0, 1, 0))
    twin = masked_module(seed)
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    expected = loss(
        twin[1](twin[0](**tensors | {"scale": tensors["scale"].float()})),
        {name: torch.from_numpy(values) for name, values in y.items()}
        if kind == "dict"
        else tuple(map(torch.from_numpy, y.values())),
    )
    expected.backward()
    assert result == pytest.approx(expected.item(), rel=1e-5)
    for segment in model.layout.segments:
        theirs = dict(twin.named_parameters())[segment.spec.name].grad.numpy()
        np.testing.assert_allclose(bench.gradient.view(segment.key), theirs, atol=1e-6)


def test_inputs_of_the_wrong_signature_are_rejected(rng):
    bench = Bench(wrap(masked_module(0), functional.cross_entropy))
    tokens, mask = rng.integers(0, 11, (6, 4)), np.ones((6, 4), np.float32)
    with pytest.raises(UsageError, match=r"0 \(Masked\) cannot be called with inputs by name, tokens, maske: "):
        bench.forward(backend.as_array({"tokens": tokens, "maske": mask}))
    with pytest.raises(UsageError, match=r"0 \(Masked\) cannot be called with 4 input\(s\): too many"):
        bench.forward(backend.as_array((tokens, mask, mask[:, 0], mask)))
    with pytest.raises(UsageError, match=r"cannot be called with 1 input\(s\): missing a required argument: 'mask'"):
        bench.forward(tokens)


def test_type_error_inside_a_module_is_passed_on():
    class Careless(nn.Linear):
        def forward(self, x):
            return super().forward(x + "1")

    with pytest.raises(TypeError, match="unsupported operand"):
        Bench(wrap([Careless(5, 3)], functional.cross_entropy)).forward(np.ones((2, 5), np.float32))
