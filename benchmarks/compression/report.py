"""Report of the compression study: Markdown tables, and plots of losses against bytes and time."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.compression.plan import CONTENDERS, DENSE, SEEDED, Study, Training, reference
from benchmarks.compression.results import Ended, Times
from hpcdist.reporting.plotting import check_plot, save
from hpcdist.reporting.table import markdown

STEP, COMPUTE, UPDATE, CODEC, SENT = range(5)  # phases of a timed step
WAY: Final = "communication.compression"
# Compressors with the same hue: a family has one hue, and its members differ by dashes.
HUES: Final = (
    ("none", "black"),
    ("float16 bfloat16", "tab:gray"),
    ("int8 int4 adaptive qsgd", "tab:blue"),
    ("sign onebit", "tab:purple"),
    ("topk randomk", "tab:green"),
    ("dgc", "tab:brown"),
    ("powersgd", "tab:red"),
)
HIGHEST: Final = 3.6  # upper limit of the loss axis; higher losses of early or diverging steps are not shown
DASHES: Final = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 4)), (0, (8, 3)))


@dataclass(frozen=True)
class Pace:
    """Durations of a step between two hosts: medians over all steps, each of the slower rank."""

    step_s: float
    compute_s: float
    update_s: float
    codec_s: float
    wire_s: float
    sent_bytes: float

    @property
    def bound_s(self) -> float:
        return self.compute_s + self.update_s + self.codec_s + self.wire_s

    @property
    def of_bound(self) -> float:
        """Bound divided by the measured step time: 1 means that the step has no other costs."""
        return self.bound_s / self.step_s


@dataclass(frozen=True)
class Found:
    study: Study
    trainings: Mapping[Training, Ended]
    times: Times
    refused: Mapping[Training, str]

    def best(self, name: str) -> Training | None:
        """Return the best training of ``name`` with error feedback and seed 0, or None."""
        return self.study.best(name, {training: ended.loss for training, ended in self.trainings.items()})

    def dense(self, name: str) -> Training | None:
        return self.best(reference(name))

    def paces(self) -> dict[str, Pace]:
        # The best round of the links counts: slower rounds would hide costs of a step.
        link = float(np.max(self.times.bytes_per_s)) if len(self.times.bytes_per_s) else math.nan
        return {name: pace(figures, link) for name, figures in self.times.figures.items()}


def pace(figures: np.ndarray, bytes_per_s: float) -> Pace:
    """Return the parts of a step from ``figures`` (rounds, steps, ranks, phases) and the raw TCP rate.

    The ranks wait for each other in every step, so the compute time of the slower rank counts.
    """
    parts = figures.reshape(-1, *figures.shape[2:]).max(axis=1)  # (steps, phases)
    busy = figures[..., [COMPUTE, UPDATE, CODEC]].reshape(-1, figures.shape[2], 3)
    slower = busy[np.arange(len(busy)), busy.sum(axis=2).argmax(axis=1)]  # (steps, 3), all of one rank
    compute_s, update_s, codec_s = np.median(slower, axis=0)
    sent = float(np.median(parts[:, SENT]))
    return Pace(
        float(np.median(parts[:, STEP])), float(compute_s), float(update_s), float(codec_s), sent / bytes_per_s, sent
    )


def line(training: Training, ended: Ended) -> str:
    feedback = "" if training.feedback else ", without feedback"
    label = f"{training.contender}{feedback}, rate {training.learning_rate:g}, seed {training.seed}"
    return f"{label}: {_loss(ended.loss)}, {ended.sent_bytes / 1e6:,.1f} MB, {ended.wall_s:.0f} s"


def text(result: Found) -> str:
    blocks = [_losses(result)] if result.best(DENSE) else []
    if SEEDED and result.best(DENSE):
        blocks.append(_seeds(result))
    if result.times.figures:
        blocks.append(_times(result))
    reasons: dict[str, list[str]] = {}
    for training, reason in result.refused.items():
        label = training.contender + ("" if training.feedback else " without feedback")
        if label not in reasons.setdefault(reason, []):
            reasons[reason].append(label)
    blocks += [f"Refused: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n\n".join(blocks)


def _losses(result: Found) -> str:
    rows = [
        ["compressor", "rate", "loss", "against dense", "without feedback", "MB a rank", "x fewer", "after warm-up"]
    ]
    for name in result.study.names:
        dense, best = result.dense(name), result.best(name)
        if dense is None:
            continue
        dense_end = result.trainings[dense]
        without = result.trainings.get(Training(name, False, dense.learning_rate))
        bare = "" if without is None else f"{_loss(without.loss)} {_change(without.loss, dense_end.loss)}"
        one = without if best is None else result.trainings[best]
        if best is None or one is None:
            was_tried = any(one.contender == name and one.feedback for one in result.trainings)
            if one is not None or was_tried:
                sent = ["", "", ""] if one is None else [f"{one.sent_bytes / 1e6:,.1f}", *_fewer(one, dense_end)]
                rows.append([name, f"{dense.learning_rate:g}", "diverged" if was_tried else "refused", "", bare, *sent])
            continue
        change = "" if best == dense else _change(one.loss, dense_end.loss)
        sent = [f"{one.sent_bytes / 1e6:,.1f}", *_fewer(one, dense_end)]
        rows.append([name, f"{best.learning_rate:g}", _loss(one.loss), change, bare, *sent])
    return "\n".join(
        [f"### Validation loss after {result.study.steps} steps (nats), and bytes sent", "", *markdown(rows)]
    )


def _fewer(one: Ended, dense: Ended) -> list[str]:
    return [f"{dense.sent_bytes / one.sent_bytes:.2f}", f"{dense.compressed_bytes / one.compressed_bytes:.2f}"]


def _seeds(result: Found) -> str:
    rows = [["compressor", "rate", *(f"seed {seed}" for seed in range(result.study.seeds)), "mean", "against dense"]]
    means: dict[str, float] = {}
    for name in SEEDED:
        best = result.best(name)
        losses = {one.seed: result.trainings[one].loss for one in result.trainings if best and _same(one, best)}
        if best is None or len(losses) < result.study.seeds:
            continue
        means[name] = statistics.mean(losses.values())
        dense_mean = means.get(reference(name), math.nan)
        change = "" if name == reference(name) else _change(means[name], dense_mean)
        lines = [_loss(losses[seed]) for seed in sorted(losses)]
        rows.append([name, f"{best.learning_rate:g}", *lines, _loss(means[name]), change])
    return "\n".join(["### Seeds", "", *markdown(rows)])


def _same(one: Training, other: Training) -> bool:
    return (one.contender, one.feedback, one.learning_rate) == (other.contender, other.feedback, other.learning_rate)


def _times(result: Found) -> str:
    paces = result.paces()
    dense = paces.get(DENSE)
    rows = [
        ["compressor", "steps/s", "x dense", "of bound", "compute ms", "encode + decode ms", "wire ms", "kB a step"]
    ]
    for name, pace in paces.items():
        rows.append(
            [
                name,
                f"{1 / pace.step_s:.2f}",
                "" if dense is None else f"{dense.step_s / pace.step_s:.2f}",
                f"{pace.of_bound:.3f}",
                *(f"{1e3 * value:.1f}" for value in (pace.compute_s + pace.update_s, pace.codec_s, pace.wire_s)),
                f"{pace.sent_bytes / 1e3:,.1f}",
            ]
        )
    low, high = np.percentile(result.times.bytes_per_s, [0, 100]) / 1e6
    about = f"Raw TCP over the same links, each way at once: {high:.2f} MB/s at best ({low:.2f} to {high:.2f})."
    return "\n".join(["### Steps between two hosts with slow links", "", *markdown(rows), "", about])


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _change(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.2f} %" if math.isfinite(value) else ""


def clock(ended: Ended, warm_up_steps: int, warm_up_s: float, step_s: float) -> np.ndarray:
    """Return the time over slow links at the points of a training with dense warm-up steps.

    Warm-up steps of dgc count as dense, although they send less.
    """
    steps = ended.points[:, 0]
    return np.minimum(steps, warm_up_steps) * warm_up_s + np.maximum(steps - warm_up_steps, 0) * step_s


def plot(result: Found, file: Path) -> None:
    """Plot loss against bytes and time, and the final losses with and without error feedback.

    Raises MissingCapabilityError without matplotlib, and StorageError if the file cannot be written.
    """
    figure = check_plot(file).Figure(figsize=(15, 6.5), layout="constrained")
    by_bytes, by_time, final = figure.subplots(1, 3, width_ratios=(4, 4, 3))
    paces, count = result.paces(), dict[str, int]()
    for name, keys in CONTENDERS.items():
        if (best := result.best(name)) is None:
            continue
        hue = next(color for ways, color in HUES if keys.get(WAY, "none") in ways.split())
        count[hue] = count.get(hue, -1) + 1
        style = {"color": hue, "linestyle": DASHES[count[hue] % len(DASHES)], "linewidth": 1.3}
        ended = result.trainings[best]
        by_bytes.plot(ended.points[:, 3] / 1e6, ended.points[:, 1], label=name, **style)
        if name in paces and DENSE in paces:
            warm_up = result.study.keys(name).get("compression.warmup_steps", 0)
            seconds = clock(ended, warm_up, paces[DENSE].step_s, paces[name].step_s)
            by_time.plot(seconds, ended.points[:, 1], **style)
    for axis, label in ((by_bytes, "MB sent by a rank"), (by_time, "seconds between two hosts with slow links")):
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.set_ylim(top=HIGHEST)
        axis.grid(True, which="major", alpha=0.3)
    by_bytes.set_ylabel("validation loss (nats)")
    _draw_final(final, result)
    figure.legend(*by_bytes.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    save(figure, file)


def _draw_final(axis: Any, result: Found) -> None:
    names = [name for name in reversed(CONTENDERS) if name != reference(name) and result.dense(name) is not None]
    for feedback, marker, hue, label in (
        (True, "o", "tab:blue", "with error feedback"),
        (False, "x", "tab:red", "without"),
    ):
        points = []
        for height, name in enumerate(names):
            dense = result.dense(name)
            assert dense is not None
            ended = result.trainings.get(Training(name, feedback, dense.learning_rate))
            if ended is not None and math.isfinite(ended.loss):
                points.append((100 * (ended.loss / result.trainings[dense].loss - 1), height))
        axis.plot(*np.array(points).reshape(-1, 2).T, marker, color=hue, label=label)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.axvspan(-1, 1, color="black", alpha=0.08)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xscale("symlog", linthresh=2)
    axis.set_xlabel("% above the final loss of dense, same rate")
    axis.set_xlim(right=100)
    axis.set_xticks([-10, -1, 0, 1, 10, 100], ["-10", "-1", "0", "1", "10", "100"])
    axis.grid(True, axis="x", alpha=0.3)
    axis.legend(fontsize=8)
