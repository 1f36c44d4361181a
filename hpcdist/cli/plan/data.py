"""A plan as data: `hpcdist.plan`, what `hpcdist plan --json` prints."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcdist.cli.plan.group import command, plan_of_subject
from hpcdist.cli.plan.subject import read_cluster, subject_from_options, with_published_kernels
from hpcdist.errors import UsageError
from hpcdist.planner.report.quantities import estimate_json
from hpcdist.reporting.nearest import nearest


def plan(
    recipe: str | os.PathLike[str] | None = None,
    *,
    cluster: str,
    keys: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return memory, time and energy of a training on a cluster, as JSON values. Local: starts no MPI, needs no GPU.

    ``recipe`` is a TOML file, ``keys`` change it (``{"model.layers": 12}``); without both and without a model it is
    the default recipe. ``cluster`` is a name of `hpcdist plan clusters` or a file. ``options`` are those of `hpcdist
    plan` with underscores: ``model="gpt3-175b", devices=64, tensor=8, batch=1536``. "step_s" has the seconds of a step,
    "memory" ``bytes`` and ``fits``, "mfu" the model FLOPs utilization; null where a number is not known. Raises
    UsageError for options that are unknown or contradict each other, ConfigurationError for what cannot be planned.
    """
    known = [option.name for option in command.params if option.name not in ("recipe", "cluster", "plot", "as_json")]
    for name in options:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"plan has no option {name!r}" + (f"; did you mean {near!r}?" if near else ""))
    simulate = options.pop("simulate", True)
    given = dict.fromkeys(known) | options
    on = read_cluster(cluster)
    changes = tuple(f"{key}={value}" for key, value in (keys or {}).items())
    subject = subject_from_options(None if recipe is None else Path(recipe), changes, given)
    subject = with_published_kernels(subject, on)
    return estimate_json(plan_of_subject(subject, on, simulate=simulate), subject.description, on)
