"""A run directory for a model that was trained elsewhere: its tensors held against a recipe, and the recipe kept."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hpcdist import models
from hpcdist.checkpoint.catalogue import PARAMETERS, Tensor
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.reporting import atomic
from hpcdist.training import recipe as recipes
from hpcdist.training.directory import RECIPE_FILE
from hpcdist.training.recipe import Recipe


def prepare(
    run_dir: Path, path: Path, overrides: Iterable[str], tensors: Sequence[Tensor], inputs: Mapping[str, Any]
) -> None:
    """Make ``run_dir`` with the recipe ``path`` under ``overrides`` (local).

    Raises ConfigurationError when ``tensors`` are not those of its model, or when the directory has a recipe already.
    """
    recipe = recipes.load(path, overrides).recipe
    check(recipe, tensors, inputs)
    stored = run_dir / RECIPE_FILE
    if stored.exists():
        raise ConfigurationError(f"{stored} is there already; choose another directory")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        atomic.write(stored, recipes.dump(recipe))
    except OSError as error:
        raise StorageError(f"{stored} cannot be written: {error.strerror}") from error


# What data decides of a model: arguments of `models.build`.
DECIDED: Final = {"context", "features", "classes", "height", "width", "channels"}


def check(recipe: Recipe, tensors: Sequence[Tensor], inputs: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, naming one, when ``tensors`` are not the parameters of the model of ``recipe``.

    ``inputs`` are what the data decided of it, where that is known; a gpt has its context from the recipe.
    """
    known = inputs if set(inputs) <= DECIDED else {}
    model = models.build(recipe.model, recipe.precision.computes, **{"context": recipe.data.context, **known})
    found = {one.name: one for one in tensors if one.kind == PARAMETERS}
    for segment in model.layout.segments:
        one, shape = found.pop(segment.key, None), segment.spec.shape
        if one is None:
            raise ConfigurationError(
                f"{segment.key} is missing, a tensor of shape {list(shape)} of the recipe's model; rename the tensors "
                "as `hpcdist checkpoint show --tensors` lists those of a run, or change [model]"
            )
        if one.shape != shape:
            raise ConfigurationError(
                f"{segment.key} has the shape {list(one.shape)}, the recipe's model {list(shape)}; change [model]"
            )
    if found:
        raise ConfigurationError(
            f"{next(iter(found))} is no tensor of the recipe's model; change [model], or rename it"
        )
