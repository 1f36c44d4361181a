"""The group `hpcdist energy` with `sources` (list the energy counters here) and `watch` (print power every second)."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import FILE, PATH, LazyGroup, json_option, stacked
from hpcdist.energy.config import PM_COUNTERS, POWERCAP
from hpcdist.errors import INTERRUPTED, OK, STORAGE
from hpcdist.reporting.jsonable import jsonable

if TYPE_CHECKING:
    from hpcdist.energy.monitor import EnergyWatch, WatchInterval

REFRESH_S: Final = 1.0
MAX_SOURCES: Final = 4  # if there are more sources, a line shows one value per kind
NOT_FOUND: Final = 127  # exit codes as in shells
NOT_EXECUTABLE: Final = 126
SIGNALLED: Final = 128
UUID_SHOWN: Final = 12
SHARES: Final = (("cpu", "node_cpu"), ("memory", "node_memory"), ("gpu", "gpu"))
_PLACES: Final = stacked(
    click.option(
        "--powercap", default=POWERCAP, type=PATH, help="Folder of Linux RAPL counters (recipe key energy.powercap)."
    ),
    click.option(
        "--pm-counters",
        default=PM_COUNTERS,
        type=PATH,
        help="Folder of Cray power counters (recipe key energy.pm_counters).",
    ),
)


@click.command("watch", context_settings={"ignore_unknown_options": True})
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), help="Stop after this time; default: at Ctrl-C.", show_default=False
)
@click.option(
    "--interval",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0.001, 10.0),
    help="Seconds between two reads of the counters (recipe key energy.interval_s).",
)
@click.option("--json", "as_json", is_flag=True, help="Print only one JSON object, at the end.")
@click.option("--output", type=FILE, help="HDF5 file to write all samples to.")
@_PLACES
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@click.pass_context
def watch(
    context: click.Context,
    seconds: float | None,
    interval: float,
    as_json: bool,
    output: Path | None,
    powercap: Path,
    pm_counters: Path,
    arguments: tuple[str, ...],
) -> None:
    """Print the power of every energy counter once a second, and the measured energy in joules at the end.

    If COMMAND is given, measure until COMMAND ends, print to stderr, and return the exit code of COMMAND. Counters
    measure whole devices, including the energy of other processes on this machine. --powercap and --pm-counters are
    folders with counters.
    """
    from hpcdist.energy.config import EnergyConfig
    from hpcdist.energy.monitor import EnergyWatch  # late: --help must not load numpy

    config = EnergyConfig(interval_s=interval, powercap=str(powercap), pm_counters=str(pm_counters))
    watch = EnergyWatch(config, output)
    screen = _Display(to_stderr=bool(arguments), quiet=as_json)
    screen.begin(watch)
    code = _watch_command(watch, arguments, seconds, screen) if arguments else _watch_for(watch, seconds, screen)
    totals = watch.finish()
    screen.end(json.dumps(jsonable(totals | {"exit_code": code})) if as_json else _total(totals))
    if watch.lost_output:
        click.echo(f"Error: some samples were not written: {watch.lost_output}", err=True)
    context.exit(code or (STORAGE if watch.lost_output else OK))


class _Display:
    # On a terminal, the text replaces the previous text.
    def __init__(self, *, to_stderr: bool, quiet: bool) -> None:
        self._err, self._quiet = to_stderr, quiet
        self._renews = (sys.stderr if to_stderr else sys.stdout).isatty()
        self._shown = False

    def begin(self, watch: "EnergyWatch") -> None:
        if self._quiet:
            return
        for track in watch.sampler.tracks:
            details = "; ".join(filter(None, (track.about.model, track.about.note)))
            click.echo(f"{track.kind:5} {track.name}{f' ({details})' if details else ''}", err=self._err)
        for kind, reason in watch.missing().items():
            click.echo(f"{kind:5} not measured: {reason}", err=self._err)

    def moment(self, interval: "WatchInterval") -> None:
        if self._quiet:
            return
        line = _line(interval)
        if self._renews:
            width = shutil.get_terminal_size().columns - 1
            click.echo(f"\r{line[:width]:{width}}", nl=False, err=self._err)
        else:
            click.echo(line, err=self._err)
        self._shown = True

    def end(self, text: str) -> None:
        if self._shown and self._renews:
            click.echo("", err=self._err)
        click.echo(text, err=self._err)


def _watch_for(watch: "EnergyWatch", seconds: float | None, screen: _Display) -> int:
    with _signals() as caught:
        limit = math.inf if seconds is None else time.monotonic() + seconds
        _refresh(watch, screen, lambda: time.monotonic() >= limit or bool(caught), limit)
    return INTERRUPTED if caught and seconds is not None else OK


def _watch_command(watch: "EnergyWatch", arguments: Sequence[str], seconds: float | None, screen: _Display) -> int:
    with _signals() as caught:
        try:
            child = subprocess.Popen(arguments)
        except FileNotFoundError:
            click.echo(f"Error: {arguments[0]}: command not found", err=True)
            return NOT_FOUND
        except OSError as error:
            click.echo(f"Error: {arguments[0]} cannot be started: {error.strerror}", err=True)
            return NOT_EXECUTABLE
        passed = 0

        def over() -> bool:
            nonlocal passed
            for number in caught[passed:]:
                passed += 1
                if number != signal.SIGINT or not sys.stdin.isatty():  # a terminal also sends Ctrl-C to the command
                    child.send_signal(number)
            return child.poll() is not None

        limit = math.inf if seconds is None else time.monotonic() + seconds
        _refresh(watch, screen, lambda: over() or time.monotonic() >= limit, limit)
        if child.poll() is None:
            child.terminate()
            while not over():
                time.sleep(0.05)
    return child.returncode if child.returncode >= 0 else SIGNALLED - child.returncode


def _refresh(watch: "EnergyWatch", screen: _Display, over: Callable[[], bool], limit: float) -> None:
    next_s = time.monotonic() + REFRESH_S
    while not over():
        now_s = time.monotonic()
        if now_s >= next_s:
            screen.moment(watch.moment())
            next_s += REFRESH_S * max(1, math.ceil((now_s - next_s) / REFRESH_S))
        time.sleep(max(0.0, min(0.05, next_s - now_s, limit - now_s)))


@contextmanager
def _signals() -> Iterator[list[int]]:
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _line(interval: "WatchInterval") -> str:
    shown = interval.watts if len(interval.watts) <= MAX_SOURCES else interval.by_kind
    watts = [f"{_short(name)} {_watts(value)}" for name, value in shown.items()]
    shares = [(name, interval.utilisation.get(key, math.nan)) for name, key in SHARES]
    busy = [f"{name} {share:.0%}" for name, share in shares if not math.isnan(share)]
    return " | ".join(
        filter(None, (f"{interval.seconds:6.0f} s  {_watts(interval.total_w)}", ", ".join(watts), ", ".join(busy)))
    )


def _short(name: str) -> str:
    return name[:UUID_SHOWN] if name.startswith("GPU-") else name


def _watts(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.1f} W"


def _total(totals: Mapping[str, Any]) -> str:
    lines = [f"in {totals['seconds']:.1f} s:"]
    for row in totals["sources"]:
        joules = "unknown" if math.isnan(row["joules"]) else f"{row['joules']:,.1f} J"
        note = "" if row["counted"] else ", included in the node's value"
        failed = f", {row['failed_reads']} failed reads" if row["failed_reads"] else ""
        lines.append(f"  {row['kind']:5} {row['name']}: {joules}{note}{failed}")
    if totals["reason"] is None:
        watts = totals["energy_j"] / totals["seconds"]
        lines.append(f"  total {totals['energy_j']:,.1f} J, {watts:.1f} W on average")
    else:
        lines.append(f"  total unknown: {totals['reason']}")
    if not math.isnan(totals["sampler_share"]):
        lines.append(f"  reading the counters used {totals['sampler_share']:.2%} of a core")
    return "\n".join(lines)


# name -> ("module:attribute" of the click command, its line in the overview)
COMMANDS: Final = {
    "sources": ("hpcdist.cli.energy:sources", "List the energy counters of this machine."),
    "watch": ("hpcdist.cli.energy:watch", "Print the current power, or the joules of a command."),
    "report": ("hpcdist.cli.runs.energy:command", "Account for the energy of a run."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def command() -> None:
    """Show the energy counters of this machine, their present power, and the energy of runs."""


@click.command()
@_PLACES
@json_option
def sources(powercap: Path, pm_counters: Path, as_json: bool) -> None:
    """List the energy counters that a training on this machine can read, and the reasons why others cannot be read."""
    from hpcdist.energy.config import EnergyConfig
    from hpcdist.energy.sources.discovery import survey  # late: --help must not load numpy

    rows = survey(EnergyConfig(powercap=str(powercap), pm_counters=str(pm_counters)), os.environ)
    if as_json:
        click.echo(json.dumps({"readable": any(row["readable"] for row in rows), "sources": rows}))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        first, *more = _source_lines(row)
        click.echo(f"{row['kind']:5} {row['name']:{width}}  {first}")
        for line in more:
            click.echo(f"{'':5} {'':{width}}  {line}")


def _source_lines(row: dict[str, Any]) -> list[str]:
    if not row["readable"]:
        return [f"not measured: {row['reason']}"]
    if "model" not in row:
        return ["readable"]
    use = "in this environment's allocation" if row["held"] else "counted if a rank uses it (run.device = 'gpu')"
    lines = [f"readable, {row['model']}; {use}"]
    lines += [row["note"]] if row["note"] else []
    lines.append(f"power: {row['power']}" if row["power"] else "power: not reported")
    if row["sensor"] is not None:
        update_s, window_s, source = row["sensor"]
        lines.append(f"its sensor averages {window_s * 1e3:g} ms of every {update_s * 1e3:g} ms ({source})")
    return lines
