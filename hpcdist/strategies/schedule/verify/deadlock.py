"""Deadlock check by a dry run of all ranks: no circle of waits, and every message finds its receiver.

The lists are run without computing anything. A send is buffered and never waits (the executor sends with isend), a
receive waits for the message of its micro-batch and unit, a collective for all its members, COLLECT for what the
workers push, PULL for what servers publish. What is started (`ENDS`) waits for nobody, but the members of an axis
start in the same order; its end is taken for a collective: where nothing moves by itself, what others wait for moves
when a rank comes there itself.

No rank ever has a choice, so the order in which ranks are tried here cannot change what happens: a run that ends here
ends always, as long as sends find room.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.grid import ORDER, ProcessGrid
from hpcdist.strategies.schedule.operations import COMPUTE, ENDS, Kind, Operation, StagePlacement

# (its receive, whether it goes to the rank of the unit, and not to that of the unit before)
SENDS: Final = {Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, True), Kind.SEND_GRADIENT: (Kind.RECV_GRADIENT, False)}
RECEIVES: Final = {receive: (send, onward) for send, (receive, onward) in SENDS.items()}
OVER_DATA: Final = (
    *(Kind.REDUCE, Kind.COMBINE, Kind.GATHER, Kind.NORMS, Kind.REFRESH, Kind.COMMIT, Kind.AVERAGE),
    Kind.COMPRESS,
    *(*ENDS, *ENDS.values()),
)
OVER_COPIES: Final = (Kind.COPY_GRADIENT, Kind.COPY_VALUE)
# Where that axis has several ranks, they compute together, and so do those that share out experts.
OVER_TENSOR: Final = (*COMPUTE, Kind.SUM_ROWS)
# As do those of a context axis, whose messages inside of a stage `strategies.context.proof` has proven: they end there.
OVER_CONTEXT: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
REPLICAS: Final = ("data", "context")
SERVED: Final = {Kind.COLLECT: Kind.PUSH, Kind.PULL: Kind.PUBLISH}  # what waits -> what it waits for

MessageKey: TypeAlias = tuple[int, int, Kind, int, int, int]  # (from, to, kind of the send, micro-batch, unit, source)


class PeerRanks:
    """Peers of the ranks on ``grid``; of the ``ranks``, those beyond it are parameter servers."""

    def __init__(self, grid: ProcessGrid, ranks: int) -> None:
        self.grid, self.ranks = grid, ranks
        self.workers = range(grid.size)
        self.servers = tuple(range(grid.size, ranks))
        self._places = [grid.coordinates(rank) for rank in self.workers]
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in self.workers:
            groups.setdefault(self._group_of(rank), []).append(rank)
        self._groups = {group: tuple(members) for group, members in groups.items()}

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a worker."""
        return self._places[rank]["pipeline"]

    def together(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that ``rank`` computes with: of its tensor group, its samples, and those of its experts."""
        return self._groups[self._group_of(rank)]

    def _group_of(self, rank: int) -> tuple[int, int]:
        place, grid = self._places[rank], self.grid
        replica = place["data"] * grid.context + place["context"]
        # Both cut the replicas into blocks of neighbours; those who wait for each other lie between common borders.
        return place["pipeline"], replica // math.lcm(grid.context, grid.expert)

    def along(self, axes: Collection[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along ``axes`` only; servers are one such group."""
        if rank >= self.grid.size:
            return self.servers
        others = [other for other in ORDER if other not in axes]
        place = self._places[rank]
        return tuple(r for r in self.workers if all(self._places[r][other] == place[other] for other in others))


class DryRun:
    """Dry run of the lists of all ranks; afterwards ``messages`` and ``meetings`` have their numbers."""

    def __init__(
        self, lists: Sequence[Sequence[Operation]], neighbours: PeerRanks, places: Sequence[StagePlacement]
    ) -> None:
        self._lists, self._neighbours, self._places = lists, neighbours, places
        self._at = [0] * len(lists)
        self._in_transit: set[MessageKey] = set()  # sent, and not received yet
        self._arrived: dict[tuple[object, ...], dict[int, Operation]] = {}
        # What was started, with the rank that came first.
        self._begun: dict[tuple[object, ...], list[tuple[int, Operation]]] = {}
        self._starts = [0] * len(lists)
        self._data = [neighbours.along(REPLICAS, rank) for rank in range(len(lists))]
        self._pipeline = [neighbours.along(("pipeline",), rank) for rank in neighbours.workers]
        self.messages = self.meetings = 0

    def run(self) -> None:
        """Run all lists to their end. Raises ScheduleError where a rank is stuck."""
        # Ranks are tried in turns, each as far as it gets. No operation has a choice, so the order does not matter: a
        # round in which nobody moves is a deadlock, or the end.
        moving = True
        while moving:
            moving = False
            for rank in range(len(self._lists)):
                while self._now(rank) is not None and self._step(rank):
                    moving = True
        stuck = [rank for rank in range(len(self._lists)) if self._now(rank) is not None]
        if stuck:
            raise ScheduleError(self._explain(stuck[0]))
        for sender, receiver, kind, microbatch, unit, source in sorted(self._in_transit, key=str):
            lost = Operation(kind, microbatch, unit, source=source)
            raise ScheduleError(f"rank {sender}: {lost} is never received by rank {receiver}")

    def _now(self, rank: int) -> Operation | None:
        steps = self._lists[rank]
        return steps[self._at[rank]] if self._at[rank] < len(steps) else None

    def _step(self, rank: int) -> bool:
        """Run the current operation of ``rank``, and return True; return False where it has to wait."""
        op = self._now(rank)
        assert op is not None
        if op.kind in SENDS:
            message = self._message(rank, op)
            if message in self._in_transit:
                raise ScheduleError(f"rank {rank}: {op} is sent twice before rank {message[1]} has received it")
            self._in_transit.add(message)
            self.messages += 1
        elif op.kind in RECEIVES:
            message = self._message(rank, op)
            if message not in self._in_transit:
                return False
            self._in_transit.remove(message)
        elif op.kind in SERVED:
            if self._missing(rank, op):
                return False
        elif op.kind in ENDS:
            self._start(rank, op)
        elif op.kind is Kind.AGREE or op.kind in (*OVER_DATA, *OVER_COPIES) or self._together(op):
            return self._meet(rank, op)
        self._at[rank] += 1
        return True

    def _message(self, rank: int, op: Operation) -> MessageKey:
        """Return the message of a SEND or RECV: it goes along the input of its unit, or back with the gradient."""
        send, onward = (op.kind, SENDS[op.kind][1]) if op.kind in SENDS else RECEIVES[op.kind]
        place = self._places[rank] if rank < len(self._places) else None
        before = op.unit - 1 if op.source < 0 else op.source
        known = place is not None and op.unit in place.units and (op.source < 0 or (before, op.unit) in place.skips)
        if place is None or not known or before < 0 or place.rank_of(before) == place.rank_of(op.unit):
            raise ScheduleError(f"rank {rank}: {op} has no other side: the input of its unit stays on one rank")
        ends = [self._pipeline[rank][place.rank_of(unit)] for unit in (before, op.unit)]
        source, target = ends if onward else ends[::-1]
        if rank != (source if op.kind in SENDS else target):
            raise ScheduleError(f"rank {rank}: {op} goes from rank {source} to rank {target}, and is not this rank's")
        return source, target, send, op.microbatch, op.unit, op.source

    def _group(self, rank: int, op: Operation) -> tuple[tuple[object, ...], tuple[int, ...]]:
        """Return the communicator of a collective, as a key, and its members."""
        if op.kind is Kind.AGREE:
            return ("world",), tuple(range(len(self._lists)))
        if op.kind in OVER_TENSOR:
            axes = ("tensor", "context") if op.kind in OVER_CONTEXT else ("tensor",)
            shared = self._neighbours.grid.expert > 1 and op.kind is not Kind.SUM_ROWS
            members = self._neighbours.together(rank) if shared else self._neighbours.along(axes, rank)
            return (*axes, *members), members
        if op.kind in OVER_DATA:
            members = self._data[rank] if op.kind is not Kind.NORMS else self._updating(rank)
            return ("data", *members), members
        pipeline = self._neighbours.along(("pipeline",), rank)
        members = tuple(r for r in pipeline if op in self._lists[r])
        if len(members) < 2:
            raise ScheduleError(f"rank {rank}: {op} has no other side among ranks {list(pipeline)}")
        return ("copy", op.kind, op.unit, *members), members

    def _together(self, op: Operation) -> bool:
        grid = self._neighbours.grid
        tensor = grid.tensor > 1 or (grid.expert > 1 and op.kind is not Kind.SUM_ROWS)
        return (op.kind in OVER_TENSOR and tensor) or (op.kind in OVER_CONTEXT and grid.context > 1)

    def _updating(self, rank: int) -> tuple[int, ...]:
        """Return the ranks along the data axis that update: all of them, or those among them that serve."""
        axis = self._data[rank]
        kinds = {member: {op.kind for op in self._lists[member]} for member in axis}
        if not any(Kind.COLLECT in kinds_of_member for kinds_of_member in kinds.values()):
            return axis
        return tuple(member for member in axis if kinds[member] & {Kind.COLLECT, Kind.NORMS})

    def _meet(self, rank: int, op: Operation) -> bool:
        key, members = self._group(rank, op)
        present = self._arrived.setdefault(key, {})
        present[rank] = op
        for other, theirs in present.items():
            if theirs != op:
                raise ScheduleError(
                    f"rank {rank}: {op} meets {theirs} of rank {other}; the members of an axis need the same order"
                )
        if len(present) < len(members):
            return False
        # The last member to come moves all of them: the others stand still at this operation.
        del self._arrived[key]
        for member in members:
            self._at[member] += 1
        self.meetings += 1
        return True

    def _start(self, rank: int, op: Operation) -> None:
        """Match an operation that is started with those that the members of its axis start, in their order."""
        key, _ = self._group(rank, op)
        begun = self._begun.setdefault(key, [])
        # A started collective waits for nobody, but the n-th start of every member must be the same operation.
        place = self._starts[rank]
        if place == len(begun):
            begun.append((rank, op))
        first, theirs = begun[place]
        if theirs != op:
            raise ScheduleError(
                f"rank {rank}: {op} meets {theirs} of rank {first}; the members of an axis need the same order"
            )
        self._starts[rank] += 1

    def _missing(self, rank: int, op: Operation) -> list[int]:
        """Return the ranks whose PUSH, or PUBLISH, the COLLECT, or PULL, still waits for."""
        awaited = SERVED[op.kind]
        sources = [
            (source, index)
            for source, steps in enumerate(self._lists)
            for index, other in enumerate(steps)
            if other.kind is awaited and other.touches(op.part)
        ]
        if not sources:
            raise ScheduleError(f"rank {rank}: {op} waits for a {awaited.name} that no rank has")
        # A source has pushed once it has gone beyond the position of its PUSH.
        return [source for source, index in sources if self._at[source] <= index]

    def _awaited(self, rank: int, op: Operation) -> list[int]:
        """Return the ranks that ``rank`` waits for."""
        if op.kind in RECEIVES:
            return [self._message(rank, op)[0]]
        if op.kind in SERVED:
            return self._missing(rank, op)
        key, members = self._group(rank, op)
        return [member for member in members if member not in self._arrived.get(key, {})]

    def _explain(self, rank: int) -> str:
        """Return the chain of waits from ``rank`` to a rank that has ended, or around the circle."""
        chain: list[int] = []
        waits: list[str] = []
        while rank not in chain:
            op = self._now(rank)
            if op is None:
                return f"rank {rank} has ended, but {'; '.join(waits)}"
            chain.append(rank)
            awaited = self._awaited(rank, op)
            waits.append(f"rank {rank} waits in {op} for rank {awaited[0]}")
            rank = awaited[0]
        return f"a cyclic wait: {'; '.join(waits[chain.index(rank) :])}"
