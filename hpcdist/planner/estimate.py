"""Estimate of one layout as data: memory, time, operations, bytes, energy, and a whole run.

Light: dataclasses only. `hpcdist.planner.plan.plan` fills them; reports, comparisons and the search read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpcdist.planner.layout import ParallelLayout

UNPROVEN: Final = "unproven"  # a term of `TimeEstimate`
CORRECTION: Final = "correction"  # a term of `TimeEstimate`
# Published over modelled time of a step with ZeRO-3: least, median, most (`hpcdist.planner.time.exchange`).
ZERO3_RATIOS: Final = (1.26, 1.5, 1.92)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the device that needs most, by what they are.

    Terms: "parameters", "gradients", "optimizer", "activations", "messages", "scratch", "reserved".
    ``rule`` tells how many bytes a parameter takes, and by which formula; ``stage`` is that of the device.
    """

    terms: Mapping[str, float]
    limit_bytes: float
    rule: str
    stage: int = 0

    @property
    def bytes(self) -> float:
        """Sum of the terms."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """Whether the device has so much."""
        return self.bytes <= self.limit_bytes

    @property
    def breaks_first(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Seconds of a step on the critical path, by what they are, which add up to ``step_s``.

    "forward", "backward", "recompute": computation; "tensor", "context", "expert": messages of these axes; "pipeline":
    messages between stages that nothing hides; "bubble"; "data": the exchange of gradients and parameters as far as it
    is exposed; "rows": the sum, once a step, of gradients that sequence parallelism leaves whole on each tensor rank;
    "update"; "input". ``hidden_s`` is the part of the exchange, and of passes round a ring of the context axis, behind
    computation. ``bubble`` is the share as in `hpcdist.strategies.schedule.simulate.timeline`. ``bytes`` are those that
    a device sends in a step, by axis.
    ``algorithms`` tells by which collective most bytes of each axis go.
    ``bucket_bytes`` are those of gradients that an allreduce of the data axis sums at a time, 0 where nothing goes so.
    "correction": the time by which published steps with ZeRO-3 exceed the formulas, at the median (`ZERO3_RATIOS`).
    "unproven": the time up to ``least_s``, a step with the best MFU that was published for such devices.
    """

    terms: Mapping[str, float]
    hidden_s: float
    bubble: float
    bytes: Mapping[str, float]
    algorithms: Mapping[str, str]
    flags: tuple[str, ...] = ()
    bucket_bytes: float = 0.0
    least_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Sum of the terms."""
        return self.least_s if UNPROVEN in self.terms else sum(self.terms.values())

    @property
    def modelled_s(self) -> float:
        """Seconds of a step by the formulas, without the terms "correction" and "unproven"."""
        return sum(seconds for name, seconds in self.terms.items() if name not in (CORRECTION, UNPROVEN))


@dataclass(frozen=True, kw_only=True)
class FlopEstimate:
    """Operations of a step, of all devices: of the model, and of the hardware, which computes some again.

    By the formula of arXiv:2205.05198, appendix A: attention is counted over all pairs, causal or not. ``exact_flops``
    are those of the model with the pairs that are looked at, ``executed_flops`` those of the hardware, which skips the
    others where its kernels do.
    """

    model_flops: float
    hardware_flops: float
    exact_flops: float
    executed_flops: float


@dataclass(frozen=True, kw_only=True)
class StepEnergy:
    """Joules of a step, by what uses them: "devices", "hosts", "network", "cooling" (what PUE adds)."""

    terms: Mapping[str, float]
    device_w: float

    @property
    def joules(self) -> float:
        """Sum of the terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Course of a whole training: ``steps``, with saves and failures. None: not known for this cluster."""

    steps: int
    work_s: float
    wall_s: float
    mtbf_s: float
    failures: float
    save_s: float
    interval_s: float
    slowdown: float
    joules: float
    carbon_g: float | None
    price: float | None
    currency: str


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """Estimate of one layout. ``flags``: extrapolations, assumptions, what hpcdist cannot run."""

    layout: ParallelLayout
    global_batch: int
    tokens: int  # of a step
    parameters: int
    memory: MemoryEstimate
    timing: TimeEstimate
    work: FlopEstimate
    energy: StepEnergy
    run: RunEstimate
    peak_flops: float  # of all devices that compute
    step_range_s: tuple[float, float] | None = None  # least and most seconds of a step, if the step is corrected
    flags: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step, without saves and failures."""
        return self.timing.step_s

    @property
    def modelled_mfu(self) -> float:
        """MFU by the formulas alone."""
        return self.work.model_flops / (self.timing.modelled_s * self.peak_flops)

    @property
    def is_capped(self) -> bool:
        """Whether formulas gave more than the best MFU that was published for such devices."""
        return UNPROVEN in self.timing.terms

    @property
    def mfu(self) -> float:
        """Operations of the model over those that the devices could do meanwhile."""
        return self.work.model_flops / (self.step_s * self.peak_flops)

    @property
    def exact_mfu(self) -> float:
        """MFU with the pairs only that a causal attention looks at: for long contexts about half of attention."""
        return self.work.exact_flops / (self.step_s * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Operations of the hardware, with those done again, over the same."""
        return self.work.hardware_flops / (self.step_s * self.peak_flops)

    @property
    def exact_hfu(self) -> float:
        """HFU with the operations only that are executed."""
        return self.work.executed_flops / (self.step_s * self.peak_flops)
