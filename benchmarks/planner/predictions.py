"""Predictions of the planner for each published number, as `Compared` lines."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from benchmarks.planner.tables import Row, Table, unit_of
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory import model_states
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.time.compute import UnitSeconds, unit_seconds
from hpcdist.planner.time.network import collective, message, span
from hpcdist.strategies.schedule.generate.registry import SCHEDULES
from hpcdist.strategies.schedule.simulate import passes, timeline
from hpcdist.strategies.schedule.simulate.program import LinkCost, StepCosts

# What a block does, beside what a step does once.
OF_BLOCKS: Final = ("forward", "backward", "recompute", "tensor")
TINY: Final = 1e-9  # of a number: what its own arithmetic rounds
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
    tflops: float = math.nan  # predicted for a device, what is computed again included; NaN where there is no step
    series: str = ""
    slack: float = 0.0  # how far the rounding of a published number that goes into the prediction may move it

    @property
    def error(self) -> float:
        """Predicted over published, less one; of times the other way round: above 0 the prediction is faster."""
        if self.quantity.endswith(("_ms", "step_s")):
            return self.published / self.predicted - 1
        return self.predicted / self.published - 1

    @property
    def exact(self) -> bool:
        """Whether the prediction would be printed as what was published: rounded, or with its other digits cut off."""
        return self.rounded or self.cut

    @property
    def rounded(self) -> bool:
        """Whether no more than half a unit of the last printed digit lies between both."""
        return abs(self.predicted - self.published) <= self.unit / 2 + self.slack + TINY * abs(self.published)

    @property
    def cut(self) -> bool:
        """Whether the prediction is printed so with its other digits cut off, and would be otherwise if rounded."""
        return not self.rounded and 0 <= self.predicted - self.published < self.unit + self.slack


def compared(table: Table, cluster: Cluster | None = None) -> Iterator[Compared]:
    """Yield all comparisons of a table, on ``cluster`` instead of the shipped one where that is given."""
    if table.key == "zero_table1":
        yield from _states(table)
    elif table.key == "zero_bubble_table5":
        yield from _bubbles(table)
    for row in table.rows:
        predicted = Predicted(row, cluster or cluster_of(row.cluster))
        for quantity, printed in row.published.items():
            kind = "closed" if quantity in CLOSED else "memory" if quantity.startswith("memory") else row.kind
            yield Compared(
                table=table.key,
                row=row.name,
                quantity=quantity,
                role=_role(row, kind),
                kind=kind,
                published=float(printed),
                predicted=getattr(predicted, quantity)(),
                unit=unit_of(printed),
                tflops=predicted.speed(quantity),
                series=row.series,
                slack=_slack(row, quantity),
            )


def _role(row: Row, kind: str) -> str:
    """Return the role of a number: closed forms have no constants, and memory none that seconds calibrate."""
    if kind == "closed" or (kind, row.role) == ("memory", "shared"):
        return "test"
    return row.role


def _slack(row: Row, quantity: str) -> float:
    """Return how far a prediction may be off for the rounding of what it is made of: of MFU and HFU, the time."""
    if not quantity.endswith("_percent"):
        return 0.0
    step = row.published["step_s"]
    return float(row.published[quantity]) * unit_of(step) / 2 / float(step)


@cache
def cluster_of(name: str) -> Cluster:
    """Return the shipped cluster ``name`` as if it were calibrated: plans then hold the formulas, uncorrected."""
    return replace(toml_file.read(name), calibrated="formulas alone")


class Predicted:
    """What the planner says of a row, by the names of published quantities."""

    def __init__(self, row: Row, cluster: Cluster) -> None:
        self._row, self._cluster = row, cluster
        self._known: dict[tuple[ParallelLayout, int], PlanEstimate] = {}

    def tflops(self) -> float:
        """Return TFLOP/s of a device, what is computed again included."""
        found = self._estimate()
        return found.work.hardware_flops / found.step_s / found.layout.devices / 1e12

    def causal_tflops(self) -> float:
        """Return TFLOP/s of a device in operations of the model, without what a causal mask hides."""
        found = self._estimate()
        return found.work.exact_flops / found.step_s / found.layout.devices / 1e12

    def speed(self, quantity: str) -> float:
        """Return TFLOP/s of a device, as the table counts operations; NaN for a ``quantity`` that is of no step."""
        if quantity == "causal_tflops":
            return self.causal_tflops()
        return self.tflops() if quantity in ("tflops", "step_s", "samples_per_device_s") else math.nan

    def step_s(self) -> float:
        """Return seconds of a step."""
        return self._estimate().step_s

    def samples_per_device_s(self) -> float:
        """Return samples a second of a device."""
        found = self._estimate()
        return found.global_batch / found.step_s / found.layout.devices

    def speedup(self) -> float:
        """Return how much faster a step is than with the row's other layout."""
        return self._estimate(self._row.base).step_s / self._estimate().step_s

    def block_ms(self) -> float:
        """Return what a block more adds to a step."""
        layers = self._row.shape.layers
        whole, half = (self._estimate(layers=count).timing.terms for count in (layers, layers // 2))
        seconds = sum(whole.get(name, 0.0) - half.get(name, 0.0) for name in OF_BLOCKS)
        return 1e3 * seconds / (layers - layers // 2)

    def block_forward_ms(self) -> float:
        """Return the same of the forward alone, collectives of the tensor axis included."""
        layout, description = self._row.layout, self._description()
        sums = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("allreduce",)
        nbytes = layout.microbatch * description.tokens * description.width * ITEM_BYTES[layout.computes_in]
        group = span(layout, "tensor", self._cluster)
        regions = sum(product.cut == "inner" for product in description.units[1].products)
        sent_s = regions * sum(collective(one, nbytes, group, self._cluster).seconds for one in sums)
        return 1e3 * (unit_seconds(description.units[1], layout, self._cluster).forward_s + sent_s)

    def stage_ms(self) -> float:
        """Return what a micro-batch takes on a stage as most are, forward and back."""
        return self.stage_forward_ms() + self.stage_input_ms() + self.stage_weight_ms()

    def stage_forward_ms(self) -> float:
        """Return the same of the forward."""
        return self._blocks_ms(lambda one: one.forward_s)

    def stage_input_ms(self) -> float:
        """Return the same of the gradients of inputs."""
        return self._blocks_ms(lambda one: one.input_s)

    def stage_weight_ms(self) -> float:
        """Return the same of the gradients of weights, which are added to those of micro-batches before."""
        return self._blocks_ms(lambda one: one.weight_s + one.add_s)

    def _blocks_ms(self, part: Callable[[UnitSeconds], float]) -> float:
        layout, description = self._row.layout, self._description()
        blocks = -(-description.units[1].count // layout.pipeline)  # the ends have one less
        return 1e3 * blocks * part(unit_seconds(description.units[1], layout, self._cluster))

    def message_ms(self) -> float:
        """Return what a message between two stages takes; no tensor axis cuts it."""
        layout, description = self._row.layout, self._description()
        nbytes = layout.microbatch * description.tokens * description.width * ITEM_BYTES[layout.computes_in]
        return 1e3 * message(nbytes, layout, "pipeline", self._cluster).seconds

    def memory_gb(self) -> float:
        """Return what PyTorch's allocator has: no driver, no libraries."""
        terms = self._estimate().memory.terms
        return sum(nbytes for name, nbytes in terms.items() if name != "reserved") / 1e9

    def parameters_b(self) -> float:
        """Return billions of parameters."""
        return self._description().parameters / 1e9

    def mfu_percent(self) -> float:
        """Return MFU with the published time: the operations alone are ours."""
        return self._percent(self._estimate().work.model_flops)

    def hfu_percent(self) -> float:
        """Return the same of HFU."""
        return self._percent(self._estimate().work.hardware_flops)

    def _percent(self, flops: float) -> float:
        return 100 * flops / (float(self._row.published["step_s"]) * self._estimate().peak_flops)

    def _estimate(self, layout: ParallelLayout | None = None, layers: int = 0) -> PlanEstimate:
        used = layout or self._row.layout
        found = self._known.get((used, layers))
        if found is None:
            batch, simulated = self._row.global_batch, used.pipeline > 1
            found = plan(self._description(layers), used, self._cluster, batch, 1, simulate=simulated)
            self._known[used, layers] = found
        return found

    def _description(self, layers: int = 0) -> ModelDescription:
        shape = self._row.shape
        return describe(replace(shape, layers=layers) if layers else shape, self._row.name)


def _states(table: Table) -> Iterator[Compared]:
    told = table.tree["table"]
    for degree, printed in table.tree["gb"].items():
        cells = iter(printed)
        for name, parameters in zip(told["models"], told["parameters"], strict=True):
            for stage in told["stages"]:
                cell = next(cells)
                what = {"table": table.key, "row": f"{name}, {stage}, data {degree}", "quantity": "states_gb"}
                gb = states_gb(parameters, stage, int(degree))
                numbers = {"published": float(cell), "predicted": gb, "unit": unit_of(cell)}
                yield Compared(role="test", kind="closed", **what, **numbers)


def states_gb(parameters: float, stage: str, degree: int) -> float:
    """Return GB of parameters, gradients and optimizer on one of ``degree`` devices."""
    layout = ParallelLayout(data=degree, strategy=stage, precision="float16", main_gradients="working")
    return model_states.states(layout).total * parameters / 1e9


def _bubbles(table: Table) -> Iterator[Compared]:
    told = table.tree["table"]
    for row in table.tree["row"]:
        for schedule, printed in zip(told["schedules"], row["bubbles"], strict=True):
            role = "test" if schedule in told["exact"] else "extra"
            what = {"table": table.key, "row": f"{row['name']}, {schedule}", "quantity": "bubble"}
            numbers = {"published": float(printed), "predicted": bubble(schedule, row), "unit": unit_of(printed)}
            yield Compared(role=role, kind="bubble", **what, **numbers)


def bubble(schedule: str, row: Mapping[str, Any]) -> float:
    """Return the bubble of a ``schedule`` whose stages all take the profiled times of a ``row``."""
    ranks, microbatches = row["stages"], row["microbatches"]
    chunks = row["chunks"] if schedule == "interleaved" else 1
    forward, into, weight, message = (milliseconds / chunks for milliseconds in row["profiled_ms"])
    known = SCHEDULES[schedule]
    place = known.place([range(unit, unit + 1) for unit in range(ranks * chunks)], ranks)
    rows = [passes.compact(known.passes(rank, ranks, microbatches, chunks)) for rank in range(ranks)]
    costs = StepCosts.equal(ranks * chunks, forward, into, weight, link=LinkCost(latency_s=message * chunks))
    found = timeline.simulate_passes(rows, place, costs).bubble
    assert math.isfinite(found)
    return found
