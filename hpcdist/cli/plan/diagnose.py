"""`hpcdist diagnose`: compare a measured speed with the plan, and rank the causes of the difference."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from hpcdist.cli.common import json_option
from hpcdist.cli.plan.options import SectionedCommand, cluster_option, layout_options, subject_options
from hpcdist.constants import RECIPE_FILE
from hpcdist.errors import UsageError


@click.command("diagnose", cls=SectionedCommand)
@click.argument("log", metavar="[LOG|RUN]", type=click.Path(path_type=Path), required=False)
@click.option("--measured", type=click.FloatRange(0, min_open=True), help="Measured tokens/s of a device.")
@cluster_option
@subject_options
@layout_options
@json_option
def command(
    log: Path | None,
    measured: float | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Compare a measured speed with the plan of its layout, and rank the possible causes of the difference.

    LOG is a log of torchtitan or Megatron-LM, and RUN a run directory of hpcdist, whose recipe is planned. --measured
    replaces both. Each cause is planned: the first one explains the measured speed best. Except for RUN, give the model
    and the layout as for `hpcdist plan`.
    """
    from hpcdist.planner.report.quantities import figures, share
    from hpcdist.training.use_cases.plan import read_cluster, subject_from_options
    from hpcdist.training.use_cases.plan_advice import causes, measured_speed, speed

    if (log is None) == (measured is None):
        raise UsageError("give either LOG, RUN or --measured, the tokens/s of a device")
    on = read_cluster(cluster)
    recipe = log / RECIPE_FILE if log is not None and log.is_dir() else None
    subject = subject_from_options(recipe, overrides, options, on)
    if measured is None:
        assert log is not None
        tokens = subject.global_batch * subject.description.tokens
        measured = measured_speed(log, tokens, subject.layout.devices)
    estimate, ranked = causes(subject, on, measured)
    planned, limits = speed(estimate), estimate.step_range_s or (estimate.step_s, estimate.step_s)
    least, most = (planned * estimate.step_s / step_s for step_s in reversed(limits))
    as_planned = least <= measured <= most
    if as_json:
        rows = [dataclasses.asdict(cause) for cause in ranked]
        click.echo(json.dumps({"measured": measured, "planned": planned, "range": [least, most], "causes": rows}))
        return
    click.echo(f"measured   {figures(measured)} tokens/s a device")
    program = f"{estimate.layout.implementation} on {on.device.name}"
    click.echo(f"planned    {figures(planned)} tokens/s a device ({figures(least)} to {figures(most)}), {program}")
    if as_planned:
        click.echo("the measured speed is within the range of the plan")
        return
    if measured > most:
        click.echo("the measured speed is higher than the range of the plan: check the layout that you gave")
        return
    click.echo("causes, the best explanation first, with the speed that each would leave:")
    for number, cause in enumerate(ranked, 1):
        left = f"{figures(cause.tokens_per_device_s)} tokens/s, costs {share(1 - cause.tokens_per_device_s / planned)}"
        click.echo(f"{number:>2}  {cause.text}: {left}; {cause.advice}")
    wait_s = estimate.step_s * (planned / measured - 1)
    click.echo(f" -  or the devices wait {figures(wait_s)} s of each step for input, the host or other jobs")
