"""Optional packages that a recipe needs: looked for by name, before a job waits for its nodes.

None is imported but the filters of data in HDF5: which of them are there, only HDF5 knows.
"""

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from hpcdist.reporting import regular

if TYPE_CHECKING:
    from hpcdist.training.config import DataConfig
    from hpcdist.training.recipe import Recipe

MOST_BYTES: Final = 1 << 20  # of a file with a model that is looked at
_PLACES: Final = ("sys.path", "sys.meta_path", "site.addsitedir")  # where modules are looked for


class Need(NamedTuple):
    """A module, the value of the recipe that needs it, and what to do where it is missing."""

    module: str
    value: str
    cure: str


def needs(recipe: "Recipe") -> Iterator[Need]:
    """Yield what ``recipe`` needs beyond what hpcdist is installed with."""
    telemetry = recipe.telemetry
    if recipe.run.device == "gpu":
        yield Need("cupy", "run.device = 'gpu'", "pip install 'hpcdist[cuda12x]' (or 13x)")
    if telemetry.prometheus != "off":
        value = f"telemetry.prometheus = {telemetry.prometheus!r}"
        yield Need("prometheus_client", value, "pip install 'hpcdist[prometheus]', or set it to 'off'")
    if telemetry.tensorboard:
        cure = "pip install 'hpcdist[tensorboard]', or set it to false"
        yield Need("tensorboardX", "telemetry.tensorboard = true", cure)
    if telemetry.nvtx:
        yield Need("nvtx", "telemetry.nvtx = true", "pip install 'hpcdist[trace]', or set it to false")
    if recipe.model.factory:
        yield from _of_factory(recipe.model.factory)


def missing(recipe: "Recipe") -> list[str]:
    """Return a line for each module that ``recipe`` needs and this Python does not find (local)."""
    absent = [
        f"{need.value} needs the module {need.module}, which {sys.executable} does not have: {need.cure}"
        for need in dict.fromkeys(needs(recipe))
        if not _is_found(need.module)
    ]
    return absent + _lacking(recipe.data)


def _lacking(data: "DataConfig") -> list[str]:
    """Return what the data needs to be read, as far as it can be seen from here."""
    for place in filter(None, (data.staged, data.path)):
        if _is_hdf5(Path(place)):
            from hpcdist.training.data import arrays

            return arrays.lacking(Path(place))
    return []


def _is_hdf5(path: Path) -> bool:
    """Whether a file begins as HDF5 does, behind a user block or without one."""
    try:
        with open(regular.open_regular(path), "rb") as file:
            heads = [file.seek(offset) is not None and file.read(8) for offset in (0, 512, 1024, 2048)]
    except OSError:
        return False
    return b"\x89HDF\r\n\x1a\n" in heads


def _is_found(module: str) -> bool:
    """Whether there is such a module; that one above it is not imported to find out."""
    name = module.partition(".")[0]
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _of_factory(named: str) -> Iterator[Need]:
    """Yield the modules that the file of a model, or the package it is in, needs to be imported."""
    place = named.rpartition(":")[0]
    value, cure = f"model.factory = {named!r}", "install it, or set PYTHONPATH"
    if not place.endswith(".py"):
        if place:
            yield Need(place.partition(".")[0], value, cure)
        return
    path = Path(place)
    for module in _imported(path):
        beside = importlib.machinery.PathFinder.find_spec(module, [str(path.resolve().parent)])
        if beside is None:
            extra = f"pip install 'hpcdist[{module}]'" if module in ("jax", "torch") else cure
            yield Need(module, value, extra)


def _imported(path: Path) -> list[str]:
    """Return the packages that the module in ``path`` imports in any case, none where it cannot be read."""
    try:
        with path.open("rb") as file:
            tree = ast.parse(file.read(MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the training says what is wrong with it
    if any(isinstance(node, ast.Attribute) and ast.unparse(node) in _PLACES for node in ast.walk(tree)):
        return []  # it says itself where its modules are
    names: list[str] = []
    for statement in tree.body:  # what is in a `try`, a function or a branch need not be there
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            names.append(statement.module)
    return list(dict.fromkeys(name.partition(".")[0] for name in names))
