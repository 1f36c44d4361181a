"""`hpcdist energy report`: print the joules of a run by phase, source and start, with cost and emissions."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from hpcdist.cli.common import FILE, json_option, run_dir_argument
from hpcdist.errors import UsageError
from hpcdist.reporting import regular
from hpcdist.reporting.table import aligned

UNITS: Final = ((1e12, "TJ"), (1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"))


@click.command("report")
@run_dir_argument
@click.option("--target-loss", type=float, help="Also print the joules until the training loss reached this value.")
@click.option(
    "--pue", type=click.FloatRange(1.0, 10.0), help="Power usage effectiveness of the site.  [default: of the recipe]"
)
@click.option(
    "--carbon-intensity", type=click.FloatRange(min=0.0), help="Grid carbon in gCO2e per kWh.  [default: of the recipe]"
)
@click.option("--carbon-source", help="Publisher of the value of --carbon-intensity.")
@click.option("--carbon-date", help="Date of the value of --carbon-intensity.")
@click.option("--carbon", "forecast", type=FILE, help="CSV file with carbon intensity over time.")
@click.option("--price", type=click.FloatRange(min=0.0), help="Price per kWh.  [default: of the recipe]")
@click.option("--currency", default="", help="Currency of --price.")
@click.option("--slurm", is_flag=True, help="Compare with the energy in Slurm accounting (sacct).")
@json_option
def command(
    run_dir: Path,
    carbon_intensity: float | None,
    carbon_source: str | None,
    carbon_date: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Report the energy of the run in RUN_DIR, over all of its starts. The run may still be running.

    The energy of checkpoints and validations is measured. The energy of each part of a training step is estimated, with
    a standard error, because these parts are shorter than the update interval of energy counters.
    """
    _check(carbon_intensity, carbon_source, carbon_date, options["forecast"])
    # Late: --help must not load numpy.
    from hpcdist.energy.energy_metrics import CarbonIntensity
    from hpcdist.training.use_cases.energy_figures import EnergyReportOptions, figures

    intensity = None
    if carbon_intensity is not None:
        intensity = CarbonIntensity(carbon_intensity, carbon_source or "given on the command line", carbon_date or "")
    with regular.damage(run_dir, regular.FIGURES):
        account = figures(run_dir, EnergyReportOptions(intensity=intensity, **options))
        lines = json.dumps(account) if as_json else "\n".join(text(account))
    click.echo(lines)


def _check(intensity: float | None, source: str | None, date: str | None, forecast: Path | None) -> None:
    if intensity is not None and forecast is not None:
        raise UsageError("--carbon-intensity and --carbon exclude each other; choose one")
    if (source or date) and intensity is None:
        raise UsageError("--carbon-source and --carbon-date describe --carbon-intensity; add --carbon-intensity")


def text(account: Mapping[str, Any]) -> Iterator[str]:
    """Yield the energy report ``account`` of a run as lines of text."""
    label = f" ({account['energy_label']})" if account["energy_label"] else ""
    yield f"run         {account['run_dir']}"
    if account["energy_j"] is None:
        yield f"energy      not measured: {account['energy_reason']}; see `hpcdist energy sources`"
    else:
        yield f"energy      {_joules(account['energy_j'])} of {' + '.join(account['by_kind']) or 'the run'}{label}"
        yield (
            f"            {account['energy_kwh']:.4g} kWh, mean {_number(account['average_w'], ',.1f')} W, energy x "
            f"delay {account['energy_delay_product_js']:.4g} J s"
        )
    yield from _phases(account)
    for name, unit in (("j_per_step", "a step"), ("j_per_sample", "a sample"), ("j_per_token", "a token")):
        if account[name] is not None:
            yield f"{'training' if unit == 'a step' else '':11} {account[name]:.4g} J {unit}"
    if "target" in account:
        yield f"to target   {_target(account['target'])}"
    yield from _equivalents(account)
    yield from _sources(account)
    yield from _starts(account)
    if "slurm" in account:
        yield f"Slurm       {_slurm(account['slurm'])}"


def _phases(account: Mapping[str, Any]) -> Iterator[str]:
    if not account["phases"]:
        return
    rows = [["phase", "joules", "share", "seconds", "watts", ""]]
    for name, row in account["phases"].items():
        rows.append(_row(name, row, account))
        if name == "training":
            rows += [_row(f"  {label}", activity, account) for label, activity in account["activities"].items()]
            if not account["activities"] and account["activities_reason"] != account["energy_reason"]:
                rows[-1][-1] = f"activities unknown: {account['activities_reason']}"
    yield from ("", *aligned(rows, left=(0, -1)), "")


def _row(name: str, row: Mapping[str, Any], account: Mapping[str, Any]) -> list[str]:
    joules, seconds, whole = row["joules"], row["seconds"], account["energy_j"]
    share = "" if joules is None or not whole else f"{joules / whole:.1%}"
    watts = "" if joules is None or not seconds else f"{joules / seconds:,.1f}"
    remark = f"+- {_joules(row['error_j'])}" if row.get("error_j") else ""
    reason = row.get("reason")
    if joules is None and reason and reason != account["energy_reason"]:  # that reason is printed above
        remark = reason
    return [name, _number(joules, ",.1f"), share, f"{seconds:,.1f}", watts, remark]


def _equivalents(account: Mapping[str, Any]) -> Iterator[str]:
    if account["energy_j"] is None:
        return
    yield f"site        {account['facility_kwh']:.4g} kWh at PUE {account['pue']:g}"
    if account["emissions_g"] is None:
        yield f"emissions   not known: {account['emissions_reason']}"
    else:
        low, high = account["emissions_spread_g"]
        spread = "" if math.isclose(low, high) else f" (between {_grams(low)} and {_grams(high)})"
        dated = f", {account['carbon_date']}" if account["carbon_date"] else ""
        yield (
            f"emissions   {_grams(account['emissions_g'])} CO2e{spread} at {account['carbon_g_per_kwh']:.4g} g/kWh "
            f"({account['carbon_source']}{dated})"
        )
    if account["cost"] is not None:
        yield f"cost        {account['cost']:.4g} {account['currency'] or ''}".rstrip()


def _sources(account: Mapping[str, Any]) -> Iterator[str]:
    if not account["sources"]:
        return
    rows = [["node", "kind", "source", "joules", ""]]
    for row in account["sources"]:
        notes = ["declared model, not measured"] if row["declared"] else []
        notes += [row["note"]] if row["note"] else []
        notes += [] if row["counted"] else ["included in the node's value, not added"]
        rows.append([str(row["node"]), row["kind"], row["name"], _number(row["joules"], ",.1f"), "; ".join(notes)])
    yield from ("", *aligned(rows, left=(1, 2, -1)))


def _starts(account: Mapping[str, Any]) -> Iterator[str]:
    if not account["starts"]:
        return
    rows = [["start", "steps kept", "seconds", "joules", "J a step", "watts"]]
    for row in account["starts"]:
        figures = (("seconds", ",.1f"), ("joules", ",.1f"), ("j_per_step", ".4g"), ("average_w", ",.1f"))
        rows.append([str(row["start"]), str(row["steps"]), *(_number(row[name], form) for name, form in figures)])
    yield from ("", *aligned(rows, left=()))


def _target(target: Mapping[str, Any]) -> str:
    if target["joules"] is None:
        return f"loss {target['loss']:g}: not known: {target['reason']}"
    return (
        f"{_joules(target['joules'])} until the training loss was {target['loss']:g}, after {target['step']:.0f} "
        f"steps and {target['seconds']:,.1f} s"
    )


def _slurm(slurm: Mapping[str, Any]) -> str:
    if slurm["energy_j"] is None:
        return f"no figure: {slurm['reason']}"
    ratio = "" if slurm["ratio"] is None else f", {slurm['ratio']:.2f} times the energy measured by the run"
    lacking = "" if slurm["reason"] is None else f"; {slurm['reason']}"
    jobs = ", ".join(slurm["jobs"])
    return f"{_joules(slurm['energy_j'])} of {jobs}{ratio} (whole nodes, including other users{lacking})"


def _joules(joules: float | None) -> str:
    if joules is None:
        return "unknown"
    factor, unit = next(((factor, unit) for factor, unit in UNITS if abs(joules) >= 10 * factor), (1.0, "J"))
    return f"{joules / factor:,.1f} {unit}"


def _grams(grams: float) -> str:
    return f"{grams / 1000:.4g} kg" if grams >= 1000 else f"{grams:.4g} g"


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
