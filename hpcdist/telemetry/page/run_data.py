"""Data of a page: a run read from its directory, and data that the caller passes.

Missing data is None or empty, with a reason, never zero.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import StorageError
from hpcdist.telemetry.metrics import sampling, step_metrics
from hpcdist.telemetry.metrics.step_metrics import METRICS_FILE
from hpcdist.telemetry.page import energy_data, history
from hpcdist.telemetry.page.energy_data import RunEnergy, StepSpans, UtilisationCurves
from hpcdist.telemetry.page.history import Incident, RunState

RUN_FILES: Final = (METRICS_FILE, "recipe.toml", "recorder", history.STARTS)  # any of them marks a run directory
NO_FILE: Final = "no step was completed: the run ended, or is, before its first one"
NO_ROWS: Final = "no step was completed yet"
NO_CHECKPOINT: Final = "the run has no checkpoint yet"
NOT_ASKED: Final = "no sample was asked for"
_HIDDEN: Final = {"schema", "schema_version", "NX_class", "default"}


@dataclass(frozen=True)
class RecipeSetting:
    """A key of the recipe with its value and its default, as texts."""

    key: str
    value: str
    default: str


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint of the run. ``reason`` explains why it is unusable, or is ""."""

    name: str
    step: int
    state: str
    written_utc: str
    nbytes: int
    reason: str = ""


@dataclass(frozen=True)
class TextSample:
    """Text that the model generated after ``prompt``, or the ``reason`` why there is no text."""

    text: str = ""
    prompt: str = ""
    reason: str = NOT_ASKED


@dataclass(frozen=True)
class ExternalData:
    """Data for the page that the caller collects: recipe settings, checkpoints, a text sample and costs."""

    settings: Sequence[RecipeSetting] = ()
    settings_reason: str = ""
    planned_steps: int | None = None
    checkpoints: Sequence[CheckpointEntry] = ()
    checkpoints_reason: str = NO_CHECKPOINT
    sample: TextSample = field(default_factory=TextSample)
    # Costs by joules (NaN: unknown) and seconds, under the names of `hpcdist.energy.accounts.energy_metrics.figures`.
    costs: Callable[[float, float], Mapping[str, Any]] = field(default=lambda joules, seconds: {})


@dataclass(frozen=True)
class PageData:
    """Data of a run for its web page."""

    run_dir: Path
    made_ns: int
    state: RunState
    run: sampling.SampledMetrics | None  # None without rows: ``reason`` is the explanation
    reason: str
    attributes: Mapping[str, Any]  # from the metrics file
    figures: Mapping[str, Any]  # of `summary_figures`
    energy: RunEnergy
    costs: Mapping[str, Any]
    use: UtilisationCurves | None
    timeline: StepSpans
    events: Sequence[Incident]
    external: ExternalData

    @property
    def name(self) -> str:
        return self.run_dir.absolute().name

    @property
    def world(self) -> int:
        """Number of ranks in the last step. Without a step, the number in the flight recorder (0 if unknown)."""
        return int(self.figures.get("world") or 0) or self.state.world

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes, or [] if they were omitted on request."""
        return [name for name in str(self.attributes.get("hosts", "")).split(",") if name]

    @property
    def sessions(self) -> list[int]:
        """First step after each resume of the run. Resumes without a completed step are left out."""
        if self.run is None:
            return []
        steps = self.run.steps
        return [int(step) for step in steps["step"][1:][np.diff(steps["session"]) != 0]]


def read(run_dir: Path, external: ExternalData | None = None, now_ns: int | None = None) -> PageData:
    """Return the web page's data of the run in ``run_dir``. Raises StorageError if missing or invalid.

    ``external``: data that the caller has collected. ``now_ns``: current time.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir() or not any((run_dir / name).exists() for name in RUN_FILES):
        raise StorageError(f"{run_dir} is not the directory of a run; give the --out directory of a training")
    now_ns = time.time_ns() if now_ns is None else now_ns
    path = run_dir / METRICS_FILE if (run_dir / METRICS_FILE).exists() else None
    run = None if path is None else sampling.read(path)
    reason = NO_FILE if run is None else ""
    attributes: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    if run is not None:
        attributes = shown_attributes(run)
        figures = summary_figures(run)
        if not len(run.steps["step"]):
            run, reason = None, NO_ROWS
    state = history.read_state(run_dir, now_ns)
    last = 0 if run is None else last_step(run)
    energy = energy_data.read_energy(run_dir, path, attributes, last)
    external = ExternalData() if external is None else external
    return PageData(
        run_dir=run_dir,
        made_ns=now_ns,
        state=state,
        run=run,
        reason=reason,
        attributes=attributes,
        figures=figures,
        energy=energy,
        costs=external.costs(math.nan if energy.joules is None else energy.joules, energy.seconds),
        use=energy_data.read_utilisation(path),
        timeline=energy_data.read(run_dir, path, figures.get("slowest_rank")),
        events=history.read_incidents(run, state),
        external=external,
    )


def shown_attributes(run: sampling.SampledMetrics) -> dict[str, Any]:
    """Return the attributes of the metrics file, without the attributes that describe the file format."""
    return {name: value for name, value in run.sample.attributes.items() if name not in _HIDDEN}


def last_step(run: sampling.SampledMetrics) -> int:
    """Return the number of the last step with a row in the metrics file, or 0 if there are no rows."""
    return int(run.steps["step"][-1]) if len(run.steps["step"]) else 0


def summary_figures(run: sampling.SampledMetrics) -> dict[str, Any]:
    """Return the figures of `step_metrics.summarise` for ``run``, and further figures for the web page."""
    # data_fraction: time spent waiting for data since the run last started. other_fraction: time not spent on data,
    # computation, communication or update. skipped_steps and anomalies: numbers over the whole run.
    summary = step_metrics.summarise(run.sample)
    summary |= {"data_fraction": None, "other_fraction": None}
    if summary["compute_fraction"] is not None:
        remaining = max(0.0, 1.0 - sum(summary[f"{name}_fraction"] for name in ("compute", "comm", "update")))
        waits = run.observed.series.get("data_seconds")
        step_s = step_metrics.mean_step_s(run.sample)
        if waits is not None and step_s:
            summary["data_fraction"] = min(remaining, float(waits.value[-1]) / step_s)
        summary["other_fraction"] = remaining - (summary["data_fraction"] or 0.0)
    loss = run.steps["loss"][-step_metrics.LAST_LOSSES :]
    finite = loss[np.isfinite(loss)]
    summary["train_loss_mean"] = float(finite.mean()) if finite.size else None
    skipped = run.tables.get("loss_scale", {}).get("skipped", np.zeros(0))
    anomalies = sum(note.kind == "anomaly" for note in run.observed.notes)
    return summary | {"skipped_steps": int(skipped.sum()), "anomalies": anomalies}
