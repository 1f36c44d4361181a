"""For tests that start mpirun themselves: every start has a time limit, and nothing survives it."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from harness.jobs import LIMIT_S, Ended, clean_environment, run_limited, session
from hpcdist.batch import job
from hpcdist.comm.failure import failfast
from hpcdist.comm.launch import environment, mpirun
from hpcdist.errors import MissingCapabilityError
from stubs.slurm_cluster import DAEMONS, SEARCH, Cluster, isolation_refused

NOTICED_S = 15  # SlurmdTimeout of the cluster whose nodes crash
REQUEUED_S = 5  # for which its requeued jobs wait
GRACE_S = 120  # that preempted jobs have to save
Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    """A world that a test starts in this process ends the process at a failure; that of the next test does not."""
    yield
    failfast.uninstall()


@pytest.fixture(scope="session")
def mpi() -> mpirun.Launcher:
    """The mpirun of this environment."""
    if environment.launch_environment() is not None:
        pytest.skip("launch tests start mpirun themselves, and this process is a rank already")
    try:
        return mpirun.find()
    except MissingCapabilityError as error:
        pytest.skip(str(error))


@pytest.fixture
def mpiexec(mpi: mpirun.Launcher) -> Start:
    """``mpiexec(ranks, [arguments of python], timeout=LIMIT_S, env={...}, cwd=None)`` -> the completed process."""

    def start(
        ranks: int,
        arguments: Sequence[str],
        timeout: float = LIMIT_S,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        environment = clean_environment()
        # More ranks than cores: those that wait sleep. Open MPI yields to others by itself then.
        crowded = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} if ranks > len(os.sched_getaffinity(0)) else {}
        added = mpirun.settings(mpi, environment) | crowded | dict(env or {})
        line = mpirun.command(mpi, ranks, [sys.executable, *arguments], added, environment=environment)
        with session(mpi) as place:
            return run_limited(line, timeout, environment | added | place, cwd)

    return start


@pytest.fixture
def launch(mpi: mpirun.Launcher, tmp_path: Path) -> Callable[..., Ended]:
    """Write a program into a file and run it: ``launch(n, source, *arguments, options=(), **environment)``.

    ``options`` are those of the launcher itself.
    """

    def start(n: int, source: str, *arguments: str, options: Sequence[str] = (), **extra: str) -> Ended:
        program = tmp_path / "program.py"
        program.write_text(source)
        environment = clean_environment()
        # The program lies elsewhere: it must find the hpcdist under test.
        root = str(Path(hpcdist.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
        added = mpirun.settings(mpi, environment) | {"PYTHONPATH": path} | extra
        line = mpirun.command(mpi, n, [sys.executable, str(program), *arguments], added, environment=environment)
        with session(mpi) as place:
            done = run_limited([line[0], *options, *line[1:]], LIMIT_S, environment | added | place, apart=True)
        return Ended(done.returncode, done.stdout, done.stderr)

    return start


@contextmanager
def started(**options: Any) -> Iterator[Cluster]:
    """Start a cluster with ``options`` for as long as this lasts, or skip."""
    missing = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SEARCH) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts the jobs of users, so it needs root")
    # A short path: it holds sockets, whose names may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        found = Cluster(Path(folder), **options)
        try:
            found.start()
            yield found
        finally:
            found.stop()


def crashing(count: int) -> Any:
    """Start a cluster whose nodes can crash, or skip."""
    if refused := isolation_refused():
        pytest.skip(refused)
    return started(count=count, isolated=True, timeout_s=NOTICED_S, requeue_s=REQUEUED_S)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves the machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    with started() as found:
        yield found


@pytest.fixture(scope="module")
def roomy(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster of one node, which has the processors of this machine."""
    with started(count=1, cpus=len(os.sched_getaffinity(0))) as found:
        yield found


@pytest.fixture(scope="module")
def fragile(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster whose nodes can crash, which it notices after a few seconds instead of five minutes."""
    with crashing(4) as found:
        yield found


@pytest.fixture(scope="module")
def spared(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster of five nodes that can crash, for jobs with spare ones."""
    with crashing(5) as found:
        yield found


@pytest.fixture
def cleaned(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster with the epilog of slurm/install, which has folders of its own, and tells where it has run."""
    with started(count=1, more="Epilog={folder}/epilog") as found:
        for name in ("local", "textfile"):
            (found.folder / name).mkdir()
            (found.folder / name).chmod(0o1777)
        settings = {"FOLDERS": found.folder / "local", "TEXT_FILES": found.folder / "textfile"}
        lines = [f"export HPCDIST_EPILOG_{name}={shlex.quote(str(path))}" for name, path in settings.items()]
        script = shlex.quote(str(job.folder(job.INSTALL) / "epilog.sh"))
        last = f'touch {shlex.quote(str(found.folder))}/"epilog-$SLURM_JOB_ID-$SLURMD_NODENAME"'
        text = "\n".join(["#!/bin/bash", *lines, script, "code=$?", last, 'exit "$code"', ""])
        (found.folder / "epilog").write_text(text)
        (found.folder / "epilog").chmod(0o755)
        yield found


@pytest.fixture(scope="module")
def preempting(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster of two nodes, whose jobs are preempted by those of another partition."""
    with started(count=2, requeue_s=REQUEUED_S, grace_s=GRACE_S) as found:
        yield found
