"""Branch and bound over the space of layouts, best first, with a memory filter.

A heap orders nodes by a lower bound (`hpcdist.planner.search.space`). The search ends if the smallest bound is not
better than the last result. Memory does not decrease with the size of equal micro-batches in complete groups, so few
layouts need a memory estimate.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, NamedTuple

from hpcdist.planner import checks
from hpcdist.planner.checks import LayoutProblem, refusals
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import MemoryEstimate, PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import step_flops
from hpcdist.planner.plan import least_s, plan
from hpcdist.planner.search import space
from hpcdist.planner.search.space import FamilyTotals, SearchSpec, Strategy, with_strategy
from hpcdist.planner.time.pipeline import border_message
from hpcdist.planner.time.step import MicrobatchFlow, microbatch_flow

ALIKE: Final = ("activations", "reserved")  # terms that do not depend on the strategy
_STEM: Final = attrgetter(
    "data", "pipeline", "tensor", "context", "expert", "recompute", "sequence_parallel", "schedule", "chunks"
)
_NEVER: Final = 1 << 62


class MemoryFilter:
    """Filter for layouts that fit into the device memory. A result can serve for several similar layouts."""

    def __init__(self, description: ModelDescription, cluster: Cluster, global_batch: int, limit_bytes: float) -> None:
        # (excess bytes, layout, memory estimate) of the rejected layout with the fewest excess bytes, or None
        self.leanest: tuple[float, ParallelLayout, MemoryEstimate] | None = None
        self._description, self._cluster, self._global_batch = description, cluster, global_batch
        self._limit_bytes = limit_bytes
        self._fits: dict[object, int] = {}  # largest micro-batch known to fit
        self._fails: dict[object, int] = {}  # smallest micro-batch known not to fit

    def fitting(
        self, layout: ParallelLayout, strategies: Sequence[Strategy], microbatch_sizes: Sequence[int]
    ) -> tuple[Strategy, ...]:
        """Return the (strategy, compression) pairs in ``strategies`` with which ``layout`` fits into memory.

        ``microbatch_sizes``: micro-batch sizes of the search. A result for one size is reused for other sizes.
        """
        stem: tuple[object, ...] = _STEM(layout)
        # Results hold for other sizes only within a class; a size apart is a class of its own.
        if self._is_apart(layout, layout.microbatch):
            stem, least = (*stem, layout.microbatch), layout.microbatch
        else:
            least = next(size for size in microbatch_sizes if not self._is_apart(layout, size))
        fitting = []
        for strategy in strategies:
            if layout.microbatch >= self._fails.get(stem, _NEVER):
                return ()
            if self._has_room(layout, stem, strategy, least):
                fitting.append(strategy)
        return tuple(fitting)

    def _is_apart(self, order: ParallelLayout, microbatch: int) -> bool:
        many = -(-self._global_batch // (order.data * microbatch))
        is_uneven = self._global_batch % (order.data * microbatch) != 0
        return many == 1 or is_uneven or (order.schedule == "interleaved" and many % order.pipeline != 0)

    def _has_room(self, order: ParallelLayout, stem: tuple[object, ...], strategy: Strategy, least: int) -> bool:
        key, size = (stem, strategy), order.microbatch
        if size <= self._fits.get(key, 0):
            return True
        if size >= self._fails.get(key, _NEVER):
            return False
        # If the smallest size does not fit, no other size does.
        if size > least and least > self._fits.get(key, 0) and not self._ask(order, stem, strategy, least):
            return False
        return self._ask(order, stem, strategy, size)

    def _ask(self, order: ParallelLayout, stem: tuple[object, ...], strategy: Strategy, microbatch: int) -> bool:
        layout = with_strategy(order, strategy, microbatch)
        footprint = memory(self._description, layout, self._cluster, self._global_batch)
        limit = min(footprint.limit_bytes, self._limit_bytes or footprint.limit_bytes)
        over = footprint.bytes - limit
        key = (stem, strategy)
        if over <= 0:
            self._fits[key] = max(microbatch, self._fits.get(key, 0))
            return True
        self._fails[key] = min(microbatch, self._fails.get(key, _NEVER))
        # If activations alone are too large, no strategy fits (the stem has no strategy).
        if sum(footprint.terms.get(name, 0.0) for name in ALIKE) > limit:
            self._fails[stem] = min(microbatch, self._fails.get(stem, _NEVER))
        if self.leanest is None or over < self.leanest[0]:
            self.leanest = over, layout, footprint
        return False


Bound = tuple[float, float]  # of the value, and of the value by the formulas alone (differs if the MFU is limited)
Rank = tuple[float, float, int, int]  # both values; ties: number of the order, then index of the strategy


class SearchNode(NamedTuple):
    """Node of the search tree: a set of layouts that share most fields with ``layout``, and their lower bound."""

    # Layouts of an upper node differ in schedule, chunks, data-axis strategy and compression. Layouts of a lower node
    # only differ in data-axis strategy and compression.

    bound: Bound
    number: int  # order of creation, which breaks ties
    layout: ParallelLayout
    known: FamilyTotals | MicrobatchFlow | None  # micro-batch times of all layouts of the node, or None
    strategies: tuple[Strategy, ...] = ()  # (data-axis strategy, compression) pairs of a lower node


Refusals = dict[str, tuple[int, str]]  # violated limit -> (number of violations, message of the first)


def _count(refusals: Refusals, problem: LayoutProblem, many: int = 1) -> None:
    before, text = refusals.get(problem.limit, (0, problem.text))
    refusals[problem.limit] = before + many, text


@dataclass
class BranchAndBound:
    """Best-first search for layouts. After `run`, ``best`` has the best layouts, sorted from best to worst."""

    description: ModelDescription
    cluster: Cluster
    devices: int
    global_batch: int
    spec: SearchSpec
    keep: int
    layouts: int = 0
    estimated: int = 0
    refused_grids: Refusals = field(default_factory=dict)
    refused_layouts: Refusals = field(default_factory=dict)
    best: list[tuple[float, PlanEstimate]] = field(default_factory=list)  # (objective value, estimate)
    _best_of: dict[Any, tuple[Rank, PlanEstimate]] = field(default_factory=dict)
    _heap: list[SearchNode] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    # `plan.least_s` by number of devices and program
    _least_s: dict[tuple[int, str], float] = field(default_factory=dict)
    _last: Rank = (math.inf, 0.0, 0, 0)  # rank of the worst kept layout, once ``keep`` are kept

    def __post_init__(self) -> None:
        self.limit_bytes = space.limit_bytes(self.spec, self.cluster.device.memory_bytes)
        self.memory_filter = MemoryFilter(self.description, self.cluster, self.global_batch, self.limit_bytes)

    def run(self) -> None:
        """Search until no remaining layout can be better than the layouts kept so far. Then fill ``best``."""
        self._push_families()
        # The first bound is the smallest: if it is not better than the worst kept layout, the search is done.
        while self._heap and self._heap[0].bound < self._last[:2]:
            node = heapq.heappop(self._heap)
            if isinstance(node.known, FamilyTotals):
                self._open(node.layout, node.known)
            elif node.known is None:
                self._time(node)
            else:
                for place, strategy in enumerate(node.strategies):
                    self._plan(space.with_strategy(node.layout, strategy), node.known, (node.number, place))
        self.best = [(rank[0], estimate) for rank, estimate in sorted(self._best_of.values(), key=lambda x: x[0])]

    def _push_families(self) -> None:
        objective = self.spec.objective
        nodes = []
        for grid in space.grids(self.devices, self.spec):
            problem = next(checks.grid_problems(self.description, grid, self.cluster, self.global_batch), None)
            if problem is not None:
                _count(self.refused_grids, problem)
                continue
            if self.spec.runnable and (reasons := refusals(grid)):
                _count(self.refused_grids, LayoutProblem("unbuilt", reasons[0]))
                continue
            orders = len(space.orders(self.description, grid, self.spec))
            variants = len(space.strategies(grid, self.spec))
            for cut in space.families(grid, self.spec):
                if problem := next(checks.grid_problems(self.description, cut, self.cluster, self.global_batch), None):
                    _count(self.refused_grids, problem)
                    continue
                for microbatch in space.sizes(cut, self.global_batch, self.spec):
                    self.layouts += orders * variants
                    family = cut.but(microbatch=microbatch)
                    totals = space.family_totals(self.description, family, self.cluster, self.global_batch)
                    bound = space.family_bound(totals, family, self.cluster, objective)
                    nodes.append(SearchNode(self._bound(bound, family), next(self._numbers), family, totals))
        heapq.heapify(nodes)
        self._heap = nodes

    def _open(self, family: ParallelLayout, totals: FamilyTotals) -> None:
        sizes = space.sizes(family, self.global_batch, self.spec)
        hop_s = border_message(self.description, family, self.cluster).seconds
        for schedule, chunks in space.orders(self.description, family, self.spec):
            order = family.but(schedule=schedule, chunks=chunks)
            strategies = space.strategies(order, self.spec)
            if problem := next(checks.order_problems(self.description, order, self.global_batch), None):
                _count(self.refused_layouts, problem, len(strategies))
                continue
            strategies = self._runnable(order, strategies)
            fitting = self.memory_filter.fitting(order, strategies, sizes)
            if len(fitting) < len(strategies):
                _count(self.refused_layouts, self._full(order, strategies), len(strategies) - len(fitting))
            if fitting:
                bound = space.schedule_bound(totals, order, hop_s, self.cluster, self.spec.objective)
                self._wait(SearchNode(self._bound(bound, order), next(self._numbers), order, None, fitting))

    def _time(self, node: SearchNode) -> None:
        arguments = node.layout, self.cluster, self.global_batch
        flow = microbatch_flow(self.description, *arguments)
        bound = space.order_bound(flow, self.description, *arguments, self.spec.objective)
        self._wait(node._replace(bound=self._bound(bound, node.layout), known=flow))

    def _bound(self, floor: float, layout: ParallelLayout) -> Bound:
        if self.spec.objective != "time" or not self.cluster.most_mfu:
            return floor, floor
        workers = layout.devices - layout.servers
        key = workers, layout.implementation
        if key not in self._least_s:
            flops = step_flops(self.description, layout, self.global_batch)
            self._least_s[key] = least_s(flops, layout, self.cluster)
        return max(floor, self._least_s[key]), floor

    def _wait(self, node: SearchNode) -> None:
        if node.bound < self._last[:2]:
            heapq.heappush(self._heap, node)

    def _runnable(self, order: ParallelLayout, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        if not self.spec.runnable:
            return strategies
        runnable = []
        for strategy in strategies:
            if reasons := refusals(space.with_strategy(order, strategy)):
                _count(self.refused_layouts, LayoutProblem("unbuilt", reasons[0]))
            else:
                runnable.append(strategy)
        return tuple(runnable)

    def _full(self, order: ParallelLayout, strategies: tuple[Strategy, ...]) -> LayoutProblem:
        if "memory" not in self.refused_layouts:
            for strategy in strategies:
                layout = space.with_strategy(order, strategy)
                footprint = memory(self.description, layout, self.cluster, self.global_batch)
                if problem := checks.memory_problem(footprint, self.limit_bytes):
                    return problem
        return LayoutProblem("memory", "")  # only the first memory problem of a search has a message

    def _plan(self, layout: ParallelLayout, flow: MicrobatchFlow, seen: tuple[int, int]) -> None:
        arguments = self.description, layout, self.cluster, self.global_batch, self.spec.steps
        estimate = plan(*arguments, limit_bytes=self.limit_bytes, flow=flow)
        self.estimated += 1
        self._keep((*space.value_and_tie_break(estimate, self.spec.objective), *seen), estimate)

    def _keep(self, rank: Rank, estimate: PlanEstimate) -> None:
        if rank >= self._last:
            return
        layout = estimate.layout
        key: Any = rank
        if self.spec.distinct:
            key = (layout.data, layout.pipeline, layout.tensor, layout.context, layout.expert)
            if key in self._best_of and self._best_of[key][0] <= rank:
                return
        self._best_of[key] = rank, estimate
        if len(self._best_of) > self.keep:
            del self._best_of[max(self._best_of, key=lambda entry: self._best_of[entry][0])]
        if len(self._best_of) == self.keep:
            self._last = max(rank for rank, _ in self._best_of.values())
