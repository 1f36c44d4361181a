"""World of a program of PyTorch that MPI started: its environment variables, communicator, recorder and workers.

`torch.distributed` reads rank and size from the environment, as torchrun sets it. Under a launcher of MPI they are set
here from MPI, with an address of rank 0 for the store, which groups of other backends need. Where torchrun has set
them, they have to be those of MPI.
"""

import multiprocessing
import os
import signal
import socket
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any, Final

import torch
from torch.utils.data._utils import signal_handling

from hpcdist.arrays.gpu import device
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch.environment import ENERGY
from hpcdist.comm.launch.exit_file import STOP_CODES
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.mpi.world import DEADLINE, World, record, start_world
from hpcdist.energy import phases
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.reporting.units import format_joules

_ports: Final = set[str]()  # that were chosen here
TAGS: Final = 1 << 15  # MPI promises tags up to 32767


def start() -> World:
    """Start MPI, and set the variables that `torch.distributed` and programs for torchrun read. Collective.

    Raises ConfigurationError where RANK and WORLD_SIZE are there and are not those of MPI.
    """
    on_gpu = _has_gpu()
    world = start_world("gpu" if on_gpu else "cpu")
    wanted = {"RANK": world.rank, "WORLD_SIZE": world.size}
    given = {name: os.environ[name] for name in wanted if name in os.environ}
    if any(given[name] != str(wanted[name]) for name in given):
        raise ConfigurationError(
            f"{', '.join(f'{name}={value}' for name, value in given.items())} in the environment, but this is rank "
            f"{world.rank} of {world.size} of MPI ({world.library}); start the program with mpirun, srun or "
            "`hpcdist run` instead of torchrun, or unset them"
        )
    os.environ |= {name: str(value) for name, value in wanted.items()}
    os.environ |= {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
    if not given or "MASTER_ADDR" not in os.environ:  # who sets ranks may have a store of its own
        _set_address(world)
    if on_gpu:
        torch.cuda.set_device(device.index())
    return world


def _has_gpu() -> bool:
    """Whether PyTorch and cupy see a GPU; without cupy, programs with tensors in host memory work (`streams`)."""
    try:
        return torch.cuda.is_available() and device.count() > 0
    except MissingCapabilityError:
        return False


def _set_address(world: World) -> None:
    """Set a name of the host of rank 0 that others know, and a port of it that is free. Collective."""
    os.environ |= world.bcast(_address() if world.rank == 0 else {})
    _ports.add(os.environ["MASTER_PORT"])


def _address() -> dict[str, str]:
    with closing(socket.socket()) as listening:
        listening.bind(("", 0))
        port: int = listening.getsockname()[1]
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        host = "127.0.0.1"  # a machine that does not know its own name has no others beside it
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def shield_workers() -> None:
    """Let workers of a DataLoader outlive the signals that ask a job to stop (local).

    A worker that such a signal kills raises an error in its rank, which then cannot save. The rank itself may still
    terminate its workers, and they end by themselves after their rank has died.
    """
    handlers: Any = signal_handling  # untyped in PyTorch
    set_handlers = handlers._set_worker_signal_handlers

    def shielded() -> None:
        set_handlers()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_CODES)
        threading.Thread(target=_await_parent, name="hpcdist worker signals", daemon=True).start()

    handlers._set_worker_signal_handlers = shielded


def _await_parent() -> None:
    """End this worker at a signal of its rank; drop signals of other processes."""
    rank = multiprocessing.parent_process()
    while rank is not None and signal.sigwaitinfo(STOP_CODES).si_pid != rank.pid:
        pass
    os._exit(0)


def begin(world: World, timeout: timedelta) -> Callable[[], None]:
    """Record the operations of a program, hold each to ``timeout``, and count its joules; return what ends the count.

    Both are collective. After the end there is another address, so that no rank finds the old store there when the
    next group is made.
    """
    record(world, timeout.total_seconds())
    program = ExitStack()
    if os.environ.get("MASTER_PORT") in _ports:
        program.callback(_set_address, world)
    if world.bcast(os.environ.get(ENERGY, "0") == "1"):
        program.callback(_print_joules, world)
        program.enter_context(phases.window("program"))
    return program.close


def limit(name: str, timeout: timedelta) -> None:
    """Set the deadline of operations of the communicator ``name``, unless HPCDIST_DEADLINE_S is set (local)."""
    watchdog = start_world("cpu").session.watchdog
    if watchdog is not None and not os.environ.get(DEADLINE):
        watchdog.limit(name, timeout.total_seconds())


def _print_joules(world: World) -> None:
    usage = phases.usage()
    if world.rank == 0:
        reason = f": {usage['reason']}" if usage.get("reason") else ""
        label = f"({usage['label']}) " if usage["label"] else ""
        print(f"energy {label}{format_joules(usage['energy_j'])}{reason}", flush=True)


def communicator(world: World, ranks: list[int], name: str) -> Communicator:
    """Return the communicator of ``ranks`` of the ``world``, in their order. Collective over them alone.

    Groups of several threads need names of their own.
    """
    whole = world.comm
    if not isinstance(whole, MpiCommunicator):
        return whole.dup(name)
    return whole.subgroup(ranks, zlib.crc32(name.encode()) % TAGS, name)
