"""Requirements of a recipe, checked before a job waits for nodes.

Packages are found by name without an import, except the HDF5 filters of data.
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
    """Return a text such as "8 = data 4 x pipeline 2" for the parallel sizes of ``recipe`` on ``world`` ranks.

    Raises ConfigurationError if the sizes do not fit the number of ranks.
    """
    grid = grid_of_recipe(recipe, world)
    if recipe.parallel.strategy == "gossip":
        from hpcdist.strategies.decentralised import gossip  # imports numpy, which is slow

        gossip.build(recipe.decentralised.graph, grid.data, recipe.decentralised.edges)
    product = f"data {grid.data} x pipeline {grid.pipeline} x tensor {grid.tensor} x context {grid.context}"
    product += f" (experts over {grid.expert})" if grid.expert > 1 else ""
    return f"{world} = {product}" + (f" + servers {world - grid.size}" if world != grid.size else "")


def grid_of_recipe(recipe: "Recipe", world: int) -> "ProcessGrid":
    """Return the process grid of ``recipe`` on ``world`` ranks. Raises ConfigurationError if the sizes do not fit."""
    from hpcdist.strategies.parameter_server.partition import Roles

    grid, roles = grid_and_roles(recipe, world)
    if recipe.parallel.strategy == "parameter_server" and roles is None:
        Roles.of(recipe.parameter_server, grid.data)
    return grid


def grid_and_roles(recipe: "Recipe", world: int, *, chaos: bool = True) -> "tuple[ProcessGrid, Roles | None]":
    """Return (process grid of ``recipe`` on ``world`` ranks, `Roles` of workers and parameter servers, or None).

    The roles are None without parameter servers, or if every rank computes and serves. Raises ConfigurationError if the
    recipe does not fit. ``chaos`` True: the ranks in section [chaos] are also checked.
    """
    from hpcdist.strategies.core.grid import ProcessGrid
    from hpcdist.strategies.data.config import STAGES
    from hpcdist.strategies.parameter_server.partition import Roles

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


MOST_BYTES: Final = 1 << 20  # number of bytes of a source file that are parsed
_PATH_HOOKS: Final = ("sys.path", "sys.meta_path", "site.addsitedir")  # code with these names changes the module search


class Requirement(NamedTuple):
    """A required Python module, the recipe value that needs the module, and advice to users who lack the module."""

    module: str
    value: str
    cure: str


_CUPY: Final = Requirement("cupy", "run.device = 'gpu'", "pip install 'hpcdist[cuda12x]' (or 13x)")
_TORCH_BACKEND: Final = re.compile(
    rb"^\s*(import\s+hpcdist\.torch|from\s+hpcdist(\.|\s+import\s+)torch)\b", re.MULTILINE
)


def requirements(recipe: "Recipe") -> Iterator[Requirement]:
    """Yield a `Requirement` for each Python module that ``recipe`` needs beyond the dependencies of hpcdist."""
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
    """Return a list of messages about missing Python modules and HDF5 filters that ``recipe`` needs. Local."""
    absent = [
        f"{need.value} needs the module {need.module}, which {sys.executable} does not have: {need.cure}"
        for need in dict.fromkeys(requirements(recipe))
        if not _is_importable(need.module)
    ]
    return absent + _missing_hdf5_filters(recipe.data)


def missing_for_gpu_tensors(program: Sequence[str]) -> list[str]:
    """Return [message] if cupy is missing and a script in the command line ``program`` may use GPU tensors, else []."""
    for word in program:
        if word.endswith(".py") and _imports_torch_backend(Path(word)) and not _is_importable(_CUPY.module):
            return [f"{word}: {sys.executable} lacks cupy, so GPU tensors go through host memory: {_CUPY.cure}"]
    return []


def _imports_torch_backend(script: Path) -> bool:
    try:
        with open(regular.open_regular(script), "rb") as file:
            return _TORCH_BACKEND.search(file.read(MOST_BYTES)) is not None
    except OSError:
        return False


def _missing_hdf5_filters(data: "DataConfig") -> list[str]:
    for path in filter(None, (data.staged, *data.paths)):
        if _is_hdf5(Path(path)):
            from hpcdist.training.data import files

            return files.missing_filters(Path(path))
    return []


def _is_hdf5(path: Path) -> bool:
    try:
        with open(regular.open_regular(path), "rb") as file:
            heads = [file.seek(offset) is not None and file.read(8) for offset in (0, 512, 1024, 2048)]
    except OSError:
        return False
    return b"\x89HDF\r\n\x1a\n" in heads


def _is_importable(module: str) -> bool:
    # Looking for the top-level package imports nothing.
    name = module.partition(".")[0]
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _factory_requirements(named: str) -> Iterator[Requirement]:
    location = named.rpartition(":")[0]
    value, cure = f"model.factory = {named!r}", "install it, or set PYTHONPATH"
    if not location.endswith(".py"):
        if location:
            yield Requirement(location.partition(".")[0], value, cure)
        return
    path = Path(location)
    for module in _top_level_imports(path):
        local_module = importlib.machinery.PathFinder.find_spec(module, [str(path.resolve().parent)])
        if local_module is None:
            extra = f"pip install 'hpcdist[{module}]'" if module in ("jax", "torch") else cure
            yield Requirement(module, value, extra)


def _top_level_imports(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            tree = ast.parse(file.read(MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # the training raises the error
    if any(isinstance(node, ast.Attribute) and ast.unparse(node) in _PATH_HOOKS for node in ast.walk(tree)):
        return []  # the file changes the search path itself
    names: list[str] = []
    for statement in tree.body:  # imports in a `try`, a function or a branch may be optional
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            names.append(statement.module)
    return list(dict.fromkeys(name.partition(".")[0] for name in names))
