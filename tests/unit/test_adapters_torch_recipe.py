"""Optimizers of PyTorch as keys of a recipe: the updates are the same, and what cannot be the same is refused."""

import numpy as np
import pytest

from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import ConfigurationError
from hpcdist.optim import optimizer as optimizers
from hpcdist.optim import rates
from hpcdist.optim.config import OptimizerConfig

torch = pytest.importorskip("torch")

from hpcdist.adapters.torch_recipe import recipe_of

MADE = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-2, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3),
    "adam": lambda groups: torch.optim.Adam([{**group, "weight_decay": 0.0} for group in groups], lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.02),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.02),
}


@pytest.mark.parametrize("kind", MADE)
def test_updates_are_the_same(kind, rng):
    weight, bias = (torch.tensor(rng.standard_normal(shape), requires_grad=True) for shape in ((3, 4), (4,)))
    theirs = MADE[kind]([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}])
    keys = {key.removeprefix("optimizer."): value for key, value in recipe_of(theirs).items()}
    config = OptimizerConfig(**keys)
    layout = Layout.of([TensorSpec(0, "weight", (3, 4)), TensorSpec(0, "bias", (4,), False)])
    store, gradient = FlatStore(layout, np.dtype("float64")), FlatStore(layout, np.dtype("float64"))
    for name, tensor in (("weight", weight), ("bias", bias)):
        store.view(f"0.{name}")[...] = tensor.detach().numpy()
    whole = Range(0, layout.size)
    ours = optimizers.build(config, layout, whole, np.dtype("float64"), total_steps=5)
    for step in range(1, 6):
        for name, tensor in (("weight", weight), ("bias", bias)):
            tensor.grad = torch.tensor(rng.standard_normal(tensor.shape))
            gradient.view(f"0.{name}")[...] = tensor.grad.numpy()
        assert rates.learning_rate(config, step, 5) == config.learning_rate
        ours.begin_step()
        ours.direction(whole, store, gradient)
        ours.apply(whole, store, gradient)
        theirs.step()
        for name, tensor in (("weight", weight), ("bias", bias)):
            np.testing.assert_allclose(store.view(f"0.{name}"), tensor.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda w, b: torch.optim.Adagrad([w]), "Adagrad has no counterpart"),
        (lambda w, b: torch.optim.AdamW([w], amsgrad=True), "amsgrad = True"),
        (lambda w, b: torch.optim.SGD([w], momentum=0.9, dampening=0.1), "dampening = 0.1"),
        (lambda w, b: torch.optim.AdamW([w, b]), "decays 1 tensors of one dim"),
        (lambda w, b: torch.optim.Adam([w], weight_decay=0.1), "use AdamW"),
        (
            lambda w, b: torch.optim.SGD([{"params": [w]}, {"params": [b], "lr": 2.0}], lr=1.0),
            "groups with lr = 1.0 and",
        ),
        (
            lambda w, b: torch.optim.SGD(
                [{"params": [w]}, {"params": [w.clone().detach()], "weight_decay": 1.0}], lr=1
            ),
            "weight decays",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(make, told):
    weight, bias = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(ConfigurationError, match=told):
        recipe_of(make(weight, bias))
