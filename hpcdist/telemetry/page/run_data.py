"""Data of a run for reports and pages: read from its directory, or passed by the caller.

Missing data is None or empty, with a reason, never zero.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.constants import METRICS_FILE, RECIPE_FILE, SCRIPT
from hpcdist.errors import StorageError
from hpcdist.reporting import regular
from hpcdist.telemetry.metrics import side_tables, step_metrics
from hpcdist.telemetry.page import energy_data, history
from hpcdist.telemetry.page.energy_data import EnergyCurves, RunEnergy, StepSpans, UtilisationCurves
from hpcdist.telemetry.page.history import Incident, RunState

RUN_FILES: Final = (METRICS_FILE, RECIPE_FILE, "recorder")  # any of them marks a run directory
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
    """A checkpoint of the run. ``reason`` explains why the checkpoint is unusable, or is "" if it is usable."""

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
    # Costs by joules (NaN: unknown) and seconds, under the names of `hpcdist.energy.energy_metrics.figures`.
    costs: Callable[[float, float], Mapping[str, Any]] = field(default=lambda joules, seconds: {})


@dataclass(frozen=True)
class RunData:
    """Data of a run, read from the run's directory. Large tables are read at the first access."""

    run_dir: Path
    state: RunState
    run: side_tables.SampledMetrics | None  # None without rows: ``reason`` is the explanation
    reason: str
    attributes: Mapping[str, Any]  # from the metrics file
    figures: Mapping[str, Any]  # of `summary_figures`
    energy: RunEnergy
    external: ExternalData

    @property
    def name(self) -> str:
        return self.run_dir.absolute().name

    @property
    def world(self) -> int:
        """Number of ranks in the last step or, without a step, in the flight recorder files. 0 means unknown."""
        return int(self.figures.get("world") or 0) or self.state.world

    @property
    def hosts(self) -> list[str]:
        """List of the names of the nodes. The list is empty if the user asked to omit node names."""
        return [name for name in str(self.attributes.get("hosts", "")).split(",") if name]

    @property
    def sessions(self) -> list[int]:
        """List of the first step after each resume of the run. Resumes without a completed step are left out."""
        if self.run is None:
            return []
        steps = self.run.steps
        return [int(step) for step in steps["step"][1:][np.diff(steps["session"]) != 0]]

    @property
    def is_script(self) -> bool:
        """True if a script over the backend of torch.distributed made the run, not a training of hpcdist."""
        return self.attributes.get("strategy") == SCRIPT

    @property
    def speed_unit(self) -> str:
        """Unit in which the speed counts training data: "tokens" or "samples"."""
        return str(self.attributes.get("speed_unit", "tokens"))

    @property
    def loss_unit(self) -> str:
        """Unit of the losses: "nats", or "" (no unit) for a model without tokens."""
        return str(self.attributes.get("loss_unit", "nats"))

    @cached_property
    def _recipe(self) -> Mapping[str, Any]:
        try:
            return regular.toml(self.run_dir / RECIPE_FILE)
        except (OSError, ValueError):
            return {}

    def setting(self, key: str) -> str | None:
        """Return the value of the recipe key ``key``, such as "model.kind", as text, or None if it is unknown."""
        section, _, name = key.partition(".")
        values = self._recipe.get(section)
        value = values.get(name) if isinstance(values, dict) else None
        stated = next((row.value.strip('"') for row in self.external.settings if row.key == key), None)
        return stated if value is None else str(value)

    @cached_property
    def costs(self) -> Mapping[str, Any]:
        """Dict {name: value} of the costs and emissions of the energy that the run used."""
        return self.external.costs(math.nan if self.energy.joules is None else self.energy.joules, self.energy.seconds)

    @cached_property
    def curves(self) -> EnergyCurves:
        """Arrays of cumulative energy and of power over the time of the run, for the charts."""
        return energy_data.read_curves(self._metrics_path)

    @cached_property
    def use(self) -> UtilisationCurves | None:
        """Utilisation of the nodes over time, or None if the run stored no samples."""
        return energy_data.read_utilisation(self._metrics_path)

    @cached_property
    def timeline(self) -> StepSpans:
        """Operations of each rank in a step of median duration."""
        return energy_data.read(self.run_dir, self._metrics_path, self.figures.get("slowest_rank"))

    @cached_property
    def events(self) -> Sequence[Incident]:
        """Incidents of the run, such as failures and restarts, sorted by step."""
        return history.read_incidents(self.run, self.state)

    @property
    def _metrics_path(self) -> Path | None:
        path = self.run_dir / METRICS_FILE
        return path if path.exists() else None


def read(run_dir: Path, external: ExternalData | None = None, now_ns: int | None = None) -> RunData:
    """Return the data of the run in ``run_dir``, with ``external`` data from the caller. Raises StorageError."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir() or not any((run_dir / name).exists() for name in RUN_FILES):
        raise StorageError(f"{run_dir} is not the directory of a run; give the --out directory of a training run")
    now_ns = time.time_ns() if now_ns is None else now_ns
    path = run_dir / METRICS_FILE
    run = side_tables.read(path) if path.exists() else None
    reason = NO_FILE if run is None else ""
    attributes: dict[str, Any] = {}
    if run is not None:
        attributes = {name: value for name, value in run.sample.attributes.items() if name not in _HIDDEN}
    steps = np.zeros(0) if run is None else run.steps["step"]
    energy = energy_data.read_energy(run_dir, attributes, int(steps[-1]) if len(steps) else 0)
    figures = {"run_dir": str(run_dir)} | attributes
    if run is not None:
        figures |= summary_figures(run)
        if not len(steps):
            run, reason = None, NO_ROWS
    if energy.joules is not None:
        figures |= {"energy_j": energy.joules, "j_per_step": energy.j_per_step}
    figures["energy_j_by_phase"] = {phase.name: phase.joules for phase in energy.phases}
    state = history.read_state(run_dir, now_ns)
    return RunData(run_dir, state, run, reason, attributes, figures, energy, external or ExternalData())


def summary_figures(run: side_tables.SampledMetrics) -> dict[str, Any]:
    """Return a dict {metric name: value} of ``run``, with names such as "train_loss". Unknown values are None."""
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
    scales = run.tables.get("noise_scale", {}).get("noise_scale", np.zeros(0))
    if len(scales) and math.isfinite(scales[-1]):
        summary["noise_scale"] = float(scales[-1])
    return summary | {"skipped_steps": int(skipped.sum()), "anomalies": anomalies}
