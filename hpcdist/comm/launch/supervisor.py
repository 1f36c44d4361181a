"""Supervisor of a launcher and its ranks: forwards signals to the ranks, and leaves no process running.

The launcher runs in a separate session without Ctrl-C, because Open MPI's mpirun would kill the ranks at a SIGINT.
Linux only (PR_SET_CHILD_SUBREAPER).
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hpcdist.comm.launch import exit_file
from hpcdist.comm.launch.environment import (
    RUN_DIR,
    descendants,
    environment_of,
    is_stopped,
    launch_environment,
    parent_of,
    send_signal,
)
from hpcdist.comm.launch.exit_file import LAUNCH_DIR, NOTHING_TO_SAVE, STOP_CODES, remove_segments
from hpcdist.comm.launch.guard import Guard
from hpcdist.comm.launch.launchers import MPIRUN, LauncherKind
from hpcdist.comm.launch.standard_streams import Relay
from hpcdist.constants import DEADLINE_S
from hpcdist.errors import FAILURE, INTERRUPTED, OK, REQUEUE

TEARDOWN_S: Final = 3.0  # for remaining processes of a job to end before they are killed
TICK_S: Final = 1.0
SOON_S: Final = 0.1  # a tick while a signal is pending for ranks that are still starting
STARTING_S: Final = 15.0  # limit of a pending signal; then all ranks run elsewhere, and the launcher gets the signal
AT_ONCE_S: Final = 1.5  # for ranks that have nothing to save to exit by themselves
APART_S: Final = 0.1  # between requests for stacks, so that the dumps of ranks do not mix
LOOK_S: Final = 5.0  # between two searches for stopped processes
STOPPED_S: Final = DEADLINE_S  # maximum time for which all ranks may be stopped

PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

# Signal to this process -> signal to the ranks. A closed terminal (SIGHUP) means: save and stop.
_PASSED: Final = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
_WATCHED: Final = {*_PASSED, signal.SIGCHLD}
_ENDING: Final = {*_PASSED} - {signal.SIGUSR2}  # signals that ask for the end of the job
# With such a code all ranks exit by themselves: exit hooks, and profilers that write a report, may take time.
_TOGETHER: Final = (OK, REQUEUE, INTERRUPTED)


def _watched() -> set[signal.Signals]:
    return {number for number in _WATCHED if signal.getsignal(number) is not signal.SIG_IGN}


@dataclass(frozen=True)
class LaunchOutcome:
    """Result of one run of a job: its exit code, and the first stop signal (such as SIGTERM) or None."""

    code: int
    stop_signal: signal.Signals | None
    agreed: bool  # the ranks wrote the code: earlier failures of single ranks do not count


def pause(seconds: float) -> signal.Signals | None:
    """Wait ``seconds`` seconds, or until a stop signal arrives. Return the signal, or None if there was no signal."""
    # Call this function in a `signals_held` block.
    until = time.monotonic() + seconds
    while True:
        received = signal.sigtimedwait(_watched(), max(0.0, until - time.monotonic()))
        if received is None:
            return None
        if received.si_signo in _ENDING:
            return signal.Signals(received.si_signo)


@contextmanager
def signals_held() -> Iterator[set[signal.Signals]]:
    """Context manager: block the signals that `Supervision` handles. Yield the previous signal mask."""
    # Orphaned processes of the job become children of this process.
    libc = ctypes.CDLL(None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _watched())
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(eq=False)
class _PendingSignal:
    number: signal.Signals
    until: float  # time.monotonic() after which a new rank does not get the signal
    receivers: set[int] = field(default_factory=set)  # processes that already have the signal


@dataclass(eq=False)
class Supervision:
    """Supervisor of a launcher process, which forwards signals to its ranks. Create it inside `signals_held`."""

    line: Sequence[str]  # the launcher command
    environment: Mapping[str, str]
    launch_dir: Path  # for process ids and the exit code of the job, written by ranks
    grace_s: float  # for the ranks to save and exit after a stop signal, before they are killed
    mask: set[signal.Signals]  # yielded by `signals_held`
    surviving: bool = False  # the job continues after a rank failure
    telling: bool = False  # every started rank writes the exit code file: without this file, the job has failed
    kind: LauncherKind = MPIRUN
    foreign: bool = False  # not a command of hpcdist: its ranks may not write their process ids

    def __post_init__(self) -> None:
        self._stop_signal: signal.Signals | None = None  # the signal that began the grace period
        self._first_signal: signal.Signals | None = None  # the first that asked for the end of the job
        self._ending = False  # the ranks have written an exit code, and exit
        self._deadline = float("inf")
        self._killed = False
        self._pending: list[_PendingSignal] = []  # for ranks that have not announced themselves yet
        self._discard_signal: signal.Signals | None = None  # the signal that came while there was nothing to save
        self._stopped: set[int] = set()  # processes of the job that are stopped (SIGSTOP)
        self._blocked_s = 0.0  # seconds in which stopped processes blocked the whole job
        self._began = self._looked = time.monotonic()
        self._watched = _watched()
        self._trains_in_script = self.foreign and RUN_DIR in self.environment
        libc = ctypes.CDLL(None)

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            # If this process is killed, the launcher ends its ranks.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

        self._guard = Guard(self.launch_dir, self._watched - {signal.SIGCHLD})
        self._relay = Relay()
        self._process = subprocess.Popen(
            self.line,
            env={**self.environment, LAUNCH_DIR: str(self.launch_dir)},
            stdin=subprocess.DEVNULL,
            stdout=self._relay.stdout,  # a launcher that cannot write its output may end, or kill its ranks
            stderr=self._relay.stderr,
            start_new_session=True,
            preexec_fn=in_child,  # single-threaded here, so a function between fork and exec is safe
        )
        self._relay.begin()

    def run(self) -> LaunchOutcome:
        """Wait until the launcher has ended, handle signals meanwhile, and return the outcome."""
        while self._process.returncode is None:
            tick = SOON_S if self._pending else TICK_S
            wait_s = min(tick, max(0.0, self._deadline - time.monotonic()))
            received = signal.sigtimedwait(self._watched, wait_s)
            self._reap()
            self._look_for_the_end()
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._on_signal(signal.Signals(received.si_signo), received.si_pid)
            elif time.monotonic() >= self._deadline and self._process.returncode is None:
                self._on_deadline()
            elif self._pending:
                self._pass_on()
            self._look_for_stopped()
        self._end_leftovers()
        self._end_output()
        remove_segments(self.launch_dir)
        outcome = self._outcome()
        self._relay.release(outcome.code if self._is_explained(outcome.code) else None)
        return outcome

    def _is_explained(self, code: int) -> bool:
        if any(self.launch_dir.glob("rank-*.txt")):
            return True
        is_stop = code in (REQUEUE, INTERRUPTED) and not self._killed
        return is_stop and exit_file.read_exit_code(self.launch_dir) == code

    def _on_deadline(self) -> None:
        if self._discard_signal is not None and self._has_begun():  # the first step has ended meanwhile
            number, self._discard_signal = self._discard_signal, None
            self._deadline = float("inf")
            self._give_grace(number)
            return
        if not self._ending and self._discard_signal is None:
            self._say(f"the ranks did not stop within {self.grace_s:g} s, killing them")
        self._kill()

    def _look_for_the_end(self) -> None:
        # A command that a foreign program runs may write an exit code as well, while that program continues.
        believed = self.surviving or not (self.kind.keeps_codes or self.foreign)
        code = exit_file.read_exit_code(self.launch_dir) if believed and not self._ending else None
        if code is not None and (self.surviving or code not in _TOGETHER):
            self._ending, self._pending = True, []
            self._deadline = min(self._deadline, time.monotonic() + TEARDOWN_S)

    def _outcome(self) -> LaunchOutcome:
        code, announced = self._process.returncode, exit_file.read_exit_code(self.launch_dir)
        failed = any(self.launch_dir.glob("rank-*.txt"))  # a rank could not save: code 130 would claim that it had
        # A launcher that kills the last ranks because the first has exited with 75 returns 137.
        agreed = announced is not None and (self.surviving or not self.kind.keeps_codes or code == OK)
        if self.foreign:  # a command of the program may have written it: it can explain a failure, not cause one
            agreed = announced not in (None, OK) and not self.kind.keeps_codes and code != OK
        # Ranks on other hosts can neither write the code nor announce themselves.
        lost = announced is None and (self.surviving or (self.telling and bool(self._announced_pids())))
        if agreed and announced is not None:
            code = announced
        elif self._discard_signal is not None and code != OK:
            code = STOP_CODES[self._discard_signal]
        elif self._ended_while_importing(code) and self._first_signal is not None:
            code = STOP_CODES[self._first_signal]
        elif self._stop_signal is signal.SIGINT and (self._killed or not failed):
            code = 128 + signal.SIGINT
        elif self._killed and self._stop_signal is not None:
            code = 128 + self._stop_signal
        elif lost and code == OK:
            self._say("no rank was left to report the end of the job, though its launcher returned 0")
            code = FAILURE
        return LaunchOutcome(code if code >= 0 else 128 - code, self._first_signal, agreed)

    def _ended_while_importing(self, code: int) -> bool:
        # The signal came before the training script installed signal handlers.
        if not self._trains_in_script or self._killed or self._first_signal is None or self._announced_pids():
            return False
        return (code if code >= 0 else 128 - code) == 128 + _PASSED[self._first_signal]

    def _on_signal(self, number: signal.Signals, sender: int) -> None:
        if number in _ENDING:
            if sender == self._guard.pid and self._first_signal is not None:
                return  # sent to both processes, as by pkill, it is one request; a second SIGINT would kill the ranks
            self._first_signal = self._first_signal or number
        self._request(number)

    def _request(self, number: signal.Signals) -> None:
        if self._ending:
            return  # the ranks exit already, within TEARDOWN_S
        if self._stop_signal is not None and number is signal.SIGINT:
            self._say("interrupted again, killing the ranks")
            self._stop_signal = number
            self._kill()
            return
        now, is_announced = time.monotonic(), bool(self._announced_pids())
        until = now + STARTING_S if is_announced else self._began + STARTING_S
        if self.foreign and not is_announced and number is signal.SIGINT:
            until = now  # Ctrl-C is meant for the running program, whatever it is
        self._pending.append(_PendingSignal(_PASSED[number], until))
        if self._discard_signal is None and number in _ENDING and self._nothing_to_save():
            self._say(f"{number.name}: there is nothing to save, ending the job")
            self._discard_signal = number
            self._deadline = min(self._deadline, now + (AT_ONCE_S if is_announced else 0.0))
        elif self._discard_signal is None:
            self._give_grace(number)
        self._pass_on()

    def _give_grace(self, number: signal.Signals) -> None:
        # USR1: the scheduler knows how long saving may take; USR2: the ranks dump their stacks and continue.
        if number not in (signal.SIGUSR1, signal.SIGUSR2) and self._stop_signal is None:
            self._stop_signal = number
            self._deadline = time.monotonic() + self.grace_s
            again = "; Ctrl-C again kills them" if number is signal.SIGINT else ""
            does = f"have {self.grace_s:g} s to save and end" if self.foreign else "save and stop at the next step"
            self._say(f"{number.name}: the ranks {does}{again}")

    def _nothing_to_save(self) -> bool:
        marks = [int(path.name.removeprefix(NOTHING_TO_SAVE)) for path in self.launch_dir.glob(f"{NOTHING_TO_SAVE}*")]
        if any(self._is_ours(pid) for pid in marks):
            return True
        starting = not self._announced_pids() and time.monotonic() - self._began < STARTING_S
        return starting and not self.foreign  # a foreign program may have something to save

    def _has_begun(self) -> bool:
        running = [pid for pid in self._announced_pids() if self._is_ours(pid)]
        return any(not (self.launch_dir / f"{NOTHING_TO_SAVE}{pid}").exists() for pid in running)

    def _look_for_stopped(self) -> None:
        elapsed_s = time.monotonic() - self._looked
        if elapsed_s < LOOK_S:
            return
        self._looked += elapsed_s
        launcher, ranks = self._process.pid, {pid for pid in self._announced_pids() if self._is_ours(pid)}
        stopped = {pid for pid in (launcher, *ranks) if is_stopped(pid)}
        blocked = launcher in stopped or (bool(ranks) and ranks <= stopped)
        new, self._stopped = sorted(stopped - self._stopped), stopped
        if new:
            names = " ".join(f"{pid} (the launcher)" if pid == launcher else str(pid) for pid in new)
            end = f"; in {STOPPED_S:g} s the job saves and ends" if blocked else ""
            self._say(f"stopped processes: {names}; `kill -CONT {' '.join(map(str, new))}` continues them{end}")
        # This process may have been stopped, too: time without a search does not count.
        self._blocked_s = self._blocked_s + min(elapsed_s, 2 * LOOK_S) if blocked else 0.0
        if self._blocked_s >= STOPPED_S and self._stop_signal is None:
            self._say(f"the job has been stopped for {STOPPED_S:g} s")
            self._request(signal.SIGTERM)

    def _pass_on(self) -> None:
        # Ranks on other hosts learn of a stop from the ranks on this host.
        # A rank announces itself when it has signal handlers. Without them, a signal would end the job.
        pids = [pid for pid in self._announced_pids() if self._is_ours(pid)]
        for pending in self._pending:
            for pid in set(pids) - pending.receivers:
                send_signal(pid, pending.number)
                pending.receivers.add(pid)
                if pending.number is signal.SIGUSR2:
                    time.sleep(min(APART_S, AT_ONCE_S / len(pids)))
                else:
                    self._let_go_on(pid)
        if self._pending and self._stop_signal is not None:
            self._let_go_on(self._process.pid)
        expired = [pending for pending in self._pending if time.monotonic() >= pending.until]
        self._pending = [pending for pending in self._pending if pending not in expired]
        for pending in expired:
            if self.foreign and not pending.receivers:
                pending.receivers = self._started_here()
                for pid in pending.receivers:
                    send_signal(pid, pending.number)
            if not pending.receivers:
                passed = self.kind.forwards.get(pending.number)
                send_signal(self._process.pid, passed or signal.SIGTERM)
                self._deadline = self._deadline if passed else time.monotonic() + self.kind.teardown_s

    def _let_go_on(self, pid: int) -> None:
        if is_stopped(pid):
            send_signal(pid, signal.SIGCONT)

    def _announced_pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.launch_dir.glob("pid-*") if path.suffix != ".tmp"]

    def _started_here(self) -> set[int]:
        # Inherited variables of a launcher whose rank is this process, as in `srun --pty bash`, do not count.
        inherited = (None, launch_environment())
        ours = [pid for pid in descendants(os.getpid()) if self._is_ours(pid)]
        ranks = {pid for pid in ours if launch_environment(environment_of(pid)) not in inherited}
        return {pid for pid in ranks if parent_of(pid) not in ranks}

    def _is_ours(self, pid: int) -> bool:
        return environment_of(pid).get(LAUNCH_DIR) == str(self.launch_dir)

    def _kill(self) -> None:
        self._killed, self._deadline = True, float("inf")
        send_signal(self._process.pid, signal.SIGTERM)  # so that it ends ranks on other hosts
        self._let_go_on(self._process.pid)
        self._wait_for(lambda: self._process.returncode is not None, self.kind.teardown_s)
        self._kill_descendants()

    def _end_leftovers(self) -> None:
        self._guard.dismiss()
        self._wait_for(lambda: not descendants(os.getpid()))
        self._kill_descendants()

    def _end_output(self) -> None:
        until = time.monotonic() + TEARDOWN_S if descendants(os.getpid()) else float("inf")  # they may hold the pipe
        while not self._relay.ended and time.monotonic() < until:
            received = signal.sigtimedwait(_ENDING & self._watched, SOON_S)
            if received is not None:
                self._first_signal = self._first_signal or signal.Signals(received.si_signo)
                return

    def _kill_descendants(self) -> None:
        until = time.monotonic() + TEARDOWN_S  # a process that hangs in the kernel cannot be ended
        # Repeated, because a process may just have started another process.
        while descendants(os.getpid()) and time.monotonic() < until:
            for pid in descendants(os.getpid()):
                send_signal(pid, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            self._reap()

    def _wait_for(self, done: Callable[[], bool], limit_s: float = TEARDOWN_S) -> None:
        until = time.monotonic() + limit_s
        while not done() and time.monotonic() < until:
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._process.pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)

    def _say(self, text: str) -> None:
        print(f"hpcdist run: {text}", file=sys.stderr, flush=True)
