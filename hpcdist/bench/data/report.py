"""Report of a comparison of exchanges: table, JSON, and losses over time.

Workers may be at different steps, and finish them at different times. So the speed of a run is the mean over its
workers, of each over its own steps without the first, which compiles: W workers that run together make as many steps,
of 1/W of a batch each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.bench.data.request import CALM, parts_of
from hpcdist.bench.sweep import report
from hpcdist.bench.sweep.results import SweepConfiguration, SweepResults, TrialRepeat
from hpcdist.errors import CONFIGURATION, MISSING_CAPABILITY, UsageError
from hpcdist.reporting.figures import Catalogue, Figure
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.units import counted

CATEGORIES: Final = ("parameters", "gradients", "optimizer", "activations", "communication")
SMOOTHED: Final = 0.1  # of the steps: what a loss is the mean of


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


def steps_per_s(step_s: np.ndarray) -> float:
    """Return the steps per second of ``step_s`` (steps, workers), in the mean over the workers; NaN for too few."""
    if len(step_s) < 2:
        return float("nan")
    return float(((len(step_s) - 1) / ends_s(step_s)[-1]).mean())


def loss_curve(step_s: np.ndarray, loss: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
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


@dataclass(frozen=True)
class ExchangeRow:
    """A contender in a scenario; medians over its good repeats, None where nothing was measured, and then ``reason``.

    ``tokens_per_s`` and ``steps_per_s`` are means over the workers, each over its own steps but the first. Tokens are
    those whose gradients were taken: what backup workers computed too late is not in them, but in ``dropped``, the
    number of such gradients in a training; None where none can be.
    ``loss_at_steps`` is the training loss of the last tenth of the steps, ``loss_at_time`` that up to the moment at
    which the fastest contender of the scenario was done. ``bytes_sent_per_step`` is the mean step's maximum over the
    ranks; ``bytes_loaded_per_step`` what was read of memory that others of a node wrote. ``peak_bytes`` are by
    category, of the rank that held most of each; ``pss_bytes`` is the memory of all ranks together as the kernel
    counts it, what they share once.
    """

    contender: str
    scenario: str
    ranks: int
    ok: int
    failed: int
    tokens_per_s: float | None
    steps_per_s: float | None
    dropped: float | None
    x_first: float | None  # speed over that of the first contender of the scenario
    bytes_sent_per_step: float | None
    bytes_loaded_per_step: float | None
    peak_bytes: Mapping[str, float] | None
    pss_bytes: float | None
    loss_at_steps: float | None
    val_loss: float | None
    loss_at_time: float | None
    refused: bool  # by the ranks, before the first step: what it sets does not go with the recipe or the machine
    reason: str


@dataclass(frozen=True)
class LossCurve:
    """The loss of one repeat against time and steps; ``times_s`` begin behind the first step."""

    times_s: np.ndarray
    losses: np.ndarray

    @classmethod
    def of(cls, repeat: TrialRepeat) -> "LossCurve":
        """Return the curve of a good repeat."""
        who = workers(repeat.samples["compute_s"])
        loss = repeat.samples["loss"]
        return cls(*loss_curve(repeat.samples["step_s"][:, who], loss, max(1, round(SMOOTHED * len(loss)))))


def rows(results: SweepResults) -> list[ExchangeRow]:
    """Return a row for each configuration of a comparison, scenario by scenario."""
    configurations = [configuration for configuration in results.configurations if parts_of(configuration.name)[1]]
    scenarios = dict.fromkeys(parts_of(configuration.name)[1] for configuration in configurations)
    table = []
    for scenario in sorted(scenarios, key=lambda name: name != CALM):
        members = [configuration for configuration in configurations if parts_of(configuration.name)[1] == scenario]
        ends = [
            _median(curve.times_s[-1] for curve in _curves(configuration) if curve.times_s.size)
            for configuration in members
        ]
        moment_s = min((end for end in ends if end is not None), default=None)
        first = next((speed for configuration in members if (speed := _speed(configuration))), None)
        table += [_row(configuration, moment_s, first) for configuration in members]
    return table


def _curves(configuration: SweepConfiguration) -> list[LossCurve]:
    return [LossCurve.of(repeat) for repeat in configuration.good]


def _speed(configuration: SweepConfiguration) -> float | None:
    return _median(map(_steps_per_s, configuration.good))


def _steps_per_s(repeat: TrialRepeat) -> float:
    who = workers(repeat.samples["compute_s"])
    return steps_per_s(repeat.samples["step_s"][:, who])


def _row(configuration: SweepConfiguration, moment_s: float | None, first: float | None) -> ExchangeRow:
    good, curves, speed = configuration.good, _curves(configuration), _speed(configuration)
    base = report.rows(SweepResults({}, (configuration,)))[0]
    tokens = _median(float(repeat.samples["tokens"][1:].mean()) for repeat in good if len(repeat.samples["tokens"]) > 1)
    peaks = {kind: max(configuration.figures(f"peak_bytes.{kind}"), default=None) for kind in CATEGORIES}
    contender, scenario = parts_of(configuration.name)
    at_time = [loss_at(curve.times_s, curve.losses, moment_s) for curve in curves if moment_s is not None]
    failed = configuration.failed
    return ExchangeRow(
        contender=contender,
        scenario=scenario,
        ranks=configuration.ranks,
        ok=len(good),
        failed=len(failed),
        tokens_per_s=None if speed is None or tokens is None else speed * tokens,
        steps_per_s=speed,
        dropped=_median(configuration.figures("dropped_gradients")),
        x_first=None if speed is None or first is None else speed / first,
        bytes_sent_per_step=_sent(good) if _sent(good) is not None else base.bytes_sent_per_step,
        bytes_loaded_per_step=_median(configuration.figures("bytes_loaded_per_step")),
        peak_bytes={kind: most for kind, most in peaks.items() if most is not None} or None,
        pss_bytes=_median(configuration.figures("pss_bytes.sum")),
        loss_at_steps=_median(float(curve.losses[-1]) for curve in curves if curve.losses.size),
        val_loss=base.val_loss,
        loss_at_time=_median(at_time),
        refused=bool(failed)
        and all(repeat.exit_code in (CONFIGURATION, MISSING_CAPABILITY) for repeat in configuration.repeats),
        reason=failed[-1].reason if failed else base.reasons.get("bytes_sent_per_step", ""),
    )


def _sent(good: Sequence[TrialRepeat]) -> float | None:
    """Return the mean over the steps but the first, some of which may send nothing; None where a rank does not know."""
    most = [repeat.samples["sent_bytes"][1:].max(axis=1) for repeat in good]
    return _median(float(bytes_.mean()) for bytes_ in most if bytes_.size)


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.median(known)) if known else None


def _peaks(row: ExchangeRow) -> str | None:
    if row.peak_bytes is None:
        return None
    return " ".join(f"{row.peak_bytes.get(kind, 0.0) / 2**20:.1f}" for kind in CATEGORIES)


_FIGURES: Final[Catalogue[ExchangeRow]] = Catalogue(
    Figure("contender", lambda row: row.contender),
    Figure("tokens/s", lambda row: row.tokens_per_s, ",.0f"),
    Figure("x first", lambda row: row.x_first, ".2f"),
    Figure("MB sent a step", lambda row: row.bytes_sent_per_step, ",.3f", 1e6),
    Figure("MiB par grad opt act comm", _peaks),
    Figure("PSS MiB", lambda row: row.pss_bytes, ",.0f", 2**20),
    Figure("loss, equal steps", lambda row: row.loss_at_steps, ".4f"),
    Figure("validation", lambda row: row.val_loss, ".4f"),
    Figure("loss, equal time", lambda row: row.loss_at_time, ".4f"),
    Figure("status", lambda row: f"{row.ok} ok" + (f", {row.failed} FAILED" if row.failed else "")),
)


def text(table: Sequence[ExchangeRow], left_out: Mapping[str, str]) -> str:
    """Return a table for each scenario as lines for people, and below why contenders are missing."""
    lines: list[str] = []
    for scenario in dict.fromkeys(row.scenario for row in table):
        shown = [row for row in table if row.scenario == scenario and not row.refused]
        lines += [scenario, *_FIGURES.aligned(shown, (0, -1)), ""]
    lines += [f"{row.contender}, {row.scenario}: {row.reason}" for row in table if row.failed and not row.refused]
    unknown = [row.contender for row in table if row.ok and row.bytes_sent_per_step is None]
    if unknown:
        lines.append(
            f"bytes sent are not known of {'; '.join(dict.fromkeys(unknown))}: what MPI's own collectives and memory "
            "that ranks share move is not seen (communication.algorithm = 'ring' sends messages, which are)"
        )
    lines += [
        f"{row.contender}, {row.scenario}: {row.bytes_loaded_per_step / 1e6:,.3f} MB a step loaded from what others of "
        "the node wrote, beside what is sent"
        for row in table
        if row.bytes_loaded_per_step is not None
    ]
    lines += [_late(row, round(row.dropped)) for row in table if row.dropped is not None]
    refused = {row.contender: row.reason for row in table if row.refused}
    lines += [f"left out: {name}: {reason}" for name, reason in {**left_out, **refused}.items()]
    return "\n".join(lines).rstrip()


def _late(row: ExchangeRow, gradients: int) -> str:
    return (
        f"{row.contender}, {row.scenario}: tokens/s are of the gradients that were taken; "
        f"{counted(gradients, 'gradient')} a training came too late for the step, computed for nothing"
    )


def jsonable(
    table: Sequence[ExchangeRow], left_out: Mapping[str, str], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the table as JSON values; what was not measured is null."""
    return {"provenance": dict(provenance), "rows": [asdict(row) for row in table], "left_out": dict(left_out)}


def plot(results: SweepResults, file: Path) -> None:
    """Draw the loss against time and against steps, a row of panels for each scenario, the first good repeat of each.

    Raises MissingCapabilityError without matplotlib, StorageError when the file cannot be written.
    """
    curves = {
        configuration.name: known[0]
        for configuration in results.configurations
        if parts_of(configuration.name)[1] and (known := _curves(configuration))
    }
    if not curves:
        raise UsageError("no trial has ended well, so there is nothing to plot")
    scenarios = sorted(dict.fromkeys(parts_of(name)[1] for name in curves), key=lambda name: name != CALM)
    with drawing(file, 14, 5 * len(scenarios)) as figure:
        axes = figure.subplots(len(scenarios), 2, squeeze=False, sharey="row")
        for (left, right), scenario in zip(axes, scenarios, strict=True):
            for number, (name, curve) in enumerate((n, c) for n, c in curves.items() if parts_of(n)[1] == scenario):
                style = {
                    "label": parts_of(name)[0],
                    "color": f"C{number % 10}",
                    "linestyle": ("-", "--", ":")[number // 10 % 3],
                }
                left.plot(curve.times_s, curve.losses, linewidth=1, **style)
                right.plot(np.arange(2, len(curve.losses) + 2), curve.losses, linewidth=1, **style)
            left.set_title(scenario, fontsize=10)
            left.set_xlabel("time since the first step (s)")
            right.set_xlabel("step")
            left.set_ylabel("training loss (nats, smoothed)")
            right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
