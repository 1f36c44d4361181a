"""Supervisor of a launcher and its ranks: passes signals to the ranks, and leaves no process behind.

Open MPI's mpirun answers a SIGINT by killing the ranks within half a second, MPICH's passes it on and may go on: so
the launcher runs in a session of its own, where no Ctrl-C reaches it, and the ranks, which write their process ids
into a directory (`comm.start`), are signalled from here. Linux only: orphans are adopted (PR_SET_CHILD_SUBREAPER) and
ended.

A job that outlived some of its ranks says itself how it ended (`launch.exit_file`): its launcher need not know, nor
end. While its ranks have nothing to save it is ended at once by a signal to stop.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from hpcdist.comm.launch.exit_file import LAUNCH_DIR, NOTHING_TO_SAVE, SEGMENTS, STOP_CODES, is_segment
from hpcdist.comm.launch.launchers import MPIRUN, LauncherKind
from hpcdist.comm.launch.standard_streams import Relay
from hpcdist.errors import FAILURE, INTERRUPTED, OK, REQUEUE

TEARDOWN_S: Final = 3.0  # what is left of a job gets to end before it is killed
TICK_S: Final = 1.0
SOON_S: Final = 0.1  # a tick while a signal waits for ranks that are still starting
STARTING_S: Final = 15.0  # so long; then all ranks run elsewhere, and the launcher may know how to reach them
AT_ONCE_S: Final = 1.5  # ranks that have nothing to save get to leave by themselves
LOOK_S: Final = 5.0  # so often for processes that somebody has stopped
STOPPED_S: Final = 300.0  # as long as the default of communication.deadline_s, which one stopped rank meets

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

# What we are told -> what the ranks are told. A terminal that closed is a wish to stop and save.
_PASSED: Final = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}
_WATCHED: Final = {*_PASSED, signal.SIGCHLD}
_ENDING: Final = {*_PASSED} - {signal.SIGUSR2}  # a wish that the job ends
# All ranks leave with such a code by themselves: hooks at exit, and profilers that write a report, take their time.
_TOGETHER: Final = (OK, REQUEUE, INTERRUPTED)


def _watched() -> set[signal.Signals]:
    """Return what to wait for; a signal that our parent ignores (nohup, a background job) stays ignored."""
    return {number for number in _WATCHED if signal.getsignal(number) is not signal.SIG_IGN}


@dataclass(frozen=True)
class LaunchOutcome:
    """Outcome of one start of a job: the exit code of its ranks, and the first signal to us that asked for an end."""

    code: int
    asked: signal.Signals | None
    agreed: bool  # the ranks said the code themselves: what single ones said before does not count


def watch(
    line: Sequence[str],
    environment: Mapping[str, str],
    launch_dir: Path,
    grace_s: float,
    mask: set[signal.Signals],
    surviving: bool = False,
    telling: bool = False,
    kind: LauncherKind = MPIRUN,
    foreign: bool = False,
) -> LaunchOutcome:
    """Run the command ``line`` of a launcher of ``kind`` to its end, inside of `signals_held`, which yielded ``mask``.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed to the ranks. After the first three the ranks have
    ``grace_s`` seconds to save and leave; then, or at a second SIGINT, everything is killed. The code is that of the
    ranks, 130 after a SIGINT, and 128 + number after another signal that ended in killing.

    ``surviving`` ranks go on after a death, and their word counts, not what the launcher returns. They, and those that
    are ``telling``, say how they end: a launcher that returns 0 without their word has lost them. (Open MPI's does so
    when it loses a node.)

    A ``foreign`` program need not be of hpcdist: where no rank has announced itself STARTING_S after the start, signals
    go to the processes that the launcher has started here.
    """
    environment = {**environment, LAUNCH_DIR: str(launch_dir)}
    return _Supervision(line, environment, launch_dir, grace_s, mask, surviving, telling, kind, foreign).run()


def pause(seconds: float) -> signal.Signals | None:
    """Wait inside of `signals_held`; returns the signal that asked for an end meanwhile, if one did.

    What came since the end of a start counts, too.
    """
    until = time.monotonic() + seconds
    while True:
        received = signal.sigtimedwait(_watched(), max(0.0, until - time.monotonic()))
        if received is None:
            return None
        if received.si_signo in _ENDING:
            return signal.Signals(received.si_signo)


@contextmanager
def signals_held() -> Iterator[set[signal.Signals]]:
    """Hold the watched signals for `sigtimedwait`, and adopt orphans; yields the signal mask of the time before."""
    libc = ctypes.CDLL(None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _watched())
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def remove_segments(launch_dir: Path) -> None:
    """Remove the shared memory of MPI that ranks have named in ``launch_dir``: where the launcher died, it stays."""
    for path in launch_dir.glob(f"{SEGMENTS}*"):
        with suppress(OSError, ValueError):
            for segment in map(Path, path.read_text().splitlines()):
                with suppress(OSError):  # most have been removed already
                    if is_segment(segment) and segment.lstat().st_uid == os.getuid():
                        segment.unlink()


@dataclass(eq=False)
class _Held:
    """A signal for ranks that may still be starting: those in ``told`` have it, others get it up to ``until``."""

    number: signal.Signals
    until: float  # of time.monotonic()
    told: set[int] = field(default_factory=set)


class _Supervision:
    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        launch_dir: Path,
        grace_s: float,
        mask: set[signal.Signals],
        surviving: bool,
        telling: bool,
        kind: LauncherKind,
        foreign: bool,
    ) -> None:
        self._telling, self._kind, self._foreign = telling, kind, foreign
        self._launch_dir, self._grace_s, self._surviving = launch_dir, grace_s, surviving
        self._told: signal.Signals | None = None  # the first signal that asks for an end at once
        self._asked: signal.Signals | None = None  # the first that asks for an end
        self._ending = False  # the ranks have said that they leave
        self._deadline = float("inf")
        self._killed = False
        self._held: list[_Held] = []  # for ranks that have not announced themselves yet
        self._void: signal.Signals | None = None  # the signal that came while there was nothing to save
        self._stopped: set[int] = set()  # processes of the job that somebody has stopped
        self._blocked_s = 0.0  # so long they have kept all others from going on
        self._began = self._looked = time.monotonic()
        self._watched = _watched()
        self._trains_in_script = foreign and RUN_DIR in environment
        libc = ctypes.CDLL(None)

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # should we be killed, the launcher ends its ranks

        self._relay = Relay()
        self._process = subprocess.Popen(
            line,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._relay.stdout,  # a launcher whose output cannot be written may end, or kill its ranks
            stderr=self._relay.stderr,
            start_new_session=True,
            preexec_fn=in_child,  # single-threaded here, so a function between fork and exec is safe
        )
        self._relay.begin()

    def run(self) -> LaunchOutcome:
        while self._process.returncode is None:
            tick = SOON_S if self._held else TICK_S
            wait_s = min(tick, max(0.0, self._deadline - time.monotonic()))
            received = signal.sigtimedwait(self._watched, wait_s)
            self._reap()
            self._look_for_the_end()
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._on_signal(signal.Signals(received.si_signo))
            elif time.monotonic() >= self._deadline and self._process.returncode is None:
                self._on_deadline()
            elif self._held:
                self._pass_on()
            self._look_for_stopped()
        self._end_leftovers()
        self._end_output()
        remove_segments(self._launch_dir)
        return self._outcome()

    def _on_deadline(self) -> None:
        if self._void is not None and self._has_begun():  # the first step has ended meanwhile
            number, self._void = self._void, None
            self._deadline = float("inf")
            self._give_grace(number)
            return
        if not self._ending and self._void is None:
            self._say(f"the ranks did not stop within {self._grace_s:g} s, killing them")
        self._kill()

    def _look_for_the_end(self) -> None:
        # A command that a foreign program runs speaks, too, and that program goes on.
        believed = self._surviving or not (self._kind.keeps_codes or self._foreign)
        code = exit_file.read_exit_code(self._launch_dir) if believed and not self._ending else None
        if code is not None and (self._surviving or code not in _TOGETHER):
            self._ending, self._held = True, []
            self._deadline = min(self._deadline, time.monotonic() + TEARDOWN_S)

    def _outcome(self) -> LaunchOutcome:
        code, said = self._process.returncode, exit_file.read_exit_code(self._launch_dir)
        failed = any(self._launch_dir.glob("rank-*.txt"))  # a rank that could not save: 130 would promise that it did
        # A launcher that kills the last ranks because the first has left with 75 returns 137.
        agreed = said is not None and (self._surviving or not self._kind.keeps_codes or code == OK)
        if self._foreign:  # a command that the program ran may have said it: it explains a failure, and makes none
            agreed = said not in (None, OK) and not self._kind.keeps_codes and code != OK
        # On another host than this one they cannot say it, nor announce themselves.
        lost = said is None and (self._surviving or (self._telling and bool(self._announced_pids())))
        if agreed and said is not None:
            code = said
        elif self._void is not None and code != OK:
            code = STOP_CODES[self._void]
        elif self._ended_while_importing(code) and self._asked is not None:
            code = STOP_CODES[self._asked]
        elif self._told is signal.SIGINT and (self._killed or not failed):
            code = 128 + signal.SIGINT
        elif self._killed and self._told is not None:
            code = 128 + self._told
        elif lost and code == OK:
            self._say("no rank was left to say how the job ended, though its launcher returned 0")
            code = FAILURE
        return LaunchOutcome(code if code >= 0 else 128 - code, self._asked, agreed)

    def _ended_while_importing(self, code: int) -> bool:
        """Whether the signal that was passed on ended a script that should train, before it listened."""
        if not self._trains_in_script or self._killed or self._asked is None or self._announced_pids():
            return False
        return (code if code >= 0 else 128 - code) == 128 + _PASSED[self._asked]

    def _on_signal(self, number: signal.Signals) -> None:
        if number in _ENDING:
            self._asked = self._asked or number
        self._ask(number)

    def _ask(self, number: signal.Signals) -> None:
        """Pass ``number`` to the ranks, and give them their time for it."""
        if self._ending:
            return  # the ranks leave already, and have no more than TEARDOWN_S for it
        if self._told is not None and number is signal.SIGINT:
            self._say("interrupted again, killing the ranks")
            self._told = number
            self._kill()
            return
        now, is_announced = time.monotonic(), bool(self._announced_pids())
        until = now + STARTING_S if is_announced else self._began + STARTING_S
        if self._foreign and not is_announced and number is signal.SIGINT:
            until = now  # whoever presses Ctrl-C means the program that runs, whatever it is
        self._held.append(_Held(_PASSED[number], until))
        if self._void is None and number in _ENDING and self._nothing_to_save():
            self._say(f"{number.name}: there is nothing to save, ending the job")
            self._void = number
            self._deadline = min(self._deadline, now + (AT_ONCE_S if is_announced else 0.0))
        elif self._void is None:
            self._give_grace(number)
        self._pass_on()

    def _give_grace(self, number: signal.Signals) -> None:
        # USR1: the scheduler knows how long saving may take; USR2: the ranks dump their stacks and go on.
        if number not in (signal.SIGUSR1, signal.SIGUSR2) and self._told is None:
            self._told = number
            self._deadline = time.monotonic() + self._grace_s
            again = "; Ctrl-C again kills them" if number is signal.SIGINT else ""
            self._say(f"{number.name}: the ranks save and stop at the next step{again}")

    def _nothing_to_save(self) -> bool:
        """Whether a rank here says so, or none has come so far that it could; ranks elsewhere cannot say it."""
        marks = [int(path.name.removeprefix(NOTHING_TO_SAVE)) for path in self._launch_dir.glob(f"{NOTHING_TO_SAVE}*")]
        if any(self._is_ours(pid) for pid in marks):
            return True
        starting = not self._announced_pids() and time.monotonic() - self._began < STARTING_S
        return starting and not self._foreign  # of a program that announces nothing, nobody knows what it has

    def _has_begun(self) -> bool:
        """Whether a rank that runs here may have something to save; one that has left keeps its mark."""
        running = [pid for pid in self._announced_pids() if self._is_ours(pid)]
        return any(not (self._launch_dir / f"{NOTHING_TO_SAVE}{pid}").exists() for pid in running)

    def _look_for_stopped(self) -> None:
        """Tell of processes that somebody has stopped. Where no rank can go on, end the job after STOPPED_S.

        It is asked to save, as by a SIGTERM, for which they are continued.
        """
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
            self._say(f"somebody has stopped {names}; `kill -CONT {' '.join(map(str, new))}` lets it go on{end}")
        # We may have been stopped, too, and count no time of which nothing was seen.
        self._blocked_s = self._blocked_s + min(elapsed_s, 2 * LOOK_S) if blocked else 0.0
        if self._blocked_s >= STOPPED_S and self._told is None:
            self._say(f"the job has been stopped for {STOPPED_S:g} s")
            self._ask(signal.SIGTERM)

    def _pass_on(self) -> None:
        """Give what is held to the ranks of this host; ranks elsewhere agree with them to stop.

        A rank announces itself once it listens: before that a signal would end it, and so the job. One that announces
        itself later than others gets the signal then.
        """
        pids = [pid for pid in self._announced_pids() if self._is_ours(pid)]
        for held in self._held:
            for pid in set(pids) - held.told:
                send_signal(pid, held.number)
                held.told.add(pid)
                if held.number is not signal.SIGUSR2:
                    self._let_go_on(pid)
        if self._held and self._told is not None:
            self._let_go_on(self._process.pid)
        expired = [held for held in self._held if time.monotonic() >= held.until]
        self._held = [held for held in self._held if held not in expired]
        for held in expired:
            if self._foreign and not held.told:
                held.told = self._started_here()
                for pid in held.told:
                    send_signal(pid, held.number)
            if not held.told:
                passed = self._kind.forwards.get(held.number)
                send_signal(self._process.pid, passed or signal.SIGTERM)
                self._deadline = self._deadline if passed else time.monotonic() + self._kind.teardown_s

    def _let_go_on(self, pid: int) -> None:
        """Continue ``pid``, which shall save, where somebody has stopped it."""
        if is_stopped(pid):
            send_signal(pid, signal.SIGCONT)

    def _announced_pids(self) -> list[int]:
        return [int(path.read_text()) for path in self._launch_dir.glob("pid-*") if path.suffix != ".tmp"]

    def _started_here(self) -> set[int]:
        """Return the processes of this host that the launcher has started as ranks, whatever they are."""
        nobody = (
            None,
            launch_environment(),
        )  # a launcher that is a rank itself, as of `srun --pty bash`, hands that on
        ours = [pid for pid in descendants(os.getpid()) if self._is_ours(pid)]
        ranks = {pid for pid in ours if launch_environment(environment_of(pid)) not in nobody}
        return {pid for pid in ranks if parent_of(pid) not in ranks}

    def _is_ours(self, pid: int) -> bool:
        """Whether ``pid``, which may be meant on another host, is a rank of this job here.

        A rank need not be a descendant: in a Slurm job the launcher may start it through srun.
        """
        return environment_of(pid).get(LAUNCH_DIR) == str(self._launch_dir)

    def _kill(self) -> None:
        """End the launcher, politely first so that it can end ranks on other hosts, then all that is left here."""
        self._killed, self._deadline = True, float("inf")
        send_signal(self._process.pid, signal.SIGTERM)
        self._let_go_on(self._process.pid)
        self._wait_for(lambda: self._process.returncode is not None, self._kind.teardown_s)
        self._kill_descendants()

    def _end_leftovers(self) -> None:
        """Kill what is left of the job a moment after its launcher has gone."""
        self._wait_for(lambda: not descendants(os.getpid()))
        self._kill_descendants()

    def _end_output(self) -> None:
        """Wait until all output is passed on; whoever reads it slowly may end that by a signal."""
        until = time.monotonic() + TEARDOWN_S if descendants(os.getpid()) else float("inf")  # they may keep the pipe
        while not self._relay.ended and time.monotonic() < until:
            received = signal.sigtimedwait(_ENDING & self._watched, SOON_S)
            if received is not None:
                self._asked = self._asked or signal.Signals(received.si_signo)
                return

    def _kill_descendants(self) -> None:
        until = time.monotonic() + TEARDOWN_S  # one that hangs in the kernel cannot be ended by anybody
        while descendants(os.getpid()) and time.monotonic() < until:  # again, since one may just have started another
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
        """Collect the launcher's exit status, and adopted orphans that ended."""
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
