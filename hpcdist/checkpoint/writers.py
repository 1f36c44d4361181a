"""Who writes: ranks in groups, each of which brings its pieces to its first rank, which writes one shard.

"rank": each rank by itself, no message. "node": one shard a node, so that a file system sees fewer files and clients.
A number k: k groups of neighbouring ranks, as equal as can be. A rank sends each of its bytes once, (g-1)/g of a group
of g ranks in blocks of 16 MiB; its writer holds two of them. What several ranks of a group have is sent by the first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.slots import Slot, once
from hpcdist.checkpoint.sources import Incoming, Source, held, send
from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True)
class Group:
    """Group ``index`` of ``count``; the first rank of ``comm`` writes. None: each rank by itself."""

    comm: Communicator | None
    index: int
    count: int

    @property
    def writes(self) -> bool:
        """Whether this rank writes (local)."""
        return self.comm is None or self.comm.rank == 0


def group_of(comm: Communicator, writers: str) -> Group:
    """Return the group of this rank; see ``checkpoint.writers``. Collective over ``comm`` when first called."""
    count = comm.size
    if writers.isdecimal():
        count = min(count, int(writers))
    if writers == "rank" or (count == comm.size and writers != "node"):
        return Group(None, comm.rank, comm.size)
    key = "checkpoint.writers", writers
    if key not in comm.settled:
        index = comm.rank * count // comm.size
        if writers == "node":
            nodes = comm.nodes()
            index, count = nodes.index, nodes.count
        made = comm.split(index, comm.rank, "checkpoint")
        comm.settled[key] = Group(made, index, count)
    found: Group = comm.settled[key]
    return found


class Delivery:
    """The pieces of a group on their way to its writer. Construction is collective over the group.

    On the writer, ``slots`` and ``sources`` are what a shard gets: the sources must be used in their order, each once;
    then, or when writing has failed, it calls `end`. The first ones are of ``arrays``, its own. The others `bring`
    theirs.
    """

    def __init__(self, group: Group, pieces: Sequence[Piece]) -> None:
        self._group, own = group, [Slot.of(piece) for piece in pieces]
        comm = group.comm
        found: list[list[Slot]] = [own] if comm is None else comm.allgather_object(own)
        wanted = [[True] * len(own)] if comm is None else once(found)
        mine = wanted[0 if comm is None else comm.rank]
        self.arrays = [piece.array for piece, kept in zip(pieces, mine, strict=True) if kept]
        self._slots = [
            [slot for slot, kept in zip(slots, kept_ones, strict=True) if kept]
            for slots, kept_ones in zip(found, wanted, strict=True)
        ]
        self._incoming: Incoming | None = None
        self._from = 0

    @property
    def slots(self) -> list[Slot]:
        """What the shard of the group holds."""
        return [slot for slots in self._slots for slot in slots]

    def sources(self) -> list[Source]:
        """Return where the bytes of each slot come from."""
        own: list[Source] = [partial(held, array) for array in self.arrays]
        theirs = [(rank, slot) for rank, slots in enumerate(self._slots[1:], start=1) for slot in slots]
        return own + [partial(self._sent, rank, len(slot.blocks())) for rank, slot in theirs]

    def _sent(self, rank: int, count: int) -> Iterator[np.ndarray]:
        return self._arriving(rank).blocks(count)

    def _arriving(self, rank: int) -> Incoming:
        """Return what comes from ``rank``; what the ranks before it sent is complete then."""
        while self._incoming is None or self._from < rank:
            if self._incoming is not None:
                self._incoming.drain()
            assert self._group.comm is not None
            self._from += 1
            sizes = [size for slot in self._slots[self._from] for size in slot.blocks()]
            self._incoming = Incoming(self._group.comm, self._from, sizes)
        return self._incoming

    def bring(self) -> str:
        """Send this rank's pieces to the writer; return why not, where that was not possible."""
        assert self._group.comm is not None
        rank = self._group.comm.rank
        sizes = [size for slot in self._slots[rank] for size in slot.blocks()]
        return send(self._group.comm, 0, self.arrays, sizes)

    def end(self) -> None:
        """Take what was not asked for, so that nobody waits: on the writer."""
        if len(self._slots) > 1:
            self._arriving(len(self._slots) - 1).drain()
