"""Start and end of a job: MPI_Init with the thread level, checks of the world, and the common end of all ranks.

Entry points call `start` once and get a `Session`: the world communicator, the placement of this rank, its recorder and
watchdog, and the ways to leave the job or to go on without ranks that died. All other code takes the communicator of
the session. Importing this module starts nothing.
"""

import contextlib
import faulthandler
import functools
import importlib.metadata
import os
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from hpcdist.comm import placement
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.events import NULL_SINK
from hpcdist.comm.failure import exits, failfast
from hpcdist.comm.failure.rank_failures import all_agree, is_rank_failure
from hpcdist.comm.failure.watchdog import Watchdog
from hpcdist.comm.handover import Handover
from hpcdist.comm.launch import environment, exit_file, guard, listeners, standard_streams
from hpcdist.comm.mpi import cuda_aware, spawn
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.record import flight_recorder
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.record.spans import NULL_SPANS, Spans, SpanSink
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import FAILURE, ConfigurationError, MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting import atomic


@dataclass
class Session:
    """A started job: its world, this rank's placement, and its recorder and watchdog."""

    comm: Communicator
    place: placement.Placement
    library: str  # the MPI library's own version string; "none" for a process on its own
    abort: Callable[[int], None]
    recorder: Recorder | None = None
    watchdog: Watchdog | None = None
    device_pointers: cuda_aware.DevicePointerSupport | None = (
        None  # what MPI takes of GPU memory; None for a run on the CPU
    )
    outlives: bool = False  # the job goes on when a rank dies (ULFM): see `survive`, and `hpcdist run --survive`
    _finalise: Callable[[], None] = field(default=lambda: None)
    spans: SpanSink = NULL_SPANS  # named intervals of this rank beside its messages

    def record(self, directory: Path, deadline_s: float, *, spans: bool = False) -> None:
        """Keep the last operations in ``directory``/recorder and hold each to ``deadline_s`` seconds. Collective.

        With ``spans``, also record the named intervals between them.
        """
        folder = directory / "recorder"
        try:
            atomic.own_directory(folder)
            if self.comm.rank == 0:
                flight_recorder.remove_others(folder, self.comm.size)
        except OSError as error:
            raise StorageError(f"{folder} cannot be created: {error.strerror}; choose another --out") from error
        failfast.set_recovery_limit(None)
        self.recorder = Recorder(folder / f"rank-{self.comm.rank:05d}.rec", self.comm.rank, self.comm.size)
        self.comm.events = self.recorder
        if spans:
            self.spans = Spans(folder / f"rank-{self.comm.rank:05d}.spans", self.comm.rank, self.comm.size)
        self.watchdog = Watchdog(self.recorder, deadline_s)
        self.watchdog.relax()  # the first step compiles kernels and opens connections
        self.watchdog.start()
        failfast.attach(self.recorder)
        self.comm.barrier()  # with a record, so that `hpcdist hang` finds the ranks that never come here

    def stop_recording(self) -> None:
        """End `record`: close its files; no operation has a deadline any more (local).

        In a job that outlives rank failures the next `record`, or the end, must come within the deadline of a first
        step.
        """
        if self.watchdog is not None and self.recorder is not None:
            if self.outlives:
                failfast.set_recovery_limit(self.watchdog.deadline_s * self.watchdog.first_step_factor)
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
        """Return the session of the survivors, whose communicator is ``comm``. Collective over ``comm``.

        From here on failures are reported under the ranks of ``comm``. This session must not be used any more; its
        recording has stopped, and `record` begins a new one.
        """
        self.stop_recording()
        session = replace(self, comm=comm, place=placement.locate(comm, None))
        if failfast.is_installed():  # not where ranks are threads of a test
            failfast.set_rank(comm.rank)
            session.speak_as_one()
        return session

    def speak_as_one(self) -> None:
        """Report a failure that all ranks share once; with ULFM, let threads end silently by rank failures (local)."""
        if self.comm.size > 1:
            failfast.set_agreement(functools.partial(all_agree, self.comm), self.withdraw)
        if self.outlives:
            failfast.set_survivable(is_rank_failure)

    def leave(self, code: int) -> NoReturn:
        """End together with exit code ``code``, all ranks having agreed on it. Collective.

        The first process that leaves with a non-zero code makes the launcher kill the others, so every rank flushes
        and finalises first. In a job that outlives rank failures the survivors agree instead of waiting in a barrier,
        and the code is written for `hpcdist run`.
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
        """Stop the watchdog and finalise MPI: nothing may be sent afterwards. Collective.

        MPI is not finalised in a job that outlives rank failures: that may wait for failed ranks, or for spares, for
        ever.
        """
        if self.watchdog is not None:
            self.watchdog.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        if not self.outlives:
            exits.settle()
            self._finalise()


__all__ = [
    "CHECK_COLLECTIVES", "Session", "end_alone", "fail_alike", "is_worker", "refuse_worker", "start", "start_alone",
    "start_joined",
]  # fmt: skip

CHECK_COLLECTIVES: Final = "HPCDIST_CHECK_COLLECTIVES"
_rank_pids: Final[list[int]] = []  # the process that started MPI, also in its forked children
STARTING_S: Final = 600  # for MPI to start: it waits for ever for a rank that died meanwhile, or never came
JOINING_S: Final = 120  # a spawned process that has not joined by then ends: its parents have died, or gave up


def start(
    device: str = "cpu", ranks_per_node: int | None = None, checked: bool = False, examined: bool = False
) -> Session:
    """Start MPI where a launcher announced a world, else a world of this process alone. Collective.

    With ``checked``, or HPCDIST_CHECK_COLLECTIVES=1 on any rank, all ranks compare their calls before each collective.
    MPI that has not started after STARTING_S seconds ends this process, with its stacks, and so the job.
    From here on an uncaught exception of any thread, or a non-zero SystemExit, ends the whole job with its exit code.
    Raises ConfigurationError when MPI's world is not the announced one, or the local ranks are not, unless the caller
    checks those itself (``examined``).
    """
    refuse_worker()
    standard_streams.protect()
    environment.drop_empty()
    launch = environment.launch_environment()
    _refuse_unknown_launcher(launch)
    failfast.answer_requests_for_stacks()
    announce_pid(None if launch is None else launch.rank)
    pointers = None
    if device == "gpu":
        placement.choose_gpu(launch)
        pointers = cuda_aware.detect(launch)
    if launch is None:
        return start_alone()
    guard.end_with_launcher()
    # A thread of C: it also works while this one waits in MPI_Init with the interpreter's lock.
    faulthandler.dump_traceback_later(STARTING_S, exit=True, file=failfast.STDERR)
    mpi = import_mpi()
    _rank_pids.append(os.getpid())
    faulthandler.cancel_dump_traceback_later()
    world = mpi.COMM_WORLD
    failfast.install(world.Abort, world.Get_rank(), world.Set_name)
    exit_file.announce_segments()
    library_version = library(mpi)
    check_world(launch, world.Get_size(), library_version)
    own = world.Dup()  # a context of our own: messages never match those of user code on COMM_WORLD
    own.Set_name("world")
    handover = Handover(device_pointers=False)  # until all ranks have agreed, which takes messages
    node = None if ranks_per_node is None else own.Get_rank() // ranks_per_node
    comm = MpiCommunicator(mpi, own, "world", handover, node)
    # Agree: a launcher need not pass the environment to other hosts, and if only some ranks compare, all hang.
    comm.checked = any(comm.allgather_object(_wants_checks(checked)))
    if device == "gpu":
        pointers = cuda_aware.agree(comm, pointers)
        handover.pointers = pointers.operations
    place = placement.locate(comm, None if examined else launch)
    session = Session(comm, place, library_version, world.Abort, None, None, pointers, outlives(comm), mpi.Finalize)
    session.speak_as_one()
    return session


def is_worker() -> bool:
    """Return True in a process that a rank of a launched job started by `multiprocessing`, or forked (local).

    Processes of spawn and forkserver import the script of the rank before `multiprocessing` sets their parent.
    Without a launcher every process is a world of its own, and none is a worker.
    """
    if _rank_pids:
        return os.getpid() not in _rank_pids
    processes = sys.modules.get("multiprocessing.process")  # imported in each such process
    return (
        processes is not None
        and (processes.parent_process() is not None or getattr(processes.current_process(), "_inheriting", False))
        and environment.launch_environment() is not None
    )


def refuse_worker() -> None:
    """Raise UsageError if this process is a worker of a rank: only the rank takes part in MPI (local)."""
    if is_worker():
        raise UsageError(
            f"process {os.getpid()} is a worker that a rank started (multiprocessing, DataLoader or fork), and has no "
            "MPI; communicate in the rank's main process, and return the worker's result to it"
        )


def fail_alike(*, launched: bool = False) -> None:
    """End this process with its exit code at an uncaught exception before `start`, too (local).

    The launcher then ends the other ranks. With ``launched``, do nothing in a process that no launcher started.
    """
    launch = environment.launch_environment()
    if not failfast.is_installed() and not (launched and launch is None):
        failfast.install(_exit_process, 0 if launch is None else launch.rank or 0)


def start_joined() -> Session:
    """Start MPI in a process that `spawn.spawn` started, and return the session with its parents. Collective.

    Import everything needed before, since the others wait. Where the start fails this process ends alone, and the
    others go on without it. The placement is that of a process on its own until `Session.survive`.
    """
    failfast.answer_requests_for_stacks()
    signal.alarm(JOINING_S)  # its default action needs no Python, which waits within MPI
    try:
        mpi = import_mpi()
        comm = spawn.join_parent(mpi)
        if comm is None:
            raise ConfigurationError("no job started this process to join it; use start")
    except Exception as error:  # noqa: BLE001 - whatever it was
        end_alone(error)
    signal.alarm(0)
    failfast.install(mpi.COMM_WORLD.Abort, comm.rank)
    announce_pid(uuid.uuid4().hex)
    exit_file.announce_segments()
    session = Session(comm, placement.alone(), library(mpi), mpi.COMM_WORLD.Abort, outlives=True)
    session.speak_as_one()
    return session


def end_alone(error: Exception) -> NoReturn:
    """End a spawned process that could not join because of ``error``: the others go on without it (local)."""
    sys.stderr.write(f"hpcdist: a process that was started to replace a rank was not taken in: {error!r}\n")
    sys.stderr.flush()
    os._exit(FAILURE)  # the end of Python would finalise MPI, and hang in it


def outlives(comm: Communicator) -> bool:
    """Whether this job is to go on when a rank dies (local). Raises MissingCapabilityError where it cannot."""
    wanted = os.environ.get(exit_file.SURVIVE, "")
    if wanted and not comm.supports("ulfm"):
        raise MissingCapabilityError(
            f"{exit_file.SURVIVE}={wanted} asks to go on after deaths, and this MPI was not started to; start the job "
            "by `hpcdist run --survive` with Open MPI 5, or unset it"
        )
    return bool(wanted)


def library(mpi: Any) -> str:
    """Return the MPI library's own version string, one line (local)."""
    text: str = mpi.Get_library_version()
    return text.split("\n")[0].strip("\x00 ")


def _wants_checks(checked: bool) -> bool:
    value = os.environ.get(CHECK_COLLECTIVES, "0")
    if value not in ("0", "1"):
        raise ConfigurationError(f"{CHECK_COLLECTIVES}={value!r}; set it to 1 to compare all calls, or to 0")
    return checked or value == "1"


def start_alone() -> Session:
    """Start a world of this process alone, whatever launched it: no MPI."""
    failfast.install(_exit_process, 0)
    comm = solo()
    return Session(comm, placement.locate(comm, None), "none", _exit_process)


def check_world(launch: environment.LaunchEnvironment, size: int, library: str) -> None:
    """Raise ConfigurationError when ``size``, which MPI found, is not what the launcher announced (local)."""
    if size != launch.size:
        raise ConfigurationError(
            f"{launch.launcher} announced {launch.size} ranks, but MPI ({library}) sees a world of {size}: the "
            "launcher belongs to another MPI than the library that mpi4py loaded. Start the job with the mpirun of the "
            "same MPI (`hpcdist doctor` shows both paths), or under Slurm with the --mpi= plugin that it supports "
            "(`srun --mpi=list`)"
        )


def _refuse_unknown_launcher(launch: environment.LaunchEnvironment | None) -> None:
    """Raise ConfigurationError for a launcher that announces no world size: each rank would train by itself."""
    signs = [name for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD") if name in os.environ]
    if launch is None and signs:
        raise ConfigurationError(
            f"{', '.join(signs)} is set, so a launcher started this process, but none that says how many there are; "
            "start the job with mpirun or srun, or unset it to train in one process"
        )


def announce_pid(name: object) -> None:
    """Write the process id of this rank for `hpcdist run`, under a unique ``name``, unless that is None (local).

    `hpcdist run` signals the ranks by these ids, since a launcher need not forward signals.
    """
    folder = os.environ.get(exit_file.LAUNCH_DIR)
    if folder and name is not None:
        path = Path(folder) / f"pid-{name}"
        with contextlib.suppress(OSError):  # on another host the launcher's directory does not exist
            atomic.write(path, str(os.getpid()))


def import_mpi() -> Any:
    """Import mpi4py.MPI, which initialises MPI: THREAD_MULTIPLE is requested, a lower level is accepted.

    A job that is to outlive ranks requests THREAD_SERIALIZED: with locks, a thread of Open MPI 5 that meets a dead
    rank while it sends over TCP revokes communicators, which sends over the connection that it holds the lock of.
    """
    environment.provide_home()
    listeners.exclude_tcp()
    try:
        import mpi4py
    except ImportError as error:
        raise ConfigurationError(
            f"mpi4py cannot be imported ({error}); install hpcdist[workstation], or build mpi4py against the site's MPI"
        ) from error
    mpi4py.rc.thread_level = "serialized" if os.environ.get(exit_file.SURVIVE) else "multiple"
    finalizes = mpi4py.rc.initialize and mpi4py.rc.finalize is None and "mpi4py.MPI" not in sys.modules
    if finalizes:
        mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"mpi4py {importlib.metadata.version('mpi4py')} finds no MPI library ({error}); load the site's MPI "
            "module, or install hpcdist[workstation]"
        ) from error
    listeners.restrict_to_loopback()
    if finalizes:
        setattr(sys, _Finalizer.__name__, _Finalizer(MPI))  # Python empties `sys` as the last module but builtins
    return MPI


class _Finalizer:
    """Finalizes MPI when Python destroys this object, as late as mpi4py would, but not in a forked child.

    MPI_Finalize of a forked child waits for a thread that only the rank has, or ends the rank's connections.
    """

    def __init__(self, mpi: Any) -> None:
        self._calls = mpi.Is_finalized, mpi.Finalize, os.getpid  # modules are empty by then
        self._pid = os.getpid()

    def __del__(self) -> None:
        is_finalized, finalize, getpid = self._calls
        if getpid() == self._pid and not is_finalized():
            finalize()


def _exit_process(code: int) -> None:
    """Leave at once: the `Abort` of a process on its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
