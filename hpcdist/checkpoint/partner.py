"""Partner redundancy: copies of each rank's state, in its memory and a partner's, that survive the death of a rank.

Two generations of copies alternate: the older is overwritten only when all ranks have completed the newer. With S bytes
per rank:

    one node        The copy is in shared memory. Nothing is sent; 2 S are kept.
    several nodes   The partner is on another node. Each rank sends and receives S in messages of 16 MiB and keeps 4 S.
                    Without shared memory, the partner is the next rank.

A step costs one small allreduce, a memory copy of S, the digests, and the messages. Source: Zheng, Shi and Kale,
"FTC-Charm++", Cluster 2004.
"""

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint.memory_copy import INCOMPLETE, CopyLayout, MemoryCopy, memory_bytes, signature
from hpcdist.comm.communicator import Communicator

TAG: Final = 7102
MESSAGE_BYTES: Final = 16 << 20  # a multiple of the digested blocks


def partner_ranks(members: Sequence[Sequence[int]]) -> list[int]:
    """Return a list whose item r is the rank that keeps a copy of rank r's state. ``members``: ranks of each node."""
    nodes = sorted(members, key=len, reverse=True)
    order = [rank for node in nodes for rank in node]
    partners, largest, others = [0] * len(order), len(nodes[0]), order[len(nodes[0]) :]
    # In node order no node spans more than ``largest`` ranks, so the rank ``largest`` positions ahead (cyclically) is
    # on another node, if no node has more than half of all ranks. Otherwise step 1: on one node, the next rank.
    step = largest if 2 * largest <= len(order) else 1
    for index, rank in enumerate(order):
        partners[rank] = order[(index + step) % len(order)]
    if others and 2 * largest > len(order):  # the largest node spreads its copies over all other ranks, and vice versa
        for index, rank in enumerate(nodes[0]):
            partners[rank] = others[index % len(others)]
        for index, rank in enumerate(others):
            partners[rank] = nodes[0][index]
    return partners


@dataclass
class CopyGeneration:
    """Copies of the states of one or several ranks after the same training step, in one rank's memory."""

    layout: CopyLayout | None = None  # of this rank's copy
    of: dict[int, MemoryCopy] = field(default_factory=dict)  # copy of the state of each rank
    shared: bool = False  # the copies are in shared memory

    def step(self, owner: int) -> int:
        """Return the step of the copied state of rank ``owner``, or `INCOMPLETE` if there is no complete copy."""
        return self.of[owner].step if owner in self.of else INCOMPLETE

    def takes(self, pieces: Sequence[Piece], scalars: bytes) -> bool:
        """Return True if the tensor slices ``pieces`` and the JSON text ``scalars`` fit the layout of this memory."""
        layout = self.layout
        return layout is not None and len(scalars) <= layout.room and signature(pieces) == layout.signature


class HeldCopies:
    """Copies of ranks' states in this rank's memory. Copies outlive the communicator. Methods are local."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.generations = [CopyGeneration(), CopyGeneration()]

    def held(self) -> list[tuple[int, int, bool]]:
        """Return a list of (step, rank of the copied state, True if in shared memory), one for each complete copy."""
        return [
            (copy.step, owner, generation.shared)
            for generation in self.generations
            for owner, copy in generation.of.items()
            if copy.step != INCOMPLETE
        ]

    def find(self, step: int, owner: int) -> MemoryCopy:
        """Return the complete copy of the state of rank ``owner`` after training step ``step``."""
        copies = (generation.of.get(owner) for generation in self.generations)
        return next(copy for copy in copies if copy is not None and copy.step == step)


class PartnerStore:
    """Store that copies each rank's state to the memory of a partner rank of ``comm``, on another node if possible."""

    def __init__(self, comm: Communicator, ledger: Ledger | None = None) -> None:
        self._comm, self._ledger = comm, ledger
        self.copies = HeldCopies(comm.rank, comm.size)
        self._keepers: list[int] = []

    def keep(self, step: int, pieces: Sequence[Piece], scalars: Mapping[str, Any]) -> None:
        """Copy this rank's state after ``step`` to this rank's memory and to the partner rank. Collective."""
        encoded = json.dumps(scalars).encode()
        target = min(self.copies.generations, key=lambda generation: generation.step(self._comm.rank))
        changed = np.array([0.0 if target.takes(pieces, encoded) else 1.0])
        # This allreduce is also a barrier: a rank that calls it has completed the newer generation. After it, all ranks
        # have, and the older generation may be overwritten; a death from now on leaves the newer one complete.
        self._comm.allreduce(changed, "max")
        if changed[0]:
            self._prepare(target, pieces, CopyLayout(pieces, encoded))
        layout = target.layout
        assert layout is not None
        if target.shared:
            local_copy = target.of[self._comm.rank]
            local_copy.drop()
            deque(local_copy.fill(pieces), maxlen=0)
            local_copy.write_texts(layout, encoded, step)
            local_copy.finish(step)
        else:
            self._send(target, step, pieces, encoded, anew=bool(changed[0]))

    def checked(self) -> str:
        """Verify all copies in this rank's memory. Return a text about damaged copies, or "". Local."""
        reports = []
        for generation in self.copies.generations:
            for owner, copy in generation.of.items():
                # In shared memory, each rank verifies its own copy.
                if copy.step != INCOMPLETE and (owner == self._comm.rank or not generation.shared):
                    damage = copy.damage()
                    reports += [_damage_report(owner, copy.step, damage)] if damage else []
        return "; ".join(reports)

    def _prepare(self, target: CopyGeneration, pieces: Sequence[Piece], layout: CopyLayout) -> None:
        comm, nodes = self._comm, self._comm.nodes()
        target.of.clear()  # free the old memory first
        target.layout, target.shared = layout, False
        block = comm.shared(memory_bytes(*layout.sizes)) if nodes.count == 1 else None
        if block is not None and block.is_shared:
            target.shared = True
            target.of.update((rank, MemoryCopy(view)) for rank, view in enumerate(block.views))
        else:
            self._keepers = partner_ranks(nodes.members)
            sizes: list[tuple[int, int, int]] = comm.allgather_object(layout.sizes)
            for rank, keeper in enumerate(self._keepers):
                if comm.rank in (rank, keeper):
                    target.of[rank] = MemoryCopy(np.zeros(memory_bytes(*sizes[rank]), np.uint8))
                    target.of[rank].lay_out(*sizes[rank])
        target.of[comm.rank].prepare(layout, pieces)
        for rank, copy in target.of.items():
            if self._ledger is not None and (rank == comm.rank or not target.shared):
                self._ledger.track(copy.memory, "buddy_copies" if rank == comm.rank else "partner_copies")

    def _send(self, target: CopyGeneration, step: int, pieces: Sequence[Piece], encoded: bytes, *, anew: bool) -> None:
        # ``encoded``: scalars after ``step``. ``anew``: also send the tensor descriptions.
        comm, local_copy, layout = self._comm, target.of[self._comm.rank], target.layout
        assert layout is not None
        requests = []
        for owner, copy in target.of.items():
            copy.drop()
            # All receives are posted before the first send, in the order of the sends: they have the same tag, and MPI
            # keeps the order of messages between two ranks.
            if owner != comm.rank:
                parts = [copy.data[part.slice] for part in cut(Range(0, copy.data.size), MESSAGE_BYTES)]
                requests += [comm.irecv(part, owner, TAG) for part in (*parts, copy.front(anew))]
        keeper, sent = self._keepers[comm.rank], 0
        for done in local_copy.fill(pieces):
            # Blocks divide a message, so ``done`` takes the value of each end of a message.
            if keeper != comm.rank and (done - sent == MESSAGE_BYTES or done == local_copy.data.size):
                requests.append(comm.isend(local_copy.data[sent:done], keeper, TAG))
                sent = done
        local_copy.write_texts(layout, encoded, step)
        if keeper != comm.rank:
            requests.append(comm.isend(local_copy.front(anew), keeper, TAG))
        for request in requests:
            request.wait()
        for copy in target.of.values():
            copy.finish(step)


@dataclass(frozen=True)
class RecoveredState:
    """Training state after ``step``, recovered from copies. ``held``: recovered tensor slices on this rank."""

    step: int
    scalars: dict[str, Any]
    held: list[Piece]


def recover(comm: Communicator, old_rank: int | None, copies: HeldCopies | None) -> RecoveredState | None:
    """Return the newest state with intact copies for all ranks before the failure, or None. Collective over ``comm``.

    ``old_rank``: rank of this process before the failure. ``copies``: copies in this process's memory, which the result
    shares. A new process passes None for ``old_rank`` and ``copies``.
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
    # Returns {(step, owner): current ranks with a copy of the owner's state, the owner first}, where owner is a rank
    # before the failure. ``gathered``: (old rank, old number of ranks, result of `HeldCopies.held`), or None for a new
    # process.
    reports = {report[0]: (rank, report) for rank, report in enumerate(gathered) if report is not None}
    holders: dict[tuple[int, int], list[int]] = {}
    for old_rank, (rank, (_, size, held)) in reports.items():
        for step, owner, shared in held:
            # Shared memory has one holder: the owner, or the next surviving old rank.
            followers = [(owner + distance) % size for distance in range(size)]
            first = next(other for other in followers if other in reports)
            if not shared or old_rank == first:
                ranks = holders.setdefault((step, owner), [])
                ranks.insert(0 if old_rank == owner else len(ranks), rank)
    return holders


def _sound_holders(comm: Communicator, copies: HeldCopies | None, step: int, holders: list[list[int]]) -> list[int]:
    # Verify the copy of the first rank of ``holders[r]``; after damage, try the next. [] if a state has no intact copy.
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
