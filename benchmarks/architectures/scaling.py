"""Scaling of an architecture: its best layout on every number of devices, what that loses time to, where it stops.

An architecture is a rule of how replicas and parts of a model are joined; within it the fastest layout that fits is
taken: micro-batch, recomputation, depth, tensor ranks. So a curve is the best that an architecture can do, not one run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from benchmarks.architectures.catalogue import ARCHITECTURES, COUNTS, MICROBATCHES, RECOMPUTE, Architecture, Scenario
from hpcdist.errors import HpcdistError
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.limits import checks
from hpcdist.planner.memory.device import memory
from hpcdist.planner.model import transformer
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.transformer import describe
from hpcdist.planner.plan import plan
from hpcdist.planner.search.space import divisors
from hpcdist.planner.time.exchange import exchange

STEPS: Final = 10_000_000  # of a run: many saves and failures
ROOM: Final = 0.95  # of the memory: the rest is for what a plan does not see
SAME: Final = 0.999  # of the time: what is not faster than this is no better
STUCK: Final = 100.0  # wall time over steps: a run that does not get on
STATES: Final = ("parameters", "gradients", "optimizer")
PARTS: Final = ("computing", "recompute", "servers", "tensor", "bubble", "bandwidth", "latency", "update", "failures")


class Point(NamedTuple):
    """The best of an architecture on so many devices; ``estimate`` is None where there is none, for a ``reason``.

    ``losses`` are device-seconds for each sample, by what they are spent on; all of them, saves and failures included.
    """

    devices: int
    samples: int
    estimate: PlanEstimate | None
    reason: str
    least_bytes: float  # of memory, of the layout that needs least, whether it fits or not
    losses: dict[str, float]
    server_bytes: float = 0.0

    @property
    def goodput(self) -> float:
        """Samples a second, saves and failures included; 0 where there is no estimate."""
        return self.samples / (self.estimate.step_s * self.estimate.run.slowdown) if self.estimate else 0.0

    @property
    def joules(self) -> float:
        """Of a sample, saves and failures included; NaN where there is no estimate."""
        return self.estimate.run.joules / (STEPS * self.samples) if self.estimate else float("nan")

    @property
    def sent_bytes(self) -> float:
        """Of a device that computes, over all axes, in a step."""
        return sum(self.estimate.timing.bytes.values()) if self.estimate else float("nan")

    @property
    def states_bytes(self) -> float:
        """Of the fullest device: parameters, gradients and what the optimizer keeps."""
        return sum(self.estimate.memory.terms.get(name, 0.0) for name in STATES) if self.estimate else float("nan")


def best(
    architecture: Architecture, devices: int, samples: int, description: ModelDescription, cluster: Cluster
) -> Point:
    """Return the fastest layout that fits."""
    found: PlanEstimate | None = None
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
            needs = memory(description, layout, cluster, batch)
            least = min(least, needs.bytes)
            if needs.bytes > ROOM * needs.limit_bytes:
                reasons.setdefault("memory")
                continue
            estimate = plan(description, layout, cluster, batch, STEPS, limit_bytes=ROOM * needs.limit_bytes)
        except HpcdistError as error:  # a schedule that cannot be, for so many micro-batches
            reasons.setdefault(str(error))
            continue
        # Computing again, or in small pieces, hides messages as well as not, and is no better for that.
        if found is None or estimate.run.wall_s < SAME * found.run.wall_s:
            found = estimate
    if found is not None and found.run.slowdown > STUCK:
        return Point(devices, samples, None, "failures", least, {})
    if found is None:
        reason = "memory" if "memory" in reasons else next(iter(reasons), "no layout")
        return Point(devices, samples, None, reason, least, {})
    served = exchange(description.parameters, found.layout, cluster, 0.0).server_nbytes
    return Point(devices, samples, found, "", least, losses(found, samples, description, cluster), served)


def _candidates(architecture: Architecture, devices: int, samples: int) -> Iterator[ParallelLayout]:
    for grid in architecture.grids(devices):
        each = -(-samples // max(1, grid.data))
        for microbatch in sorted({*MICROBATCHES, *divisors(each)}, reverse=True):
            if microbatch <= min(each, MICROBATCHES[0]):
                for recompute in RECOMPUTE:
                    yield replace(grid, microbatch=microbatch, recompute=recompute)


def _whole(layout: ParallelLayout, samples: int) -> int:
    """Return the samples of a step if all replicas had as many whole micro-batches as the one that has most.

    So workers beside dedicated servers may be 7 of 8: all wait for those that have a sample more.
    """
    return layout.data * layout.microbatch * layout.microbatches(samples)


def losses(estimate: PlanEstimate, samples: int, description: ModelDescription, cluster: Cluster) -> dict[str, float]:
    """Return device-seconds a sample: what computes, and what each of the rest takes.

    "latency" of the data axis is what the same layout would not wait for if messages took no time to begin; the rest of
    its exchange is "bandwidth". "servers" are devices that serve while others compute.
    """
    layout, terms = estimate.layout, estimate.timing.terms
    flat = replace(cluster, levels=tuple(replace(level, latency_s=0.0) for level in cluster.levels))
    prompt = plan(description, layout, flat, estimate.global_batch, STEPS).timing.terms["data"]
    each = layout.devices / samples
    workers = layout.devices - layout.servers
    computing = terms["forward"] + terms["backward"]
    step_s = estimate.step_s
    return {
        "computing": computing * workers / samples,
        "recompute": terms["recompute"] * each,
        "servers": computing * layout.servers / samples,
        "tensor": (terms["tensor"] + terms["context"] + terms["expert"] + terms["rows"]) * each,
        "bubble": (terms["bubble"] + terms["pipeline"]) * each,
        "bandwidth": prompt * each,
        "latency": (terms["data"] - prompt) * each,
        "update": (terms["update"] + terms["input"]) * each,
        "failures": step_s * (estimate.run.slowdown - 1) * each,
    }


class Stop(NamedTuple):
    """Where an architecture stops scaling, and why.

    ``first`` is the least count with a layout, ``last`` the last one to which doubling gave `GAIN` times the goodput,
    or ``first``; 0 where nothing fits. ``reason`` is what grew most in the doubling after ``last``, or what makes that
    impossible; "" at the end of the range. ``half`` is the last count with half of the ideal goodput a device, and
    ``lost`` what takes most beside the ideal computation behind it, or what makes that impossible; "" as above.
    """

    first: int
    last: int
    half: int
    best: int  # the count with the most goodput
    reason: str
    share: float  # of the growth that the reason has
    lost: str


GAIN: Final = 1.5


def stop(points: list[Point], ideal: float) -> Stop:
    """Return where the curve of ``points`` stops; ``ideal`` samples a second and device."""
    able = [point for point in points if point.goodput]
    if not able:
        reasons = [point.reason for point in points]
        reason = "memory" if "memory" in reasons else reasons[-1]
        return Stop(0, 0, 0, 0, reason, 1.0, reason)
    half = max((point.devices for point in able if point.goodput >= 0.5 * ideal * point.devices), default=0)
    behind = next((point for point in points if point.devices > half and point.devices >= able[0].devices), None)
    lost = "" if behind is None else _lost(behind, ideal)
    most = max(able, key=lambda point: point.goodput).devices
    place = first = points.index(able[0])
    for later in range(first + 1, len(points)):
        if 0 < GAIN * points[later - 1].goodput <= points[later].goodput:
            place = later
    here = points[place]
    if place + 1 == len(points):
        return Stop(able[0].devices, here.devices, half, most, "", 0.0, lost)
    after = points[place + 1]
    if not after.goodput:
        return Stop(able[0].devices, here.devices, half, most, after.reason, 1.0, lost)
    growth = {name: after.losses[name] - here.losses[name] for name in after.losses}
    name = max(growth, key=lambda each: growth[each])
    whole = sum(grown for grown in growth.values() if grown > 0)
    return Stop(able[0].devices, here.devices, half, most, name, growth[name] / whole, lost)


def _lost(point: Point, ideal: float) -> str:
    if not point.goodput:
        return point.reason
    more = {**point.losses, "computing": point.losses["computing"] - 1 / ideal}
    return max(more, key=lambda part: more[part])


@dataclass(frozen=True)
class Found:
    """All of a scenario: points and stop of each architecture by its name; ``ideal`` samples a second and device."""

    scenario: Scenario
    points: dict[str, list[Point]]
    stops: dict[str, Stop]
    ideal: float

    def efficiency(self, point: Point) -> float:
        """Return the goodput of a device over the ideal one."""
        return point.goodput / point.devices / self.ideal


def study(scenario: Scenario, cluster: Cluster, counts: tuple[int, ...] = COUNTS) -> Found:
    """Return what each architecture does on ``cluster``; ideal is the best of all of them, on any number of devices.

    The study compares the formulas: plans on a calibrated cluster are neither corrected nor limited.
    """
    cluster = replace(cluster, calibrated="formulas alone")
    there, description = scenario.on(cluster), describe(transformer.named(scenario.model), scenario.model)
    points = {
        one.name: [best(one, devices, scenario.samples(devices), description, there) for devices in counts]
        for one in ARCHITECTURES
    }
    ideal = max(point.goodput / point.devices for line in points.values() for point in line)
    return Found(scenario, points, {name: stop(line, ideal) for name, line in points.items()}, ideal)


def said(layout: ParallelLayout) -> str:
    """Return a layout in a few words."""
    words = [f"data {layout.data}"]
    for name in ("tensor", "pipeline", "servers"):
        degree = getattr(layout, name)
        words += [f"{name} {degree}"] * (degree > (name != "servers"))
    if layout.pipeline > 1:
        words.append(layout.schedule)
    words += [layout.strategy, f"micro-batch {layout.microbatch}"]
    if layout.recompute != "none":
        words.append(f"{layout.recompute} recompute")
    if layout.compression != "none":
        words.append(layout.compression)
    return ", ".join([*words, f"{layout.library} {layout.algorithm}"])
