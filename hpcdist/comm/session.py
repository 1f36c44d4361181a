"""A started job as one of its ranks sees it: its world, what looks on, and how it is left or goes on."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcdist.comm import cuda_aware, failfast, placement, recordfile
from hpcdist.comm.agreement import all_say
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.deaths import is_death
from hpcdist.comm.events import NULL_SINK
from hpcdist.comm.recorder import Recorder
from hpcdist.comm.spans import NULL_SPANS, Spans, SpanSink
from hpcdist.comm.watchdog import Watchdog
from hpcdist.errors import StorageError
from hpcdist.reporting import atomic


@dataclass
class Session:
    """A started job: its world, this rank's place, and what looks on."""

    comm: Communicator
    place: placement.Placement
    library: str  # the MPI library's own version string; "none" for a process on its own
    abort: Callable[[int], None]
    recorder: Recorder | None = None
    watchdog: Watchdog | None = None
    device_pointers: cuda_aware.Verdict | None = None  # what MPI takes of GPU memory; None for a run on the CPU
    outlives: bool = False  # the job goes on when a rank dies: see `survive`, and `hpcdist run --survive`
    _finalise: Callable[[], None] = field(default=lambda: None)
    spans: SpanSink = NULL_SPANS  # what this rank does beside its messages

    def record(self, directory: Path, deadline_s: float, *, spans: bool = False) -> None:
        """Keep the last operations in ``directory``/recorder and hold each to ``deadline_s`` seconds. Collective.

        With ``spans``, keep there what this rank does between them, too.
        """
        folder = directory / "recorder"
        if self.comm.rank == 0:
            try:
                atomic.own_directory(folder)
                recordfile.remove_others(folder, self.comm.size)
            except OSError as error:
                raise StorageError(f"{folder} cannot be created: {error.strerror}; choose another --out") from error
        self.comm.barrier()
        failfast.allow(None)
        self.recorder = Recorder(folder / f"rank-{self.comm.rank:05d}.rec", self.comm.rank, self.comm.size)
        self.comm.events = self.recorder
        if spans:
            self.spans = Spans(folder / f"rank-{self.comm.rank:05d}.spans", self.comm.rank, self.comm.size)
        self.watchdog = Watchdog(self.recorder, deadline_s)
        self.watchdog.relax()  # the first step compiles kernels and opens connections
        self.watchdog.start()
        failfast.attach(self.recorder)

    def stop_recording(self) -> None:
        """End what `record` began: its files are let go, and no operation has a deadline any more (local).

        Where deaths are outlived the next `record`, or the end, must come within that of a first step.
        """
        if self.watchdog is not None and self.recorder is not None:
            if self.outlives:
                failfast.allow(self.watchdog.deadline_s * self.watchdog.first_step_factor)
            self.watchdog.stop()
            self.comm.events = NULL_SINK
            failfast.detach()
            self.recorder.note("finished", "end of the record")
            self.recorder.close()
        if isinstance(self.spans, Spans):
            self.spans.close()
        self.watchdog = self.recorder = None
        self.spans = NULL_SPANS

    def survive(self, comm: Communicator) -> "Session":
        """Return the session of those who go on as ``comm``, under their ranks there. Collective over ``comm``.

        From here on a failure speaks for them. This session must not be used any more; where it recorded, it stopped,
        and `record` begins anew.
        """
        self.stop_recording()
        session = replace(self, comm=comm, place=placement.locate(comm, None))
        if failfast.is_installed():  # not where ranks are threads of a test
            failfast.move(comm.rank)
            session.speak_as_one()
        return session

    def speak_as_one(self) -> None:
        """Tell failures that all ranks have once; where deaths are outlived, tell none of a thread (local)."""
        if self.comm.size > 1:
            failfast.join(lambda text: all_say(self.comm, text), self.withdraw)
        if self.outlives:
            failfast.outlive(is_death)

    def leave(self, code: int) -> None:
        """End together with exit code ``code``, all ranks having agreed on it. Collective.

        The first process that leaves with a non-zero code makes the launcher kill the others, so every rank flushes
        and finalises first. Where deaths are outlived, nobody waits for the dead, and `hpcdist run` is told the code.
        """
        if self.outlives:
            self.comm.agree(True)
        else:
            self.comm.barrier()
        if self.recorder is not None:
            self.recorder.note("finished", f"exit code {code}")
        self.withdraw()
        failfast.agreed_exit(code)

    def withdraw(self) -> None:
        """End the watch and MPI: nothing may be sent afterwards. Collective.

        MPI is not finalised where deaths are outlived: that may wait for the dead, or for spares, for ever.
        """
        if self.watchdog is not None:
            self.watchdog.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        if not self.outlives:
            self._finalise()
