"""Search for the best learning rate of a batch size, as a sequence of trainings. Nothing here trains.

Every decision depends only on earlier results, so a restarted or distributed study repeats the same trainings.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final, Literal

import numpy as np

from hpcdist.optim.config import Scaling
from hpcdist.optim.rates import RULES

FACTOR: Final = 2.0  # ratio of neighbouring rates in the first grid and at its border
SLACK: Final = 1.25  # a larger batch may take this factor of the previous batch's updates
# A training ends at the target ("reached"), at its limit ("missed"), or if its loss is not finite or twice the initial
# loss ("diverged").
Status = Literal["reached", "missed", "diverged"]
Role = Literal["search", "check", "noise"]


@dataclass(frozen=True)
class Wanted:
    """A training to run. ``limit_samples`` is the sample count at which it stops; it is not part of the identity."""

    task: str
    optimizer: str
    batch: int
    seed: int
    role: Role
    learning_rate: float
    limit_samples: int = field(compare=False)


@dataclass(frozen=True)
class Ended:
    """Result of a training. ``samples`` is NaN unless the target was reached; ``loss`` is the lowest loss.

    ``curve`` (evaluations, 3): samples, validation loss, and smoothed gradient noise scale (NaN if not measured).
    """

    status: Status
    samples: float
    loss: float
    wall_s: float
    curve: np.ndarray


def crossing(samples: Sequence[float], losses: Sequence[float], target: float) -> float:
    """Return the samples at which the loss first reaches ``target``, by linear interpolation, or NaN."""
    for number, loss in enumerate(losses):
        if loss <= target:
            if number == 0:
                return float(samples[0])
            previous, share = samples[number - 1], (losses[number - 1] - target) / (losses[number - 1] - loss)
            return float(previous + share * (samples[number] - previous))
    return math.nan


class Search:
    """At most ``trials`` rates, powers of two times ``centre``: a grid of three, then its border, then gaps.

    If the best rate is at the border, the next rate is beyond; otherwise it halves the wider gap next to the best. The
    best rate has the fewest samples, or the lowest loss if no rate reaches the target. Diverging rates are the worst;
    among these the lowest is the best. Several trainings with a rate count by their median.
    """

    def __init__(self, centre: float, trials: int) -> None:
        self._centre, self._trials = centre, trials
        self._found: dict[float, list[Ended]] = {}  # by exponent

    def rate(self, exponent: float) -> float:
        return self._centre * FACTOR**exponent

    def next(self) -> float | None:
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
        index = tried.index(best)
        below, above = tried[index - 1], tried[index + 1]
        widths = best - below, above - best
        upwards = widths[1] > widths[0] or (widths[1] == widths[0] and self._worth(above) < self._worth(below))
        return (best + above) / 2 if upwards else (best + below) / 2

    def tell(self, exponent: float, ended: Sequence[Ended]) -> None:
        self._found[exponent] = list(ended)

    def ended(self, exponent: float) -> Ended:
        """Return the median result of a tried rate."""
        return median_low((_worth(exponent, one), number, one) for number, one in enumerate(self._found[exponent]))[2]

    @property
    def best(self) -> float:
        return min(self._found, key=self._worth)

    @property
    def samples(self) -> float:
        return self.ended(self.best).samples if self._found else math.nan

    @property
    def at_border(self) -> bool:
        """True if the best rate is the lowest or highest tried rate, so better rates may lie beyond."""
        return self.best in (min(self._found), max(self._found))

    def _worth(self, exponent: float) -> tuple[int, float]:
        return _worth(exponent, self.ended(exponent))


def _worth(exponent: float, ended: Ended) -> tuple[int, float]:
    worths = {"reached": (0, ended.samples), "missed": (1, ended.loss), "diverged": (2, exponent)}
    return worths[ended.status]


@dataclass(frozen=True)
class Line:
    """Plan of the study for one optimizer and task: ``batches`` in ascending order, and settings of the search.

    ``first_rate`` is the centre of the search for the smallest batch; later centres are the best rate of the previous
    batch, scaled by ``rule``. Each rate trains with ``search_seeds``. The best rate trains again with the new
    ``seeds``, and at the second-largest batch once more to measure the noise scale.

    A training stops at ``limit_samples``, when it takes more updates than the previous batch by `SLACK`, or, in the
    search, when it needs more samples than the best rate so far.
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
    """Result for an optimizer and batch. ``at_border``: the best rate is at the border of the tried rates."""

    task: str
    optimizer: str
    batch: int
    learning_rate: float
    searched: Ended
    at_border: bool
    checks: tuple[Ended, ...] = ()
    noise: Ended | None = None


def trials(line: Line, cells: list[Cell]) -> Generator[Wanted, Ended]:
    """Yield the trainings of ``line``, receive the result of each, and append a cell for each batch to ``cells``."""
    done = 0
    centre, previous_batch, limit = line.first_rate, line.batches[0], line.limit_samples
    for batch in line.batches:
        search = Search(centre * RULES[line.rule](batch / previous_batch), line.trials)

        def request(role: Role, rate: float, seed: int, limit: int, batch: int = batch) -> Wanted:
            return Wanted(line.task, line.optimizer, batch, seed, role, rate, limit)

        while (exponent := search.next()) is not None:
            least = limit if math.isnan(search.samples) else min(limit, math.ceil(search.samples))
            results: list[Ended] = []
            for seed in line.search_seeds:
                results.append((yield request("search", search.rate(exponent), seed, least)))
                if 2 * sum(training.status != "reached" for training in results) > len(line.search_seeds):
                    break  # the median misses the target
            search.tell(exponent, results)
        centre = search.rate(search.best)
        checks: tuple[Ended, ...] = ()
        noise = None
        if not math.isnan(search.samples):  # no rate to check otherwise
            for seed in line.seeds:
                checks = (*checks, (yield request("check", centre, seed, limit)))
            if batch == line.batches[-2:][0]:
                noise = yield request("noise", centre, line.seeds[0], limit)
        searched = search.ended(search.best)
        cells.append(Cell(line.task, line.optimizer, batch, centre, searched, search.at_border, checks, noise))
        done, previous_batch = done + 1, batch
        if done < len(line.batches) and not math.isnan(search.samples):
            limit = math.ceil(SLACK * search.samples * line.batches[done] / batch)
