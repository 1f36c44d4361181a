"""What the planner says to each published number, as `Compared` lines."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from validate_planner_rows import Row, Table, unit_of

from hpcdist.planner import cluster_file, states
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Estimate
from hpcdist.planner.layout import Layout
from hpcdist.planner.pipeline import Seconds
from hpcdist.planner.plan import plan
from hpcdist.planner.shape import describe
from hpcdist.planner.stage_seconds import loads
from hpcdist.planner.timing import border, stage_of
from hpcdist.strategies.schedule import simulate, simulate_passes
from hpcdist.strategies.schedule.catalogue import SCHEDULES
from hpcdist.strategies.schedule.simulate_costs import Costs, Link

# What a block does, beside what a step does once.
OF_BLOCKS: Final = ("forward", "backward", "recompute", "tensor")
CLOSED: Final = ("parameters_b", "mfu_percent", "hfu_percent", "states_gb", "bubble")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A published number, and the predicted one. ``kind``: throughput, layer, memory, closed or bubble."""

    table: str
    row: str
    quantity: str
    role: str
    kind: str
    published: float
    predicted: float
    unit: float  # of the last printed digit
    series: str = ""

    @property
    def error(self) -> float:
        """Predicted over published, less one; of times the other way round: above 0 the prediction is faster."""
        if self.quantity.endswith(("_ms", "step_s")):
            return self.published / self.predicted - 1
        return self.predicted / self.published - 1

    @property
    def exact(self) -> bool:
        """Whether both agree to the last digit that is printed: less than a unit of it lies between them."""
        return abs(self.predicted - self.published) < self.unit


def compared(table: Table) -> Iterator[Compared]:
    """Yield all comparisons of a table."""
    if table.key == "zero_table1":
        yield from _states(table)
    elif table.key == "zero_bubble_table5":
        yield from _bubbles(table)
    for row in table.rows:
        for quantity, printed in row.published.items():
            kind = "closed" if quantity in CLOSED else "memory" if quantity.startswith("memory") else row.kind
            yield Compared(
                table=table.key,
                row=row.name,
                quantity=quantity,
                role="test" if kind == "closed" else row.role,
                kind=kind,
                published=float(printed),
                predicted=_PREDICTED[quantity](row),
                unit=_unit(row, quantity),
                series=row.series,
            )


def _unit(row: Row, quantity: str) -> float:
    """Return how far two values may lie apart that are printed alike; the time behind an MFU is rounded, too."""
    unit = unit_of(row.published[quantity])
    if not quantity.endswith("_percent"):
        return unit
    step = row.published["step_s"]
    return unit + float(row.published[quantity]) * unit_of(step) / 2 / float(step)


@cache
def cluster_of(name: str) -> Cluster:
    """Return the shipped cluster ``name``."""
    return cluster_file.read(name)


def estimate(row: Row, layout: Layout | None = None, layers: int = 0) -> Estimate:
    """Return the plan of a row; of another ``layout`` or with other ``layers`` where these are given."""
    used = layout or row.layout
    cluster = cluster_of(row.cluster)
    if used.devices > cluster.devices:
        cluster = replace(cluster, devices=used.devices)
    simulated = used.pipeline > 1
    return plan(_description(row, layers), used, cluster, row.global_batch, 1, simulate=simulated)


def _description(row: Row, layers: int = 0) -> Description:
    return describe(replace(row.shape, layers=layers) if layers else row.shape, row.name)


def _tflops(row: Row) -> float:
    found = estimate(row)
    return found.work.hardware_flops / found.step_s / row.layout.devices / 1e12


def _causal_tflops(row: Row) -> float:
    found = estimate(row)
    return found.work.exact_flops / found.step_s / row.layout.devices / 1e12


def _rate(row: Row) -> float:
    return row.global_batch / estimate(row).step_s / row.layout.devices


def _speedup(row: Row) -> float:
    return estimate(row, row.base).step_s / estimate(row).step_s


def _block_ms(row: Row) -> float:
    """Return what a block more adds to a step."""
    layers = row.shape.layers
    whole, half = (estimate(row, layers=count).timing.terms for count in (layers, layers // 2))
    seconds = sum(whole.get(name, 0.0) - half.get(name, 0.0) for name in OF_BLOCKS)
    return 1e3 * seconds / (layers - layers // 2)


def _block_forward_ms(row: Row) -> float:
    """The same of the forward alone, collectives of the tensor axis included."""
    layers, cluster = row.shape.layers, cluster_of(row.cluster)
    whole, half = (
        sum(
            stage_of(load, row.layout, cluster, 1).seconds.forward_s
            for load, _ in loads(described, row.layout, cluster)
        )
        for described in (_description(row, layers), _description(row, layers // 2))
    )
    return 1e3 * (whole - half) / (layers - layers // 2)


def _stage(row: Row) -> Seconds:
    """Return what a micro-batch takes on a stage as most are."""
    cluster = cluster_of(row.cluster)
    microbatches = row.layout.microbatches(row.global_batch)
    load, _ = max(loads(_description(row), row.layout, cluster), key=lambda one: one[1])
    return stage_of(load, row.layout, cluster, microbatches).seconds


def _memory_gb(row: Row) -> float:
    """Return what PyTorch's allocator has: no driver, no libraries."""
    terms = estimate(row).memory.terms
    return sum(nbytes for name, nbytes in terms.items() if name != "reserved") / 1e9


def _percent(row: Row, flops: str) -> float:
    """Return MFU or HFU with the published time: the operations alone are ours."""
    cluster = cluster_of(row.cluster)
    peak = cluster.device.peak_flops[row.layout.precision] * row.layout.devices
    return 100 * getattr(estimate(row).work, flops) / (float(row.published["step_s"]) * peak)


_PREDICTED: Final[Mapping[str, Any]] = {
    "tflops": _tflops,
    "causal_tflops": _causal_tflops,
    "step_s": lambda row: estimate(row).step_s,
    "samples_per_device_s": _rate,
    "speedup": _speedup,
    "block_ms": _block_ms,
    "block_forward_ms": _block_forward_ms,
    "stage_ms": lambda row: 1e3 * _stage(row).whole_s,
    "stage_forward_ms": lambda row: 1e3 * _stage(row).forward_s,
    "stage_input_ms": lambda row: 1e3 * _stage(row).input_s,
    "stage_weight_ms": lambda row: 1e3 * _stage(row).weight_s,
    "message_ms": lambda row: 1e3 * border(_description(row), row.layout, cluster_of(row.cluster)).seconds,
    "memory_gb": _memory_gb,
    "parameters_b": lambda row: _description(row).parameters / 1e9,
    "mfu_percent": lambda row: _percent(row, "model_flops"),
    "hfu_percent": lambda row: _percent(row, "hardware_flops"),
}


def _states(table: Table) -> Iterator[Compared]:
    told = table.tree["table"]
    for degree, printed in table.tree["gb"].items():
        cells = iter(printed)
        for name, parameters in zip(told["models"], told["parameters"], strict=True):
            for stage in told["stages"]:
                cell = next(cells)
                yield Compared(
                    table=table.key,
                    row=f"{name}, {stage}, data {degree}",
                    quantity="states_gb",
                    role="test",
                    kind="closed",
                    published=float(cell),
                    predicted=states_gb(parameters, stage, int(degree)),
                    unit=unit_of(cell),
                )


def states_gb(parameters: float, stage: str, degree: int) -> float:
    """Return GB of parameters, gradients and optimizer on one of ``degree`` devices."""
    layout = Layout(data=degree, strategy=stage, precision="float16", main_gradients="working")
    return states.states(layout).total * parameters / 1e9


def _bubbles(table: Table) -> Iterator[Compared]:
    told = table.tree["table"]
    for row in table.tree["row"]:
        for schedule, printed in zip(told["schedules"], row["bubbles"], strict=True):
            exact = schedule in told["exact"]
            yield Compared(
                table=table.key,
                row=f"{row['name']}, {schedule}",
                quantity="bubble",
                role="test" if exact else "extra",
                kind="bubble",
                published=float(printed),
                predicted=bubble(schedule, row),
                unit=unit_of(printed),
            )


def bubble(schedule: str, row: Mapping[str, Any]) -> float:
    """Return the bubble of a ``schedule`` whose stages all take the profiled times of a ``row``."""
    ranks, microbatches = row["stages"], row["microbatches"]
    chunks = row["chunks"] if schedule == "interleaved" else 1
    forward, into, weight, message = (milliseconds / chunks for milliseconds in row["profiled_ms"])
    known = SCHEDULES[schedule]
    place = known.place([range(unit, unit + 1) for unit in range(ranks * chunks)], ranks)
    rows = [simulate_passes.compact(known.passes(rank, ranks, microbatches, chunks)) for rank in range(ranks)]
    costs = Costs.equal(ranks * chunks, forward, into, weight, link=Link(latency_s=message * chunks))
    found = simulate.passes(rows, place, costs).bubble
    assert math.isfinite(found)
    return found
