"""Start and end of a job: MPI_Init with the thread level, checks of the world, and the common end of all ranks.

Entry points call `start` once and get a `Session`.
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
from hpcdist.comm.failure import exits, failfast
from hpcdist.comm.failure.rank_failures import all_agree, is_rank_failure
from hpcdist.comm.failure.watchdog import Watchdog
from hpcdist.comm.handover import Handover
from hpcdist.comm.launch import environment, exit_file, guard, standard_streams
from hpcdist.comm.mpi import cuda_aware, spawn
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.record import flight_recorder
from hpcdist.comm.record.flight_recorder import Recorder
from hpcdist.comm.record.spans import NULL_SPANS, Spans, SpanSink
from hpcdist.comm.threads.communicator import solo
from hpcdist.comm.transport import NULL_SINK
from hpcdist.errors import FAILURE, ConfigurationError, MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting import atomic


@dataclass
class Session:
    """State of a started job or part of a job: communicator, placement, MPI version, flight recorder and watchdog."""

    comm: Communicator  # of all ranks of the job, or of the part that `start` got
    place: placement.Placement
    library: str  # version string of the MPI library; "none" without MPI
    abort: Callable[[int], None]
    recorder: Recorder | None = None
    watchdog: Watchdog | None = None
    device_pointers: cuda_aware.DevicePointerSupport | None = None  # None for a run on the CPU
    outlives: bool = False  # the job continues when a rank dies (ULFM): see `survive`, and `hpcdist run --survive`
    _finalise: Callable[[], None] = field(default=lambda: None)
    spans: SpanSink = NULL_SPANS  # named intervals of this rank, in addition to its messages
    is_part: bool = False  # other ranks of the job are not in `comm`

    def record(self, directory: Path, deadline_s: float, *, spans: bool = False) -> None:  # spans: also named intervals
        """Start to record operations in ``directory``, with a deadline of ``deadline_s`` s each. Collective."""
        folder = directory / "recorder"
        try:
            atomic.own_directory(folder)
            if self.comm.rank == 0:
                flight_recorder.remove_others(folder, self.comm.size)
        except OSError as error:
            raise StorageError(f"folder {folder} cannot be created: {error.strerror}; choose another --out") from error
        failfast.set_recovery_limit(None)
        self.recorder = Recorder(folder / f"rank-{self.comm.rank:05d}.rec", self.comm.rank, self.comm.size)
        self.comm.events = self.recorder
        if spans:
            self.open_spans()
        self.watchdog = Watchdog(self.recorder, deadline_s)
        self.watchdog.relax()  # the first step compiles kernels and opens connections
        self.watchdog.start()
        failfast.attach(self.recorder)
        self.comm.barrier()  # recorded, so that `hpcdist hang` finds ranks that do not arrive here

    def open_spans(self) -> None:
        """Open the file of spans next to the file of the flight recorder, unless it is open. Local."""
        if self.recorder is not None and self.spans is NULL_SPANS:
            self.spans = Spans(self.recorder.path.with_suffix(".spans"), self.comm.rank, self.comm.size)

    def stop_recording(self, note: str = "end of the record") -> None:
        """Close the files that `record` opened, and stop checking deadlines. ``note``: for `hpcdist hang`. Local."""
        # If the job survives rank failures, this rank must soon call `record` again or exit, or the job ends.
        if self.watchdog is not None and self.recorder is not None:
            if self.outlives:
                failfast.set_recovery_limit(self.watchdog.deadline_s * self.watchdog.first_step_factor)
            self.watchdog.stop()
            self.comm.events = NULL_SINK
            failfast.detach()
            self.recorder.note("finished", note)
            self.recorder.close()
        if isinstance(self.spans, Spans):
            self.spans.close()
        self.watchdog = self.recorder = None
        self.spans = NULL_SPANS

    def survive(self, comm: Communicator) -> "Session":
        """Return a new session for the survivors' communicator ``comm``, to use instead of this session. Collective."""
        self.stop_recording()
        session = replace(self, comm=comm, place=placement.locate(comm, None))
        if failfast.is_installed():  # false if ranks are threads of a test
            failfast.set_rank(comm.rank)
            session.speak_as_one()
        return session

    def speak_as_one(self) -> None:
        """Arrange that only rank 0 prints an uncaught error if all ranks raise the same error. Local."""
        if self.comm.size > 1:
            # On a part of the job, MPI_Finalize would wait for the other ranks: an error ends them, too.
            withdraw = None if self.is_part else self.withdraw
            failfast.set_agreement(functools.partial(all_agree, self.comm), withdraw, self.comm.rank == 0)
        if self.outlives:
            # An uncaught error due to a rank failure does not end a job that survives rank failures.
            failfast.set_survivable(is_rank_failure)

    def leave(self, code: int) -> NoReturn:
        """Finalise MPI and end all ranks with exit code ``code``, which must be equal on all ranks. Collective."""
        # Every rank waits for all other ranks, in MPI_Finalize also for ranks outside of `comm`. If the job survives
        # rank failures, MPI is not finalised.
        if self.outlives:
            self.comm.agree(True)
        else:
            self.comm.barrier()
        if self.recorder is not None:
            self.recorder.note("finished", f"exit code {code}")
        self.withdraw()
        failfast.agreed_exit(code)

    def withdraw(self) -> None:
        """Stop the watchdog. If the job does not survive rank failures, also finalise MPI. Collective."""
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
_rank_pids: Final[list[int]] = []  # the process that started MPI; forked children keep this entry
STARTING_S: Final = 600  # limit of the start of MPI, which waits for ever for a rank that died or never came
JOINING_S: Final = 120  # limit for a spawned process to join; afterwards its parents have died or given up


def start(
    device: str = "cpu",
    ranks_per_node: int | None = None,
    checked: bool = False,
    check_local_ranks: bool = True,
    part: Any = None,
) -> Session:
    """Start MPI if a launcher announced a world, else create a world of one rank. Return the session. Collective.

    ``ranks_per_node``: ranks per simulated node, or None for the real nodes. ``checked``: compare the collective calls
    of all ranks. ``check_local_ranks``: compare the launcher's local ranks with MPI's nodes. ``part``: communicator of
    mpi4py, over which the call and the session are collective; None for all ranks.
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
    # The job also ends if MPI has not started after STARTING_S seconds.
    guard.end_with_launcher()
    # A C thread, which also works while this thread waits in MPI_Init with the interpreter's lock.
    faulthandler.dump_traceback_later(STARTING_S, exit=True, file=failfast.STDERR)
    mpi = import_mpi()
    _rank_pids.append(os.getpid())
    faulthandler.cancel_dump_traceback_later()
    world = mpi.COMM_WORLD
    failfast.install(world.Abort, world.Get_rank(), world.Set_name)
    exit_file.announce_segments()
    library_version = library(mpi)
    check_world(launch, world.Get_size(), library_version)
    everyone = world if part is None else part
    world_copy = everyone.Dup()  # a separate context, so that messages never match messages of user code on COMM_WORLD
    world_copy.Set_name("world")
    handover = Handover(device_pointers=False)  # until all ranks have agreed by messages
    node = None if ranks_per_node is None else world_copy.Get_rank() // ranks_per_node
    comm = MpiCommunicator(mpi, world_copy, "world", handover, node)
    # Agree: the environment may not reach other hosts, and if only some ranks compared calls, all would hang.
    comm.checked = any(comm.allgather_object(_wants_checks(checked)))
    if device == "gpu":
        pointers = cuda_aware.agree(comm, pointers)
        handover.pointers = pointers.operations
    is_part = comm.size < launch.size
    place = placement.locate(comm, launch if check_local_ranks and not is_part else None)
    if is_part and launch.local_rank is not None:
        place = replace(place, local_rank=launch.local_rank)
    session = Session(comm, place, library_version, world.Abort, None, None, pointers, outlives(comm), mpi.Finalize)
    session.is_part = is_part
    session.speak_as_one()
    return session


def is_worker() -> bool:
    """Return True if a rank has forked this process or started it by `multiprocessing`. Local."""
    # Without a launcher, the result is always False.
    if _rank_pids:
        return os.getpid() not in _rank_pids
    processes = sys.modules.get("multiprocessing.process")  # imported in each such process
    return (
        processes is not None
        and (processes.parent_process() is not None or getattr(processes.current_process(), "_inheriting", False))
        and environment.launch_environment() is not None
    )


def refuse_worker() -> None:
    """Raise UsageError if this process is a worker that a rank started, because only ranks can use MPI. Local."""
    if is_worker():
        raise UsageError(
            f"process {os.getpid()} is a worker that a rank started (multiprocessing, DataLoader or fork), and has no "
            "MPI; communicate in the rank's main process, and return the worker's result to it"
        )


def fail_alike(*, launched: bool = False) -> None:
    """Install the error handler of `start` early: errors before `start` get the same text and exit code. Local."""
    # `launched`: do nothing in a process without a launcher.
    launch = environment.launch_environment()
    if not failfast.is_installed() and not (launched and launch is None):
        failfast.install(_exit_process, 0 if launch is None else launch.rank or 0)


def start_joined() -> Session:
    """Start MPI in a process that `spawn.spawn` started. Return a session. Collective over the old and new ranks."""
    # Import all modules before this call, because the existing ranks wait.
    failfast.answer_requests_for_stacks()
    signal.alarm(JOINING_S)  # its default action needs no Python code, which could not run during an MPI call
    try:
        mpi = import_mpi()
        comm = spawn.join_parent(mpi)
        if comm is None:
            raise ConfigurationError("no running job spawned this process; call start instead of start_joined")
    except Exception as error:  # noqa: BLE001 - any error
        # Only this process ends.
        end_alone(error)
    signal.alarm(0)
    failfast.install(mpi.COMM_WORLD.Abort, comm.rank)
    announce_pid(uuid.uuid4().hex)
    exit_file.announce_segments()
    # The node and the local rank are valid after `Session.survive`.
    session = Session(comm, placement.alone(), library(mpi), mpi.COMM_WORLD.Abort, outlives=True)
    session.speak_as_one()
    return session


def end_alone(error: Exception) -> NoReturn:
    """Print the ``error`` that kept this spawned process from joining the job, and exit. The job continues. Local."""
    sys.stderr.write(f"hpcdist: a process that was started to replace a rank could not join the job: {error!r}\n")
    sys.stderr.flush()
    os._exit(FAILURE)  # the end of Python would finalise MPI, and hang in it


def outlives(comm: Communicator) -> bool:
    """Return True if HPCDIST_SURVIVE requires the job to continue after rank failures. Local."""
    mode = os.environ.get(exit_file.SURVIVE, "")
    if mode and not comm.supports("ulfm"):
        raise MissingCapabilityError(
            f"{exit_file.SURVIVE}={mode} requires the job to continue after rank failures, but this MPI was started "
            f"without ULFM; start the job by `hpcdist run --survive` with Open MPI 5, or unset {exit_file.SURVIVE}"
        )
    return bool(mode)


def library(mpi: Any) -> str:
    """Return the first line of the MPI library's version string. ``mpi`` is the module mpi4py.MPI. Local."""
    text: str = mpi.Get_library_version()
    return text.split("\n")[0].strip("\x00 ")


def _wants_checks(checked: bool) -> bool:
    value = os.environ.get(CHECK_COLLECTIVES, "0")
    if value not in ("0", "1"):
        raise ConfigurationError(f"{CHECK_COLLECTIVES}={value!r}; set it to 1 to compare the ranks' calls, or to 0")
    return checked or value == "1"


def start_alone() -> Session:
    """Return a session with only this process and without MPI, even if a launcher started the process."""
    failfast.install(_exit_process, 0)
    comm = solo()
    return Session(comm, placement.locate(comm, None), "none", _exit_process)


def check_world(launch: environment.LaunchEnvironment, size: int, library: str) -> None:
    """Raise ConfigurationError unless the launcher announced ``size`` ranks, the size of MPI's world. Local."""
    if size != launch.size:
        raise ConfigurationError(
            f"{launch.launcher} announced {launch.size} ranks, but MPI ({library}) sees a world of {size}: the "
            "launcher belongs to another MPI than the library that mpi4py loaded. Start the job with the mpirun of the "
            "same MPI (`hpcdist doctor` shows both paths), or under Slurm with the --mpi= plugin of this MPI "
            "(`srun --mpi=list`)"
        )


def _refuse_unknown_launcher(launch: environment.LaunchEnvironment | None) -> None:
    signs = [name for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD") if name in os.environ]
    if launch is None and signs:
        raise ConfigurationError(
            f"the environment has {', '.join(signs)}, so a launcher started this process, but no variable gives the "
            f"number of ranks; start the job with mpirun or srun, or unset {', '.join(signs)} to train in one process"
        )


def announce_pid(name: object) -> None:
    """Write this rank's process id to the file "pid-``name``", for `hpcdist run`. If ``name`` is None, do nothing."""
    folder = os.environ.get(exit_file.LAUNCH_DIR)
    if folder and name is not None:
        # `name` is unique in the job, such as the rank.
        path = Path(folder) / f"pid-{name}"
        with contextlib.suppress(OSError):  # on another host the launcher's directory does not exist
            atomic.write(path, str(os.getpid()))


def import_mpi() -> Any:
    """Import and return the module mpi4py.MPI. The import initialises MPI, with THREAD_MULTIPLE if possible."""
    # A job that survives rank failures requests THREAD_SERIALIZED: with THREAD_MULTIPLE, Open MPI 5 may deadlock when a
    # rank dies.
    environment.provide_home()
    environment.exclude_tcp()
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
    environment.restrict_to_loopback()
    if finalizes:
        setattr(sys, _Finalizer.__name__, _Finalizer(MPI))  # Python empties `sys` as the last module except builtins
    return MPI


class _Finalizer:
    def __init__(self, mpi: Any) -> None:
        self._calls = mpi.Is_finalized, mpi.Finalize, os.getpid  # modules are empty when `__del__` runs
        # A forked child must not finalise MPI, because it would hang.
        self._pid = os.getpid()

    def __del__(self) -> None:
        is_finalized, finalize, getpid = self._calls
        if getpid() == self._pid and not is_finalized():
            finalize()


def _exit_process(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
