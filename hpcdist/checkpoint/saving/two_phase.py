"""Save in two phases: writers write their shards, all ranks agree, and rank 0 makes the checkpoint visible.

Ranks form groups, each of which sends its pieces to its first rank, which writes one shard. "rank": each rank by
itself, no message. "node": one shard a node, so that a file system sees fewer files and clients. A number k: k groups
of neighbouring ranks, as equal as can be. A rank sends each of its bytes once, (g-1)/g of a group of g ranks in
blocks of 16 MiB; its writer holds two of them. What several ranks of a group have is sent by the first.

    phase 1   every writer writes its shard into ``step-N.tmp`` and syncs it
    vote      rank 0 gathers what each writer wrote, or why it failed
    phase 2   rank 0 writes the manifest and renames ``step-N.tmp`` to ``step-N``, or removes it

An error on any rank is raised on all, and the previous checkpoint stays as it was.

`IncrementalWriter` saves only the pieces that have changed since the last checkpoint, which is when one of their
digests has. The older shard gets a second name in the new checkpoint (a hard link), so a checkpoint needs nothing
outside its directory and may be removed in any order; the space of a shard is free when the last checkpoint that uses
a part of it is gone. This pays for frozen layers, and for embeddings of which few pieces are touched. It pays nothing
for a model all of which is trained: a dense Adam changes every parameter and moment in every step, and all of them are
read once more to find that out. The first checkpoint of a start is always whole.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.directory import Retention
from hpcdist.checkpoint.format import manifest, shard
from hpcdist.checkpoint.format.manifest import Slot, StoredPiece
from hpcdist.checkpoint.format.shard import WrittenShards
from hpcdist.checkpoint.format.shard_layout import BlockSource, IncomingBlocks, blocks_of, first_holders, send_blocks
from hpcdist.checkpoint.lock import lost
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.hdf5.overlay import Overlay

# A shard of which less than one byte in so many is in use is not linked; those bytes are written again (empirical).
MAX_UNUSED_RATIO: Final = 8


@dataclass
class IncrementalWriter:
    """Incremental shards of one writer: ``entries`` lie in ``directory``, the checkpoint before (None: none)."""

    directory: Path | None = None
    entries: dict[Slot, StoredPiece] = field(default_factory=dict)
    shards: WrittenShards = field(default_factory=WrittenShards)
    _written: tuple[Path, dict[Slot, StoredPiece], WrittenShards] | None = None  # by the save that is under way

    def write(
        self,
        directories: tuple[Path, Path],
        name: str,
        slots: Sequence[Slot],
        sources: Sequence[BlockSource],
        about: Mapping[str, Any],
        opens: Callable[[Path], Overlay] = Overlay.created,
    ) -> WrittenShards:
        """Write the shard ``name`` of what has changed, and link the rest (local). Raises StorageError.

        ``directories`` are where the checkpoint is made, and where it will lie. The sources are asked for their blocks
        twice: for the digests, and to write those that differ.
        """
        temporary, final = directories
        shards, linked = self._link(temporary, self._unchanged(slots, sources))
        new = [(slot, source) for slot, source in zip(slots, sources, strict=True) if slot not in linked]
        new_shard = WrittenShards()
        if new or not linked:  # a writer without pieces still writes a shard, an empty one
            changed = [slot for slot, _ in new], [source for _, source in new]
            new_shard = shard.write(temporary, name, *changed, about, opens)
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
            # Pieces without bytes have no digest that could differ, and cost nothing to write.
            if entry is not None and slot.nbytes and shard.block_digests(source()) == entry.digests:
                same[slot] = entry
        return same

    def _link(self, temporary: Path, same: dict[Slot, StoredPiece]) -> tuple[WrittenShards, dict[Slot, StoredPiece]]:
        """Hard-link the shards that hold ``same`` into ``temporary``; return them, and the entries they now have there.

        Pieces of a shard that cannot be linked, or is hardly used any more, are missing from the entries: they are
        written again.
        """
        files: dict[str, int] = {}
        outside: dict[str, str] = {}
        unused: list[StoredPiece] = []
        linked: dict[Slot, StoredPiece] = {}
        for name in sorted({entry.file for entry in same.values()}):
            assert self.directory is not None
            # A link keeps the name of the checkpoint that wrote it, however often it is linked on.
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
            # What else lies in the shard goes into the manifest too, so that all of its bytes can be verified.
            before = [entry for slot, entry in self.entries.items() if slot not in same] + list(self.shards.unused)
            unused += [replace(entry, file=link_name) for entry in before if entry.file == name and entry.nbytes]
        return WrittenShards(files, (), outside, unused), linked

    def settle(self) -> None:
        """Take the shard that was written last as the one before, as its checkpoint has become complete (local)."""
        if self._written is not None:
            self.directory, self.entries, self.shards = self._written
        self._written = None


@dataclass(frozen=True)
class WriterGroup:
    """Group ``index`` of ``count``; the first rank of ``comm`` writes for it. None: each rank writes for itself."""

    comm: Communicator | None
    index: int
    count: int

    @property
    def writes(self) -> bool:
        """Whether this rank writes (local)."""
        return self.comm is None or self.comm.rank == 0


def group_of(comm: Communicator, writers: str) -> WriterGroup:
    """Return the group of this rank; see ``checkpoint.writers``. Collective over ``comm`` when first called."""
    count = comm.size
    if writers.isdecimal():
        count = min(count, int(writers))
    if writers == "rank" or (count == comm.size and writers != "node"):
        return WriterGroup(None, comm.rank, comm.size)
    key = "checkpoint.writers", writers
    if key not in comm.settled:
        index = comm.rank * count // comm.size  # contiguous ranks; the sizes of groups differ by one at most
        if writers == "node":
            nodes = comm.nodes()
            index, count = nodes.index, nodes.count
        members = comm.split(index, comm.rank, "checkpoint")
        comm.settled[key] = WriterGroup(members, index, count)
    group: WriterGroup = comm.settled[key]
    return group


class GroupGather:
    """Gather of a group's pieces at its writer. Construction is collective over the group.

    On the writer, `slots` and `sources` are what a shard gets: the sources must be used in their order, each once;
    then, or when writing has failed, the writer calls `end`. The first ones are of ``arrays``, its own. The other
    ranks call `bring`.
    """

    def __init__(self, group: WriterGroup, pieces: Sequence[Piece]) -> None:
        self._group, own = group, [Slot.of(piece) for piece in pieces]
        comm = group.comm
        slots_by_rank: list[list[Slot]] = [own] if comm is None else comm.allgather_object(own)
        chosen_by_rank = [[True] * len(own)] if comm is None else first_holders(slots_by_rank)
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
        """The entries of the group's shard."""
        return [slot for slots in self._slots for slot in slots]

    def sources(self) -> list[BlockSource]:
        """Return a source for the bytes of each slot: the writer's own first, then those of the ranks in order."""
        own: list[BlockSource] = [partial(blocks_of, array) for array in self.arrays]
        theirs = [(rank, slot) for rank, slots in enumerate(self._slots[1:], start=1) for slot in slots]
        return own + [partial(self._sent, rank, len(slot.blocks())) for rank, slot in theirs]

    def _sent(self, rank: int, count: int) -> Iterator[np.ndarray]:
        return self._arriving(rank).blocks(count)

    def _arriving(self, rank: int) -> IncomingBlocks:
        """Return the stream of blocks from ``rank``; those of the ranks before it have been received in full.

        One stream is open at a time: the sends of later ranks wait in MPI until their receives are posted, so the
        writer holds two blocks, however many ranks its group has.
        """
        while self._incoming is None or self._from < rank:
            if self._incoming is not None:
                self._incoming.drain()
            assert self._group.comm is not None
            self._from += 1
            sizes = [size for slot in self._slots[self._from] for size in slot.blocks()]
            self._incoming = IncomingBlocks(self._group.comm, self._from, sizes)
        return self._incoming

    def bring(self) -> str:
        """Send this rank's pieces to the writer; return the reason where that was not possible, else ""."""
        assert self._group.comm is not None
        rank = self._group.comm.rank
        sizes = [size for slot in self._slots[rank] for size in slot.blocks()]
        return send_blocks(self._group.comm, 0, self.arrays, sizes)

    def end(self) -> None:
        """Receive what was not asked for, so that no rank of the group stays in its sends; called on the writer."""
        if len(self._slots) > 1:
            self._arriving(len(self._slots) - 1).drain()


@dataclass(frozen=True)
class ShardOutcome:
    """Outcome of a rank's part: the reason why it failed, or "", and the shards that it has, if it writes."""

    error: str = ""
    written: WrittenShards | None = None


@dataclass(frozen=True)
class SavePlan:
    """Plan of one checkpoint: where it goes, and what rank 0 commits beside the shards."""

    directory: Path
    step: int
    world: int
    scalars: dict[str, Any]
    about: dict[str, Any]
    keep: int | Retention
    opens: Callable[[Path], Overlay] = Overlay.created  # makes the file of a shard, on the rank that writes it

    @property
    def temporary(self) -> Path:
        """The directory until the checkpoint is complete."""
        return self.directory / f"step-{self.step}.tmp"

    @property
    def final(self) -> Path:
        """The directory of the complete checkpoint."""
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
    """Save the checkpoint of ``step`` in ``directory`` and return ``directory/step-N``. Collective over ``comm``.

    ``pieces`` are this rank's share: together the ranks must cover every tensor, and what two ranks bring may be
    written twice. They are only read, and may change when the call returns. ``scalars`` and ``about`` (JSON values)
    are taken from rank 0, and so is ``keep``, which checkpoints stay (a number: the newest so many). ``writers``: see
    `hpcdist.checkpoint.saving.two_phase`. Raises StorageError on all ranks when one of them cannot write; the
    checkpoints that were there are then untouched.
    """
    return save_planned(SavePlan(Path(directory), step, comm.size, scalars, about or {}, keep), pieces, comm, writers)


def save_planned(
    plan: SavePlan,
    pieces: Sequence[Piece],
    comm: Communicator,
    writers: str,
    incremental: IncrementalWriter | None = None,
) -> Path:
    """Save the checkpoint ``plan`` of ``pieces`` as `save` does. Collective over ``comm``.

    With ``incremental``, where every rank writes, only what has changed since the one before is written.
    """
    group = group_of(comm, writers)
    prepare(plan, group, comm)
    delivery = GroupGather(group, pieces)
    if group.writes:
        outcome = write(plan, group, delivery.slots, delivery.sources(), incremental)
        delivery.end()
    else:
        outcome = ShardOutcome(delivery.bring())
    outcomes = gather(comm, outcome)  # the vote: rank 0 knows now that every shard is on the disk, or which is not
    # The broadcast in `agree` is also the barrier: no rank returns before the checkpoint is visible to all.
    agree(comm, commit(plan, outcomes) if comm.rank == 0 else "")
    if incremental is not None:
        incremental.settle()
    return plan.final


def prepare(plan: SavePlan, group: WriterGroup, comm: Communicator) -> None:
    """Make the directory that the shards are written to. Collective; raises StorageError on all ranks."""
    error = lost(plan.directory.parent) if comm.rank == 0 else ""
    if comm.rank == 0 and not error:
        try:
            names.begin(plan.directory, plan.step, shard.directories(group.count))
        except OSError as failure:
            error = f"{plan.directory} cannot be written: {failure.strerror or failure}"
    agree(comm, error)


def write(
    plan: SavePlan,
    group: WriterGroup,
    slots: Sequence[Slot],
    sources: Sequence[BlockSource],
    incremental: IncrementalWriter | None = None,
) -> ShardOutcome:
    """Write the shard of ``group``, with ``incremental`` only what has changed since the last one (local).

    Nothing is raised: what failed is in the outcome, since every rank has to come to the vote.
    """
    name = shard.file_name(group.index, group.count)
    about = {"step": plan.step, "rank": group.index}
    try:
        if incremental is not None:
            return ShardOutcome(
                "", incremental.write((plan.temporary, plan.final), name, slots, sources, about, plan.opens)
            )
        return ShardOutcome("", shard.write(plan.temporary, name, slots, sources, about, plan.opens))
    except OSError as failure:
        return ShardOutcome(str(failure))


def gather(comm: Communicator, own: ShardOutcome) -> list[ShardOutcome]:
    """Return what became of each rank's part: all of it on rank 0, which commits, and the errors on the others.

    Collective. Thousands of ranks have millions of entries, so these go to rank 0 alone, by messages of known size.
    """
    data = np.frombuffer(bytearray(msgspec.msgpack.encode(own)), np.uint8)
    known: list[tuple[str, int]] = comm.allgather_object((own.error, data.size))
    if comm.rank:
        comm.send(data, 0)
        return [ShardOutcome(error) for error, _ in known]
    outcomes = [own]
    for peer, (_, size) in enumerate(known[1:], start=1):
        message = np.empty(size, np.uint8)
        comm.recv(message, peer)
        outcomes.append(msgspec.msgpack.decode(message.data, type=ShardOutcome))
    return outcomes


def agree(comm: Communicator, error: str) -> None:
    """Raise StorageError on every rank when rank 0 has an error. Collective."""
    error = comm.broadcast_object(error)
    if error:
        raise StorageError(f"the checkpoint was not saved: {error}")


def commit(plan: SavePlan, outcomes: Sequence[ShardOutcome]) -> str:
    """Make the checkpoint visible; return the reason when that fails, and nothing is left of it then (local).

    Where the directory was lost to another job, nothing there is touched: it belongs to that job.
    """
    taken = lost(plan.directory.parent)
    if taken:
        return taken
    error = next((f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error), "")
    error = error or _commit(plan, outcomes)
    if error:
        shutil.rmtree(plan.temporary, ignore_errors=True)  # so that a full disk has its space back
    return error


def _commit(plan: SavePlan, outcomes: Sequence[ShardOutcome]) -> str:
    shards = [outcome.written for outcome in outcomes if outcome.written is not None]
    sizes = {name: size for written in shards for name, size in written.files.items()}
    outside = {name: digest for written in shards for name, digest in written.outside.items()}
    try:
        entries = [entry for written in shards for entry in written.entries]
        committed = manifest.build(plan.step, plan.world, plan.scalars, sizes, entries, plan.about)
        unused = tuple(entry for written in shards for entry in written.unused)
        committed = replace(
            committed,
            index=shard.write_index(plan.temporary, committed.pieces, plan.step),
            outside=outside,
            unused=unused,
        )
        names.commit(plan.directory, plan.step, manifest.encode(committed), plan.keep)
    except StorageError as failure:
        return str(failure)
    except OSError as failure:
        return f"{plan.directory} cannot be written: {failure.strerror or failure}"
    return ""
