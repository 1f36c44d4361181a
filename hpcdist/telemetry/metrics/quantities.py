"""Quantities of a run: name, unit and meaning of every figure, and figures derived from the steps.

Names follow Prometheus: base units, ``_total`` for counters. Axes: S steps, W ranks of the world, K computing ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np

GAUGE: Final = "gauge"
COUNTER: Final = "counter"
PREFIX: Final = "hpcdist_"


@dataclass(frozen=True)
class Quantity:
    """Definition of a metric. ``kind``: gauge or counter. ``unit``: UCUM code. ``tag``: name in TensorBoard."""

    name: str
    unit: str
    kind: str
    meaning: str
    tag: str
    label: str = ""

    @property
    def prometheus(self) -> str:
        """Name of this metric in Prometheus."""
        return PREFIX + self.name


_ROWS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    GAUGE: (
        ("training_loss_nats", "1", "mean training loss of the last step", "loss/training"),
        ("validation_loss_nats", "1", "mean validation loss, when it was last taken", "loss/validation"),
        ("learning_rate", "1", "learning rate of the last step", "optimizer/learning_rate"),
        ("gradient_norm", "1", "norm of the mean gradient before clipping", "optimizer/gradient_norm"),
        ("loss_scale", "1", "the loss is multiplied with this before the backward", "optimizer/loss_scale"),
        ("step_seconds", "s", "time of the last step on its slowest rank", "time/step"),
        ("tokens_per_second", "1/s", "tokens of the last steps over their time", "speed/tokens_per_second"),
        ("phase_seconds", "s", "time a step in a phase, mean over the ranks that compute", "time/phase", "phase"),
        ("data_seconds", "s", "wait for data, a step in the mean since the start and over the ranks", "time/data"),
        ("communication_ratio", "1", "share of a step in communication that nothing hid", "communication/share"),
        ("hidden_communication_ratio", "1", "share of reductions that nobody waited for", "communication/hidden"),
        ("straggler_ratio", "1", "compute time of the slowest rank over that of the median one", "stragglers/ratio"),
        ("straggler_rank", "1", "the rank with the longest compute time", "stragglers/rank"),
        ("collective_bytes_per_second", "By/s", "bytes of buffers over time, by operation", "communication/bandwidth",
         "operation"),
        ("memory_bytes", "By", "arrays that are alive on the rank that holds most", "memory/now", "category"),
        ("memory_peak_bytes", "By", "the most that was alive at once on a rank", "memory/peak", "category"),
        ("power_watts", "W", "mean power of the job since the last report", "energy/power", "source"),
        ("energy_per_token_joules", "J", "joules of training over its tokens, so far", "energy/per_token"),
        ("utilisation_ratio", "1", "share of a resource in use, mean over the nodes", "utilisation", "resource"),
        ("checkpoint_seconds", "s", "time for which the last checkpoint held up the steps", "checkpoint/seconds"),
        ("checkpoint_bytes", "By", "size of the last checkpoint", "checkpoint/bytes"),
        ("world_ranks", "1", "ranks of the job", "job/ranks"),
        ("nodes", "1", "nodes of the job", "job/nodes"),
        ("logged_value", "1", "value that a script logs, mean over the ranks that log it", "logged", "name"),
        ("last_step_timestamp_seconds", "s", "Unix time at the end of the last step", "job/last_step"),
        ("start_timestamp_seconds", "s", "Unix time of this start of the run", "job/start"),
    ),
    COUNTER: (
        ("steps_total", "1", "completed optimizer steps", "job/steps"),
        ("tokens_total", "1", "tokens that were trained on", "job/tokens"),
        ("skipped_steps_total", "1", "steps without an update, since their gradient overflowed", "job/skipped_steps"),
        ("sent_bytes_total", "By", "bytes sent in messages, sum over the ranks", "communication/sent"),
        ("collective_seconds_total", "s", "time in an operation, mean over the ranks", "communication/seconds",
         "operation"),
        ("collective_bytes_total", "By", "bytes of buffers in an operation, sum over the ranks", "communication/bytes",
         "operation"),
        ("prefetch_hits_total", "1", "gathers ahead that were there when they were waited for", "prefetch/hits"),
        ("prefetch_misses_total", "1", "gathers ahead that were waited for", "prefetch/misses"),
        ("anomalies_total", "1", "flags: loss spikes, throughput drops and the like", "anomalies", "kind"),
        ("energy_joules_total", "J", "energy of the job over all of its starts", "energy/joules", "source"),
        ("emissions_grams_total", "g", "CO2 equivalents, by the intensity in the recipe", "energy/emissions"),
        ("network_bytes_total", "By", "bytes over the interfaces of the nodes", "network", "direction"),
        ("checkpoints_total", "1", "checkpoints that became complete", "checkpoint/count"),
    ),
}  # fmt: skip
_ALL: Final = [Quantity(name, unit, kind, *rest) for kind, rows in _ROWS.items() for name, unit, *rest in rows]
QUANTITIES: Final = {quantity.name: quantity for quantity in _ALL}
assert len(QUANTITIES) == len(_ALL)


def key(name: str, label: str = "") -> str:
    """Return the key of a metric in events: ``name``, or ``name[label]``. A label is a GPU number, for example."""
    assert bool(QUANTITIES[name].label) == bool(label), name
    return f"{name}[{label}]" if label else name


def split(key: str) -> tuple[str, str | None]:
    """Return the pair (name, label) from which the function `key` made ``key``. The label is None without brackets."""
    name, bracket, rest = key.partition("[")
    return name, rest.removesuffix("]") if bracket else None


WINDOW: Final = 50  # number of steps over which speed, fractions and stragglers are computed
PER_RANK: Final = (
    "step_s", "compute_s", "communication_s", "update_s", "data_s", "sent_bytes", "exposed_s", "overlapped_s",
)  # fmt: skip
PHASES: Final = ("compute", "communication", "update")
_COMMON: Final = {"training_loss_nats": "loss", "learning_rate": "learning_rate", "gradient_norm": "gradient_norm"}


@dataclass(frozen=True)
class StepRow:
    """Measurements of one training step on all ranks. NaN means that a value was not measured."""

    # Among the names, ``data_s`` is the wait for the batch, ``exposed_s`` the wait for overlapped reductions, and
    # ``overlapped_s`` the time of these reductions.
    step: int
    time_ns: int
    loss: float
    learning_rate: float
    tokens: float  # sum over the ranks
    gradient_norm: float = math.nan
    ranks: Mapping[str, np.ndarray] = field(default_factory=dict)  # names in `PER_RANK`; arrays (world,) in s or bytes


class DerivedFigures:
    """Calculator of metrics such as the speed over the last ``window`` steps. Steps must be passed in order."""

    # The first step after a start is excluded as soon as there is a second step. ``lock_step`` False: ranks do not wait
    # for each other.
    def __init__(self, window: int = WINDOW, *, lock_step: bool = True) -> None:
        assert window >= 1
        self.window, self._lock_step = window, lock_step
        self._rows: list[StepRow] = []  # at most ``window``, with the same number of ranks
        self._begins = True  # True if the first of these rows is the first of the start
        self.scores = np.empty(0)  # (W,) `straggler_scores` of the last rows

    def of(self, rows: Sequence[StepRow]) -> list[dict[str, float]]:
        """Return a list with a dict {metric key: value} for each step in ``rows``. Unknown metrics are left out."""
        # Only the dict of the last step has figures of the straggler (longest compute time). The function `key` makes
        # the keys.
        figures: list[dict[str, float]] = []
        for world, alike in groupby(rows, _world):
            if self._rows and _world(self._rows[-1]) != world:
                self._rows, self._begins = [], True  # ranks died or joined: columns changed their meaning
            window_rows = [*self._rows, *alike]
            figures += self._figures(window_rows)[len(self._rows) :]
            self._begins = self._begins and len(window_rows) <= self.window
            self._rows = window_rows[-self.window :]
        return figures

    def _figures(self, rows: Sequence[StepRow]) -> list[dict[str, float]]:
        columns = {name: _column(rows, name) for name in PER_RANK}  # (S, W)
        works = np.nansum(columns["compute_s"], axis=0) > 0  # (W,) computing ranks
        of = {name: values[:, works] for name, values in columns.items()}  # (S, K)
        tokens = np.array([row.tokens for row in rows], float)
        phases = {phase: mean_over_ranks(of[f"{phase}_s"]) for phase in PHASES}  # (S,)
        data = mean_over_ranks(of["data_s"])
        rest = mean_over_ranks(of["step_s"]) - sum(phases.values()) - np.nan_to_num(data)
        phases |= {"data": data, "other": np.maximum(rest, 0)}
        # Starting and waiting may take longer than the overlapped reductions: then nothing is hidden.
        exposed = _ratio(*self._sums(_total(of["exposed_s"]), _total(of["overlapped_s"])))
        series = {
            **{name: np.array([getattr(row, mine) for row in rows], float) for name, mine in _COMMON.items()},
            "step_seconds": max_over_ranks(of["step_s"]),
            "tokens_per_second": self._speed(tokens, of["step_s"]),
            "communication_ratio": _ratio(*self._sums(_total(of["communication_s"]), _total(of["step_s"]))),
            "hidden_communication_ratio": np.maximum(0, 1 - exposed),
            **{key("phase_seconds", phase): values for phase, values in phases.items()},
        }
        by_row = [{name: float(values[index]) for name, values in series.items()} for index in range(len(rows))]
        first = 1 if self._begins and len(rows) > 1 else 0
        self.scores = straggler_scores(np.where(works, columns["compute_s"], math.nan)[first:][-self.window :])
        if np.isfinite(self.scores).any():
            rank = int(np.nanargmax(self.scores))
            by_row[-1] |= {"straggler_rank": float(rank), "straggler_ratio": float(self.scores[rank])}
        return [{name: value for name, value in figures.items() if math.isfinite(value)} for figures in by_row]

    def _speed(self, tokens: np.ndarray, step_s: np.ndarray) -> np.ndarray:
        if self._lock_step:
            return _ratio(*self._sums(tokens, max_over_ranks(step_s)))
        of_ranks = [self._sums(tokens, column) for column in np.nan_to_num(step_s).T]
        if not of_ranks:
            return np.full(len(tokens), math.nan)
        return _ratio(of_ranks[0][0], np.max([spent for _, spent in of_ranks], axis=0))

    def _sums(self, *columns: np.ndarray) -> list[np.ndarray]:
        # Moving sums over the last ``self.window`` steps. Steps with NaN count as 0.
        is_known = np.isfinite(columns).all(axis=0)
        sums = []
        for column in columns:
            values = np.where(is_known, column, 0.0)
            steady = values.copy()
            if self._begins:
                steady[0] = 0.0
            upto = np.concatenate([[0.0], np.cumsum(steady)])
            last = np.arange(1, len(values) + 1)
            sums.append(upto[last] - upto[np.maximum(last - self.window, 0)])
            if self._begins:
                sums[-1][0] = values[0]  # the only row
        return sums


def straggler_scores(compute_s: np.ndarray) -> np.ndarray:
    """Return each rank's median compute time divided by the median rank's time. ``compute_s``: shape (steps, ranks)."""
    times = np.where(compute_s > 0, compute_s, math.nan)
    is_known = np.isfinite(times)
    medians = np.full(times.shape[1], math.nan)
    always = is_known.all(axis=0) & is_known.any(axis=0)
    medians[always] = np.median(times[:, always], axis=0) if always.any() else math.nan
    for rank in np.flatnonzero(is_known.any(axis=0) & ~always):
        medians[rank] = np.median(times[is_known[:, rank], rank])
    computing = medians[np.isfinite(medians)]
    return medians / np.median(computing) if computing.size else medians


def _world(row: StepRow) -> int:
    return max((len(values) for values in row.ranks.values()), default=0)


def _column(rows: Sequence[StepRow], name: str) -> np.ndarray:
    unknown = np.full(_world(rows[-1]), math.nan)
    return np.array([row.ranks.get(name, unknown) for row in rows], float)


def mean_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return each step's mean over the ranks with a finite value. ``values``: array of shape (steps, ranks)."""
    return _ratio(_total(values), np.isfinite(values).sum(axis=1).astype(float))


def _total(values: np.ndarray) -> np.ndarray:
    is_known = np.isfinite(values)
    return np.where(is_known.any(axis=1), np.where(is_known, values, 0.0).sum(axis=1), math.nan)


def max_over_ranks(values: np.ndarray) -> np.ndarray:
    """Return each step's maximum over the ranks, or NaN without a finite value. ``values``: shape (steps, ranks)."""
    filled = np.where(np.isfinite(values), values, -math.inf).max(axis=1, initial=-math.inf)
    return np.where(np.isfinite(filled), filled, math.nan)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(below), math.nan), where=below > 0)
