"""Report of own runs: predicted and measured figures, as a table and an HDF5 file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.own_runs.fits import Time
from benchmarks.own_runs.trainings import CALIBRATION, Row
from benchmarks.training.turns import texts
from hpcdist.hdf5 import files
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.reporting.table import aligned

SCHEMA: Final = "hpcdist.benchmark.own-runs"
GOALS: Final = {"step": 0.15, "memory": 0.05}
AGREED_BYTES: Final = 1024  # largest uncounted bytes per step: norm, loss and stop requests


@dataclass(frozen=True)
class Compared:
    """A training, its measurement and its prediction. ``bytes`` is NaN if not all traffic is by messages."""

    name: str
    ranks: int
    where: str
    step_s: np.ndarray  # of each kept step
    bubble: float
    nbytes: float
    peak_bytes: float
    by_kind: tuple[float, ...]
    predicted_s: float
    predicted_bubble: float
    predicted_bytes: float
    predicted_memory: float
    terms_s: Mapping[str, float]
    terms_bytes: Mapping[str, float]
    flags: tuple[str, ...]

    @property
    def measured_s(self) -> float:
        return float(np.median(self.step_s))

    @property
    def errors(self) -> dict[str, float]:
        return {"step": self.predicted_s / self.measured_s - 1, "memory": self.predicted_memory / self.peak_bytes - 1}

    @property
    def beside(self) -> float:
        """Sent bytes minus predicted bytes."""
        return self.nbytes - self.predicted_bytes


class Places(NamedTuple):
    file: Path
    cluster: Path


def places(prefix: Path) -> Places:
    result = Places(*(prefix.with_name(prefix.name + end) for end in (".h5", "-cluster.toml")))
    for path in result:
        files.check_place(path)
    return result


def estimate(row: Row, cluster: Cluster) -> PlanEstimate:
    from hpcdist.planner.plan import plan
    from hpcdist.training.recipe import recipe as recipes
    from hpcdist.training.use_cases.plan import subject_of_recipe

    recipe_plan = subject_of_recipe(recipes.load(None, texts(row.keys), {}).recipe, row.name)
    return plan(recipe_plan.description, recipe_plan.layout, cluster, recipe_plan.global_batch, 1, simulate=True)


def compared(row: Row, measurement: Mapping[str, Any], cluster: Cluster, where: str = "one host") -> Compared:
    if measurement["name"] != row.name:
        raise SystemExit(f"expected a measurement of {row.name}, got {measurement['name']}")
    result = estimate(row, cluster)
    fullest = int(np.argmax(measurement["peak_bytes"]))
    return Compared(
        name=row.name,
        ranks=row.ranks,
        where=where,
        step_s=np.array(measurement["step_s"]),
        bubble=float(np.median(measurement["bubble"])) if row.pipeline else np.nan,
        nbytes=measurement["sent_bytes"] if row.counted and not measurement["unknown_calls"] else np.nan,
        peak_bytes=measurement["peak_bytes"][fullest],
        by_kind=tuple(measurement["peak_by_kind"][fullest]),
        predicted_s=result.step_s,
        predicted_bubble=result.timing.bubble,
        predicted_bytes=sum(result.timing.bytes.values()) if row.ranks > 1 else 0.0,
        predicted_memory=result.memory.bytes - result.memory.terms["reserved"],
        terms_s=dict(result.timing.terms),
        terms_bytes=dict(result.memory.terms),
        flags=result.flags,
    )


def _signed(value: float, goal: str) -> str:
    return f"{value:+.1%}" + ("" if abs(value) <= GOALS[goal] else "!")


def _cells(one: Compared) -> list[str]:
    step = [f"{1e3 * one.measured_s:.1f}", f"{1e3 * one.predicted_s:.1f}", _signed(one.errors["step"], "step")]
    memory = [f"{nbytes / 2**20:.1f}" for nbytes in (one.peak_bytes, one.predicted_memory)]
    sent = ["-", "-"] if np.isnan(one.nbytes) else [f"{one.nbytes:,.0f}", f"{one.beside:+,.0f}"]
    bubble = ["-", "-"] if np.isnan(one.bubble) else [f"{one.bubble:.1%}", f"{one.predicted_bubble:.1%}"]
    return [
        one.name,
        f"{one.ranks}",
        one.where,
        *step,
        *memory,
        _signed(one.errors["memory"], "memory"),
        *sent,
        *bubble,
    ]


def table(result: Sequence[Compared]) -> str:
    """Tabulate all trainings, with "!" after values that miss their goal, and count the trainings within the goals."""
    head = ["training, model, batch", "ranks", "on", "ms", "planned", "off", "MiB", "planned", "off"]
    lines = aligned([[*head, "bytes", "more", "bubble", "planned"], *map(_cells, result)])
    for goal, most in GOALS.items() if result else ():
        errors = np.array([abs(one.errors[goal]) for one in result])
        met = int((errors <= most).sum())
        lines.append(
            f"{goal}: {met} of {len(result)} within {most:.0%}, median {np.median(errors):.1%}, "
            f"worst {errors.max():.1%}"
        )
    counted = [one for one in result if not np.isnan(one.nbytes)]
    exact = sum(0 <= one.beside <= AGREED_BYTES for one in counted)
    lines.append(f"bytes: {exact} of {len(counted)} exact but for what ranks agree on (at most {AGREED_BYTES} a step)")
    return "\n".join(lines)


def missed(result: Sequence[Compared]) -> list[str]:
    """Describe each goal that some trainings miss: their number and the worst. NaN misses every goal."""
    messages = []
    for goal, most in GOALS.items():
        failing = [one for one in result if not abs(one.errors[goal]) <= most]
        if failing:
            worst = max(failing, key=lambda one: np.nan_to_num(abs(one.errors[goal]), nan=np.inf))
            messages.append(
                f"{goal} within {most:.0%} in {len(failing)} of {len(result)} trainings, the worst {worst.name} "
                f"({worst.where}), {worst.errors[goal]:+.1%}"
            )
    return messages


def write(
    outputs: Places, result: Sequence[Compared], times: Sequence[Time], cluster: str, library: str, *, anonymous: bool
) -> None:
    """Write the HDF5 file, and the cluster used for the predictions."""
    from hpcdist.arrays.backend import CATEGORIES
    from hpcdist.telemetry.provenance import provenance

    steps = max(len(one.step_s) for one in result)
    step_s = np.full((len(result), steps), np.nan)
    for index, one in enumerate(result):
        step_s[index, : len(one.step_s)] = one.step_s
    names = list(dict.fromkeys(name for one in result for name in one.terms_s))
    memory = list(dict.fromkeys(name for one in result for name in one.terms_bytes))
    numbers = {
        "predicted_s": "s", "bubble": "1", "predicted_bubble": "1", "nbytes": "By", "predicted_bytes": "By",
        "peak_bytes": "By", "predicted_memory": "By",
    }  # fmt: skip
    columns = {name: np.array([getattr(one, name) for one in result], np.float64) for name in numbers}
    files.write_contiguous(
        outputs.file,
        {
            "step_s": step_s,
            **columns,
            "ledger_bytes": np.array([one.by_kind for one in result], np.float64),
            "predicted_terms_s": np.array([[one.terms_s.get(name, 0.0) for name in names] for one in result]),
            "times": np.array([[one.nbytes, one.measured_s, one.predicted_s] for one in times]).reshape(-1, 3),
            "predicted_terms_bytes": np.array([[one.terms_bytes.get(name, 0.0) for name in memory] for one in result]),
        },
        {
            **provenance(mpi_library=library, anonymous=anonymous),
            "trainings": "; ".join(f"{one.where}: {one.name}" for one in result),
            "ranks": [one.ranks for one in result],
            "times": "; ".join(f"{one.where}, {one.what}, {one.way}" for one in times),
            "calibration": CALIBRATION,
            "cluster": cluster,
        },
        {
            "step_s": {"dims": "trainings, steps", "units": "s"},
            "times": {"dims": "times, (bytes, measured s, predicted s)"},
            **{name: {"dims": "trainings", "units": unit} for name, unit in numbers.items()},
            "ledger_bytes": {"dims": "trainings, kinds", "kinds": ",".join(CATEGORIES), "units": "By"},
            "predicted_terms_s": {"dims": "trainings, terms", "terms": ",".join(names), "units": "s"},
            "predicted_terms_bytes": {"dims": "trainings, terms", "terms": ",".join(memory), "units": "By"},
        },
        schema=SCHEMA,
        version=1,
    )
    outputs.cluster.write_text(cluster, encoding="utf-8")
    print(f"{outputs.file}, {outputs.cluster}")
