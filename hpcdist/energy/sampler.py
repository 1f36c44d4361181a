"""The sampler: a thread that reads the counters now and then, so that no wrap is missed, and keeps each sample.

It sleeps nearly all of the time, makes no MPI call, and ends with its owner. Reads at the edges of windows come from
the caller's thread.
"""

import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from hpcdist.energy.counters import Counter, Track

PROBE_INTERVAL_S: Final = 0.005  # until the pace of every counter is known, or for `GIVE_UP_NS`
GIVE_UP_NS: Final = 2_000_000_000
EDGE_ATTEMPTS: Final = 3
EDGE_PAUSE_S: Final = 0.01


class Sampler:
    """Reads ``counters`` every ``interval_s`` seconds between `start` and `stop`."""

    def __init__(self, counters: Sequence[Counter], interval_s: float) -> None:
        self.tracks = [Track(counter) for counter in counters]
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._samples: list[tuple[int, int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample; nothing happens without a counter."""
        if self.tracks:
            self._thread.start()

    def stop(self) -> None:
        """End the thread; the samples stay."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def read(self) -> tuple[int, list[int | None]]:
        """Return the time in ns and the energy of each source in mJ now; None for one that fails several times."""
        now_ns = time.monotonic_ns()
        return now_ns, [self._read_stubborn(source) for source in range(len(self.tracks))]

    def _read_stubborn(self, source: int) -> int | None:
        for attempt in range(EDGE_ATTEMPTS):
            if attempt:
                time.sleep(EDGE_PAUSE_S)
            value = self._sample(source)
            if value is not None or self.tracks[source].lost:
                return value
        return None

    def _sample(self, source: int) -> int | None:
        with self._lock:
            now_ns = time.monotonic_ns()
            value = self.tracks[source].read(now_ns)
            if value is not None:
                self._samples.append((now_ns, source, value))
        return value

    def _run(self) -> None:
        began_ns = time.monotonic_ns()
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            for source in range(len(self.tracks)):
                self._sample(source)
            pause_s = self._interval_s
            if self._probing(began_ns):
                pause_s = min(pause_s, PROBE_INTERVAL_S)

    def _probing(self, began_ns: int) -> bool:
        now_ns = time.monotonic_ns()
        return now_ns - began_ns < GIVE_UP_NS and not all(track.pace.settled(now_ns) for track in self.tracks)

    def drain(self) -> np.ndarray:
        """Return the samples since the last call: (samples, 3) int64 of time in ns, source, energy in mJ."""
        with self._lock:
            samples, self._samples = self._samples, []
        return np.array(samples, np.int64).reshape(-1, 3)
