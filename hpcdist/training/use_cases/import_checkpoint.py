"""Import of a foreign checkpoint: a run directory with a recipe whose model has its tensors.

Compares the tensors of a model that was trained elsewhere with those of the recipe, by name and shape (also those of a
state dict of user modules), and writes the recipe to the new directory. Called by `hpcdist checkpoint import`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdist import models
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import TRANSFORMERS
from hpcdist.models.model import Model
from hpcdist.reporting import atomic
from hpcdist.training import data
from hpcdist.training.data.source import usable_inputs
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe
from hpcdist.training.run_directory import RECIPE_FILE


def prepare_imported_run(
    run_dir: Path, path: Path, overrides: Iterable[str], tensors: Sequence[StoredTensor], inputs: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, str]]:
    """Make ``run_dir`` with the recipe ``path`` under ``overrides`` (local).

    Returns the model inputs that the data decides, and the names of ``tensors`` in the run by those in the file.

    ``inputs`` are those model inputs as an export wrote them; without them the data of the recipe is opened. Raises
    ConfigurationError when ``tensors`` are not those of the model, or when the directory has a recipe already, and
    DataError where the data is needed and cannot be read.
    """
    recipe = recipes.load(path, overrides).recipe
    decided = _model_inputs(recipe, inputs)
    keys = match_tensors(recipe, tensors, decided)
    stored = run_dir / RECIPE_FILE
    if stored.exists():
        raise ConfigurationError(f"{stored} is there already; choose another directory")
    atomic.save(stored, recipes.dump(recipe), parents=True)
    return decided, keys


def _model_inputs(recipe: Recipe, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Return the model inputs that the data decides: ``inputs`` if they are valid, else by the recipe."""
    known = usable_inputs(inputs)
    if known:
        return known
    if recipe.model.kind in TRANSFORMERS:
        return {"context": recipe.data.context}
    return data.open_source(recipe.data, recipe.model, solo(), digests=False).inputs


def match_tensors(recipe: Recipe, tensors: Sequence[StoredTensor], inputs: Mapping[str, int]) -> dict[str, str]:
    """Return the name that a run of ``recipe`` has for each of ``tensors``, by the name in the file (local).

    Those of a user's modules, as a state dict has them, are known too. ``inputs`` are what the data decides of the
    model. Raises ConfigurationError, naming one, when ``tensors`` are not its parameters.
    """
    model = models.build(recipe.model, recipe.precision.computes, **inputs)
    names = _tensor_names(model, [tensor.name for tensor in tensors])
    parameters = {names[item.name]: item for item in tensors if item.kind == PARAMETERS and item.name in names}
    for segment in model.layout.segments:
        stored, shape = parameters.pop(segment.key, None), segment.spec.shape
        if stored is None:
            raise ConfigurationError(
                f"{segment.key} is missing, a tensor of shape {list(shape)} of the recipe's model; rename the tensors "
                "as `hpcdist checkpoint show --tensors` lists those of a run, or change [model]"
            )
        if stored.shape != shape:
            raise ConfigurationError(
                f"{segment.key} has the shape {list(stored.shape)}, the recipe's model {list(shape)}; change [model]"
            )
    if parameters:
        raise ConfigurationError(
            f"{next(iter(parameters))} is no tensor of the recipe's model; change [model], or rename it"
        )
    return names


def _tensor_names(model: Model, names: Sequence[str]) -> dict[str, str]:
    """Return the key of each tensor by its name in a file: the same, or that of the module's tensor of this name."""
    keys = {segment.spec.name: segment.key for segment in model.layout.segments}
    if len(keys) < len(model.layout.segments) or not set(keys) <= set(names) or set(keys.values()) <= set(names):
        return {name: name for name in names}
    tied = {name for stage in model.stages for name in stage.tied}  # values of another one, under a second name
    return {name: keys.get(name, name) for name in names if name not in tied}
