"""Search for the best rate of a batch size, and the trainings that it wants, one after the other.

Everything here is decided by the results of the trials before, so that a study that was killed, or has other processes
to run its trials, makes the same ones again. Nothing here trains.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final, Literal

import numpy as np

from hpcdist.optim.config import Scaling
from hpcdist.optim.rates import RULES

FACTOR: Final = 2.0  # between neighbouring rates of the first grid, and beyond its border
SLACK: Final = 1.25  # a batch that needs more than so much more than in proportion to its size takes more updates
# A training ends at the target, missed at its limit, or diverged where its loss is not finite or twice that of the
# start.
Status = Literal["reached", "missed", "diverged"]
Role = Literal["search", "check", "noise"]


@dataclass(frozen=True)
class Wanted:
    """A training to be made; ``limit_samples`` is where it is given up, and is no part of what it is."""

    task: str
    optimizer: str
    batch: int
    seed: int
    role: Role
    learning_rate: float
    limit_samples: int = field(compare=False)


@dataclass(frozen=True)
class Ended:
    """What came of it. ``samples`` is NaN unless the target was reached; ``loss`` is the lowest that was seen.

    ``curve`` (evaluations, 3) has samples, validation loss, and the smoothed gradient noise scale, NaN where it is not
    measured.
    """

    status: Status
    samples: float
    loss: float
    wall_s: float
    curve: np.ndarray


def crossing(samples: Sequence[float], losses: Sequence[float], target: float) -> float:
    """Return the samples at which the loss first comes down to ``target``, NaN where it does not.

    On the straight line from the evaluation before.
    """
    for number, loss in enumerate(losses):
        if loss <= target:
            if number == 0:
                return float(samples[0])
            before, share = samples[number - 1], (losses[number - 1] - target) / (losses[number - 1] - loss)
            return float(before + share * (samples[number] - before))
    return math.nan


class Search:
    """At most ``trials`` rates, powers of two around ``centre``: a grid of three, its border, then its gaps.

    Where the best is at the border, the next rate lies beyond; else in the wider gap beside the best. Fewest samples
    are best; where no rate reaches the target, the lowest loss; a rate that diverges is worse than any that does not,
    and of those the lowest is best. Of several trainings with a rate the median counts.
    """

    def __init__(self, centre: float, trials: int) -> None:
        self._centre, self._trials = centre, trials
        self._found: dict[float, list[Ended]] = {}  # by exponent

    def rate(self, exponent: float) -> float:
        """Return the rate of an exponent."""
        return self._centre * FACTOR**exponent

    def next(self) -> float | None:
        """Return the exponent to try next, None when the budget is spent."""
        if len(self._found) >= self._trials:
            return None
        for exponent in (0.0, -1.0, 1.0):
            if exponent not in self._found:
                return exponent
        tried, best = sorted(self._found), self.best
        if best == tried[-1]:
            return best + 1.0
        if best == tried[0]:
            return best - 1.0
        place = tried.index(best)
        below, above = tried[place - 1], tried[place + 1]
        widths = best - below, above - best
        upwards = widths[1] > widths[0] or (widths[1] == widths[0] and self._worth(above) < self._worth(below))
        return (best + above) / 2 if upwards else (best + below) / 2

    def tell(self, exponent: float, ended: Sequence[Ended]) -> None:
        """Take the results of a rate."""
        self._found[exponent] = list(ended)

    def ended(self, exponent: float) -> Ended:
        """Return the median result of a rate that was tried."""
        return median_low((_worth(exponent, one), number, one) for number, one in enumerate(self._found[exponent]))[2]

    @property
    def best(self) -> float:
        """The exponent of the best rate so far."""
        return min(self._found, key=self._worth)

    @property
    def samples(self) -> float:
        """What the best rate needs, NaN where none reached the target."""
        return self.ended(self.best).samples if self._found else math.nan

    @property
    def at_border(self) -> bool:
        """Whether the best is the lowest or the highest that was tried: better ones may lie beyond."""
        return self.best in (min(self._found), max(self._found))

    def _worth(self, exponent: float) -> tuple[int, float]:
        return _worth(exponent, self.ended(exponent))


def _worth(exponent: float, ended: Ended) -> tuple[int, float]:
    of = {"reached": (0, ended.samples), "missed": (1, ended.loss), "diverged": (2, exponent)}
    return of[ended.status]


@dataclass(frozen=True)
class Line:
    """What is studied of one optimizer on one task: the batches in rising order, and where the search begins.

    ``first_rate`` is the centre for the smallest batch; each further one has the best rate of the one before, scaled
    by ``rule``. The search trains each rate with ``search_seeds``; the best one is checked with ``seeds``, which it has
    not seen, and at the batch before the last the noise scale is measured too.

    A training is given up at ``limit_samples``; in a larger batch where it takes more updates, by `SLACK`, than the
    batch before; and in the search where the best rate so far has reached the target.
    """

    task: str
    optimizer: str
    batches: tuple[int, ...]
    rule: Scaling
    first_rate: float
    limit_samples: int
    trials: int
    search_seeds: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """What was found for one optimizer and batch. ``at_border``: the search ended with its best rate at the border."""

    task: str
    optimizer: str
    batch: int
    learning_rate: float
    searched: Ended
    at_border: bool
    checks: tuple[Ended, ...] = ()
    noise: Ended | None = None


def trials(line: Line, cells: list[Cell]) -> Generator[Wanted, Ended]:
    """Yield the trainings of ``line``, take the result of each, and add to ``cells`` what was found for a batch."""
    done = 0
    centre, before, limit = line.first_rate, line.batches[0], line.limit_samples
    for batch in line.batches:
        search = Search(centre * RULES[line.rule](batch / before), line.trials)

        def wanted(role: Role, rate: float, seed: int, limit: int, batch: int = batch) -> Wanted:
            return Wanted(line.task, line.optimizer, batch, seed, role, rate, limit)

        while (exponent := search.next()) is not None:
            least = limit if math.isnan(search.samples) else min(limit, math.ceil(search.samples))
            found: list[Ended] = []
            for seed in line.search_seeds:
                found.append((yield wanted("search", search.rate(exponent), seed, least)))
                if 2 * sum(one.status != "reached" for one in found) > len(line.search_seeds):
                    break  # the median has not
            search.tell(exponent, found)
        centre = search.rate(search.best)
        checks: tuple[Ended, ...] = ()
        noise = None
        if not math.isnan(search.samples):  # else there is nothing to check
            for seed in line.seeds:
                checks = (*checks, (yield wanted("check", centre, seed, limit)))
            if batch == line.batches[-2:][0]:
                noise = yield wanted("noise", centre, line.seeds[0], limit)
        searched = search.ended(search.best)
        cells.append(Cell(line.task, line.optimizer, batch, centre, searched, search.at_border, checks, noise))
        done, before = done + 1, batch
        if done < len(line.batches) and not math.isnan(search.samples):
            limit = math.ceil(SLACK * search.samples * line.batches[done] / batch)
