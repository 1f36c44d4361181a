"""Detection of anomalies in a run; each is reported once until it is over.

The baseline is the median of earlier steps, so a few outliers do not change it.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.units import counted
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.quantities import PHASES

KINDS: Final = ("loss_spike", "gradient_spike", "throughput_drop", "straggler", "skipped_steps", "slow_data")
WINDOW: Final = 100  # number of steps in the baseline, and of normal steps after which an anomaly is over
MIN_STEPS: Final = 20  # smallest number of steps for a baseline
WARM_STEPS: Final = 10  # first steps of a start: kernels are compiled and caches filled
BLOCK_STEPS: Final = 10  # speeds are measured over blocks of at least this number of steps,
BLOCK_S: Final = 10.0  # and at least this time: shorter drops are ignored
BLOCKS: Final = 60  # number of blocks in the baseline of speed
MIN_BLOCKS: Final = 5  # smallest number of blocks for a baseline, and of normal blocks after which an anomaly is over
LOSS_RISE: Final = 0.1  # smallest rise over the median that is a loss spike
NORM_RISE: Final = 2.0  # the same for the gradient norm, which varies more
NORM_DEVIATIONS: Final = 10.0
STRAGGLER: Final = 1.3  # ratio to the compute time of the median rank
MAX_SKIPPED: Final = 10  # skipped steps in a row: the loss scale was divided by 1024, and gradients still overflow
DATA_SHARE: Final = 0.3  # fraction of the time spent waiting for batches
_PHASES: Final = tuple(quantities.key("phase_seconds", phase) for phase in (*PHASES, "data", "other"))
DATA_SECONDS: Final = quantities.key("phase_seconds", "data")
_MAD: Final = 1.4826  # standard deviation over median absolute deviation of a normal distribution


@dataclass(frozen=True)
class Anomaly:
    """Anomaly of type ``kind`` that began in ``step``, with a measured value, a reference value and a message."""

    kind: str
    step: int
    value: float
    reference: float
    text: str


class Anomalies:
    """Detector of anomalies in the steps since the last start of a run. Steps must be passed to `of` in order."""

    def __init__(self, *, loss_spike: float = 5.0, throughput_drop: float = 0.5, unit: str = "tokens") -> None:
        self.counts: Counter[str] = Counter()  # anomalies so far, by kind
        self._loss = _Spikes("loss_spike", "loss", loss_spike, LOSS_RISE) if loss_spike else None
        self._norm = _Spikes("gradient_spike", "norm of the gradient", NORM_DEVIATIONS, NORM_RISE)
        self._speed = _Speeds(throughput_drop, unit)
        self._straggler = _Stragglers()
        self._skipped = 0  # in a row
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
        """Return a list of the anomalies beginning in ``step``. ``figures``: metrics of the step (`DerivedFigures`)."""
        # ``skipped``: the step made no update. ``held_up``: the step includes a checkpoint or a validation, so its
        # speed does not count.
        self._rows += 1
        self._skipped = self._skipped + 1 if skipped else 0
        candidates = [self._norm.look(step, figures.get("gradient_norm", math.nan))]
        if self._skipped == MAX_SKIPPED:
            text = f"step {step}: the last {MAX_SKIPPED} steps updated nothing, since their gradients overflowed"
            candidates.append(Anomaly("skipped_steps", step, float(MAX_SKIPPED), 0.0, text))
        if self._loss is not None:
            candidates.append(self._loss.look(step, figures.get("training_loss_nats", math.nan)))
        if self._rows > WARM_STEPS:
            if not held_up:
                candidates += self._speed.look(step, tokens, figures)
            candidates.append(self._straggler.look(step, figures))
        anomalies = [anomaly for anomaly in candidates if anomaly is not None]
        self.counts.update(anomaly.kind for anomaly in anomalies)
        return anomalies


class _RollingBaseline:
    # Median and robust standard deviation of the last `WINDOW` values; NaN with fewer than `MIN_STEPS` values.
    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)
        self.median = self.deviation = math.nan
        self._since = 0

    def add(self, value: float) -> None:
        self.values.append(value)
        self._since += 1
        if len(self.values) >= MIN_STEPS and (self._since >= WINDOW // 10 or math.isnan(self.median)):
            self.refresh()

    def refresh(self) -> None:
        median = self.median = statistics.median(self.values)  # faster than an array for few values
        self.deviation = _MAD * statistics.median([abs(value - median) for value in self.values])
        self._since = 0


class _Spikes:
    # Detects values far above the median of the last `WINDOW` values. Skips spikes soon after another spike.
    def __init__(self, kind: str, what: str, deviations: float, rise: float) -> None:
        self._kind, self._what, self._deviations, self._rise = kind, what, deviations, rise
        self._usual = _RollingBaseline()
        self._calm = WINDOW  # steps since the last spike

    def _limit(self) -> float:
        usual = self._usual
        return usual.median + max(self._deviations * usual.deviation, self._rise * abs(usual.median))

    def look(self, step: int, value: float) -> Anomaly | None:
        if not math.isfinite(value):
            return None
        anomaly, usual = None, self._usual
        self._calm += 1
        if value > self._limit():  # False until there is a median
            usual.refresh()
            if value > self._limit():
                anomaly = self._anomaly(step, value) if self._calm > WINDOW else None
                self._calm = 0
        usual.add(value)
        return anomaly

    def _anomaly(self, step: int, value: float) -> Anomaly:
        usual = self._usual
        above = f"{value / usual.median:.1f} times" if usual.median > 0 else "above"
        if usual.deviation > 0:
            above = f"{(value - usual.median) / usual.deviation:.1f} deviations above"
        before = counted(len(usual.values), "step")
        text = f"step {step}: {self._what} {value:.4g}, {above} the median {usual.median:.4g} of the {before} before"
        return Anomaly(self._kind, step, value, usual.median, text)


class _Speeds:
    # Detects throughput drops by more than the fraction ``drop``, and long waits for data.
    def __init__(self, drop: float, unit: str) -> None:
        self._drop, self._unit = drop, unit
        self._before: deque[float] = deque(maxlen=BLOCKS)
        self._steps: list[float] = []  # tokens a second of each step of the block
        self._seconds = self._phases = self._waited = 0.0
        self._calm: Counter[str] = Counter(throughput_drop=MIN_BLOCKS, slow_data=MIN_BLOCKS)

    def look(self, step: int, tokens: float, figures: Mapping[str, float]) -> list[Anomaly]:
        seconds = figures.get("step_seconds", math.nan)
        if not seconds > 0:
            return []
        self._steps.append(tokens / seconds)
        self._seconds += seconds
        if DATA_SECONDS in figures:
            self._waited += figures[DATA_SECONDS]
            self._phases += sum(figures.get(name, 0.0) for name in _PHASES)
        if len(self._steps) < BLOCK_STEPS or self._seconds < BLOCK_S:
            return []
        candidates = [self._slow(step), self._waiting(step)]
        self._steps = []
        self._seconds = self._phases = self._waited = 0.0
        return [anomaly for anomaly in candidates if anomaly is not None]

    def _is_new(self, kind: str, is_odd: bool) -> bool:
        calm = self._calm[kind]
        self._calm[kind] = 0 if is_odd else calm + 1
        return is_odd and calm >= MIN_BLOCKS

    def _slow(self, step: int) -> Anomaly | None:
        now = statistics.median(self._steps)  # a single slow step is not a drop
        usual = statistics.median(self._before) if len(self._before) >= MIN_BLOCKS else 0.0
        self._before.append(now)
        if not self._is_new("throughput_drop", self._drop > 0 and now < (1 - self._drop) * usual):
            return None
        text = (
            f"step {step}: {now:,.0f} {self._unit}/s in the last {len(self._steps)} steps, {1 - now / usual:.0%} below "
            f"the {usual:,.0f} of the steps before"
        )
        return Anomaly("throughput_drop", step, now, usual, text)

    def _waiting(self, step: int) -> Anomaly | None:
        share = self._waited / self._phases if self._phases > 0 else 0.0
        if not self._is_new("slow_data", share > DATA_SHARE):
            return None
        text = (
            f"step {step}: {share:.0%} of the last {len(self._steps)} steps went into waiting for data; "
            "prefetch more of it, or store it nearer to the nodes"
        )
        return Anomaly("slow_data", step, share, DATA_SHARE, text)


class _Stragglers:
    # Detects a rank whose compute time exceeds `STRAGGLER` times the median rank's for `BLOCK_S` seconds.
    def __init__(self) -> None:
        self._rank, self._since_s = -1, 0.0  # the slow rank, and the time since when it is slow
        self._reported, self._seen = -1, 0  # the reported rank, and the last row in which it was slow
        self._rows, self._now_s = 0, 0.0

    def look(self, step: int, figures: Mapping[str, float]) -> Anomaly | None:
        self._rows += 1
        self._now_s += max(0.0, figures.get("step_seconds", 0.0))
        ratio = figures.get("straggler_ratio", math.nan)
        if math.isnan(ratio):
            return None
        rank = int(figures["straggler_rank"]) if ratio > STRAGGLER else -1
        if rank != self._rank:
            self._rank, self._since_s = rank, self._now_s
        if self._reported >= 0 and self._rows - self._seen > WINDOW:
            self._reported = -1  # the anomaly is over
        if rank >= 0 and rank == self._reported:
            self._seen = self._rows
        if rank < 0 or self._reported >= 0 or self._now_s - self._since_s < BLOCK_S:
            return None
        self._reported, self._seen = rank, self._rows
        text = f"step {step}: rank {rank} computes {ratio:.2f} times as long as the median rank, and the others wait"
        return Anomaly("straggler", step, ratio, 1.0, text)
