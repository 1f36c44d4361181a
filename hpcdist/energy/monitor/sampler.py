"""Sampler thread: reads the counters at intervals, so that no wrap is missed, and keeps each sample.

It sleeps nearly all of the time, makes no MPI call, and ends with its owner. Reads at the edges of windows come from
the caller's thread. The sampler also keeps the power of the sources that report it, and the utilisation of the node.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hpcdist.energy.sources.counters import CounterReader, EnergyCounter, SourceInfo

PROBE_INTERVAL_S: Final = 0.005  # until the pace of every counter is known, or for `GIVE_UP_NS`
GIVE_UP_NS: Final = 2_000_000_000
EDGE_ATTEMPTS: Final = 3
EDGE_PAUSE_S: Final = 0.01
HANG_TIMEOUT_S: Final = 5.0  # a driver that has not answered for so long is not waited for
MAX_ROWS: Final = 1 << 15  # of each list that waits for `drain`: of more, every second one is dropped (5 MB)
Row: TypeAlias = tuple[int, int, int]  # time in ns, source, value


@dataclass(frozen=True)
class DrainedSamples:
    """Samples (n, 3) int64 of time in ns, source, energy in mJ; ``powers`` (n, 3) the same in mW.

    ``gaps`` (n, 2) of time and source: the energy between the sample at that time and the one before is not known.
    ``looks`` are times in ns (n,), ``shares`` (n, columns) float64 the utilisation then.
    """

    samples: np.ndarray
    powers: np.ndarray
    gaps: np.ndarray
    looks: np.ndarray
    shares: np.ndarray


@dataclass(frozen=True)
class SourceSamples:
    """Samples of one source: ``times_ns`` (n,) int64 of the node's monotonic clock, ``energy_mj`` (n,) int64.

    ``known`` (n-1,) bool: whether the difference between two samples is what was used between them.
    """

    name: str
    kind: str
    about: SourceInfo
    times_ns: np.ndarray
    energy_mj: np.ndarray
    known: np.ndarray


def _to_stderr(message: str) -> None:
    print(f"hpcdist: {message}", file=sys.stderr, flush=True)


class EnergySampler:
    """Sampler of ``counters``: reads them every ``interval_s`` seconds between `start` and `stop`.

    Every ``look_s`` seconds it calls ``look`` -> (columns,) float64 (None: never). It calls ``tell`` once for each
    source that fails.
    """

    def __init__(
        self,
        counters: Sequence[EnergyCounter],
        interval_s: float,
        look: Callable[[], np.ndarray] | None = None,
        look_s: float = 1.0,
        tell: Callable[[str], None] = _to_stderr,
    ) -> None:
        self.tracks = [CounterReader(counter) for counter in counters]
        self._interval_s, self._look_s = interval_s, look_s
        self._look, self._tell = look, tell
        self._lock = threading.Lock()
        self._samples: list[Row] = []
        self._recent: list[Row] = []  # for `intervals`, the last one of each source before them
        self._recent_known = 0  # how many of them were there at the last `drain`
        self._powers: list[Row] = []
        self._gaps: set[tuple[int, int]] = set()
        self._recent_gaps: set[tuple[int, int]] = set()
        self._edge_gaps = [0] * len(self.tracks)
        self._looks: list[tuple[int, np.ndarray]] = []
        self._told: set[int] = set()
        self._look_failure = ""
        self._began_ns = self._ended_ns = 0
        self._thread_s = self._edges_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy sampler", daemon=True)

    def start(self) -> None:
        """Start the thread, where there is something to read."""
        if self.tracks or self._look is not None:
            self._began_ns = time.monotonic_ns()
            self._thread.start()

    def stop(self) -> bool:
        """End the thread; the samples stay. Return False when it hangs in a sensor, which then must not be closed."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(HANG_TIMEOUT_S)
        self._ended_ns = self._ended_ns or time.monotonic_ns()
        return not self._thread.is_alive()

    def overhead(self) -> tuple[float, float]:
        """Return the seconds of a processor that reading took so far, and those since `start`.

        The thread's own time is that of its processor; reads at edges count as long as the caller waited for them.
        """
        until_ns = self._ended_ns or time.monotonic_ns()
        return self._thread_s + self._edges_s, (until_ns - self._began_ns) / 1e9 if self._began_ns else 0.0

    def read(self) -> tuple[int, list[int | None]]:
        """Return the time in ns and the energy of each source in mJ now; None for one that fails several times."""
        now_ns = time.monotonic_ns()
        values = [self._read_stubborn(source) for source in range(len(self.tracks))]
        self._edges_s += (time.monotonic_ns() - now_ns) / 1e9
        return now_ns, values

    def gaps_since_edge(self) -> list[int]:
        """Return the sources with a gap since the last call: they can be read, but some energy was not counted."""
        now = [track.gaps for track in self.tracks]
        new = [source for source, gaps in enumerate(now) if gaps != self._edge_gaps[source]]
        self._edge_gaps = now
        return new

    def _read_stubborn(self, source: int) -> int | None:
        # A sensor that has been silent for long is not waited for: a lost GPU must not cost every step.
        attempts = 1 if self.tracks[source].failing >= EDGE_ATTEMPTS else EDGE_ATTEMPTS
        for attempt in range(attempts):
            if attempt:
                time.sleep(EDGE_PAUSE_S)
            value = self._sample(source)
            if value is not None or self.tracks[source].lost:
                return value
        return None

    def _sample(self, source: int) -> int | None:
        track = self.tracks[source]
        if not self._lock.acquire(timeout=HANG_TIMEOUT_S):
            track.lost = track.lost or f"a sensor of this node has not answered for {HANG_TIMEOUT_S:g} s"
            return None
        try:
            now_ns, gaps = time.monotonic_ns(), track.gaps
            value = track.read(now_ns)
            if value is not None:
                row = (now_ns, source, value)
                self._samples.append(row)
                self._recent.append(row)
                if track.gaps != gaps:
                    self._gaps.add(row[:2])
                    self._recent_gaps.add(row[:2])
                self._bound()
        finally:
            self._lock.release()
        return value

    def _bound(self) -> None:
        """Thin what was not drained for long. Counters are cumulative, so no energy is lost with a sample."""
        if len(self._samples) > MAX_ROWS:
            self._samples, self._gaps = _halved(self._samples, self._gaps)
        if len(self._recent) > MAX_ROWS:
            known = self._recent[self._recent_known :][:1]
            self._recent, self._recent_gaps = _halved(self._recent, self._recent_gaps)
            self._recent_known = sum(row < known[0] for row in self._recent) if known else len(self._recent)

    def _run(self) -> None:
        began_ns = powers_ns = looked_ns = time.monotonic_ns()
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            now_ns = time.monotonic_ns()
            powers_due = now_ns - powers_ns >= 0.9e9 * self._interval_s
            powers_ns = now_ns if powers_due else powers_ns
            for source in range(len(self.tracks)):
                self._sample(source)
                if powers_due:
                    self._power(source)
                self._tell_once(source)
            if self._look is not None and now_ns - looked_ns >= 1e9 * self._look_s:
                looked_ns = now_ns
                self._look_around(self._look)
            pause_s = self._interval_s if self.tracks else self._look_s
            if self._probing(began_ns):
                pause_s = min(pause_s, PROBE_INTERVAL_S)
            elif self._look is not None:
                pause_s = min(pause_s, self._look_s)
            self._thread_s = time.thread_time()

    def _power(self, source: int) -> None:
        with self._lock:
            now_ns = time.monotonic_ns()
            power = self.tracks[source].power_mw()
            if power is not None:
                self._powers.append((now_ns, source, power))
                if len(self._powers) > MAX_ROWS:
                    self._powers, _ = _halved(self._powers, set())

    def _look_around(self, look: Callable[[], np.ndarray]) -> None:
        try:
            shares = look()
        except Exception as error:  # noqa: BLE001 - whatever a look raises, the energy goes on being counted
            if not self._look_failure:
                self._look_failure = f"{type(error).__name__}: {error}"
                self._tell(f"the utilisation of this node cannot be read: {self._look_failure}")
            return
        with self._lock:
            self._looks.append((time.monotonic_ns(), shares))
            if len(self._looks) > MAX_ROWS:
                del self._looks[::2]

    def _tell_once(self, source: int) -> None:
        track = self.tracks[source]
        if source not in self._told and (track.failed_reads >= EDGE_ATTEMPTS or track.lost):
            self._told.add(source)
            self._tell(f"energy of {track.explain()}; further failures are counted in silence")

    def _probing(self, began_ns: int) -> bool:
        now_ns = time.monotonic_ns()
        return now_ns - began_ns < GIVE_UP_NS and not all(track.pace.settled(now_ns) for track in self.tracks)

    def drain(self) -> DrainedSamples:
        """Return all samples since the last call. Those not taken by `intervals` until the next call are dropped."""
        with self._lock:
            samples, self._samples = self._samples, []
            powers, self._powers = self._powers, []
            gaps, self._gaps = self._gaps, set()
            looks, self._looks = self._looks, []
            self._recent = self._recent[self._recent_known :]
            self._recent_known = len(self._recent)
            self._recent_gaps &= {row[:2] for row in self._recent}
        return DrainedSamples(
            np.array(samples, np.int64).reshape(-1, 3),
            np.array(powers, np.int64).reshape(-1, 3),
            np.array(sorted(gaps), np.int64).reshape(-1, 2),
            np.array([now_ns for now_ns, _ in looks], np.int64),
            np.array([shares for _, shares in looks]) if looks else np.empty((0, 0)),
        )

    def intervals(self) -> list[SourceSamples]:
        """Return the samples of each source since the last call, the last one of that call first.

        Where it is never called no memory is used: what two calls of `drain` have seen is dropped.
        """
        with self._lock:
            rows, gaps = self._recent, self._recent_gaps
            self._recent = list({row[1]: row for row in rows}.values())
            self._recent_known, self._recent_gaps = 0, set()
        sources = []
        for source, track in enumerate(self.tracks):
            own = [row for row in rows if row[1] == source]
            times, energy = (np.array([row[place] for row in own], np.int64) for place in (0, 2))
            known = np.array([row[:2] not in gaps for row in own[1:]], bool)
            sources.append(SourceSamples(track.name, track.kind, track.about, times, energy, known))
        return sources


def _halved(rows: list[Row], gaps: set[tuple[int, int]]) -> tuple[list[Row], set[tuple[int, int]]]:
    """Return every second one of the rows of each source, its last one too, and the gaps in front of these."""
    left: list[Row] = []
    unknown: set[tuple[int, int]] = set()
    later: dict[int, Row] = {}  # by source: the next row that stays
    skips: set[int] = set()  # sources of which the row before is to go
    for row in reversed(rows):
        source = row[1]
        if source in skips:
            skips.discard(source)
        else:
            skips.add(source)
            later[source] = row
            left.append(row)
        if row[:2] in gaps:
            unknown.add(later[source][:2])
    return left[::-1], unknown
