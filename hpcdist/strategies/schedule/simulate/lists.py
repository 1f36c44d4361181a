"""Simulated program of operation lists: one entry for each operation that the executor runs.

The verifier proves the same lists. Who waits for whom is as in `hpcdist.strategies.schedule.verify.deadlock`: a
receive for its message, a collective for all its members, COLLECT for what the workers push, PULL for what servers
publish. What is started (`ENDS`) goes on beside what follows, one after the other on its axis. A DEFER ends in the
next step, which is not simulated: its SETTLE takes nothing. Ranks of a tensor axis compute together, and have the
same costs, so that none of them waits for another in a pass.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.operations import ENDS, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.simulate import program as programs
from hpcdist.strategies.schedule.simulate.program import AWAIT, JOIN, MEET, RECV, SEND, WORK, Program, StepCosts
from hpcdist.strategies.schedule.verify.deadlock import OVER_COPIES, OVER_DATA, RECEIVES, SENDS, SERVED, PeerRanks

PASSES: Final = {
    Kind.FORWARD: programs.FORWARD,
    Kind.BACKWARD: programs.BACKWARD,
    Kind.BACKWARD_INPUT: programs.INPUT,
    Kind.BACKWARD_WEIGHT: programs.WEIGHT,
}


@dataclass
class _Entries:
    """Rows under construction; a message is numbered by the first of its two ends."""

    starts: list[int] = field(default_factory=lambda: [0])
    rows: list[tuple[int, int, float, int, int, int]] = field(default_factory=list)
    messages: dict[object, int] = field(default_factory=dict)
    routes: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    meetings: dict[object, int] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    axes: list[int] = field(default_factory=list)
    lasts_s: list[float] = field(default_factory=list)
    axis_numbers: dict[object, int] = field(default_factory=dict)

    def add(
        self, code: int, op: Operation, seconds: float = 0.0, target: int = -1, work: int = -1, chunk: int = -1
    ) -> None:
        self.rows.append((code, target, seconds, work, op.microbatch, chunk))

    def message(self, key: object) -> int:
        return self.messages.setdefault(key, len(self.messages))

    def meeting(self, key: object, axis: object, lasts_s: float) -> int:
        number = self.meetings.setdefault(key, len(self.meetings))
        if number == len(self.members):
            self.members.append(0)
            self.axes.append(self.axis_numbers.setdefault(axis, len(self.axis_numbers)))
            self.lasts_s.append(lasts_s)
        self.members[number] += 1
        return number


def program(
    lists: Sequence[Sequence[Operation]], placement: StagePlacement, costs: StepCosts, grid: ProcessGrid | None = None
) -> Program:
    """Return the program of the ``lists`` of all ranks (local).

    Every pipeline of ``grid`` (None: one pipeline, and nothing else) has its units placed alike; lists beyond its size
    are those of parameter servers.
    """
    entries = _Entries()
    neighbours = PeerRanks(grid or ProcessGrid(pipeline=placement.stages), len(lists))
    for rank, steps in enumerate(lists):
        _Rank(entries, neighbours, rank, costs, placement, lists).add(steps)
        entries.starts.append(len(entries.rows))
    columns = list(zip(*entries.rows, strict=True)) or [()] * 6
    code, target, seconds, work, microbatch, chunk = columns
    routes = [entries.routes.get(number, (0, 0.0, 0.0)) for number in range(len(entries.messages))]
    return Program(
        starts=np.array(entries.starts, np.int64),
        code=np.array(code, np.int8),
        target=np.array(target, np.int64),
        seconds=np.array(seconds, np.float64),
        work=np.array(work, np.int8),
        microbatch=np.array(microbatch, np.int64),
        chunk=np.array(chunk, np.int64),
        links=np.array([link for link, _, _ in routes], np.int64),
        travel_s=np.array([travel for _, *travel in routes], np.float64).reshape(-1, 2),
        members=np.array(entries.members, np.int64),
        axes=np.array(entries.axes, np.int64),
        lasts_s=np.array(entries.lasts_s, np.float64),
    )


class _Rank:
    """Translation of the operation list of one rank into entries."""

    def __init__(
        self,
        entries: _Entries,
        neighbours: PeerRanks,
        rank: int,
        costs: StepCosts,
        placement: StagePlacement,
        lists: Sequence[Sequence[Operation]],
    ) -> None:
        self._found, self._rank, self._costs, self._placement, self._lists = entries, rank, costs, placement, lists
        self._chunk_of = {unit: number for number, units in enumerate(placement.chunks) for unit in units}
        self._ranks = len(lists)
        self._data = neighbours.along("data", rank)
        self._tensor = neighbours.along("tensor", rank)
        computes = rank < neighbours.grid.size
        self._pipeline = neighbours.along("pipeline", rank) if computes else ()
        self._stage = neighbours.stage(rank) if computes else -1
        self._turns: dict[object, int] = {}  # how often this rank has come to a meeting of this name
        self._under_way: dict[object, deque[int]] = {}

    def add(self, steps: Sequence[Operation]) -> None:
        """Add the entries of ``steps``."""
        for index, op in enumerate(steps):
            if op.kind in PASSES:
                self._compute(op)
            elif op.kind in SENDS or op.kind in RECEIVES:
                self._add_message(op)
            elif op.kind in SERVED or op.kind in SERVED.values():
                self._serve(index, op)
            elif op.kind in (Kind.AGREE, Kind.SUM_ROWS, *OVER_DATA, *OVER_COPIES):
                self._meet(op)
            else:
                self._found.add(WORK, op, self._costs.exchange_s(op))

    def _compute(self, op: Operation) -> None:
        costs = self._costs
        rows = (costs.forward_s, costs.backward_s, costs.input_s, costs.weight_s)
        work = PASSES[op.kind]
        self._found.add(
            WORK, op, rows[work][op.unit], work=programs.AGAIN if op.recompute else work, chunk=self._chunk_of[op.unit]
        )

    def _add_message(self, op: Operation) -> None:
        """Add the send, or the receive, of a message between two stages of a pipeline."""
        sends = op.kind in SENDS
        kind = op.kind if sends else RECEIVES[op.kind][0]
        before = op.unit - 1 if op.source < 0 else op.source
        number = self._found.message((self._pipeline, kind, op.microbatch, op.unit, before))
        self._found.add(SEND if sends else RECV, op, target=number, chunk=self._chunk_of[op.unit])
        if sends:
            other = self._placement.rank_of(op.unit if kind is Kind.SEND_ACTIVATION else before)
            self._route(number, self._pipeline[other], self._costs.travel_s(self._stage, other, before + 1))

    def _route(self, number: int, target: int, travel_s: tuple[float, float]) -> None:
        self._found.routes[number] = (self._rank * self._ranks + target, *travel_s)

    def _serve(self, index: int, op: Operation) -> None:
        """Add a message from each PUSH, or PUBLISH, to each COLLECT, or PULL, whose range it meets."""
        gives = op.kind in SERVED.values()
        ends = {**SERVED, **{given: taken for taken, given in SERVED.items()}}
        for other, steps in enumerate(self._lists):
            for at, mate in enumerate(steps):
                if mate.kind is ends[op.kind] and mate.range and op.range and mate.range.intersect(op.range):
                    here, there = (self._rank, index), (other, at)
                    number = self._found.message((here, there) if gives else (there, here))
                    self._found.add(SEND if gives else RECV, op, target=number)
                    if gives:
                        self._route(number, other, (self._costs.exchange_s(op), 0.0))

    def _meet(self, op: Operation) -> None:
        """Add a collective, or its start or end; members join those of one name in the same order."""
        end_of = {end: start for start, end in ENDS.items()}
        if op.kind in end_of:
            under_way = self._under_way.get((end_of[op.kind], op.range, op.unit if op.range is None else -1))
            self._found.add(AWAIT if under_way else WORK, op, target=under_way.popleft() if under_way else -1)
            return
        axis: object = ("world",)
        if op.kind in OVER_DATA:
            axis = ("data", self._data)
        elif op.kind in OVER_COPIES:
            axis = ("copies", self._pipeline, op.unit)
        elif op.kind is Kind.SUM_ROWS:
            axis = ("tensor", self._tensor)
        name = (axis, op.kind)
        turn = self._turns[name] = self._turns.get(name, -1) + 1
        number = self._found.meeting((name, turn), axis, self._costs.exchange_s(op))
        self._found.add(JOIN if op.kind in ENDS else MEET, op, target=number)
        if op.kind in ENDS:
            key = (op.kind, op.range, op.unit if op.range is None else -1)
            self._under_way.setdefault(key, deque()).append(number)
