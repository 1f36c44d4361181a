"""Whole jobs under a real Slurm of two virtual nodes, which this file starts and ends: submitted, stopped, requeued.

Needs Debian's slurm-wlm and munge, and root. The daemons live in a folder and on ports of their own.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from hpcdist.comm import mpirun
from hpcdist.telemetry import report

LIMIT_S = 120.0  # for whatever is waited for: generous, a loaded machine must not fail a test
NODES = 2
DAEMONS = ("munged", "slurmctld", "slurmd")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
STEPS = 200
ENDLESS = 10**6
EVIL = "$(touch x) `touch y` \"two\" 'one' \\ # ; & | é"

pytestmark = pytest.mark.timeout(600)

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
MpiDefault=none
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Daemons in the foreground, as children of this process, and the commands of their Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        inherited = ("SLURM_", "SBATCH_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
        # Two cores play eight: ranks that wait must not spin.
        self.environment = kept | {"SLURM_CONF": str(folder / "slurm.conf"), "OMPI_MCA_mpi_yield_when_idle": "1"}

    def start(self) -> None:
        host, (control, *ports) = socket.gethostname().split(".")[0], free_ports(1 + NODES)
        nodes = [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000"
            for number, port in enumerate(ports, start=1)
        ]
        text = CONFIGURATION.format(host=host, control=control, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "munge", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._spawn("munged", "--foreground", "--force", *options)
        self.wait(lambda: (self.folder / "munge").exists(), "munged")
        self._spawn("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        for number in range(1, NODES + 1):
            self._spawn("slurmd", "-D", "-c", "-N", f"n{number}", "-f", str(self.folder / "slurm.conf"))
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%D %t").stdout.split() == [str(NODES), "idle"], "idle nodes")

    def _spawn(self, name: str, *arguments: str) -> None:
        program = shutil.which(name, path=SEARCH)
        assert program is not None
        with (self.folder / f"{name}-{len(self.processes)}.out").open("wb") as output:
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self.processes.append(process)

    def run(self, *line: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            line, capture_output=True, text=True, env=self.environment, timeout=LIMIT_S, check=False, cwd=cwd
        )

    def wait(self, condition: Callable[[], object], what: str) -> None:
        limit = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > limit or any(process.poll() is not None for process in self.processes):
                logs = [f"{path}:\n{path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.out")]
                pytest.fail(f"no {what} in time, or a daemon died\n" + "\n".join(logs))
            time.sleep(0.1)

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job; values with blanks are cut."""
        shown = self.run("scontrol", "show", "job", number).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def stop(self) -> None:
        """End the jobs, then the daemons: those that were started here, and no other."""
        if len(self.processes) > 1:
            self.run("scancel", "--state=PENDING")
            self.run("scancel", "--state=RUNNING")
            until = time.monotonic() + 60
            while self.run("squeue", "-h").stdout.strip() and time.monotonic() < until:
                time.sleep(0.1)
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def cluster(mpi: mpirun.Launcher) -> Iterator[Cluster]:
    missing = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SEARCH) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts the jobs of users, so it needs root")
    # A short path: it holds sockets, whose names may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        found = Cluster(Path(folder))
        try:
            found.start()
            yield found
        finally:
            found.stop()


class Jobs:
    """Submits trainings of one small recipe from a folder, and waits for what becomes of them."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def submit(
        self, *arguments: str, steps: int = STEPS, recipe: str = "recipe.toml"
    ) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-P", "-m", "hpcdist", "submit", recipe, "--set", f"run.steps={steps}"]
        return self.cluster.run(*line, *arguments, cwd=self.folder)

    def begin(
        self, *arguments: str, nodes: int = NODES, ranks: int = 2, steps: int = STEPS, recipe: str = "recipe.toml"
    ) -> str:
        done = self.submit(f"--nodes={nodes}", f"--ranks-per-node={ranks}", *arguments, steps=steps, recipe=recipe)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"\d+\n", done.stdout), done.stdout
        return done.stdout.strip()

    def log(self, number: str) -> str:
        path = self.folder / f"hpcdist-{number}.out"
        return path.read_text() if path.exists() else ""

    def until(self, number: str, **wanted: str) -> None:
        """Wait until Slurm says what is wanted of the job."""

        def arrived() -> bool:
            return wanted.items() <= self.cluster.job(number).items()

        try:
            self.cluster.wait(arrived, f"{wanted} of job {number}")
        finally:
            print(f"--- job {number}: {self.cluster.job(number)}\n{self.log(number)}")  # shown with a failure

    def release(self, number: str, restarts: int = 1) -> None:
        """Start a requeued job, which Slurm would let wait for two minutes."""
        self.until(number, JobState="PENDING", Restarts=str(restarts))
        # Not at once: the nodes take no credential of the second in which they revoked that of the first start.
        assert self.cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+3").returncode == 0

    def checkpoint(self, run_dir: Path, older: str = "") -> str:
        """Wait for a checkpoint other than ``older`` and return its name."""
        latest = run_dir / "checkpoints" / "latest"
        self.cluster.wait(lambda: latest.exists() and latest.read_text() != older, f"checkpoint in {run_dir}")
        return latest.read_text()


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "text.txt").write_text("".join(f"{number} is {number * number % 97}, " for number in range(1500)))
    (folder / "recipe.toml").write_text(
        "[data]\npath = 'text.txt'\ncontext = 16\n[model]\nlayers = 1\nhidden = 32\nheads = 2\n"
        "[communication]\nalgorithm = 'hierarchical'\n[run]\nglobal_batch = 6\n[checkpoint]\nevery_steps = 20\n"
    )
    return Jobs(cluster, folder)


@pytest.fixture(scope="module", autouse=True)
def endless(jobs: Jobs) -> str:
    """A job whose minute, the shortest walltime, passes while the other tests run."""
    # Slurm looks every 30 s, and signals when less than 15 s more than that are left.
    return jobs.begin("--time=1", "--signal-seconds=15", nodes=1, ranks=1, steps=ENDLESS)


def test_stopped_and_requeued_on_two_nodes_it_ends_with_the_same_bits(jobs: Jobs) -> None:
    whole = jobs.begin("--out", "whole")
    jobs.until(whole, JobState="COMPLETED")
    assert "4 ranks on 2 nodes" in jobs.log(whole)

    shutil.copy(jobs.folder / "recipe.toml", jobs.folder / "edited.toml")
    stopped = jobs.begin("--out", "stopped", recipe="edited.toml")
    (jobs.folder / "edited.toml").write_text(
        "[model]\nlayers = 2\n"
    )  # the job trains what was submitted, at every start
    jobs.cluster.wait(lambda: "\nstep 1/" in jobs.log(stopped), "first step")
    # As the walltime does it: the batch shell alone is signalled.
    assert jobs.cluster.run("scancel", "--signal=USR1", "--batch", stopped).returncode == 0
    jobs.until(stopped, JobState="PENDING", Restarts="1")
    (jobs.folder / "stopped" / "stop").touch()  # rank 0 alone looks for it; those of the other node only hear of it
    jobs.release(stopped)
    jobs.release(stopped, restarts=2)
    jobs.until(stopped, JobState="COMPLETED")

    said = jobs.log(stopped)
    first, second = (int(step) for step in re.findall(r"saved step-(\d+), requeue", said))
    assert 0 < first < STEPS - 1 and second == first + 1
    for number, origin in enumerate(("the beginning", f"step-{first}", f"step-{second}"), start=1):
        assert f"start {number} on n[1-2], from {origin}\n" in said
    assert f"after {first} steps" in said and f"after {second} steps" in said
    one, two = (report.report(jobs.folder / name) for name in ("whole", "stopped"))
    assert two.figures["sessions"] == 3 and two.figures["steps"] == STEPS
    assert np.array_equal(one.metrics.steps["loss"], two.metrics.steps["loss"])
    assert one.figures["val_loss"] == two.figures["val_loss"]


def test_exit_codes_and_names_pass_unchanged(jobs: Jobs) -> None:
    number = jobs.begin(f"--job-name={EVIL}", "--set", "data.path=missing.txt", nodes=1)
    jobs.until(number, JobState="FAILED", ExitCode="78:0")
    assert "missing.txt" in jobs.log(number)
    assert f"JobName={EVIL}\n" in jobs.cluster.run("scontrol", "show", "job", number).stdout
    assert not (jobs.folder / "x").exists() and not (jobs.folder / "y").exists()


@pytest.mark.parametrize("options", [["--nodes=3"], ["--nodes=1", "--partition=nix"]])
def test_what_slurm_refuses(jobs: Jobs, options: list[str]) -> None:
    done = jobs.submit("--job-name=hpcdist-refused", *options)
    assert (done.returncode, done.stdout) == (78, ""), done.stderr
    assert "Slurm refuses the job" in done.stderr
    assert "hpcdist-refused" not in jobs.cluster.run("squeue", "-h", "-o", "%j").stdout


def test_the_walltime_requeues_until_it_is_forbidden(jobs: Jobs, endless: str) -> None:
    run_dir = jobs.folder / "runs" / f"slurm-{endless}"
    jobs.release(endless)
    assert "SIGUSR1: the walltime ends soon" in jobs.log(endless)
    saved = (run_dir / "checkpoints" / "latest").read_text()
    newer = jobs.checkpoint(run_dir, older=saved)
    assert jobs.cluster.run("scontrol", "update", f"JobId={endless}", "Requeue=0").returncode == 0
    assert jobs.cluster.run("scancel", "--signal=USR1", "--batch", endless).returncode == 0
    jobs.until(endless, JobState="FAILED", ExitCode="75:0", Restarts="1")
    last = (run_dir / "checkpoints" / "latest").read_text().strip()
    assert f"saved {last}, requeue" in jobs.log(endless) and "not requeued: scontrol refused" in jobs.log(endless)
    assert int(last.removeprefix("step-")) >= int(newer.strip().removeprefix("step-"))
