"""Shares of memory bandwidth and of attention, and the time of a kernel, from the operations of measured steps.

Attention's share of the peak is the median, over steps and both ways, of what its pairs ask for over what they took.
Elementwise operations take

    kernels kernel_s + bytes / (memory bandwidth memory_share)

forward, and back with half as many bytes more and kernels for both gradients: two constants, in the least squares of
relative differences, with Huber's weights. Numbers, pairs and kernels are those of `hpcdist.planner.description`, so
that `hpcdist.planner.compute`, which multiplies with the same, gives back what was measured. How far it is off for a
whole step, products included, is told of steps that were left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.planner.calibrate import weighted_line
from hpcdist.planner.cluster import ITEM_BYTES, Cluster
from hpcdist.planner.compute import MOVED_BACK, TILED_BACK, unit_seconds
from hpcdist.planner.description import Description
from hpcdist.planner.layout import Layout
from hpcdist.planner.work import attention_flops

LEAST_STEPS: Final = 3
LEFT_OUT: Final = 3  # every third measured step is not fitted
MOST_KERNEL_S: Final = 10e-3
SHARES: Final = (0.01, 1.0)


class Step(NamedTuple):
    """The seconds of a micro-batch of ``samples``, forward and back, by kinds of operation."""

    description: Description
    samples: int
    products_s: tuple[float, float]
    attention_s: tuple[float, float]
    elementwise_s: tuple[float, float]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum((*self.products_s, *self.attention_s, *self.elementwise_s))


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The constants; ``errors`` are relative, of steps that were not fitted, ``products`` of the curve in all steps."""

    memory_share: float
    attention_share: float
    kernel_s: float
    errors: tuple[float, ...]
    products: tuple[float, ...]

    @property
    def error(self) -> float:
        """The largest absolute error; NaN where there was none."""
        return max(map(abs, self.errors), default=math.nan)


def fit(steps: Sequence[Step], cluster: Cluster, precision: str = "float32") -> Shares:
    """Return the constants for the device of ``cluster``, whose peak, curve and bandwidth are known (local).

    Raises UsageError for fewer than `LEAST_STEPS` steps.
    """
    if len(steps) < LEAST_STEPS:
        raise UsageError(f"shares need {LEAST_STEPS} measured steps, got {len(steps)}; measure more models")
    unseen = steps[LEFT_OUT - 1 :: LEFT_OUT]
    fitted = [one for number, one in enumerate(steps) if number % LEFT_OUT != LEFT_OUT - 1]
    memory_share, kernel_s = _elementwise(fitted, cluster, precision)
    found = replace(
        cluster.device,
        memory_share=memory_share,
        attention_share=_attention(fitted, cluster, precision),
        kernel_s=kernel_s,
    )
    named = replace(cluster, device=found)
    return Shares(
        memory_share=found.memory_share,
        attention_share=found.attention_share,
        kernel_s=found.kernel_s,
        errors=tuple(predicted_s(one, named, precision) / one.seconds - 1 for one in unseen),
        products=tuple(products_s(one, named, precision) / sum(one.products_s) - 1 for one in steps),
    )


def predicted_s(step: Step, cluster: Cluster, precision: str = "float32") -> float:
    """Return what the planner says of ``step``: forward and back of its units (local)."""
    layout = Layout(microbatch=step.samples, precision=precision)
    found = [(unit.count, unit_seconds(unit, layout, cluster)) for unit in step.description.units]
    return sum(count * (one.forward_s + one.input_s + one.weight_s) for count, one in found)


def products_s(step: Step, cluster: Cluster, precision: str = "float32") -> float:
    """Return what the planner says of the products of ``step`` alone, forward and back (local)."""
    bare = [replace(unit, attention=None, moved=0.0, moved_cut=0.0, kernels=0) for unit in step.description.units]
    return predicted_s(step._replace(description=replace(step.description, units=tuple(bare))), cluster, precision)


def _attention(steps: Sequence[Step], cluster: Cluster, precision: str) -> float:
    shares = []
    for step in steps:
        flops = step.samples * sum(unit.count * attention_flops(unit, exact=True) for unit in step.description.units)
        for factor, took in zip((1.0, TILED_BACK), step.attention_s, strict=True):
            if flops and took > 0:
                shares.append(factor * flops / (took * cluster.device.peak_flops[precision]))
    if not shares:
        return cluster.device.attention_share
    return float(np.clip(np.median(shares), *SHARES))


def _elementwise(steps: Sequence[Step], cluster: Cluster, precision: str) -> tuple[float, float]:
    """Return the share of the memory's bandwidth, and the time of a kernel."""
    rows = []
    for step in steps:
        units = step.description.units
        nbytes = ITEM_BYTES[precision] * step.samples * sum(unit.count * unit.moved for unit in units)
        forward = sum(unit.count * unit.kernels for unit in units)
        # Gradients of inputs and of weights, but where only one of them is asked for.
        back = sum(unit.count * unit.kernels * (1 + bool(unit.products and not unit.first)) for unit in units)
        for kernels, moved, took in zip(
            (forward, back), (nbytes, MOVED_BACK * nbytes), step.elementwise_s, strict=True
        ):
            if took > 0:
                rows.append((moved / kernels, took / kernels))
    if not rows:
        return cluster.device.memory_share, cluster.device.kernel_s
    line = weighted_line(*np.array(rows).T)
    share = 1.0 / (line.s_per_byte * cluster.device.memory_bytes_per_s) if line.s_per_byte else SHARES[1]
    return float(np.clip(share, *SHARES)), min(line.latency_s, MOST_KERNEL_S)
