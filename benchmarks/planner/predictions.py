"""The planner's prediction of each published number."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from benchmarks.planner.tables import Row, Table, unit_of
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster, parse
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory import model_states
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.time.compute import UnitSeconds, unit_seconds
from hpcdist.planner.time.network import collective, message, span
from hpcdist.strategies.schedule import timeline
from hpcdist.strategies.schedule.registry import SCHEDULES
from hpcdist.strategies.schedule.simulated_program import LinkCost, StepCosts

# Terms proportional to the number of blocks.
OF_BLOCKS: Final = ("forward", "backward", "recompute", "tensor")
TINY: Final = 1e-9  # relative tolerance for rounding errors of the arithmetic
CLOSED: Final = ("parameters_b", "mfu_percent", "hfu_percent", "states_gb", "bubble")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A published and a predicted number. ``kind``: throughput, layer, memory, closed or bubble."""

    table: str
    row: str
    quantity: str
    role: str
    kind: str
    published: float
    predicted: float
    unit: float  # value of the last printed digit
    tflops: float = math.nan  # predicted per device, including recomputation; NaN if the quantity is not a step
    series: str = ""
    program: str = ""  # training program and device, such as "fsdp2 on A100-SXM4-80GB"; "": not a step
    slack: float = 0.0  # possible effect of rounded published inputs on the prediction

    @property
    def error(self) -> float:
        """Relative error of speed: predicted / published - 1, or the inverse ratio for times; positive is faster."""
        if self.quantity.endswith(("_ms", "step_s")):
            return self.published / self.predicted - 1
        return self.predicted / self.published - 1

    @property
    def exact(self) -> bool:
        """True if the prediction would be printed like the published number, rounded or truncated."""
        return self.rounded or self.cut

    @property
    def rounded(self) -> bool:
        """True if the numbers differ by at most half a unit of the last printed digit."""
        return abs(self.predicted - self.published) <= self.unit / 2 + self.slack + TINY * abs(self.published)

    @property
    def cut(self) -> bool:
        """True if the prediction equals the published number only if truncated, not if rounded."""
        return not self.rounded and 0 <= self.predicted - self.published < self.unit + self.slack


def compared(table: Table, cluster: Cluster | None = None) -> Iterator[Compared]:
    """Yield all comparisons of a table, by default on the shipped clusters."""
    if table.key == "zero_table1":
        yield from _states(table)
    elif table.key == "zero_bubble_table5":
        yield from _bubbles(table)
    for row in table.rows:
        on = cluster or cluster_of(row.cluster, row.network)
        predicted, program = Predicted(row, on), f"{row.layout.implementation} on {on.device.name}"
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
                program=program if kind == "throughput" else "",
                slack=_slack(row, quantity),
            )


def _role(row: Row, kind: str) -> str:
    if kind == "closed" or (kind, row.role) == ("memory", "shared"):
        return "test"
    return row.role


def _slack(row: Row, quantity: str) -> float:
    """Return the error of MFU and HFU predictions that the rounding of the published time can cause."""
    if not quantity.endswith("_percent"):
        return 0.0
    step = row.published["step_s"]
    return float(row.published[quantity]) * unit_of(step) / 2 / float(step)


@cache
def cluster_of(name: str, network: str = "") -> Cluster:
    """Return the shipped cluster ``name`` marked as calibrated, so plans use the formulas without corrections.

    ``network``: bandwidth of a device between nodes, or "" for the cluster's.
    """
    cluster = toml_file.read(name)
    if network:
        *inner, last = cluster.levels
        cluster = replace(cluster, levels=(*inner, replace(last, bytes_per_s=parse(network, "bandwidth"))))
    return replace(cluster, calibrated="formulas alone")


class Predicted:
    """The planner's predictions for a row, by name of the published quantity."""

    def __init__(self, row: Row, cluster: Cluster) -> None:
        self._row, self._cluster = row, cluster
        self._known: dict[tuple[ParallelLayout, int], PlanEstimate] = {}

    def tflops(self) -> float:
        result = self._estimate()
        return result.work.hardware_flops / result.step_s / result.layout.devices / 1e12

    def causal_tflops(self) -> float:
        """Predict TFLOP/s per device for the model's operations, without masked attention scores."""
        result = self._estimate()
        return result.work.exact_flops / result.step_s / result.layout.devices / 1e12

    def speed(self, quantity: str) -> float:
        """Predict TFLOP/s per device as the table counts operations, or NaN if ``quantity`` is not a step."""
        if quantity == "causal_tflops":
            return self.causal_tflops()
        steps = ("tflops", "step_s", "samples_per_device_s", "tokens_per_device_s")
        return self.tflops() if quantity in steps else math.nan

    def step_s(self) -> float:
        return self._estimate().step_s

    def tokens_per_device_s(self) -> float:
        result = self._estimate()
        return result.tokens / result.step_s / result.layout.devices

    def samples_per_device_s(self) -> float:
        result = self._estimate()
        return result.global_batch / result.step_s / result.layout.devices

    def speedup(self) -> float:
        return self._estimate(self._row.base).step_s / self._estimate().step_s

    def block_ms(self) -> float:
        """Predict the extra time of a step per block."""
        layers = self._row.shape.layers
        whole, half = (self._estimate(layers=count).timing.terms for count in (layers, layers // 2))
        seconds = sum(whole.get(name, 0.0) - half.get(name, 0.0) for name in OF_BLOCKS)
        return 1e3 * seconds / (layers - layers // 2)

    def block_forward_ms(self) -> float:
        """Predict a block's forward time, including collectives of the tensor axis."""
        layout, description = self._row.layout, self._description()
        sums = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("allreduce",)
        nbytes = layout.microbatch * description.tokens * description.width * ITEM_BYTES[layout.computes_in]
        group = span(layout, "tensor", self._cluster)
        regions = sum(product.cut == "inner" for product in description.units[1].products)
        sent_s = regions * sum(collective(one, nbytes, group, self._cluster).seconds for one in sums)
        return 1e3 * (unit_seconds(description.units[1], layout, self._cluster).forward_s + sent_s)

    def stage_ms(self) -> float:
        """Predict the forward and backward time of a micro-batch on an inner stage."""
        return self.stage_forward_ms() + self.stage_input_ms() + self.stage_weight_ms()

    def stage_forward_ms(self) -> float:
        return self._blocks_ms(lambda one: one.forward_s)

    def stage_input_ms(self) -> float:
        return self._blocks_ms(lambda one: one.input_s)

    def stage_weight_ms(self) -> float:
        return self._blocks_ms(lambda one: one.weight_s + one.add_s)

    def _blocks_ms(self, part: Callable[[UnitSeconds], float]) -> float:
        layout, description = self._row.layout, self._description()
        blocks = -(-description.units[1].count // layout.pipeline)  # first and last stage have one less
        return 1e3 * blocks * part(unit_seconds(description.units[1], layout, self._cluster))

    def message_ms(self) -> float:
        layout, description = self._row.layout, self._description()
        nbytes = layout.microbatch * description.tokens * description.width * ITEM_BYTES[layout.computes_in]
        return 1e3 * message(nbytes, layout, "pipeline", self._cluster).seconds

    def memory_gb(self) -> float:
        """Predict the memory of PyTorch's allocator, without driver and libraries."""
        terms = self._estimate().memory.terms
        return sum(nbytes for name, nbytes in terms.items() if name != "reserved") / 1e9

    def parameters_b(self) -> float:
        return self._description().parameters / 1e9

    def mfu_percent(self) -> float:
        """Compute the MFU from predicted operations and the published time."""
        return self._percent(self._estimate().work.model_flops)

    def hfu_percent(self) -> float:
        return self._percent(self._estimate().work.hardware_flops)

    def _percent(self, flops: float) -> float:
        return 100 * flops / (float(self._row.published["step_s"]) * self._estimate().peak_flops)

    def _estimate(self, layout: ParallelLayout | None = None, layers: int = 0) -> PlanEstimate:
        used = layout or self._row.layout
        result = self._known.get((used, layers))
        if result is None:
            batch, simulated = self._row.global_batch, used.pipeline > 1
            result = plan(self._description(layers), used, self._cluster, batch, 1, simulate=simulated)
            self._known[used, layers] = result
        return result

    def _description(self, layers: int = 0) -> ModelDescription:
        shape = self._row.shape
        return describe(replace(shape, layers=layers) if layers else shape, self._row.name)


def _states(table: Table) -> Iterator[Compared]:
    header = table.tree["table"]
    for degree, printed in table.tree["gb"].items():
        cells = iter(printed)
        for name, parameters in zip(header["models"], header["parameters"], strict=True):
            for stage in header["stages"]:
                cell = next(cells)
                identity = {"table": table.key, "row": f"{name}, {stage}, data {degree}", "quantity": "states_gb"}
                gb = states_gb(parameters, stage, int(degree))
                numbers = {"published": float(cell), "predicted": gb, "unit": unit_of(cell)}
                yield Compared(role="test", kind="closed", **identity, **numbers)


def states_gb(parameters: float, stage: str, degree: int) -> float:
    """Return the GB of parameters, gradients and optimizer state per device, for ``degree`` devices."""
    layout = ParallelLayout(data=degree, strategy=stage, precision="float16", main_gradients="working")
    return model_states.states(layout).total * parameters / 1e9


def _bubbles(table: Table) -> Iterator[Compared]:
    header = table.tree["table"]
    for row in table.tree["row"]:
        for schedule, printed in zip(header["schedules"], row["bubbles"], strict=True):
            role = "test" if schedule in header["exact"] else "extra"
            identity = {"table": table.key, "row": f"{row['name']}, {schedule}", "quantity": "bubble"}
            numbers = {"published": float(printed), "predicted": bubble(schedule, row), "unit": unit_of(printed)}
            yield Compared(role=role, kind="bubble", **identity, **numbers)


def bubble(schedule: str, row: Mapping[str, Any]) -> float:
    """Return the bubble of ``schedule`` if all stages take the profiled times of ``row``."""
    ranks, microbatches = row["stages"], row["microbatches"]
    chunks = row["chunks"] if schedule == "interleaved" else 1
    forward, into, weight, message = (milliseconds / chunks for milliseconds in row["profiled_ms"])
    generator = SCHEDULES[schedule]
    place = generator.place([range(unit, unit + 1) for unit in range(ranks * chunks)], ranks)
    rows = [timeline.compact(generator.passes(rank, ranks, microbatches, chunks)) for rank in range(ranks)]
    costs = StepCosts.equal(ranks * chunks, forward, into, weight, link=LinkCost(latency_s=message * chunks))
    result = timeline.simulate_passes(rows, place, costs).bubble
    assert math.isfinite(result)
    return result
