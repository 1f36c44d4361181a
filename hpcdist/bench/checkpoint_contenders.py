"""Who is measured beside checkpoints: raw files of the same bytes, and PyTorch's distributed checkpoint."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from hpcdist.bench.checkpoint import Contender, State
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError

RAW: Final = "raw"
TORCH: Final = "torch"
BLOCK_BYTES: Final = 16 << 20


def raw(comm: Communicator, state: State) -> Contender:
    """Return the yardstick (local)."""

    def file(folder: Path) -> Path:
        return folder / f"raw-{comm.rank:05d}.bin"

    def write(folder: Path) -> None:
        fd = os.open(file(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for block in _blocks(state):
                _whole(lambda view: os.write(fd, view), block)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(folder: Path) -> None:
        fd = os.open(file(folder), os.O_RDONLY)
        try:
            for block in _blocks(state):
                _whole(lambda view: os.readv(fd, [view]), block)
        finally:
            os.close(fd)

    return Contender(RAW, write, read)


def _blocks(state: State) -> Iterator[memoryview]:
    for array in state.values():
        view = array.view(np.uint8).data
        yield from (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))


def _whole(move: Callable[[memoryview], int], view: memoryview) -> None:
    while view:
        moved = move(view)
        if not moved:
            raise StorageError("the file of the raw yardstick ends too early")
        view = view[moved:]


def torch_missing() -> str:
    """Return why PyTorch does not take part, "" where it can."""
    return "" if importlib.util.find_spec("torch") else "PyTorch is not installed"


def torch_begin(comm: Communicator, folder: Path) -> None:
    """Let the ranks find each other in ``folder``, as PyTorch has it. Collective, once in a process."""
    import torch.distributed as group

    place = comm.broadcast_object(str((folder / f"rendezvous-{os.getpid()}").absolute()))
    group.init_process_group("gloo", init_method=f"file://{place}", rank=comm.rank, world_size=comm.size)


def torch(comm: Communicator, state: State) -> Contender:
    """Return PyTorch's distributed checkpoint of it (local)."""
    import torch as module
    import torch.distributed.checkpoint as saved

    # Every rank's tensors have names of their own, as parts of a sharded state have.
    tensors = {f"rank{comm.rank}.{name}": module.from_numpy(array) for name, array in state.items()}

    def write(into: Path) -> None:
        saved.save(tensors, checkpoint_id=str(into / "dcp"))

    def read(back: Path) -> None:
        saved.load(tensors, checkpoint_id=str(back / "dcp"))

    return Contender(TORCH, write, read)
