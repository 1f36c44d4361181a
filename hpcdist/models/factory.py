"""Import of models that a function of the user makes, and the seal of its file.

A recipe may come from somebody else, and making its model runs code. So a training seals the file of its factory: a
digest of path and content, keyed with 32 random bytes that only this user can read. A later command on the run executes
the factory where the seal is that of the training, and asks the user otherwise: neither a changed file nor a run
directory that somebody else has made can carry a valid seal. Modules that the file imports are not part of it.
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
    """Return the model that ``config.factory`` makes of ``inputs``, what the data decides (local).

    Raises ConfigurationError where there is no such function, or it makes something else or a model of another type
    than ``dtype``; what it raises itself is passed on.
    """
    if config.kind == "given":
        raise ConfigurationError(
            "model.kind = 'given' is the model of a script, which made this run and has it; run that, or name the "
            "function that makes the model: model.kind = 'import', model.factory = 'file.py:function'"
        )
    with _siblings(config.factory):
        model = _call(config, inputs)
    if not isinstance(model, Model):
        raise ConfigurationError(
            f"model.factory = {config.factory!r} returned a {type(model).__name__}; return what "
            "`hpcdist.adapters.torch.wrap` or `hpcdist.adapters.jax.wrap` makes of your model"
        )
    if model.dtype.name != dtype:
        raise ConfigurationError(
            f"model.factory = {config.factory!r} returned a model of {model.dtype.name}, and precision.mode wants "
            f"{dtype}; convert the model, or change the mode"
        )
    return model


def seal(factory: str) -> str:
    """Return the seal of the file of ``factory``; "" where there is no such file, or no place for a key (local).

    Nothing of the file, or of packages above it, is executed.
    """
    try:
        path = _file_of(factory)
        key = _key(_state_folder())
        content = b"" if path is None else path.read_bytes()
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a user without a home
        return ""
    if path is None or len(key) != _KEY_BYTES:
        return ""
    return hashlib.blake2b(os.fsencode(path) + b"\0" + content, key=key, digest_size=16).hexdigest()


def is_sealed(factory: str, known: object) -> bool:
    """Whether ``known``, what a checkpoint says, is the seal of the file of ``factory`` as it is now (local)."""
    now = seal(factory)
    return bool(now) and isinstance(known, str) and hmac.compare_digest(now.encode(), known.encode())


def _file_of(factory: str) -> Path | None:
    """Return the absolute path of the file that ``factory`` names, None where there is none."""
    place = factory.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).resolve()
    top, *below = place.split(".")
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
    """Return the key of this user, made where there is none. Raises OSError."""
    path = folder / KEY_FILE
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f"{KEY_FILE}.{os.urandom(8).hex()}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
        try:
            with contextlib.suppress(FileExistsError):  # another training was first: its key counts
                os.link(new, path)
        finally:
            atomic.discard(new)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        state = os.fstat(file.fileno())
        if state.st_uid != os.geteuid() or state.st_mode & 0o077:
            return b""  # somebody else may have made it, or read it
        return file.read(_KEY_BYTES + 1)


@contextlib.contextmanager
def _siblings(named: str) -> Iterator[None]:
    """Let a file that is named import the modules beside it, as the script of a Python process does.

    Meanwhile its folder comes first on `sys.path`. Afterwards it comes last, for imports within a forward: there no
    module of the user takes the place of one that hpcdist loads late.
    """
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
            sys.path.append(folder)


def _call(config: ModelConfig, inputs: Mapping[str, int]) -> Any:
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
    return function(**inputs)


def _function(named: str) -> Callable[..., Any]:
    place, colon, name = named.rpartition(":")
    if not colon or not place or not name:
        raise ConfigurationError(f"model.factory = {named!r}; write 'file.py:function' or 'package.module:function'")
    module = _of_file(Path(place)) if place.endswith(".py") else _of_name(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"model.factory = {named!r}: {place} has no function called {name}")
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
        raise ConfigurationError(f"model.factory: there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes in it can be found by their module
    spec.loader.exec_module(module)
    return module
