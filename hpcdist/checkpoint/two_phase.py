"""Save in two phases: writers write shards into ``step-N.tmp``, and rank 0 renames it to ``step-N`` if all succeeded.

Rank 0 gathers descriptions of the shards, and prepares index and manifest while the disks write the shards. Every
writer syncs its shard before rank 0 gathers the results of the syncs. Rank 0 writes the manifest before the rename.
After an error, rank 0 removes ``step-N.tmp``. A writer holds two buffers of 16 MiB.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import manifest, shard
from hpcdist.checkpoint.directory import Retention
from hpcdist.checkpoint.lock import lost
from hpcdist.checkpoint.manifest import Slot, StoredPiece
from hpcdist.checkpoint.shard import (
    BlockSource,
    Export,
    IncomingBlocks,
    WrittenShards,
    blocks_of,
    exported_blocks,
    first_holders,
    send_blocks,
)
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.failure.family import PerCommunicator
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.hdf5.overlay import Overlay

# A shard is linked only if at least one byte in MAX_UNUSED_RATIO is in use; otherwise it is rewritten (empirical).
MAX_UNUSED_RATIO: Final = 8
EXPORT_FAILED: Final = "the model was not exported"


@dataclass
class IncrementalWriter:
    """Writer of shards for changed tensor data only. Older shards with unchanged data are hard-linked."""

    directory: Path | None = None  # of the last checkpoint
    entries: dict[Slot, StoredPiece] = field(default_factory=dict)  # its stored data
    shards: WrittenShards = field(default_factory=WrittenShards)  # its files
    _written: tuple[Path, dict[Slot, StoredPiece], WrittenShards] | None = None  # by the save in progress

    def write(
        self,
        directories: tuple[Path, Path],  # temporary and final path of the checkpoint
        name: str,
        slots: Sequence[Slot],
        sources: Sequence[BlockSource],
        about: Mapping[str, Any],
        opens: Callable[[Path], Overlay] = Overlay.created,
        sync: Callable[[Overlay], object] = files.finish,
    ) -> WrittenShards:
        """Write changed tensor data like `shard.write`. Hard-link older shards for unchanged data. Local."""
        temporary, final = directories
        shards, linked = self._link(temporary, self._unchanged(slots, sources))
        new = [(slot, source) for slot, source in zip(slots, sources, strict=True) if slot not in linked]
        new_shard = WrittenShards()
        if new or not linked:  # a writer without pieces writes an empty shard
            changed = [slot for slot, _ in new], [source for _, source in new]
            new_shard = shard.write(temporary, name, *changed, about, opens, sync)
        entries = dict(zip((slot for slot, _ in new), new_shard.entries, strict=True)) | linked
        shards = WrittenShards(
            shards.files | new_shard.files,
            [entries[slot] for slot in slots],
            shards.outside | new_shard.outside,
            shards.unused,
        )
        self._written = final, entries, shards
        return shards

    def _unchanged(self, slots: Sequence[Slot], sources: Sequence[BlockSource]) -> dict[Slot, StoredPiece]:
        same = {}
        for slot, source in zip(slots, sources, strict=True):
            entry = self.entries.get(slot)
            if entry is None or not slot.nbytes:
                continue  # empty pieces have no digest to compare, and cost nothing to write
            if entry.digests == tuple(xxhash.xxh3_128_hexdigest(block.data) for block in source()):
                same[slot] = entry
        return same

    def _link(self, temporary: Path, same: dict[Slot, StoredPiece]) -> tuple[WrittenShards, dict[Slot, StoredPiece]]:
        # ``same``: the unchanged tensor slices. A shard is linked if most of its data is unchanged.
        files: dict[str, int] = {}
        outside: dict[str, str] = {}
        unused: list[StoredPiece] = []
        linked: dict[Slot, StoredPiece] = {}
        for name in sorted({entry.file for entry in same.values()}):
            assert self.directory is not None
            # A linked shard keeps the step that wrote it in its name.
            step = self.directory.name.removeprefix("step-")
            link_name = name if "-of-" in name else f"{name.removesuffix('.h5')}-of-{step}.h5"
            used = sum(entry.nbytes for entry in same.values() if entry.file == name)
            try:
                size = (self.directory / name).stat().st_size
                if used * MAX_UNUSED_RATIO < size:
                    continue
                os.link(self.directory / name, temporary / link_name)
            except OSError as error:
                print(f"hpcdist: {self.directory / name} is written again: {error.strerror}", file=sys.stderr)
                continue
            files[link_name], outside[link_name] = size, self.shards.outside[name]
            linked |= {slot: replace(entry, file=link_name) for slot, entry in same.items() if entry.file == name}
            # The other pieces of the shard are listed too, so that all of its bytes can be verified.
            before = [entry for slot, entry in self.entries.items() if slot not in same] + list(self.shards.unused)
            unused += [replace(entry, file=link_name) for entry in before if entry.file == name and entry.nbytes]
        return WrittenShards(files, (), outside, unused), linked

    def settle(self) -> None:
        """Record the commit of the latest `write`. The next `write` may hard-link the committed shards. Local."""
        if self._written is not None:
            self.directory, self.entries, self.shards = self._written
        self._written = None


@dataclass(frozen=True)
class WriterGroup:
    """Group of ranks with a common shard. The first rank of the group writes the tensors of all ranks in the group."""

    comm: Communicator | None  # None: a single rank
    index: int  # number of the group
    count: int  # number of groups

    @property
    def writes(self) -> bool:
        """True if this rank is the writer of its group. Local."""
        return self.comm is None or self.comm.rank == 0


_GROUPS: Final = PerCommunicator[str, WriterGroup]()  # by the argument ``writers`` of `group_of`


def group_of(comm: Communicator, writers: str) -> WriterGroup:
    """Return the group of ranks that write the same shard as this rank. The first call is collective over ``comm``.

    ``writers``: "rank" for one group per rank, "node" for one group per node, or the number of groups.
    """
    count = comm.size
    if writers.isdecimal():
        count = min(count, int(writers))
    if writers == "rank" or (count == comm.size and writers != "node"):
        return WriterGroup(None, comm.rank, comm.size)
    groups = comm.caches[_GROUPS]
    if writers not in groups:
        index = comm.rank * count // comm.size  # contiguous ranks; group sizes differ by at most one
        if writers == "node":
            nodes = comm.nodes()
            index, count = nodes.index, nodes.count
        members = comm.split(index, comm.rank, "checkpoint")
        groups[writers] = WriterGroup(members, index, count)
    return groups[writers]


class GroupGather:
    """Gather of the tensors ``pieces`` on the writer rank of ``group``. Construction is collective over ``group``.

    The writer calls each function of `sources` once, in order, and finally `end`, also after an error. Other ranks call
    `bring`.
    """

    def __init__(self, group: WriterGroup, pieces: Sequence[Piece]) -> None:
        self._group, local_slots = group, [Slot.of(piece) for piece in pieces]
        comm = group.comm
        slots_by_rank: list[list[Slot]] = [local_slots] if comm is None else comm.allgather_object(local_slots)
        chosen_by_rank = [[True] * len(local_slots)] if comm is None else first_holders(slots_by_rank)
        mine = chosen_by_rank[0 if comm is None else comm.rank]
        self.arrays = [piece.array for piece, chosen in zip(pieces, mine, strict=True) if chosen]
        self._slots = [
            [slot for slot, chosen in zip(slots, flags, strict=True) if chosen]
            for slots, flags in zip(slots_by_rank, chosen_by_rank, strict=True)
        ]
        self._incoming: IncomingBlocks | None = None
        self._from = 0

    @property
    def slots(self) -> list[Slot]:
        """Descriptions of the tensor data in this group's shard, ordered by rank."""
        return [slot for slots in self._slots for slot in slots]

    def sources(self) -> list[BlockSource]:
        """Return a list of functions, one for each of `slots`. A function yields the bytes of a slot in blocks."""
        local_sources: list[BlockSource] = [partial(blocks_of, array) for array in self.arrays]
        theirs = [(rank, slot) for rank, slots in enumerate(self._slots[1:], start=1) for slot in slots]
        return local_sources + [partial(self._sent, rank, len(slot.blocks())) for rank, slot in theirs]

    def _sent(self, rank: int, count: int) -> Iterator[np.ndarray]:
        return self._arriving(rank).blocks(count)

    def _arriving(self, rank: int) -> IncomingBlocks:
        while self._incoming is None or self._from < rank:
            if self._incoming is not None:
                self._incoming.drain()  # discards the rest of a lower rank
            assert self._group.comm is not None
            self._from += 1
            sizes = [size for slot in self._slots[self._from] for size in slot.blocks()]
            self._incoming = IncomingBlocks(self._group.comm, self._from, sizes)
        return self._incoming

    def bring(self) -> str:
        """Send this rank's tensors to the writer rank of its group. Return an error text, or "" on success."""
        assert self._group.comm is not None
        rank = self._group.comm.rank
        sizes = [size for slot in self._slots[rank] for size in slot.blocks()]
        return send_blocks(self._group.comm, 0, self.arrays, sizes)

    def end(self) -> None:
        """Receive and discard the remaining data, so that the sending ranks can continue. For the writer only."""
        if len(self._slots) > 1:
            self._arriving(len(self._slots) - 1).drain()


@dataclass(frozen=True)
class ShardOutcome:
    """Result of a save on one rank: an error text, and the written shards if this rank is a writer."""

    error: str = ""  # "" on success
    written: WrittenShards | None = None  # None if this rank is not a writer
    export_error: str = ""  # of `SavePlan.export`; does not prevent the commit of the checkpoint


@dataclass(frozen=True)
class SavePlan:
    """Plan of a checkpoint to save: directory, step, and contents of the manifest."""

    directory: Path
    step: int
    world: int
    scalars: dict[str, Any]
    about: dict[str, Any]
    keep: int | Retention
    opens: Callable[[Path], Overlay] = Overlay.created  # creates the file of a shard, on its writer
    export: Export | None = None  # also written, from the same data

    @property
    def temporary(self) -> Path:
        """Path of the checkpoint directory while the checkpoint is unfinished."""
        return self.directory / f"step-{self.step}.tmp"

    @property
    def final(self) -> Path:
        """Path of the checkpoint directory after the commit."""
        return self.directory / f"step-{self.step}"


def save(
    directory: str | Path,
    step: int,
    pieces: Sequence[Piece],
    scalars: dict[str, Any],
    comm: Communicator,
    keep: int | Retention = 2,
    *,
    writers: str = "rank",
    about: dict[str, Any] | None = None,
) -> Path:
    """Save ``pieces`` as the checkpoint ``directory/step-N`` of step N. Return the path. Collective over ``comm``.

    ``scalars``: JSON values of rank 0. ``keep``: number of newest checkpoints to keep, or a `Retention`. Raises
    StorageError on all ranks if a rank cannot write.
    """
    return save_planned(SavePlan(Path(directory), step, comm.size, scalars, about or {}, keep), pieces, comm, writers)


def save_planned(
    plan: SavePlan,
    pieces: Sequence[Piece],
    comm: Communicator,
    writers: str,
    incremental: IncrementalWriter | None = None,
) -> Path:
    """Save ``pieces`` as the checkpoint ``plan``. Return the final path. ``writers``: see `group_of`. Collective."""
    group = group_of(comm, writers)
    prepare(plan, group, comm)
    gathering = GroupGather(group, pieces)
    syncs: list[_Sync] = []
    if group.writes:
        slots, sources = gathering.slots, gathering.sources()
        outcome = write(plan, group, slots, sources, incremental, lambda file: syncs.append(_Sync(file)))
        gathering.end()
    else:
        outcome = ShardOutcome(gathering.bring())
    outcomes = gather(comm, outcome)
    draft = _Draft(plan, outcomes) if comm.rank == 0 else None
    # The vote: rank 0 now knows if every shard is on disk.
    errors = comm.allgather_object(next((error for error in [sync.result() for sync in syncs] if error), ""))
    # The broadcast in `agree` is also a barrier: no rank returns before the checkpoint is visible.
    agree(comm, "" if draft is None else draft.commit(errors))
    if incremental is not None:
        incremental.settle()
    return plan.final


def prepare(plan: SavePlan, group: WriterGroup, comm: Communicator) -> None:
    """Create the temporary directory of the checkpoint ``plan``. Raises StorageError on all ranks. Collective."""
    error = lost(plan.directory.parent) if comm.rank == 0 else ""
    if comm.rank == 0 and not error:
        try:
            names.begin(plan.directory, plan.step, shard.directories(group.count))
        except OSError as failure:
            error = f"{plan.directory} cannot be written: {failure.strerror or failure}"
        if plan.export is not None and not error:
            plan.export.prepare()
    agree(comm, error)


def write(
    plan: SavePlan,
    group: WriterGroup,
    slots: Sequence[Slot],
    sources: Sequence[BlockSource],
    incremental: IncrementalWriter | None = None,
    sync: Callable[[Overlay], object] = files.finish,
) -> ShardOutcome:
    """Write the shard of ``group``. Return a `ShardOutcome` with the shard or the error text. Local.

    ``slots``: tensor slices to store. ``sources``, ``sync``: see `shard.write`. ``incremental``: None to write all.
    """
    name = shard.file_name(group.index, group.count)
    about = {"step": plan.step, "rank": group.index}
    export = plan.export
    if export is not None:
        sources = [partial(exported_blocks, export, *pair) for pair in zip(slots, sources, strict=True)]
    written, error = None, ""
    try:
        if incremental is not None:
            paths = plan.temporary, plan.final
            written = incremental.write(paths, name, slots, sources, about, plan.opens, sync)
        else:
            written = shard.write(plan.temporary, name, slots, sources, about, plan.opens, sync)
    except OSError as failure:
        error = str(failure)
    return ShardOutcome(error, written, "" if export is None else export.finish())


def gather(comm: Communicator, outcome: ShardOutcome) -> list[ShardOutcome]:
    """Return a list of the outcomes of all ranks. Except on rank 0, the outcomes have only error texts. Collective."""
    data = np.frombuffer(bytearray(msgspec.msgpack.encode(outcome)), np.uint8)
    gathered: list[tuple[str, int]] = comm.allgather_object((outcome.error, data.size))
    if comm.rank:
        comm.send(data, 0)
        return [ShardOutcome(error) for error, _ in gathered]
    outcomes = [outcome]
    for peer, (_, size) in enumerate(gathered[1:], start=1):
        message = np.empty(size, np.uint8)
        comm.recv(message, peer)
        outcomes.append(msgspec.msgpack.decode(message.data, type=ShardOutcome))
    return outcomes


def agree(comm: Communicator, error: str) -> None:
    """Raise StorageError on every rank if ``error`` on rank 0 is not "". Collective over ``comm``."""
    error = comm.broadcast_object(error)
    if error:
        raise StorageError(error if error.startswith(EXPORT_FAILED) else f"the checkpoint was not saved: {error}")


class _Sync(threading.Thread):
    # Thread that waits until ``file`` is on the disk, and closes ``file``.
    def __init__(self, file: Overlay) -> None:
        super().__init__(name="hpcdist sync", daemon=True)
        self._file, self._error = file, ""
        self.start()

    def run(self) -> None:
        try:
            files.finish(self._file)
        except OSError as error:
            self._error = f"{self._file.path}: cannot be written: {error.strerror or error}; check the disk"

    def result(self) -> str:
        """Return an error text, or "" once the file is on the disk."""
        self.join()
        return self._error


def commit(plan: SavePlan, outcomes: Sequence[ShardOutcome]) -> str:
    """Commit ``plan`` if all ranks succeeded, else remove the temporary files. Return an error text, or "". Local."""
    return _Draft(plan, outcomes).commit()


class _Draft:
    # Index and manifest of a checkpoint, before the commit.
    def __init__(self, plan: SavePlan, outcomes: Sequence[ShardOutcome]) -> None:
        self._plan, self._manifest = plan, ""
        self._export_error = _first_error([outcome.export_error for outcome in outcomes])
        self._error = _first_error([outcome.error for outcome in outcomes])
        self._taken = lost(plan.directory.parent)
        if not self._error and not self._taken:
            self._write(plan, outcomes)

    def _write(self, plan: SavePlan, outcomes: Sequence[ShardOutcome]) -> None:
        shards = [outcome.written for outcome in outcomes if outcome.written is not None]
        sizes = {name: size for written in shards for name, size in written.files.items()}
        outside = {name: digest for written in shards for name, digest in written.outside.items()}
        try:
            entries = [entry for written in shards for entry in written.entries]
            committed = manifest.build(plan.step, plan.world, plan.scalars, sizes, entries, plan.about)
            unused = tuple(entry for written in shards for entry in written.unused)
            index = shard.write_index(plan.temporary, committed.pieces, plan.step)
            self._manifest = manifest.encode(replace(committed, index=index, outside=outside, unused=unused))
        except OSError as failure:
            self._error = _described(plan, failure)

    def commit(self, errors: Sequence[str] = ()) -> str:
        """Commit the checkpoint if ``errors``, the texts of all ranks, are "". Return an error text, or "". Local."""
        plan = self._plan
        # If another job has taken over the directory, the unfinished checkpoint is not removed.
        taken = self._taken or lost(plan.directory.parent)
        if taken:
            if plan.export is not None:
                plan.export.commit(taken)
            return taken
        error = self._error or _first_error(errors)
        if not error:
            try:
                names.commit(plan.directory, plan.step, self._manifest, plan.keep)
            except OSError as failure:
                error = _described(plan, failure)
        if error:
            shutil.rmtree(plan.temporary, ignore_errors=True)  # frees space on a full disk
        failed = "" if plan.export is None else plan.export.commit(error or self._export_error)
        return error or (failed and f"{EXPORT_FAILED}: {failed}; the checkpoint {plan.final} is complete")


def _first_error(errors: Sequence[str]) -> str:
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), "")


def _described(plan: SavePlan, failure: OSError) -> str:
    if isinstance(failure, StorageError):
        return str(failure)
    return f"{plan.directory} cannot be written: {failure.strerror or failure}"
