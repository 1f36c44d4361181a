"""Partner redundancy: copies of the state that outlive the death of a rank, in its own memory and a partner's.

`PartnerStore.keep` copies a rank's pieces after a step, with digests. Two generations alternate: the older is
overwritten only when all ranks have completed the newer, so that a death at any moment leaves one that is whole. For
S bytes of a rank:

    one node        the copy lies in memory that the ranks of the node share and that outlives each of them: nothing
                    is sent, 2 S are kept, and the ranks that are left can read the copy of any rank that died
    several nodes   the partner is on another node: S are sent and S received in blocks of 16 MiB, 4 S are kept, 2 of
                    them for the partner. The same where a node cannot share memory, the partner being the next rank.

A step costs one small sum over the ranks, a copy of S in memory, their digests, and what is sent. Names travel when
the pieces have changed. After Zheng, Shi and Kale, "FTC-Charm++: an in-memory checkpoint-based fault tolerant
runtime", Cluster 2004.
"""

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint.partner.memory_copy import INCOMPLETE, CopyLayout, MemoryCopy, memory_bytes, signature
from hpcdist.comm.communicator import Communicator

TAG: Final = 7102
MESSAGE_BYTES: Final = 16 << 20  # a multiple of the blocks that are digested


def partner_ranks(members: Sequence[Sequence[int]]) -> list[int]:
    """Return the partner of each rank, which keeps its copy; ``members`` are the ranks of each node (local).

    The partner is on another node where there is one. Each rank keeps for one other, unless a node has more than half
    of all ranks.
    """
    nodes = sorted(members, key=len, reverse=True)
    order = [rank for node in nodes for rank in node]
    partners, largest, others = [0] * len(order), len(nodes[0]), order[len(nodes[0]) :]
    # In the order of nodes none spans more than ``largest`` places, so the rank that far ahead is on another node, also
    # around the end, where no node has more than half of all. Else step 1: on one node the partner is the next rank.
    step = largest if 2 * largest <= len(order) else 1
    for place, rank in enumerate(order):
        partners[rank] = order[(place + step) % len(order)]
    if others and 2 * largest > len(order):  # the largest node deals its ranks out to all others, and keeps for them
        for place, rank in enumerate(nodes[0]):
            partners[rank] = others[place % len(others)]
        for place, rank in enumerate(others):
            partners[rank] = nodes[0][place]
    return partners


@dataclass
class CopyGeneration:
    """Copies of one step. ``of`` has those that this rank can read, by owner; ``shared``: those of all ranks."""

    names: CopyLayout | None = None  # of the own pieces
    of: dict[int, MemoryCopy] = field(default_factory=dict)
    shared: bool = False

    def step(self, owner: int) -> int:
        """Return the step of which the copy of ``owner`` is; `INCOMPLETE` where it is not whole."""
        return self.of[owner].step if owner in self.of else INCOMPLETE

    def takes(self, pieces: Sequence[Piece], scalars: bytes) -> bool:
        """Whether these pieces and scalars fit into the memory as it was laid out."""
        names = self.names
        return names is not None and len(scalars) <= names.room and signature(pieces) == names.signature


class HeldCopies:
    """Copies that rank ``rank`` of ``size`` holds, readable when their communicator is gone. All of it is local."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.generations = [CopyGeneration(), CopyGeneration()]

    def held(self) -> list[tuple[int, int, bool]]:
        """Return (step, owner, whether its memory is shared) of each complete copy that this rank can read."""
        return [
            (copy.step, owner, generation.shared)
            for generation in self.generations
            for owner, copy in generation.of.items()
            if copy.step != INCOMPLETE
        ]

    def find(self, step: int, owner: int) -> MemoryCopy:
        """Return the complete copy of ``owner``'s state after ``step``."""
        copies = (generation.of.get(owner) for generation in self.generations)
        return next(copy for copy in copies if copy is not None and copy.step == step)

    def kept(self) -> list[tuple[int, MemoryCopy]]:
        """Return the complete copies that lie in this rank's own memory, with their owners."""
        return [
            (owner, copy)
            for generation in self.generations
            for owner, copy in generation.of.items()
            if copy.step != INCOMPLETE and (owner == self.rank or not generation.shared)
        ]


class PartnerStore:
    """Store of the state of the ranks of ``comm``. Memory is taken at the first two calls of `keep`, and used again."""

    def __init__(self, comm: Communicator, ledger: Ledger | None = None) -> None:
        self._comm, self._ledger = comm, ledger
        self.copies = HeldCopies(comm.rank, comm.size)
        self._keepers: list[int] = []

    def keep(self, step: int, pieces: Sequence[Piece], scalars: Mapping[str, Any]) -> None:
        """Keep the state after ``step`` steps: copies of this rank's ``pieces``, and ``scalars`` (JSON values).

        Collective. The pieces may change when this returns. Whatever it raises, the copies before are whole.
        """
        encoded = json.dumps(scalars).encode()
        target = min(self.copies.generations, key=lambda generation: generation.step(self._comm.rank))
        changed = np.array([0.0 if target.takes(pieces, encoded) else 1.0])
        # Also the barrier of the protocol: a rank that comes here has completed the newer generation. When the sum has
        # ended all have, and the older one may be overwritten; a death from now on leaves the newer one whole.
        self._comm.allreduce(changed, "max")
        if changed[0]:
            self._prepare(target, pieces, CopyLayout(pieces, encoded))
        names = target.names
        assert names is not None
        if target.shared:
            own = target.of[self._comm.rank]
            own.drop()
            deque(own.fill(pieces), maxlen=0)
            own.tell(names, encoded, step)
            own.finish(step)
        else:
            self._send(target, step, pieces, encoded, anew=bool(changed[0]))

    def checked(self) -> str:
        """Return the damage in the memory of the copies that this rank keeps, or "" (local).

        It reads all of them; to be called between two calls of `keep`, which makes them anew.
        """
        damages = ((owner, copy, copy.damage()) for owner, copy in self.copies.kept())
        return "; ".join(_damage_report(owner, copy.step, damage) for owner, copy, damage in damages if damage)

    def _prepare(self, target: CopyGeneration, pieces: Sequence[Piece], names: CopyLayout) -> None:
        """Take memory for a generation, and lay out the own copy in it. Collective."""
        comm, nodes = self._comm, self._comm.nodes()
        target.of.clear()  # given back before more is taken
        target.names, target.shared = names, False
        block = comm.shared(names.memory_bytes) if nodes.count == 1 else None
        if block is not None and block.is_shared:
            target.shared = True
            target.of.update((rank, MemoryCopy(view)) for rank, view in enumerate(block.views))
        else:
            self._keepers = partner_ranks(nodes.members)
            sizes: list[tuple[int, int, int]] = comm.allgather_object(names.sizes)
            for rank, keeper in enumerate(self._keepers):
                if comm.rank in (rank, keeper):
                    target.of[rank] = MemoryCopy(np.zeros(memory_bytes(*sizes[rank]), np.uint8))
                    target.of[rank].lay_out(*sizes[rank])
        target.of[comm.rank].prepare(names, pieces)
        for rank, copy in target.of.items():
            if self._ledger is not None and (rank == comm.rank or not target.shared):
                self._ledger.track(copy.memory, "buddy_copies" if rank == comm.rank else "partner_copies")

    def _send(self, target: CopyGeneration, step: int, pieces: Sequence[Piece], encoded: bytes, *, anew: bool) -> None:
        """Fill the own copy and send it to its keeper, block by block, while those of others arrive. Collective.

        The head is sent while it says "incomplete": each side marks its copy as complete when all of it is there.
        """
        comm, own, names = self._comm, target.of[self._comm.rank], target.names
        assert names is not None
        requests = []
        for owner, copy in target.of.items():
            copy.drop()
            # All receives are posted before the first send, in the order of the sends: the tag is the same, and MPI
            # keeps the order of messages between two ranks.
            if owner != comm.rank:
                parts = [copy.data[part.slice] for part in cut(Range(0, copy.data.size), MESSAGE_BYTES)]
                requests += [comm.irecv(part, owner, TAG) for part in (*parts, copy.front(anew))]
        keeper, sent = self._keepers[comm.rank], 0
        for done in own.fill(pieces):
            # ``done`` grows by blocks that divide a message, so it meets each end of a message.
            if keeper != comm.rank and (done - sent == MESSAGE_BYTES or done == own.data.size):
                requests.append(comm.isend(own.data[sent:done], keeper, TAG))
                sent = done
        own.tell(names, encoded, step)
        if keeper != comm.rank:
            requests.append(comm.isend(own.front(anew), keeper, TAG))
        for request in requests:
            request.wait()
        for copy in target.of.values():
            copy.finish(step)


@dataclass(frozen=True)
class RecoveredState:
    """State after ``step`` steps. ``held`` are the pieces that this rank brings: over all ranks, each once."""

    step: int
    scalars: dict[str, Any]
    held: list[Piece]


def recover(comm: Communicator, old_rank: int | None, copies: HeldCopies | None) -> RecoveredState | None:
    """Return the newest state of which the ranks of ``comm`` hold sound copies of every rank's part; None for none.

    ``copies`` are those of the communicator before the death, in which this rank was ``old_rank``; both are None for a
    process that has just joined. The holders verify the digests. A copy that does not match is reported on stderr and
    not used: where there is no other, the older generation is. The pieces stay readable as long as they are referred
    to. Collective; the same step and scalars on all ranks, those of the old rank 0.
    """
    assert old_rank == (None if copies is None else copies.rank), (
        f"the copies are those of another rank than {old_rank}"
    )
    reports: list[tuple[int, int, list[tuple[int, int, bool]]] | None] = comm.allgather_object(
        None if copies is None else (copies.rank, copies.size, copies.held())
    )
    size = max((report[1] for report in reports if report is not None), default=0)
    holders = _holders(reports)
    for step in sorted({step for step, _ in holders}, reverse=True):
        chosen = _sound_holders(comm, copies, step, [list(holders.get((step, owner), ())) for owner in range(size)])
        if chosen:
            mine = [copies.find(step, owner) for owner, rank in enumerate(chosen) if copies and rank == comm.rank]
            first = copies.find(step, 0).scalars() if copies and chosen[0] == comm.rank else None
            scalars: dict[str, Any] = comm.broadcast_object(first, root=chosen[0])
            return RecoveredState(step, scalars, [piece for copy in mine for piece in copy.pieces()])
    return None


def _holders(
    gathered: Sequence[tuple[int, int, list[tuple[int, int, bool]]] | None],
) -> dict[tuple[int, int], list[int]]:
    """Return which ranks hold the copy of each (step, owner): the owner first, then the others (local).

    ``gathered`` has for each rank now (its old rank, the old size, `HeldCopies.held`), None for a new process.
    """
    reports = {report[0]: (rank, report) for rank, report in enumerate(gathered) if report is not None}
    holders: dict[tuple[int, int], list[int]] = {}
    for old_rank, (rank, (_, size, held)) in reports.items():
        for step, owner, shared in held:
            # Of shared memory, one rank is named: the owner, or the next old rank that is left.
            behind = [(owner + distance) % size for distance in range(size)]
            first = next(other for other in behind if other in reports)
            if not shared or old_rank == first:
                ranks = holders.setdefault((step, owner), [])
                ranks.insert(0 if old_rank == owner else len(ranks), rank)
    return holders


def _sound_holders(comm: Communicator, copies: HeldCopies | None, step: int, holders: list[list[int]]) -> list[int]:
    """Return for each owner a rank whose copy of it is sound; [] where an owner has none. Collective.

    In each round the first holder of every copy verifies it, and drops out where that is damaged. All ranks learn the
    same damage, and so take the same decision.
    """
    verified: set[int] = set()
    while all(holders):
        bad = []
        for owner, ranks in enumerate(holders):
            if ranks[0] == comm.rank and owner not in verified:
                assert copies is not None
                verified.add(owner)
                damage = copies.find(step, owner).damage()
                if damage:
                    print(f"hpcdist: not used: {_damage_report(owner, step, damage)}", file=sys.stderr, flush=True)
                    bad.append(owner)
        damaged: set[int] = set().union(*comm.allgather_object(bad))
        if not damaged:
            return [ranks[0] for ranks in holders]
        for owner in damaged:
            holders[owner].pop(0)
    return []


def _damage_report(owner: int, step: int, damage: str) -> str:
    return f"the copy of rank {owner}'s state after step {step} is damaged in memory: {damage}"
