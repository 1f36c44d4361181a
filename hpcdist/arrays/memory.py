"""Memory of a training step by category (parameters, gradients, communication, ...), now and at its peak.

Code that allocates a buffer registers it with `Ledger.track`; its bytes leave the sum when it is collected.
"""

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
    "buddy_copies",  # copies of the own state
    "partner_copies",  # copies of the state of another rank
)


class Ledger:
    """Count of the bytes of live arrays by category, from their creation to their collection.

    Only owners of memory are tracked, never views. Any thread may drop an array, hence the lock.
    """

    def __init__(self) -> None:
        self._current: defaultdict[str, int] = defaultdict(int)
        self._peak: defaultdict[str, int] = defaultdict(int)
        self._total = self._total_peak = 0
        self._lock = threading.RLock()  # a finalizer may run inside `_add` of the same thread

    def track(self, array: Array, category: str, owner: Array | None = None) -> Array:
        """Count ``array`` under ``category`` until it, or the ``owner`` of its memory, is collected; return it."""
        assert category in CATEGORIES, f"category {category!r} is none of {CATEGORIES}"
        self.add(category, array.nbytes)
        weakref.finalize(array if owner is None else owner, self.add, category, -array.nbytes).atexit = False
        return array

    def add(self, category: str, nbytes: int) -> None:
        """Count ``nbytes`` more under ``category``, of memory that is no array."""
        with self._lock:
            self._current[category] += nbytes
            self._peak[category] = max(self._peak[category], self._current[category])
            self._total += nbytes
            self._total_peak = max(self._total_peak, self._total)

    @property
    def current(self) -> dict[str, int]:
        """Bytes alive by category."""
        return {category: self._current[category] for category in CATEGORIES}

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes that were alive at once, each category for itself."""
        return {category: self._peak[category] for category in CATEGORIES}

    @property
    def peak_total(self) -> int:
        """The most bytes that were alive at once, of all categories together."""
        return self._total_peak
