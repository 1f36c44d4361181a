"""World of a program that is not a training: `init`, and the communicator that the public functions take.

`hpcdist.init`, `hpcdist.session` and `hpcdist.World` are these names. The functions of the public API that
communicate take ``comm``: None (all ranks), a `World`, a communicator of mpi4py or one of `hpcdist.comm`.
`communicator_of` makes of each what the rest of the package works with.
"""

import operator
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, cast

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.events import UNKNOWN_BYTES, Observable
from hpcdist.comm.failure import failfast
from hpcdist.comm.failure.exits import at_exit
from hpcdist.comm.handover import Handover
from hpcdist.comm.launch.environment import RUN_DIR
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.start import Session, fail_alike, import_mpi, library, refuse_worker, start
from hpcdist.errors import ConfigurationError, UsageError

Value = TypeVar("Value")

DEADLINE: Final = "HPCDIST_DEADLINE_S"  # of an operation of a program that is not a training
DEADLINE_S: Final = 1800.0  # without it: as that of PyTorch's process groups
RECORDS: Final = "hpcdist-records-"  # begin of the names of temporary directories of records
RECORDS_KEPT_S: Final = 14 * 86400.0  # longer than a job: what is older is of a program that failed


class World:
    """All ranks of a job, as `init` returns it; the methods are collective, the properties local."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def comm(self) -> Communicator:
        """The communicator of all ranks, with messages of its own."""
        return self._session.comm

    @property
    def session(self) -> Session:
        """The session behind it, with recorder and watchdog; not part of the public API."""
        return self._session

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.comm.size

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its node, from 0; its GPU follows from it."""
        return self._session.place.local_rank

    @property
    def local_size(self) -> int:
        """The number of ranks on this node."""
        return self.comm.nodes().intra.size

    @property
    def node(self) -> int:
        """The number of this node, from 0."""
        return self._session.place.node

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self._session.place.nodes

    @property
    def library(self) -> str:
        """The version string of the MPI library; "none" for a process that no launcher started."""
        return self._session.library

    @property
    def mpi4py(self) -> Any:
        """The mpi4py communicator of the same ranks: MPI.COMM_WORLD, or COMM_SELF without a launcher."""
        mpi = import_mpi()
        return mpi.COMM_SELF if self.library == "none" else mpi.COMM_WORLD

    def exit(self, code: int = 0) -> NoReturn:
        """End the program on all ranks with exit ``code``, the same on all: MPI is finalised first."""
        self._session.leave(whole_number("code", code))

    def barrier(self) -> None:
        """Return when all ranks have called."""
        refuse_worker()
        self.comm.barrier()

    def bcast(self, value: Value, root: int = 0) -> Value:
        """Return the ``value`` of rank ``root`` on all ranks; it is pickled. Raises UsageError for no such rank."""
        root = whole_number("root", root)
        if not 0 <= root < self.size:
            raise UsageError(f"root = {root}; the ranks are 0 to {self.size - 1}")
        refuse_worker()
        result: Value = self.comm.broadcast_object(value, root)
        return result

    def allgather(self, value: Value) -> list[Value]:
        """Return the values of all ranks in their order, on all ranks; they are pickled."""
        refuse_worker()
        return self.comm.allgather_object(value)


def whole_number(name: str, value: Any) -> int:
    """Return ``value``, also an integer of numpy, as an int (local). Raises UsageError, with ``name``, for others."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name} = {value!r}; expected a whole number") from None


AnyComm: TypeAlias = "World | Communicator | Any | None"  # Any: a communicator of mpi4py

_worlds: Final[list[World]] = []  # the one of this process
_keyvals: Final[list[int]] = []  # of the attribute that keeps ours on a communicator of mpi4py


def init(device: str = "cpu") -> World:
    """Start MPI where a launcher announced a world, else a world of this process; return it. Collective.

    Later calls return the same world. ``device`` is "cpu", or "gpu": the GPU of this rank's local rank becomes current
    before MPI starts. From here on an uncaught exception on any rank ends the job, and its traceback is shown. MPI may
    have been started by mpi4py before; it ends with the interpreter. Under `hpcdist run --out`, or with
    HPCDIST_DEADLINE_S, operations are recorded for `hpcdist hang`, and one that passes its deadline ends the job
    (`hpcdist help api`). Raises ConfigurationError where the launcher and
    the MPI library do not belong together, UsageError for another device, or in a worker process of a rank.
    """
    refuse_worker()
    fail_alike(launched=True)
    if device not in ("cpu", "gpu"):
        raise UsageError(f"device = {device!r}; choose 'cpu' or 'gpu'")
    if not _worlds:
        world = start_world(device)
        if any(world.bcast((os.environ.get(RUN_DIR), os.environ.get(DEADLINE)))):
            record(world)
    return _worlds[0]


def start_world(device: str) -> World:
    """Return the world, as `init` does, before anything is recorded. Collective.

    Raises UsageError in a worker process of a rank.
    """
    refuse_worker()
    if not _worlds:
        _worlds.append(World(start(device)))
    return _worlds[0]


def record(world: World, default_s: float = DEADLINE_S) -> None:
    """Record the operations of the program, and hold each to a deadline, unless that is done already. Collective.

    The records lie in the run directory of `hpcdist run --out`, else in a directory for temporary files, which the end
    of the process removes; after a failure it stays for `hpcdist hang`, until a start more than `RECORDS_KEPT_S` later.
    The deadline is HPCDIST_DEADLINE_S, else ``default_s`` seconds. Raises ConfigurationError
    for another text.
    """
    if world.size == 1 or failfast.is_recording():
        return
    run_dir = world.bcast(os.environ.get(RUN_DIR))
    folder = Path(run_dir or world.bcast(tempfile.mkdtemp(prefix=RECORDS) if world.rank == 0 else ""))
    if not run_dir and world.local_rank == 0:
        _remove_old_records(folder.parent)
        at_exit(shutil.rmtree, folder, True)  # errors are ignored
    folder.mkdir(parents=True, exist_ok=True)  # on every node
    world.session.record(folder, _deadline_s(default_s))
    assert world.session.watchdog is not None
    world.session.watchdog.tighten()  # the deadline is the program's: long enough for a first step


def _remove_old_records(parent: Path) -> None:
    """Remove records of this user in ``parent`` that failed programs left `RECORDS_KEPT_S` ago (local)."""
    for folder in parent.glob(f"{RECORDS}*"):
        with suppress(OSError):  # another process removes it
            state = folder.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > RECORDS_KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)


def end_records(call: Callable[[], Value]) -> Value:
    """Return ``call()``; it is the last operation of the program's records, if `record` began any. Collective."""
    if not _worlds:
        return call()
    session = _worlds[0].session
    token = session.comm.events.begin(session.comm.name, "training", "uint8", 0, UNKNOWN_BYTES, -1, 0)
    try:
        result = call()
    finally:  # a script may catch the error and go on: an open operation would pass its deadline
        session.comm.events.end(token)
    session.stop_recording()
    return result


def _deadline_s(default_s: float) -> float:
    text = os.environ.get(DEADLINE)
    try:
        return float(text) if text else default_s
    except ValueError:
        raise ConfigurationError(f"{DEADLINE}={text!r}; set it to seconds, such as 300") from None


@contextmanager
def session(device: str = "cpu") -> Iterator[World]:
    """Yield the world of `init`; at the end of the block all ranks meet. Collective."""
    world = init(device)
    yield world
    world.barrier()


def communicator_of(comm: AnyComm = None) -> Communicator:
    """Return the communicator that ``comm`` stands for; None is the world of `init`.

    Collective at the first use of a communicator of mpi4py, which is duplicated then, and once for None. Raises
    UsageError for anything else.
    """
    refuse_worker()
    if comm is None:
        return init().comm
    if isinstance(comm, World):
        return comm.comm
    if hasattr(comm, "allgather_object"):
        ours: Communicator = comm
        return ours
    if not hasattr(comm, "Get_attr"):
        raise UsageError(
            f"comm is a {type(comm).__name__}; pass what hpcdist.init() returned, or an intracommunicator of mpi4py"
        )
    return _adopted(comm)


def _adopted(comm: Any) -> Communicator:
    """Return ours for the communicator ``comm`` of mpi4py, which keeps it as an attribute until it is freed."""
    mpi = import_mpi()
    if not _keyvals:
        _keyvals.append(mpi.Comm.Create_keyval(delete_fn=_freed))
    kept: Communicator | None = comm.Get_attr(_keyvals[0])
    if kept is None:
        if comm.Is_inter():
            raise UsageError("comm is an intercommunicator; pass an intracommunicator (comm.Merge() makes one)")
        world = init()  # failures of a rank end the job from the first collective on
        kept = MpiCommunicator(mpi, comm.Dup(), comm.Get_name() or "mpi4py", Handover(device_pointers=False))
        kept.observe_like(cast(Observable, world.comm))
        comm.Set_attr(_keyvals[0], kept)
    return kept


def _freed(comm: Any, keyval: int, ours: Communicator) -> None:
    """Free ``ours`` where the program frees ``comm``; those of MPI itself end in MPI_Finalize (collective)."""
    mpi = import_mpi()
    if comm not in (mpi.COMM_WORLD, mpi.COMM_SELF):
        ours.free()


def library_of(comm: Communicator) -> str:
    """Return the version string of the MPI library below ``comm``; "none" for one process (local)."""
    return library(import_mpi()) if isinstance(comm, MpiCommunicator) else "none"
