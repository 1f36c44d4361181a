"""Plan of one layout: `plan_of_subject` as a planner estimate, `plan` (`hpcdist.plan`) as JSON values."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.planner import plan as planner
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import PlanEstimate
from hpcdist.planner.layout import LAYOUT_FIELDS
from hpcdist.planner.limits import checks
from hpcdist.planner.report import table
from hpcdist.planner.report.quantities import estimate_json
from hpcdist.reporting.jsonable import plain_number
from hpcdist.reporting.nearest import nearest
from hpcdist.training.use_cases.plan_subject import (
    RUN_OPTIONS,
    SHAPE_OPTIONS,
    read_cluster,
    subject_from_options,
    with_published_kernels,
)
from hpcdist.training.use_cases.recipe_plan import PlanSubject

OPTIONS: Final = (*RUN_OPTIONS, *SHAPE_OPTIONS, *LAYOUT_FIELDS, "simulate")
PlanResult = TypeVar("PlanResult")


def plan(
    recipe: str | os.PathLike[str] | None = None,
    *,
    cluster: str,
    keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return memory, time and energy of a training on a cluster, as JSON values. Local: needs neither MPI nor a GPU.

    ``recipe``: TOML file. Keyword-only: ``cluster``: file, or name listed by `hpcdist plan clusters`. ``keys``: changes
    of the recipe, ``{"model.layers": 12}``. Others: options of `hpcdist plan`, such as ``devices=64``. Raises
    UsageError and ConfigurationError.
    """
    # "mfu": model FLOPs utilization. Unknown numbers are None. UsageError: wrong options. ConfigurationError:
    # impossible plans.
    for name in options:
        if name not in OPTIONS:
            near = nearest(name, OPTIONS)
            raise UsageError(f"plan has no option {name!r}" + (f"; did you mean {near!r}?" if near else ""))
    options = {name: plain_number(value) for name, value in options.items()}
    simulate = options.pop("simulate", True)
    on = read_cluster(cluster)
    changes = tuple(f"{key}={value}" for key, value in (keys or {}).items())
    subject = subject_from_options(None if recipe is None else Path(recipe), changes, options)
    subject = with_published_kernels(subject, on)
    return estimate_json(plan_of_subject(subject, on, simulate=simulate), subject.description, on)


def plan_of_subject(subject: PlanSubject, cluster: Cluster, *, simulate: bool = False) -> PlanEstimate:
    """Return the planned time, memory and energy of ``subject`` on ``cluster``.

    ``subject``: model, layout, batch and steps. Raises ConfigurationError for an impossible layout.
    """
    # ``simulate``: simulate the pipeline if the simulator is available. A lack of memory is no error.
    description, layout, batch = subject.description, subject.layout, subject.global_batch
    wrong = [problem.text for problem in checks.shape_problems(description, layout, cluster, batch)]
    if wrong:
        raise ConfigurationError(f"this layout is not possible: {'; '.join(wrong)}")
    answer, notes = with_simulator(
        lambda runs: planner.plan(description, layout, cluster, batch, subject.steps, simulate=runs),
        simulate=simulate and layout.pipeline > 1,
    )
    flags = (*answer.flags, *table.layout_caveats(answer), *notes, *subject.notes, *table.assumption_line(cluster))
    return dataclasses.replace(answer, flags=table.ordered(flags, [layout]))


def with_simulator(make: Callable[[bool], PlanResult], *, simulate: bool) -> tuple[PlanResult, tuple[str, ...]]:
    """Return (result of ``make(simulate)``, notes for the user). Without the simulator, call ``make(False)``.

    ``make``: function that computes a plan. Keyword-only ``simulate``: True to simulate the pipeline.
    """
    # If the simulator cannot be loaded, a note has the reason.
    try:
        return make(simulate), ()
    except ImportError as error:
        if not simulate:
            raise
        return make(False), (f"pipelines are planned by closed forms: the simulator cannot be loaded ({error})",)
