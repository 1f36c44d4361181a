"""Synthetic loads of known energy, and a sensor that samples them part of the time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.operations.folded_energy import WorkIntervals
from hpcdist.energy.part_time_sensor import PowerSensor


@dataclass(frozen=True)
class SyntheticLoad:
    """Power that is constant between ``edges_ns`` (n + 1,): ``power_w`` (n,). ``steps`` (steps, 2) are a training's."""

    edges_ns: np.ndarray
    power_w: np.ndarray
    steps: np.ndarray

    @property
    def work(self) -> WorkIntervals:
        """The load as recorded work intervals."""
        return WorkIntervals(self.steps)

    @property
    def begin_ns(self) -> int:
        """The start time of the load."""
        return int(self.edges_ns[0])

    @property
    def end_ns(self) -> int:
        """The end time of the load."""
        return int(self.edges_ns[-1])

    def until(self, moments_ns: np.ndarray) -> np.ndarray:
        """Return the joules from the start to each moment."""
        sums = np.append(0.0, np.cumsum(np.diff(self.edges_ns) / 1e9 * self.power_w))
        return np.interp(moments_ns, self.edges_ns, sums)

    @property
    def energy_j(self) -> float:
        """The total energy in joules."""
        return float(self.until(self.edges_ns[-1:])[0])


def training_load(
    shares: np.ndarray,
    power_w: np.ndarray,
    lengths_ns: np.ndarray,
    idle_w: float,
    *,
    pause_s: Callable[[int], float] = lambda now_ns: 0.0,
    begin_ns: int = 0,
) -> SyntheticLoad:
    """Return steps of ``lengths_ns`` (steps,), each with ``power_w`` (n,) over ``shares`` (n,), and idle pauses.


    ``pause_s`` is called before each step, like `Shift.pause_s`.
    """
    edges, power, steps, now = [begin_ns], [], [], begin_ns
    for length in lengths_ns:
        wait = round(pause_s(now) * 1e9)
        if wait:
            now += wait
            edges.append(now)
            power.append(idle_w)
        inner = now + np.rint(np.cumsum(shares) * length).astype(np.int64)
        steps.append((now, int(inner[-1])))
        now = int(inner[-1])
        edges += inner.tolist()
        power += power_w.tolist()
    return SyntheticLoad(np.array(edges), np.array(power), np.array(steps, np.int64))


def readings(
    load: SyntheticLoad,
    sensor: PowerSensor,
    first_ns: int,
    rng: np.random.Generator | None = None,
    noise_w: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the update times of ``sensor`` from ``first_ns`` on, and its values of ``load`` in W: (n,) and (n,)."""
    window = sensor.window_s * 1e9
    updates = np.arange(first_ns, load.end_ns + 1, sensor.update_s * 1e9)
    updates = updates[updates - window >= load.begin_ns]
    power_w = (load.until(updates) - load.until(updates - window)) / sensor.window_s
    if rng is not None:
        power_w = power_w + rng.normal(0.0, noise_w, len(power_w))
    return updates, np.maximum(power_w, 0.0)
