"""How fast a run was and what its loss was when, from the time of every step on every rank.

Workers may be at different steps. So the speed of a run is that of the time in which all of them had work: from the end
of the first step, which compiles, to the moment in which the first worker had made all of its steps. Later the others
have the machine, or the servers, to themselves.
"""

import numpy as np


def workers(compute_s: np.ndarray) -> np.ndarray:
    """Return the ranks that compute; ``compute_s`` is (steps, ranks)."""
    return np.flatnonzero(np.nansum(compute_s, axis=0) > 0)


def ends_s(step_s: np.ndarray) -> np.ndarray:
    """Return when each worker had made each step but the first, since the end of its first, (steps - 1, workers).

    ``step_s`` is (steps, workers). A step that a worker left out, because others made it without it, takes no time.
    """
    return np.nancumsum(step_s[1:], axis=0)


def steps_per_s(step_s: np.ndarray, first: int = 0) -> float:
    """Return the steps per second of ``step_s`` (steps, workers), in the mean over the workers; NaN for one step.

    The first ``first`` of the steps behind the very first one are a transient, and left out: the time begins when all
    workers have made them. Of the steps that are under way at its end, a worker has made a part.
    """
    ends = ends_s(step_s)
    if len(ends) <= first:
        return float("nan")
    start_s, stop_s = ends[first - 1].max() if first else 0.0, ends[-1].min()
    if stop_s <= start_s:
        return float("nan")
    count = np.arange(len(ends) + 1)
    made = [np.interp([start_s, stop_s], [0.0, *of_worker], count) for of_worker in ends.T]
    return float(np.diff(made).mean() / (stop_s - start_s))


def curve(step_s: np.ndarray, loss: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return times and losses (steps - 1,): a step has the mean time of its workers, a loss the mean of ``window``.

    The first ones are means of as many as there are.
    """
    times = ends_s(step_s).mean(axis=1)
    sums = np.concatenate([[0.0], np.cumsum(loss[1:])])
    last = np.arange(1, len(times) + 1)
    begin = np.maximum(0, last - window)
    return times, (sums[last] - sums[begin]) / (last - begin)


def loss_at(times: np.ndarray, losses: np.ndarray, moment_s: float) -> float:
    """Return the loss of the last step that had been made by ``moment_s``; NaN where there was none."""
    made = np.flatnonzero(times <= moment_s * (1 + 1e-9))
    return float(losses[made[-1]]) if made.size else float("nan")
