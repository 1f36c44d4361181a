"""What the ranks of a node did between two moments: spans without overlaps, and shares of phases. Pure."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from hpcdist.comm.spanfile import PHASES, STEP
from hpcdist.comm.spans import CAPACITY

IDLE: Final = "idle"  # what no span covers
NAMES: Final = (*PHASES[:STEP], IDLE)
GRID_NS: Final = 1_000_000
MOST_POINTS: Final = 200_000

assert len(PHASES) - 1 == STEP


def flattened(spans: np.ndarray) -> np.ndarray:
    """Return ``spans`` (n, 3) of phase, begin and end in order and without overlaps: what began later is inside."""
    spans = spans[np.argsort(spans[:, 1], kind="stable")]
    spans = spans[spans[:, 2] > spans[:, 1]]
    if np.all(spans[1:, 1] >= spans[:-1, 2]):
        return spans
    edges = np.unique(spans[:, 1:])
    owner = np.full(len(edges) - 1, -1)
    first, last = np.searchsorted(edges, spans[:, 1]), np.searchsorted(edges, spans[:, 2])
    for index, (start, stop) in enumerate(zip(first, last, strict=True)):
        owner[start:stop] = index
    held = owner >= 0
    return np.stack([spans[owner[held], 0], edges[:-1][held], edges[1:][held]], axis=1)


class Rank:
    """What is known of one rank: disjoint spans, and until when."""

    def __init__(self) -> None:
        self.spans = np.empty((0, 3), np.int64)
        self._by_code: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]] = []
        self.since_ns: int | None = None  # before, some spans are missing
        self.until_ns: int | None = None

    def add(self, spans: np.ndarray) -> None:
        """Take spans (n, 3) that ended since the last call."""
        if not len(spans):
            return
        if len(spans) >= CAPACITY or self.since_ns is None:
            self.since_ns = int(spans[:, 1].min())
        self.until_ns = max(int(spans[:, 2].max()), self.until_ns or 0)
        self._replace(flattened(np.concatenate([self.spans, spans])))

    def forget(self, before_ns: int) -> None:
        """Let go what ended before."""
        self._replace(self.spans[self.spans[:, 2] > before_ns])

    def _replace(self, spans: np.ndarray) -> None:
        self.spans, self._by_code = spans, []
        for code in np.unique(spans[:, 0]):
            begins, ends = spans[spans[:, 0] == code, 1:].T
            self._by_code.append((int(code), begins.copy(), ends.copy(), np.append(0, np.cumsum(ends - begins))))

    def seconds(self, moments_ns: np.ndarray) -> np.ndarray:
        """Return the seconds of each phase before each moment: (moments, phases); only differences mean anything."""
        found = np.zeros((len(moments_ns), STEP))
        for code, begins, ends, sums in self._by_code:
            at = np.searchsorted(begins, moments_ns, side="right")
            inside = np.maximum(0, ends[np.maximum(at - 1, 0)] - moments_ns) * (at > 0)
            found[:, code] = (sums[at] - inside) / 1e9
        return found


class Grid:
    """The seconds of phases before the moments of a fine grid, of each of ``ranks``: looked up, not searched."""

    def __init__(self, ranks: Sequence[Rank], begin_ns: int, end_ns: int) -> None:
        self._pitch_ns = max(GRID_NS, (end_ns - begin_ns) // MOST_POINTS)
        self._begin_ns = begin_ns
        moments = np.arange(begin_ns, end_ns + 2 * self._pitch_ns, self._pitch_ns)
        self._tables = [rank.seconds(moments) for rank in ranks]

    def of(self, ranks: Sequence[int] | None) -> "Mixtures":
        """Return the mean over ``ranks``, by index; None: over all."""
        chosen = self._tables if ranks is None else [self._tables[rank] for rank in ranks]
        return Mixtures(np.mean(chosen, axis=0), self._begin_ns, self._pitch_ns)


class Mixtures:
    """The seconds of phases in any interval: ``table`` (moments, phases) of sums up to the moments of a grid."""

    def __init__(self, table: np.ndarray, begin_ns: int, pitch_ns: int) -> None:
        self._table, self._begin_ns, self._pitch_ns = table, begin_ns, pitch_ns

    def _before(self, moments_ns: np.ndarray) -> np.ndarray:
        at, rest = np.divmod(moments_ns - self._begin_ns, self._pitch_ns)
        at = np.clip(at, 0, len(self._table) - 2)
        low = self._table[at]
        return np.asarray(low + (rest / self._pitch_ns)[..., None] * (self._table[at + 1] - low))

    def between(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the seconds of each of `NAMES` in each interval: (..., names)."""
        found = np.empty((*begins.shape, len(NAMES)))
        found[..., :STEP] = self._before(ends) - self._before(begins)
        found[..., STEP] = np.maximum((ends - begins) / 1e9 - found[..., :STEP].sum(axis=-1), 0.0)
        return found
