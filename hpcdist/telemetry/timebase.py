"""One time for all hosts: a host's clock becomes rank 0's, by readings that were taken now and then.

Between two readings the offset is interpolated; before the first and after the last it goes on as between the nearest
two. All numbers are whole nanoseconds: days of uptime have more digits than a float keeps.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from hpcdist.comm.clocks import Reading

DRIFT_PPM: Final = 50  # of a quartz, where one reading tells nothing about it
MOST_PPM: Final = 500  # the kernel slews a clock no faster
MILLION: Final = 1_000_000
MEASURED: Final = "measured"
MESSAGES: Final = "messages"
WALL: Final = "wall clocks"


class HostClock:
    """The clock of one host, by its ``readings``; without any it is rank 0's own.

    ``source`` says where they come from: "measured", "messages", or "wall clocks", of which nobody knows how well they
    agree.
    """

    def __init__(self, readings: Sequence[Reading] = (), source: str = MEASURED) -> None:
        self.source = source
        self._knots: list[Reading] = []
        for reading in sorted(readings, key=lambda one: one.t_ns):
            # A clock goes forward: of two readings that say otherwise, the one that is known better stays.
            while self._knots and not self._follows(self._knots[-1], reading):
                if self._knots[-1].rtt_ns <= reading.rtt_ns:
                    break
                self._knots.pop()
            else:
                self._knots.append(reading)
        self._own = [knot.t_ns + knot.offset_ns for knot in self._knots]

    @staticmethod
    def _follows(before: Reading, after: Reading) -> bool:
        """Whether both clocks went on between the two, the one about as fast as the other."""
        passed = after.t_ns - before.t_ns
        drifted = abs(after.offset_ns - before.offset_ns) - before.bound_ns - after.bound_ns
        ahead = passed > 0 and passed + after.offset_ns - before.offset_ns > 0
        return ahead and drifted * MILLION <= MOST_PPM * passed

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Those that are used."""
        return tuple(self._knots)

    @property
    def drift_ppm(self) -> float | None:
        """How much faster than rank 0's it went from the first to the last reading; None where that is not known."""
        if len(self._knots) < 2:
            return None
        first, last = self._knots[0], self._knots[-1]
        return (last.offset_ns - first.offset_ns) / (last.t_ns - first.t_ns) * MILLION

    def offset_ns(self, own_ns: int) -> int:
        """Return how far it was ahead of rank 0's clock when it showed ``own_ns``."""
        if not self._knots:
            return 0
        place = bisect_right(self._own, own_ns)
        if len(self._knots) == 1:
            return self._knots[0].offset_ns
        nearest = min(max(place, 1), len(self._knots) - 1)
        a, b = self._knots[nearest - 1], self._knots[nearest]
        begin, rise, run = (
            self._own[nearest - 1],
            b.offset_ns - a.offset_ns,
            self._own[nearest] - self._own[nearest - 1],
        )
        if 0 < place < len(self._own):
            return a.offset_ns + (own_ns - begin) * rise // run
        limit = run * MOST_PPM // MILLION
        rise = max(-limit, min(limit, rise))
        knot, at = (a, begin) if place == 0 else (b, self._own[nearest])
        return knot.offset_ns + (own_ns - at) * rise // run

    def offset_at(self, reference_ns: int) -> int:
        """Return how far it was ahead of rank 0's clock when that one showed ``reference_ns``."""
        if not self._knots:
            return 0
        nearest = min(self._knots, key=lambda knot: abs(knot.t_ns - reference_ns))
        return self.offset_ns(reference_ns + nearest.offset_ns)

    def reference_ns(self, own_ns: int) -> int:
        """Return rank 0's clock when this one showed ``own_ns``. What is later here is not earlier there."""
        return own_ns - self.offset_ns(own_ns)

    def bound_ns(self, own_ns: int) -> int | None:
        """Return by how much `reference_ns` may be wrong, where drift is steady between readings; None: not known."""
        if not self._knots:
            return 0
        if self.source == WALL:
            return None
        place = bisect_right(self._own, own_ns)
        if 0 < place < len(self._own):
            return max(self._knots[place - 1].bound_ns, self._knots[place].bound_ns)
        nearest = 0 if place == 0 else -1
        distance, bound = abs(own_ns - self._own[nearest]), self._knots[nearest].bound_ns
        if len(self._knots) == 1:
            return bound + distance * DRIFT_PPM // MILLION
        other = self._knots[1 if place == 0 else -2]
        run = abs(self._own[nearest] - self._own[1 if place == 0 else -2])
        return bound + min(distance * (bound + other.bound_ns) // run, distance * MOST_PPM // MILLION)
