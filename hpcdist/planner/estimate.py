"""Estimate of one layout: memory, time, FLOPs, traffic, energy, and a whole run. Dataclasses only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpcdist.planner.layout import ParallelLayout

UNPROVEN: Final = "unproven"  # a term of `TimeEstimate`
CORRECTION: Final = "correction"  # a term of `TimeEstimate`
# Published / modelled step time with ZeRO-3 in the six rows of arXiv:2104.04473, table 2: minimum, median, maximum.
ZERO3_RATIOS: Final = (1.26, 1.5, 1.92)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory, in bytes by purpose, of the device with the highest memory use."""

    terms: Mapping[str, float]  # by use: parameters, gradients, optimizer, activations, messages, scratch, reserved
    limit_bytes: float
    rule: str  # formula for the bytes of model states per parameter, as text
    stage: int = 0  # pipeline rank of the device

    @property
    def bytes(self) -> float:
        """Sum of all memory terms of the device, in bytes."""
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        """True if the sum of all memory terms is at most ``limit_bytes``."""
        return self.bytes <= self.limit_bytes

    @property
    def largest_term(self) -> str:
        """Name, such as "activations", of the memory term with the most bytes."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Estimated seconds of a training step, by phase, and bytes sent per device, by axis."""

    # Computation: "forward", "backward", "recompute", "update" (optimizer). Communication that is not hidden: "tensor",
    # "context", "expert", "pipeline" (messages on these axes), "data" (gradients and parameters), "rows" (gradients of
    # norm weights, with sequence parallelism). Waiting: "stragglers" (slower nodes), "bubble" (pipeline idle
    # time), "input" (reading samples). To match publications: "correction" (for ZeRO-3), "unproven" (limits the MFU to
    # the best published MFU).
    terms: Mapping[str, float]
    hidden_s: float  # messages that overlap computation
    bubble: float
    bytes: Mapping[str, float]  # sent per device and step, by axis
    algorithms: Mapping[str, str]  # of the collective with the most bytes, by axis
    flags: tuple[str, ...] = ()
    bucket_bytes: float = 0.0  # gradient bytes per allreduce on the data axis; 0: no allreduce
    least_s: float = 0.0  # step time at the best published MFU

    @property
    def step_s(self) -> float:
        """Estimated seconds of a training step in total."""
        return self.least_s if UNPROVEN in self.terms else sum(self.terms.values())

    @property
    def modelled_s(self) -> float:
        """Seconds of a step without the terms "correction" and "unproven", which match published measurements."""
        return sum(seconds for name, seconds in self.terms.items() if name not in (CORRECTION, UNPROVEN))


@dataclass(frozen=True, kw_only=True)
class FlopEstimate:
    """FLOPs of a training step on all devices, counted in four ways."""

    model_flops: float  # forward and backward
    hardware_flops: float  # also recomputation
    exact_flops: float  # ``model_flops`` without masked query-key pairs
    executed_flops: float  # ``hardware_flops`` without masked pairs that kernels skip


@dataclass(frozen=True, kw_only=True)
class StepEnergy:
    """Energy of a training step on all nodes in joules, by consumer."""

    terms: Mapping[str, float]  # joules of "devices", "hosts", "network" and "cooling"
    device_w: float  # mean power of a device

    @property
    def joules(self) -> float:
        """Sum of the energy of all consumers, in joules."""
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Expected time, energy and price of a run with checkpoints and failures. Unknown values are None."""

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
    """Plan of a training with one layout: estimated memory, time, FLOPs, energy and price."""

    layout: ParallelLayout
    global_batch: int
    tokens: int  # per step
    parameters: int
    memory: MemoryEstimate
    timing: TimeEstimate
    work: FlopEstimate
    energy: StepEnergy
    run: RunEstimate
    peak_flops: float  # of all computing devices
    step_range_s: tuple[float, float] | None = None  # minimum and maximum step time, if the step is corrected
    flags: tuple[str, ...] = ()  # warnings about extrapolations, assumptions and unsupported features

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step, without the time of checkpoints and failures."""
        return self.timing.step_s

    @property
    def modelled_mfu(self) -> float:
        """Model FLOPs utilisation (MFU) for the step time ``timing.modelled_s``, not adjusted to measurements."""
        return self.work.model_flops / (self.timing.modelled_s * self.peak_flops)

    @property
    def is_capped(self) -> bool:
        """True if the plan lowers the MFU to the best MFU published for devices of this type."""
        return UNPROVEN in self.timing.terms

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: model FLOPs / (step time * peak FLOP rate)."""
        return self.work.model_flops / (self.step_s * self.peak_flops)

    @property
    def exact_mfu(self) -> float:
        """MFU without the FLOPs of query-key pairs that the attention mask hides."""
        return self.work.exact_flops / (self.step_s * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation (HFU): (FLOPs with recomputation) / (step time * peak FLOP rate)."""
        return self.work.hardware_flops / (self.step_s * self.peak_flops)

    @property
    def exact_hfu(self) -> float:
        """HFU without the FLOPs of the masked query-key pairs that attention kernels do not compute."""
        return self.work.executed_flops / (self.step_s * self.peak_flops)
