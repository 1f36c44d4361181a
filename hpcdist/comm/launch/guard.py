"""Guard of a job: a process that ends what the launcher has started when the supervisor itself is killed.

The launcher gets SIGTERM then, by PR_SET_PDEATHSIG. That is not enough: mpirun of Open MPI that gets it in the moment
in which it starts ranks leaves them behind, and they wait for it in MPI_Init for ever.

In a list of processes the guard looks like a second `hpcdist run`: so it passes signals on to the supervisor.

`end_with_launcher` is for ranks without a guard: mpirun started them directly.
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
QUIET_S: Final = 1.0  # without a process of the job: none is about to be started
MOST_S: Final = 30.0  # one that hangs in the kernel cannot be ended by anybody
# Programs of Open MPI and MPICH that start ranks, and that wait for the end of the ranks.
LAUNCHERS: Final = frozenset(("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted", "hydra_pmi_proxy"))
PASSING_S: Final = 0.1  # a signal to both processes reaches the supervisor directly first


class Guard:
    """Process beside this one, which must not have threads yet; the job's processes name ``launch_dir``.

    The signals ``passed``, which this process has blocked, come back to it when the guard gets them.
    """

    def __init__(self, launch_dir: Path, passed: Collection[signal.Signals] = ()) -> None:
        supervisor = os.getpid()
        held, self._holding = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _watch(held, launch_dir, supervisor, passed)
        os.close(held)

    def dismiss(self) -> None:
        """End the process: the supervisor has seen the end of the job (local)."""
        with suppress(OSError):
            os.write(self._holding, b".")
        os.close(self._holding)
        with suppress(ChildProcessError):  # somebody has waited for all children
            os.waitpid(self.pid, 0)


def _watch(held: int, launch_dir: Path, supervisor: int, passed: Collection[signal.Signals]) -> NoReturn:
    """Wait for the end of the supervisor, and leave; if it was killed, end the processes of the job first."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)  # whoever reads the output of the supervisor does not wait for this process
        # Those that are open, not all that may be: where their number is not limited, that would take minutes. The
        # other end of the pipe is among them: the supervisor alone holds it.
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, held}:
            with suppress(OSError):  # that of the list itself
                os.close(number)
        _pass_to(supervisor, passed)
        if os.read(held, 1) == b"":
            time.sleep(TEARDOWN_S)
            _end(launch_dir)
            remove_segments(launch_dir)
    finally:
        os._exit(0)


def _pass_to(supervisor: int, passed: Collection[signal.Signals]) -> None:
    """Send the signals ``passed`` that this process gets to the ``supervisor``, while that is its parent."""

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
    """End this rank at once when the launcher that started it is killed (local).

    mpirun of Open MPI leaves its ranks behind then. A rank in a collective notices the loss only if it has peers.
    A job of `hpcdist run` has a `Guard`. slurmstepd ends its ranks itself, so it is not watched.
    """
    if LAUNCH_DIR in os.environ:
        return
    launcher = _launcher_of(os.getpid())
    if launcher:
        with suppress(OSError):  # a kernel before 5.3, or the launcher has just ended
            handle = os.pidfd_open(launcher)
            threading.Thread(target=_end_after, args=(handle, launcher), name="watch of mpirun", daemon=True).start()


def _launcher_of(pid: int) -> int:
    """Return the nearest ancestor of ``pid`` that is a launcher of MPI, or 0 if there is no launcher."""
    while (pid := parent_of(pid)) > 1:
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text(errors="replace").strip() in LAUNCHERS:
                return pid
    return 0


def _end_after(handle: int, launcher: int) -> None:
    """Wait for the end of the process ``launcher``, of which ``handle`` is a pidfd, and leave."""
    poll = select.poll()  # not select: the number of a descriptor may be above 1023
    poll.register(handle, select.POLLIN)
    poll.poll()
    with suppress(OSError, ValueError):  # nobody may read the output any more
        sys.stderr.write(f"hpcdist: the launcher (process {launcher}) has ended; this rank ends, too\n")
        sys.stderr.flush()
    os._exit(FAILURE)
