"""Sampler thread: reads the counters at intervals, so that no wrap is missed, and stores each sample.

The thread makes no MPI call.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hpcdist.energy.sources.counters import CounterReader, EnergyCounter, SourceInfo

PROBE_INTERVAL_S: Final = 0.005  # until the update interval of every counter is known, or for `GIVE_UP_NS`
GIVE_UP_NS: Final = 2_000_000_000
EDGE_ATTEMPTS: Final = 3
EDGE_PAUSE_S: Final = 0.01
HANG_TIMEOUT_S: Final = 5.0  # limit of the wait for a driver
MAX_ROWS: Final = 1 << 15  # of each list that waits for `drain`; of longer lists every second row is dropped (5 MB)
Row: TypeAlias = tuple[int, int, int]  # time in ns, source, value


@dataclass(frozen=True)
class DrainedSamples:
    """Samples that `EnergySampler.drain` returned. Times are in ns of the monotonic clock."""

    samples: np.ndarray  # int64 (n, 3): time, index of the counter in the sampler's list, energy in mJ
    powers: np.ndarray  # int64 (n, 3): time, index of the counter, power in mW
    gaps: np.ndarray  # int64 (n, 2): time, index of the counter, whose energy just before is unknown
    looks: np.ndarray  # int64 (n,): times of the utilisation samples
    shares: np.ndarray  # (n, columns): utilisation at these times, by `hpcdist.energy.sources.utilisation.COLUMNS`


@dataclass(frozen=True)
class SourceSamples:
    """Energy samples of one source since the previous call of `EnergySampler.intervals`."""

    name: str
    kind: str
    about: SourceInfo
    times_ns: np.ndarray
    energy_mj: np.ndarray
    known: np.ndarray  # bool: the energy between samples i and i + 1 is known


def _to_stderr(message: str) -> None:
    print(f"hpcdist: {message}", file=sys.stderr, flush=True)


class EnergySampler:
    """Background thread that reads the energy ``counters`` every ``interval_s`` seconds, from `start` to `stop`.

    ``look``: function called every ``look_s`` seconds, which returns the node's utilisation. ``tell``: function that
    reports failures as text.
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
        self._recent: list[Row] = []  # for `intervals`, after the preceding sample of each source
        self._recent_known = 0  # number of these rows at the last `drain`
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
        """Start the sampling thread, unless there is nothing to sample."""
        if self.tracks or self._look is not None:
            self._began_ns = time.monotonic_ns()
            self._thread.start()

    def stop(self) -> bool:
        """End the thread. Return False if the thread hangs in a driver; the caller must then not close the sensors."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(HANG_TIMEOUT_S)
        self._ended_ns = self._ended_ns or time.monotonic_ns()
        return not self._thread.is_alive()

    def overhead(self) -> tuple[float, float]:
        """Return (processor seconds spent on reading the sources, seconds from `start` until `stop` or now)."""
        until_ns = self._ended_ns or time.monotonic_ns()
        return self._thread_s + self._edges_s, (until_ns - self._began_ns) / 1e9 if self._began_ns else 0.0

    def read(self) -> tuple[int, list[int | None]]:
        """Read all sources. Return (time in ns, list of the energy of each source in mJ, or None if unreadable)."""
        now_ns = time.monotonic_ns()
        values = [self._read_stubborn(source) for source in range(len(self.tracks))]
        self._edges_s += (time.monotonic_ns() - now_ns) / 1e9
        return now_ns, values

    def gaps_since_edge(self) -> list[int]:
        """Return a list of the indices of the counters whose energy has a gap since the last call."""
        now = [track.gaps for track in self.tracks]
        new = [source for source, gaps in enumerate(now) if gaps != self._edge_gaps[source]]
        self._edge_gaps = now
        return new

    def _read_stubborn(self, source: int) -> int | None:
        # A sensor with many failures is not retried: a lost GPU must not slow down every step.
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
        if len(self._samples) > MAX_ROWS:
            self._samples, self._gaps = _halved(self._samples, self._gaps)
        if len(self._recent) > MAX_ROWS:
            first = self._recent[self._recent_known :][:1]
            self._recent, self._recent_gaps = _halved(self._recent, self._recent_gaps)
            self._recent_known = sum(row < first[0] for row in self._recent) if first else len(self._recent)

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
        except Exception as error:  # noqa: BLE001 - whatever it is, energy must still be counted
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
            self._tell(f"energy of {track.explain()}; further failures are counted but not printed")

    def _probing(self, began_ns: int) -> bool:
        now_ns = time.monotonic_ns()
        return now_ns - began_ns < GIVE_UP_NS and not all(track.pace.settled(now_ns) for track in self.tracks)

    def drain(self) -> DrainedSamples:
        """Return all samples since the previous call of `drain`."""
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
        """Return the samples of each source, from the last sample of the previous call on. Call before `drain`."""
        with self._lock:
            rows, gaps = self._recent, self._recent_gaps
            self._recent = list({row[1]: row for row in rows}.values())
            self._recent_known, self._recent_gaps = 0, set()
        sources = []
        for source, track in enumerate(self.tracks):
            source_rows = [row for row in rows if row[1] == source]
            times, energy = (np.array([row[column] for row in source_rows], np.int64) for column in (0, 2))
            is_known = np.array([row[:2] not in gaps for row in source_rows[1:]], bool)
            sources.append(SourceSamples(track.name, track.kind, track.about, times, energy, is_known))
        return sources


def _halved(rows: list[Row], gaps: set[tuple[int, int]]) -> tuple[list[Row], set[tuple[int, int]]]:
    left: list[Row] = []
    unknown: set[tuple[int, int]] = set()
    later: dict[int, Row] = {}  # by source: the next kept row
    skips: set[int] = set()  # sources whose preceding row is dropped
    for row in reversed(rows):
        source = row[1]
        if source in skips:
            skips.discard(source)
        else:
            skips.add(source)
            later[source] = row
            left.append(row)
        if row[:2] in gaps:  # the gap at a dropped row moves to the next kept row
            unknown.add(later[source][:2])
    return left[::-1], unknown
