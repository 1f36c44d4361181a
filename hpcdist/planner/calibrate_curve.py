"""The efficiency curve of a device from measured products of matrices: which share of its peak it reaches, by size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.planner.cluster import Curve
from hpcdist.planner.compute import share_of

KNOTS_PER_OCTAVE: Final = 1
TURNS: Final = 20
HUBER: Final = 0.1  # difference of logarithms from which on a point counts less
SMOOTH: Final = 0.05  # weight of the bend of the curve at each knot: two knots without a point between them need it
LEAST_SIZES: Final = 3


class Product(NamedTuple):
    """A product of (m, k) and (k, n) that took ``seconds``."""

    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """Its operations: 2 for each multiplication and addition."""
        return 2.0 * self.m * self.k * self.n

    @property
    def size(self) -> float:
        """The harmonic mean of its extents, as `hpcdist.planner.cluster.Curve` has it."""
        return 3.0 / (1.0 / self.m + 1.0 / self.k + 1.0 / self.n)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A curve beside its peak; ``errors`` are relative, of the seconds of the products in ``unseen``."""

    peak_flops: float
    curve: Curve
    unseen: tuple[Product, ...]
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median of the absolute errors of products that were not fitted; NaN where there was none."""
        return float(np.median(np.abs(self.errors))) if self.errors else math.nan


def share(curve: Curve, size: float) -> float:
    """Return the share at ``size``, as a plan takes it."""
    return share_of(curve, size)[0]


def seconds(fitted: Fitted, product: Product) -> float:
    """Return what the curve says that ``product`` takes."""
    return product.flops / (fitted.peak_flops * share(fitted.curve, product.size))


def fit(products: Sequence[Product], *, peak_flops: float = 0.0) -> Fitted:
    """Return the curve through products; every third size is left out, and tells the error.

    ``peak_flops`` is that of the data sheet; 0: the fastest of the products. The curve has knots an octave apart, and
    the logarithms of its shares have the least Huber loss to those measured. Raises UsageError for fewer than
    `LEAST_SIZES` sizes.
    """
    ordered = sorted(products, key=lambda one: one.size)
    bad = next((one for one in ordered if not (math.isfinite(one.seconds) and one.seconds > 0)), None)
    if bad is not None:
        raise UsageError(f"a product of ({bad.m}, {bad.k}) and ({bad.k}, {bad.n}) took {bad.seconds} s; measure again")
    if len({round(one.size, 6) for one in ordered}) < LEAST_SIZES:
        raise UsageError(f"a curve needs products of {LEAST_SIZES} sizes, got {len(ordered)} products; measure more")
    unseen = tuple(one for number, one in enumerate(ordered) if number % 3 == 1 and number < len(ordered) - 1)
    kept = [one for one in ordered if one not in unseen]
    peak = peak_flops or max(one.flops / one.seconds for one in ordered)
    curve = _curve(kept, peak)
    found = Fitted(peak_flops=peak, curve=curve, unseen=unseen, errors=())
    errors = tuple(seconds(found, one) / one.seconds - 1.0 for one in unseen)
    return Fitted(peak_flops=peak, curve=curve, unseen=unseen, errors=errors)


def _curve(products: Sequence[Product], peak: float) -> Curve:
    """Return the curve with the least loss."""
    sizes = np.log2([one.size for one in products])
    shares = np.log([one.flops / (one.seconds * peak) for one in products])
    octaves = max(1, round((sizes[-1] - sizes[0]) * KNOTS_PER_OCTAVE))
    knots = np.linspace(sizes[0], sizes[-1], octaves + 1)
    hats = np.array([np.interp(sizes, knots, row) for row in np.eye(len(knots))]).T  # (products, knots)
    bends = SMOOTH * np.diff(np.eye(len(knots)), n=2, axis=0)
    weights, values = np.ones(len(products)), np.zeros(len(knots))
    for _ in range(TURNS):
        root = np.sqrt(weights)
        left = np.vstack([hats * root[:, None], bends])
        right = np.concatenate([shares * root, np.zeros(len(bends))])
        values = np.linalg.lstsq(left, right, rcond=None)[0]
        off = np.abs(hats @ values - shares)
        weights = np.where(off <= HUBER, 1.0, HUBER / np.maximum(off, HUBER))
    return Curve(
        sizes=tuple(float(2**knot) for knot in knots),
        shares=tuple(float(min(1.0, math.exp(value))) for value in values),
    )
