"""Watchdog: an operation that exceeds its deadline ends the job, after all ranks have written their stacks.

The watchdog also writes the recorder's heartbeat, which distinguishes a stopped rank from a waiting rank.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hpcdist.comm.failure import failfast
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.constants import NS_PER_S
from hpcdist.errors import FAILURE, ConfigurationError

MARKER: Final = "deadline"  # file next to the records: a rank has passed its deadline, so all ranks dump their stacks


class Watchdog:
    """Thread that ends the job if an operation in the flight ``recorder`` takes longer than ``deadline_s`` seconds."""

    def __init__(
        self,
        recorder: Recorder,
        deadline_s: float,
        first_step_factor: float = 4.0,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        # math.inf means no deadline
        if not deadline_s > 0:
            raise ConfigurationError(f"communication.deadline_s is {deadline_s}; give a number of seconds above 0")
        self.recorder, self.deadline_s, self.first_step_factor = recorder, deadline_s, first_step_factor
        # At a timeout, all ranks write their stacks here. The late rank then exits with code 1 without finalising MPI.
        self.stacks = recorder.path.with_suffix(".stacks")
        self._leave = leave
        self._factor = 1.0
        self._limits_s: dict[str, float] = {}
        self._interval_s = min(1.0, deadline_s / 10)
        # Rarely, because the marker is on a shared file system and every rank polls it.
        self._marker_interval_s = min(10.0, deadline_s / 10)
        self._marker = recorder.path.with_name(MARKER)
        self._old_marker = self._followed = self._identity()  # from an earlier run in this directory
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.stacks.unlink(missing_ok=True)

    def start(self) -> None:
        """Start the watchdog thread. Local."""
        self._beat()  # so that a rank stopped before the thread first runs shows an overdue heartbeat
        self._thread.start()

    def stop(self) -> None:
        """Stop the watchdog thread. Operations have no deadline afterwards. Local."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self.recorder.beat(0)

    def relax(self) -> None:
        """Allow operations a longer time until `tighten` is called: the deadline times ``first_step_factor``. Local."""
        self._factor = self.first_step_factor

    def tighten(self) -> None:
        """Restore the normal deadline after `relax`. Local."""
        self._factor = 1.0

    def limit(self, comm: str, deadline_s: float) -> None:
        """Set a separate deadline for the communicator named ``comm`` and its derived communicators. Local."""
        self._limits_s = {**self._limits_s, comm: deadline_s}  # a new dictionary: the thread reads the old dictionary
        self._interval_s = min(self._interval_s, deadline_s / 10)

    def _deadline_s(self, token: int) -> float:
        limits = self._limits_s
        name = self.recorder.communicator(token) if limits else ""
        parents = [comm for comm in limits if f"{name}/".startswith(f"{comm}/")]
        return self._factor * (limits[max(parents, key=len)] if parents else self.deadline_s)

    def _watch(self) -> None:
        resumed = last = time.monotonic_ns()
        next_look = last
        while not self._stopping.wait(self._interval_s):
            now = time.monotonic_ns()
            if now - last > (5 * self._interval_s + 1) * NS_PER_S:
                resumed = now  # the whole process was stopped (suspended job, debugger): deadlines start again
                self.recorder.note("frozen", f"was stopped for {(now - last) / NS_PER_S:.1f} s")
            self._beat()
            last = now
            overdue = [
                (start, token) for start, token in self.recorder.running() if self._late(now, start, resumed, token)
            ]
            if overdue:
                self._expire(*overdue[0])
                return
            if now >= next_look:
                next_look = now + int(self._marker_interval_s * NS_PER_S)
                self._follow()

    def _beat(self) -> None:
        self.recorder.beat(int(self._interval_s * NS_PER_S))

    def _late(self, now: int, start: int, resumed: int, token: int) -> bool:
        age_s = (now - max(start, resumed)) / NS_PER_S
        shortest_s = min(self.deadline_s, *self._limits_s.values()) if self._limits_s else self.deadline_s
        return age_s > shortest_s * self._factor and age_s > self._deadline_s(token)

    def _expire(self, start: int, token: int) -> None:
        # The record has the rank in its run, reports have the rank of the job.
        rank, limit_s = failfast.reported_rank(self.recorder.rank), self._deadline_s(token)
        what = self.recorder.describe(token)
        text = f"{what}: has taken {(time.monotonic_ns() - start) / NS_PER_S:.1f} s, the deadline is {limit_s:g} s"
        self.recorder.note("deadline", text)
        self._dump(text)
        if self._announce(f"rank {rank}: {text}\n"):
            text += (
                f"\nThe stacks of all ranks that still run are in {self.stacks.parent}."
                f"\n`hpcdist hang {self.stacks.parent.parent}` names the rank that did not arrive."
            )
            failfast.publish(rank, f"rank {rank} waited past its deadline: exit code {FAILURE}", text)
            faulthandler.dump_traceback(failfast.STDERR, all_threads=True)
        time.sleep(2 * self._marker_interval_s + 0.5)  # the others write their stacks now; an exit would end them
        self._leave(FAILURE)

    def _announce(self, text: str) -> bool:
        complete = self._marker.with_name(f"{self._marker.name}.{self.recorder.rank}")
        try:
            if self._old_marker is not None and self._identity() == self._old_marker:
                self._marker.unlink(missing_ok=True)
            complete.write_text(text)
            try:
                os.link(complete, self._marker)  # the marker appears with its text, so no rank sees two versions of it
            finally:
                complete.unlink()
        except FileExistsError:
            return False
        except OSError:
            return True  # the directory is not usable, so every rank reports for itself
        return True

    def _follow(self) -> None:
        marker = self._identity()
        if marker is not None and marker != self._followed:
            self._followed = marker
            try:
                text = self._marker.read_text().strip()
            except OSError as error:
                text = f"({error})"
            self._dump(f"the deadline of another rank has passed: {text}")

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._marker.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _dump(self, reason: str) -> None:
        try:
            time_utc = datetime.now(UTC).isoformat(timespec="seconds")
            _dump_to(self.stacks, f"{time_utc} rank {self.recorder.rank}: {reason}")
        except OSError as error:
            failfast.publish(self.recorder.rank, f"cannot write {self.stacks}: {error}", reason)
            faulthandler.dump_traceback(failfast.STDERR, all_threads=True)


def _dump_to(path: Path, headline: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags, 0o666), "a") as file:
        file.write(headline + "\n")
        file.flush()  # faulthandler writes to the descriptor, past the buffer
        faulthandler.dump_traceback(file, all_threads=True)
