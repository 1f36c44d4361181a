"""Save in the background: a snapshot at a step boundary, written by a thread that sends no message.

    begin     the pieces are copied into a snapshot of their writers; the state may change from here on
    writing   each writer's thread writes its shard; every step, the ranks sum how many of them are not done
    telling   at the boundary where none is left, rank 0 gets the entries
    commit    rank 0's thread writes index and manifest and renames the directory; its end is found as above

So no step waits for a disk, and the manifest is written when all have agreed that the shards are on theirs. At most
one checkpoint is under way: the next one, the end of a run and a request to stop wait for it. What fails on one rank
is raised on all, at the boundary behind the step in which it is known. Costs: the memory of a second state, taken at
the first save and used again (`SnapshotMemory`, pinned for a GPU), and a copy of it a save.

With ``local_directory`` the snapshot is a file on a disk of the node (`SnapshotFile`), copied out by the thread. It
has no name, is used again by the next saves, and a killed process leaves nothing behind. It is no checkpoint and is
never synced to its disk: what counts is the copy in the shared directory.
"""

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.filestore import FileSlice, begin_write_back
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.checkpoint.format.manifest import BLOCK_BYTES
from hpcdist.checkpoint.format.shard import read_fully
from hpcdist.checkpoint.format.shard_layout import BlockSource, blocks_of
from hpcdist.checkpoint.saving import two_phase
from hpcdist.checkpoint.saving.two_phase import GroupGather, IncrementalWriter, SavePlan, ShardOutcome, agree, group_of
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import MissingCapabilityError, StorageError
from hpcdist.hdf5.overlay import pwrite_all


class SnapshotMemory:
    """Snapshot in memory of the state that this rank writes; pinned where that comes from a GPU."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is taken."""
        return self._memory.nbytes

    def fill(self, delivery: GroupGather) -> list[BlockSource]:
        """Copy all that ``delivery`` brings, and return where it lies: the state may change from then on.

        On the writer of a group; the others `GroupGather.bring` meanwhile.
        """
        sizes = [slot.nbytes for slot in delivery.slots]
        self._reserve(sum(align_up(size, ALIGN_BYTES) for size in sizes), delivery.arrays)
        places, start = [], 0
        for size in sizes:
            places.append(self._memory[start : start + size])
            start += align_up(size, ALIGN_BYTES)
        own = len(delivery.arrays)
        copies = [_copy(array, place) for array, place in zip(delivery.arrays, places[:own], strict=True)]
        for source, place in zip(delivery.sources()[own:], places[own:], strict=True):
            _copy_blocks(source(), place)
        for event in (copy for copy in copies if copy is not None):
            event.synchronize()
        return [partial(blocks_of, place) for place in places]

    def _reserve(self, nbytes: int, arrays: Sequence[Any]) -> None:
        if self._memory.nbytes >= nbytes:
            return
        self._memory = np.empty(0, np.uint8)  # given back before more is taken
        self._memory = _pinned(nbytes) if any(map(backend.is_device, arrays)) else np.empty(nbytes, np.uint8)
        if self._ledger is not None:
            self._ledger.track(self._memory, "checkpoint")


def _pinned(nbytes: int) -> np.ndarray:
    """Return page-locked memory, or where that is refused, pageable memory: slower, otherwise the same."""
    try:
        return np.frombuffer(device.pinned(nbytes), np.uint8, nbytes)
    except MissingCapabilityError:
        return np.empty(nbytes, np.uint8)


def _copy(array: Any, place: np.ndarray) -> Any:
    """Copy ``array`` into the bytes ``place``; from a GPU, return the event after which they are there."""
    if isinstance(array, np.ndarray):
        place.view(array.dtype)[...] = array
    elif isinstance(array, FileSlice):
        _copy_blocks(blocks_of(array), place)
    elif place.size:
        return staging.begin_to_host(array, place.view(array.dtype))
    return None


def _copy_blocks(blocks: Iterator[np.ndarray], place: np.ndarray) -> None:
    start = 0
    for block in blocks:
        place[start : start + block.size] = block
        start += block.size


class SnapshotFile:
    """Snapshot in an unnamed file in ``directory`` of the state that this rank writes, instead of `SnapshotMemory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def fill(self, delivery: GroupGather) -> list[BlockSource]:
        """Write all that ``delivery`` brings, and return where it lies: the state may change from then on.

        On the writer of a group; the others `GroupGather.bring` meanwhile. Raises StorageError.
        """
        try:
            self._reserve(sum(slot.nbytes for slot in delivery.slots))
            sources: list[BlockSource] = []
            start = 0
            for slot, source in zip(delivery.slots, delivery.sources(), strict=True):
                sources.append(partial(self._blocks, start, slot.nbytes))
                for block in source():
                    pwrite_all(self._fd, block.data, start)
                    begin_write_back(self._fd, start, block.nbytes)
                    start += block.nbytes
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"checkpoint.local_directory = {str(self._directory)!r}: {error.strerror}; give a directory on a disk "
                "of each node that has room for what its ranks write"
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
                raise StorageError(f"{self._directory}: the snapshot ends at byte {start + done + read}")
            yield block


Result = TypeVar("Result")


class SavePhase(Enum):
    """Phase of the checkpoint that is under way; the same on all ranks."""

    IDLE = 0
    WRITING = 1
    COMMIT = 2


class WriterThread(threading.Thread):
    """Thread that runs ``work`` and keeps its outcome; it never raises."""

    def __init__(self, work: Callable[[], ShardOutcome]) -> None:
        super().__init__(name="hpcdist checkpoint", daemon=True)
        self._work = work
        self.outcome = ShardOutcome()
        self.start()

    def run(self) -> None:
        """Work; called by the thread."""
        try:
            self.outcome = self._work()
        except BaseException as error:  # noqa: BLE001 - a thread must not die without a word: all ranks are told
            self.outcome = ShardOutcome(f"{type(error).__name__}: {error}")


class BackgroundCheckpoints:
    """Writer of checkpoints of ``comm`` beside the steps. Every method is collective, unless it says not."""

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
        self._phase = SavePhase.IDLE
        self._task: WriterThread | None = None
        self._own = ShardOutcome()
        self._plan: SavePlan | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way; the same on all ranks (local)."""
        return self._phase is not SavePhase.IDLE

    def numbers(self) -> np.ndarray:
        """Return what `settle` needs the sums of: 1 if this rank is still writing, and 1 if it has failed (local)."""
        if self._task is not None and self._task.is_alive():
            return np.array([1.0, 0.0])
        own = self._own if self._task is None else self._task.outcome
        return np.array([0.0, float(self.is_busy and bool(own.error))])

    def begin(self, plan: SavePlan, pieces: Sequence[Piece], writers: str) -> None:
        """Begin the checkpoint ``plan``; the pieces may change when this returns. Raises StorageError on all ranks.

        One that is under way is waited for.
        """
        self.finish()
        group = group_of(self._comm, writers)
        two_phase.prepare(plan, group, self._comm)
        delivery = GroupGather(group, pieces)
        self._plan, self._own, self._phase = plan, ShardOutcome(), SavePhase.WRITING
        if not group.writes:
            self._own = ShardOutcome(delivery.bring())
            return
        try:
            slots, sources = delivery.slots, self._spare.fill(delivery)
        except (OSError, MemoryError) as error:
            self._own = ShardOutcome(f"no snapshot: {error or type(error).__name__}")
            delivery.end()
            return
        self._task = WriterThread(lambda: two_phase.write(plan, group, slots, sources, self._incremental))

    def goes_on(self, sums: np.ndarray) -> bool:
        """Whether no rank is writing any more, or some rank has failed, by the sums of `numbers` (local)."""
        working, failed = sums.tolist()
        return self.is_busy and bool(failed or not working)

    def settle(self, sums: np.ndarray) -> Path | None:
        """Go on where all ranks have come so far: ``sums`` are those of `numbers`, taken at the same step.

        Returns the checkpoint when it has become visible. Raises StorageError on all ranks when one has failed.
        """
        return self._go_on() if self.goes_on(sums) else None

    def finish(self) -> Path | None:
        """Wait for the checkpoint that is under way, and return it. Raises StorageError on all ranks."""
        path = None
        while self.is_busy:
            path = self._go_on()
        return path

    def abandon(self) -> None:
        """Give up what is under way, after a death: wait for this rank's thread alone, whatever became of it (local).

        A checkpoint that rank 0 had begun to commit becomes visible if all of it was written.
        """
        self._joined()
        self._phase = SavePhase.IDLE

    def _go_on(self) -> Path | None:
        plan, phase = self._plan, self._phase
        assert plan is not None
        own = self._joined()
        self._phase = SavePhase.IDLE  # should anything be raised
        if phase is SavePhase.COMMIT:
            agree(self._comm, own.error if self._comm.rank == 0 else "")
            if self._incremental is not None:
                self._incremental.settle()
            return plan.final
        outcomes = two_phase.gather(self._comm, own)
        if any(outcome.error for outcome in outcomes):
            agree(self._comm, two_phase.commit(plan, outcomes) if self._comm.rank == 0 else "")
        self._phase, self._own = SavePhase.COMMIT, ShardOutcome()
        if self._comm.rank == 0:
            self._task = WriterThread(lambda: ShardOutcome(two_phase.commit(plan, outcomes)))
        return None

    def _joined(self) -> ShardOutcome:
        """Return what became of this rank's part, once it is done (local)."""
        if self._task is None:
            return self._own
        self._task.join()
        outcome, self._task = self._task.outcome, None
        return outcome
