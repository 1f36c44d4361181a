"""Energy figures of a run: joules by phase, source and start, rates, emissions, costs.

Sources: metrics file, energy record, recipe, and journal of the run (for Slurm's energy). Heavy: loads numpy and h5py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.batch import carbon, ledger
from hpcdist.batch.schedulers import dispatch, slurm_energy
from hpcdist.comm.record import run_journal
from hpcdist.constants import METRICS_FILE, RECIPE_FILE, USAGE_FILE
from hpcdist.energy import energy_metrics, phase_shares
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.energy_metrics import CarbonIntensity, StartHistory
from hpcdist.errors import HpcdistError, StorageError, UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.jsonable import json_number
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.training.observe.energy import carbon_intensity
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe

NO_RECORD: Final = f"the run keeps no {USAGE_FILE}: it has not come so far, or an earlier version made it"
INTENSITY_PIECES: Final = 500  # intervals per start, over which a varying intensity is averaged


@dataclass(frozen=True)
class EnergyReportOptions:
    """Options of the energy report. If an option is not set, the run's recipe gives the value."""

    target_loss: float | None = None
    pue: float | None = None
    intensity: CarbonIntensity | None = None
    forecast: Path | None = None
    price: float | None = None
    currency: str = ""
    slurm: bool = False


def figures(run_dir: Path, options: EnergyReportOptions) -> dict[str, Any]:
    """Return {name: JSON value} with the energy results of the run in ``run_dir``. Unknown values are None.

    ``options``: settings that replace values of the recipe. Raises HpcdistError.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise StorageError(f"{run_dir} holds no {METRICS_FILE}; give the --out directory of a training run")
    metrics, begun = step_metrics.read(path), energy_metrics.read(path)
    recipe = _recipe(run_dir)
    usage = _usage(run_dir)
    total_j, reason = _total_joules(usage, metrics.attributes)
    phases = usage["joules"]["phases"] if usage else {}
    since = usage["since_step"] if usage else 0
    activities = (usage or {}).get("activities") or {}
    has_spans = any((run_dir / "recorder").glob("rank-*.spans"))
    no_activities = phase_shares.TOO_SHORT if has_spans else phase_shares.NO_SPANS
    config = energy_config(run_dir)
    if options.pue is not None:
        config = replace(config, pue=options.pue)
    if options.currency and options.price is None:
        raise UsageError("--currency has no effect without --price; give both")
    if options.price is not None:
        currency = options.currency or config.currency
        if options.price and not currency:
            raise UsageError(f"--price {options.price:g} has no currency; add --currency, such as EUR")
        config = replace(config, price_per_kwh=options.price, currency=currency if options.price else "")
    intensity, intensity_reason = _intensity(run_dir, options, config, begun)
    seconds = math.fsum(phase["seconds"] for phase in phases.values())
    result = {
        "run_dir": str(run_dir),
        "energy_j": json_number(total_j),
        "energy_reason": reason,
        "energy_label": (usage or {"joules": {}})["joules"].get("label") or "",
        "by_kind": usage["joules"]["by_kind"] if usage else {},
        "phases": phases,
        "activities": activities,
        "activities_reason": None if activities else reason or no_activities,
        "sources": _sources(begun),
        "starts": _starts(begun, metrics),
        **_rates(phases, metrics, recipe, since),
        **energy_metrics.figures(
            total_j,
            seconds,
            pue=config.pue,
            intensity=intensity,
            price_per_kwh=config.price_per_kwh,
            currency=config.currency,
        ),
    }
    if intensity_reason:
        result["emissions_reason"] = intensity_reason
    if options.target_loss is not None:
        result["target"] = _target(options.target_loss, metrics, begun)
    if options.slurm:
        result["slurm"] = _slurm(run_dir, total_j)
    return result


def energy_config(run_dir: Path) -> EnergyConfig:
    """Return section [energy] of the run in ``run_dir``: of its recipe, else of the configuration of this process."""
    recipe = _recipe(run_dir)
    return recipes.load().recipe.energy if recipe is None else recipe.energy


def _recipe(run_dir: Path) -> Recipe | None:
    try:
        return recipes.load_stored(run_dir / RECIPE_FILE)
    except HpcdistError:
        return None  # perhaps of another version: figures that depend on it stay unknown


def _usage(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / USAGE_FILE
    try:
        return phase_shares.restored(regular.json_value(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(
            f"{path} is not a valid energy record ({type(error).__name__}: {error}); it may be truncated, or written "
            "by another program. The run writes a new record when it resumes"
        ) from error


def _total_joules(usage: dict[str, Any] | None, attributes: dict[str, Any]) -> tuple[float, str | None]:
    if usage is None:
        energy_j = attributes.get("energy_j")
        if isinstance(energy_j, float) and math.isfinite(energy_j):
            return energy_j, None
        return math.nan, str(attributes.get("energy_reason") or NO_RECORD)
    values = list(usage["joules"]["by_kind"].values())
    if usage["joules"]["reason"] or not values or None in values:
        return math.nan, str(usage["joules"]["reason"] or "no source was read")
    return math.fsum(values), None


def _sources(begun: Sequence[StartHistory]) -> list[dict[str, Any]]:
    by_source: dict[tuple[int, str, str], dict[str, Any]] = {}
    for start in begun:
        for course in start.courses:
            row = by_source.setdefault(
                (course.node, course.kind, course.name),
                {"node": course.node, "kind": course.kind, "name": course.name, "joules": 0.0, "note": course.note,
                 "declared": course.declared, "counted": course in start.counted},
            )  # fmt: skip
            row["joules"] = None if row["joules"] is None else json_number(row["joules"] + course.total_j)
    return list(by_source.values())


def _starts(begun: Sequence[StartHistory], metrics: step_metrics.MetricsData) -> list[dict[str, Any]]:
    rows = []
    counts = step_metrics.steps_of_rows(metrics.steps, metrics.attributes)
    for start in begun:
        # A repeated step counts for its last start only.
        steps = int(counts[metrics.steps["session"] == start.session].sum())
        row = {"start": start.session, "steps": steps, "seconds": start.seconds, "joules": json_number(start.joules)}
        row["average_w"] = json_number(start.joules / start.seconds) if start.seconds > 0 else None
        rows.append(row | {"j_per_step": energy_metrics.joules_per_item(start.joules, steps)})
    return rows


def _rates(
    phases: dict[str, Any], metrics: step_metrics.MetricsData, recipe: Recipe | None, since: int
) -> dict[str, float | None]:
    training = phases.get("training", {}).get("joules")
    steps = metrics.steps["step"]
    last = int(steps[-1]) if len(steps) else since
    samples = math.nan
    if recipe is not None:
        samples = recipe.run.batches.samples_before(last) - recipe.run.batches.samples_before(since)
    tokens = step_metrics.items_per_step(metrics.steps, metrics.attributes, since) * (last - since)
    if metrics.attributes.get("speed_unit") == "samples":
        samples, tokens = tokens, math.nan
    return energy_metrics.rates(math.nan if training is None else training, last - since, samples, tokens)


def _moments(metrics: step_metrics.MetricsData) -> np.ndarray:
    of_rank = metrics.steps["step_s"]
    slowest = np.where(np.isnan(of_rank), 0.0, of_rank).max(axis=1, initial=0.0)
    moments = np.zeros(len(slowest))
    for session in np.unique(metrics.steps["session"]):
        in_session = metrics.steps["session"] == session
        moments[in_session] = np.cumsum(slowest[in_session])
    return moments


def _target(target: float, metrics: step_metrics.MetricsData, begun: Sequence[StartHistory]) -> dict[str, Any]:
    if "step_s" not in metrics.steps:
        return {"loss": target, "joules": None, "reason": "the metrics are of a version without step times"}
    moments, session = _moments(metrics), metrics.steps["session"]
    joules = energy_metrics.joules_at(begun, session, moments)
    before = 0.0
    seconds = moments.copy()
    for number_of in np.unique(session):
        in_session = session == number_of
        seconds[in_session] += before
        before += float(moments[in_session].max())
    reached = energy_metrics.to_target(target, metrics.steps["step"], metrics.steps["loss"], seconds, joules)
    return {
        "loss": target,
        "step": json_number(reached.step),
        "seconds": json_number(reached.seconds),
        "joules": json_number(reached.joules),
        "reason": reached.reason or None,
    }


def _intensity(
    run_dir: Path, options: EnergyReportOptions, config: EnergyConfig, begun: Sequence[StartHistory]
) -> tuple[CarbonIntensity, str | None]:
    if options.forecast is None:
        return options.intensity or carbon_intensity(config), None
    table = carbon.read_forecast(options.forecast)
    edges = np.array([moment.timestamp() for moment in (*table.times, table.end)])
    began = [start.began for start in run_journal.known_starts(run_dir)]
    if not begun or len(began) <= max(start.session for start in begun):
        return CarbonIntensity(), "the begin of a start was not recorded, so no forecast can be looked up"
    pieces = []
    for start in begun:
        grid = np.linspace(0.0, start.seconds, INTENSITY_PIECES + 1)
        at = began[start.session] + grid
        pieces.append((at[:-1], at[1:], np.diff(start.until(grid))))
    begins, ends, joules = (np.concatenate(column) for column in zip(*pieces, strict=True))
    mean, low, high = energy_metrics.over_time(edges, np.array(table.g_per_kwh), begins, ends, joules)
    if math.isnan(mean):
        return CarbonIntensity(), (
            f"{options.forecast} covers {table.begin.isoformat()} to {table.end.isoformat()}, but the run was measured "
            f"from {_utc(begins.min())} to {_utc(ends.max())}, or not all of its joules are known"
        )
    date = f"{_utc(begins.min())} to {_utc(ends.max())}"
    return CarbonIntensity(mean, str(options.forecast), date, low, high), None


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(float(seconds), UTC).isoformat(timespec="seconds")


def _slurm(run_dir: Path, total_j: float) -> dict[str, Any]:
    jobs = list(ledger.jobs(ledger.read(run_dir)))
    if not jobs:
        return {"energy_j": None, "ratio": None, "jobs": [], "reason": f"{run_dir} has no ledger of jobs"}
    rows, reason = dispatch.accounts(jobs)
    energy = slurm_energy.of_rows(rows)
    if energy.joules is None:
        return {"energy_j": None, "ratio": None, "jobs": jobs, "reason": reason or energy.missing_reason}
    ratio = json_number(energy.joules / total_j)
    return {"energy_j": energy.joules, "ratio": ratio, "jobs": jobs, "reason": energy.missing_reason or None}
