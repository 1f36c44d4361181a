"""Tournament of candidate algorithms on the same buffer: median times of the slowest rank, in rounds.

Every round begins with a barrier and has an order of its own; candidates that are far slower than the best are
dropped. All ranks compute the same numbers from the same maxima over ranks, so all drop the same candidates and make
the same number of rounds, whatever their clocks show.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from hpcdist.collectives.reduction import REFUSALS
from hpcdist.collectives.tuning.cost_model import Clock, slowest_rank
from hpcdist.comm.communicator import Communicator

Candidate = Callable[[], None]

FIRST_LOOKS: Final = 2  # rounds before any is dropped; the better one of each counts
HOPELESS: Final = 2.0  # times the best in the first looks: not measured any further
FEWEST_ROUNDS, MOST_ROUNDS = 3, 25
FEWEST_CALLS: Final = 1 + FIRST_LOOKS + FEWEST_ROUNDS  # of each candidate that is not dropped
SAMPLE_S: Final = 100e-6  # short calls are repeated to fill it: the clock and the barrier are then small beside them
MOST_REPEATS: Final = 8


class Tournament:
    """Candidates by name. ``comm`` is what they reduce over, ``everyone`` joins all who must agree on the winner."""

    def __init__(
        self, comm: Communicator, everyone: Communicator, candidates: Mapping[str, Candidate], clock: Clock
    ) -> None:
        self.comm, self.everyone, self.clock = comm, everyone, clock
        self.candidates = dict(candidates)
        self.warming_s = 0.0  # what the first calls took: they may compile kernels, which a run has to do anyhow
        self._began = clock()

    def run(self, share_s: float, kept: str) -> dict[str, float]:
        """Return the median time of each candidate that was not hopeless, in about ``share_s`` seconds. Collective.

        The first call of each is not part of the share. ``kept`` stays to the end however slow it is. A candidate that
        refuses to run here is left out.
        """
        began = self.clock()
        self._drop_refusals()
        self._began = self.clock()
        self.warming_s = slowest_rank(self.everyone, self._began - began)
        repeats = dict.fromkeys(self.candidates, 1)
        looks = [self._round(repeats, turn) for turn in range(FIRST_LOOKS)]
        first = {name: min(times[name] for times, _ in looks) for name in self.candidates}
        if looks[-1][1] > share_s:
            return first  # the time is up already
        best = min(first.values())
        self.candidates = {
            name: call for name, call in self.candidates.items() if first[name] <= HOPELESS * best or name == kept
        }
        repeats = {name: _repeats(first[name]) for name in self.candidates}
        rounds: list[dict[str, float]] = []
        while len(rounds) < MOST_ROUNDS:
            times, since_s = self._round(repeats, len(rounds))
            rounds.append(times)
            # Another round may take as long as this one did on the slowest rank.
            round_s = sum(times[name] * repeats[name] for name in times)
            if len(rounds) >= FEWEST_ROUNDS and since_s + round_s > share_s:
                break
        return {name: statistics.median(times[name] for times in rounds) for name in self.candidates}

    def _drop_refusals(self) -> None:
        """Call each candidate once, which also opens its connections; drop those that any rank cannot run.

        An algorithm refuses on all ranks of its communicator alike, before it has sent anything.
        """
        refused = np.zeros(len(self.candidates))
        for index, call in enumerate(self.candidates.values()):
            try:
                call()
            except REFUSALS:
                refused[index] = 1
        self.everyone.allreduce(refused, "max")
        self.candidates = {
            name: call for (name, call), no in zip(self.candidates.items(), refused, strict=True) if not no
        }

    def _round(self, repeats: Mapping[str, int], turn: int) -> tuple[dict[str, float], float]:
        """Return the time of one call of each candidate, and since the race began, on the slowest rank.

        Each round has an order of its own: what ran before has left its data in the caches.
        """
        names = list(self.candidates)
        seconds = np.zeros(len(names) + 1)
        for index in np.random.default_rng(turn).permutation(len(names)):
            call, times = self.candidates[names[index]], repeats[names[index]]
            self.comm.barrier()
            began = self.clock()
            for _ in range(times):
                call()
            seconds[index] = (self.clock() - began) / times
        seconds[-1] = self.clock() - self._began
        self.everyone.allreduce(seconds, "max")
        found = seconds.tolist()
        return dict(zip(names, found[:-1], strict=True)), found[-1]


def _repeats(seconds: float) -> int:
    return MOST_REPEATS if seconds <= SAMPLE_S / MOST_REPEATS else max(1, round(SAMPLE_S / seconds))
