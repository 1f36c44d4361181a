"""Hosts on one machine: network namespaces joined by slow links, and the launch of either MPI on them. Root only.

The context manager `Hosts` removes its hosts on every exit. Names are random, so several can exist at once. After a
SIGKILL, `ip netns list` shows the names, and `down PREFIX` removes them.
"""

import json
import os
import secrets
import shutil
import signal
import string
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import harness
from hpcdist.comm.launch import mpirun
from hpcdist.errors import MissingCapabilityError

HERE = Path(__file__).resolve().parent
NETWORK = "10.99.0"
TOOLS = ("ip", "tc", "unshare", "hostname", "awk", "bash")
SET_UP_S = 60.0
LIMIT_S = 600.0


def tuned(launcher: mpirun.Launcher) -> list[str]:
    """Return Open MPI's options to disable its default HAN, which is occasionally ten times slower."""
    return ["--mca", "coll", "^han"] if launcher.vendor == mpirun.OPEN_MPI else []


class Hosts:
    """``count`` hosts, each with a full-duplex link of ``rate`` (`tc` syntax) to a common switch.

    After a pause a link passes ``burst`` at any speed.
    """

    def __init__(self, count: int, rate: str = "1gbit", burst: str = "256kb") -> None:
        self.count, self.rate, self.burst = count, rate, burst
        # Letters only: launchers interpret digits at the end of a host name.
        self.prefix = "hosts" + "".join(secrets.choice(string.ascii_lowercase) for _ in range(6))
        self._sessions = tempfile.TemporaryDirectory(prefix="hpcdist-hosts-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        """Create the hosts. Raises MissingCapabilityError with the reason if this fails."""
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            reason = f"{', '.join(missing)} not found (Debian: iproute2, util-linux)" if missing else "needs root"
            raise MissingCapabilityError(f"hosts of network namespaces cannot be created here: {reason}")
        try:
            done = self._script("up", self.prefix, str(self.count), self.rate, self.burst)
        except BaseException:
            self._script("down", self.prefix)
            raise
        if done.returncode != 0:
            self._script("down", self.prefix)
            raise MissingCapabilityError(
                f"hosts of network namespaces cannot be created here: {done.stderr.strip()}; in a container, add "
                "CAP_NET_ADMIN and CAP_SYS_ADMIN"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._script("down", self.prefix)
        self._sessions.cleanup()

    def _script(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        # In a separate session: Ctrl-C must not interrupt the cleanup.
        command = [str(HERE / name), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=SET_UP_S, start_new_session=True
        )

    def command(
        self, launcher: mpirun.Launcher, ranks_per_host: int, program: Sequence[str], extra: Sequence[str] = ()
    ) -> list[str]:
        """Return the command that starts ``program`` on every host with the variables of `environment`.

        ``extra`` are launcher options. Both MPIs are forced to use TCP over the links; MPICH would otherwise detect
        that the hosts share a machine.
        """
        slots = ",".join(f"{NETWORK}.{host + 1}:{ranks_per_host}" for host in range(self.count))
        if launcher.vendor == mpirun.OPEN_MPI:
            net = f"{NETWORK}.0/24"
            agent = {"plm_ssh_agent": str(HERE / "agent"), "prte_if_include": net}
            # Each host sees all cores of this machine as its own, so waiting ranks must yield the processor.
            wire = {"pml": "ob1", "btl": "tcp,self,sm", "btl_tcp_if_include": net, "mpi_yield_when_idle": "1"}
            options = [word for name, value in agent.items() for word in ("--prtemca", name, value)]
            options += [word for name, value in wire.items() for word in ("--mca", name, value)]
            options += ["--host", slots]
        else:
            options = ["-launcher", "ssh", "-launcher-exec", str(HERE / "agent"), "-hosts", slots]
        ranks = self.count * ranks_per_host
        line = mpirun.command(launcher, ranks, program, self._added(launcher), [*options, *extra])
        first = f"{self.prefix}1"
        start = ["ip", "netns", "exec", first, "unshare", "--uts", "bash", "-c", 'hostname "$0"; exec "$@"', first]
        return [*start, *line]

    def results(
        self, launcher: mpirun.Launcher, ranks_per_host: int, module: str, request: Mapping[str, Any],
        extra: Sequence[str] = (),
    ) -> dict[str, Any]:  # fmt: skip
        os.environ["PYTHONPATH"] = harness.search_path()  # inherited by the hosts
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            program = [sys.executable, "-m", module, json.dumps(request), str(result)]
            line = self.command(launcher, ranks_per_host, program, extra)
            process = self.run(line, self.environment(launcher), LIMIT_S)
            if process.returncode != 0 or not result.exists():
                raise SystemExit(f"the ranks exited with code {process.returncode}\n{process.stdout}")
            results: dict[str, Any] = json.loads(result.read_text())
        return results

    def environment(self, launcher: mpirun.Launcher) -> dict[str, str]:
        return {**os.environ, **self._added(launcher), **mpirun.session(launcher, Path(self._sessions.name))}

    def _added(self, launcher: mpirun.Launcher) -> dict[str, str]:
        variables = mpirun.settings(launcher) | {
            "HPCDIST_HOSTS": self.prefix,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        if launcher.vendor != mpirun.OPEN_MPI:
            variables |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        return variables

    def run(
        self, line: Sequence[str], environment: dict[str, str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``line`` with stderr in stdout. After ``timeout_s`` kill all its processes and raise TimeoutExpired."""
        with subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(list(line), process.returncode, output)
