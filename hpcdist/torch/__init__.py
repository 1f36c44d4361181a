"""Backend "hpcdist" of torch.distributed: importing this package starts MPI and registers the backend.

    import hpcdist.torch
    torch.distributed.init_process_group("hpcdist")

Between floors 6 and 7. Begin with `group.Group` and `calls`.
"""

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from hpcdist.checkpoint.state import finish_saves
from hpcdist.comm.mpi.world import start_world
from hpcdist.comm.start import is_worker, refuse_worker
from hpcdist.errors import ConfigurationError, MissingCapabilityError, UsageError
from hpcdist.torch import launch, work
from hpcdist.torch.group import NAME, Group, Options
from hpcdist.torch.hooks import compress
from hpcdist.torch.metrics import log, phase
from hpcdist.torch.state import RandomState, last_saved, load, save, saved
from hpcdist.torch.stop import exit_if_stopped, lightning_callback, should_stop, trainer_callback, until_stop
from hpcdist.training.run.stop_requests import watch_signals

__all__ = [
    "Group",
    "Options",
    "RandomState",
    "compress",
    "exit_if_stopped",
    "finish_saves",
    "last_saved",
    "lightning_callback",
    "load",
    "log",
    "monitored_barrier",
    "phase",
    "save",
    "saved",
    "should_stop",
    "trainer_callback",
    "until_stop",
]

OLDEST: Final = (2, 4)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
    raise MissingCapabilityError(
        f"torch {torch.__version__} is too old for the backend {NAME}; install {OLDEST[0]}.{OLDEST[1]} or newer"
    )

if not is_worker():  # worker processes of spawn and forkserver import the script of the rank
    launch.start()
launch.shield_workers()
work.install()


def _create(backend: Any, options: Any) -> Group:
    if options is not None and not isinstance(options, Options):
        raise ConfigurationError(f"pg_options has type {type(options).__name__}; pass hpcdist.torch.Options(...)")
    world = start_world("cpu")  # started by the import
    ranks = list(backend.global_ranks_in_group) or list(range(world.size))
    if (backend.group_rank, backend.group_size) != (ranks.index(world.rank), len(ranks)):
        raise ConfigurationError(
            f"init_process_group got rank {backend.group_rank} of {backend.group_size}, but MPI started this process "
            f"as rank {world.rank} of {world.size}; remove the arguments rank and world_size"
        )
    comm = launch.communicator(world, ranks, f"torch{backend.group_id or 0}")
    if not backend.global_ranks_in_group:
        watch_signals()
        return Group(comm, options or Options(), launch.begin(world, backend.timeout), launch.limit)
    group = Group(comm, options or Options(), limit=launch.limit)
    if backend.timeout != dist.constants.default_pg_timeout:  # else keep the timeout of `init_process_group`
        group.set_timeout(backend.timeout)
    return group


def monitored_barrier(group: Any = None, timeout_s: float = 300.0, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of ``group`` call this function. Raises DeadlineError after ``timeout_s`` s. Collective.

    The error on rank 0 names one missing rank, or all missing ranks if ``wait_all_ranks`` is True.
    """
    asked: Any = group or dist.group.WORLD
    if not isinstance(asked, Group):
        raise UsageError("monitored_barrier needs a group of the backend hpcdist; call init_process_group first")
    asked.monitored_barrier(timedelta(seconds=timeout_s), wait_all_ranks)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


class _Name:
    # `dist.Backend.HPCDIST` raises UsageError in a DataLoader worker.
    def __get__(self, instance: Any, owner: Any) -> str:
        refuse_worker()
        return NAME


setattr(dist.Backend, NAME.upper(), _Name())
