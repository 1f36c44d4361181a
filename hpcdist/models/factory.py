"""Import of models made by a user's function, and the seal (a keyed hash) of the file with this function.

Building the model of a recipe runs the user's code. So a command runs the function without a question only if the file
has the seal that was stored during the training. Imported modules are not sealed.
"""

import contextlib
import hashlib
import hmac
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.reporting import atomic

KEY_FILE: Final = "factory.key"  # in $XDG_STATE_HOME/hpcdist
_KEY_BYTES: Final = 32


def make(config: ModelConfig, dtype: str, inputs: Mapping[str, int]) -> Model:
    """Return the model that ``config.factory(**inputs)`` makes. Raises ConfigurationError if the model is invalid."""
    if config.kind == "given":
        raise ConfigurationError(
            "model.kind = 'given' is only for a model that a script passes; run that script, or name a function that "
            "returns the model: model.kind = 'import', model.factory = 'file.py:function'"
        )
    with _siblings(config.factory):
        model = _call(config, inputs)
    if not isinstance(model, Model):
        raise ConfigurationError(
            f"model.factory = {config.factory!r} returned a {type(model).__name__}; return the result of "
            "`hpcdist.adapters.torch.wrap` or `hpcdist.adapters.jax.wrap`"
        )
    if model.dtype.name != dtype:
        raise ConfigurationError(
            f"model.factory = {config.factory!r} returned a model of {model.dtype.name}, but precision.mode requires "
            f"{dtype}; convert the model, or change precision.mode"
        )
    return model


def seal(factory: str) -> str:
    """Return a keyed hash of the path and content of the file of ``factory``, or "" if no hash can be computed."""
    try:
        path = _file_of(factory)
        key = _key(_state_folder())
        content = b"" if path is None else path.read_bytes()
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a user without a home
        return ""
    if path is None or len(key) != _KEY_BYTES:
        return ""
    return hashlib.blake2b(os.fsencode(path) + b"\0" + content, key=key, digest_size=16).hexdigest()


def is_sealed(factory: str, stored: object) -> bool:
    """Return True if the file of ``factory`` is unchanged since `seal` returned ``stored``. Local."""
    now = seal(factory)
    return bool(now) and isinstance(stored, str) and hmac.compare_digest(now.encode(), stored.encode())


def _file_of(factory: str) -> Path | None:
    module = factory.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module).resolve()
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top) if top else None  # executes nothing for a name without a dot
    name = top
    for part in below:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return Path(spec.origin).resolve() if spec is not None and spec.has_location and spec.origin else None


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "hpcdist"


def _key(folder: Path) -> bytes:
    path = folder / KEY_FILE
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f"{KEY_FILE}.{os.urandom(8).hex()}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
        try:
            with contextlib.suppress(FileExistsError):  # another training was first: use its key
                os.link(new, path)
        finally:
            atomic.discard(new)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        state = os.fstat(file.fileno())
        if state.st_uid != os.geteuid() or state.st_mode & 0o077:
            return b""  # another user may have created or read it
        return file.read(_KEY_BYTES + 1)


@contextlib.contextmanager
def _siblings(named: str) -> Iterator[None]:
    file = Path(named.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        yield
        return
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)  # last: the user's modules must not replace modules that hpcdist imports later


def _call(config: ModelConfig, inputs: Mapping[str, int]) -> Any:
    function = _function(config.factory)
    try:
        with contextlib.suppress(ValueError):  # compiled functions may have no signature
            inspect.signature(function).bind(**inputs)
    except TypeError as error:
        sizes = ", ".join(f"{name}={value}" for name, value in inputs.items())
        raise ConfigurationError(
            f"model.factory = {config.factory!r} cannot be called with the keywords {sizes}: {error}; add these "
            "parameters to the function, or **inputs"
        ) from None
    return function(**inputs)


def _function(named: str) -> Callable[..., Any]:
    module_name, colon, name = named.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(
            f"model.factory = {named!r} has the wrong form; write 'file.py:function' or 'package.module:function'"
        )
    module = _of_file(Path(module_name)) if module_name.endswith(".py") else _of_name(module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"model.factory = {named!r}: {module_name} has no function {name}; define {name}")
    factory: Callable[..., Any] = function
    return factory


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
        raise ConfigurationError(f"model.factory: the file {path} does not exist; correct the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and dataclasses look classes up by module
    spec.loader.exec_module(module)
    return module
