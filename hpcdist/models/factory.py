"""Models that a recipe imports: a function of the user makes them."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model


def make(config: ModelConfig, dtype: str, inputs: Mapping[str, int]) -> Model:
    """Return the model that ``config.factory`` makes of ``inputs``, what the data decides (local).

    Raises ConfigurationError where there is no such function, or it makes something else or a model of another type
    than ``dtype``; what it raises itself is passed on.
    """
    if config.kind == "given":
        raise ConfigurationError(
            "model.kind = 'given' is the model of a script, which made this run and has it; run that, or name the "
            "function that makes the model: model.kind = 'import', model.factory = 'file.py:function'"
        )
    function = _function(config.factory)
    try:
        with contextlib.suppress(ValueError):  # compiled ones need not tell what they take
            inspect.signature(function).bind(**inputs)
    except TypeError as error:
        given = ", ".join(f"{name}={value}" for name, value in inputs.items())
        raise ConfigurationError(
            f"model.factory = {config.factory!r} cannot be called with what this data decides, {given}: {error}; give "
            "the function these parameters, or **inputs"
        ) from None
    made = function(**inputs)
    if not isinstance(made, Model):
        raise ConfigurationError(
            f"model.factory = {config.factory!r} returned a {type(made).__name__}; return what "
            "`hpcdist.adapters.torch.wrap` or `hpcdist.adapters.jax.wrap` makes of your model"
        )
    if made.dtype.name != dtype:
        raise ConfigurationError(
            f"model.factory = {config.factory!r} returned a model of {made.dtype.name}, and precision.mode wants "
            f"{dtype}; convert the model, or change the mode"
        )
    return made


def _function(named: str) -> Callable[..., Any]:
    place, colon, name = named.rpartition(":")
    if not colon or not place or not name:
        raise ConfigurationError(f"model.factory = {named!r}; write 'file.py:function' or 'package.module:function'")
    module = _of_file(Path(place)) if place.endswith(".py") else _of_name(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"model.factory = {named!r}: {place} has no function called {name}")
    found: Callable[..., Any] = function
    return found


def _of_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"model.factory: there is no module {name}; set PYTHONPATH, or name a file: 'path/to/model.py:function'"
            ) from None
        raise


def _of_file(path: Path) -> ModuleType:
    name = f"hpcdist_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"model.factory: there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes in it can be found by their module
    spec.loader.exec_module(module)
    return module
