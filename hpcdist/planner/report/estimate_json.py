"""JSON of a plan: every field of an `Estimate`, and what follows from them.

Numbers that are not known or not finite become null.
"""

import math
from dataclasses import asdict
from typing import Any

from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.model.description import ModelDescription


def estimate_json(found: PlanEstimate, description: ModelDescription, cluster: Cluster) -> dict[str, Any]:
    """Return all of a plan; null where a number is not known, or not finite."""
    memory, timing = found.memory, found.timing
    plain = asdict(found)
    plain["layout"] |= {"devices": found.layout.devices, "microbatches": found.layout.microbatches(found.global_batch)}
    plain["memory"] |= {"bytes": memory.bytes, "fits": memory.fits, "breaks_first": memory.breaks_first}
    plain["timing"] |= {"step_s": timing.step_s}
    plain["energy"] |= {"joules": found.energy.joules}
    plain["assumptions"] = list(toml_file.assumptions(cluster))
    about = {"model": description.name, "cluster": cluster.name, "device": cluster.device.name}
    checked: dict[str, Any] = finite_json(
        {
            **about,
            **plain,
            "step_s": found.step_s,
            "mfu": found.mfu,
            "modelled_mfu": found.modelled_mfu,
            "is_capped": found.is_capped,
            "hfu": found.hfu,
            "exact_mfu": found.exact_mfu,
            "exact_hfu": found.exact_hfu,
        }
    )
    return checked


def finite_json(value: Any) -> Any:
    """Return ``value`` with null in the place of what JSON cannot write."""
    if isinstance(value, dict):
        return {key: finite_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
