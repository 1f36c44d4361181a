"""Deadlock check by a dry run of all ranks: no cyclic waits, and every message has a receiver.

Sends are buffered and never wait. A receive waits for its message, a collective for all members, COLLECT for workers,
PULL for servers. All members of an axis must start the operations in `ENDS` in the same order. These operations wait
for nothing. No operation has a choice, so one run proves all.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

from hpcdist.errors import ScheduleError
from hpcdist.strategies.core.grid import ORDER, ProcessGrid
from hpcdist.strategies.core.operations import COMPUTE, ENDS, Kind, Operation, StagePlacement

# kind -> (kind of its receive, whether it goes to the rank of the unit and not to the rank of the unit before)
SENDS: Final = {Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, True), Kind.SEND_GRADIENT: (Kind.RECV_GRADIENT, False)}
RECEIVES: Final = {receive: (send, onward) for send, (receive, onward) in SENDS.items()}
OVER_DATA: Final = (
    *(Kind.REDUCE, Kind.COMBINE, Kind.GATHER, Kind.NORMS, Kind.REFRESH, Kind.COMMIT, Kind.AVERAGE),
    Kind.COMPRESS,
    *(*ENDS, *ENDS.values()),
)
OVER_COPIES: Final = (Kind.COPY_GRADIENT, Kind.COPY_VALUE)
# Ranks of a tensor axis compute together, and so do ranks that share experts.
OVER_TENSOR: Final = (*COMPUTE, Kind.SUM_ROWS)
# Collective over a context axis; `strategies.context.proof` has proven the messages inside of a stage.
OVER_CONTEXT: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
REPLICAS: Final = ("data", "context")
SERVED: Final = {Kind.COLLECT: Kind.PUSH, Kind.PULL: Kind.PUBLISH}  # waiting kind -> awaited kind

MessageKey: TypeAlias = tuple[int, int, Kind, int, int, int]  # (from, to, kind of the send, micro-batch, unit, source)


class PeerRanks:
    """Peers of each rank on the axes of the process grid ``grid``. Ranks beyond the grid are parameter servers."""

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
        return self._places[rank]["pipeline"]

    def together(self, rank: int) -> tuple[int, ...]:
        """Return a tuple of ``rank`` and its tensor, context and expert peers, which compute layers collectively."""
        return self._groups[self._group_of(rank)]

    def _group_of(self, rank: int) -> tuple[int, int]:
        coordinates, grid = self._places[rank], self.grid
        replica = coordinates["data"] * grid.context + coordinates["context"]
        # Both axes divide the replicas into blocks; ranks that wait for each other share a common block.
        return coordinates["pipeline"], replica // math.lcm(grid.context, grid.expert)

    def along(self, axes: Collection[str], rank: int) -> tuple[int, ...]:
        """Return a tuple of the ranks with the coordinates of ``rank`` except on ``axes``. On a server: all servers."""
        if rank >= self.grid.size:
            return self.servers
        others = [other for other in ORDER if other not in axes]
        coordinates = self._places[rank]
        return tuple(r for r in self.workers if all(self._places[r][other] == coordinates[other] for other in others))


class DryRun:
    """Simulation of the operations of all ranks in one step, to find deadlocks."""

    # ``neighbours``: peers of each rank on the grid axes. ``places``: for each rank, the assignment of model units to
    # its pipeline's ranks. ``messages`` and ``meetings`` count messages and collectives.
    def __init__(
        self, lists: Sequence[Sequence[Operation]], neighbours: PeerRanks, places: Sequence[StagePlacement]
    ) -> None:
        self._lists, self._neighbours, self._places = lists, neighbours, places
        self._at = [0] * len(lists)
        self._in_transit: set[MessageKey] = set()  # sent, but not received yet
        self._arrived: dict[tuple[object, ...], dict[int, Operation]] = {}
        # Started operations, each with the first rank that started it.
        self._begun: dict[tuple[object, ...], list[tuple[int, Operation]]] = {}
        self._starts = [0] * len(lists)
        self._data = [neighbours.along(REPLICAS, rank) for rank in range(len(lists))]
        self._pipeline = [neighbours.along(("pipeline",), rank) for rank in neighbours.workers]
        self.messages = self.meetings = 0

    def run(self) -> None:
        """Simulate all operation lists. Raises ScheduleError for a deadlock, or a wrong message or collective."""
        # Each rank runs as far as possible in turn. A round without progress is a deadlock, or the end.
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
            raise ScheduleError(
                f"rank {sender}: the message of {lost} is never received by rank {receiver}; add the receive to the "
                f"operation list of rank {receiver}, or remove the send from the list of rank {sender}"
            )

    def _now(self, rank: int) -> Operation | None:
        steps = self._lists[rank]
        return steps[self._at[rank]] if self._at[rank] < len(steps) else None

    def _step(self, rank: int) -> bool:
        op = self._now(rank)
        assert op is not None
        if op.kind in SENDS:
            message = self._message(rank, op)
            if message in self._in_transit:
                raise ScheduleError(
                    f"rank {rank}: {op} is sent a second time before rank {message[1]} has received the first message; "
                    "put the receive before the second send, or remove one send"
                )
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
        send, onward = (op.kind, SENDS[op.kind][1]) if op.kind in SENDS else RECEIVES[op.kind]
        placement = self._places[rank] if rank < len(self._places) else None
        before = op.unit - 1 if op.source < 0 else op.source
        is_valid = (
            placement is not None
            and op.unit in placement.units
            and (op.source < 0 or (before, op.unit) in placement.skips)
        )
        if placement is None or not is_valid or before < 0 or placement.rank_of(before) == placement.rank_of(op.unit):
            raise ScheduleError(
                f"rank {rank}: {op} sends or receives an input of model unit {op.unit}, but this input does not come "
                "from another rank; remove this operation"
            )
        ends = [self._pipeline[rank][placement.rank_of(unit)] for unit in (before, op.unit)]
        source, target = ends if onward else ends[::-1]
        if rank != (source if op.kind in SENDS else target):
            raise ScheduleError(
                f"rank {rank}: {op} is a message from rank {source} to rank {target}; move this operation to the list "
                f"of rank {source if op.kind in SENDS else target}"
            )
        return source, target, send, op.microbatch, op.unit, op.source

    def _group(self, rank: int, op: Operation) -> tuple[tuple[object, ...], tuple[int, ...]]:
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
            raise ScheduleError(
                f"rank {rank}: {op} is collective, but no other rank of the pipeline {list(pipeline)} has this "
                "operation in its list; add the operation to another list of the pipeline, or remove the operation here"
            )
        return ("copy", op.kind, op.unit, *members), members

    def _together(self, op: Operation) -> bool:
        grid = self._neighbours.grid
        tensor = grid.tensor > 1 or (grid.expert > 1 and op.kind is not Kind.SUM_ROWS)
        return (op.kind in OVER_TENSOR and tensor) or (op.kind in OVER_CONTEXT and grid.context > 1)

    def _updating(self, rank: int) -> tuple[int, ...]:
        axis = self._data[rank]
        kinds = {member: {op.kind for op in self._lists[member]} for member in axis}
        if not any(Kind.COLLECT in kinds_of_member for kinds_of_member in kinds.values()):
            return axis
        # If there are parameter servers (ranks with a COLLECT), only the servers update.
        return tuple(member for member in axis if kinds[member] & {Kind.COLLECT, Kind.NORMS})

    def _meet(self, rank: int, op: Operation) -> bool:
        key, members = self._group(rank, op)
        present = self._arrived.setdefault(key, {})
        present[rank] = op
        for other, other_op in present.items():
            if other_op != op:
                raise ScheduleError(
                    f"rank {rank} calls the collective {op}, but rank {other} calls {other_op} at the same point; all "
                    "ranks of an axis of the process grid must call their collectives in the same order"
                )
        if len(present) < len(members):
            return False
        # The last member to arrive advances all members.
        del self._arrived[key]
        for member in members:
            self._at[member] += 1
        self.meetings += 1
        return True

    def _start(self, rank: int, op: Operation) -> None:
        key, _ = self._group(rank, op)
        started = self._begun.setdefault(key, [])
        number = self._starts[rank]
        if number == len(started):
            started.append((rank, op))
        first, expected = started[number]
        if expected != op:
            raise ScheduleError(
                f"rank {rank} starts the collective {op}, but rank {first} starts {expected} at the same point; all "
                "ranks of an axis of the process grid must start their collectives in the same order"
            )
        self._starts[rank] += 1

    def _missing(self, rank: int, op: Operation) -> list[int]:
        awaited = SERVED[op.kind]
        sources = [
            (source, index)
            for source, steps in enumerate(self._lists)
            for index, other in enumerate(steps)
            if other.kind is awaited and other.touches(op.part)
        ]
        if not sources:
            raise ScheduleError(
                f"rank {rank}: {op} waits for a {awaited.name} of the same parameter range, but no rank has this "
                f"{awaited.name} in its list; add a {awaited.name} to the list of the sending rank, or remove {op}"
            )
        # A source has sent once it has passed the position of its PUSH or PUBLISH.
        return [source for source, index in sources if self._at[source] <= index]

    def _awaited(self, rank: int, op: Operation) -> list[int]:
        if op.kind in RECEIVES:
            return [self._message(rank, op)[0]]
        if op.kind in SERVED:
            return self._missing(rank, op)
        key, members = self._group(rank, op)
        return [member for member in members if member not in self._arrived.get(key, {})]

    def _explain(self, rank: int) -> str:
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
