"""How fast a run was and what its loss was when, from the time of every step on every rank.

Workers may be at different steps, and be done with them at different times. So the speed of a run is the mean over its
workers, of each over its own steps without the first, which compiles: W workers that are at work together make so many
steps of 1/W of a batch.
"""

import numpy as np


def workers(compute_s: np.ndarray) -> np.ndarray:
    """Return the ranks that compute; ``compute_s`` is (steps, ranks)."""
    return np.flatnonzero(np.nansum(compute_s, axis=0) > 0)


def ends_s(step_s: np.ndarray) -> np.ndarray:
    """Return when each worker had made each step, (steps, workers), in seconds since it had made its first one.

    ``step_s`` is (steps, workers). Where it is NaN a worker left out a step, because the others made it without its
    gradient (backup workers): then a step has the same end for all, the median over those that took part. One who came
    too late is in it with its own time.
    """
    ends = np.cumsum(np.nan_to_num(step_s), axis=0)
    if np.isnan(step_s).any():
        ends[np.isnan(step_s)] = np.nan
        ends = np.repeat(np.nanmedian(ends, axis=1)[:, None], step_s.shape[1], axis=1)
    since: np.ndarray = ends - ends[0]
    return since


def steps_per_s(step_s: np.ndarray, first: int = 0) -> float:
    """Return the steps per second of ``step_s`` (steps, workers), in the mean over the workers; NaN for too few.

    The first ``first`` of the steps behind the very first one are a transient, and left out.
    """
    if len(step_s) <= first + 1:
        return float("nan")
    ends = ends_s(step_s)
    return float(((len(ends) - 1 - first) / (ends[-1] - ends[first])).mean())


def curve(step_s: np.ndarray, loss: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return times and losses (steps - 1,): a step has the mean time of its workers, a loss the mean of ``window``.

    The first step is left out. The first losses are means of as many as there are.
    """
    times = ends_s(step_s)[1:].mean(axis=1)
    sums = np.concatenate([[0.0], np.cumsum(loss[1:])])
    last = np.arange(1, len(times) + 1)
    begin = np.maximum(0, last - window)
    return times, (sums[last] - sums[begin]) / (last - begin)


def loss_at(times: np.ndarray, losses: np.ndarray, moment_s: float) -> float:
    """Return the loss of the last step that had been made by ``moment_s``; NaN where there was none."""
    made = np.flatnonzero(times <= moment_s * (1 + 1e-9))
    return float(losses[made[-1]]) if made.size else float("nan")
