"""Export of runs: metrics of each step as CSV, or as offline runs of Weights & Biases and MLflow.

The metrics have the names of `hpcdist.telemetry.metrics.quantities`. The figures of the whole run become the summary.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.reporting.table import Catalogue, csv_text
from hpcdist.telemetry.metrics.quantities import PER_RANK, QUANTITIES, DerivedFigures, StepRow, split
from hpcdist.telemetry.metrics.run_figures import figures_of
from hpcdist.telemetry.page.run_data import RunData

PROJECT: Final = "hpcdist"  # name of the project in Weights & Biases, and of the experiment in MLflow
BATCH: Final = 1000  # largest number of metrics in one call of MLflow


def step_metrics(run: RunData) -> dict[int, dict[str, float]]:
    """Return a dict {step: {metric key: value}}. Only sampled steps have times. Raises UsageError without steps."""
    if run.run is None:
        raise UsageError(f"{run.run_dir}: no step was completed, so there is nothing to export")
    narrow, sample, lock_step = run.run.steps, run.run.sample.steps, bool(run.attributes.get("lock_step", 1))
    counts = _counts(narrow["step"])
    columns = {
        "training_loss_nats": narrow["loss"],
        "learning_rate": narrow["learning_rate"],
        "tokens_total": np.cumsum(counts * narrow["tokens"]),
        "world_ranks": narrow["world"],
    }
    if run.run.complete:
        columns["sent_bytes_total"] = np.cumsum(counts * np.sum(run.run.sample.steps["sent_bytes"], axis=1))
    rows: dict[int, dict[str, float]] = {
        int(step): {name: float(column[index]) for name, column in columns.items()}
        for index, step in enumerate(narrow["step"])
    }
    for _, indices in groupby(range(len(sample["step"])), lambda index: int(sample["session"][index])):
        steps = [_step_row(sample, index) for index in indices]
        for row, figures in zip(steps, DerivedFigures(lock_step=lock_step).of(steps), strict=True):
            rows[row.step] |= figures
    evaluations = run.run.sample.evaluations
    observed = {"validation_loss_nats": (evaluations["step"], evaluations["val_loss"])}
    observed |= {key: (series.step, series.value) for key, series in run.run.observed.series.items()}
    for key, (at, values) in observed.items():
        for step, value in zip(at.tolist(), values.tolist(), strict=True):
            if step in rows and split(key)[0] in QUANTITIES:
                rows[step][key] = value
    return {step: {key: value for key, value in row.items() if np.isfinite(value)} for step, row in rows.items()}


def _counts(steps: np.ndarray) -> np.ndarray:
    # The number of steps that each row stands for: the rows of a script may have the mean values of several steps. The
    # first row has the sum of all steps until then.
    return np.maximum(1, np.diff(steps.astype(np.int64), prepend=steps[:1].astype(np.int64) - 1))


def _step_row(sample: Mapping[str, np.ndarray], index: int) -> StepRow:
    common = {name: float(sample[name][index]) for name in ("loss", "learning_rate", "tokens")}
    ranks = {name: sample[name][index] for name in PER_RANK if name in sample}
    return StepRow(step=int(sample["step"][index]), time_ns=0, ranks=ranks, **common)


def csv(run: RunData) -> str:
    """Return the step metrics of ``run`` as CSV text: a heading line with metric keys, then one line per step."""
    rows = step_metrics(run)
    order = {name: index for index, name in enumerate(QUANTITIES)}
    names = sorted({key for row in rows.values() for key in row}, key=lambda key: (order[split(key)[0]], key))
    return csv_text(["step", *names], [{"step": step, **row} for step, row in rows.items()])


def to_wandb(run: RunData, folder: Path) -> Path:
    """Write ``run`` below ``folder`` as an offline run of Weights & Biases. Return the directory for `wandb sync`."""
    wandb, rows = _package("wandb"), step_metrics(run)
    with _writing(folder), _environment(WANDB_MODE="offline", WANDB_SILENT="true"):
        log = wandb.init(project=PROJECT, name=run.name, dir=str(folder), config=_settings(run), mode="offline")
        for step, row in rows.items():
            log.log({_slashed(key): value for key, value in row.items()}, step=step)
        log.summary.update(_summary(run))
        directory = Path(log.dir)  # "files" below the directory of the run
        log.finish()
    return directory.parent if directory.name == "files" else directory


def to_mlflow(run: RunData, folder: Path) -> Path:
    """Write ``run`` into the MLflow file store ``folder``. Return the directory of the run in the file store."""
    mlflow, rows = _package("mlflow"), step_metrics(run)
    with _writing(folder), _environment(MLFLOW_ALLOW_FILE_STORE="true"):
        client = mlflow.MlflowClient(tracking_uri=folder.absolute().as_uri())
        experiment = client.get_experiment_by_name(PROJECT)
        experiment_id = client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        run_id = client.create_run(experiment_id, run_name=run.name).info.run_id
        for key, value in _settings(run).items():
            client.log_param(run_id, key, value)
        end = max(rows)
        metrics = [(_slashed(key), value, step) for step, row in rows.items() for key, value in row.items()]
        metrics += [(f"run/{key}", value, end) for key, value in _summary(run).items() if not isinstance(value, str)]
        for start in range(0, len(metrics), BATCH):
            batch = [mlflow.entities.Metric(key, value, 0, step) for key, value, step in metrics[start : start + BATCH]]
            client.log_batch(run_id, metrics=batch)
        client.set_terminated(run_id)
    return folder / experiment_id / run_id


def _slashed(key: str) -> str:
    # MLflow rejects brackets.
    name, label = split(key)
    return name if label is None else f"{name}/{label}"


def _summary(run: RunData) -> dict[str, Any]:
    [figures] = Catalogue(*figures_of(run)).jsonable([run])
    return {name: value for name, value in figures.items() if value is not None}


def _settings(run: RunData) -> dict[str, str]:
    return {setting.key: setting.value for setting in run.external.settings}


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        message = f"--to {name} needs the package {name}: pip install 'hpcdist[{name}]' ({error})"
        raise MissingCapabilityError(message) from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}; choose another --output") from error


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
