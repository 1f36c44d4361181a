"""What the event stream is told of energy and utilisation; figures that nobody knows are left out."""

import math
from collections.abc import Mapping
from typing import Any

from hpcdist.energy.accounts import energy_metrics
from hpcdist.energy.accounts.energy_metrics import CarbonIntensity
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.monitor.monitor import EnergyMonitor
from hpcdist.telemetry.metrics import quantities
from hpcdist.telemetry.metrics.quantities import energy_per_token


def told(
    monitor: EnergyMonitor, config: EnergyConfig, state: Mapping[str, Any], tokens: float
) -> dict[str, dict[str, float]]:
    """Return figures by kind of event, from what was collected and the ``state`` of the energy of the run (local).

    ``tokens`` are those of the run that the energy of its training was used for.
    """
    joules = state["joules"] or {}
    by_kind = {kind: value for kind, value in joules.get("by_kind", {}).items() if value is not None}
    training = joules.get("phases", {}).get("training", {}).get("joules")
    energy = {quantities.key("energy_joules_total", kind): value for kind, value in by_kind.items()}
    energy |= {quantities.key("power_watts", kind): watts for kind, watts in monitor.power().items()}
    if training is not None:
        energy["energy_per_token_joules"] = energy_per_token(training, tokens)
    if by_kind and joules["reason"] is None and config.carbon_g_per_kwh:
        emitted = energy_metrics.emissions(sum(by_kind.values()), config.pue, CarbonIntensity(config.carbon_g_per_kwh))
        energy["emissions_grams_total"] = emitted.grams
    busy = {quantities.key("utilisation_ratio", name): share for name, share in monitor.utilisation().items()}
    busy |= {quantities.key("network_bytes_total", way): count for way, count in monitor.network().items()}
    return {
        kind: {name: value for name, value in figures.items() if math.isfinite(value)}
        for kind, figures in (("energy", energy), ("utilisation", busy))
    }
