"""Modules that cannot be trained are refused with the name of what is wrong, before or in the first step."""

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
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import Draw
from hpcdist.training.script import Training


def linears(*widths):
    return [nn.Linear(inputs, outputs) for inputs, outputs in zip(widths, widths[1:], strict=False)]


def refused(error, message, given, loss=functional.cross_entropy, **options):
    with pytest.raises(error, match=message):
        wrap(given, loss, **options)


def run(model, x):
    """Return the summed loss of a step of one micro-batch, without an update."""
    return Passes(model).step([(x, np.zeros(len(x), np.int64))], 1.0, Draw(0, 1, 0))


def failing(error, message, given, loss=functional.cross_entropy, samples=4):
    with pytest.raises(error, match=message):
        run(wrap(given, loss), np.ones((samples, 5), np.float32))


class Uses(nn.Linear):
    """A linear that runs ``function(self, x)`` instead."""

    def __init__(self, function, inputs=5, outputs=3):
        super().__init__(inputs, outputs)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("given", [3, "module", [], lambda x: x, torch.ones(3)])
def test_what_is_no_module(given):
    refused(UsageError, "to wrap; pass a torch.nn.Module", given)


def test_what_is_no_module_among_stages():
    refused(UsageError, "got a function among the stages", [nn.Linear(5, 3), functional.relu])


def test_modules_without_parameters():
    refused(UsageError, "no parameter", nn.Sequential(nn.ReLU(), nn.Flatten()))


def test_a_parameter_that_is_not_trained():
    module = nn.Sequential(*linears(5, 4, 3))
    module[1].bias.requires_grad = False
    refused(UsageError, r"parameter 1\.bias of 1 \(Linear\) has requires_grad = False", module)


def test_parameters_of_two_types():
    module = nn.Sequential(*linears(5, 4, 3))
    module[1].to(torch.float64)
    refused(ConfigurationError, r"1\.weight of .* is torch\.float64 on cpu, 0\.weight is torch\.float32", module)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_parameters_of_a_type_that_no_run_has(dtype):
    refused(ConfigurationError, f"parameter 0.weight is {dtype}", nn.Sequential(nn.Linear(5, 3).to(dtype)))


def test_parameters_without_values():
    refused(UsageError, r"weight .* on the meta device", nn.Linear(5, 3, device="meta"))
    refused(UsageError, r"weight .* has no shape yet", nn.LazyLinear(3))


def test_parameters_that_share_memory_without_being_one():
    first, second = linears(4, 4, 4)
    second.weight = nn.Parameter(first.weight.detach()[1:].view(3, 4))
    message = r"parameters 0\.weight of 0 \(Linear\) and 1\.weight of 1 \(Linear\) share memory"
    refused(UsageError, message, nn.Sequential(first, second))


def test_a_parameter_whose_elements_are_one_number():
    module = nn.Linear(5, 3)
    module.bias = nn.Parameter(torch.zeros(1).expand(3))
    refused(UsageError, r"parameter bias .* expanded", module)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)])
def test_norms_with_running_statistics(norm):
    first, second = linears(5, 4, 3)
    refused(UsageError, rf"^1 is a {type(norm).__name__} that gathers", nn.Sequential(first, norm, second))


def test_norms_over_a_batch_without_them():
    first, second = linears(5, 4, 3)
    module = nn.Sequential(first, nn.BatchNorm1d(4, track_running_stats=False), second)
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    expected = functional.cross_entropy(module(torch.tensor(x)), torch.zeros(4, dtype=torch.int64), reduction="sum")
    assert run(wrap(module, functional.cross_entropy), x) == pytest.approx(expected.item(), rel=1e-5)


def test_buffers_that_change():
    def count(self, x):
        self.seen += 1
        return functional.linear(x, self.weight, self.bias)

    def replace(self, x):
        self.seen = self.seen + 1
        return functional.linear(x, self.weight, self.bias)

    for function in (count, replace):
        module = Uses(function)
        module.register_buffer("seen", torch.zeros(()))
        failing(UsageError, r"buffer seen of stage 0, module \(Uses\), changes", module)


def test_a_loss_that_is_none():
    refused(UsageError, "the loss is a str", nn.Linear(5, 3), "cross_entropy")
    refused(ConfigurationError, "reduction is 'none'", nn.Linear(5, 3), reduction="none")
    refused(UsageError, "tokens_per_sample is 0", nn.Linear(5, 3), tokens_per_sample=0)
    refused(UsageError, "the loss has a parameter, weight", nn.Linear(5, 3), nn.Linear(3, 1))


def test_losses_that_cannot_be_followed():
    def every(outputs, targets):
        return functional.cross_entropy(outputs, targets, reduction="none")

    failing(UsageError, r"the loss function returns \(4,\)", nn.Linear(5, 3), every)
    failing(UsageError, "the loss function returns float", nn.Linear(5, 3), lambda outputs, targets: 1.0)
    failing(UsageError, "the loss has no gradient", nn.Linear(5, 3), lambda outputs, targets: outputs.detach().sum())


def test_a_parameter_without_gradient():
    stage = Uses(lambda self, x: functional.linear(x, self.weight))
    message = r"no gradient reached parameter 1\.bias of stage 1, 1 \(Uses\)"
    failing(UsageError, message, nn.Sequential(nn.Linear(5, 5), stage))
    failing(UsageError, "depends on no parameter", Uses(lambda self, x: x[:, :3].clone()))
    detached = Uses(lambda self, x: functional.linear(x.detach(), self.weight, self.bias))
    failing(UsageError, r"stage 1, 1 \(Uses\), does not depend on its input", nn.Sequential(nn.Linear(5, 5), detached))


def test_an_output_shape_that_changes():
    model = wrap(
        nn.Sequential(nn.Linear(5, 4), Uses(lambda self, x: self.weight[:, : len(x)].sum() + x[:, : len(x)], 4)),
        lambda outputs, targets: outputs.mean(),
        example=np.ones((3, 5), np.float32),
    )
    with pytest.raises(UsageError, match=r"stage 1, 1 \(Uses\), gives \(2, 2\) for 2 samples, expected \(2, 3\)"):
        run(model, np.ones((2, 5), np.float32))


def test_an_output_that_is_no_batch():
    failing(UsageError, r"gives \(3, 4\) for 4 samples", Uses(lambda self, x: self.weight @ x.T))
    failing(UsageError, r"module \(Uses\) in stage 0 returns a tuple", Uses(lambda self, x: (x, x)))
    failing(UsageError, r"gives torch\.bfloat16, its parameters are torch\.float32", Uses(lambda self, x: x.bfloat16()))


def test_a_stage_that_writes_over_its_input():
    """A ReLU in place is fine behind the linear whose stage it belongs to, not in front of one."""
    fine = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    run(wrap(fine, functional.cross_entropy), np.ones((2, 5), np.float32))
    second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    failing(UsageError, r"stage 1, 1 \(Sequential\), writes over its input", nn.Sequential(nn.Linear(5, 4), second))


def test_a_shape_that_is_not_known():
    model = wrap(nn.Sequential(*linears(5, 4, 3)), functional.cross_entropy)
    with pytest.raises(ConfigurationError, match=r"stage 0, 0 \(Linear\), is not known .* example=x"):
        model.stages[0].output_shape(2)


@pytest.mark.parametrize("example", [3, np.ones((0, 5), np.float32), np.float32(3)])
def test_an_example_that_is_none(example):
    refused(UsageError, "the example is not a tensor or array of at least one sample", nn.Linear(5, 3), example=example)


def test_a_model_on_another_device_than_the_run(gpu):
    """The run's memory is on a GPU, the modules are not."""
    model = wrap(nn.Linear(5, 3), functional.cross_entropy)
    store = FlatStore(model.layout, model.dtype, on="gpu")
    x = gpu.asarray(np.ones((2, 5), np.float32))
    with pytest.raises(ConfigurationError, match=r"modules are on cpu, the run computes on gpu; .*module.to\('cuda'\)"):
        model.forward(model.bind(store), x, Arena(on="gpu"), 0, Draw(0, 1, 0))


def test_modules_that_another_run_has_taken():
    module = nn.Sequential(*linears(5, 4, 3))
    model = wrap(module, functional.cross_entropy)
    values = FlatStore(model.layout, model.dtype)
    model.initialise(values, 0)
    x, arena = np.ones((2, 5), np.float32), Arena()
    stage = model.stages[0]
    for step in (1, 2):  # as on a rank of a pipeline, which computes one stage of two
        stage.forward(model.bind_stage(0, lambda layer: values), x, model.operations, _saved(arena, step))
        arena.saved(0).release()
    assert module[1].weight.numel() == 0, "memory of a stage that is computed elsewhere is kept"
    with pytest.raises(UsageError, match="a run has taken the parameters"):
        model.initialise(values, 0)
    refused(UsageError, r"parameter 1\.weight .* is empty", module)


def _saved(arena, step):
    saved = arena.saved(0)
    saved.draw = Draw(0, step, 0)
    return saved


def test_torch_may_be_missing(monkeypatch):
    def refuse(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(arrays.importlib, "import_module", refuse)
    arrays.library.cache_clear()
    try:
        with pytest.raises(MissingCapabilityError, match=re.escape("install hpcdist[torch]")):
            wrap(nn.Linear(5, 3), functional.cross_entropy)
    finally:
        arrays.library.cache_clear()


@pytest.mark.parametrize(("said", "is_one"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_of_the_other_reduction_is_refused(said, is_one, rng):
    model = wrap(nn.Linear(3, 4), nn.CrossEntropyLoss(reduction=is_one), reduction=said)
    outputs = rng.standard_normal((6, 4)).astype(np.float32)
    targets = rng.integers(0, 4, 6)
    with pytest.raises(UsageError, match=f"wrapped as a {said} over samples, and it is a {is_one}:.*='{is_one}'"):
        model.loss.forward(outputs, targets, model.operations, Arena().saved(0))
    fitting = wrap(nn.Linear(3, 4), nn.CrossEntropyLoss(reduction=is_one), reduction=is_one)
    total = fitting.loss.forward(outputs, targets, model.operations, Arena().saved(0))
    exponents = outputs.astype(np.float64)
    expected = float((np.log(np.exp(exponents).sum(axis=1)) - exponents[np.arange(6), targets]).sum())
    assert total == pytest.approx(expected, rel=1e-5)


def test_a_forward_of_the_users_own_where_parameters_are_not_whole(rng):
    modules = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model, x = wrap(modules, nn.CrossEntropyLoss()), rng.standard_normal((6, 4)).astype(np.float32)
    for stage in model.stages:
        stage.guard("the reason")
    modules(torch.from_numpy(x))  # nobody has taken the parameters yet
    run(model, x)
    with pytest.raises(UsageError, match=r"0 \(Linear\) was called outside of a step: the reason"):
        modules(torch.from_numpy(x))
    run(model, x)  # the run itself may
    shapes = {segment.key: segment.spec.shape for segment in model.layout.segments}
    load(modules, {key: np.ones(shape, np.float32) for key, shape in shapes.items()})
    expected = (x.sum(axis=1, keepdims=True) + 1) * 8 + 1
    np.testing.assert_allclose(modules(torch.from_numpy(x)).detach().numpy(), np.repeat(expected, 3, axis=1), rtol=1e-5)


@pytest.mark.full
def test_a_script_evaluates_as_the_modules_do(tmp_path, rng):
    modules = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    x, y = rng.standard_normal((6, 4)).astype(np.float32), rng.integers(0, 3, 6)
    keys = {"run.steps": 2, "run.global_batch": 6, "optimizer.warmup_steps": 0}
    with Training(wrap(modules, nn.CrossEntropyLoss()), keys, out=tmp_path / "run") as training:
        for _ in training.steps:
            training.step(x, y)
            found = float(functional.cross_entropy(modules(torch.from_numpy(x)), torch.from_numpy(y)).detach())
            assert found == pytest.approx(training.evaluate(x, y), rel=1e-5)
    load(modules, training.parameters())
    after = float(functional.cross_entropy(modules(torch.from_numpy(x)), torch.from_numpy(y)).detach())
    assert after == pytest.approx(found, rel=1e-5)
