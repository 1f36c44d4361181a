"""Search space: the request, and the layouts that follow from it, in four levels.

    grid       data x pipeline x tensor x context (x expert) degrees
    family     a grid with recomputation, sequence parallelism and a micro-batch size
    order      a family with a schedule and its chunks
    layout     an order with a strategy and a compression

Choices without effect are left out, such as compression with one replica.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from hpcdist.errors import UsageError
from hpcdist.planner.layout import COMPRESSIONS, RECOMPUTE, STRATEGIES, ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

Strategy = tuple[str, str]  # (strategy, compression)
OBJECTIVES: Final = ("time", "energy", "cost", "energy-delay")
PIPELINES: Final = tuple(name for name, row in SCHEDULES.items() if row.pipelines)


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Settings of a search: the objective, the values to try, and the results to return.

    Empty ``tensors``, ``pipelines``, ``contexts``, ``chunks`` or ``microbatches``: try all possible numbers.
    """

    objective: str = "time"  # quantity per step to minimise
    steps: int = 1000
    memory_bytes: float = 0.0  # limit of a device; 0: the device memory minus the fraction ``headroom``
    headroom: float = 0.05
    fewer: bool = False  # also use fewer devices, if their number divides the number of all devices
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
    runnable: bool = False  # only layouts that hpcdist can run
    first: int = 10  # number of results
    simulate: bool = True  # time the best layouts by the schedule simulator
    distinct: bool = False  # only the best layout for each combination of parallel degrees

    def __post_init__(self) -> None:
        for name, choices in (
            ("strategies", STRATEGIES),
            ("schedules", PIPELINES),
            ("recompute", RECOMPUTE),
            ("compressions", COMPRESSIONS),
            ("sequence_parallel", (False, True)),
        ):
            values = getattr(self, name)
            wrong = [value for value in values if value not in choices]
            if wrong or not values:
                raise UsageError(
                    f"the search cannot try {name} = {', '.join(map(str, wrong)) or 'an empty list'}; choose one or "
                    f"more values of {', '.join(map(str, choices))}"
                )
        for name in ("chunks", "tensors", "pipelines", "contexts", "experts", "microbatches"):
            wrong = [value for value in getattr(self, name) if value < 1]
            if wrong:
                raise UsageError(f"the search cannot try {name} = {wrong[0]}; each value must be at least 1")
        if self.objective not in OBJECTIVES:
            raise UsageError(f"objective = {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if self.first < 1 or self.steps < 1:
            raise UsageError(f"first = {self.first}, steps = {self.steps}; both numbers must be at least 1")
        if not 0 <= self.headroom < 1:
            raise UsageError(f"headroom = {self.headroom}; expected a memory fraction, from 0 to less than 1")
        if self.memory_bytes < 0:
            raise UsageError(f"memory_bytes = {self.memory_bytes}; expected bytes per device, or 0 for all memory")


def limit_bytes(spec: SearchSpec, memory_bytes: float) -> float:
    """Return the memory in bytes that ``spec`` allows on a device with ``memory_bytes`` bytes of memory. Local."""
    if spec.memory_bytes:
        return min(spec.memory_bytes, memory_bytes)
    return memory_bytes * (1 - spec.headroom)


def grids(devices: int, spec: SearchSpec) -> Iterator[ParallelLayout]:
    """Yield a layout for each combination of parallel degrees. ``devices``: number of devices. ``spec``: settings."""
    # The caller must check that the layouts are possible. With `spec.fewer`, also smaller divisors of ``devices`` are
    # used.
    for tensor in _chosen(divisors(devices), spec.tensors):
        for context in _chosen(divisors(devices // tensor), spec.contexts):
            for pipeline in _chosen(divisors(devices // (tensor * context)), spec.pipelines):
                room = devices // (tensor * context * pipeline)
                for data in divisors(room) if spec.fewer else (room,):
                    for expert in spec.experts:
                        yield spec.base.but(
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


def families(grid: ParallelLayout, spec: SearchSpec) -> Iterator[ParallelLayout]:
    """Yield copies of layout ``grid`` with each pair (recomputation, sequence parallelism) listed in ``spec``."""
    both = spec.sequence_parallel if grid.tensor > 1 else (False,)
    choices = spec.recompute
    if grid.kernels.tiles_attention and "none" in choices:  # scores are always recomputed
        choices = tuple(choice for choice in choices if choice != "selective")
    for recompute in choices:
        for sequence_parallel in both:
            yield grid.but(recompute=recompute, sequence_parallel=sequence_parallel)


def sizes(grid: ParallelLayout, global_batch: int, spec: SearchSpec) -> tuple[int, ...]:
    """Return the micro-batch sizes to try for the data-parallel degree of ``grid``, in ascending order. Local."""
    if spec.microbatches:
        return tuple(sorted(set(spec.microbatches)))
    share = -(-global_batch // grid.data)
    if grid.kernels.splits_evenly:
        return divisors(share)
    # One size per possible number of micro-batches. In a pipeline and in Megatron-LM, micro-batches must be equal.
    candidates = {-(-share // many) for many in range(1, share + 1)}
    if grid.pipeline > 1:
        candidates = {size for size in candidates if global_batch % -(-global_batch // (grid.data * size)) == 0}
    return tuple(sorted(candidates))


def orders(description: ModelDescription, grid: ParallelLayout, spec: SearchSpec) -> tuple[tuple[str, int], ...]:
    """Return pairs (pipeline schedule, chunks per rank) to try. Without a pipeline, only ("sequential", 1). Local."""
    if grid.pipeline == 1:
        return (("sequential", 1),)
    pairs: list[tuple[str, int]] = []
    for name in spec.schedules:
        row = SCHEDULES[name]
        if row.most is not None:
            pairs.append((name, row.most))
        else:
            pairs += [(name, chunks) for chunks in _chunks(description, grid, spec) if chunks >= row.least]
    return tuple(pairs)


def strategies(grid: ParallelLayout, spec: SearchSpec) -> tuple[Strategy, ...]:
    """Return the (strategy, compression) pairs to try: only one pair if no ranks exchange gradients. Local."""
    if grid.data * grid.context == 1:
        none = "none" if "none" in spec.compressions else spec.compressions[0]
        return ((spec.strategies[0], none),)
    return tuple((strategy, compression) for strategy in spec.strategies for compression in spec.compressions)


def with_strategy(order: ParallelLayout, variant: Strategy, microbatch: int = 0) -> ParallelLayout:
    """Return a copy of the layout ``order`` with another data-axis strategy and compression.

    ``variant``: pair (strategy, compression). ``microbatch``: micro-batch size of the copy, or 0 to keep the size.
    """
    strategy, compression = variant
    alone = not order.kernels.overlaps_coded and (compression != "none" or strategy == "parameter_server")
    return order.but(
        strategy=strategy,
        compression=compression,
        overlap=0.0 if alone else order.overlap,
        microbatch=microbatch or order.microbatch,
    )


@lru_cache(maxsize=65536)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` in ascending order. Local."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def _chosen(possible: tuple[int, ...], allowed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value for value in possible if value in allowed) if allowed else possible


def _chunks(description: ModelDescription, grid: ParallelLayout, spec: SearchSpec) -> tuple[int, ...]:
    if spec.chunks:
        return spec.chunks
    layers = description.shape.layers if description.shape else description.stages
    even = divisors(layers // grid.pipeline) if layers % grid.pipeline == 0 else ()
    uneven = (2,) if not grid.kernels.splits_evenly and 2 * grid.pipeline <= description.stages else ()
    return tuple(sorted({*even, *uneven} - {1}))
