"""Shared by all tests: fresh random inputs from a seed that every failure shows."""

import bisect
import fcntl
import gc
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

from harness.inputs import write_text
from hpcdist.comm.launch import exit_file

# Begun first, so that none is the last: tests of Slurm, which mostly wait, and the longest files.
FIRST = tuple(
    f"tests/launch/{name}" for name in ("slurm/", "test_docs.py", "test_rank_suites.py", "training/test_job.py")
)
# Tests of Slurm are two parts, unit tests four: to benchmarks, to models, to strategies, the rest.
CUTS = ("tests/launch/slurm/test_d", "tests/unit/", "tests/unit/c", "tests/unit/n", "tests/unit/t")
LOCKS = pytest.StashKey[str]()  # directory of the locks of the processes of `pytest -n`
SEED_VARIABLE = "HPCDIST_TEST_SEED"
# One seed for all ranks and for the suites that a test starts; CI sets it, so that a run can be repeated.
_fixed = SEED_VARIABLE in os.environ
SEED = int(os.environ.setdefault(SEED_VARIABLE, str(secrets.randbits(32))))

# In processes of `pytest -n` and of tests, which share few cores, threads that wait for work of BLAS, or of PyTorch's
# loops, do not spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Ranks print whole lines: without a buffer, `print` writes each argument alone, and the lines of two ranks mix.
os.environ.pop("PYTHONUNBUFFERED", None)

exit_file.collect_seldom()  # hardly anything that collecting thousands of tests makes is garbage

# Trainings of tests neither measure at their start nor read what this user has measured: `auto` is native.
os.environ["HPCDIST_TUNING"] = "off"

hypothesis.settings.register_profile("hpcdist", deadline=None, derandomize=_fixed, print_blob=True)
hypothesis.settings.load_profile("hpcdist")


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: {SEED_VARIABLE}={SEED}"


def pytest_configure(config: pytest.Config) -> None:
    # Processes that start together on cold caches would each compile the same kernels, and the same tests.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        kernels = subprocess.Popen([sys.executable, "-m", "hpcdist", "warmup"], stdout=subprocess.DEVNULL)
        if not any(Path(__file__).parent.glob("unit/*/__pycache__/*")):
            line = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *config.args]
            subprocess.run(line, stdout=subprocess.DEVNULL, timeout=600)  # the run itself prints its errors
        assert kernels.wait(600) == 0
        # A process that dies ends the run, and the test that it ran is named. LoadScopeScheduling gives a process that
        # takes its place the scopes that are complete as well, of which it never asks for more: the run would hang.
        config.option.maxworkerrestart = "0"
        locks = tempfile.TemporaryDirectory(prefix="hpcdist-tests-")
        config.add_cleanup(locks.cleanup)
        config.stash[LOCKS] = locks.name


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["locks"] = node.config.stash.get(LOCKS, None)  # None: started by --tx


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # JAX starts threads, and a process that has them should fork no more: its tests come after the tests that fork.
    items.sort(key=lambda item: ("jax" in item.path.name, not item.nodeid.startswith(FIRST)))
    # Of a test over a product of parameters, each value is tried once; the rest of the product is a matrix.
    cases = {}
    for item in items:
        if hasattr(item, "callspec"):
            kept = item.get_closest_marker("matrix_except")
            if kept is not None and item.callspec.id not in kept.args:
                item.add_marker(pytest.mark.matrix)
            mark = item.get_closest_marker("full_except")
            if mark is not None and item.callspec.id not in mark.args:
                item.add_marker(pytest.mark.full)
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for product in cases.values():
        covering = covering_cases([values_of(item) for item in product])
        for number in set(range(len(product))) - covering:
            named = product[number].get_closest_marker("full_except")
            if named is None or product[number].callspec.id not in named.args:
                product[number].add_marker(pytest.mark.matrix)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test marked `alone` while no other process of `pytest -n` runs a test."""
    folder = getattr(item.config, "workerinput", {}).get("locks")
    if folder is None:
        return (yield)
    is_alone = item.get_closest_marker("alone") is not None
    with open(f"{folder}/queue", "w") as queue, open(f"{folder}/lock", "w") as lock:
        # Whoever waits to be alone stands in the queue meanwhile, so that nobody begins another test.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        if not is_alone:
            fcntl.flock(queue, fcntl.LOCK_UN)
        return (yield)


def values_of(item: pytest.Item) -> set[tuple[Any, ...]]:
    """Return the values of a parametrised test. Names that one mark sets together count as one value."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [
        [part.strip() for part in local_data.split(",")] if isinstance(local_data, str) else local_data
        for local_data in names
    ]
    together += [[name] for name in item.callspec.params if not any(name in local_data for local_data in together)]
    return {(*local_data, *(id(item.callspec.params.get(name)) for name in local_data)) for local_data in together}


def covering_cases(cases: Sequence[set[Any]]) -> set[int]:
    """Return the indices of a small subset of ``cases`` that contains every value at least once."""
    missing, chosen = set().union(*cases), set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing & cases[number]))
        chosen.add(best)
        missing -= cases[best]
    return chosen


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # Thousands of collected tests stay to the end: a test that collects garbage need not go through them each time.
    gc.freeze()
    exit_file.collect_as_usual()


def pytest_unconfigure() -> None:
    gc.freeze()  # what ends with the process is not looked through once more


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let `pytest -n` schedule unit tests and Slurm tests in fixed parts, and other jobs file by file.


    Tests of a part run in one process and in a fixed order, so the order does not depend on the speed of the tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if path.startswith("tests/launch/") and "/slurm/" not in path:
                return path
            return f"part {bisect.bisect(CUTS, path)}"

    config.option.loadscopereorder = False  # in the order of the collection, not by the number of tests
    return ByFile(config, log)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A separate random generator for each test."""
    print(f"repeat with {SEED_VARIABLE}={SEED}")  # shown with a failure
    return np.random.Generator(np.random.Philox(key=[SEED, zlib.crc32(request.node.nodeid.encode())]))


@pytest.fixture
def text(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A text file of random words."""
    return write_text(tmp_path / "text.txt", rng, 4000)


@pytest.fixture
def words(text: Path) -> dict[str, object]:
    """Recipe keys that select the random text as data."""
    return {"data.path": text}


@pytest.fixture(scope="session")
def shared_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text in every test and run, for many trainings that are compared with one reference."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", np.random.default_rng(3))


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a stand-in for the NVIDIA driver's library, for LD_LIBRARY_PATH; see stubs/gpu/nvml.c."""
    pytest.importorskip("pynvml", reason="pynvml is not installed: pip install 'hpcdist[nvml]'")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the stand-in for the NVIDIA driver with")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "stubs" / "gpu" / "nvml.c"
    line = [compiler, "-O1", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(line, check=True, timeout=120)
    return folder


@pytest.fixture
def nvml_environment(nvml_stub: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a program that sees the GPUs described in the file ``gpus`` in ``tmp_path``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return kept | {"LD_LIBRARY_PATH": str(nvml_stub), "NVML_STUB": str(tmp_path / "gpus")}
