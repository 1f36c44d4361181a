"""Requirements of a recipe before a job waits for its nodes: degrees of parallelism, and optional packages.

Packages are found by name: none is imported but the filters of data in HDF5, since only HDF5 knows which of them are
installed. Called by `hpcdist submit` and `hpcdist doctor`.
"""

import ast
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from hpcdist.reporting import regular

if TYPE_CHECKING:
    from hpcdist.strategies.core.grid import ProcessGrid
    from hpcdist.strategies.parameter_server.partition import Roles
    from hpcdist.training.recipe.config import DataConfig
    from hpcdist.training.recipe.recipe import Recipe


def degrees_equation(recipe: "Recipe", world: int) -> str:
    """Return the degrees of parallelism of ``recipe`` on ``world`` ranks, or raise ConfigurationError."""
    grid = grid_of_recipe(recipe, world)
    if recipe.parallel.strategy == "gossip":
        from hpcdist.strategies.decentralised import gossip  # numpy takes its time

        gossip.build(recipe.decentralised.graph, grid.data, recipe.decentralised.edges)
    product = f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor} x context {grid.context}"
    product += f" (experts over {grid.expert})" if grid.expert > 1 else ""
    return f"{world} = {product}" + (f" + servers {world - grid.size}" if world != grid.size else "")


def grid_of_recipe(recipe: "Recipe", world: int) -> "ProcessGrid":
    """Return the grid of ``recipe`` on ``world`` ranks, or raise ConfigurationError; numpy is not needed."""
    from hpcdist.strategies.parameter_server.partition import Roles

    grid, roles = grid_and_roles(recipe, world)
    if recipe.parallel.strategy == "parameter_server" and roles is None:
        Roles.of(recipe.parameter_server, grid.data)
    return grid


def grid_and_roles(recipe: "Recipe", world: int, *, chaos: bool = True) -> "tuple[ProcessGrid, Roles | None]":
    """Return the grid of ``recipe`` on ``world`` ranks, and the roles of ranks where only some serve (local).

    Raises ConfigurationError where the recipe, with its ``chaos`` or without it, does not fit the ranks. In a product
    with parameter servers every rank computes, and serves what its replicas share (`RankContext.members`): there are
    no roles then.
    """
    from hpcdist.strategies.core.grid import ProcessGrid
    from hpcdist.strategies.parameter_server.partition import Roles
    from hpcdist.strategies.zero.config import STAGES

    parallel = recipe.parallel
    roles = Roles.of(recipe.parameter_server, world) if parallel.has_roles else None
    servers = world - len(roles.workers) if roles else 0
    degrees = {axis: getattr(parallel, axis) for axis in ("data", "pipeline", "tensor", "context", "expert")}
    grid = ProcessGrid.of(world, **degrees, servers=servers)
    recipe.check_world(grid.data)
    if chaos:
        recipe.chaos.check_world(world, world - servers, lock_step=recipe.parameter_server.lock_step)
    if parallel.strategy in STAGES:
        recipe.zero.degrees(STAGES[parallel.strategy], grid.replicas)
    return grid, roles


MOST_BYTES: Final = 1 << 20  # of the file of a model that are parsed
_PATH_HOOKS: Final = ("sys.path", "sys.meta_path", "site.addsitedir")  # code with them changes where modules are found


class Requirement(NamedTuple):
    """Requirement: a module, the value of the recipe that needs it, and the cure where it is missing."""

    module: str
    value: str
    cure: str


_CUPY: Final = Requirement("cupy", "run.device = 'gpu'", "pip install 'hpcdist[cuda12x]' (or 13x)")
_TORCH_BACKEND: Final = re.compile(
    rb"^\s*(import\s+hpcdist\.torch|from\s+hpcdist(\.|\s+import\s+)torch)\b", re.MULTILINE
)


def requirements(recipe: "Recipe") -> Iterator[Requirement]:
    """Yield the modules that ``recipe`` needs beyond the dependencies of hpcdist."""
    telemetry = recipe.telemetry
    if recipe.run.device == "gpu":
        yield _CUPY
    if telemetry.prometheus != "off":
        value = f"telemetry.prometheus = {telemetry.prometheus!r}"
        yield Requirement("prometheus_client", value, "pip install 'hpcdist[prometheus]', or set it to 'off'")
    if telemetry.tensorboard:
        cure = "pip install 'hpcdist[tensorboard]', or set it to false"
        yield Requirement("tensorboardX", "telemetry.tensorboard = true", cure)
    if telemetry.nvtx:
        yield Requirement("nvtx", "telemetry.nvtx = true", "pip install 'hpcdist[trace]', or set it to false")
    if recipe.model.factory:
        yield from _factory_requirements(recipe.model.factory)


def missing_packages(recipe: "Recipe") -> list[str]:
    """Return a line for each module that ``recipe`` needs and this Python does not find (local)."""
    absent = [
        f"{need.value} needs the module {need.module}, which {sys.executable} does not have: {need.cure}"
        for need in dict.fromkeys(requirements(recipe))
        if not _is_importable(need.module)
    ]
    return absent + _missing_hdf5_filters(recipe.data)


def missing_for_gpu_tensors(program: Sequence[str]) -> list[str]:
    """Return a line if a script of ``program`` imports hpcdist.torch and this Python has no cupy (local).

    The backend needs cupy for tensors on a GPU, not for tensors in host memory.
    """
    for word in program:
        if word.endswith(".py") and _imports_torch_backend(Path(word)) and not _is_importable(_CUPY.module):
            return [f"{word}: tensors on GPUs need the module cupy, which {sys.executable} does not have: {_CUPY.cure}"]
    return []


def _imports_torch_backend(script: Path) -> bool:
    try:
        with open(regular.open_regular(script), "rb") as file:
            return _TORCH_BACKEND.search(file.read(MOST_BYTES)) is not None
    except OSError:
        return False


def _missing_hdf5_filters(data: "DataConfig") -> list[str]:
    """Return the missing filters of the data, where its file is visible from here."""
    for place in filter(None, (data.staged, data.path)):
        if _is_hdf5(Path(place)):
            from hpcdist.training.data import files

            return files.missing_filters(Path(place))
    return []


def _is_hdf5(path: Path) -> bool:
    """Whether a file begins as HDF5 does, behind a user block or without one."""
    try:
        with open(regular.open_regular(path), "rb") as file:
            heads = [file.seek(offset) is not None and file.read(8) for offset in (0, 512, 1024, 2048)]
    except OSError:
        return False
    return b"\x89HDF\r\n\x1a\n" in heads


def _is_importable(module: str) -> bool:
    """Whether ``module`` can be found; its parent package is not imported for that."""
    name = module.partition(".")[0]
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _factory_requirements(named: str) -> Iterator[Requirement]:
    """Yield the modules that the file of a model, or the package it is in, needs to be imported."""
    place = named.rpartition(":")[0]
    value, cure = f"model.factory = {named!r}", "install it, or set PYTHONPATH"
    if not place.endswith(".py"):
        if place:
            yield Requirement(place.partition(".")[0], value, cure)
        return
    path = Path(place)
    for module in _top_level_imports(path):
        beside = importlib.machinery.PathFinder.find_spec(module, [str(path.resolve().parent)])
        if beside is None:
            extra = f"pip install 'hpcdist[{module}]'" if module in ("jax", "torch") else cure
            yield Requirement(module, value, extra)


def _top_level_imports(path: Path) -> list[str]:
    """Return the packages that the module in ``path`` imports in any case, none where it cannot be read."""
    try:
        with path.open("rb") as file:
            tree = ast.parse(file.read(MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the training raises the error
    if any(isinstance(node, ast.Attribute) and ast.unparse(node) in _PATH_HOOKS for node in ast.walk(tree)):
        return []  # the file changes the search path itself
    names: list[str] = []
    for statement in tree.body:  # what is in a `try`, a function or a branch need not be there
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            names.append(statement.module)
    return list(dict.fromkeys(name.partition(".")[0] for name in names))
