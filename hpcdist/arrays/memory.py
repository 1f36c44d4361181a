"""Memory of a training step by category (parameters, gradients, ...): current and peak bytes."""

import threading
import weakref
from collections import defaultdict

from hpcdist.arrays.backend import Array

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "checkpoint",
    "buddy_copies",  # copies of this rank's state
    "partner_copies",  # copies of another rank's state
)


class Ledger:
    """Counter of the bytes of live arrays, by category. Thread-safe. Views of other arrays must not be counted."""

    def __init__(self) -> None:
        self._current: defaultdict[str, int] = defaultdict(int)
        self._peak: defaultdict[str, int] = defaultdict(int)
        self._total = self._total_peak = 0
        self._lock = threading.RLock()  # reentrant: a finalizer may run inside `_add` of the same thread

    def track(self, array: Array, category: str, owner: Array | None = None) -> Array:
        """Count the bytes of ``array`` until ``owner`` (None: ``array``) is deleted. Return ``array``."""
        assert category in CATEGORIES, f"category {category!r} is not one of {CATEGORIES}"
        self.add(category, array.nbytes)
        weakref.finalize(array if owner is None else owner, self.add, category, -array.nbytes).atexit = False
        return array

    def add(self, category: str, nbytes: int) -> None:
        """Add ``nbytes`` (may be negative) to the byte count of ``category``. For arrays, `track` is easier."""
        with self._lock:
            self._current[category] += nbytes
            self._peak[category] = max(self._peak[category], self._current[category])
            self._total += nbytes
            self._total_peak = max(self._total_peak, self._total)

    @property
    def current(self) -> dict[str, int]:
        """{category: bytes of the counted arrays that are alive now}."""
        return {category: self._current[category] for category in CATEGORIES}

    @property
    def peak(self) -> dict[str, int]:
        """{category: largest number of bytes that were alive at one time}."""
        return {category: self._peak[category] for category in CATEGORIES}

    @property
    def peak_total(self) -> int:
        """Largest number of bytes, summed over all categories, that were alive at one time."""
        return self._total_peak
