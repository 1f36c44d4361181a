"""Figures of a run: the catalogue that reports, comparisons, the run page and exports read.

A new figure of a run is one entry of `FIGURES`. The module `quantities` defines the metrics of single steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.comm.record.timing import BytesMoved
from hpcdist.constants import J_PER_KWH
from hpcdist.models.config import FOREIGN
from hpcdist.reporting.table import Catalogue, Figure
from hpcdist.reporting.units import counted, format_bytes, format_joules, format_seconds, short_number
from hpcdist.telemetry.metrics import step_metrics
from hpcdist.telemetry.metrics.observations import ObservedSeries
from hpcdist.telemetry.page import chart_series, history
from hpcdist.telemetry.page.energy_data import finite_number
from hpcdist.telemetry.page.run_data import RunData

NO_WARM: Final = "only first steps of a start were made, which compile and allocate"
EARLIER: Final = "not stored by the run: it is running, was stopped, or was made by an earlier version"
NO_VALIDATION: Final = "no validation was made yet, or the recipe has no validation data"
NO_LOGGED_VALIDATION: Final = "the script logged no validation_loss"
NO_SCRIPT_OVERLAP: Final = "not measured in a script; `hpcdist trace` shows the overlap of the last steps"
NO_SCRIPT_MEMORY: Final = "arrays of a script are not counted"
ONE_RANK: Final = "one rank: there is nothing to compare"
ENTROPIES: Final = ("unigram_nats", "bigram_nats", "trigram_nats")
_SHARES: Final = ("compute", "update", "data", "other")


@dataclass(frozen=True)
class RunFigure(Figure[RunData]):
    """Definition of a metric of a whole run, such as the speed. ``note``: function that returns a remark for a run."""

    note: Callable[[RunData], str] = lambda run: ""
    is_fact: bool = False  # property of the job, in the head of a report
    is_detail: bool = False  # tables of several runs omit the figure
    is_counter: bool = False  # count of incidents, for which 0 is the normal value

    def why_unknown(self, record: RunData) -> str:
        return self.reason(record) and (record.reason or self.reason(record))


def _number(key: str) -> Callable[[RunData], float | None]:
    return lambda run: finite_number(run.figures.get(key))


def _loss_text(value: float, run: RunData) -> str:
    return f"{value:.4f} {run.loss_unit}".rstrip()


def _train_note(run: RunData) -> str:
    steps, planned = run.figures["steps"], run.external.planned_steps
    count = 0 if run.run is None else min(step_metrics.LAST_LOSSES, len(run.run.steps["step"]))
    mean = f"mean of the last {count} steps, " if count > 1 else ""
    return mean + (f"after {steps:,} of {planned:,} steps" if planned else f"after {counted(steps, 'step')}")


def _entropies(run: RunData) -> str:
    values = {key.removesuffix("_nats"): finite_number(run.attributes.get(key)) for key in ENTROPIES}
    texts = [f"{name} {value:.3f}" for name, value in values.items() if value is not None]
    return f"entropies of the data: {', '.join(texts)}" if texts else ""


def _shares(run: RunData) -> str:
    shares = {name: finite_number(run.figures.get(f"{name}_fraction")) for name in _SHARES}
    if shares["data"] is None and shares["other"] is not None:  # a file of an earlier version
        shares["data and other"] = shares.pop("other")
    texts = [f"{name} {value:.1%}" for name, value in shares.items() if value is not None]
    return f"share of a step, waiting included; {', '.join(texts)}"


def _overlap_note(run: RunData) -> str:
    if run.figures["communication_hidden_share"] > 0:
        return "of the time of reductions was not waited for"
    return "starting and waiting took at least as long as the reductions themselves"


def _noise_note(run: RunData) -> str:
    scale, batch = run.figures["noise_scale"], finite_number(run.attributes.get("global_batch"))
    if scale <= 0:
        return "the noise is smaller than the error of its estimate"
    note = "gradient noise scale, the critical batch"
    if batch is None:
        return note
    steps, samples = 1 + scale / batch, 1 + batch / scale
    return (
        f"{note}; {batch:g} a step take {steps:.2f} times the fewest steps and {samples:.2f} times the fewest samples"
    )


def _no_overlap(run: RunData) -> str:
    if run.world < 2:
        return ""
    if run.is_script:
        return NO_SCRIPT_OVERLAP
    if run.setting("communication.overlap") == "none":
        return "communication.overlap = none: reductions come after the computation"
    return str(run.attributes.get("communication_hidden_reason") or EARLIER)


def _moved(run: RunData) -> BytesMoved | None:
    sent = finite_number(run.figures.get("bytes_sent_per_step"))
    loaded = finite_number(run.attributes.get("bytes_loaded_per_step"))  # stored by an earlier version
    old = None if sent is None or loaded is None else BytesMoved(sent, loaded)
    return step_metrics.moved_bytes(run.attributes) or old


def _moved_total(run: RunData) -> float | None:
    moved = _moved(run)
    if run.world < 2:
        return 0.0
    return finite_number(run.figures.get("bytes_sent_per_step")) or None if moved is None else float(sum(moved))


def _moved_note(run: RunData) -> str:
    moved = _moved(run)
    if run.world < 2:
        return "one rank: there is no other rank to send to"
    if moved is None:
        return f"in messages, of the rank that sends most; other ways: {EARLIER}"
    unknown = ", plus traffic of the MPI library that is not visible" if moved.unknown else ""
    return f"a rank: {moved.described()}{unknown}"


def _bytes_text(value: float, run: RunData) -> str:
    return format_bytes(round(value))


def _peak_bytes(run: RunData) -> float | None:
    peak = finite_number(run.attributes.get("peak_bytes_total"))
    observed = {} if run.run is None else run.run.observed.series
    parts = [series for name, series in observed.items() if name.startswith("memory_bytes[")]
    if peak is not None or not parts:
        return peak
    times = np.concatenate([part.time_ns for part in parts])
    values = np.nan_to_num(np.concatenate([part.value for part in parts]), posinf=0.0)
    return float(np.bincount(np.unique(times, return_inverse=True)[1], values).max())


def _peak_text(value: float, run: RunData) -> str:
    # PyTorch and JAX hold the activations of a script's model, which are not counted.
    return _bytes_text(value, run) + (" + activations" if run.setting("model.kind") in FOREIGN else "")


def _peak_note(run: RunData) -> str:
    process = finite_number(run.attributes.get("pss_bytes_most"))
    return "arrays of the rank that holds most" + (f"; its process {format_bytes(round(process))}" if process else "")


def _labelled(run: RunData, text: str) -> str:
    # With the label of a declared energy model, a figure does not look measured.
    return f"{text} ({run.energy.label})" if run.energy.label else text


def _joules_text(value: float, run: RunData) -> str:
    return _labelled(run, format_joules(value))


def _energy_note(run: RunData) -> str:
    energy = run.energy
    kinds = ", ".join(f"{kind} {format_joules(value)}" for kind, value in energy.by_kind.items() if value is not None)
    parts = [part for part in energy.parts if part.joules is not None]
    phases = [*parts, *(phase for phase in energy.phases if not parts or phase.name != "training")]
    texts = ", ".join(f"{phase.name} {format_joules(phase.joules)}" for phase in phases if phase.joules is not None)
    return "; ".join(text for text in (kinds or "all starts together", texts) if text)


def _j_per_item(unit: str) -> Callable[[RunData], float | None]:
    def joules(run: RunData) -> float | None:
        if run.speed_unit != f"{unit}s":
            return None
        step = run.energy.j_per_step
        per_item = None if run.energy.renewed else finite_number(run.attributes.get(f"j_per_{unit}"))
        if per_item is None and step is not None and run.run is not None:
            items = step_metrics.items_per_step(run.run.steps, run.attributes)
            return step / items if items > 0 else None
        return per_item

    return joules


def _j_per_item_note(run: RunData) -> str:
    step = run.energy.j_per_step
    return "training only" + ("" if step is None else f"; {format_joules(step)} a step")


def _kwh(run: RunData) -> float | None:
    return None if run.energy.joules is None else run.costs.get("facility_kwh", run.energy.joules / J_PER_KWH)


def _kwh_note(run: RunData) -> str:
    pue = finite_number(run.costs.get("pue"))
    is_set = pue is not None and pue > 1
    return f"with {pue:g} as PUE of the site" if is_set else "without cooling and losses of the site"


def _no_emissions(run: RunData) -> str:
    if run.energy.joules is None or not run.costs:
        return ""
    return str(run.costs.get("emissions_reason") or "the intensity is not known (energy.carbon_g_per_kwh)")


def _emissions_note(run: RunData) -> str:
    source = ", ".join(str(run.costs[name]) for name in ("carbon_source", "carbon_date") if run.costs.get(name))
    return f"{run.costs.get('carbon_g_per_kwh', math.nan):g} g/kWh ({source})"


def _unexpected_ends(run: RunData) -> int:
    return sum(not start.end for start in run.state.starts[:-1]) + (run.state.kind == history.KILLED)


FIGURES: Final = (
    RunFigure("strategy", lambda run: run.setting("parallel.strategy") or run.attributes.get("strategy"),
              meaning="data-parallel strategy", is_fact=True),
    RunFigure("world", lambda run: run.world or None, title="ranks", meaning="ranks of the last step", is_fact=True),
    RunFigure("steps", lambda run: run.figures.get("steps"), ",", meaning="completed optimizer steps", is_fact=True),
    RunFigure("train_loss_mean", _number("train_loss_mean"), _loss_text, title="training loss",
              meaning="mean training loss of the last 20 steps", reason=lambda run: "no loss was finite",
              note=_train_note),
    RunFigure("val_loss", _number("val_loss"), _loss_text, title="validation loss",
              meaning="mean loss of the last validation",
              reason=lambda run: NO_LOGGED_VALIDATION if run.is_script else NO_VALIDATION, note=_entropies),
    RunFigure("tokens_per_s", _number("tokens_per_s"), lambda value, run: f"{value:,.0f} {run.speed_unit}/s",
              title="speed", unit="1/s", meaning="tokens, or samples, over the time of their steps",
              reason=lambda run: NO_WARM, note=lambda run: "first steps of each start left out"),
    RunFigure("step_s_median", _number("step_s_median"), lambda value, run: format_seconds(value, 4),
              title="step", unit="s", meaning="median time of a step on its slowest rank",
              reason=lambda run: NO_WARM,
              note=lambda run: f"median; 95 % within {format_seconds(run.figures.get('step_s_p95'), 4)}"),
    RunFigure("comm_fraction", _number("comm_fraction"), ".1%", title="communication", unit="1",
              meaning="share of a step in communication that nothing hid", reason=lambda run: NO_WARM, note=_shares),
    RunFigure("communication_hidden_share", _number("communication_hidden_share"),
              lambda value, run: f"{max(0.0, value):.0%}", title="overlap", unit="1",
              meaning="share of the time of reductions that nobody waited for", reason=_no_overlap, is_detail=True,
              note=_overlap_note),
    RunFigure("imbalance", lambda run: None if run.world < 2 else finite_number(run.figures.get("imbalance")), ".2f",
              title="straggler score", unit="1", meaning="compute time of the slowest rank over the median rank's",
              reason=lambda run: ONE_RANK if run.world < 2 else NO_WARM, is_detail=True,
              note=lambda run: f"rank {run.figures['slowest_rank']} over the median rank, without waiting"),
    RunFigure("moved_bytes_per_step", _moved_total, _bytes_text, title="moved a step", unit="By",
              meaning="bytes that a rank moves in a step", reason=lambda run: EARLIER, note=_moved_note),
    RunFigure("noise_scale", _number("noise_scale"), lambda value, run: f"{value:,.1f} samples", title="noise scale",
              meaning="gradient noise scale", is_detail=True,
              reason=lambda run: str(run.attributes.get("noise_scale_reason", "")), note=_noise_note),
    RunFigure("energy_j", lambda run: run.energy.joules, _joules_text, title="energy", unit="J",
              meaning="energy over all starts", reason=lambda run: run.energy.reason, note=_energy_note),
    RunFigure("facility_kwh", _kwh, lambda value, run: _labelled(run, f"{short_number(value)} kWh"),
              title="electricity", unit="kWh", meaning="energy of the job times the PUE of the site", is_detail=True,
              note=_kwh_note),
    *(
        RunFigure(f"j_per_{item}", _j_per_item(item), _joules_text, title=f"energy a {item}", unit="J",
                  meaning=f"energy of training per {item}", is_detail=True, note=_j_per_item_note)
        for item in ("token", "sample")
    ),
    RunFigure("cost", lambda run: finite_number(run.costs.get("cost")),
              lambda value, run: _labelled(run, f"{value:.3g} {run.costs.get('currency') or ''}".rstrip()),
              meaning="price of the electricity", is_detail=True, note=lambda run: "price of the electricity"),
    RunFigure("energy_label", lambda run: run.energy.label or None, title="energy label",
              meaning="remark on all figures of energy, such as a declared model", is_fact=True, is_detail=True),
    RunFigure("emissions_g", lambda run: finite_number(run.costs.get("emissions_g")),
              lambda value, run: _labelled(run, f"{short_number(value)} g CO2e"), title="emissions", unit="g",
              meaning="CO2 equivalents of the electricity", reason=_no_emissions, is_detail=True, note=_emissions_note),
    RunFigure("peak_bytes_total", _peak_bytes, _peak_text, title="peak memory", unit="By",
              meaning="most bytes of arrays on a rank",
              reason=lambda run: NO_SCRIPT_MEMORY if run.is_script else EARLIER, note=_peak_note),
    RunFigure("starts", lambda run: len(run.state.starts) or None, meaning="starts of the run", is_detail=True),
    RunFigure("skipped_steps", lambda run: run.figures.get("skipped_steps"), title="skipped steps", is_counter=True,
              meaning="steps without an update", note=lambda run: "the gradient overflowed, nothing was updated"),
    RunFigure("anomalies", lambda run: run.figures.get("anomalies"), is_counter=True,
              meaning="flags of the run itself", note=lambda run: "loss spikes, drops of speed; the page lists them"),
    RunFigure("unexpected_ends", _unexpected_ends, title="unexpected ends", is_counter=True,
              meaning="starts that ended without a message"),
    RunFigure("requeues", lambda run: run.state.requeues, is_counter=True, meaning="restarts by the scheduler"),
    RunFigure("survived_deaths", lambda run: sum(start.deaths for start in run.state.starts),
              title="survived deaths", is_counter=True, meaning="deaths of ranks after which the job continued"),
)  # fmt: skip
RUN: Final[Catalogue[RunData]] = Catalogue(*FIGURES)


def logged_values(run: RunData) -> dict[str, ObservedSeries]:
    """Return {name: values over the steps} of the values that a script logged with `hpcdist.torch.log`."""
    return chart_series.observed_by_label(run, "logged_value")


def _logged(name: str) -> RunFigure:
    def last(run: RunData) -> float | None:
        values = logged_values(run).get(name)
        return None if values is None else float(values.value[-1])

    def note(run: RunData) -> str:
        return f"logged by the script at step {int(logged_values(run)[name].step[-1]):,}"

    return RunFigure(f"logged_{name}", last, ".6g", title=name, meaning="last value that the script logged", note=note)


def figures_of(*runs: RunData) -> tuple[RunFigure, ...]:
    """Return `FIGURES`, followed by one figure per name of the values that the scripts of ``runs`` logged."""
    return (*FIGURES, *(_logged(name) for name in sorted({name for run in runs for name in logged_values(run)})))


def measured(run: RunData) -> list[tuple[str, str, str]]:
    """Return a list of (title, value, note) texts, one per known metric, without job properties and zero counters."""
    unknown: tuple[object, ...] = (None, 0)
    return [
        (figure.heading, figure.text(run), figure.note(run))
        for figure in (figures_of(run) if run.run is not None else ())
        if not figure.is_fact and figure.value(run) not in (unknown if figure.is_counter else (None,))
    ]


def zero_counters(run: RunData) -> str:
    """Return the titles of all counters of ``run`` that are 0, as one text separated by commas."""
    counters = [figure for figure in FIGURES if figure.is_counter and run.run is not None]
    return ", ".join(figure.heading for figure in counters if figure.value(run) == 0)


def lines(run: RunData, head: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Return a list of text lines: the (title, text) pairs ``head``, known metrics, and reasons for unknown metrics."""
    rows = [*head, *((title, f"{value}  ({note})" if note else value) for title, value, note in measured(run))]
    rows += [("none", names)] if (names := zero_counters(run)) else []
    width = max((len(title) for title, _ in rows), default=0)
    return [*(f"{title:{width}}  {value}" for title, value in rows), *RUN.missing([run])]
