"""PyTorch optimizers translated to recipe keys: the updates are equal, and unsupported optimizers are rejected."""

import copy
import fnmatch

import numpy as np
import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.optim import optimizer as optimizers
from hpcdist.optim import rates
from hpcdist.optim.config import OptimizerConfig
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.training.script import Training

torch = pytest.importorskip("torch")

from torch import nn

from hpcdist.adapters.torch import model as torch_model
from hpcdist.adapters.torch.model import DEFAULTS, recipe_of, wrap


def build_modules():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 5), nn.Linear(5, 2)).double()


def groups_without_decay(module):
    """Return the parameter groups of most scripts: biases and norms have no weight decay."""
    short = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    long = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    return [{"params": long}, {"params": short, "weight_decay": 0.0}]


def groups_by_layer(module):
    """Return parameter groups with a learning rate per layer and different decays. The first layer's rate is 0."""
    return [
        {"params": module[0].parameters(), "lr": 0.0},
        {"params": module[1].parameters()},
        {"params": [module[2].weight], "lr": 0.007, "weight_decay": 0.5},
        {"params": [module[2].bias], "weight_decay": 0.25},
        {"params": module[3].parameters(), "lr": 0.05},
    ]


MADE = {
    "adamw": lambda m: torch.optim.AdamW(
        groups_without_decay(m), lr=2e-2, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3
    ),
    "adamw that decays all": lambda m: torch.optim.AdamW(m.parameters(), lr=2e-2, weight_decay=0.3),
    "adamw by layer": lambda m: torch.optim.AdamW(groups_by_layer(m), lr=2e-2, weight_decay=0.3),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(groups_without_decay(m), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    "sgd by layer": lambda m: torch.optim.SGD(groups_by_layer(m), lr=0.1, momentum=0.9, weight_decay=0.02),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.02),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, alpha=0.95, eps=1e-7),
}


def config_of(keys):
    values = {key.removeprefix("optimizer."): value for key, value in keys.items()}
    return OptimizerConfig(**values | {"groups": tuple(values["groups"])})


@pytest.mark.parametrize("kind", MADE)
def test_updates_match_pytorch_optimizers(kind, rng):
    module = build_modules()
    theirs = MADE[kind](module)
    model = wrap(copy.deepcopy(module), nn.functional.mse_loss)
    twin_module = build_modules()
    config = config_of(recipe_of(MADE[kind](twin_module))[DEFAULTS](wrap(twin_module, nn.functional.mse_loss)))
    store, gradient = (FlatStore(model.layout, np.dtype("float64")) for _ in range(2))
    model.initialise(store, 0)
    whole = Range(0, model.layout.size)
    ours = optimizers.build(config, model.layout, whole, np.dtype("float64"), total_steps=5)
    named = dict(module.named_parameters())
    for step in range(1, 6):
        for segment in model.layout.segments:
            tensor = named[segment.spec.name]
            tensor.grad = torch.tensor(rng.standard_normal(tensor.shape))
            gradient.view(segment.key)[...] = tensor.grad.numpy()
        assert rates.learning_rate(config, step, 5) == config.learning_rate
        ours.begin_step()
        ours.direction(whole, store, gradient)
        ours.apply(whole, store, gradient)
        theirs.step()
        for segment in model.layout.segments:
            values = named[segment.spec.name].detach().numpy()
            np.testing.assert_allclose(store.view(segment.key), values, rtol=1e-12, atol=1e-15, err_msg=segment.key)


def test_groups_are_written_as_few_patterns():
    module = build_modules()
    keys = recipe_of(torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.3))[DEFAULTS](
        wrap(module, nn.functional.mse_loss)
    )
    assert keys["optimizer.groups"] == ["*.bias 1.1.weight: weight_decay=0.3"]
    assert keys["optimizer.weight_decay"] == 0.3


@pytest.mark.parametrize("first", [True, False])
def test_explicit_keys_override_the_optimizer_in_any_order(first, tmp_path):
    module = build_modules()
    derived = recipe_of(torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.3))
    local_values = {"optimizer.clip_norm": 0.5, "optimizer": {"learning_rate": 7e-3}}
    keys = {"run.steps": 1, "run.global_batch": 2, "precision.mode": "float64"}
    keys |= {**local_values, **derived} if first else {**derived, **local_values}
    with Training(wrap(module, nn.functional.mse_loss), keys, out=tmp_path / "run") as training:
        result = training.recipe.optimizer
        assert (result.clip_norm, result.learning_rate, result.beta2) == (0.5, 7e-3, 0.999)
        training.step(np.ones((2, 4)), np.ones((2, 2)))


@cases(
    "make, output",
    (lambda w, b: torch.optim.Adagrad([w]), "hpcdist has no optimizer like Adagrad"),
    (lambda w, b: torch.optim.AdamW([w], amsgrad=True), "amsgrad = True"),
    (lambda w, b: torch.optim.SGD([w], momentum=0.9, dampening=0.1), "dampening = 0.1"),
    (lambda w, b: torch.optim.Adam([w], weight_decay=0.1), "use AdamW"),
    (lambda w, b: torch.optim.RMSprop([w], weight_decay=0.1), "adds the decay to the gradient"),
    (lambda w, b: torch.optim.RMSprop([w], momentum=0.1), "RMSprop with momentum = 0.1"),
    (lambda w, b: torch.optim.RMSprop([w], centered=True), "centered = True"),
    (
        lambda w, b: torch.optim.SGD([{"params": [w]}, {"params": [b], "momentum": 0.5}], lr=1.0),
        "groups with momentum = 0 and 0.5",
    ),
    (lambda w, b: torch.optim.AdamW([w]), r"lacks 1 of the 2 tensors of the model, such as 0\.bias,"),
    (
        lambda w, b: torch.optim.AdamW([w, b, nn.Parameter(torch.ones(7))]),
        r"a tensor of shape \(7,\) that is not a parameter of the wrapped modules",
    ),
)
def test_unsupported_optimizer_options_are_rejected(make, output):
    module = nn.Linear(2, 2)
    model = wrap(module, nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match=output):
        recipe_of(make(module.weight, module.bias))[DEFAULTS](model)


def test_recipe_of_with_a_built_in_model_is_rejected(tmp_path):
    keys = recipe_of(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    built = models.build(ModelConfig(kind="mlp", layers=1, hidden=4), features=5, classes=3)
    with pytest.raises(ConfigurationError, match="recipe_of is for modules"):
        Training(built, keys, out=tmp_path / "run")


def test_patterns_match_names_with_brackets_and_stars():
    def write_patterns(*names):
        return torch_model._written({name: (0.0, 1.0) if at == 0 else (None, 1.0) for at, name in enumerate(names)})

    for names in (("2.y.b[0]", "4.q.b0"), ("*.w", "1.v"), ("1.*w", "2.w")):
        (text,) = write_patterns(*names)
        patterns = text.partition(":")[0].split()
        assert [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)] == [names[0]]


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 3),  # begins with a rate of 0
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.06, 0.02], total_steps=8, cycle_momentum=False),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.CosineAnnealingLR(o, 4)],
        milestones=[3],
    ),
}


def build_scheduled(kind):
    module = build_modules()
    weights = [{"params": module[0].parameters(), "lr": 0.03}, {"params": module[1:].parameters(), "lr": 0.01}]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.1)
    return module, optimizer, SCHEDULERS[kind](optimizer)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_match_pytorch_and_resume(kind, tmp_path, rng, recwarn):
    batches = [(torch.tensor(rng.standard_normal((4, 4))), torch.tensor(rng.standard_normal((4, 2)))) for _ in range(7)]
    module, optimizer, scheduler = build_scheduled(kind)
    expected, rates_of_steps = [], []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        rates_of_steps.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
        expected.append(loss.item())
    losses = []
    for stop in (3, 7):
        module, optimizer, scheduler = build_scheduled(kind)
        keys = {"run.steps": 7, "run.global_batch": 4, "precision.mode": "float64", **recipe_of(optimizer, scheduler)}
        with Training(wrap(module, nn.functional.mse_loss), keys, out=tmp_path / "run", resume="auto") as training:
            for step in training.steps:
                if step == stop:
                    break
                losses.append(training.step(*batches[step]))
    np.testing.assert_allclose(losses, expected, rtol=1e-11)
    logged = step_metrics.read(tmp_path / "run" / "metrics.h5").steps["learning_rate"]
    np.testing.assert_allclose(logged, rates_of_steps, rtol=1e-12)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_script_may_change_the_rate_itself(tmp_path):
    module = build_modules()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    keys = {"run.steps": 3, "run.global_batch": 2, "precision.mode": "float64", **recipe_of(optimizer)}
    batch = np.ones((2, 4)), np.ones((2, 2))
    with Training(wrap(module, nn.functional.mse_loss), keys, out=tmp_path / "run") as training:
        training.step(*batch)
        optimizer.param_groups[0]["lr"] = 0.0
        unchanged = training.step(*batch)
        assert training.step(*batch) == unchanged
        optimizer.param_groups[0]["momentum"] = 0.8
        with pytest.raises(UsageError, match=r"momentum of the optimizer changed from 0\.9 to 0\.8"):
            training._set_rate()


def test_rates_that_a_recipe_cannot_have_are_rejected(tmp_path):
    module, optimizer, scheduler = build_scheduled("sequence")
    keys = recipe_of(optimizer, scheduler)[DEFAULTS]
    keys(wrap(module, nn.functional.mse_loss))
    optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(UsageError, match="have changed by different factors, 0.1 to 0.2; use a scheduler that scales"):
        keys.rate_factor()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(UsageError, match="a group with lr = nan"):
        keys.rate_factor()
    with pytest.raises(ConfigurationError, match="of another optimizer, or needs a loss"):
        recipe_of(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ConfigurationError, match="of another optimizer, or needs a loss"):
        recipe_of(torch.optim.SGD(module.parameters(), lr=0.1), scheduler)
    delayed = {"communication.delayed": True, "communication.overlap": "thread", "precision.mode": "float64"}
    delayed |= {"run.steps": 2, "run.global_batch": 2}
    training = Training(wrap(*build_scheduled("sequence")[:1], nn.functional.mse_loss), delayed, out=tmp_path / "run")
    training._optimizer = keys
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] * 3
    with training, pytest.raises(UsageError, match=r"set communication\.delayed = false"):
        training.step(np.ones((2, 4)), np.ones((2, 2)))
