"""Phase windows and the energy of each. Windows nest, and the innermost window gets the joules. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class PhaseWindow:
    """Time window of ``phase``. Its duration ``own_ns`` and energies ``mj`` (by source) exclude nested windows."""

    phase: str
    begin_ns: int
    mj: list[float]
    end_ns: int = 0
    own_ns: int = 0


class PhaseWindows:
    """Energy and time of one rank's windows. A window is a `with` block whose energy counts for a named phase."""

    def __init__(self, sources: int) -> None:
        self.total_mj = [0.0] * sources  # of all windows together, by energy source
        self.closed: list[PhaseWindow] = []  # since the last `take`
        self._sums: dict[str, dict[str, Any]] = {}  # of all closed windows, as in `phases`
        self._open: list[PhaseWindow] = []
        self._edge_ns = 0
        self._last: list[int | None] = [None] * sources
        self._inside = [False] * sources  # there was time inside a window since the last good read
        self._outside = [False] * sources  # there was time outside of all windows since then

    def enter(self, phase: str, now_ns: int, values: Sequence[int | None]) -> None:
        """Begin a window at time ``now_ns``. ``values``: energy of each source in mJ, None after a failed read."""
        self.edge(now_ns, values)
        self._open.append(PhaseWindow(phase, now_ns, [0.0] * len(self._last)))

    def leave(self, now_ns: int, values: Sequence[int | None]) -> None:
        """End the innermost window at the time ``now_ns``. ``values``: energy of each source in mJ, as in `enter`."""
        self.edge(now_ns, values)
        window = self._open.pop()
        window.end_ns = now_ns
        self.closed.append(window)
        self._sum(self._sums, window)

    def take(self) -> list[PhaseWindow]:
        """Return the windows closed since the last call, and drop them."""
        taken, self.closed = self.closed, []
        return taken

    def edge(self, now_ns: int, values: Sequence[int | None]) -> None:
        """Add the time and energy since the last reading to the innermost open window. ``values``: see `enter`."""
        inner = self._open[-1] if self._open else None
        if inner is not None:
            inner.own_ns += now_ns - self._edge_ns
        self._edge_ns = now_ns
        for source, value in enumerate(values):
            self._attribute(source, value, inner)

    def forget(self, source: int) -> None:
        """Mark the energy of source number ``source`` since the last read as unknown: its counter missed some."""
        self._last[source] = None

    def _attribute(self, source: int, value: int | None, inner: PhaseWindow | None) -> None:
        # A failed edge is bridged: the difference over it belongs to several windows, or to none, so each window is
        # unknown. The total still gets the difference if all of that time was inside windows.
        last, bridged = self._last[source], self._inside[source] or self._outside[source]
        inside, outside = self._inside[source] or inner is not None, self._outside[source] or inner is None
        if value is None:
            self._inside[source], self._outside[source] = inside, outside
            if inner is not None:
                inner.mj[source] = math.nan
            return
        used = math.nan if last is None else float(value - last)
        if inner is not None:
            inner.mj[source] += math.nan if bridged else used
        if inside:
            self.total_mj[source] += math.nan if outside else used
        self._last[source], self._inside[source], self._outside[source] = value, False, False

    def totals(self) -> list[float]:
        """Return a list with the mJ of each energy source in all windows together, NaN if unknown."""
        return [math.nan if pending else total for pending, total in zip(self._inside, self.total_mj, strict=True)]

    def phases(self) -> dict[str, dict[str, Any]]:
        """Return a dict for each phase: its seconds, number of windows, shortest window, and mJ by source."""
        phases = {name: {**phase, "mj": [*phase["mj"]]} for name, phase in self._sums.items()}
        for window in self._open:
            self._sum(phases, window)
        return phases

    def _sum(self, phases: dict[str, dict[str, Any]], window: PhaseWindow) -> None:
        nothing = {"seconds": 0.0, "windows": 0, "shortest_s": math.inf, "mj": [0.0] * len(self._last)}
        phase = phases.setdefault(window.phase, nothing)
        own_s = window.own_ns / 1e9
        phase["seconds"] += own_s
        phase["windows"] += 1
        if window.end_ns:
            phase["shortest_s"] = min(phase["shortest_s"], own_s)
        phase["mj"] = [sum_mj + mj for sum_mj, mj in zip(phase["mj"], window.mj, strict=True)]
