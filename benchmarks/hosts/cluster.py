"""Hosts on one machine: network namespaces joined by slow links, and how either MPI is started over them. Root only.

With `Hosts` as a context manager nothing is left behind, however the block is left; names are drawn, so that several
may run at once. After SIGKILL, `ip netns list` shows the names, and `down PREFIX` removes them.
"""

import os
import secrets
import shutil
import signal
import string
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcdist.comm.launch import mpirun
from hpcdist.errors import MissingCapabilityError

HERE = Path(__file__).resolve().parent
NETWORK = "10.99.0"
TOOLS = ("ip", "tc", "unshare", "hostname", "awk", "bash")
SET_UP_S = 60.0


class Hosts:
    """``count`` hosts, each joined to one switch by a full-duplex link of ``rate`` (as `tc` writes it).

    After a pause a link lets ``burst`` pass at any speed.
    """

    def __init__(self, count: int, rate: str = "1gbit", burst: str = "256kb") -> None:
        self.count, self.rate, self.burst = count, rate, burst
        # Letters only: launchers take a number at the end of a host name apart.
        self.prefix = "hosts" + "".join(secrets.choice(string.ascii_lowercase) for _ in range(6))
        self._sessions = tempfile.TemporaryDirectory(prefix="hpcdist-hosts-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        """Raise MissingCapabilityError, with the reason, where there can be no such hosts."""
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            reason = f"{', '.join(missing)} not found (Debian: iproute2, util-linux)" if missing else "needs root"
            raise MissingCapabilityError(f"hosts of network namespaces cannot be made here: {reason}")
        try:
            done = self._script("up", self.prefix, str(self.count), self.rate, self.burst)
        except BaseException:
            self._script("down", self.prefix)
            raise
        if done.returncode != 0:
            self._script("down", self.prefix)
            raise MissingCapabilityError(
                f"hosts of network namespaces cannot be made here: {done.stderr.strip()}; in a container, give it "
                "CAP_NET_ADMIN and CAP_SYS_ADMIN"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._script("down", self.prefix)
        self._sessions.cleanup()

    def _script(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        # In a session of its own: Ctrl-C must not end the cleaning up.
        line = [str(HERE / name), *arguments]
        return subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=SET_UP_S, start_new_session=True
        )

    def command(
        self, launcher: mpirun.Launcher, ranks_per_host: int, program: Sequence[str], extra: Sequence[str] = ()
    ) -> list[str]:
        """Return the line that starts ``program`` on every host; run it with `environment`.

        ``extra`` are options of the launcher. Both MPIs are told to use TCP over the links: left alone, MPICH finds
        that the hosts share a machine, and its data never crosses a link.
        """
        slots = ",".join(f"{NETWORK}.{host + 1}:{ranks_per_host}" for host in range(self.count))
        if launcher.vendor == mpirun.OPEN_MPI:
            agent = [
                "--prtemca",
                "plm_ssh_agent",
                str(HERE / "agent"),
                "--prtemca",
                "prte_if_include",
                f"{NETWORK}.0/24",
            ]
            wire = [
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                "tcp,self,sm",
                "--mca",
                "btl_tcp_if_include",
                f"{NETWORK}.0/24",
            ]
            # Each host believes to have all cores of this machine: ranks that wait must let the others' compute.
            options = [*agent, *wire, "--mca", "mpi_yield_when_idle", "1", "--host", slots]
        else:
            options = ["-launcher", "ssh", "-launcher-exec", str(HERE / "agent"), "-hosts", slots]
        ranks = self.count * ranks_per_host
        line = mpirun.command(launcher, ranks, program, self._added(launcher), [*options, *extra])
        first = f"{self.prefix}1"
        start = ["ip", "netns", "exec", first, "unshare", "--uts", "bash", "-c", 'hostname "$0"; exec "$@"', first]
        return [*start, *line]

    def environment(self, launcher: mpirun.Launcher) -> dict[str, str]:
        """Return the environment to start `command` in."""
        return {**os.environ, **self._added(launcher), **mpirun.session(launcher, Path(self._sessions.name))}

    def _added(self, launcher: mpirun.Launcher) -> dict[str, str]:
        added = mpirun.settings(launcher) | {
            "HPCDIST_HOSTS": self.prefix,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        if launcher.vendor != mpirun.OPEN_MPI:
            added |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        return added

    def run(
        self, line: Sequence[str], environment: dict[str, str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``line``, its output in one stream; what outlives ``timeout_s`` is killed, and TimeoutExpired raised."""
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
