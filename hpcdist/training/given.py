"""Models that are a user's own: what a recipe says beside them has to fit."""

from hpcdist.errors import ConfigurationError
from hpcdist.models.model import Model
from hpcdist.training.recipe import Recipe


def check(recipe: Recipe, model: Model) -> None:
    """Raise ConfigurationError where ``model`` computes elsewhere or in another type than ``recipe`` says (local)."""
    computes, on = recipe.precision.stages, recipe.run.device
    if model.dtype.name != computes:
        raise ConfigurationError(
            f"the model computes in {model.dtype.name}, and precision.mode = {recipe.precision.mode!r} in {computes}; "
            f"convert the model, or set precision.mode = {model.dtype.name!r}"
            + (", or precision.activations = 'float32'" if recipe.precision.activations != "float32" else "")
        )
    if model.on not in (None, on):
        raise ConfigurationError(
            f"the model is on the {model.on}, and run.device = {on!r}; move the model before it is wrapped, or set "
            f"run.device = {model.on!r}"
        )
