"""Energy as the integral of power: where a source has watts and no counter of joules. A fallback, and labelled as one.

The trapezoidal rule over the reads. What was used while nobody knew the power is not known either: reads that are
further apart than ``bridge_ns`` leave a gap, and a window with a gap has no joules.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hpcdist.energy.counters import About

LABEL: Final = "integrated power"
BRIDGE_S: Final = 1.0  # power that is an average over a second is known from one second to the next
INTERVALS: Final = 2.5  # one read may be missed


class Integrated:
    """The integral of ``power_mw`` in pJ from the first read on. ``label`` leads what is noted of it."""

    per_mj = 10**9
    span: int | None = None

    def __init__(
        self,
        name: str,
        kind: str,
        power_mw: Callable[[], int],
        about: About,
        interval_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        label: str = LABEL,
    ) -> None:
        self.name, self.kind = name, kind
        self.about = replace(about, note="; ".join(filter(None, (label, about.note))))
        self.gaps = 0
        self._power_mw, self._clock_ns = power_mw, clock_ns
        self._bridge_ns = round(max(BRIDGE_S, INTERVALS * interval_s) * 1e9)
        self._last: tuple[int, int] | None = None
        self._twice_pj = 0

    def read(self) -> int:
        """Return the energy so far in pJ. Raises ReadError, and counts a gap when it lasted too long."""
        power = self._power_mw()
        now_ns = self._clock_ns()
        if self._last is not None:
            then_ns, before = self._last
            if now_ns - then_ns > self._bridge_ns:
                self.gaps += 1
            else:
                self._twice_pj += (power + before) * (now_ns - then_ns)  # mW x ns
        self._last = now_ns, power
        return self._twice_pj // 2

    def power_mw(self) -> int | None:
        """Return the power of the last read, mW."""
        return None if self._last is None else self._last[1]
