"""The rules of the tree: floors, doors, circles, sizes, names, language. A planted fault shows each rule failing."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cached_property
from pathlib import Path

import pytest

import hpcdist
from harness import jobs

FLOORS = {
    "arrays": 0,
    "constants": 0,
    "errors": 0,
    "reporting": 0,
    "comm": 1,
    "hdf5": 1,
    "collectives": 2,
    "models": 3,
    "optim": 3,
    "compression": 3,
    "adapters": 3.5,  # models of PyTorch and JAX, as models of hpcdist
    "strategies": 4,
    "checkpoint": 5,
    "energy": 5,
    "telemetry": 5,
    "planner": 5,
    "batch": 5,
    "bench": 5,
    "training": 6,
    "torch": 6.5,
    "cli": 7,
}
EVERYWHERE = {"constants", "errors"}  # on floor 0 with arrays and reporting, which use them

# Packages of strategies/, lowest first: each imports only packages before it, and the declarations of recipe keys.
STRATEGIES = (
    *("core", "schedule", "context", "tensor", "expert", "pipeline"),
    *("compressed", "data", "parameter_server", "decentralised"),
)
STRATEGY_TYPES = {("core.rank_context", "context.axis")}  # the context of a rank holds an axis of a higher package

# Foreign library -> the one package or module that imports it.
DOORS = {
    "mpi4py": "hpcdist.comm",
    "h5py": "hpcdist.hdf5",
    "cupy": "hpcdist.arrays.gpu.device",
    "cupyx": "hpcdist.arrays.gpu.device",
    "numba": "hpcdist.arrays.jit",
    "llvmlite": "hpcdist.arrays",
    "pynvml": "hpcdist.energy",
    "click": "hpcdist.cli",
    "jinja2": "hpcdist.reporting.template",
}
# Importing a module of hpcdist loads none of these: they start MPI or CUDA, or cost a second.
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
    "wandb",
    "mlflow",
)

STARTING = "hpcdist.torch"  # to be imported is what it is for: it starts MPI and registers the backend

ENTRIES = 15
MODULE_LINES = 450
FUNCTION_LINES = 60
SMALL_LINES = 60
# Modules under SMALL_LINES with a single importer, and why each stands alone.
SMALL: dict[str, str] = {}

CHECKOUT = Path(__file__).parents[2]
# A pronoun or a preposition in the place of a noun or of a standard idiom.
VAGUE = re.compile(
    r"\b(?:those (?:of|that)|that (?:of|which)|the own|is none|behind|beside|None where there is none)\b"
)
QUESTION = re.compile(r"Returns? (?:what|how|where|who|which|whose|why|whether|when)\b")
VAGUE_TEXT = re.compile(r"\b(?:the own|is none)\b")
VAGUE_NAMES = {"own", "found", "told", "said", "wanted", "known"}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTION

# Words that name no subject; of a function "Do the same" is an imperative.
RELATIVE = {"What", "Which", "Whose", "How", "Where", "Why", "When", "Who", "Are", "Do", "Is"}
IMPERATIVE = {ast.FunctionDef: {"Do"}, ast.AsyncFunctionDef: {"Do"}}


class Tree:
    """The modules of a package in a folder, and what each imports.

    Args:
        root: The folder of the package; its name is the package's.
    """

    def __init__(self, root):
        self.root = root
        # An installed package holds slurm/ too, in batch/slurm: its recipes for Spack are data, not modules.
        # Examples of the documentation are programs of a user.
        apart = root / "batch" / "slurm", root / "docs"
        self.paths = sorted(path for path in root.rglob("*.py") if not any(map(path.is_relative_to, apart)))

    def name_of(self, path):
        """Return the dotted name of the module in a file."""
        parts = [self.root.name, *path.relative_to(self.root).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def trees(self):
        """The syntax tree of each file."""
        return {path: ast.parse(path.read_text()) for path in self.paths}

    @cached_property
    def modules(self):
        """The file of each module, packages included, by dotted name."""
        return {self.name_of(path): path for path in self.paths}

    def imports(self, path):
        """Yield (line, name) of every import in a file: also those in functions, for type checkers, and by string."""
        package = self.name_of(path) if path.name == "__init__.py" else self.name_of(path).rpartition(".")[0]
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*parents, *([node.module] if node.module else [])])
                # `from hpcdist import comm` imports hpcdist.comm, and `from hpcdist.comm import start` a module of it
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            elif (
                isinstance(node, ast.Call)
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            ):
                yield node.lineno, str(node.args[0].value)

    @cached_property
    def graph(self):
        """The modules of the package that each module imports."""
        graph = {}
        for name, path in self.modules.items():
            targets = {self.module_of(imported) for _, imported in self.imports(path)}
            graph[name] = {target for target in targets if target is not None} - {name}
        return graph

    def module_of(self, imported):
        """Return the module that an imported name is, or is in; None outside of the package."""
        while imported not in self.modules:
            imported, dot, _ = imported.rpartition(".")
            if not dot:
                return None
        return imported

    def package_of(self, module):
        """Return the sub-package with a floor that a module belongs to; None for one outside, or the top itself."""
        parts = module.split(".")
        return parts[1] if parts[0] == self.root.name and len(parts) > 1 and parts[1] in FLOORS else None


def upward_imports(tree):
    """Yield the imports that go to a higher floor, or to another package on the same one."""
    for path in tree.paths:
        package = tree.package_of(tree.name_of(path))
        if package is None:  # __init__.py sets what numpy computes with, __main__.py imports the command line
            allowed = {"cli", "comm"} if path.name == "__main__.py" else {"arrays"}
        else:
            allowed = {package, *EVERYWHERE, *(other for other, floor in FLOORS.items() if floor < FLOORS[package])}
        for line, module in tree.imports(path):
            if tree.package_of(module) not in {None, *allowed}:
                yield f"{path}:{line} imports {module}"


def upward_strategies(tree):
    """Yield the imports inside strategies/ that go to a higher package."""
    prefix = f"{tree.root.name}.strategies."
    rank = {name: number for number, name in enumerate(STRATEGIES)}
    for module, targets in sorted(tree.graph.items()):
        for target in sorted(targets):
            names = module.removeprefix(prefix), target.removeprefix(prefix)
            below, above = (name.partition(".")[0] for name in names)
            if below not in rank or above not in rank or names in STRATEGY_TYPES or names[1].endswith(".config"):
                continue
            if rank[above] > rank[below]:
                yield f"{module} imports {target}"


def foreign_imports(tree):
    """Yield the imports of foreign libraries outside of their door."""
    for path in tree.paths:
        name = tree.name_of(path)
        for line, module in tree.imports(path):
            door = DOORS.get(module.split(".")[0], name)
            if name != door and not name.startswith(door + "."):
                yield f"{path}:{line} imports {module}: only {door} may"


def circles(tree):
    """Yield the strongly connected components of the import graph with more than one module (Tarjan, 1972)."""
    index = {}
    low = {}
    stack = []
    result = []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(tree.graph[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                result.append("a circle of imports: " + ", ".join(sorted(component)))

    for module in sorted(tree.graph):
        if module not in index:
            visit(module)
    yield from sorted(result)


def large_folders(tree):
    """Yield the folders with more entries than one takes in at a glance."""
    for folder in sorted({path.parent for path in tree.paths} - {tree.root}):  # the root has a package for each floor
        entries = [
            entry
            for entry in folder.iterdir()
            if entry.name != "__init__.py" and not entry.name.startswith((".", "__pycache__"))
        ]
        if len(entries) > ENTRIES:
            yield f"{folder}: {len(entries)} entries"


def large_modules(tree):
    """Yield the modules with too many lines."""
    for path in tree.paths:
        lines = path.read_text().count("\n")
        if lines > MODULE_LINES:
            yield f"{path}: {lines} lines; what are its two subjects?"


def large_functions(tree):
    """Yield the functions with too many lines."""
    for path in tree.paths:
        for node in ast.walk(tree.trees[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines"


def small_modules(tree):
    """Yield the small modules with a single importer that SMALL gives no reason for, and reasons without a module."""
    importers = defaultdict(set)
    for module, targets in tree.graph.items():
        for target in targets:
            importers[target].add(module)
    alone = {
        module
        for module, path in tree.modules.items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(importers[module]) == 1
        and path.read_text().count("\n") < SMALL_LINES
    }
    for module in sorted(alone ^ set(SMALL)):
        if module in alone:
            yield f"{module}: under {SMALL_LINES} lines, imported by {', '.join(importers[module])} alone: merge it"
        elif module.startswith(tree.root.name + "."):
            yield f"{module}: in SMALL, and no small module with a single importer"


def shared_class_names(tree):
    """Yield the names of public classes that two modules define."""
    places = defaultdict(list)
    for path in tree.paths:
        for node in tree.trees[path].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(tree.name_of(path))
    for name, modules in sorted(places.items()):
        if len(modules) > 1:
            yield f"class {name}: in {', '.join(modules)}"


def poor_docstrings(tree):
    """Yield the docstrings of modules, classes and functions without a headline, or with a relative word first."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in tree.paths:
        for node in ast.walk(tree.trees[path]):
            if not isinstance(node, kinds):
                continue
            headline = (ast.get_docstring(node) or "").partition("\n")[0]
            if not headline and isinstance(node, ast.Module):
                yield f"{path}: no docstring"
            elif re.split(r"\W", headline, maxsplit=1)[0] in RELATIVE - IMPERATIVE.get(type(node), set()):
                yield f"{path}:{getattr(node, 'lineno', 1)}: begins with a relative word: {headline}"


def exchange_checks(tree):
    """Yield the `isinstance` on exchanges outside of strategies: they are asked by the methods of their protocol."""
    for path in tree.paths:
        if tree.package_of(tree.name_of(path)) == "strategies":
            continue
        for node in ast.walk(tree.trees[path]):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                value, kinds = (ast.unparse(argument) for argument in node.args)
                if value.endswith("exchange") or "Exchange" in kinds:
                    yield f"{path}:{node.lineno}: isinstance({value}, {kinds})"


def docstrings(tree):
    """Yield (position, docstring) of the modules, classes and functions of the files."""
    for path in tree.paths:
        for node in ast.walk(tree.trees[path]):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", text


def vague_docstrings(tree):
    """Yield the docstrings that begin with a question or contain a phrase without a noun."""
    for position, text in docstrings(tree):
        if match := QUESTION.match(text) or VAGUE.search(text):
            yield f"{position}: {match[0]!r} in a docstring"


def vague_comments(tree):
    """Yield the comments that contain a phrase without a noun."""
    for path in tree.paths:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT and (match := VAGUE.search(token.string)):
                yield f"{path}:{token.start[0]}: {match[0]!r} in a comment"


def vague_texts(tree):
    """Yield the string constants that contain an idiom of no English reader, docstrings excluded."""
    for path in tree.paths:
        described = {
            id(node.body[0].value)
            for node in ast.walk(tree.trees[path])
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node)
        }
        for node in ast.walk(tree.trees[path]):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described
            if is_text and (match := VAGUE_TEXT.search(node.value)):
                yield f"{path}:{node.lineno}: {match[0]!r} in a text"


def copied_docstrings(tree):
    """Yield the docstrings that are identical to an earlier docstring of the tree."""
    first = {}
    for position, text in docstrings(tree):
        if first.setdefault(text, position) != position:
            yield f"{position}: the docstring of {first[text]}"


def vague_locals(tree):
    """Yield the functions with a local or a parameter whose name is no noun."""
    for path in tree.paths:
        for node in ast.walk(tree.trees[path]):
            if isinstance(node, FUNCTION):
                names = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)} | {
                    inner.id
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
                }
                for name in sorted(names & VAGUE_NAMES):
                    yield f"{path}:{node.lineno}: {node.name} has a local named {name}"


TREE = Tree(Path(hpcdist.__file__).parent)
LANGUAGE_RULES = (vague_docstrings, vague_comments, copied_docstrings, vague_locals)
RULES = (
    upward_imports,
    upward_strategies,
    foreign_imports,
    circles,
    large_folders,
    large_modules,
    large_functions,
    small_modules,
    shared_class_names,
    poor_docstrings,
    exchange_checks,
    vague_texts,
    *LANGUAGE_RULES,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule):
    assert list(rule(TREE)) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
@pytest.mark.parametrize("rule", LANGUAGE_RULES)
def test_tests_and_benchmarks_keep_the_language_rule(rule, folder):
    assert list(rule(Tree(CHECKOUT / folder))) == []


PLANTED = {
    "upward_imports": (
        {
            "arrays/wrong.py": '"""."""\nfrom typing import TYPE_CHECKING\nfrom ..comm import start\n'
            "from hpcdist import optim\nif TYPE_CHECKING:\n    from hpcdist.cli.main import main\n",
            "optim/sideways.py": '"""."""\nimport hpcdist.models.model\nimport hpcdist.arrays.ranges\n',
        },
        [
            "{root}/arrays/wrong.py:3 imports hpcdist.comm.start",
            "{root}/arrays/wrong.py:4 imports hpcdist.optim",
            "{root}/arrays/wrong.py:6 imports hpcdist.cli.main.main",
            "{root}/optim/sideways.py:2 imports hpcdist.models.model",
        ],
    ),
    "upward_strategies": (
        {
            "strategies/core/a.py": '"""."""\nfrom hpcdist.strategies.data import b\n',
            "strategies/data/b.py": '"""."""\nfrom hpcdist.strategies.core import c\n',
            "strategies/core/c.py": '"""."""\n',
        },
        ["hpcdist.strategies.core.a imports hpcdist.strategies.data.b"],
    ),
    "foreign_imports": (
        {"arrays/wrong.py": '"""."""\ndef late():\n    import mpi4py.MPI\n    importlib.import_module("h5py")\n'},
        [
            "{root}/arrays/wrong.py:3 imports mpi4py.MPI: only hpcdist.comm may",
            "{root}/arrays/wrong.py:4 imports h5py: only hpcdist.hdf5 may",
        ],
    ),
    "circles": (
        {
            "comm/__init__.py": "",
            "comm/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hpcdist.comm.b import B\n",
            "comm/b.py": "def late():\n    from hpcdist.comm.c import C\n",
            "comm/c.py": "import hpcdist.comm.a\n",
            "comm/d.py": "import hpcdist.comm.a\n",
        },
        ["a circle of imports: hpcdist.comm.a, hpcdist.comm.b, hpcdist.comm.c"],
    ),
    "large_folders": (
        {f"comm/m{number}.py": "" for number in range(ENTRIES + 1)} | {"comm/__init__.py": "", "hdf5/a.py": ""},
        [f"{{root}}/comm: {ENTRIES + 1} entries"],
    ),
    "large_modules": (
        {"comm/long.py": "\n" * (MODULE_LINES + 1), "comm/right.py": "\n" * MODULE_LINES},
        [f"{{root}}/comm/long.py: {MODULE_LINES + 1} lines; what are its two subjects?"],
    ),
    "large_functions": (
        {"comm/long.py": "class A:\n    def long(self):\n" + "        pass\n" * FUNCTION_LINES},
        [f"{{root}}/comm/long.py:2: long has {FUNCTION_LINES + 1} lines"],
    ),
    "small_modules": (
        {"comm/a.py": "import hpcdist.comm.b, hpcdist.comm.c", "comm/b.py": "import hpcdist.comm.c", "comm/c.py": ""},
        [f"hpcdist.comm.b: under {SMALL_LINES} lines, imported by hpcdist.comm.a alone: merge it"],
    ),
    "shared_class_names": (
        {"comm/a.py": "class A: ...\nclass _B: ...\n", "hdf5/a.py": "class A: ...\nclass _B: ...\n"},
        ["class A: in hpcdist.comm.a, hpcdist.hdf5.a"],
    ),
    "poor_docstrings": (
        {
            "comm/a.py": '"""How it is."""\nclass A:\n    """Which one."""\n'
            '    def a(self):\n        """Where, and why."""\n',
            "comm/b.py": "",
            "comm/c.py": '"""Whole words only: this begins with none."""\nclass Bare: ...\n',
        },
        [
            "{root}/comm/a.py:1: begins with a relative word: How it is.",
            "{root}/comm/a.py:2: begins with a relative word: Which one.",
            "{root}/comm/a.py:4: begins with a relative word: Where, and why.",
            "{root}/comm/b.py: no docstring",
        ],
    ),
    "exchange_checks": (
        {
            "training/a.py": "isinstance(trainer.exchange, Replicas)\nisinstance(it, ZeroExchange | Other)\n"
            "isinstance(1, int)\n",
            "strategies/a.py": "isinstance(exchange, Replicas)\n",
        },
        [
            "{root}/training/a.py:1: isinstance(trainer.exchange, Replicas)",
            "{root}/training/a.py:2: isinstance(it, ZeroExchange | Other)",
        ],
    ),
    "vague_docstrings": (
        {
            "comm/a.py": '"""Sums of ranks, and those of nodes."""\nclass A:\n    """Rank with the own values."""\n',
            "comm/b.py": '"""Rules."""\ndef f():\n    """Return whether it holds."""\n'
            'def g():\n    """Add.\n\n    Zero if it is none.\n    """\n',
        },
        [
            "{root}/comm/a.py:1: 'those of' in a docstring",
            "{root}/comm/a.py:2: 'the own' in a docstring",
            "{root}/comm/b.py:2: 'Return whether' in a docstring",
            "{root}/comm/b.py:4: 'is none' in a docstring",
        ],
    ),
    "vague_comments": (
        {"comm/a.py": "x = 1  # that of the rank\n# 'beside' in a text is no comment\ny = 'behind'\n"},
        ["{root}/comm/a.py:1: 'that of' in a comment", "{root}/comm/a.py:2: 'beside' in a comment"],
    ),
    "vague_texts": (
        {"comm/a.py": '"""It is none."""\nraise ValueError(f"a sum of {x} is none")\n'},
        ["{root}/comm/a.py:2: 'is none' in a text"],
    ),
    "copied_docstrings": (
        {
            "comm/a.py": 'def f():\n    """Sum."""\n',
            "comm/b.py": 'def g():\n    """Sum."""\ndef h():\n    """Max."""\n',
        },
        ["{root}/comm/b.py:1: the docstring of {root}/comm/a.py:1"],
    ),
    "vague_locals": (
        {"comm/a.py": "own = 1\ndef f(known):\n    for said in known:\n        result = said.found\n"},
        ["{root}/comm/a.py:2: f has a local named known", "{root}/comm/a.py:2: f has a local named said"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_fault_is_seen(rule, tmp_path, monkeypatch):
    files, expected = PLANTED[rule.__name__]
    monkeypatch.setitem(globals(), "SMALL", {})
    root = tmp_path / "hpcdist"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert sorted(rule(Tree(root))) == sorted(line.format(root=root) for line in expected)


def test_every_package_has_a_floor():
    packages = {path.relative_to(TREE.root).parts[0].removesuffix(".py") for path in TREE.paths}
    assert packages - {"__init__", "__main__"} == set(FLOORS), "give the new package a floor in the design, then here"


def loaded_after(statement, watched):
    """Return the modules of ``watched`` that a fresh interpreter has loaded after ``statement``."""
    code = f"import sys\n{statement}\nprint(*[name for name in {watched!r} if name in sys.modules])"
    done = jobs.python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.full
def test_importing_every_module_starts_nothing():
    statement = "\n".join(
        f"import {name}" for name in TREE.modules if not name.endswith("__main__") and not name.startswith(STARTING)
    )
    assert loaded_after(statement, LAZY) == []


def test_importing_hpcdist_loads_nothing():
    assert loaded_after("import hpcdist", ("numpy", "click", "msgspec", "h5py", *LAZY)) == []


CONFIGS = [name for name in TREE.modules if name.endswith(".config") and ".cli." not in name]


@pytest.mark.parametrize(
    "module",
    [*CONFIGS, "hpcdist.training.recipe.recipe", "hpcdist.comm.launch.environment", "hpcdist.comm.launch.mpirun"],
)
def test_imports_of_login_node_modules_are_light(module):
    """A recipe is read, and a job described, where MPI_Init would abort."""
    assert loaded_after(f"import {module}", ("h5py", *LAZY)) == []
