"""The partition plan of a recipe: the partition over the pipeline, and the table of every rank's share.

Local, with equal results on every rank. The basis is the number of parameters, operations, or measured seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.models.counts import DocumentPairs
from hpcdist.models.model import Model
from hpcdist.reporting.units import format_bytes
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.operations import StagePlacement
from hpcdist.strategies.pipeline.costs import PassSeconds, TensorSplit, UnitCost, unit_costs
from hpcdist.strategies.pipeline.memory import StageMemory, StateBytes, moments
from hpcdist.strategies.pipeline.partition import StageDevices, check_units, least_memory, partition
from hpcdist.strategies.schedule.operation_list import ScheduleText
from hpcdist.strategies.schedule.passes import expand

# Basis -> (unit of work, its size).
BASES: Final = {"parameters": ("", 1.0), "flops": ("GFLOP", 1e9), "measured": ("ms", 1e-3)}


@dataclass(frozen=True, kw_only=True)
class PartitionRow:
    """Row of a partition plan: the layers, memory use and compute work of one pipeline rank."""

    units: tuple[range, ...]
    parameters: int
    forward: float
    backward: float
    share: float  # its time relative to the slowest rank
    bytes: Mapping[str, int]
    limit: int

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True)
class PartitionPlan:
    """Assignment of a model's layers to pipeline ranks."""

    placement: StagePlacement
    basis: str
    origin: str
    rows: tuple[PartitionRow, ...]
    gap: float = 0.0  # upper bound of the fraction of time that another partition could save; 0: optimal

    @property
    def stage_units(self) -> tuple[int, ...]:
        """Tuple of the number of layers, including embedding and head, of each pipeline chunk."""
        return tuple(len(chunk) for chunk in self.placement.chunks)

    @property
    def balance(self) -> float:
        """Mean fraction of time in which ranks compute if the slowest rank never waits: an upper bound."""
        return sum(row.share for row in self.rows) / len(self.rows)

    def table(self) -> list[str]:
        """Format the plan as a text table with one row per pipeline rank, and return a list of the table's lines."""
        work, size = BASES[self.basis]
        lines = [["stage", "units", "parameters", work and f"forward {work}", work and f"backward {work}", "time"]]
        lines[0].append("memory")
        for rank, row in enumerate(self.rows):
            parts = ", ".join(
                f"{name} {format_bytes(size_bytes)}" for name, size_bytes in row.bytes.items() if size_bytes
            )
            limit = f" of {format_bytes(row.limit)}" if row.limit else ""
            figures = [f"{amount / size:.3g}" if work else "" for amount in (row.forward, row.backward)]
            units = ", ".join(map(_shown, row.units))
            memory = f"{format_bytes(row.total_bytes)}{limit}: {parts}"
            lines.append([str(rank), units, f"{row.parameters:,}", *figures, f"{row.share:.0%}", memory])
        columns = [column for column in zip(*lines, strict=True) if any(column)]
        widths = [max(map(len, column)) for column in columns]
        cells = [[cell.ljust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
        gap = f"; no cut is more than {self.gap:.1%} faster" if self.gap else ""
        first = f"stages {self.origin}: while the slowest works, the ranks are busy {self.balance:.0%} on average{gap}"
        return [first, *("  ".join(row).rstrip() for row in zip(*cells, strict=True))]


def plan(
    model: Model,
    parallel: ParallelConfig,
    schedule: ScheduleText,
    states: StateBytes,
    samples: int,
    *,
    seconds: Sequence[PassSeconds] | None = None,
    earlier_units: Sequence[int] = (),
    documents: DocumentPairs | None = None,
) -> PartitionPlan:
    """Return the assignment of layers to pipeline ranks. Raises ConfigurationError if no assignment is possible.

    ``states``: bytes of parameters, gradients and optimizer state. ``samples``: samples per micro-batch.
    """
    # ``seconds``: measured times of each layer. ``earlier_units``: layers of each stage in a checkpoint, to be kept.
    ranks, count = parallel.pipeline, len(model.stages)
    check_units(count, ranks, schedule.chunks, getattr(model.stages[0], "uncut", ""))
    split = TensorSplit(ranks=parallel.tensor, by_tokens=parallel.sequence_parallel)
    costs = unit_costs(model, samples, split, documents)
    empty = schedule.place([range(unit, unit + 1) for unit in range(ranks * schedule.chunks)])
    steps = [expand(schedule.passes[rank], empty, rank, recompute=parallel.recompute) for rank in range(ranks)]
    live = [moments(steps[rank], empty.of(rank)) for rank in range(ranks)]
    memory = StageMemory(costs, states, live, _copies(model, empty, states.itemsize + states.widened, split))
    speeds = tuple(map(float, parallel.stage_speeds)) or (1.0,) * ranks
    limits = parallel.stage_memory_bytes or (0,)
    devices = StageDevices(speeds, limits * ranks if len(limits) == 1 else limits)
    work = list(_work(parallel.partition, costs, seconds, schedule, recompute=parallel.recompute))
    weights = [forward + backward for forward, backward in work]
    sizes, gap = tuple(parallel.stage_units or earlier_units), 0.0
    origin = f"cut by {parallel.partition}" if not sizes else "given" if parallel.stage_units else "kept"
    if sizes:
        chunks = _given(sizes, count, ranks, schedule.chunks)
    elif result := partition(weights, empty.ranks, devices, memory):
        chunks, gap = result.chunks, 0.0 if result.is_proven else 1 - result.bound / result.largest
    else:
        chunks = _too_large(weights, empty, devices, memory)
    placement = replace(schedule.place(chunks), skips=model.skips)
    rows = tuple(_rows(placement, costs, work, memory, devices))
    partition_plan = PartitionPlan(placement=placement, basis=parallel.partition, origin=origin, rows=rows, gap=gap)
    _refuse_full(partition_plan, model, is_given=bool(sizes))
    return partition_plan


def _copies(model: Model, empty: StagePlacement, itemsize: int, split: TensorSplit) -> dict[int, int]:
    if empty.ranks[0] == empty.ranks[-1]:
        return {}
    copies = {}
    for unit, stage in enumerate(model.stages):
        tied = [model.layout.by_key[key].spec for key in stage.tied.values()]
        if tied:
            copies[unit] = sum(2 * itemsize * split.size(spec) for spec in tied)
    return copies


def _work(
    basis: str,
    costs: Sequence[UnitCost],
    seconds: Sequence[PassSeconds] | None,
    schedule: ScheduleText,
    *,
    recompute: bool,
) -> Iterator[tuple[float, float]]:
    for unit, cost in enumerate(costs):
        if basis == "parameters":
            yield float(cost.parameters), 0.0
            continue
        forward, backward = float(cost.forward_flop), float(cost.input_flop + cost.weight_flop)
        if basis == "measured":
            assert seconds is not None, "measure the units first"
            measured = seconds[unit]
            forward, backward = (
                measured.forward,
                measured.input + measured.weight if schedule.splits else measured.backward,
            )
        yield forward, backward + forward * recompute


def _given(sizes: Sequence[int], count: int, ranks: int, chunks: int) -> tuple[range, ...]:
    if len(sizes) != ranks * chunks or sum(sizes) != count:
        raise ConfigurationError(
            f"parallel.stage_units = {list(sizes)} has {len(sizes)} numbers with the sum {sum(sizes)}; expected "
            f"{ranks * chunks} numbers ({ranks} pipeline ranks x {chunks} chunks per rank) with the sum {count}, the "
            "number of layers of the model, including embedding and head"
        )
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def _too_large(
    weights: Sequence[float], empty: StagePlacement, devices: StageDevices, memory: StageMemory
) -> tuple[range, ...]:
    if len(empty.chunks) == empty.stages:
        return least_memory(len(weights), empty.ranks, devices, memory)
    result = partition(weights, empty.ranks, StageDevices(devices.speeds, (0,) * empty.stages), memory)
    assert result is not None
    return result.chunks


def _rows(
    placement: StagePlacement,
    costs: Sequence[UnitCost],
    work: Sequence[tuple[float, float]],
    memory: StageMemory,
    devices: StageDevices,
) -> Iterator[PartitionRow]:
    rank_units = [[unit for chunk in placement.of(rank) for unit in chunk] for rank in range(placement.stages)]
    sums = [tuple(sum(work[unit][index] for unit in units) for index in (0, 1)) for units in rank_units]
    times = [sum(both) / speed for both, speed in zip(sums, devices.speeds, strict=True)]
    for rank, units in enumerate(rank_units):
        chunks = placement.of(rank)
        terms = memory.terms(rank, [chunk.start for chunk in chunks], [chunk.stop for chunk in chunks])
        yield PartitionRow(
            units=chunks,
            parameters=sum(costs[unit].parameters for unit in units),
            forward=sums[rank][0],
            backward=sums[rank][1],
            share=times[rank] / max(times) if max(times) else 1.0,
            bytes={name: int(size) for name, size in terms.items()},
            limit=devices.limits[rank],
        )


def _refuse_full(made: PartitionPlan, model: Model, *, is_given: bool) -> None:
    for rank, row in enumerate(made.rows):
        if row.limit and row.total_bytes > row.limit:
            largest = max(row.bytes, key=lambda name: row.bytes[name])
            all_seen = not is_given and len(made.placement.chunks) == len(made.rows)
            circumstance = f"however the {len(model.stages)} units are cut" if all_seen else "with these stages"
            raise ConfigurationError(
                f"parallel.stage_memory_bytes: {circumstance}, pipeline rank {rank} needs {row.total_bytes:,} bytes of "
                f"{row.limit:,}, most of them {largest}; use more pipeline ranks, smaller or fewer micro-batches, "
                "parallel.recompute, or a strategy that cuts its states (zero1, zero2, zero3):\n"
                + "\n".join(made.table())
            )


def _shown(units: range) -> str:
    return str(units.start) if len(units) == 1 else f"{units.start}-{units.stop - 1}"
