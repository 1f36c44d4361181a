"""World of a program that is not a training: `init`, and the communicator that the public functions take.

Functions that communicate take ``comm``: None (all ranks), a `World`, a communicator of mpi4py or of `hpcdist.comm`, or
a process group of `hpcdist.torch`.
"""

import operator
import os
import shutil
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.exits import at_exit
from hpcdist.comm.handover import Handover
from hpcdist.comm.launch.environment import RUN_DIR, launch_environment
from hpcdist.comm.mpi.communicator import MpiCommunicator, job_ranks
from hpcdist.comm.start import Session, fail_alike, import_mpi, library, refuse_worker, start
from hpcdist.comm.transport import UNKNOWN_BYTES, note_members
from hpcdist.errors import ConfigurationError, UsageError

Value = TypeVar("Value")

LONGEST_LABEL: Final = 40  # characters of the ranks in the name of a communicator
DEADLINE: Final = "HPCDIST_DEADLINE_S"  # deadline of an operation of a program that is not a training
DEADLINE_S: Final = 1800.0  # its default, as for PyTorch's process groups
RECORDS: Final = "hpcdist-records-"  # prefix of temporary directories of records
RECORDS_KEPT_S: Final = 14 * 86400.0  # longer than a job: older records are from a program that failed


class World:
    """All ranks of a job, as returned by `hpcdist.init`. Methods are collective. Properties are local."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks. Its messages are separate from messages on MPI.COMM_WORLD."""
        return self._session.comm

    @property
    def session(self) -> Session:
        """The session of this world, which holds the recorder and the watchdog. Not part of the public API."""
        return self._session

    @property
    def rank(self) -> int:
        """This rank's index among all ranks, from 0."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks in this world."""
        return self.comm.size

    @property
    def local_rank(self) -> int:
        """This rank's index among the ranks of its node, from 0. This index also selects the rank's GPU."""
        return self._session.place.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks on this node."""
        return self.comm.nodes().intra.size

    @property
    def node(self) -> int:
        """The index of this rank's node, from 0."""
        return self._session.place.node

    @property
    def nodes(self) -> int:
        """The number of nodes in this world."""
        return self._session.place.nodes

    @property
    def library(self) -> str:
        """The version string of the MPI library, or "none" for a process that no launcher started."""
        return self._session.library

    @property
    def mpi4py(self) -> Any:
        """The mpi4py communicator of the same ranks: MPI.COMM_WORLD, or COMM_SELF without a launcher."""
        mpi = import_mpi()
        return mpi.COMM_SELF if self.library == "none" else mpi.COMM_WORLD

    def exit(self, code: int = 0) -> NoReturn:
        """Finalise MPI and end the program on all ranks with the same exit ``code``."""
        self._session.leave(whole_number("code", code))

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        refuse_worker()
        self.comm.barrier()

    def bcast(self, value: Value, root: int = 0) -> Value:
        """Return rank ``root``'s ``value`` on all ranks. Values are pickled. Raises UsageError for an invalid root."""
        root = whole_number("root", root)
        if not 0 <= root < self.size:
            raise UsageError(f"root = {root} is not a rank; the ranks are 0 to {self.size - 1}")
        refuse_worker()
        result: Value = self.comm.broadcast_object(value, root)
        return result

    def allgather(self, value: Value) -> list[Value]:
        """Return the values of all ranks in rank order, on all ranks. Values are pickled."""
        refuse_worker()
        return self.comm.allgather_object(value)


def whole_number(name: str, value: Any) -> int:
    """Return ``value``, such as a numpy integer, as int. ``name``: name of the argument for the UsageError. Local."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"the argument {name} = {value!r} is invalid; expected a whole number") from None


AnyComm: TypeAlias = "World | Communicator | Any | None"  # Any: a communicator of mpi4py

_worlds: Final[list[World]] = []  # the world of this process
_names: Final = Counter[str]()  # of communicators of mpi4py
_keyvals: Final[list[int]] = []  # key of the attribute that stores our communicator on a communicator of mpi4py


def init(device: str = "cpu") -> World:
    """Start MPI and return the world of all ranks of the job. Later calls return the same world. Collective.

    ``device``: "gpu" gives each rank the GPU with its local rank. An uncaught exception on any rank ends the job.
    """
    refuse_worker()
    fail_alike(launched=True)
    if device not in ("cpu", "gpu"):
        raise UsageError(f"device = {device!r} is unknown; choose 'cpu' or 'gpu'")
    if not _worlds:
        world = start_world(device)
        # Records are for `hpcdist hang`.
        if any(world.bcast((os.environ.get(RUN_DIR), os.environ.get(DEADLINE)))):
            record(world)
    return _worlds[0]


def start_world(device: str) -> World:
    """Start MPI for ``device`` "cpu" or "gpu", and return the world. Later calls return the same world. Collective."""
    refuse_worker()
    if not _worlds:
        _worlds.append(World(start(device)))
    return _worlds[0]


def record(world: World, default_s: float = DEADLINE_S, *, spans: bool = False) -> None:
    """Record all operations, each with a deadline of $HPCDIST_DEADLINE_S seconds or ``default_s``. Collective.

    ``spans``: also open a file of spans, for `hpcdist trace`.
    """
    # The directory of `hpcdist run --out`, or else a temporary directory, which a successful end removes.
    run_dir = world.bcast(os.environ.get(RUN_DIR))
    if failfast.is_recording():
        if spans:
            world.session.open_spans()
        return
    if world.size == 1 and not (run_dir and spans):
        return
    folder = Path(run_dir or world.bcast(tempfile.mkdtemp(prefix=RECORDS) if world.rank == 0 else ""))
    if not run_dir and world.local_rank == 0:
        _remove_old_records(folder.parent)
        at_exit(shutil.rmtree, folder, True)  # errors are ignored
    folder.mkdir(parents=True, exist_ok=True)  # on every node
    world.session.record(folder, _deadline_s(default_s), spans=spans)
    assert world.session.watchdog is not None
    world.session.watchdog.tighten()  # the deadline is the program's: long enough for a first step


def _remove_old_records(parent: Path) -> None:
    for folder in parent.glob(f"{RECORDS}*"):
        with suppress(OSError):  # another process removes it
            state = folder.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > RECORDS_KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)


def end_records(call: Callable[[], Value], comm: AnyComm = None) -> Value:
    """Return ``call()``, run as the last recorded operation of the program. Collective over ``comm``."""
    if not _worlds:
        return call()
    session = _worlds[0].session
    name = session.comm.name if comm is None else communicator_of(comm).name
    token = session.comm.events.begin(name, "training", "uint8", 0, UNKNOWN_BYTES, -1, 0)
    try:
        result = call()
    finally:  # a script may catch the error and continue: an open operation would pass its deadline
        session.comm.events.end(token)
    session.stop_recording("a training began, which has records of its own")
    return result


def mpi4py_of(comm: AnyComm) -> Any:
    """Return the mpi4py communicator of ``comm``, a value as for `communicator_of`. The first call is collective.

    None stands for all ranks. Raises UsageError for other values.
    """
    ours: Any = comm.comm if isinstance(comm, World) else comm
    if hasattr(ours, "communicator"):  # a process group
        ours = ours.communicator()
    if isinstance(ours, MpiCommunicator):
        return ours.mpi4py
    if ours is None or (hasattr(ours, "allgather_object") and launch_environment() is None):
        return None
    check_mpi4py(ours)
    return ours


def _deadline_s(default_s: float) -> float:
    text = os.environ.get(DEADLINE)
    try:
        return float(text) if text else default_s
    except ValueError:
        raise ConfigurationError(f"{DEADLINE}={text!r} is invalid; set a number of seconds, such as 300") from None


@contextmanager
def session(device: str = "cpu") -> Iterator[World]:
    """Context manager that yields `init(device)`. At its end, all ranks wait for each other. Collective."""
    world = init(device)
    yield world
    world.barrier()


def communicator_of(comm: AnyComm = None) -> Communicator:
    """Return hpcdist's communicator for ``comm`` (None: all ranks). Raises UsageError. The first call is collective."""
    refuse_worker()
    if comm is None:
        return init().comm
    if isinstance(comm, World):
        return comm.comm
    if hasattr(comm, "allgather_object"):
        ours: Communicator = comm
        return ours
    foreign: Any = comm
    if hasattr(foreign, "communicator"):
        of_group: Communicator = foreign.communicator()
        return of_group
    check_mpi4py(foreign)
    return _adopted(foreign)


def check_mpi4py(comm: Any) -> None:
    """Raise UsageError unless ``comm`` is an intracommunicator of mpi4py that this rank is a member of. Local."""
    if not hasattr(comm, "Get_attr"):
        raise UsageError(
            f"comm is a {type(comm).__name__}; pass the result of hpcdist.init(), an intracommunicator of mpi4py, or a "
            "process group of the backend hpcdist that this rank is a member of"
        )
    if not comm:
        raise UsageError("comm is COMM_NULL: this rank is not a member of comm; make the call only on its members")
    if comm.Is_inter():
        raise UsageError("comm is an intercommunicator; pass an intracommunicator (comm.Merge() makes one)")


def is_part(comm: Any) -> bool:
    """Return True if the mpi4py communicator ``comm`` lacks ranks of the job. False for None, all ranks. Local."""
    launch = launch_environment()
    return comm is not None and launch is not None and comm.Get_size() < launch.size


def _adopted(comm: Any) -> Communicator:
    mpi = import_mpi()
    if not _keyvals:
        _keyvals.append(mpi.Comm.Create_keyval(delete_fn=_freed))
    # The first call for `comm` duplicates it, which is collective. Later calls return the duplicate.
    kept: Communicator | None = comm.Get_attr(_keyvals[0])
    if kept is None:
        world = init()  # from the first collective on, a failed rank ends the job
        runs = job_ranks(mpi, comm)
        name = _record_name(mpi, comm, runs)
        note_members(name, runs)  # before the call, in which ranks may wait
        token = world.comm.events.begin(name, "dup", "uint8", 0, UNKNOWN_BYTES, -1, 0)
        copy = comm.Dup()
        world.comm.events.end(token)
        kept = MpiCommunicator(mpi, copy, name, Handover(device_pointers=False))
        kept.observe_like(world.comm)
        comm.Set_attr(_keyvals[0], kept)
    return kept


def _record_name(mpi: Any, comm: Any, runs: str) -> str:
    # Other communicators may have the same name in MPI, such as the two halves of a Split. The name in records is used
    # by the members of ``comm`` only. ``runs``: their ranks as text.
    if comm == mpi.COMM_WORLD:
        name = "MPI_COMM_WORLD"
    else:
        short = runs if len(runs) <= LONGEST_LABEL else f"{comm.Get_size()} ranks, {zlib.crc32(runs.encode()):08x}"
        name = f"{comm.Get_name() or 'mpi4py'}[{short}]".replace("\t", " ")
    _names[name] += 1
    return name if _names[name] == 1 else f"{name}.{_names[name]}"


def _freed(comm: Any, keyval: int, ours: Communicator) -> None:
    mpi = import_mpi()  # `free` below is collective
    if comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        ours.free()


def library_of(comm: Communicator) -> str:
    """Return the version string of the MPI library, or "none" if ``comm`` is no MPI communicator. Local."""
    return library(import_mpi()) if isinstance(comm, MpiCommunicator) else "none"
