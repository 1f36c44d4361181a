"""Modules that cannot be trained are rejected before or in the first step, with an error that names the cause."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.nn import functional

from harness.models.passes import Passes
from hpcdist.adapters.torch import arrays
from hpcdist.adapters.torch.model import load, wrap
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError, MissingCapabilityError, UsageError
from hpcdist.models.arena import Arena
from hpcdist.models.stage import Draw
from hpcdist.training.script import Training


def linear_layers(*widths):
    return [nn.Linear(inputs, outputs) for inputs, outputs in zip(widths, widths[1:], strict=False)]


def assert_wrap_rejected(error, message, given, loss=functional.cross_entropy, **options):
    with pytest.raises(error, match=message):
        wrap(given, loss, **options)


def run_step(model, x):
    """Return the summed loss of a step of one micro-batch, without an update."""
    return Passes(model).step([(x, np.zeros(len(x), np.int64))], 1.0, Draw(0, 1, 0))


def assert_step_rejected(error, message, given, loss=functional.cross_entropy, samples=4):
    with pytest.raises(error, match=message):
        run_step(wrap(given, loss), np.ones((samples, 5), np.float32))


class Uses(nn.Linear):
    """A linear layer whose forward is ``function(self, x)``."""

    def __init__(self, function, inputs=5, outputs=3):
        super().__init__(inputs, outputs)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("given", [3, "module", [], lambda x: x, torch.ones(3)])
def test_model_of_another_type_is_rejected(given):
    assert_wrap_rejected(UsageError, "to wrap; pass a torch.nn.Module", given)


def test_function_among_the_stages_is_rejected():
    assert_wrap_rejected(UsageError, "got a function among the stages", [nn.Linear(5, 3), functional.relu])


def test_modules_without_parameters_are_rejected():
    assert_wrap_rejected(UsageError, "no parameter", nn.Sequential(nn.ReLU(), nn.Flatten()))


def test_modules_with_only_frozen_parameters_are_rejected():
    assert_wrap_rejected(UsageError, "no parameter of the modules requires", nn.Linear(5, 4).requires_grad_(False))


def test_parameters_of_two_types_are_rejected():
    module = nn.Sequential(*linear_layers(5, 4, 3))
    module[1].to(torch.float64)
    assert_wrap_rejected(
        ConfigurationError,
        r"1\.weight of .* is torch\.float64 on cpu, but parameter 0\.weight is torch\.float32",
        module,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_parameters_of_an_unsupported_type_are_rejected(dtype):
    assert_wrap_rejected(ConfigurationError, f"parameter 0.weight is {dtype}", nn.Sequential(nn.Linear(5, 3).to(dtype)))


def test_parameters_without_values_are_rejected():
    assert_wrap_rejected(UsageError, r"weight .* on the meta device", nn.Linear(5, 3, device="meta"))
    assert_wrap_rejected(UsageError, r"weight .* has no shape yet", nn.LazyLinear(3))


def test_parameters_with_overlapping_memory_are_rejected():
    first, second = linear_layers(4, 4, 4)
    second.weight = nn.Parameter(first.weight.detach()[1:].view(3, 4))
    message = r"parameters 0\.weight of 0 \(Linear\) and 1\.weight of 1 \(Linear\) share memory"
    assert_wrap_rejected(UsageError, message, nn.Sequential(first, second))


def test_expanded_parameter_is_rejected():
    module = nn.Linear(5, 3)
    module.bias = nn.Parameter(torch.zeros(1).expand(3))
    assert_wrap_rejected(UsageError, r"parameter bias .* expanded", module)


def test_batch_norm_without_running_statistics_works():
    first, second = linear_layers(5, 4, 3)
    module = nn.Sequential(first, nn.BatchNorm1d(4, track_running_stats=False), second)
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    expected = functional.cross_entropy(module(torch.tensor(x)), torch.zeros(4, dtype=torch.int64), reduction="sum")
    assert run_step(wrap(module, functional.cross_entropy), x) == pytest.approx(expected.item(), rel=1e-5)


def test_changing_buffers_are_rejected():
    def increment_in_place(self, x):
        self.seen += 1
        return functional.linear(x, self.weight, self.bias)

    def replace_buffer(self, x):
        self.seen = self.seen + 1
        return functional.linear(x, self.weight, self.bias)

    for function in (increment_in_place, replace_buffer):
        module = Uses(function)
        module.register_buffer("seen", torch.zeros(()))
        assert_step_rejected(UsageError, r"buffer seen of stage 0, module \(Uses\), changes", module)


def test_invalid_losses_are_rejected():
    assert_wrap_rejected(UsageError, "the loss is a str", nn.Linear(5, 3), "cross_entropy")
    assert_wrap_rejected(ConfigurationError, "reduction is 'none'", nn.Linear(5, 3), reduction="none")
    assert_wrap_rejected(UsageError, "tokens_per_sample is 0", nn.Linear(5, 3), tokens_per_sample=0)
    assert_wrap_rejected(UsageError, "the loss has a parameter, weight", nn.Linear(5, 3), nn.Linear(3, 1))


def test_losses_without_a_gradient_are_rejected():
    def sample_losses(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none")

    assert_step_rejected(UsageError, r"shape or type \(4,\)", nn.Linear(5, 3), sample_losses)
    assert_step_rejected(UsageError, "shape or type float", nn.Linear(5, 3), lambda outputs, targets: 1.0)
    assert_step_rejected(
        UsageError, "the loss has no gradient", nn.Linear(5, 3), lambda outputs, targets: outputs.detach().sum()
    )


def test_parameter_without_gradient_is_rejected():
    stage = Uses(lambda self, x: functional.linear(x, self.weight))
    message = r"no gradient reached parameter 1\.bias of stage 1, 1 \(Uses\)"
    assert_step_rejected(UsageError, message, nn.Sequential(nn.Linear(5, 5), stage))
    assert_step_rejected(UsageError, "does not depend on its parameters", Uses(lambda self, x: x[:, :3].clone()))
    detached = Uses(lambda self, x: functional.linear(x.detach(), self.weight, self.bias))
    assert_step_rejected(
        UsageError, r"stage 1, 1 \(Uses\), does not depend on its input", nn.Sequential(nn.Linear(5, 5), detached)
    )


def test_output_shape_unlike_the_example_is_rejected():
    model = wrap(
        nn.Sequential(nn.Linear(5, 4), Uses(lambda self, x: self.weight[:, : len(x)].sum() + x[:, : len(x)], 4)),
        lambda outputs, targets: outputs.mean(),
        example=np.ones((3, 5), np.float32),
    )
    with pytest.raises(UsageError, match=r"stage 1, 1 \(Uses\), returns \(2, 2\) for 2 samples, expected \(2, 3\)"):
        run_step(model, np.ones((2, 5), np.float32))


def test_output_that_is_not_a_batch_is_rejected():
    assert_step_rejected(UsageError, r"returns \(3, 4\) for 4 samples", Uses(lambda self, x: self.weight @ x.T))
    assert_step_rejected(
        UsageError, r"stage 0, module \(Uses\), returns torch\.float64 values", Uses(lambda self, x: x.double())
    )
    assert_step_rejected(UsageError, r"returns a torch\.int64 tensor", Uses(lambda self, x: x.long()))
    assert_step_rejected(UsageError, r"returns a list without tensors", Uses(lambda self, x: [1, None]))
    assert_step_rejected(UsageError, r"returns a set", Uses(lambda self, x: (x, {1})))


def test_stage_that_overwrites_its_input_is_rejected():
    """An in-place ReLU is allowed after a linear layer of the same stage, but not as the first module of a stage."""
    fine = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    run_step(wrap(fine, functional.cross_entropy), np.ones((2, 5), np.float32))
    second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    assert_step_rejected(
        UsageError, r"stage 1, 1 \(Sequential\), overwrites its input", nn.Sequential(nn.Linear(5, 4), second)
    )


def test_unknown_output_shape_error_asks_for_an_example():
    model = wrap(nn.Sequential(*linear_layers(5, 4, 3)), functional.cross_entropy)
    with pytest.raises(ConfigurationError, match=r"stage 0, 0 \(Linear\), is unknown .* example=x"):
        model.stages[0].output_shape(2)


@pytest.mark.parametrize("example", [3, np.ones((0, 5), np.float32), np.float32(3)])
def test_invalid_example_is_rejected(example):
    assert_wrap_rejected(UsageError, "the example must be a tensor or array of shape", nn.Linear(5, 3), example=example)


def test_model_on_another_device_than_the_run_is_rejected(gpu):
    """The run's memory is on a GPU, but the modules are on the CPU."""
    model = wrap(nn.Linear(5, 3), functional.cross_entropy)
    store = FlatStore(model.layout, model.dtype, on="gpu")
    x = gpu.asarray(np.ones((2, 5), np.float32))
    with pytest.raises(ConfigurationError, match=r"are on cpu, but the run computes on gpu; .*module.to\('cuda'\)"):
        model.forward(model.bind(store), x, Arena(on="gpu"), 0, Draw(0, 1, 0))


def test_modules_used_by_another_run_are_rejected():
    module = nn.Sequential(*linear_layers(5, 4, 3))
    model = wrap(module, functional.cross_entropy)
    values = FlatStore(model.layout, model.dtype)
    model.initialise(values, 0)
    x, arena = np.ones((2, 5), np.float32), Arena()
    stage = model.stages[0]
    for step in (1, 2):  # as on a pipeline rank, which computes one of two stages
        stage.forward(model.bind_stage(0, lambda layer: values), x, model.operations, saved_for_step(arena, step))
        arena.saved(0).release()
    assert module[1].weight.numel() == 0, "the memory of a stage that another rank computes is kept"
    with pytest.raises(UsageError, match="another run has taken the parameters"):
        model.initialise(values, 0)
    assert_wrap_rejected(UsageError, r"parameter 1\.weight .* is empty", module)


def saved_for_step(arena, step):
    saved = arena.saved(0)
    saved.draw = Draw(0, step, 0)
    return saved


def test_missing_torch_error_names_the_extra(monkeypatch):
    def raise_import_error(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(arrays.importlib, "import_module", raise_import_error)
    arrays.library.cache_clear()
    try:
        with pytest.raises(MissingCapabilityError, match=re.escape("install hpcdist[torch]")):
            wrap(nn.Linear(5, 3), functional.cross_entropy)
    finally:
        arrays.library.cache_clear()


@pytest.mark.parametrize(("output", "is_one"), [("mean", "sum"), ("sum", "mean")])
def test_loss_with_another_reduction_is_rejected(output, is_one, rng):
    model = wrap(nn.Linear(3, 4), nn.CrossEntropyLoss(reduction=is_one), reduction=output)
    outputs = rng.standard_normal((6, 4)).astype(np.float32)
    targets = rng.integers(0, 4, 6)
    with pytest.raises(UsageError, match=f"wrapped as a {output} over samples, and it is a {is_one}:.*='{is_one}'"):
        model.loss.forward(outputs, targets, model.operations, Arena().saved(0))
    fitting = wrap(nn.Linear(3, 4), nn.CrossEntropyLoss(reduction=is_one), reduction=is_one)
    total = fitting.loss.forward(outputs, targets, model.operations, Arena().saved(0))
    exponents = outputs.astype(np.float64)
    expected = float((np.log(np.exp(exponents).sum(axis=1)) - exponents[np.arange(6), targets]).sum())
    assert total == pytest.approx(expected, rel=1e-5)


def test_user_forward_outside_a_step_is_rejected(rng):
    modules = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model, x = wrap(modules, nn.CrossEntropyLoss()), rng.standard_normal((6, 4)).astype(np.float32)
    for stage in model.stages:
        stage.guard("the reason")
    modules(torch.from_numpy(x))  # no run has taken the parameters yet
    run_step(model, x)
    with pytest.raises(UsageError, match=r"0 \(Linear\) was called outside of a step: the reason"):
        modules(torch.from_numpy(x))
    run_step(model, x)  # the run itself may
    shapes = {segment.key: segment.spec.shape for segment in model.layout.segments}
    load(modules, {key: np.ones(shape, np.float32) for key, shape in shapes.items()})
    expected = (x.sum(axis=1, keepdims=True) + 1) * 8 + 1
    np.testing.assert_allclose(modules(torch.from_numpy(x)).detach().numpy(), np.repeat(expected, 3, axis=1), rtol=1e-5)


@pytest.mark.full
def test_script_evaluation_matches_the_modules(tmp_path, rng):
    modules = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    x, y = rng.standard_normal((6, 4)).astype(np.float32), rng.integers(0, 3, 6)
    keys = {"run.steps": 2, "run.global_batch": 6, "optimizer.warmup_steps": 0}
    with Training(wrap(modules, nn.CrossEntropyLoss()), keys, out=tmp_path / "run") as training:
        for _ in training.steps:
            training.step(x, y)
            result = float(functional.cross_entropy(modules(torch.from_numpy(x)), torch.from_numpy(y)).detach())
            assert result == pytest.approx(training.evaluate(x, y), rel=1e-5)
    load(modules, training.parameters())
    after = float(functional.cross_entropy(modules(torch.from_numpy(x)), torch.from_numpy(y)).detach())
    assert after == pytest.approx(result, rel=1e-5)
