"""Fit a device: the efficiency curve of matrix products, and the usable fractions of memory bandwidth and FLOP rate.

The fraction for attention is the median of (attention FLOPs / peak FLOP/s) / (measured time). Elementwise operations
take

    seconds = kernels * kernel_s + bytes / (memory bandwidth * memory_share)

Backward has 1.5 times the bytes, and the kernels of both gradients. Both constants minimise the Huber loss of relative
differences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.planner.calibrate.line_fits import weighted_line
from hpcdist.planner.cluster.hardware import ITEM_BYTES, Cluster, EfficiencyCurve
from hpcdist.planner.layout import ParallelLayout
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.stage_split import attention_flops
from hpcdist.planner.time.compute import MOVED_BACK, TILED_BACK, peak_share_of, unit_seconds

KNOTS_PER_OCTAVE: Final = 1
TURNS: Final = 20
HUBER: Final = 0.1  # difference of logarithms above which a point counts less
SMOOTH: Final = 0.05  # weight of the curvature at each knot, needed for knots without points between them
LEAST_SIZES: Final = 3


class MeasuredProduct(NamedTuple):
    """Measured time of one matrix product, of an (m, k) matrix and a (k, n) matrix."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """Number of floating-point operations of the product: 2 m k n."""
        return 2.0 * self.m * self.k * self.n

    @property
    def size(self) -> float:
        """Size of the matrix product, defined as the harmonic mean of m, k and n."""
        return 3.0 / (1.0 / self.m + 1.0 / self.k + 1.0 / self.n)


@dataclass(frozen=True, kw_only=True)
class FittedCurve:
    """Peak FLOP rate and efficiency curve of a device, fitted to measured matrix products."""

    peak_flops: float
    curve: EfficiencyCurve
    unseen: tuple[MeasuredProduct, ...]  # products that the fit did not use
    errors: tuple[float, ...]  # relative errors of the predicted times of ``unseen``

    @property
    def error(self) -> float:
        """Median absolute relative error of the times of ``unseen`` products, or NaN if ``unseen`` is empty."""
        return float(np.median(np.abs(self.errors))) if self.errors else math.nan


def product_seconds(fitted: FittedCurve, product: MeasuredProduct) -> float:
    """Return the time in seconds that the curve ``fitted`` predicts for the matrix product ``product``."""
    return product.flops / (fitted.peak_flops * peak_share_of(fitted.curve, product.size)[0])


def fit_curve(products: Sequence[MeasuredProduct]) -> FittedCurve:
    """Fit an efficiency curve, FLOP rate by size of matrix product, to the measured ``products``.

    Raises UsageError if the products have too few different sizes or an invalid time.
    """
    ordered = sorted(products, key=lambda product: product.size)
    bad = next((product for product in ordered if not (math.isfinite(product.seconds) and product.seconds > 0)), None)
    if bad is not None:
        raise UsageError(
            f"the product of ({bad.m}, {bad.k}) and ({bad.k}, {bad.n}) matrices took {bad.seconds} s, but measured "
            "times must be finite and above 0; measure this product again"
        )
    if len({round(product.size, 6) for product in ordered}) < LEAST_SIZES:
        raise UsageError(
            f"an efficiency curve needs matrix products of at least {LEAST_SIZES} different sizes, but the "
            f"{len(ordered)} measured products have fewer sizes; measure products of more sizes"
        )
    # The smallest and the largest size are fitted: the curve is not extrapolated.
    # Every third product, in order of size, is left out to measure the error. The fit is piecewise linear in the
    # logarithms of size and efficiency, and minimises the Huber loss.
    unseen = tuple(product for number, product in enumerate(ordered) if number % 3 == 1 and number < len(ordered) - 1)
    fitted = [product for product in ordered if product not in unseen]
    peak = max(product.flops / product.seconds for product in ordered)
    curve = _curve(fitted, peak)
    fit = FittedCurve(peak_flops=peak, curve=curve, unseen=unseen, errors=())
    errors = tuple(product_seconds(fit, product) / product.seconds - 1.0 for product in unseen)
    return FittedCurve(peak_flops=peak, curve=curve, unseen=unseen, errors=errors)


def _curve(products: Sequence[MeasuredProduct], peak: float) -> EfficiencyCurve:
    sizes = np.log2([product.size for product in products])
    shares = np.log([product.flops / (product.seconds * peak) for product in products])
    octaves = max(1, round((sizes[-1] - sizes[0]) * KNOTS_PER_OCTAVE))
    knots = np.linspace(sizes[0], sizes[-1], octaves + 1)
    hats = np.array([np.interp(sizes, knots, row) for row in np.eye(len(knots))]).T  # (products, knots)
    # Linear interpolation is a product with hat functions, so the knot values solve a linear least-squares problem. The
    # rows of second differences stabilise knots without a nearby product.
    bends = SMOOTH * np.diff(np.eye(len(knots)), n=2, axis=0)
    weights, values = np.ones(len(products)), np.zeros(len(knots))
    for _ in range(TURNS):
        root = np.sqrt(weights)
        left = np.vstack([hats * root[:, None], bends])
        right = np.concatenate([shares * root, np.zeros(len(bends))])
        values = np.linalg.lstsq(left, right, rcond=None)[0]
        off = np.abs(hats @ values - shares)  # then Huber's weights, as in `line_fits`
        weights = np.where(off <= HUBER, 1.0, HUBER / np.maximum(off, HUBER))
    return EfficiencyCurve(
        sizes=tuple(float(2**knot) for knot in knots),
        shares=tuple(float(min(1.0, math.exp(value))) for value in values),
    )


LEAST_STEPS: Final = 3
LEFT_OUT: Final = 3  # every third measured step is left out
MOST_KERNEL_S: Final = 10e-3
SHARES: Final = (0.01, 1.0)
PRECISION: Final = "float32"  # of the measured steps


class MeasuredStep(NamedTuple):
    """Measured training step: a pair (forward seconds, backward seconds) for each type of operation."""

    description: ModelDescription
    samples: int
    products_s: tuple[float, float]
    attention_s: tuple[float, float]
    elementwise_s: tuple[float, float]

    @property
    def seconds(self) -> float:
        """Measured seconds of forward and backward, summed over all types of operations."""
        return sum((*self.products_s, *self.attention_s, *self.elementwise_s))


@dataclass(frozen=True, kw_only=True)
class FittedShares:
    """Fitted usable fractions of the memory bandwidth and peak FLOP rate of a device, and fitted time per kernel."""

    memory_share: float
    attention_share: float
    kernel_s: float
    errors: tuple[float, ...]  # relative errors of the predicted times of steps that the fit did not use

    @property
    def error(self) -> float:
        """Largest absolute relative error of the predicted step times, or NaN if ``errors`` is empty."""
        return max(map(abs, self.errors), default=math.nan)


def fit_shares(steps: Sequence[MeasuredStep], cluster: Cluster) -> FittedShares:
    """Fit the usable fractions of memory bandwidth and FLOP rate of the device of ``cluster`` to measured ``steps``.

    Raises UsageError for fewer than `LEAST_STEPS` steps.
    """
    if len(steps) < LEAST_STEPS:
        raise UsageError(
            f"fitting memory_share and attention_share of the device needs at least {LEAST_STEPS} measured steps, got "
            f"{len(steps)} steps; measure training steps of more models"
        )
    unseen = steps[LEFT_OUT - 1 :: LEFT_OUT]
    fitted = [step for number, step in enumerate(steps) if number % LEFT_OUT != LEFT_OUT - 1]
    memory_share, kernel_s = _elementwise(fitted, cluster)
    shares: dict[str, Any] = {"memory_share": memory_share, "kernel_s": kernel_s}
    shares["attention_share"] = _attention(fitted, cluster)
    named = replace(cluster, device=replace(cluster.device, **shares))
    return FittedShares(**shares, errors=tuple(predicted_s(step, named) / step.seconds - 1 for step in unseen))


def predicted_s(step: MeasuredStep, cluster: Cluster) -> float:
    """Return the predicted seconds of forward and backward together for ``step`` on a device of ``cluster``."""
    layout = ParallelLayout(microbatch=step.samples, precision=PRECISION)
    times = [(unit.count, unit_seconds(unit, layout, cluster)) for unit in step.description.units]
    return sum(count * (seconds.forward_s + seconds.input_s + seconds.weight_s) for count, seconds in times)


def _attention(steps: Sequence[MeasuredStep], cluster: Cluster) -> float:
    shares = []
    for step in steps:
        flops = step.samples * sum(unit.count * attention_flops(unit, exact=True) for unit in step.description.units)
        for factor, measured_s in zip((1.0, TILED_BACK), step.attention_s, strict=True):
            if flops and measured_s > 0:
                shares.append(factor * flops / (measured_s * cluster.device.peak_flops[PRECISION]))
    if not shares:
        return cluster.device.attention_share
    return float(np.clip(np.median(shares), *SHARES))


def _elementwise(steps: Sequence[MeasuredStep], cluster: Cluster) -> tuple[float, float]:
    rows = []
    for step in steps:
        units = step.description.units
        nbytes = ITEM_BYTES[PRECISION] * step.samples * sum(unit.count * unit.moved for unit in units)
        forward = sum(unit.count * unit.kernels for unit in units)
        # Gradients of inputs and of weights, or only one of them.
        back = sum(unit.count * unit.kernels * (1 + bool(unit.products and not unit.first)) for unit in units)
        for kernels, moved, measured_s in zip(
            (forward, back), (nbytes, MOVED_BACK * nbytes), step.elementwise_s, strict=True
        ):
            if measured_s > 0:
                rows.append((moved / kernels, measured_s / kernels))  # seconds per kernel over bytes per kernel: a line
    if not rows:
        return cluster.device.memory_share, cluster.device.kernel_s
    line, _ = weighted_line(*np.array(rows).T)
    share = 1.0 / (line.s_per_byte * cluster.device.memory_bytes_per_s) if line.s_per_byte else SHARES[1]
    return float(np.clip(share, *SHARES)), min(line.latency_s, MOST_KERNEL_S)
