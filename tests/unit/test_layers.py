"""The house stands: imports go down only, each foreign library has one door, and no module outgrows its budget."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdist

ROOT = Path(hpcdist.__file__).parent
# An installed package holds slurm/ too, in batch/templates: its recipes for Spack are data, not modules.
MODULES = sorted(path for path in ROOT.rglob("*.py") if "templates" not in path.relative_to(ROOT).parts)

FLOORS = {
    "arrays": 0,
    "errors": 0,
    "reporting": 0,
    "comm": 1,
    "hdf5": 1,
    "collectives": 2,
    "models": 3,
    "optim": 3,
    "compression": 3,
    "adapters": 3.5,  # other libraries' models as models of the house
    "strategies": 4,
    "checkpoint": 5,
    "energy": 5,
    "telemetry": 5,
    "planner": 5,
    "batch": 5,
    "bench": 5,
    "training": 6,
    "cli": 7,
}
EVERYWHERE = {"errors"}  # floor 0 beside arrays: whoever raises needs it

# Foreign library -> the one place, a package or a module, that imports it.
DOORS = {
    "mpi4py": "hpcdist.comm",
    "h5py": "hpcdist.hdf5",
    "cupy": "hpcdist.arrays.gpu.device",
    "cupyx": "hpcdist.arrays.gpu.device",
    "numba": "hpcdist.arrays.jit",
    "llvmlite": "hpcdist.arrays",
    "pynvml": "hpcdist.energy",
    "click": "hpcdist.cli",
    "jinja2": "hpcdist.batch",
}
# None of these may be loaded by importing a module of hpcdist: they start MPI or CUDA, or cost a second.
LAZY = (
    "mpi4py",
    "cupy",
    "numba",
    "llvmlite",
    "pynvml",
    "matplotlib",
    "torch",
    "jax",
    "nvtx",
    "prometheus_client",
    "tensorboardX",
)

MODULE_LINES = 450
FUNCTION_LINES = 60


def name_of(path: Path) -> str:
    parts = ["hpcdist", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import in the file: also those in functions, for type checkers, and by name."""
    tree = ast.parse(path.read_text())
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from hpcdist import comm` imports hpcdist.comm, and `from hpcdist.comm import start` a module of it
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called in ("importlib.import_module", "import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def house_of(module: str) -> str | None:
    """Return the package of the house that a module belongs to; None for one outside, or hpcdist itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "hpcdist" and len(parts) > 1 and parts[1] in FLOORS else None


def test_every_package_has_a_floor():
    assert MODULES
    packages = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in MODULES}
    assert packages - {"__init__", "__main__"} <= set(FLOORS), "give the new package a floor in the design, then here"


def climbing(path: Path) -> list[str]:
    """Return the imports of the file that go up, or sideways to another package."""
    own = house_of(name_of(path))
    if own is None:  # hpcdist/__init__.py chooses what numpy computes with, __main__.py imports the command line
        allowed = {"cli", "comm"} if path.name == "__main__.py" else {"arrays"}
    else:
        allowed = {own, *EVERYWHERE, *(other for other, floor in FLOORS.items() if floor < FLOORS[own])}
    found = [(line, module) for line, module in imports(path) if house_of(module) not in {None, *allowed}]
    return [f"{path}:{line} imports {module}" for line, module in found]


def through_the_wall(path: Path) -> list[str]:
    """Return the imports of foreign libraries that have their door elsewhere."""
    own, found = name_of(path), []
    for line, module in imports(path):
        door = DOORS.get(module.split(".")[0], own)
        if own != door and not own.startswith(door + "."):
            found.append(f"{path}:{line} imports {module}: only {door} may")
    return found


def test_imports_go_down_only():
    assert [line for path in MODULES for line in climbing(path)] == []


def test_foreign_libraries_have_one_door():
    assert [line for path in MODULES for line in through_the_wall(path)] == []


def test_size_budget():
    over = []
    for path in MODULES:
        text = path.read_text()
        if text.count("\n") > MODULE_LINES:
            over.append(f"{path}: {text.count(chr(10))} lines; what are its two subjects?")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    over.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert over == []


def loaded_after(statement: str, watched: tuple[str, ...]) -> list[str]:
    """Return which of ``watched`` a fresh interpreter has loaded after ``statement``."""
    code = f"import sys\n{statement}\nprint(*[name for name in {watched!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_every_module_starts_nothing():
    names = [name_of(path) for path in MODULES if path.name != "__main__.py"]
    statement = "\n".join(f"import {name}" for name in names)
    assert loaded_after(statement, LAZY) == []


def test_importing_hpcdist_loads_nothing():
    assert loaded_after("import hpcdist", ("numpy", "click", "msgspec", "h5py", *LAZY)) == []


CONFIGS = [name_of(path) for path in MODULES if path.name == "config.py" and path.parent.name != "cli"]


@pytest.mark.parametrize(
    "module",
    [*CONFIGS, "hpcdist.training.recipe.recipe", "hpcdist.comm.launch.environment", "hpcdist.comm.launch.mpirun"],
)
def test_what_a_login_node_imports_is_light(module):
    """A recipe is read, and a job described, where MPI_Init would abort."""
    assert loaded_after(f"import {module}", ("h5py", *LAZY)) == []


def test_the_walk_sees_forbidden_imports(tmp_path, monkeypatch):
    """The test of the test: each way to import is found."""
    package = tmp_path / "hpcdist" / "arrays"
    package.mkdir(parents=True)
    module = package / "wrong.py"
    module.write_text(
        "from typing import TYPE_CHECKING\nfrom ..comm import start\nfrom hpcdist import optim\n"
        "if TYPE_CHECKING:\n    from hpcdist.cli.main import main\n"
        "def late():\n    import mpi4py.MPI\n    importlib.import_module('h5py')\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path / "hpcdist")
    found = {module for _, module in imports(module)}
    assert found == {
        "typing.TYPE_CHECKING",
        "hpcdist.comm.start",
        "hpcdist.optim",
        "hpcdist.cli.main.main",
        "mpi4py.MPI",
        "h5py",
    }
    assert climbing(module) == [
        f"{module}:{line} imports {name}"
        for line, name in ((2, "hpcdist.comm.start"), (3, "hpcdist.optim"), (5, "hpcdist.cli.main.main"))
    ]
    assert [line.split(" imports ")[1] for line in through_the_wall(module)] == [
        "mpi4py.MPI: only hpcdist.comm may",
        "h5py: only hpcdist.hdf5 may",
    ]
