"""The walk through the space of layouts, best first: branch and bound.

Nodes wait in a heap by a bound that none of their layouts beats (`search_value`). A family that comes up is opened into
its orders; an order that comes up first waits again, by the time that its micro-batches take, and then its strategies
are planned. When the bound on top is no better than the last layout that is kept, nothing that waits can be, and the
walk ends. What cannot be is refused on the way: degrees before anything else, schedules and batches when a family is
opened, and memory last (`search_room`).
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcdist.planner import limits, search_space, search_value
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Estimate
from hpcdist.planner.layout import Layout
from hpcdist.planner.limits_shape import Problem
from hpcdist.planner.memory import memory
from hpcdist.planner.plan import least_s, plan
from hpcdist.planner.ranks import border
from hpcdist.planner.search_room import Room
from hpcdist.planner.search_space import Wanted, Way
from hpcdist.planner.search_value import Whole
from hpcdist.planner.timing import Flow, flow
from hpcdist.planner.work import work

Bound = tuple[float, float]  # of a value, and of what the formulas alone give where an MFU is limited
Rank = tuple[float, float, int, int]  # both; between equal ones the order, and its way, that were first seen


class Node(NamedTuple):
    """What waits: a family, with all of its units; or an order with its ways, and how its micro-batches flow, later."""

    bound: Bound
    number: int  # in the order in which they were first seen, which decides between those of one bound
    layout: Layout
    known: Whole | Flow | None
    ways: tuple[Way, ...] = ()


@dataclass
class Refusals:
    """How often a limit refused a grid or a layout, with the first text."""

    grids: dict[str, tuple[int, str]] = field(default_factory=dict)
    layouts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def grid(self, problem: Problem) -> None:
        """Count a grid, whatever may be laid out on it."""
        self._count(self.grids, problem, 1)

    def layout(self, problem: Problem, many: int = 1) -> None:
        """Count ``many`` layouts."""
        self._count(self.layouts, problem, many)

    @staticmethod
    def _count(where: dict[str, tuple[int, str]], problem: Problem, many: int) -> None:
        before, text = where.get(problem.limit, (0, problem.text))
        where[problem.limit] = before + many, text


@dataclass
class Walk:
    """One search. ``kept`` has the best estimates after `run`, best first."""

    description: Description
    cluster: Cluster
    devices: int
    global_batch: int
    wanted: Wanted
    keep: int
    layouts: int = 0
    estimated: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    kept: list[tuple[float, Estimate]] = field(default_factory=list)
    _best_of: dict[Any, tuple[Rank, Estimate]] = field(default_factory=dict)
    _heap: list[Node] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _least_s: dict[int, float] = field(default_factory=dict)  # `plan.least_s`, by devices
    _last: Rank = (math.inf, 0.0, 0, 0)  # of those that are kept, when there are enough of them

    def __post_init__(self) -> None:
        self.limit_bytes = search_space.limit_bytes(self.wanted, self.cluster.device.memory_bytes)
        self.room = Room(self.description, self.cluster, self.global_batch, self.limit_bytes)

    def run(self) -> None:
        """Walk until nothing that is left can be among the best (local)."""
        self._sow()
        while self._heap and self._heap[0].bound < self._last[:2]:
            node = heapq.heappop(self._heap)
            if isinstance(node.known, Whole):
                self._open(node.layout, node.known)
            elif node.known is None:
                self._time(node)
            else:
                for place, way in enumerate(node.ways):
                    self._plan(search_space.with_way(node.layout, way), node.known, (node.number, place))
        self.kept = [(rank[0], estimate) for rank, estimate in sorted(self._best_of.values(), key=lambda x: x[0])]

    def _sow(self) -> None:
        """Put all families into the heap."""
        objective = self.wanted.objective
        nodes = []
        for grid in search_space.grids(self.devices, self.wanted):
            problem = next(limits.grid_problems(self.description, grid, self.cluster, self.global_batch), None)
            if problem is not None:
                self.refusals.grid(problem)
                continue
            if self.wanted.runnable and (reasons := limits.unbuilt(grid)):
                self.refusals.grid(Problem("unbuilt", reasons[0]))
                continue
            orders = len(search_space.orders(self.description, grid, self.wanted))
            ways = len(search_space.ways(grid, self.wanted))
            for cut in search_space.cuts(grid, self.wanted):
                if problem := next(limits.grid_problems(self.description, cut, self.cluster, self.global_batch), None):
                    self.refusals.grid(problem)
                    continue
                for microbatch in search_space.sizes(cut, self.global_batch, self.wanted):
                    self.layouts += orders * ways
                    family = cut.but(microbatch=microbatch)
                    of_all = search_value.whole(self.description, family, self.cluster, self.global_batch)
                    bound = search_value.family_floor(of_all, family, self.cluster, objective)
                    nodes.append(Node(self._bound(bound, family), next(self._numbers), family, of_all))
        heapq.heapify(nodes)
        self._heap = nodes

    def _open(self, family: Layout, of_all: Whole) -> None:
        """Let the orders wait that can be."""
        sizes = search_space.sizes(family, self.global_batch, self.wanted)
        hop_s = border(self.description, family, self.cluster).seconds
        for schedule, chunks in search_space.orders(self.description, family, self.wanted):
            order = family.but(schedule=schedule, chunks=chunks)
            ways = search_space.ways(order, self.wanted)
            if problem := next(limits.order_problems(self.description, order, self.global_batch), None):
                self.refusals.layout(problem, len(ways))
                continue
            ways = self._runnable(order, ways)
            fitting = self.room.fitting(order, ways, sizes)
            if len(fitting) < len(ways):
                self.refusals.layout(self._full(order, ways), len(ways) - len(fitting))
            if fitting:
                bound = search_value.schedule_floor(of_all, order, hop_s, self.cluster, self.wanted.objective)
                self._wait(Node(self._bound(bound, order), next(self._numbers), order, None, fitting))

    def _time(self, node: Node) -> None:
        """Let an order wait by what its micro-batches take."""
        given = node.layout, self.cluster, self.global_batch
        known = flow(self.description, *given)
        bound = search_value.order_floor(known, self.description, *given, self.wanted.objective)
        self._wait(node._replace(bound=self._bound(bound, node.layout), known=known))

    def _bound(self, floor: float, layout: Layout) -> Bound:
        """Return the bound of layouts whose value by the formulas is ``floor`` at least.

        A limit of MFU makes a step no shorter than on any other layout of as many devices: so many are equal, and the
        formulas decide between them.
        """
        if self.wanted.objective != "time" or not self.cluster.most_mfu:
            return floor, floor
        workers = layout.devices - layout.servers
        if workers not in self._least_s:
            done = work(self.description, layout, self.global_batch)
            self._least_s[workers] = least_s(done, layout, self.cluster)
        return max(floor, self._least_s[workers]), floor

    def _wait(self, node: Node) -> None:
        """Put a node into the heap, unless it is too late for it."""
        if node.bound < self._last[:2]:
            heapq.heappush(self._heap, node)

    def _runnable(self, order: Layout, ways: tuple[Way, ...]) -> tuple[Way, ...]:
        """Return the ways that this version runs, or all where others are wanted as well."""
        if not self.wanted.runnable:
            return ways
        found = []
        for way in ways:
            if reasons := limits.unbuilt(search_space.with_way(order, way)):
                self.refusals.layout(Problem("unbuilt", reasons[0]))
            else:
                found.append(way)
        return tuple(found)

    def _full(self, order: Layout, ways: tuple[Way, ...]) -> Problem:
        """Return what is too much; the first text is kept, so only that one is made."""
        if "memory" not in self.refusals.layouts:
            for way in ways:
                layout = search_space.with_way(order, way)
                needed = memory(self.description, layout, self.cluster, self.global_batch)
                if problem := limits.memory_problem(needed, self.limit_bytes):
                    return problem
        return Problem("memory", "")

    def _plan(self, layout: Layout, known: Flow, seen: tuple[int, int]) -> None:
        given = self.description, layout, self.cluster, self.global_batch, self.wanted.steps
        estimate = plan(*given, limit_bytes=self.limit_bytes, known=known)
        self.estimated += 1
        self._keep((*search_value.both(estimate, self.wanted.objective), *seen), estimate)

    def _keep(self, rank: Rank, estimate: Estimate) -> None:
        """Keep the best layouts, or with ``distinct`` the best one of each grid."""
        if rank >= self._last:
            return
        layout = estimate.layout
        key: Any = rank
        if self.wanted.distinct:
            key = (layout.data, layout.pipeline, layout.tensor, layout.context, layout.expert)
            if key in self._best_of and self._best_of[key][0] <= rank:
                return
        self._best_of[key] = rank, estimate
        if len(self._best_of) > self.keep:
            del self._best_of[max(self._best_of, key=lambda one: self._best_of[one][0])]
        if len(self._best_of) == self.keep:
            self._last = max(rank for rank, _ in self._best_of.values())
