"""Setup of a PyTorch program under MPI: environment variables, communicator, event recorder and DataLoader workers."""

import multiprocessing
import os
import signal
import socket
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data._utils import signal_handling

from hpcdist.arrays.gpu import device
from hpcdist.checkpoint.restoring.restore import on_first_rank
from hpcdist.checkpoint.state import finish_saves
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch.environment import ENERGY, RUN_DIR
from hpcdist.comm.launch.exit_file import STOP_CODES
from hpcdist.comm.mpi.communicator import MpiCommunicator
from hpcdist.comm.mpi.world import DEADLINE, World, record, start_world
from hpcdist.comm.transport import LARGEST_TAG
from hpcdist.energy import phases
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.reporting.units import format_joules
from hpcdist.torch import metrics
from hpcdist.training.recipe.recipe import load

_ports: Final = set[str]()  # chosen by this module


def start() -> World:
    """Start MPI, set the environment variables that torchrun would set, and return the `World`. Collective.

    Raises ConfigurationError if the environment sets a RANK or WORLD_SIZE that differs from MPI's rank or size.
    """
    on_gpu = _has_gpu()
    world = start_world("gpu" if on_gpu else "cpu")
    expected = {"RANK": world.rank, "WORLD_SIZE": world.size}
    present = {name: os.environ[name] for name in expected if name in os.environ}
    if any(present[name] != str(expected[name]) for name in present):
        raise ConfigurationError(
            f"the environment has {', '.join(f'{name}={value}' for name, value in present.items())}, but MPI "
            f"({world.library}) started this process as rank {world.rank} of {world.size}; start the program with "
            "mpirun, srun or `hpcdist run` instead of torchrun, or unset these variables"
        )
    os.environ |= {name: str(value) for name, value in expected.items()}
    os.environ |= {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
    if not present or "MASTER_ADDR" not in os.environ:  # a launcher that sets ranks may have its own store
        _set_address(world)
    if on_gpu:
        torch.cuda.set_device(device.index())
    elif torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    return world


def _has_gpu() -> bool:
    try:
        return torch.cuda.is_available() and device.count() > 0
    except MissingCapabilityError:
        return False  # without cupy, GPU tensors are communicated through host memory


def _set_address(world: World) -> None:
    # The host of rank 0, and a free port of this host. Collective.
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
        host = "127.0.0.1"  # a host that cannot resolve its own name is a single machine
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def shield_workers() -> None:
    """Make DataLoader workers ignore the signals that stop the job, so that the training can save before. Local."""
    handlers: Any = signal_handling  # untyped in PyTorch
    set_handlers = handlers._set_worker_signal_handlers

    def shielded() -> None:
        set_handlers()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_CODES)
        threading.Thread(target=_await_parent, name="hpcdist worker signals", daemon=True).start()

    handlers._set_worker_signal_handlers = shielded


def _await_parent() -> None:
    # Only the training process may stop this worker: ignore the signals of other senders.
    rank = multiprocessing.parent_process()
    while rank is not None and signal.sigwaitinfo(STOP_CODES).si_pid != rank.pid:
        pass
    os._exit(0)


def begin(world: World, timeout: timedelta) -> Callable[[], None]:
    """Start the event recorder, and return a function to call at the end of the program. Collective.

    ``world``: this job. ``timeout``: time limit of each operation. All ranks must call the returned function.
    """
    prints_energy, run_dir = world.bcast((os.environ.get(ENERGY, "0") == "1", os.environ.get(RUN_DIR)))
    # The keys [telemetry] and [energy] come from the site, the user and the environment of rank 0.
    recipe = on_first_rank(world.comm, lambda: load().recipe) if run_dir else None
    record(world, timeout.total_seconds(), spans=recipe is not None and recipe.telemetry.trace)
    program = ExitStack()
    if os.environ.get("MASTER_PORT") in _ports:
        program.callback(_set_address, world)
    if recipe is not None and run_dir:
        metrics.begin(world, Path(run_dir), recipe)
        program.callback(metrics.end)
    program.callback(finish_saves)
    if prints_energy:
        program.callback(_print_joules, world)
    if prints_energy or run_dir:
        program.enter_context(phases.window("training"))
    return program.close


def limit(name: str, timeout: timedelta) -> None:
    """Set the timeout of operations on the communicator named ``name``, unless HPCDIST_DEADLINE_S is set. Local."""
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
    """Return a new communicator named ``name`` over ``ranks``, ranks of ``world``. Only these ranks must call it."""
    whole = world.comm
    if not isinstance(whole, MpiCommunicator):
        return whole.dup(name)
    return whole.subgroup(ranks, zlib.crc32(name.encode()) % (LARGEST_TAG + 1), name)
