"""Non-negative least squares from sums that can be collected piece by piece, with standard errors.

    minimise |A x - y|^2  over x >= 0,   known by  gram = A^T A,  right = A^T y,  square = y^T y  and the rows of A

The active set method of C. Lawson and R. Hanson, Solving Least Squares Problems, 1974, chapter 23, in the form of
R. Bro and S. de Jong, J. Chemometrics 11, 1997, which needs no more than these sums. Watts are not negative.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

MAX_ROUNDS: Final = 30  # per unknown; a problem that is not degenerate takes about one
TOLERANCE: Final = 1e-12


@dataclass(frozen=True)
class NnlsSolution:
    """``values`` (n,) and their ``covariance`` (n, n), which forgets that they cannot be negative: an upper bound."""

    values: np.ndarray
    covariance: np.ndarray


def solve(
    gram: np.ndarray, right: np.ndarray, square: float, rows: float, penalty: np.ndarray | None = None
) -> NnlsSolution:
    """Return the solution. ``penalty`` (n, n), positive semidefinite, is added to ``gram`` for what ``A`` leaves open.

    ``rows`` is the number of independent ones: fewer than those of A, where these overlap.
    """
    whole = gram if penalty is None else gram + penalty
    scale = 1 / np.sqrt(np.maximum(np.diag(whole), np.finfo(np.float64).tiny))
    scaled, target = whole * np.outer(scale, scale), right * scale
    values = _active_set(scaled, target) * scale
    inverse = np.linalg.pinv(scaled, rcond=TOLERANCE, hermitian=True) * np.outer(scale, scale)
    left = max(0.0, square - 2 * values @ right + values @ gram @ values)
    used = min(float(np.trace(inverse @ gram)), rows - 1)
    variance = left / (rows - used) if rows > 1 else np.inf
    return NnlsSolution(values, inverse @ gram @ inverse * variance if np.isfinite(variance) else inverse * np.inf)


def _active_set(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    free = np.linalg.lstsq(gram, right, rcond=TOLERANCE)[0]
    if free.min(initial=0.0) >= 0:
        return np.asarray(free)
    values, passive = np.zeros_like(right), np.zeros(len(right), bool)
    slack = TOLERANCE * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(MAX_ROUNDS * len(right)):
        slope = np.where(passive, -np.inf, right - gram @ values)
        if slope.max() <= slack:
            break
        passive[slope.argmax()] = True
        while True:
            wanted = np.zeros_like(values)
            wanted[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], right[passive], rcond=TOLERANCE)[0]
            blocked = passive & (wanted <= 0)
            if not blocked.any():
                break
            # As far as nobody becomes negative; who gets to zero stays there.
            way = np.min(values[blocked] / np.maximum(values[blocked] - wanted[blocked], TOLERANCE))
            values = values + way * (wanted - values)
            passive &= values > TOLERANCE * max(1.0, float(values.max()))
            values[~passive] = 0.0
        values = wanted
    return values
