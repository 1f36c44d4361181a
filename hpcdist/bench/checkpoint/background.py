"""Cost of a background save: the saving step, and the steps during the write, compared with plain steps.

A step is a fixed piece of work (products of matrices that lie in a cache) and one small allreduce, as the loop of a
training has. Each round has as many plain steps as steps that follow a save, and a save.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.bench.timing import slowest_s
from hpcdist.collectives import allreduce
from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.core import daly_interval

_SIDE: Final = 192
MOST_FOLLOWERS: Final = 1000


class BackgroundSaver(Protocol):
    """Saver that writes beside the steps."""

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""

    def begin(self) -> object:
        """Begin a save; the state may change when this returns. Collective."""

    def numbers(self) -> np.ndarray:
        """Return the numbers whose sums over the ranks `settle` gets (local)."""

    def settle(self, sums: np.ndarray) -> object:
        """Advance the save by these sums. Collective."""


@dataclass
class SavingSteps:
    """Seconds of the slowest rank by kind of step."""

    plain_s: list[float] = field(default_factory=list)
    saving_s: list[float] = field(default_factory=list)  # the steps that begin a save
    beside_s: list[float] = field(default_factory=list)  # those while it is written
    saves_s: list[float] = field(default_factory=list)  # from its begin until it is complete

    def figures(self, mtbf_s: float) -> dict[str, Any]:
        """Return medians, ratios to plain steps with quartiles, and what saving costs a run at the interval of Daly.

        The cost of a save is all that it adds: to the step that begins it and to those beside it.
        """
        plain = float(np.median(self.plain_s))
        saving, beside = float(np.median(self.saving_s)), float(np.median(self.beside_s or [plain]))
        cost = (sum(self.saving_s) + sum(self.beside_s)) / len(self.saving_s)
        cost = max(0.0, cost - plain * (1 + len(self.beside_s) / len(self.saving_s)))
        return {
            "plain_step_s": plain,
            "saving_step_s": saving,
            "step_beside_s": beside,
            "save_s": float(np.median(self.saves_s)),
            "saving_over_plain": saving / plain,
            "saving_quartiles": (np.percentile(self.saving_s, (25, 75)) / plain).tolist(),
            "beside_over_plain": beside / plain,
            "cost_s": cost,
            "mtbf_s": mtbf_s,
            "interval_s": daly_interval.daly(cost, mtbf_s),
            "overhead": daly_interval.overhead(cost, mtbf_s) if cost else 0.0,
        }


def text(figures: dict[str, Any]) -> str:
    """Return the lines of `SavingSteps.figures`."""
    low, high = figures["saving_quartiles"]
    return (
        f"in background: saving step {figures['saving_over_plain']:.2f}x ({low:.2f} - {high:.2f}) a plain one "
        f"({figures['plain_step_s']:.3f} s), steps beside it {figures['beside_over_plain']:.2f}x, complete after "
        f"{figures['save_s']:.2f} s\n"
        f"a save costs the steps {figures['cost_s']:.3f} s: {100 * figures['overhead']:.2f} % of a run that saves "
        f"every {figures['interval_s']:.0f} s (Daly, a failure every {figures['mtbf_s'] / 3600:.3g} h)"
    )


class SteadyWork:
    """Steps of about ``step_s`` seconds. Making it is collective: all ranks do equally much."""

    def __init__(self, comm: Communicator, step_s: float) -> None:
        self._comm = comm
        self._one = np.full((_SIDE, _SIDE), 1 / _SIDE, np.float32)
        self._other = np.empty_like(self._one)
        begin, count = time.perf_counter(), 50
        self._products(count)
        own = step_s * count / (time.perf_counter() - begin)
        self._count = max(1, round(min(comm.allgather_object(own))))

    def _products(self, count: int) -> None:
        for _ in range(count):
            np.matmul(self._one, self._one, out=self._other)

    def step(self, numbers: np.ndarray) -> np.ndarray:
        """Make a step; return the sums of ``numbers`` over the ranks. Collective."""
        self._products(self._count)
        sums = np.concatenate([[0.0], numbers])
        allreduce(self._comm, sums)
        return sums[1:]


def run(
    comm: Communicator, saver: BackgroundSaver, step_s: float, rounds: int, say: Callable[[str], None]
) -> SavingSteps:
    """Measure ``rounds`` saves after one that does not count. Collective over ``comm``."""
    work, steps, followers = SteadyWork(comm, step_s), SavingSteps(), 8
    for number in range(rounds + 1):
        plain = [slowest_s(comm, lambda: work.step(np.zeros(2))) for _ in range(max(8, min(followers, 50)))]
        begin = time.perf_counter()

        def saving() -> None:
            work.step(np.zeros(2))
            saver.begin()

        first = slowest_s(comm, saving)
        beside: list[float] = []
        while saver.is_busy and len(beside) < MOST_FOLLOWERS:
            beside.append(slowest_s(comm, lambda: saver.settle(work.step(saver.numbers()))))
        followers = len(beside)
        if number:
            steps.plain_s += plain
            steps.saving_s.append(first)
            steps.beside_s += beside
            steps.saves_s.append(time.perf_counter() - begin)
        if comm.rank == 0:
            say(f"save {number + 1} of {rounds + 1}: {followers} steps beside it")
    return steps
