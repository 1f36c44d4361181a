"""Flags for what a person would want to know of a run at once: each with its reason, told once until it is over.

What is usual is learnt from the steps before, by medians: a few odd steps do not change it. A loss that does not fall
is no anomaly.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpcdist.arrays.sizes import counted
from hpcdist.telemetry import catalogue
from hpcdist.telemetry.derived import PHASES

KINDS: Final = ("loss_spike", "gradient_spike", "throughput_drop", "straggler", "skipped_steps", "slow_data")
WINDOW: Final = 100  # steps from which is learnt what is usual
LEAST: Final = 20  # before so many steps nothing is usual
WARM_STEPS: Final = 10  # of a start: kernels are compiled and caches filled
RECENT: Final = 10  # steps that have to be slow before the run is
LOSS_RISE: Final = 0.1  # of the median: less is no spike, however little the loss varies
NORM_RISE: Final = 2.0  # the norm of a gradient varies by much
NORM_DEVIATIONS: Final = 10.0
STRAGGLER: Final = 1.3  # of the compute time of the median rank
SKIPPED: Final = 10  # in a row: the scale of the loss was divided by 1024, and still the gradient overflows
DATA_SHARE: Final = 0.3  # of a step, spent waiting for the batch
OVER: Final = 0.5  # an anomaly is over when half of what it needs to be one is gone
_PHASES: Final = tuple(catalogue.key("phase_seconds", phase) for phase in (*PHASES, "data", "other"))
_DATA: Final = catalogue.key("phase_seconds", "data")
_MAD: Final = 1.4826  # of a normal distribution: standard deviation over median absolute deviation


@dataclass(frozen=True)
class Anomaly:
    """Something odd, first seen in ``step``: ``value`` where ``reference`` is usual, and in ``text`` for a person."""

    kind: str
    step: int
    value: float
    reference: float
    text: str


class Anomalies:
    """Looks at the steps of one start of a run, in their order.

    ``loss_spike`` is how many robust standard deviations above the median of the steps before a loss has to be, and
    ``throughput_drop`` the share of the tokens a second that has to be lost; 0 turns either off.
    """

    def __init__(self, *, loss_spike: float = 5.0, throughput_drop: float = 0.5, window: int = WINDOW) -> None:
        assert window >= LEAST
        self.counts: Counter[str] = Counter()  # anomalies so far, by kind
        self._loss = _Spikes("loss_spike", "loss", window, loss_spike, LOSS_RISE) if loss_spike else None
        self._norm = _Spikes("gradient_spike", "norm of the gradient", window, NORM_DEVIATIONS, NORM_RISE)
        self._speed = _Drops(window, throughput_drop) if throughput_drop else None
        self._data = _Data()
        self._straggler = _Stragglers()
        self._skips = _Skips()
        self._rows = 0

    def of(
        self,
        step: int,
        tokens: float,
        figures: Mapping[str, float],
        *,
        skipped: bool = False,
        held_up: bool = False,
    ) -> list[Anomaly]:
        """Return what begins to be odd with ``step``, of ``tokens``, which has the ``figures`` that `Derived` finds.

        ``skipped``: it updated nothing. ``held_up``: a checkpoint or a validation is in its time, which says nothing
        about the speed then.
        """
        self._rows += 1
        found = [self._skips.look(step, skipped), self._norm.look(step, figures.get("gradient_norm", math.nan))]
        if self._loss is not None:
            found.append(self._loss.look(step, figures.get("training_loss_nats", math.nan)))
        if self._rows > WARM_STEPS and not held_up:
            seconds = figures.get("step_seconds", math.nan)
            if self._speed is not None and seconds > 0:
                found.append(self._speed.look(step, tokens / seconds))
            found.append(self._data.look(step, figures))
        if self._rows > WARM_STEPS + LEAST:
            found.append(self._straggler.look(step, figures))
        told = [anomaly for anomaly in found if anomaly is not None]
        self.counts.update(anomaly.kind for anomaly in told)
        return told


class _Usual:
    """Median and robust standard deviation of the last values, brought up to date every tenth of the window."""

    def __init__(self, window: int) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self.median = self.deviation = math.nan
        self._every, self._since = window // 10, 0

    def add(self, value: float) -> None:
        """Take a value, which is finite."""
        self.values.append(value)
        self._since += 1
        if len(self.values) >= LEAST and (self._since >= self._every or math.isnan(self.median)):
            self.refresh()

    def refresh(self) -> None:
        """Bring median and deviation up to date: at hand are `LEAST` values at least."""
        median = self.median = statistics.median(self.values)  # of so few, faster than an array
        self.deviation = _MAD * statistics.median([abs(value - median) for value in self.values])
        self._since = 0


class _Spikes:
    """Values far above those before."""

    def __init__(self, kind: str, what: str, window: int, deviations: float, rise: float) -> None:
        self._kind, self._what, self._deviations, self._rise = kind, what, deviations, rise
        self._usual = _Usual(window)
        self._lasts = False

    def _limit(self) -> float:
        usual = self._usual
        return usual.median + max(self._deviations * usual.deviation, self._rise * abs(usual.median))

    def look(self, step: int, value: float) -> Anomaly | None:
        if not math.isfinite(value):
            return None
        told, usual = None, self._usual
        if value > self._limit() and not self._lasts:  # never before there is a median
            usual.refresh()
            if value > self._limit():
                self._lasts = True
                told = self._told(step, value)
        elif self._lasts and value < usual.median + OVER * (self._limit() - usual.median):
            self._lasts = False
        usual.add(value)
        return told

    def _told(self, step: int, value: float) -> Anomaly:
        usual = self._usual
        above = f"{value / usual.median:.1f} times" if usual.median > 0 else "above"
        if usual.deviation > 0:
            above = f"{(value - usual.median) / usual.deviation:.1f} deviations above"
        before = counted(len(usual.values), "step")
        text = f"step {step}: {self._what} {value:.4g}, {above} the median {usual.median:.4g} of the {before} before"
        return Anomaly(self._kind, step, value, usual.median, text)


class _Drops:
    """Speeds of some steps in a row that are far below those before."""

    def __init__(self, window: int, drop: float) -> None:
        self._drop = drop
        self._before = _Usual(window)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lasts = False

    def look(self, step: int, speed: float) -> Anomaly | None:
        if len(self._recent) == RECENT:
            self._before.add(self._recent[0])
        self._recent.append(speed)
        usual = self._before.median
        # Only a slow step can make the median of the recent ones fall below the limit.
        if not self._lasts and speed < (1 - self._drop) * usual:
            now = statistics.median(self._recent)
            if now < (1 - self._drop) * usual:
                self._lasts = True
                text = (
                    f"step {step}: {now:,.0f} tokens/s in the last {RECENT} steps, {1 - now / usual:.0%} below the "
                    f"{usual:,.0f} of the steps before"
                )
                return Anomaly("throughput_drop", step, now, usual, text)
        elif self._lasts and speed > (1 - OVER * self._drop) * usual:
            self._lasts = statistics.median(self._recent) <= (1 - OVER * self._drop) * usual
        return None


class _Data:
    """Steps of which much is spent waiting for the batch."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=RECENT)
        self._lasts = False

    def look(self, step: int, figures: Mapping[str, float]) -> Anomaly | None:
        waited = figures.get(_DATA, math.nan)
        seconds = sum(figures.get(name, 0.0) for name in _PHASES)
        if math.isnan(waited) or seconds <= 0:
            return None
        self._shares.append(waited / seconds)
        share = sum(self._shares) / len(self._shares)
        if not self._lasts and len(self._shares) == RECENT and share > DATA_SHARE:
            self._lasts = True
            text = (
                f"step {step}: {share:.0%} of the last {RECENT} steps went into waiting for data; "
                "let more of it be read ahead, or nearer to the nodes"
            )
            return Anomaly("slow_data", step, share, DATA_SHARE, text)
        self._lasts = self._lasts and share >= OVER * DATA_SHARE
        return None


class _Stragglers:
    """A rank that computes for longer than the others, over the window of `Derived`."""

    def __init__(self) -> None:
        self._rank = -1  # of whom it was told

    def look(self, step: int, figures: Mapping[str, float]) -> Anomaly | None:
        ratio = figures.get("straggler_ratio", math.nan)
        if math.isnan(ratio):
            return None
        rank = int(figures["straggler_rank"])
        if ratio <= 1 + OVER * (STRAGGLER - 1):
            self._rank = -1
        if ratio <= STRAGGLER or rank == self._rank:
            return None
        self._rank = rank
        text = f"step {step}: rank {rank} computes {ratio:.2f} times as long as the median rank, and the others wait"
        return Anomaly("straggler", step, ratio, 1.0, text)


class _Skips:
    """Steps in a row whose gradient overflowed."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def look(self, step: int, skipped: bool) -> Anomaly | None:
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row != SKIPPED:
            return None
        text = f"step {step}: the last {SKIPPED} steps updated nothing, since their gradients overflowed"
        return Anomaly("skipped_steps", step, float(SKIPPED), 0.0, text)
