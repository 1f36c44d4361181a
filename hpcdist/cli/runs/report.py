"""`hpcdist report`: print, plot, or write as an HTML page the results of a run or a benchmark."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import FILE, PATH, json_option
from hpcdist.constants import METRICS_FILE, RECIPE_FILE
from hpcdist.errors import HpcdistError, StorageError, UsageError
from hpcdist.reporting import atomic, regular
from hpcdist.reporting.jsonable import jsonable
from hpcdist.reporting.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hpcdist.telemetry.page.run_data import CheckpointEntry, ExternalData, RecipeSetting, RunData, TextSample

SAMPLE_TOKENS: Final = 600
SAMPLE_LIMIT_S: Final = 60.0  # a slow model's text is truncated
MAX_MODEL_BYTES: Final = 4 << 30  # largest model that is loaded for a sample
MAX_CHECKPOINTS: Final = 1000
TARGETS: Final = ("csv", "wandb", "mlflow")  # formats of --to


def write_page(run_dir: Path, file: Path, *, sample: bool, prompt: str) -> None:
    """Write the HTML page of the run in ``run_dir`` to ``file``. ``sample``: add text generated after ``prompt``."""
    from hpcdist.reporting import plotting
    from hpcdist.telemetry.page import document

    plotting.require_matplotlib()  # fail before the sample takes a minute
    document.write_page(run_dir, file, page_context(run_dir, sample=sample, prompt=prompt))


def page_context(run_dir: Path, *, sample: bool, prompt: str) -> "ExternalData":
    """Return the settings, checkpoints and costs of the run in ``run_dir``, for its HTML page.

    ``sample``: True to add a text that the run's model generates after ``prompt``.
    """
    from hpcdist.telemetry.page.run_data import NO_CHECKPOINT, NOT_ASKED, ExternalData, TextSample

    settings, why_no_settings, steps = _settings(run_dir)
    checkpoints, why_no_checkpoints = _checkpoints(run_dir)
    return ExternalData(
        settings=settings,
        settings_reason=why_no_settings,
        planned_steps=steps,
        checkpoints=checkpoints,
        checkpoints_reason=why_no_checkpoints or NO_CHECKPOINT,
        costs=_costs(run_dir),
        sample=_sample(run_dir, checkpoints, prompt) if sample else TextSample(reason=NOT_ASKED),
    )


def _settings(run_dir: Path) -> "tuple[list[RecipeSetting], str, int | None]":
    from hpcdist.reporting.schema import toml_value
    from hpcdist.telemetry.page.run_data import RecipeSetting
    from hpcdist.training.recipe import recipe as recipes

    path = run_dir / RECIPE_FILE
    if not path.is_file():
        return [], f"The directory has no {path.name}: a script has no recipe.", None
    try:
        values = recipes.flat(recipes.load_stored(path))
    except HpcdistError as error:
        return [], f"The recipe cannot be read: {error}", None
    default_values = recipes.defaults()
    rows = [RecipeSetting(key, toml_value(value), toml_value(default_values[key])) for key, value in values.items()]
    return rows, "", int(values["run.steps"])


def _costs(run_dir: Path) -> "Callable[[float, float], Mapping[str, Any]]":
    from hpcdist.training.observe.energy import electricity_figures
    from hpcdist.training.use_cases.energy_figures import energy_config

    return partial(electricity_figures, energy_config(run_dir))


def _checkpoints(run_dir: Path) -> "tuple[list[CheckpointEntry], str]":
    from hpcdist.checkpoint import listing
    from hpcdist.telemetry.page.run_data import CheckpointEntry

    try:
        checkpoints = listing.list_checkpoints(run_dir)[:MAX_CHECKPOINTS]
    except StorageError:
        return [], ""  # no checkpoints
    except OSError as error:
        return [], f"the checkpoints cannot be read: {error.strerror or error}"
    return [CheckpointEntry(c.path.name, c.step, c.state, c.written_utc, c.nbytes, c.reason) for c in checkpoints], ""


def _sample(run_dir: Path, checkpoints: "list[CheckpointEntry]", prompt: str) -> "TextSample":
    # Text that the newest checkpoint's model generates in a child process.
    from hpcdist.checkpoint import listing
    from hpcdist.telemetry.page.run_data import NO_CHECKPOINT, TextSample

    if not any(checkpoint.state == listing.COMPLETE for checkpoint in checkpoints):
        return TextSample(reason=NO_CHECKPOINT if not checkpoints else "no checkpoint is complete")
    try:
        newest = listing.inspect(listing.select(run_dir))
        assert newest.manifest is not None
        nbytes = sum(tensor.nbytes for tensor in listing.stored_tensors(newest.manifest, (listing.PARAMETERS,)))
    except HpcdistError as error:
        return TextSample(reason=str(error))
    if nbytes > MAX_MODEL_BYTES:
        return TextSample(
            reason=f"the parameters take {format_bytes(nbytes)}; run hpcdist sample {run_dir} on a larger machine"
        )
    words = [f"--prompt={prompt}", f"--tokens={SAMPLE_TOKENS}", "--", str(run_dir)]
    line = [sys.executable, "-P", "-m", "hpcdist", "sample", *words]
    try:
        process = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, timeout=SAMPLE_LIMIT_S, check=False
        )
        text, complaint, code = process.stdout, process.stderr, process.returncode
    except subprocess.TimeoutExpired as error:
        text, complaint, code = error.stdout or b"", b"it took longer than a minute", 0
    drawn = text.decode(errors="replace")
    if code or len(drawn) <= len(prompt) + 1:
        lines = [line for line in complaint.decode(errors="replace").strip().splitlines() if "====" not in line]
        return TextSample(reason=(lines[-1].removeprefix("Error: ") if lines else f"exit code {code}"))
    return TextSample(text=drawn.rstrip("\n"), prompt=prompt, reason="")


@click.command("report")
@click.argument("places", metavar="RUN_DIR...|RESULTS.h5", type=PATH, nargs=-1, required=True)
@click.option("--plot", type=FILE, help="Draw the curves into this file (.png, .pdf).")
@click.option("--html", type=FILE, help="Write a self-contained HTML page to this file.")
@click.option("--no-sample", is_flag=True, help="With --html: omit the text sample from the model.")
@click.option("--sample-prompt", default="def ", help="With --html: prompt of the text sample.")
@json_option
@click.option("--markdown", is_flag=True, help="Print the table of a sweep as Markdown.")
@click.option(
    "--to",
    "target",
    type=click.Choice(TARGETS),
    help="Export step metrics as CSV, or offline for W&B or MLflow.",
)
@click.option("--output", type=PATH, help="With --to: CSV file (default: print), or directory for wandb or mlflow.")
def report(
    places: tuple[Path, ...],
    plot: Path | None,
    html: Path | None,
    no_sample: bool,
    sample_prompt: str,
    as_json: bool,
    markdown: bool,
    target: str | None,
    output: Path | None,
) -> None:
    """Print loss, times and traffic of the training in RUN_DIR, or the table of the benchmark in RESULTS.h5.

    The run or benchmark may still be running. Several runs are compared in a table, and in one figure with --plot.
    --html writes charts, figures, a timeline, recipe and environment into one file. --to csv prints one line per step
    of a run, or one line per run or configuration for several runs or a sweep.
    """
    place = places[0]
    _check_options(place, html, no_sample, sample_prompt)
    if as_json and markdown:
        raise UsageError("--json and --markdown exclude each other; choose one")
    if target is None and output is not None:
        raise UsageError("--output needs --to csv, --to wandb or --to mlflow; add one of them")
    if target is not None and (plot or html or as_json or markdown):
        raise UsageError("--to excludes --plot, --html, --json and --markdown; choose one")
    for path in places:
        _check_place(path)
    if target is not None:
        _export(places, target, output)
    elif len(places) > 1:
        _report_runs(places, plot, html, as_json, markdown)
    elif place.is_file() and _is_collectives(place):
        if html is not None:
            raise UsageError(
                f"--html supports runs and sweeps, but {place} holds measurements of collectives; use --plot"
            )
        _report_collectives(place, plot, as_json, markdown)
    elif place.is_file():
        _report_sweep(place, plot, html, as_json, markdown)
    elif markdown:
        raise UsageError(f"--markdown prints the table of a sweep, but {place} is not a results file; omit --markdown")
    else:
        if html is not None:
            write_page(place, html, sample=not no_sample, prompt="" if no_sample else sample_prompt)
        if html is None or as_json or plot:
            _report_run(place, plot, as_json)
    if not (as_json or markdown):
        for name, file in (("page", html), ("plot", plot)):
            if file is not None:
                click.echo(f"{name}       {file}, {format_bytes(file.stat().st_size)}")


def _check_place(place: Path) -> None:
    if not place.exists():
        raise StorageError(f"{place} does not exist; give the directory of a training or a results file of a benchmark")
    if place.name == METRICS_FILE and place.is_file():
        raise UsageError(f"{place} is one file of a run; give its directory: hpcdist report {place.parent}")


def _check_options(place: Path, html: Path | None, no_sample: bool, prompt: str) -> None:
    source = click.get_current_context().get_parameter_source("sample_prompt")
    prompted = source is not None and source.name == "COMMANDLINE"
    if html is None and (no_sample or prompted):
        raise UsageError("--no-sample and --sample-prompt need --html FILE; add --html FILE")
    if no_sample and prompted:
        raise UsageError("--no-sample and --sample-prompt exclude each other; choose one")
    if not prompt:
        raise UsageError("--sample-prompt is empty; give at least one character, or --no-sample")


def _read_run(run_dir: Path) -> "RunData":
    from hpcdist.telemetry import report as reports  # late: --help must not load h5py
    from hpcdist.telemetry.page.run_data import ExternalData

    settings, reason, steps = _settings(run_dir)
    external = ExternalData(settings=settings, settings_reason=reason, planned_steps=steps, costs=_costs(run_dir))
    with regular.damage(run_dir, regular.FIGURES):
        return reports.report(run_dir, external)


def _report_run(run_dir: Path, plot: Path | None, as_json: bool) -> None:
    from hpcdist.telemetry import report as reports

    run = _read_run(run_dir)
    with regular.damage(run_dir, regular.FIGURES):
        click.echo(json.dumps(jsonable(run.figures)) if as_json else reports.text(run))
        if plot is not None:
            reports.plot(run, plot)


def read_runs(places: "Sequence[Path]") -> "list[RunData]":
    """Return a list of the data of the runs in the directories ``places``. Raises UsageError for a results file."""
    if files := [place for place in places if place.is_file()]:
        raise UsageError(f"{files[0]} is a results file: give only this file, or only runs; see `hpcdist compare`")
    return [_read_run(place) for place in places]


def _report_runs(places: "Sequence[Path]", plot: Path | None, html: Path | None, as_json: bool, markdown: bool) -> None:
    from hpcdist.telemetry import report as reports

    if markdown:
        raise UsageError("--markdown works for a sweep only; use --html, --plot or --json for several runs")
    runs = read_runs(places)
    click.echo(json.dumps([jsonable(run.figures) for run in runs]) if as_json else reports.runs_text(runs))
    if plot is not None:
        reports.plot_runs(runs, plot)
    if html is not None:
        draw = partial(reports.draw_runs, runs=runs)
        _write_table_page(html, "Runs", *reports.runs_table(runs), draw, reports.PLOT_INCHES)


def _write_table_page(
    file: Path,
    title: str,
    rows: "Sequence[Sequence[str]]",
    notes: "Sequence[str]",
    draw: "Callable[[Any], None]",
    inches: tuple[float, float],
) -> None:
    from hpcdist.reporting import plotting
    from hpcdist.telemetry.page import document

    svg = plotting.figure_svg("plot", draw, inches)
    document.write_table_page(file, title, rows, notes, svg, f"Plot of the table: {title}")


def _export(places: "Sequence[Path]", target: str, output: Path | None) -> None:
    from hpcdist.telemetry import export
    from hpcdist.telemetry import report as reports

    if len(places) == 1 and places[0].is_file():
        _write_csv(_sweep_csv(places[0], target), output)
        return
    runs = read_runs(places)
    if target == "csv":
        _write_csv(export.csv(runs[0]) if len(runs) == 1 else reports.catalogue(runs).csv(runs), output)
        return
    write, folder = (export.to_wandb, Path(".")) if target == "wandb" else (export.to_mlflow, Path("mlruns"))
    for run in runs:
        click.echo(f"{target:10} {write(run, output or folder)}")


def _sweep_csv(path: Path, target: str) -> str:
    from hpcdist.bench.sweep import report as reports
    from hpcdist.bench.sweep import results

    if target != "csv" or _is_collectives(path):
        raise UsageError(f"{path} is a results file: --to exports runs, and the table of a sweep as CSV")
    return reports.ROWS.csv(reports.rows(results.read(path)))


def _write_csv(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    atomic.save(output, text, "choose another file")
    click.echo(f"csv        {output}, {format_bytes(output.stat().st_size)}")


def _is_collectives(path: Path) -> bool:
    from hpcdist.bench.collectives import results
    from hpcdist.hdf5 import files

    with files.open_read(path) as file:
        return bool(file.attrs.get("schema") == results.SCHEMA)


def _report_collectives(path: Path, plot: Path | None, as_json: bool, markdown: bool) -> None:
    from hpcdist.bench.collectives import report as reports
    from hpcdist.bench.collectives import results

    if markdown:
        raise UsageError(
            f"--markdown supports only results of a sweep, but {path} holds measurements of collectives; leave "
            "--markdown out"
        )
    measured = results.read(path)
    table = reports.rows(measured.configurations)
    if as_json:
        click.echo(json.dumps(reports.jsonable(measured)))
    else:
        click.echo("\n".join([reports.text(table), "", *reports.notes(table)]))
    if plot is not None:
        reports.plot(table, plot)


def _report_sweep(path: Path, plot: Path | None, html: Path | None, as_json: bool, markdown: bool) -> None:
    from hpcdist.bench.sweep import report as reports
    from hpcdist.bench.sweep import results

    sweep = results.read(path)
    if as_json:
        click.echo(json.dumps(reports.jsonable(path, sweep)))
    else:
        click.echo(reports.markdown(sweep) if markdown else reports.text(path, sweep))
    if plot is not None:
        reports.plot(sweep, plot)
    if html is not None:
        rows, inches = reports.rows(sweep), reports.plot_inches(sweep)
        notes = [*reports.ROWS.missing(rows), *reports.notes(sweep, rows)]
        draw = partial(reports.draw, results=sweep)
        _write_table_page(html, f"Sweep {path.name}", reports.ROWS.rows(rows), notes, draw, inches)
