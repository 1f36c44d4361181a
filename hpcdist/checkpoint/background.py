"""Save in the background: a snapshot at a step boundary, written by a thread that sends no messages.

    begin     writers copy the pieces into a snapshot
    writing   each writer's thread writes its shard
    gather    rank 0 gets the entries of all shards
    commit    rank 0's thread writes index and manifest and renames the directory

Cost: one copy of the state per save, and memory for a second state, or an unnamed file in ``local_directory``.
"""

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.filestore import FileSlice, begin_write_back
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.checkpoint import two_phase
from hpcdist.checkpoint.manifest import BLOCK_BYTES
from hpcdist.checkpoint.shard import BlockSource, blocks_of, read_fully
from hpcdist.checkpoint.two_phase import GroupGather, IncrementalWriter, SavePlan, ShardOutcome, agree, group_of
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MissingCapabilityError, StorageError
from hpcdist.hdf5.overlay import pwrite_all


class SnapshotMemory:
    """Host memory for a copy of the tensors that this rank writes. The memory is pinned for tensors on a GPU."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Size of the allocated memory in bytes."""
        return self._memory.nbytes

    def fill(self, gathering: GroupGather) -> list[BlockSource]:
        """Copy all tensors of ``gathering``. Return a list of functions, which yield the copied bytes of a tensor."""
        sizes = [slot.nbytes for slot in gathering.slots]
        self._reserve(sum(align_up(size, ALIGN_BYTES) for size in sizes), gathering.arrays)
        buffers, start = [], 0
        for size in sizes:
            buffers.append(self._memory[start : start + size])
            start += align_up(size, ALIGN_BYTES)
        num_own = len(gathering.arrays)
        copies = [_copy(array, buffer) for array, buffer in zip(gathering.arrays, buffers[:num_own], strict=True)]
        for source, buffer in zip(gathering.sources()[num_own:], buffers[num_own:], strict=True):
            _copy_blocks(source(), buffer)
        for event in (copy for copy in copies if copy is not None):
            event.synchronize()
        return [partial(blocks_of, buffer) for buffer in buffers]

    def _reserve(self, nbytes: int, arrays: Sequence[Any]) -> None:
        if self._memory.nbytes >= nbytes:
            return
        self._memory = np.empty(0, np.uint8)  # free the old memory first
        self._memory = _pinned(nbytes) if any(map(backend.is_device, arrays)) else np.empty(nbytes, np.uint8)
        if self._ledger is not None:
            self._ledger.track(self._memory, "checkpoint")


def _pinned(nbytes: int) -> np.ndarray:
    try:
        return np.frombuffer(device.pinned(nbytes), np.uint8, nbytes)
    except MissingCapabilityError:
        return np.empty(nbytes, np.uint8)


def _copy(array: Any, buffer: np.ndarray) -> Any:
    # For a GPU array, returns the event that marks the end of the copy.
    if isinstance(array, np.ndarray):
        buffer.view(array.dtype)[...] = array
    elif isinstance(array, FileSlice):
        _copy_blocks(blocks_of(array), buffer)
    elif buffer.size:
        return staging.begin_to_host(array, buffer.view(array.dtype))
    return None


def _copy_blocks(blocks: Iterator[np.ndarray], buffer: np.ndarray) -> None:
    start = 0
    for block in blocks:
        buffer[start : start + block.size] = block
        start += block.size


class SnapshotFile:
    """Temporary file in ``directory`` for a copy of the tensors that this rank writes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def fill(self, gathering: GroupGather) -> list[BlockSource]:
        """Copy all tensors of ``gathering`` to this file, as `SnapshotMemory.fill` to memory. Raises StorageError."""
        try:
            self._reserve(sum(slot.nbytes for slot in gathering.slots))
            sources: list[BlockSource] = []
            start = 0
            for slot, source in zip(gathering.slots, gathering.sources(), strict=True):
                sources.append(partial(self._blocks, start, slot.nbytes))
                for block in source():
                    pwrite_all(self._fd, block.data, start)
                    begin_write_back(self._fd, start, block.nbytes)
                    start += block.nbytes
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"checkpoint.local_directory = {str(self._directory)!r} cannot be written: {error.strerror}; choose "
                "a directory on a local disk that has enough space for the state of all ranks of the node"
            ) from error
        return sources

    def _reserve(self, nbytes: int) -> None:
        if self._fd < 0:
            with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
                self._fd = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._fd)
        if os.fstat(self._fd).st_size < nbytes:
            os.posix_fallocate(self._fd, 0, nbytes)

    def _blocks(self, start: int, nbytes: int) -> Iterator[np.ndarray]:
        memory = np.empty(min(nbytes, BLOCK_BYTES), np.uint8)
        for done in range(0, nbytes, BLOCK_BYTES):
            block = memory[: min(BLOCK_BYTES, nbytes - done)]
            if (read := read_fully(self._fd, block.data, start + done)) < block.nbytes:
                raise StorageError(
                    f"the snapshot file in {self._directory} ends early, at byte {start + done + read}; check the disk"
                )
            yield block


class WriterThread(threading.Thread):
    """Thread that calls ``work`` to write a shard file. ``outcome``: result of the call, or an error text."""

    def __init__(self, work: Callable[[], ShardOutcome]) -> None:
        super().__init__(name="hpcdist checkpoint", daemon=True)
        self._work = work
        self.outcome = ShardOutcome()
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._work()
        except BaseException as error:  # noqa: BLE001 - reported on all ranks
            self.outcome = ShardOutcome(f"{type(error).__name__}: {error}")


class BackgroundCheckpoints:
    """Writer of one checkpoint at a time, in background threads. Methods are collective unless marked local."""

    def __init__(
        self,
        comm: Communicator,
        ledger: Ledger | None = None,
        *,
        local_directory: Path | None = None,
        incremental: IncrementalWriter | None = None,
    ) -> None:
        self._comm, self._incremental = comm, incremental
        self._spare = SnapshotMemory(ledger) if local_directory is None else SnapshotFile(local_directory)
        self._plan: SavePlan | None = None  # the checkpoint in progress; equal on all ranks
        self._commits = False  # all shards of the plan are written
        self._task: WriterThread | None = None
        self._outcome = ShardOutcome()  # of a rank without a task

    @property
    def comm(self) -> Communicator:
        """Communicator over the ranks that save together."""
        return self._comm

    @property
    def is_busy(self) -> bool:
        """True if a checkpoint is in progress. The value is equal on all ranks. Local."""
        return self._plan is not None

    def numbers(self) -> np.ndarray:
        """Return two flags, 0.0 or 1.0, for this rank's thread: the thread is running; the thread has failed. Local."""
        if self._task is not None and self._task.is_alive():
            return np.array([1.0, 0.0])
        outcome = self._outcome if self._task is None else self._task.outcome
        return np.array([0.0, float(self.is_busy and bool(outcome.error))])

    def begin(self, plan: SavePlan, pieces: Sequence[Piece], writers: str) -> None:
        """Finish the previous checkpoint, then start saving this rank's tensors ``pieces``. Raises StorageError.

        ``plan``: directory, step and manifest contents. ``writers``: ranks that share a shard, see `group_of`.
        """
        self.finish()
        group = group_of(self._comm, writers)
        two_phase.prepare(plan, group, self._comm)
        gathering = GroupGather(group, pieces)
        self._plan, self._commits, self._outcome = plan, False, ShardOutcome()
        if not group.writes:
            self._outcome = ShardOutcome(gathering.bring())
            return
        try:
            slots, sources = gathering.slots, self._spare.fill(gathering)
        except (OSError, MemoryError) as error:
            self._outcome = ShardOutcome(f"no snapshot: {error or type(error).__name__}")
            gathering.end()
            return
        self._task = WriterThread(lambda: two_phase.write(plan, group, slots, sources, self._incremental))

    def settle(self, sums: np.ndarray) -> Path | None:
        """If all threads have ended, start or finish the commit. Return the path after the commit, else None.

        ``sums``: sums over all ranks of the flags from `numbers`. Raises StorageError on all ranks if a thread failed.
        """
        working, failed = sums.tolist()
        return self._advance() if self.is_busy and (failed or not working) else None

    def finish(self) -> Path | None:
        """Wait for the checkpoint in progress. Return its path, or None if no save is running. Raises StorageError."""
        path = None
        while self.is_busy:
            path = self._advance()
        return path

    def abandon(self) -> None:
        """Wait for this rank's thread, then forget the checkpoint. For use after the death of another rank. Local."""
        self._joined()
        self._plan = None

    def _advance(self) -> Path | None:
        plan, self._plan = self._plan, None  # None in case of an error
        assert plan is not None
        local_outcome = self._joined()
        if self._commits:
            agree(self._comm, local_outcome.error if self._comm.rank == 0 else "")
            if self._incremental is not None:
                self._incremental.settle()
            return plan.final
        outcomes = two_phase.gather(self._comm, local_outcome)
        if any(outcome.error for outcome in outcomes):
            agree(self._comm, two_phase.commit(plan, outcomes) if self._comm.rank == 0 else "")
        self._plan, self._commits, self._outcome = plan, True, ShardOutcome()
        if self._comm.rank == 0:
            self._task = WriterThread(lambda: ShardOutcome(two_phase.commit(plan, outcomes)))
        return None

    def _joined(self) -> ShardOutcome:
        if self._task is None:
            return self._outcome
        self._task.join()
        outcome, self._task = self._task.outcome, None
        return outcome
