"""Fixtures for tests that start mpirun themselves: every start has a time limit, and no process outlives it."""

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
    """Restore the exit hooks after a test that starts a world, so that later failures do not end this process."""
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
    """``mpiexec(ranks, [arguments of python], timeout=LIMIT_S, env={...}, cwd=None)`` returns the completed process."""

    def start(
        ranks: int,
        arguments: Sequence[str],
        timeout: float = LIMIT_S,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        environment = clean_environment()
        # If there are more ranks than cores, waiting ranks sleep. Open MPI then yields by itself.
        crowded = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} if ranks > len(os.sched_getaffinity(0)) else {}
        added = mpirun.settings(mpi, environment) | crowded | dict(env or {})
        line = mpirun.command(mpi, ranks, [sys.executable, *arguments], added, environment=environment)
        with session(mpi) as place:
            return run_limited(line, timeout, environment | added | place, cwd)

    return start


@pytest.fixture
def launch(mpi: mpirun.Launcher, tmp_path: Path) -> Callable[..., Ended]:
    """Write a program into a file and run it: ``launch(n, source, *arguments, options=(), **environment)``.


    ``options`` are options of the launcher.
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
def start_cluster(**options: Any) -> Iterator[Cluster]:
    """Start a cluster with ``options`` for the duration of the context, or skip."""
    missing = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SEARCH) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts the jobs of users, so it needs root")
    # A short path: it holds sockets, whose names may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        result = Cluster(Path(folder), **options)
        try:
            result.start()
            yield result
        finally:
            result.stop()


def start_crash_cluster(count: int) -> Any:
    """Start a cluster whose nodes can crash, or skip."""
    if refused := isolation_refused():
        pytest.skip(refused)
    return start_cluster(count=count, isolated=True, timeout_s=NOTICED_S, requeue_s=REQUEUED_S)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the proxy variables, so that no request leaves the machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    with start_cluster() as result:
        yield result


@pytest.fixture(scope="module")
def one_node_cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster of one node, which has all processors of this machine."""
    with start_cluster(count=1, cpus=len(os.sched_getaffinity(0))) as result:
        yield result


@pytest.fixture(scope="module")
def crash_cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster whose nodes can crash. Slurm detects a crash after a few seconds instead of five minutes."""
    with start_crash_cluster(4) as result:
        yield result


@pytest.fixture(scope="module")
def spare_node_cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster of five nodes that can crash, for jobs with spare nodes."""
    with start_crash_cluster(5) as result:
        yield result


@pytest.fixture
def epilog_cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster with the epilog of slurm/install.

    The epilog uses separate folders and records the nodes where it ran.
    """
    with start_cluster(count=1, more="Epilog={folder}/epilog") as result:
        for name in ("local", "textfile"):
            (result.folder / name).mkdir()
            (result.folder / name).chmod(0o1777)
        settings = {"FOLDERS": result.folder / "local", "TEXT_FILES": result.folder / "textfile"}
        lines = [f"export HPCDIST_EPILOG_{name}={shlex.quote(str(path))}" for name, path in settings.items()]
        script = shlex.quote(str(job.folder(job.INSTALL) / "epilog.sh"))
        last = f'touch {shlex.quote(str(result.folder))}/"epilog-$SLURM_JOB_ID-$SLURMD_NODENAME"'
        text = "\n".join(["#!/bin/bash", *lines, script, "code=$?", last, 'exit "$code"', ""])
        (result.folder / "epilog").write_text(text)
        (result.folder / "epilog").chmod(0o755)
        yield result


@pytest.fixture(scope="module")
def preemption_cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    """A cluster of two nodes with a partition whose jobs preempt the jobs of the default partition."""
    with start_cluster(count=2, requeue_s=REQUEUED_S, grace_s=GRACE_S) as result:
        yield result
