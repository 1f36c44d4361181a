"""The energy and time of a run: measured from its first step to its validation, over all of its starts.

What is used after the last checkpoint of a start that was killed counts too, though its steps are done again: the run
directory keeps a record, renewed with the rows of the metrics, that no checkpoint has to wait for.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from hpcdist.arrays import device
from hpcdist.checkpoint import manifest
from hpcdist.comm.communicator import Communicator
from hpcdist.energy.monitor import Monitor
from hpcdist.energy.store import NodeRows
from hpcdist.errors import StorageError
from hpcdist.training.recipe import Recipe

USAGE_FILE: Final = "usage.json"


class Energy:
    """What `Monitor` measures of a run, and the step after which it began. Construction is collective.

    ``directory`` is that of the run, None where no record is kept.
    """

    def __init__(
        self, comm: Communicator, recipe: Recipe, resume_from: Path | None, directory: Path | None = None
    ) -> None:
        on_gpu = recipe.run.device == "gpu"
        self.monitor = (
            Monitor(comm, recipe.energy, bus_id=device.bus_id(), synchronise=device.synchronise)
            if on_gpu
            else Monitor(comm, recipe.energy)
        )
        self._since_step = 0
        if resume_from is not None:
            scalars = manifest.load(resume_from).scalars
            # A checkpoint of an earlier version has none: then joules are those of the steps from here on.
            kept = _usable(scalars.get("energy")) or {"since_step": scalars["steps"], "joules": None}
            self._since_step = kept["since_step"]
            self.monitor.restore(kept["joules"])
        self._comm, self._path = comm, None if directory is None else directory / USAGE_FILE
        noted = comm.broadcast_object(_noted(self._path) if self._path is not None and comm.rank == 0 else None)
        if noted is not None:  # later than the checkpoint
            self._since_step = noted["since_step"]
            self.monitor.restore(noted["joules"])

    def window(self, phase: str) -> AbstractContextManager[None]:
        """Count what is used inside as that of ``phase`` (local; every rank should call)."""
        return self.monitor.window(phase)

    def collect(self) -> list[NodeRows]:
        """Return samples and windows since the last call, on rank 0 of the world at the least. Collective."""
        return self.monitor.collect()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Collective."""
        return {"since_step": self._since_step, "joules": self.monitor.state()}

    def note(self) -> dict[str, Any]:
        """Renew the record of what has been used so far, and return it. Collective; raises StorageError on rank 0."""
        state = self.state()
        if self._path is None or self._comm.rank:
            return state
        text = json.dumps(state)
        new = self._path.with_suffix(".tmp")
        try:
            new.write_text(text, encoding="utf-8")
            os.replace(new, self._path)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error
        return state

    def figures(self, steps: int) -> dict[str, Any]:
        """Return what the summary of a run of ``steps`` steps says, as JSON values. Collective.

        ``j_per_step`` is training without checkpoints and validation, over the steps of the run: those that a killed
        start made after its last checkpoint, and another one made again, are paid twice and count once.
        """
        return summary(self.monitor.report(), steps - self._since_step)


def _usable(found: Any) -> dict[str, Any] | None:
    """Return what `Energy.state` once returned, as it was read; None where it is something else."""
    if not isinstance(found, dict):
        return None
    kept = {name: found.get(name) for name in ("since_step", "joules")}
    return kept if isinstance(kept["since_step"], int) and isinstance(kept["joules"], dict) else None


def _noted(path: Path) -> dict[str, Any] | None:
    """Return what the record says; None where there is none, or it cannot be used."""
    try:
        found = _usable(json.loads(path.read_bytes()))
        if found is not None:
            return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        pass
    print(f"hpcdist: {path} cannot be read: energy and time count from the checkpoint", file=sys.stderr, flush=True)
    return None


def summary(report: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the figures of a `report` over ``steps`` steps; what is not known is None, with the reason beside it."""
    phases = report["phases"]
    training = phases.get("training", {"joules": math.nan})["joules"]
    return {
        "energy_j": _number(report["energy_j"]),
        "energy_reason": report["reason"],
        "energy_j_by_phase": {name: _number(phase["joules"]) for name, phase in phases.items()},
        "energy_reason_by_phase": {name: phase["reason"] for name, phase in phases.items() if phase["reason"]},
        "seconds_by_phase": {name: phase["seconds"] for name, phase in phases.items()},
        "energy_j_by_kind": {kind: _number(joules) for kind, joules in report["by_kind"].items()},
        "energy_not_included": report["not_included"],
        "energy_sources": [
            {**source, "joules": _number(source["joules"]), "update_s": _number(source["update_s"])}
            for source in report["sources"]
        ],
        "j_per_step": _number(training / steps) if steps > 0 else None,
    }


def energy_attributes(figures: Mapping[str, Any]) -> dict[str, float | str]:
    """Return what the metrics file says of the figures of a run; NaN is not known."""
    found = {name: math.nan if figures[name] is None else figures[name] for name in ("energy_j", "j_per_step")}
    return found | {"energy_reason": figures["energy_reason"] or ""}


def described(figures: Mapping[str, Any]) -> str:
    """Return the line that a person reads."""
    if figures["energy_j"] is None:
        reason, _, details = figures["energy_reason"].partition(": ")
        return f"energy not measured: {reason}{' (see `hpcdist energy sources`)' if details else ''}"
    kinds = " + ".join(figures["energy_j_by_kind"])
    phases = ", ".join(
        f"{name} {'unknown' if joules is None else format(joules, '.1f')}"
        for name, joules in figures["energy_j_by_phase"].items()
    )
    step = "" if figures["j_per_step"] is None else f"; {figures['j_per_step']:.3g} J a step"
    return f"energy {figures['energy_j']:.1f} J of {kinds} ({phases}){step}"


def _number(value: float) -> float | None:
    """NaN is not JSON: what is not known is null."""
    return None if math.isnan(value) else value
