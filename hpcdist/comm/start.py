"""Starting and leaving: MPI at the thread level asked for, one world or a clear refusal, nobody left waiting.

Entry points call `start` once; everything below takes the communicator it returns. Importing this module starts
nothing.
"""

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hpcdist.comm import cuda_aware, failfast, launcher, placement
from hpcdist.comm.agreement import all_say
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.events import NULL_SINK
from hpcdist.comm.handover import Handover
from hpcdist.comm.mpi import MpiCommunicator
from hpcdist.comm.recorder import Recorder
from hpcdist.comm.solo import solo
from hpcdist.comm.watchdog import Watchdog
from hpcdist.errors import ConfigurationError, StorageError

CHECK_COLLECTIVES: Final = "HPCDIST_CHECK_COLLECTIVES"


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
    _finalise: Callable[[], None] = field(default=lambda: None)

    def record(self, directory: Path, deadline_s: float) -> None:
        """Keep the last operations in ``directory``/recorder and hold each to ``deadline_s`` seconds. Collective."""
        folder = directory / "recorder"
        if self.comm.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"{folder} cannot be created: {error.strerror}; choose another --out") from error
        self.comm.barrier()
        self.recorder = Recorder(folder / f"rank-{self.comm.rank:05d}.rec", self.comm.rank, self.comm.size)
        self.comm.events = self.recorder
        self.watchdog = Watchdog(self.recorder, deadline_s)
        self.watchdog.relax()  # the first step compiles kernels and opens connections
        self.watchdog.start()
        failfast.attach(self.recorder)

    def stop_recording(self) -> None:
        """End what `record` began: its files are let go, and no operation has a deadline any more (local)."""
        if self.watchdog is not None and self.recorder is not None:
            self.watchdog.stop()
            self.comm.events = NULL_SINK
            failfast.detach()
            self.recorder.note("finished", "end of the record")
            self.recorder.close()
        self.watchdog = self.recorder = None

    def leave(self, code: int) -> None:
        """End together with exit code ``code``, all ranks having agreed on it. Collective.

        The first process that leaves with a non-zero code makes the launcher kill the others, so every rank flushes
        and finalises first.
        """
        self.comm.barrier()
        if self.recorder is not None:
            self.recorder.note("finished", f"exit code {code}")
        self.withdraw()
        failfast.agreed_exit(code)

    def withdraw(self) -> None:
        """End the watch and MPI: nothing may be sent afterwards. Collective."""
        if self.watchdog is not None:
            self.watchdog.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        self._finalise()


def start(device: str = "cpu", ranks_per_node: int | None = None, checked: bool = False) -> Session:
    """Start MPI where a launcher announced a world, else a world of this process alone. Collective.

    With ``checked``, or HPCDIST_CHECK_COLLECTIVES=1 on any rank, all ranks compare their calls before each collective.
    From here on an uncaught exception of any thread, or a non-zero SystemExit, ends the whole job with its exit code.
    Raises ConfigurationError when MPI's world is not the announced one.
    """
    said = launcher.announced()
    _refuse_unknown_launcher(said)
    failfast.answer_requests_for_stacks()
    _announce_pid(said)
    pointers = None
    if device == "gpu":
        placement.choose_gpu(said)
        pointers = cuda_aware.find_out(said)
    if said is None:
        return start_alone()
    mpi = _import_mpi()
    world = mpi.COMM_WORLD
    failfast.install(world.Abort, None, world.Get_rank())
    library = mpi.Get_library_version().split("\n")[0].strip("\x00 ")
    check_world(said, world.Get_size(), library)
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
    place = placement.locate(comm, said)
    session = Session(comm, place, library, world.Abort, device_pointers=pointers, _finalise=mpi.Finalize)
    if comm.size > 1:
        failfast.join(lambda text: all_say(comm, text), session.withdraw)
    return session


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


def _announce_pid(said: launcher.Announced | None) -> None:
    """Tell `hpcdist run` the process id of this rank: a launcher need not forward signals."""
    folder = os.environ.get("HPCDIST_LAUNCH_DIR")
    if folder and said is not None and said.rank is not None:
        path = Path(folder) / f"pid-{said.rank}"
        with contextlib.suppress(OSError):  # on another host the launcher's directory does not exist
            path.with_suffix(".tmp").write_text(str(os.getpid()))
            path.with_suffix(".tmp").replace(path)


def _import_mpi() -> Any:
    """Import mpi4py, which starts MPI: THREAD_MULTIPLE is asked for, and a lower level is accepted."""
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
