"""What training consists of, in joules: computing, communication, update, data, the rest, and idle. Pure.

The windows around checkpoints and validation are measured; of training, which is measured too, `attribution` tells the
parts, node by node. Here they become those of the job: sums over its sources and its starts, that add up to the joules
of training.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hpcdist.energy.mixtures import NAMES
from hpcdist.energy.report import EARLIER, amount

ELSEWHERE: Final = ("checkpoint", "validation")  # measured directly, by windows of their own
ACTIVITIES: Final = tuple(name for name in NAMES if name not in ELSEWHERE)
UNTOLD: Final = "nobody told what the ranks did when: set telemetry.trace to true"
LITTLE: Final = 0.02  # of all training: of a start with less, doubts are no reason to forget what the others have told
TOO_SHORT: Final = "the counters had not two new values while it was known what the ranks did"
MODEL: Final = "a model follows how busy a device was now and then: it says nothing of what took milliseconds"


def of_job(
    rows: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    training_j: float,
    reason: str | None,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``joules``, ``error_j`` and ``seconds`` by activity; NaN where not known, with a ``reason`` by activity.

    ``rows`` are those of `Attribution.rows` of all nodes, of which ``kinds`` count. ``training_j`` are the joules of
    training in this start, NaN for a ``reason``. ``earlier`` is the `state` of the starts of this run before this one.
    """
    found = {name: phase for name, phase in _summed(rows, kinds).items() if name in ACTIVITIES}
    whole = math.fsum(phase["joules"] for phase in found.values())
    scale = training_j / whole if whole > 0 else math.nan
    before_j = math.fsum(phase["joules"] or 0.0 for phase in (earlier or {}).values())
    little = before_j > 0 and training_j <= LITTLE * (training_j + before_j)
    wider = 1 + training_j / before_j if little and not found else 1.0  # what nobody told is as the rest was
    if not found and not little:
        reason = reason or (TOO_SHORT if rows else UNTOLD)
    if earlier is not None and not earlier:
        reason = reason or EARLIER + UNTOLD
    told: dict[str, dict[str, Any]] = {"joules": {}, "error_j": {}, "seconds": {}, "reason": {}}
    for name in ACTIVITIES:
        if name in found or name in (earlier or {}):
            own = found.get(name, _NOTHING)
            before = (earlier or {}).get(name, _NOTHING)
            joules = own["joules"] * scale if own["joules"] else 0.0
            doubt = None if little else own["reason"]
            why = reason or doubt or (_before(before.get("reason")) if before["joules"] is None else None)
            error_j = joules if little else own["error_j"] * scale if own["error_j"] else 0.0
            told["seconds"][name] = own["seconds"] + before["seconds"]
            told["joules"][name] = math.nan if why else joules + before["joules"] * wider
            told["error_j"][name] = math.nan if why else math.hypot(error_j, before["error_j"])
            if why:
                told["reason"][name] = why
    return told | {"unknown": reason}


_NOTHING: Final[Mapping[str, Any]] = {"joules": 0.0, "error_j": 0.0, "seconds": 0.0, "reason": None}


def _before(reason: str | None) -> str:
    """Return why an earlier start did not know; what it had from one before is not said twice."""
    return EARLIER + (reason or "not known").removeprefix(EARLIER)


def state(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps, as JSON values: what is not known is None."""
    return {
        name: {
            "joules": None if math.isnan(joules) else joules,
            "error_j": None if math.isnan(joules) else told["error_j"][name],
            "seconds": told["seconds"][name],
            "reason": told["reason"].get(name),
        }
        for name, joules in told["joules"].items()
    }


def restored(read: Any) -> dict[str, Any]:
    """Return a `state` as it was read from somewhere. Raises ValueError or TypeError for anything else."""
    if not isinstance(read, dict) or not all(isinstance(row, dict) for row in read.values()):
        raise TypeError(f"activities are {str(read)[:40]}, expected an object of objects")
    phases = {}
    for name, row in read.items():
        reason = row.get("reason")
        if not isinstance(reason, str | None):
            raise TypeError(f"the reason of {name} is {str(reason)[:40]}, expected text")
        joules = amount(row.get("joules"), f"joules of {name}", may_lack=True)
        error_j = amount(row.get("error_j"), f"error of {name}", may_lack=joules is None)
        seconds = amount(row.get("seconds"), f"seconds of {name}")
        phases[str(name)] = {"joules": joules, "error_j": error_j, "seconds": seconds, "reason": reason}
    return phases


def _summed(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the activities over the sources of ``kinds``: sums of joules, seconds of the source that has most."""
    found: dict[str, dict[str, Any]] = {}
    counted = [row for row in rows if row["kind"] in kinds]
    for row in counted:
        for name, phase in row["activities"].items():
            whole = found.setdefault(name, {"joules": 0.0, "error_j": 0.0, "seconds": 0.0, "reason": None})
            whole["joules"] += phase["joules"]
            whole["error_j"] = math.hypot(whole["error_j"], phase["error_j"])
            if whole["reason"] is None and phase["reason"] is not None:
                whole["reason"] = f"{row['name']}: {phase['reason']}"
    # All of one source: the longest of each phase, of different ranks, would add up to more than the time there was.
    longest = max(counted, key=lambda row: sum(one["seconds"] for one in row["activities"].values()), default=None)
    for name, phase in longest["activities"].items() if longest is not None else ():
        found[name]["seconds"] = phase["seconds"]
    return found
