"""Starting and leaving: MPI at the thread level asked for, one world or a clear refusal, nobody left waiting.

Entry points call `start` once; everything below takes the communicator it returns. Importing this module starts
nothing.
"""

import contextlib
import faulthandler
import importlib.metadata
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any, Final, NoReturn

from hpcdist.comm import cuda_aware, ending, failfast, growth, launcher, output, placement
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.handover import Handover
from hpcdist.comm.mpi import MpiCommunicator
from hpcdist.comm.session import Session
from hpcdist.comm.solo import solo
from hpcdist.errors import FAILURE, ConfigurationError, MissingCapabilityError
from hpcdist.reporting import atomic

__all__ = ["CHECK_COLLECTIVES", "Session", "end_alone", "fail_alike", "start", "start_alone", "start_joined"]

CHECK_COLLECTIVES: Final = "HPCDIST_CHECK_COLLECTIVES"
STARTING_S: Final = 600  # for MPI to start: it waits for ever for a rank that died meanwhile, or never came
JOINING_S: Final = 120  # a new process that nobody takes in by then ends: those who started it have died, or gave up


def start(
    device: str = "cpu", ranks_per_node: int | None = None, checked: bool = False, examined: bool = False
) -> Session:
    """Start MPI where a launcher announced a world, else a world of this process alone. Collective.

    With ``checked``, or HPCDIST_CHECK_COLLECTIVES=1 on any rank, all ranks compare their calls before each collective.
    MPI that has not started after STARTING_S seconds ends this process, with its stacks, and so the job.
    From here on an uncaught exception of any thread, or a non-zero SystemExit, ends the whole job with its exit code.
    Raises ConfigurationError when MPI's world is not the announced one, nor the local ranks, where the caller has not
    asked to get them ``examined`` by itself.
    """
    output.protect()
    said = launcher.announced()
    _refuse_unknown_launcher(said)
    failfast.answer_requests_for_stacks()
    announce_pid(None if said is None else said.rank)
    pointers = None
    if device == "gpu":
        placement.choose_gpu(said)
        pointers = cuda_aware.find_out(said)
    if said is None:
        return start_alone()
    faulthandler.dump_traceback_later(STARTING_S, exit=True, file=failfast.STDERR)  # needs no Python, which may wait
    mpi = import_mpi()
    faulthandler.cancel_dump_traceback_later()
    world = mpi.COMM_WORLD
    failfast.install(world.Abort, None, world.Get_rank())
    ending.announce_segments()
    said_library = library(mpi)
    check_world(said, world.Get_size(), said_library)
    own = world.Dup()  # messages of ours never meet those of the user's code on COMM_WORLD
    own.Set_name("world")
    handover = Handover(device_pointers=False)  # until all ranks have agreed, which takes messages
    node = None if ranks_per_node is None else own.Get_rank() // ranks_per_node
    comm = MpiCommunicator(mpi, own, "world", handover, node)
    # Agreed on: a launcher need not hand the environment to other hosts, and a rank that does not compare would hang.
    comm.checked = any(comm.allgather_object(_wants_checks(checked)))
    if device == "gpu":
        pointers = cuda_aware.agree(comm, pointers)
        handover.pointers = pointers.operations
    place = placement.locate(comm, None if examined else said)
    session = Session(comm, place, said_library, world.Abort, None, None, pointers, outlives(comm), mpi.Finalize)
    session.speak_as_one()
    return session


def fail_alike() -> None:
    """Let an uncaught exception end this process with its exit code before `start`, too (local).

    A launcher that sees one of its processes leave ends the others.
    """
    if not failfast.is_installed():
        said = launcher.announced()
        failfast.install(_exit_process, None, 0 if said is None else said.rank or 0)


def start_joined() -> Session:
    """Start MPI in a process that `growth.spawn` started, and return a session with those who did. Collective.

    What is needed should be imported before, for the others wait. Where it fails this process ends alone, since the
    others go on without it. The session's place is that of a process on its own until `Session.survive` finds it out.
    """
    failfast.answer_requests_for_stacks()
    signal.alarm(JOINING_S)  # its default action needs no Python, which waits within MPI
    try:
        mpi = import_mpi()
        comm = growth.join_parent(mpi)
        if comm is None:
            raise ConfigurationError("no job started this process to join it; use start")
    except Exception as error:  # noqa: BLE001 - whatever it was
        end_alone(error)
    signal.alarm(0)
    failfast.install(mpi.COMM_WORLD.Abort, None, comm.rank)
    announce_pid(uuid.uuid4().hex)
    ending.announce_segments()
    session = Session(comm, placement.alone(), library(mpi), mpi.COMM_WORLD.Abort, outlives=True)
    session.speak_as_one()
    return session


def end_alone(error: Exception) -> NoReturn:
    """End a new process that was not taken in, because of ``error``: the others go on without it (local)."""
    sys.stderr.write(f"hpcdist: a process that was started to replace a rank was not taken in: {error!r}\n")
    sys.stderr.flush()
    os._exit(FAILURE)  # the end of Python would finalise MPI, and hang in it


def outlives(comm: Communicator) -> bool:
    """Whether this job shall go on when a rank dies (local). Raises MissingCapabilityError where it cannot."""
    wanted = os.environ.get(ending.SURVIVE, "")
    if wanted and not comm.supports("ulfm"):
        raise MissingCapabilityError(
            f"{ending.SURVIVE}={wanted} asks to go on after deaths, and this MPI was not started to; start the job by "
            "`hpcdist run --survive` with Open MPI 5, or unset it"
        )
    return bool(wanted)


def library(mpi: Any) -> str:
    """Return the MPI library's own version string, one line (local)."""
    text: str = mpi.Get_library_version()
    return text.split("\n")[0].strip("\x00 ")


def _wants_checks(checked: bool) -> bool:
    said = os.environ.get(CHECK_COLLECTIVES, "0")
    if said not in ("0", "1"):
        raise ConfigurationError(f"{CHECK_COLLECTIVES}={said!r}; set it to 1 to compare all calls, or to 0")
    return checked or said == "1"


def start_alone() -> Session:
    """Start a world of this process alone, whatever launched it: no MPI."""
    failfast.install(_exit_process, None, 0)
    comm = solo()
    return Session(comm, placement.locate(comm, None), "none", _exit_process)


def check_world(said: launcher.Announced, size: int, library: str) -> None:
    """Raise ConfigurationError when ``size``, which MPI found, is not what the launcher announced (local)."""
    if size != said.size:
        raise ConfigurationError(
            f"{said.launcher} announced {said.size} ranks, but MPI ({library}) sees a world of {size}: the launcher "
            "belongs to another MPI than the library that mpi4py loaded. Start the job with the mpirun of the same MPI "
            "(`hpcdist doctor` shows both paths), or under Slurm with the --mpi= plugin that it supports "
            "(`srun --mpi=list`)"
        )


def _refuse_unknown_launcher(said: launcher.Announced | None) -> None:
    """Stop when this process is one of several whose number nobody tells: each would train alone in one directory."""
    signs = [name for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD") if name in os.environ]
    if said is None and signs:
        raise ConfigurationError(
            f"{', '.join(signs)} is set, so a launcher started this process, but none that says how many there are; "
            "start the job with mpirun or srun, or unset it to train in one process"
        )


def announce_pid(name: object) -> None:
    """Tell `hpcdist run` the process id of this rank, under any ``name`` of its own, unless that is None (local).

    A launcher need not forward signals.
    """
    folder = os.environ.get(ending.LAUNCH_DIR)
    if folder and name is not None:
        path = Path(folder) / f"pid-{name}"
        with contextlib.suppress(OSError):  # on another host the launcher's directory does not exist
            atomic.write(path, str(os.getpid()))


def import_mpi() -> Any:
    """Import mpi4py, which starts MPI: THREAD_MULTIPLE is asked for, and a lower level is accepted."""
    launcher.provide_home()
    try:
        import mpi4py
    except ImportError as error:
        raise ConfigurationError(
            f"mpi4py cannot be imported ({error}); install hpcdist[workstation], or build mpi4py against the site's MPI"
        ) from error
    mpi4py.rc.thread_level = "multiple"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"mpi4py {importlib.metadata.version('mpi4py')} finds no MPI library ({error}); load the site's MPI "
            "module, or install hpcdist[workstation]"
        ) from error
    return MPI


def _exit_process(code: int) -> None:
    """Leave at once: what `Abort` is to a world of one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
