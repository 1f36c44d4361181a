"""Where the bytes of a piece come from, block by block: memory of the host or a GPU, a file, or another rank."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcdist.arrays import backend, device, staging
from hpcdist.arrays.filestore import Stretch
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint.manifest import BLOCK_BYTES
from hpcdist.comm.communicator import Communicator

Source = Callable[[], Iterator[np.ndarray]]  # yields blocks of bytes, each to be used before the next is asked for
TAG = 0


def held(array: Any) -> Iterator[np.ndarray]:
    """Yield the bytes of what this rank holds: an array, which is not copied on the host, or a `Stretch` (local)."""
    if isinstance(array, Stretch):
        return _of_file(array)
    return _of_device(array) if backend.is_device(array) else _of_host(array)


def _cuts(size: int, dtype: np.dtype) -> Iterator[Range]:
    return cut(Range(0, size), BLOCK_BYTES // dtype.itemsize)


def _of_host(array: np.ndarray) -> Iterator[np.ndarray]:
    for part in _cuts(array.size, array.dtype):
        yield np.ascontiguousarray(array[part.slice]).view(np.uint8)


def _of_file(source: Stretch) -> Iterator[np.ndarray]:
    memory = np.empty(min(BLOCK_BYTES // source.dtype.itemsize, source.where.size), source.dtype)
    for part in _cuts(source.where.size, source.dtype):
        source.read(part, memory[: part.size])
        yield memory[: part.size].view(np.uint8)


def _of_device(array: Any) -> Iterator[np.ndarray]:
    """While a block is used, the next one is on the bus."""
    produced = device.record()
    arriving: deque[tuple[np.ndarray, Any]] = deque()
    for part in _cuts(array.size, array.dtype):
        block = staging.lease(part.size, array.dtype)
        arriving.append((block, staging.begin_to_host(array[part.slice], block, produced)))
        if len(arriving) == 2:
            yield _arrived(arriving.popleft())
    while arriving:
        yield _arrived(arriving.popleft())


def _arrived(copy: tuple[np.ndarray, Any]) -> np.ndarray:
    block, event = copy
    event.synchronize()
    return block.view(np.uint8)


class Incoming:
    """Blocks of ``sizes`` bytes that ``peer`` sends, in two buffers: one arrives while the other is used."""

    def __init__(self, comm: Communicator, peer: int, sizes: Sequence[int]) -> None:
        self._comm, self._peer, self._sizes = comm, peer, deque(sizes)
        longest = max(sizes, default=0)
        self._free = deque(np.empty(longest, np.uint8) for _ in range(min(2, len(sizes))))
        self._posted: deque[tuple[Any, np.ndarray]] = deque()
        self._used: np.ndarray | None = None

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """Yield the next ``count`` blocks, the next one's buffer being that of the one before the last."""
        for _ in range(count):
            yield self._next()

    def drain(self) -> None:
        """Take what is still to come, so that the peer is not held up."""
        while self._posted or self._sizes:
            self._next()

    def _next(self) -> np.ndarray:
        if self._used is not None:
            self._free.append(self._used)
        while self._free and self._sizes:
            memory, size = self._free.popleft(), self._sizes.popleft()
            self._posted.append((self._comm.irecv(memory[:size], self._peer, TAG), memory[:size]))
        request, block = self._posted.popleft()
        request.wait()
        self._used = block if block.base is None else block.base
        return block


def send(comm: Communicator, peer: int, arrays: Sequence[Any], sizes: Sequence[int]) -> str:
    """Send the blocks of ``arrays``, of ``sizes`` bytes, to ``peer``; return why not, where a file cannot be read.

    All blocks are sent in any case.
    """
    sent, error = 0, ""
    try:
        for array in arrays:
            for block in held(array):
                comm.send(block, peer, TAG)
                sent += 1
    except OSError as failure:
        error = str(failure)
    for size in sizes[sent:]:
        comm.send(np.zeros(size, np.uint8), peer, TAG)
    return error
