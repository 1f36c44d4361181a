"""A real Slurm of a few virtual nodes on this machine, and jobs that are submitted to it.


The daemons use a separate folder and separate ports. Each node of a `Cluster(..., isolated=True)` has separate
processes, hostname, mounts and shared memory. It can crash: all its processes die at once, and Slurm must detect it.
"""

import itertools
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.jobs import LIMIT_S

NODES = 3
GPUS = 4  # of each node
MEMORY_MB = 1000  # of each node, shared out to its CPUs as most sites do it
DAEMONS = ("munged", "slurmctld", "slurmd")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
STEPS = 200
ENDLESS = 10**6  # steps of a job that others end
SLOW = "--set=chaos.step_s=0.1"
RECIPE = """
[data]
path = "text.txt"
context = 16
[model]
layers = 1
hidden = 32
heads = 2
[communication]
algorithm = "hierarchical"
[run]
global_batch = 6
[checkpoint]
every_steps = 20
"""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge,cred_expire={requeue}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={memory}
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
SlurmdTimeout={timeout}
FirstJobId={first}
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime={grace}
{preemption}
"""
# Jobs of `urgent` take the nodes of others, which are told, and are requeued GraceTime later at the latest. A signal to
# a step reaches the processes that Slurm has started, and not their children, as where it keeps steps in cgroups.
PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ProctrackType=proctrack/pgid
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
NO_PREEMPTION = "ProctrackType=proctrack/linuxproc"
# The first process of an isolated node. It stays, since it has to wait for the processes that lose their parents. What
# slurmd keeps goes with the node: Slurm's PMIx plugin starts no step where a crash has left the folder of one.
NODE = """
set -e
hostname {name}
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
mkdir -p {folder}/{name}
mount -t tmpfs tmpfs {folder}/{name}
{slurmd} &
wait "$!"
"""
UNSHARE = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")


def isolation_refused() -> str:
    """Return the reason why this machine cannot create namespaces for nodes, or "" if it can."""
    if shutil.which(UNSHARE[0]) is None:
        return "there is no unshare: apt-get install util-linux"
    commands = "hostname n1 && mount -t tmpfs tmpfs /dev/shm && mount --bind /etc/hosts /etc/hosts"
    done = subprocess.run([*UNSHARE, "bash", "-c", commands], capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else f"unshare is refused here: {done.stderr.strip()}"


class Cluster:
    """Daemons in the foreground, as children of this process, and the commands of their Slurm."""

    def __init__(
        self,
        folder: Path,
        *,
        count: int = NODES,
        cpus: int = 4,
        isolated: bool = False,
        timeout_s: int = 300,
        requeue_s: int = 120,
        grace_s: int = 0,
        more: str = "",
    ) -> None:
        """``timeout_s`` is SlurmdTimeout, ``requeue_s`` the delay of a requeued job. The defaults are Slurm's.


        A node has ``cpus`` CPUs, however many this machine has. With ``grace_s`` there is a partition `urgent` whose
        jobs preempt others, which then have ``grace_s`` seconds to save. ``more`` are further lines of slurm.conf, in
        which {folder} is replaced.
        """
        self.folder, self.count, self.cpus, self.isolated = folder, count, cpus, isolated
        self.more = more.format(folder=folder)
        self.timeout_s, self.requeue_s, self.grace_s = timeout_s, requeue_s, grace_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        inherited = ("SLURM_", "SBATCH_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "HPCDIST_SITE")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
        # Two cores play eight: ranks that wait must not spin. And a daemon that dies with its node leaves its session.
        self.environment = kept | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_prte_remote_tmpdir_base": str(folder),
            # Neither profiles nor the registry of whoever runs the tests.
            "XDG_CONFIG_HOME": str(folder / "config"),
            "XDG_STATE_HOME": str(folder / "state home"),
        }

    def start(self) -> None:
        host, (control, *ports) = socket.gethostname().split(".")[0], free_ports(1 + self.count)
        nodes = [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus} "
            f"RealMemory={MEMORY_MB} Gres=gpu:{GPUS}"
            for number, port in enumerate(ports, start=1)
        ]
        # MPICH names memory in /dev/shm after the number of the job: names of another cluster must differ.
        first = random.randrange(10**5, 10**7)
        local_values = {"timeout": self.timeout_s, "requeue": self.requeue_s, "nodes": "\n".join(nodes)}
        local_values |= {"memory": MEMORY_MB // self.cpus}
        local_values |= {"grace": self.grace_s, "preemption": PREEMPTION if self.grace_s else NO_PREEMPTION}
        text = CONFIGURATION.format(host=host, control=control, folder=self.folder, first=first, **local_values)
        (self.folder / "slurm.conf").write_text(f"{text}{self.more}\n")
        names = " ".join(f"n{number}" for number in range(1, self.count + 1))
        (self.folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {names}\n")
        # GPUs to be asked for, which none has: the files stand for devices, and Slurm counts only what is there.
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[1-{GPUS}]\n")
        for number in range(1, GPUS + 1):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "state").mkdir()
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        files = {"key-file": "key", "socket": "munge", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._spawn("munged", "--foreground", "--force", *options)
        self.wait(lambda: (self.folder / "munge").exists(), "munged")
        self._spawn("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        for number in range(1, self.count + 1):
            self._start_node(f"n{number}")
        all_idle = [str(self.count), "idle"]
        self.wait(lambda: self.run("sinfo", "-h", "-o", "%D %t").stdout.split() == all_idle, "idle nodes")

    def _start_node(self, name: str) -> None:
        line = ["slurmd", "-D", "-c", "-N", name, "-f", str(self.folder / "slurm.conf")]
        if not self.isolated:
            # Ranks that PMIx starts find ranks of their node by its name; all nodes here have one hostname.
            self.nodes[name] = self._spawn(*line, PMIX_HOSTNAME=name)
            return
        slurmd = shlex.join([shutil.which("slurmd", path=SEARCH) or "slurmd", *line[1:]])
        script = NODE.format(name=name, folder=shlex.quote(str(self.folder)), slurmd=slurmd)
        self.nodes[name] = self._spawn(*UNSHARE, "bash", "-c", script)

    def _first(self, name: str) -> int:
        """Return the id of the first process of an isolated node."""
        assert self.isolated
        pid = self.nodes[name].pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(first)

    def root(self, name: str) -> Path:
        """Return the root directory of an isolated node. Its /dev/shm is separate."""
        return Path(f"/proc/{self._first(name)}/root")

    def crash(self, name: str) -> None:
        """Kill all processes of an isolated node, including slurmd, and return when they are gone.

        Slurm is not notified.
        """
        first = self._first(name)
        process = self.nodes.pop(name)
        self.processes.remove(process)
        # When the first process of a PID namespace dies, the kernel kills the others, and ends it only after them.
        os.kill(first, signal.SIGKILL)
        process.wait(60)

    def revive(self, name: str) -> None:
        """Restart a crashed node, and wait until Slurm uses it again."""
        self._start_node(name)
        state = ("sinfo", "-h", "-n", name, "-o", "%t")
        self.wait(lambda: self.run(*state).stdout.strip() in ("idle", "mix", "alloc"), f"{name} that responds")

    def _spawn(self, name: str, *arguments: str, **added: str) -> "subprocess.Popen[bytes]":
        program = shutil.which(name, path=SEARCH)
        assert program is not None
        with (self.folder / f"{name}-{len(self.processes)}.out").open("ab") as output:
            process = subprocess.Popen(
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment | added,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def preempt(self) -> str:
        """Submit a short job of all cores, which preempts all other jobs. Return its id."""
        line = ("sbatch", "--parsable", "--partition=urgent", f"--nodes={self.count}", "--exclusive")
        done = self.run(*line, "--output=/dev/null", "--wrap=sleep 1")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

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
            time.sleep(0.25)

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that Slurm reports for a job. Values are cut at blanks."""
        shown = self.run("scontrol", "show", "job", number).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def stop(self) -> None:
        """End the jobs, then the daemons that this cluster started."""
        if len(self.processes) > 1:
            self.run("scancel", "--state=PENDING")
            self.run("scancel", "--state=RUNNING")
            until = time.monotonic() + 60
            while self.run("squeue", "-h").stdout.strip() and time.monotonic() < until:
                time.sleep(0.1)
        for name in list(self.nodes) if self.isolated else ():
            self.crash(name)  # unshare takes no SIGTERM
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports below the kernel's ephemeral range, so that a crashed node's port stays free for its restart."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = random.sample(range(10_000, max(lowest, 20_000)), 100 * count)
    return list(itertools.islice(filter(_is_free, ports), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class Jobs:
    """Submits trainings of one small recipe from a folder, and waits for their states."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text("".join(f"{number} is {number * number % 97}, " for number in range(1500)))
        (folder / "recipe.toml").write_text(RECIPE)

    def submit(
        self, *arguments: str, steps: int = STEPS, recipe: str = "recipe.toml"
    ) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-P", "-m", "hpcdist", "submit", recipe, "--set", f"run.steps={steps}"]
        slow = [SLOW] * (steps == ENDLESS)  # such a job leaves the cores to others
        return self.cluster.run(*line, *slow, *arguments, cwd=self.folder)

    def begin(
        self, *arguments: str, nodes: int = 2, ranks: int = 2, steps: int = STEPS, recipe: str = "recipe.toml"
    ) -> str:
        (number,) = self.chain(*arguments, nodes=nodes, ranks=ranks, steps=steps, recipe=recipe)
        return number

    def chain(
        self, *arguments: str, nodes: int = 2, ranks: int = 2, steps: int = STEPS, recipe: str = "recipe.toml"
    ) -> list[str]:
        """Submit a chain and return the printed job ids."""
        done = self.submit(f"--nodes={nodes}", f"--ranks-per-node={ranks}", *arguments, steps=steps, recipe=recipe)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"(\d+\n)+", done.stdout), done.stdout
        return done.stdout.split()

    def log(self, number: str) -> str:
        path = self.folder / f"hpcdist-{number}.out"
        return path.read_text() if path.exists() else ""

    def until(self, number: str, **expected: str) -> None:
        """Wait until Slurm reports the ``expected`` fields of a job. Fail at once if it has ended in another state."""

        def has_expected_state() -> bool:
            result = self.cluster.job(number)
            other = result.get("JobState") in ENDS and result["JobState"] != expected["JobState"]
            assert not other, f"job {number} is {result['JobState']}, exit code {result['ExitCode']}, not {expected}"
            return expected.items() <= result.items()

        try:
            self.cluster.wait(has_expected_state, f"{expected} of job {number}")
        finally:
            print(f"--- job {number}: {self.cluster.job(number)}\n{self.log(number)}")  # shown with a failure

    def wait_for_log(self, number: str, what: str) -> None:
        """Wait until the log of the job contains ``what``."""
        self.cluster.wait(lambda: what in self.log(number), f"{what!r} in the log of job {number}")

    def stop(self, number: str) -> None:
        """Signal only the batch shell, as Slurm does at the time limit."""
        assert self.cluster.run("scancel", "--signal=USR1", "--batch", number).returncode == 0

    def release(self, number: str, restarts: int = 1) -> None:
        """Start a requeued job immediately. Slurm would delay it by two minutes."""
        self.until(number, JobState="PENDING", Restarts=str(restarts))
        # Wait: a node accepts no credential from the second in which it revoked the first start's credential.
        assert self.cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+3").returncode == 0

    def checkpoint(self, run_dir: Path, older: str = "") -> str:
        """Wait for a checkpoint other than ``older`` and return its name."""
        latest = run_dir / "checkpoints" / "latest"
        self.cluster.wait(lambda: latest.exists() and latest.read_text() != older, f"checkpoint in {run_dir}")
        return latest.read_text()
