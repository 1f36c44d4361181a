"""Import of a foreign checkpoint: a new run directory with a recipe whose model has the checkpoint's tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcdist import models
from hpcdist.checkpoint.convert.huggingface import SETTINGS, HuggingFaceDirectory, copy_settings
from hpcdist.checkpoint.convert.importing import ImportedCheckpoint, import_checkpoint
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.comm.threads.communicator import solo
from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import TRANSFORMERS
from hpcdist.models.model import Model
from hpcdist.reporting import atomic
from hpcdist.training import data
from hpcdist.training.data.source import usable_inputs
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe


def prepare_imported_run(
    run_dir: Path, recipe: Recipe, tensors: Sequence[StoredTensor], inputs: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, str]]:
    """Create the run directory ``run_dir`` with a recipe for imported ``tensors``. Raises HpcdistError.

    ``inputs``: model sizes stored with the tensors. Return ({name of a model size that depends on the data: size},
    {tensor name in the file: tensor name in hpcdist}).
    """
    decided = _model_inputs(recipe, inputs)
    keys = match_tensors(recipe, tensors, decided)
    stored = run_dir / RECIPE_FILE
    if stored.exists():
        raise ConfigurationError(f"{stored} exists already; choose another run directory")
    atomic.save(stored, recipes.dump(recipe), parents=True)
    return decided, keys


def import_directory(
    source: Path, run_dir: Path, path: Path | None, overrides: Sequence[str], step: int | None
) -> ImportedCheckpoint:
    """Import the Hugging Face directory ``source`` as the first checkpoint of a run, with a recipe of its model.

    ``path``: recipe file, or None. ``overrides``: values of --set. ``step``: step number, or None for 0. The tokenizer
    files are copied to the run directory ``run_dir``. Raises HpcdistError.
    """
    recipe = recipes.load(path, [*overrides, f"run.init_from={source.absolute()}"]).recipe
    recipe = replace(recipe, run=replace(recipe.run, init_from=""))
    opens = partial(HuggingFaceDirectory, dtype=recipe.precision.computes)
    with opens(source) as directory:
        directory.check_model(recipe.model)
        inputs, keys = prepare_imported_run(run_dir, recipe, directory.tensors, {})
    copy_settings(source, run_dir / SETTINGS)
    return import_checkpoint(source, run_dir, step, inputs, keys, opens)


def _model_inputs(recipe: Recipe, inputs: Mapping[str, Any]) -> dict[str, int]:
    usable = usable_inputs(inputs)
    if usable:
        return usable
    if recipe.model.kind in TRANSFORMERS:
        return {"context": recipe.data.context}
    return data.open_source(recipe.data, recipe.model, solo(), digests=False).inputs


def match_tensors(recipe: Recipe, tensors: Sequence[StoredTensor], inputs: Mapping[str, int]) -> dict[str, str]:
    """Return {tensor name in the file: tensor name in the model of ``recipe``}. Raises ConfigurationError.

    ``tensors``: tensors in the file. ``inputs``: model sizes that depend on the data.
    """
    # Names of a user model's state dict are also recognised.
    model = models.build(recipe.model, recipe.precision.computes, **inputs)
    names = _tensor_names(model, [tensor.name for tensor in tensors])
    parameters = {names[item.name]: item for item in tensors if item.kind == PARAMETERS and item.name in names}
    for segment in model.layout.segments:
        stored, shape = parameters.pop(segment.key, None), segment.spec.shape
        if stored is None:
            raise ConfigurationError(
                f"the file lacks {segment.key}, a tensor of shape {list(shape)} in the recipe's model; use the tensor "
                "names that `hpcdist checkpoint show --tensors` lists for a run, or change section [model]"
            )
        if stored.shape != shape:
            raise ConfigurationError(
                f"{segment.key} has the shape {list(stored.shape)} in the file, but {list(shape)} in the recipe's "
                "model; change section [model]"
            )
    if parameters:
        raise ConfigurationError(
            f"the file has the tensor {next(iter(parameters))}, which is not in the recipe's model; change section "
            "[model], or rename the tensor"
        )
    return names


def _tensor_names(model: Model, names: Sequence[str]) -> dict[str, str]:
    keys = {segment.spec.name: segment.key for segment in model.layout.segments}
    if len(keys) < len(model.layout.segments) or not set(keys) <= set(names) or set(keys.values()) <= set(names):
        return {name: name for name in names}
    tied = {name for stage in model.stages for name in stage.tied}  # second names of other tensors
    return {name: keys.get(name, name) for name in names if name not in tied}
