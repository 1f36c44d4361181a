"""Layout of a shard: dataset names, and sources of the bytes of each piece in blocks."""

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
    """Return the HDF5 dataset name of each tensor part in ``slots``, a list of descriptions of tensor parts."""
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
    """Return a list of flags for each rank: True for a tensor part that this rank must write.

    ``groups[r]``: descriptions of the tensor parts on rank r. The lowest rank that has a part writes it.
    """
    seen: set[Slot] = set()
    flags = []
    for slots in groups:
        flags.append([slot not in seen for slot in slots])
        assert len(set(slots)) == len(slots), "a rank must not save a piece twice"
        seen.update(slots)
    return flags


BlockSource = Callable[[], Iterator[np.ndarray]]  # yields blocks of bytes; each is valid until the next is requested
TAG = 0


def blocks_of(array: Any) -> Iterator[np.ndarray]:
    """Yield the bytes of ``array`` (array on host or GPU, or `FileSlice`) in blocks. Local."""
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
    # The copies run on another stream, so they must wait for the kernels that produced the array.
    produced = device.record()
    arriving: deque[tuple[np.ndarray, Any]] = deque()
    for part in _cuts(array.size, array.dtype):
        block = staging.lease(part.size, array.dtype)
        arriving.append((block, staging.begin_to_host(array[part.slice], block, produced)))
        if len(arriving) == 2:  # the next block is copied while the caller uses this one
            yield _wait_for_copy(arriving.popleft())
    while arriving:
        yield _wait_for_copy(arriving.popleft())


def _wait_for_copy(copy: tuple[np.ndarray, Any]) -> np.ndarray:
    block, event = copy
    event.synchronize()
    return block.view(np.uint8)


class IncomingBlocks:
    """Receiver of byte blocks from the rank ``peer``, with two buffers. ``sizes``: size of each block in bytes."""

    def __init__(self, comm: Communicator, peer: int, sizes: Sequence[int]) -> None:
        self._comm, self._peer, self._sizes = comm, peer, deque(sizes)
        longest = max(sizes, default=0)
        self._free = deque(np.empty(longest, np.uint8) for _ in range(min(2, len(sizes))))
        self._posted: deque[tuple[Any, np.ndarray]] = deque()
        self._used: np.ndarray | None = None

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """Yield the next ``count`` byte blocks from the peer rank. A block is valid until the next one is requested."""
        for _ in range(count):
            yield self._next()

    def drain(self) -> None:
        """Receive and discard all remaining blocks, so that the sends of ``peer`` complete."""
        while self._posted or self._sizes:
            self._next()

    def _next(self) -> np.ndarray:
        if self._used is not None:  # the caller has finished with the last block: reuse its buffer
            self._free.append(self._used)
        while self._free and self._sizes:
            memory, size = self._free.popleft(), self._sizes.popleft()
            self._posted.append((self._comm.irecv(memory[:size], self._peer, TAG), memory[:size]))
        request, block = self._posted.popleft()
        request.wait()
        # Keep the whole buffer, not the view: a later block may be longer.
        self._used = block if block.base is None else block.base
        return block


def send_blocks(comm: Communicator, peer: int, arrays: Sequence[Any], sizes: Sequence[int]) -> str:
    """Send ``arrays`` to the rank ``peer`` in blocks. Return an error message, or "" on success.

    ``sizes``: size of each block in bytes. If an array cannot be read from its file, zeros are sent instead.
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
