"""Key figures of a page, each with its unit, or the reason why it was not measured."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.reporting.units import (
    counted,
    format_bytes,
    format_duration,
    format_joules,
    format_seconds,
    format_time,
    short_number,
)
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.telemetry.page import history
from hpcdist.telemetry.page.charts import series as common
from hpcdist.telemetry.page.charts.over_steps import ENTROPIES
from hpcdist.telemetry.page.energy_data import KWH_J, finite_number
from hpcdist.telemetry.page.run_data import PageData

NOT_MEASURED: Final = "not measured"
NO_WARM: Final = "only first steps of a start were made, which compile and allocate, so there is no speed"
EARLIER: Final = "not stored by the run: it is running, was stopped, or was made by an earlier version"


@dataclass(frozen=True)
class KeyFigure:
    """Key figure of a run, shown at the top of the page. If ``value`` is None, ``note`` has the reason."""

    name: str
    value: str | None
    note: str = ""


def figures(data: PageData) -> list[KeyFigure]:
    """Return the key figures of a run, or [] if it has no steps."""
    if data.run is None:
        return []
    return [*_losses(data), *_speed(data), *_ranks(data), *_energy(data), *_resources(data), *_mishaps(data)]


def _losses(data: PageData) -> Iterator[KeyFigure]:
    values = data.figures
    steps = f"after {counted(values['steps'], 'step')}"
    if data.external.planned_steps:
        steps = f"after {values['steps']:,} of {data.external.planned_steps:,} steps"
    train = values["train_loss_mean"]
    count = min(20, len(data.run.steps["step"])) if data.run is not None else 0
    mean = f"mean of the last {count} steps, " if count > 1 else ""
    form = f"{{:.4f}} {data.attributes.get('loss_unit', 'nats')}".rstrip()
    yield KeyFigure("Training loss", _form(train, form), mean + steps)
    val = values["val_loss"]
    entropies = [(key, finite_number(data.attributes.get(key))) for key in ENTROPIES]
    listed = ", ".join(f"{key.removesuffix('_nats')} {value:.3f}" for key, value in entropies if value is not None)
    note = f"entropies of the data: {listed}" if listed else "entropies of the data are not known"
    if val is None:
        note = f"no validation was made yet, or the recipe has no validation data; {note}"
    yield KeyFigure("Validation loss", _form(val, form), note)


def _speed(data: PageData) -> Iterator[KeyFigure]:
    values = data.figures
    speed = _form(values["tokens_per_s"], "{:,.0f} " + str(data.attributes.get("speed_unit", "tokens")) + "/s")
    yield KeyFigure("Throughput", speed, "first steps of each start left out" if speed else NO_WARM)
    middle, late = values["step_s_median"], values["step_s_p95"]
    is_known = middle is not None and late is not None
    yield KeyFigure(
        "Step, median",
        format_seconds(middle, 4) if is_known else None,
        f"95 % within {format_seconds(late, 4)}" if is_known else NO_WARM,
    )
    share, compute = values["comm_fraction"], values["compute_fraction"]
    note = f"of a step, waiting included; compute {_form(compute, '{:.1%}') or NOT_MEASURED}"
    yield KeyFigure("Communication", _form(share, "{:.1%}"), NO_WARM if share is None else note)
    hidden = finite_number(data.attributes.get("communication_hidden_share"))
    reason = str(data.attributes.get("communication_hidden_reason") or "")
    if hidden is not None:
        yield KeyFigure("Overlap", f"{hidden:.0%}", "of the time of reductions was not waited for")
    elif _setting(data, "communication.overlap") == "none" and not reason:
        yield KeyFigure("Overlap", "none", "communication.overlap = none: reductions come after the computation")
    else:
        yield KeyFigure("Overlap", None, reason or EARLIER)


def _ranks(data: PageData) -> Iterator[KeyFigure]:
    ratio, rank = data.figures.get("imbalance"), data.figures.get("slowest_rank")
    if data.world < 2:
        yield KeyFigure("Straggler score", None, "one rank: there is nothing to compare")
    else:
        note = f"rank {rank} over the median rank, compute time without waiting"
        yield KeyFigure("Straggler score", _form(ratio, "{:.2f}"), note if ratio is not None else NO_WARM)
    yield _moved(data)


def _moved(data: PageData) -> KeyFigure:
    name, moved, sent = "Moved a step", step_metrics.moved_bytes(data.attributes), data.figures["bytes_sent_per_step"]
    if data.world < 2:
        return KeyFigure(name, format_bytes(0), "one rank: there is no other rank to send to")
    if moved is not None:
        unknown = ", plus traffic of the MPI library that is not visible" if moved.unknown else ""
        return KeyFigure(name, format_bytes(round(sum(moved))), f"a rank: {moved.described()}{unknown}")
    if sent:
        return KeyFigure(
            name, format_bytes(round(sent)), f"in messages, of the rank that sends most; other ways: {EARLIER}"
        )
    return KeyFigure(name, None, EARLIER)


def _energy(data: PageData) -> Iterator[KeyFigure]:
    energy, costs, attributes = data.energy, data.costs, data.attributes
    if energy.joules is None:
        first, _, details = energy.reason.partition(": ")
        yield KeyFigure("Energy", None, f"{first}; details under Energy" if details else first)
        return
    # Figures of a declared model must not look like measurements, so each has the label.
    label = f"{energy.label}. " if energy.label else ""
    kinds = ", ".join(f"{kind} {format_joules(value)}" for kind, value in energy.by_kind.items() if value is not None)
    yield KeyFigure("Energy", format_joules(energy.joules), f"{label}{kinds or 'all starts together'}")
    site, pue = finite_number(costs.get("facility_kwh")), finite_number(costs.get("pue"))
    note = f"with {pue:g} as PUE of the site" if pue and pue > 1 else "without cooling and losses of the site (PUE 1)"
    yield KeyFigure("Electricity", f"{short_number(energy.joules / KWH_J if site is None else site)} kWh", label + note)
    step, per = energy.j_per_step, None if energy.renewed else finite_number(attributes.get("j_per_token"))
    if per is None and step is not None and data.run is not None:
        tokens = float(np.mean(data.run.steps["tokens"]))
        per = step / tokens if tokens else None
    note = f"{label}training only; {format_joules(step)} a step" if step is not None else EARLIER
    yield KeyFigure("Energy a token", None if per is None else format_joules(per), note)
    grams = finite_number(costs.get("emissions_g"))
    if grams is None:
        reason = str(costs.get("emissions_reason") or "the intensity is not known (energy.carbon_g_per_kwh)")
        yield KeyFigure("Emissions", None, reason)
        return
    source = ", ".join(str(costs[name]) for name in ("carbon_source", "carbon_date") if costs.get(name))
    yield KeyFigure(
        "Emissions", f"{short_number(grams)} g CO2e", f"{label}{costs.get('carbon_g_per_kwh'):g} g/kWh ({source})"
    )


def _resources(data: PageData) -> Iterator[KeyFigure]:
    peak, pss = (
        finite_number(data.attributes.get("peak_bytes_total")),
        finite_number(data.attributes.get("pss_bytes_most")),
    )
    if peak is None:
        peak = peak_memory(data)
    note = "arrays of the rank that holds most" + (f"; its process {format_bytes(round(pss))}" if pss else "")
    yield KeyFigure(
        "Peak memory", None if peak is None else format_bytes(round(peak)), note if peak is not None else EARLIER
    )


def peak_memory(data: PageData) -> float | None:
    """Return the peak memory use in bytes, summed over all categories at one time, or None if it was not observed."""
    parts = list(common.observed_by_label(data, "memory_bytes").values())
    if not parts:
        return None
    times = {int(moment): 0.0 for part in parts for moment in part.time_ns}
    for part in parts:
        for moment, value in zip(part.time_ns.tolist(), part.value.tolist(), strict=True):
            times[moment] += value if math.isfinite(value) else 0.0
    return max(times.values())


def _mishaps(data: PageData) -> Iterator[KeyFigure]:
    yield KeyFigure("Skipped steps", str(data.figures["skipped_steps"]), "overflows of a gradient in 16 bits")
    flags = "flags of the run itself: loss spikes, drops of speed"
    yield KeyFigure("Anomalies", str(data.figures["anomalies"]), flags)
    starts = len(data.state.starts)
    if starts:
        died = sum(start.deaths for start in data.state.starts)
        ended = sum(not start.end for start in data.state.starts[:-1]) + (data.state.kind == history.KILLED)
        note = f"{ended} ended unexpectedly; {data.state.requeues} requeued; {counted(died, 'death')} survived"
        yield KeyFigure("Starts", str(starts), note)


def page_facts(data: PageData) -> list[tuple[str, str]]:
    """Return (name, text) pairs for the head of the page: times, size, strategy, job and version."""
    state, attributes = data.state, data.attributes
    facts: list[tuple[str, Any]] = [
        ("Began", format_time(state.began) if state.began is not None else attributes.get("created_utc")),
        ("Last sign of life", format_time(state.seen) if state.seen is not None else None),
        (
            "Time of all starts",
            format_duration(sum(max(0.0, s.seen - s.began) for s in state.starts)) if state.starts else None,
        ),
        ("Ranks", f"{data.world:,}" if data.world else None),
        ("Nodes", attributes.get("nodes") or (len(data.hosts) if data.hosts else None)),
        (
            "Strategy",
            attributes.get("architecture") or attributes.get("strategy") or _setting(data, "parallel.strategy"),
        ),
        ("Site", attributes.get("site") or attributes.get("slurm_job_partition")),
        ("Job", attributes.get("slurm_job_id")),
        ("Parameters", f"{int(attributes['parameters']):,}" if finite_number(attributes.get("parameters")) else None),
        ("MPI", str(attributes.get("mpi_library", "")).partition(", ")[0]),
        ("Version", _version(attributes)),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _setting(data: PageData, key: str) -> str | None:
    return next((setting.value.strip('"') for setting in data.external.settings if setting.key == key), None)


def _version(attributes: Any) -> str:
    version, commit = str(attributes.get("hpcdist_version", "")), str(attributes.get("git_commit", ""))
    is_known = commit and not commit.startswith("unknown")
    changed = "+changes" if commit.endswith("+changes") else ""
    return " ".join(part for part in (version, f"({commit[:10]}{changed})" if is_known else "") if part)


def _form(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)
