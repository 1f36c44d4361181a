"""Energy summary of a run: figures, metrics attributes, and the line that a person reads.

What is not known is None, with the reason beside it. Needs no monitor: reports of finished runs use it, too.
"""

import math
from collections.abc import Mapping
from typing import Any

from hpcdist.energy.accounts import energy_metrics, phase_shares
from hpcdist.energy.accounts.energy_metrics import CarbonIntensity, json_number
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.report import NO_SOURCE


def carbon_intensity(config: EnergyConfig) -> CarbonIntensity:
    """Return the carbon intensity that a recipe has, if it has one."""
    if not config.carbon_g_per_kwh:
        return CarbonIntensity()
    return CarbonIntensity(config.carbon_g_per_kwh, config.carbon_source, config.carbon_date)


def energy_figures(
    report: Mapping[str, Any],
    steps: int,
    samples: float = math.nan,
    tokens: float = math.nan,
    *,
    told: Mapping[str, Any] | None = None,
    config: EnergyConfig | None = None,
) -> dict[str, Any]:
    """Return the figures of a `report` over so many steps; what is not known is None, with the reason beside it.

    ``told`` is what training consists of, see `activities.of_job`; ``config`` knows what a joule costs.
    """
    phases, config = report["phases"], config or EnergyConfig()
    training = phases.get("training", {"joules": math.nan})["joules"]
    told = told or {"joules": {}, "error_j": {}, "seconds": {}, "reason": {}, "unknown": phase_shares.NO_SPANS}
    meaning = energy_metrics.figures(
        report["energy_j"],
        math.fsum(phase["seconds"] for phase in phases.values()),
        pue=config.pue,
        intensity=carbon_intensity(config),
        price_per_kwh=config.price_per_kwh,
        currency=config.currency,
    )
    return {
        "energy_j": json_number(report["energy_j"]),
        "energy_reason": report["reason"],
        "energy_label": report["label"],
        "energy_j_by_phase": {name: json_number(phase["joules"]) for name, phase in phases.items()},
        "energy_reason_by_phase": {name: phase["reason"] for name, phase in phases.items() if phase["reason"]},
        "seconds_by_phase": {name: phase["seconds"] for name, phase in phases.items()},
        "energy_j_by_activity": {name: json_number(joules) for name, joules in told["joules"].items()},
        "energy_error_j_by_activity": {name: json_number(joules) for name, joules in told["error_j"].items()},
        "seconds_by_activity": dict(told["seconds"]),
        "energy_reason_by_activity": dict(told["reason"]),
        "energy_activity_reason": told["unknown"],
        "energy_j_by_kind": {kind: json_number(joules) for kind, joules in report["by_kind"].items()},
        "energy_parts_j_by_kind": {kind: json_number(joules) for kind, joules in report["parts"].items()},
        "energy_not_included": report["not_included"],
        "energy_sources": [
            {**source, "joules": json_number(source["joules"]), "update_s": json_number(source["update_s"])}
            for source in report["sources"]
        ],
        **energy_metrics.rates(training, steps, samples, tokens),
        **meaning,
        "energy_sampler_share": json_number(report["sampler_share"]),
    }


def energy_attributes(figures: Mapping[str, Any]) -> dict[str, float | str]:
    """Return what the metrics file says of the figures of a run; NaN is not known."""
    names = ("energy_j", "j_per_step", "j_per_sample", "j_per_token", "energy_delay_product_js", "emissions_g")
    found = {name: math.nan if figures[name] is None else figures[name] for name in names}
    return found | {"energy_reason": figures["energy_reason"] or "", "energy_label": figures["energy_label"]}


def describe_energy(figures: Mapping[str, Any]) -> str:
    """Return the line that a person reads: the energy as it was measured, or why it was not."""
    if figures["energy_j"] is None:
        reason = str(figures["energy_reason"]).split("; ")[0]  # all of them are in the JSON summary and the metrics
        if reason.startswith(NO_SOURCE):
            reason = NO_SOURCE
        return f"energy not measured: {reason}; see `hpcdist energy sources`"
    kinds = " + ".join(figures["energy_j_by_kind"])
    parts = [_listed(figures["energy_j_by_phase"])]
    known = {name: joules for name, joules in figures["energy_j_by_activity"].items() if joules is not None}
    if known:
        parts.append(f"training is {_listed(known)}")
    label = f" ({figures['energy_label']})" if figures["energy_label"] else ""
    said = [f"energy{label} {figures['energy_j']:.1f} J of {kinds} ({'; '.join(parts)})"]
    if figures["j_per_step"] is not None:
        said.append(f"{figures['j_per_step']:.3g} J a step")
    if figures["emissions_g"] is not None:
        dated = f", {figures['carbon_date']}" if figures["carbon_date"] else ""
        said.append(f"{figures['emissions_g']:.3g} gCO2e at PUE {figures['pue']:g} ({figures['carbon_source']}{dated})")
    if figures["cost"] is not None:
        said.append(f"{figures['cost']:.3g} {figures['currency'] or ''}".rstrip() + " of electricity")
    return "; ".join(said)


def _listed(joules: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {'unknown' if j is None else format(j, '.1f')}" for name, j in joules.items())
