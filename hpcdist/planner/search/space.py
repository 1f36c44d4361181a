"""Search space: the request, and the layouts that follow from it, level by level.

    grid       data x pipeline x tensor x context (x expert) on the devices
    family     a grid with recomputation, sequence parallelism and a size of micro-batch
    order      a family with a schedule and its chunks
    layout     an order with a strategy and a compression

A choice that would change nothing is left out: orders without a pipeline, sharding and compression with one replica,
sequence parallelism without a tensor axis, selective recomputation where scores are never kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner.layout import COMPRESSIONS, RECOMPUTE, STRATEGIES, ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

Strategy = tuple[str, str]  # a strategy and a compression
OBJECTIVES: Final = ("time", "energy", "cost", "energy-delay")
PIPELINES: Final = tuple(name for name, row in SCHEDULES.items() if row.pipelines)


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Objective of a search, and the axes that it may vary. An empty tuple: everything that is possible.

    ``objective`` is of a step: its seconds, its joules, its price, or joules times seconds. ``memory_bytes`` is what a
    device may use; 0: what it has but for the share ``headroom``, since no plan of memory is exact. With ``fewer`` a
    layout may use a part of the devices, a number that divides them. ``base`` has what never varies: precision,
    implementation, overlap, algorithm. Compression changes what is computed, and is tried only where it is asked for.
    ``runnable``: only what this version of hpcdist runs itself. ``first`` are kept, and with ``simulate`` they, and a
    few behind them, are timed again by the simulator of schedules. With ``distinct`` a grid is there only once, with
    what is best on it. ``steps`` are those of the training, for its failures and price.
    """

    objective: str = "time"
    steps: int = 1000
    memory_bytes: float = 0.0
    headroom: float = 0.05
    fewer: bool = False
    base: ParallelLayout = field(default_factory=ParallelLayout)
    strategies: tuple[str, ...] = ("allreduce", "zero1", "zero2", "zero3")
    schedules: tuple[str, ...] = PIPELINES
    chunks: tuple[int, ...] = ()
    recompute: tuple[str, ...] = RECOMPUTE
    compressions: tuple[str, ...] = ("none",)
    tensors: tuple[int, ...] = ()
    pipelines: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    experts: tuple[int, ...] = (1,)
    microbatches: tuple[int, ...] = ()
    sequence_parallel: tuple[bool, ...] = (False, True)
    runnable: bool = False
    first: int = 10
    simulate: bool = True
    distinct: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for values without meaning."""
        for name, choices in (
            ("strategies", STRATEGIES),
            ("schedules", PIPELINES),
            ("recompute", RECOMPUTE),
            ("compressions", COMPRESSIONS),
            ("sequence_parallel", (False, True)),
        ):
            given = getattr(self, name)
            wrong = [value for value in given if value not in choices]
            if wrong or not given:
                raise UsageError(
                    f"{name} to search among: got {', '.join(map(str, wrong)) or 'none'}; choose one or more of "
                    f"{', '.join(map(str, choices))}"
                )
        for name in ("chunks", "tensors", "pipelines", "contexts", "experts", "microbatches"):
            wrong = [value for value in getattr(self, name) if value < 1]
            if wrong:
                raise UsageError(f"{name} to search among: got {wrong[0]}; each must be at least 1")
        if self.objective not in OBJECTIVES:
            raise UsageError(f"objective = {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if self.first < 1 or self.steps < 1:
            raise UsageError(f"first = {self.first}, steps = {self.steps}; each must be at least 1")
        if not 0 <= self.headroom < 1:
            raise UsageError(f"headroom = {self.headroom}; it is a share of the memory, from 0 to less than 1")
        if self.memory_bytes < 0:
            raise UsageError(f"memory_bytes = {self.memory_bytes}; give bytes of a device, or 0 for all it has")


def limit_bytes(wanted: SearchSpec, memory_bytes: float) -> float:
    """Return the part of a device's ``memory_bytes`` that a layout may use (local)."""
    if wanted.memory_bytes:
        return min(wanted.memory_bytes, memory_bytes)
    return memory_bytes * (1 - wanted.headroom)


def grids(devices: int, wanted: SearchSpec) -> Iterator[ParallelLayout]:
    """Yield all products of degrees on ``devices``, or on what divides them, possible or not (local)."""
    for tensor in _chosen(divisors(devices), wanted.tensors):
        for context in _chosen(divisors(devices // tensor), wanted.contexts):
            for pipeline in _chosen(divisors(devices // (tensor * context)), wanted.pipelines):
                room = devices // (tensor * context * pipeline)
                for data in divisors(room) if wanted.fewer else (room,):
                    for expert in wanted.experts:
                        yield wanted.base.but(
                            data=data,
                            pipeline=pipeline,
                            tensor=tensor,
                            context=context,
                            expert=expert,
                            microbatch=1,
                            schedule="1f1b",
                            chunks=1,
                            sequence_parallel=False,
                        )


def families(grid: ParallelLayout, wanted: SearchSpec) -> Iterator[ParallelLayout]:
    """Yield the grid with each recomputation and sequence parallelism (local)."""
    both = wanted.sequence_parallel if grid.tensor > 1 else (False,)
    choices = wanted.recompute
    if grid.implementation == "hpcdist" and "none" in choices:  # scores are computed again in any case
        choices = tuple(choice for choice in choices if choice != "selective")
    for recompute in choices:
        for sequence_parallel in both:
            yield grid.but(recompute=recompute, sequence_parallel=sequence_parallel)


def sizes(grid: ParallelLayout, global_batch: int, wanted: SearchSpec) -> tuple[int, ...]:
    """Return the sizes of micro-batch: the smallest for each number of them, or those that are wanted (local).

    Megatron-LM takes as many samples in each. hpcdist is told their number, and makes them as even as can be; with a
    pipeline those of all replicas together have to be.
    """
    if wanted.microbatches:
        return tuple(sorted(set(wanted.microbatches)))
    share = -(-global_batch // grid.data)
    if grid.implementation == "megatron":
        return divisors(share)
    candidates = {-(-share // many) for many in range(1, share + 1)}
    if grid.pipeline > 1:
        candidates = {size for size in candidates if global_batch % -(-global_batch // (grid.data * size)) == 0}
    return tuple(sorted(candidates))


def orders(description: ModelDescription, grid: ParallelLayout, wanted: SearchSpec) -> tuple[tuple[str, int], ...]:
    """Return schedules with their chunks; one alone without a pipeline (local)."""
    if grid.pipeline == 1:
        return (("sequential", 1),)
    pairs: list[tuple[str, int]] = []
    for name in wanted.schedules:
        row = SCHEDULES[name]
        if row.most is not None:
            pairs.append((name, row.most))
        else:
            pairs += [(name, chunks) for chunks in _chunks(description, grid, wanted) if chunks >= row.least]
    return tuple(pairs)


def strategies(grid: ParallelLayout, wanted: SearchSpec) -> tuple[Strategy, ...]:
    """Return strategies with compressions; one alone for one replica (local)."""
    if grid.data * grid.context == 1:
        none = "none" if "none" in wanted.compressions else wanted.compressions[0]
        return ((wanted.strategies[0], none),)
    return tuple((strategy, compression) for strategy in wanted.strategies for compression in wanted.compressions)


def with_strategy(order: ParallelLayout, variant: Strategy, microbatch: int = 0) -> ParallelLayout:
    """Return the layout of an order with a strategy and a compression, and another size of micro-batch (local)."""
    strategy, compression = variant
    # Nothing compressed travels behind the backward in hpcdist, and nothing to a server.
    alone = order.implementation == "hpcdist" and (compression != "none" or strategy == "parameter_server")
    return order.but(
        strategy=strategy,
        compression=compression,
        overlap=0.0 if alone else order.overlap,
        microbatch=microbatch or order.microbatch,
    )


@lru_cache(maxsize=65536)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number``, the smallest first (local)."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def _chosen(possible: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value for value in possible if value in wanted) if wanted else possible


def _chunks(description: ModelDescription, grid: ParallelLayout, wanted: SearchSpec) -> tuple[int, ...]:
    """Return how many chunks a stage may have: those that divide its blocks, and 2 where units need not be even."""
    if wanted.chunks:
        return wanted.chunks
    layers = description.shape.layers if description.shape else description.stages
    even = divisors(layers // grid.pipeline) if layers % grid.pipeline == 0 else ()
    uneven = (2,) if grid.implementation == "hpcdist" and 2 * grid.pipeline <= description.stages else ()
    return tuple(sorted({*even, *uneven} - {1}))
