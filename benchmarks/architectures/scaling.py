"""Scaling of an architecture: the best layout for every number of devices, its losses, and the scaling limit.

An architecture is a rule that connects replicas and parts of a model. For each device count the fastest layout that
fits is taken: micro-batch, recomputation, depth, tensor ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from benchmarks.architectures.catalogue import ARCHITECTURES, COUNTS, MICROBATCHES, RECOMPUTE, Architecture, Scenario
from hpcdist.errors import HpcdistError
from hpcdist.planner import checks
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model import transformer
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.search.space import divisors
from hpcdist.planner.time.exchange import exchange

STEPS: Final = 10_000_000  # steps of a run: many saves and failures
ROOM: Final = 0.95  # usable share of the memory: a plan does not count everything
SAME: Final = 0.999  # a layout counts as faster only below this share of the time
STUCK: Final = 100.0  # ratio of wall time to step time above which a run makes no progress
STATES: Final = ("parameters", "gradients", "optimizer")
PARTS: Final = ("computing", "recompute", "servers", "tensor", "bubble", "bandwidth", "latency", "update", "failures")


class Point(NamedTuple):
    """The best layout of an architecture for a device count, or the ``reason`` why none fits (``estimate`` is None).

    ``losses`` are all device-seconds per sample by cause, including saves and failures.
    """

    devices: int
    samples: int
    estimate: PlanEstimate | None
    reason: str
    least_bytes: float  # memory of the layout that needs the least, even if it does not fit
    losses: dict[str, float]
    server_bytes: float = 0.0

    @property
    def goodput(self) -> float:
        """Samples per second, including saves and failures, or 0."""
        return self.samples / (self.estimate.step_s * self.estimate.run.slowdown) if self.estimate else 0.0

    @property
    def joules(self) -> float:
        """Joules per sample, including saves and failures, or NaN."""
        return self.estimate.run.joules / (STEPS * self.samples) if self.estimate else float("nan")

    @property
    def sent_bytes(self) -> float:
        """Bytes that a worker sends per step over all axes, or NaN."""
        return sum(self.estimate.timing.bytes.values()) if self.estimate else float("nan")

    @property
    def states_bytes(self) -> float:
        """Bytes of model states on the device with the highest memory use, or NaN."""
        return sum(self.estimate.memory.terms.get(name, 0.0) for name in STATES) if self.estimate else float("nan")


def best(
    architecture: Architecture, devices: int, samples: int, description: ModelDescription, cluster: Cluster
) -> Point:
    result: PlanEstimate | None = None
    least, reasons = float("inf"), dict[str, None]()
    for layout in _candidates(architecture, devices, samples):
        if samples < layout.data:
            reasons.setdefault("batch")
            continue
        batch = _whole(layout, samples)
        problem = next(iter(checks.shape_problems(description, layout, cluster, batch)), None)
        if problem is not None:
            reasons.setdefault(problem.limit)
            continue
        try:
            memory_estimate = memory(description, layout, cluster, batch)
            least = min(least, memory_estimate.bytes)
            if memory_estimate.bytes > ROOM * memory_estimate.limit_bytes:
                reasons.setdefault("memory")
                continue
            estimate = plan(description, layout, cluster, batch, STEPS, limit_bytes=ROOM * memory_estimate.limit_bytes)
        except HpcdistError as error:  # a schedule that is invalid for this number of micro-batches
            reasons.setdefault(str(error))
            continue
        # Recomputation or smaller micro-batches that only hide messages equally well are not better.
        if result is None or estimate.run.wall_s < SAME * result.run.wall_s:
            result = estimate
    if result is not None and result.run.slowdown > STUCK:
        return Point(devices, samples, None, "failures", least, {})
    if result is None:
        reason = "memory" if "memory" in reasons else next(iter(reasons), "no layout")
        return Point(devices, samples, None, reason, least, {})
    server_nbytes = exchange(description.parameters, result.layout, cluster, 0.0).server_nbytes
    return Point(devices, samples, result, "", least, losses(result, samples, description, cluster), server_nbytes)


def _candidates(architecture: Architecture, devices: int, samples: int) -> Iterator[ParallelLayout]:
    for grid in architecture.grids(devices):
        replica_samples = -(-samples // max(1, grid.data))
        for microbatch in sorted({*MICROBATCHES, *divisors(replica_samples)}, reverse=True):
            if microbatch <= min(replica_samples, MICROBATCHES[0]):
                for recompute in RECOMPUTE:
                    yield replace(grid, microbatch=microbatch, recompute=recompute)


def _whole(layout: ParallelLayout, samples: int) -> int:
    """Return the samples of a step in which every replica has as many full micro-batches as the largest replica.

    This allows worker counts that do not divide the batch, such as 7 of 8 devices; all wait for the largest.
    """
    return layout.data * layout.microbatch * layout.microbatches(samples)


def losses(estimate: PlanEstimate, samples: int, description: ModelDescription, cluster: Cluster) -> dict[str, float]:
    """Return the device-seconds per sample for computing and for each loss.

    "latency" is the exchange time saved if messages started instantly; the other exchange time is "bandwidth".
    "servers" is the time of devices that serve while others compute.
    """
    layout, terms = estimate.layout, estimate.timing.terms
    flat = replace(cluster, levels=tuple(replace(level, latency_s=0.0) for level in cluster.levels))
    bandwidth_s = plan(description, layout, flat, estimate.global_batch, STEPS).timing.terms["data"]
    device_share = layout.devices / samples
    workers = layout.devices - layout.servers
    computing = terms["forward"] + terms["backward"]
    step_s = estimate.step_s
    return {
        "computing": computing * workers / samples,
        "recompute": terms["recompute"] * device_share,
        "servers": computing * layout.servers / samples,
        "tensor": (terms["tensor"] + terms["context"] + terms["expert"] + terms["rows"]) * device_share,
        "bubble": (terms["bubble"] + terms["pipeline"]) * device_share,
        "bandwidth": bandwidth_s * device_share,
        "latency": (terms["data"] - bandwidth_s) * device_share,
        "update": (terms["update"] + terms["input"]) * device_share,
        "failures": step_s * (estimate.run.slowdown - 1) * device_share,
    }


class Stop(NamedTuple):
    """The device count at which an architecture stops scaling, and the reason.

    ``first`` is the least count with a layout, or 0; ``last`` is the largest to which doubling gave `GAIN` times the
    goodput, or ``first``; ``half`` is the largest with half of the ideal goodput per device. ``reason`` is the loss
    that grew most after ``last``, or the limit there. ``lost`` is the largest loss after ``half``, or the limit there.
    Both are "" at the end of the range.
    """

    first: int
    last: int
    half: int
    best: int  # the count with the highest goodput
    reason: str
    share: float  # share of ``reason`` in the growth of all losses
    lost: str


GAIN: Final = 1.5


def stop(points: list[Point], ideal: float) -> Stop:
    """Find the count at which ``points`` stop scaling; ``ideal`` in samples/s per device."""
    feasible = [point for point in points if point.goodput]
    if not feasible:
        reasons = [point.reason for point in points]
        reason = "memory" if "memory" in reasons else reasons[-1]
        return Stop(0, 0, 0, 0, reason, 1.0, reason)
    half = max((point.devices for point in feasible if point.goodput >= 0.5 * ideal * point.devices), default=0)
    beyond = next((point for point in points if point.devices > half and point.devices >= feasible[0].devices), None)
    lost = "" if beyond is None else _lost(beyond, ideal)
    most = max(feasible, key=lambda point: point.goodput).devices
    stop_index = first = points.index(feasible[0])
    for later in range(first + 1, len(points)):
        if 0 < GAIN * points[later - 1].goodput <= points[later].goodput:
            stop_index = later
    stop_point = points[stop_index]
    if stop_index + 1 == len(points):
        return Stop(feasible[0].devices, stop_point.devices, half, most, "", 0.0, lost)
    after = points[stop_index + 1]
    if not after.goodput:
        return Stop(feasible[0].devices, stop_point.devices, half, most, after.reason, 1.0, lost)
    growth = {name: after.losses[name] - stop_point.losses[name] for name in after.losses}
    name = max(growth, key=lambda loss: growth[loss])
    whole = sum(grown for grown in growth.values() if grown > 0)
    return Stop(feasible[0].devices, stop_point.devices, half, most, name, growth[name] / whole, lost)


def _lost(point: Point, ideal: float) -> str:
    if not point.goodput:
        return point.reason
    extra = {**point.losses, "computing": point.losses["computing"] - 1 / ideal}
    return max(extra, key=lambda loss: extra[loss])


@dataclass(frozen=True)
class Found:
    """Results of a scenario: points and stop by architecture; ``ideal`` in samples/s per device."""

    scenario: Scenario
    points: dict[str, list[Point]]
    stops: dict[str, Stop]
    ideal: float

    def efficiency(self, point: Point) -> float:
        return point.goodput / point.devices / self.ideal


def study(scenario: Scenario, cluster: Cluster, counts: tuple[int, ...] = COUNTS) -> Found:
    """Plan every architecture on ``cluster``. The best goodput per device of any architecture and count is the ideal.

    Corrections and limits of a calibrated cluster are not applied: the study compares the formulas.
    """
    cluster = replace(cluster, calibrated="formulas alone")
    network, description = scenario.on(cluster), describe(transformer.named(scenario.model), scenario.model)
    points = {
        architecture.name: [
            best(architecture, devices, scenario.samples(devices), description, network) for devices in counts
        ]
        for architecture in ARCHITECTURES
    }
    ideal = max(point.goodput / point.devices for line in points.values() for point in line)
    return Found(scenario, points, {name: stop(line, ideal) for name, line in points.items()}, ideal)


def said(layout: ParallelLayout) -> str:
    parts = [f"data {layout.data}"]
    for name in ("tensor", "pipeline", "servers"):
        degree = getattr(layout, name)
        parts += [f"{name} {degree}"] * (degree > (name != "servers"))
    if layout.pipeline > 1:
        parts.append(layout.schedule)
    parts += [layout.strategy, f"micro-batch {layout.microbatch}"]
    if layout.recompute != "none":
        parts.append(f"{layout.recompute} recompute")
    if layout.compression != "none":
        parts.append(layout.compression)
    return ", ".join([*parts, f"{layout.library} {layout.algorithm}"])
