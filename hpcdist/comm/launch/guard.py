"""Guard of a job: a process that ends the launcher's processes if the supervisor itself is killed.

PR_SET_PDEATHSIG is not enough: Open MPI's mpirun that gets SIGTERM while it starts ranks leaves them in MPI_Init.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from hpcdist.comm.launch.environment import environment_of, parent_of, send_signal
from hpcdist.comm.launch.exit_file import LAUNCH_DIR, remove_segments
from hpcdist.errors import FAILURE

TEARDOWN_S: Final = 3.0  # for the launcher to end its ranks
QUIET_S: Final = 1.0  # without a process of the job: then no process is about to be started
MOST_S: Final = 30.0  # a process that hangs in the kernel cannot be ended
# Programs of Open MPI and MPICH that start ranks, and that wait for the end of the ranks.
LAUNCHERS: Final = frozenset(("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted", "hydra_pmi_proxy"))
PASSING_S: Final = 0.1  # a signal to both processes reaches the supervisor directly first


class Guard:
    """Forked process that ends the job's processes if the supervisor, its parent process, is killed."""

    def __init__(self, launch_dir: Path, passed: Collection[signal.Signals] = ()) -> None:
        # The supervisor must be single-threaded, and block the signals `passed`, which the guard forwards to it.
        supervisor = os.getpid()
        held, self._holding = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _watch(held, launch_dir, supervisor, passed)
        os.close(held)

    def dismiss(self) -> None:
        """End the guard process, because the job has ended. Local."""
        with suppress(OSError):
            os.write(self._holding, b".")
        os.close(self._holding)
        with suppress(ChildProcessError):  # other code has waited for all children
            os.waitpid(self.pid, 0)


def _watch(held: int, launch_dir: Path, supervisor: int, passed: Collection[signal.Signals]) -> NoReturn:
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)  # so that readers of the supervisor's output do not wait for this process
        # Close open descriptors only: without a limit of their number, closing all possible ones would take minutes.
        # This includes the other end of the pipe, which only the supervisor may hold.
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, held}:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(number)
        _pass_to(supervisor, passed)
        if os.read(held, 1) == b"":
            time.sleep(TEARDOWN_S)
            _end(launch_dir)
            remove_segments(launch_dir)
    finally:
        os._exit(0)


def _pass_to(supervisor: int, passed: Collection[signal.Signals]) -> None:
    def forward(number: int, _: object) -> None:
        time.sleep(PASSING_S)
        if os.getppid() == supervisor:
            send_signal(supervisor, signal.Signals(number))

    for number in passed:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)


def _end(launch_dir: Path) -> None:
    until, last = time.monotonic() + MOST_S, time.monotonic()
    while time.monotonic() < min(until, last + QUIET_S):
        for name in filter(str.isdigit, os.listdir("/proc")):
            if environment_of(int(name)).get(LAUNCH_DIR) == str(launch_dir):
                send_signal(int(name), signal.SIGKILL)
                last = time.monotonic()
        time.sleep(0.05)


def end_with_launcher() -> None:
    """End this rank when its mpirun ends. Does nothing under `hpcdist run`. Local."""
    if LAUNCH_DIR in os.environ:
        return
    launcher = _launcher_of(os.getpid())
    if launcher:
        with suppress(OSError):  # a kernel before 5.3, or the launcher has just ended
            handle = os.pidfd_open(launcher)
            threading.Thread(target=_end_after, args=(handle, launcher), name="watch of mpirun", daemon=True).start()


def _launcher_of(pid: int) -> int:
    while (pid := parent_of(pid)) > 1:
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() in LAUNCHERS:
                return pid
    return 0


def _end_after(handle: int, launcher: int) -> None:
    poll = select.poll()  # not select: the descriptor number may exceed 1023
    poll.register(handle, select.POLLIN)
    poll.poll()
    with suppress(OSError, ValueError):  # the output may have no reader
        sys.stderr.write(f"hpcdist: the launcher (process {launcher}) has ended; this rank ends, too\n")
        sys.stderr.flush()
    os._exit(FAILURE)
