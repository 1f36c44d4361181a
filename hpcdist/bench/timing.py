"""Conditions of a timed measurement: no garbage collection, and a PyTorch process group for PyTorch contenders."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcdist.comm.communicator import Communicator


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable Python's garbage collection inside the `with` block, so that no collection interrupts a timed call."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def begin_torch_group(comm: Communicator, folder: Path) -> None:
    """Start PyTorch's default process group (gloo) on the ranks of ``comm``. Collective; once per process.

    ``folder``: directory on rank 0, accessible to all ranks, for the rendezvous. If PyTorch is missing on a rank, this
    rank raises ImportError and the others hang.
    """
    import torch.distributed as group

    rendezvous = comm.broadcast_object(str((folder / f"rendezvous-{os.getpid()}").absolute()))
    group.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=comm.rank, world_size=comm.size)
