"""Timing of calls that take turns, and the start of PyTorch's own ranks for those of them that are PyTorch's.

Garbage is not collected meanwhile, and the slowest rank counts.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcdist.comm.communicator import Communicator


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage in the block: a collection would fall into the time of one of those that take turns."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def own_s(comm: Communicator, call: Callable[[], object]) -> float:
    """Return the seconds that ``call`` takes on this rank, from a barrier on. Collective over ``comm``."""
    comm.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def slowest_s(comm: Communicator, call: Callable[[], object]) -> float:
    """Return the seconds that ``call`` takes on the slowest rank, from a barrier on. Collective over ``comm``."""
    return max(comm.allgather_object(own_s(comm, call)))


def begin_torch_group(comm: Communicator, folder: Path) -> None:
    """Let the ranks find each other in ``folder``, as PyTorch has it. Collective, once in a process.

    Every rank has to have PyTorch: one that raises here leaves the others waiting.
    """
    import torch.distributed as group

    place = comm.broadcast_object(str((folder / f"rendezvous-{os.getpid()}").absolute()))
    group.init_process_group("gloo", init_method=f"file://{place}", rank=comm.rank, world_size=comm.size)
