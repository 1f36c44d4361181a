"""The plan that `hpcdist submit` shows of a job, where it is known on what cluster it will run."""

import math
from typing import TYPE_CHECKING

from hpcdist.batch.job import walltime_s

if TYPE_CHECKING:
    from hpcdist.batch.job import BatchJob
    from hpcdist.cli.submit_plan import Planned
    from hpcdist.training.recipe import Recipe


def lines(planned: "Planned", cluster: str | None) -> list[str]:
    """Return the estimate of a training, in a line or two; nothing where no cluster is known (local).

    ``cluster`` is what was asked for, else that of the profile is taken. Never raises: a job is not held up by what
    cannot be planned, and the reason is told in the place of the estimate.
    """
    if planned.recipe is None:
        return [f"no estimate: --cluster {cluster} is for the training of one recipe"] if cluster else []
    named = cluster or planned.site.cluster
    if not named:
        return []
    try:
        return _lines(planned.job, planned.recipe, named)
    except Exception as error:  # noqa: BLE001 - whatever it is, the job is submitted all the same
        return [f"no estimate: {error}"]


def _lines(job: "BatchJob", recipe: "Recipe", named: str) -> list[str]:
    from hpcdist.cli.plan import planned
    from hpcdist.cli.plan_subject import of_recipe, with_kernels
    from hpcdist.planner.cluster import toml_file
    from hpcdist.planner.report.text import one_line

    on = toml_file.read(named)
    answer = planned(with_kernels(of_recipe(recipe, job.name, {"devices": job.ranks}), on), on)
    found = [f"estimate: {one_line(answer, on)}"]
    limit_s = None if job.walltime is None else walltime_s(job.walltime) - job.signal_s
    if limit_s is not None and 0 < limit_s < answer.run.wall_s:
        found.append(f"estimate: that is {math.ceil(answer.run.wall_s / limit_s)} jobs of {job.walltime} after another")
    return found
