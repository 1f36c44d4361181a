"""Layout of a shard: the name of each piece, and the source of its bytes, block by block.

A `BlockSource` yields the bytes of a piece in blocks: from memory of the host or of a GPU, from a file, or from another
rank, with the next block on its way while one is used.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint.format.manifest import BLOCK_BYTES, Slot
from hpcdist.comm.communicator import Communicator


def dataset_names(slots: Sequence[Slot]) -> list[str]:
    """Return the dataset name of each slot of a shard: the tensor's, and for further pieces of it where they begin."""
    datasets: dict[str, None] = {}
    for slot in slots:
        name = f"{slot.kind}/{slot.tensor}"
        if name in datasets:
            corner = ",".join(str(start) for start, _ in slot.box)
            name = f"{name}@{corner}+{slot.flat[0]}"
        if name in datasets:
            name = f"{name}-{slot.flat[1]}"
        assert name not in datasets, f"{name} is saved twice in one shard"
        datasets[name] = None
    return list(datasets)


def first_holders(groups: Sequence[Sequence[Slot]]) -> list[list[bool]]:
    """Return for the slots of each rank whether it is the first rank with that piece: only this one is written."""
    seen: set[Slot] = set()
    flags = []
    for slots in groups:
        flags.append([slot not in seen for slot in slots])
        assert len(set(slots)) == len(slots), "a rank saves a piece twice"
        seen.update(slots)
    return flags


BlockSource = Callable[[], Iterator[np.ndarray]]  # yields blocks of bytes, each to be used before the next is asked for
TAG = 0


def blocks_of(array: Any) -> Iterator[np.ndarray]:
    """Yield the bytes of what this rank holds: an array, which is not copied on the host, or a `FileSlice` (local)."""
    if isinstance(array, FileSlice):
        return _of_file(array)
    return _of_device(array) if backend.is_device(array) else _of_host(array)


def _cuts(size: int, dtype: np.dtype) -> Iterator[Range]:
    return cut(Range(0, size), BLOCK_BYTES // dtype.itemsize)


def _of_host(array: np.ndarray) -> Iterator[np.ndarray]:
    for part in _cuts(array.size, array.dtype):
        yield np.ascontiguousarray(array[part.slice]).view(np.uint8)


def _of_file(source: FileSlice) -> Iterator[np.ndarray]:
    memory = np.empty(min(BLOCK_BYTES // source.dtype.itemsize, source.where.size), source.dtype)
    for part in _cuts(source.where.size, source.dtype):
        source.read(part, memory[: part.size])
        yield memory[: part.size].view(np.uint8)


def _of_device(array: Any) -> Iterator[np.ndarray]:
    """Yield blocks copied from the GPU: while one is used, the next is on the bus."""
    # The copies run on another stream: they wait for the kernels that produced the array.
    produced = device.record()
    arriving: deque[tuple[np.ndarray, Any]] = deque()
    for part in _cuts(array.size, array.dtype):
        block = staging.lease(part.size, array.dtype)
        arriving.append((block, staging.begin_to_host(array[part.slice], block, produced)))
        if len(arriving) == 2:
            yield _wait_for_copy(arriving.popleft())
    while arriving:
        yield _wait_for_copy(arriving.popleft())


def _wait_for_copy(copy: tuple[np.ndarray, Any]) -> np.ndarray:
    block, event = copy
    event.synchronize()
    return block.view(np.uint8)


class IncomingBlocks:
    """Stream of blocks of ``sizes`` bytes from ``peer``, in two buffers: one arrives while the other is used."""

    def __init__(self, comm: Communicator, peer: int, sizes: Sequence[int]) -> None:
        self._comm, self._peer, self._sizes = comm, peer, deque(sizes)
        longest = max(sizes, default=0)
        self._free = deque(np.empty(longest, np.uint8) for _ in range(min(2, len(sizes))))
        self._posted: deque[tuple[Any, np.ndarray]] = deque()
        self._used: np.ndarray | None = None

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """Yield the next ``count`` blocks. A block is valid until the next one is asked for."""
        for _ in range(count):
            yield self._next()

    def drain(self) -> None:
        """Receive what is still to come and drop it, so that the peer does not stay in its sends."""
        while self._posted or self._sizes:
            self._next()

    def _next(self) -> np.ndarray:
        if self._used is not None:  # the caller is done with the last block: its buffer may be posted again
            self._free.append(self._used)
        while self._free and self._sizes:
            memory, size = self._free.popleft(), self._sizes.popleft()
            self._posted.append((self._comm.irecv(memory[:size], self._peer, TAG), memory[:size]))
        request, block = self._posted.popleft()
        request.wait()
        # The whole buffer, of which the block is a view: a later block may be longer.
        self._used = block if block.base is None else block.base
        return block


def send_blocks(comm: Communicator, peer: int, arrays: Sequence[Any], sizes: Sequence[int]) -> str:
    """Send the blocks of ``arrays``, of ``sizes`` bytes, to ``peer``; return the error where a file cannot be read.

    All blocks are sent in any case, zeros in the place of those that cannot be read: the peer has posted receives for
    them, and drops the shard when it learns of the error.
    """
    sent, error = 0, ""
    try:
        for array in arrays:
            for block in blocks_of(array):
                comm.send(block, peer, TAG)
                sent += 1
    except OSError as failure:
        error = str(failure)
    for size in sizes[sent:]:
        comm.send(np.zeros(size, np.uint8), peer, TAG)
    return error
