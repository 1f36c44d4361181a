"""Time and energy of a training by power limit, clock, ranks, threads or recipe key; recommends a configuration.

    python -m benchmarks power recipe.toml --sweep threads=1,2,4
    python -m benchmarks power recipe.toml --limits 300,400,500 --change-limits --objective edp --plot power.png
    python -m benchmarks power --show power.h5 --objective energy --max-slowdown 1.1
    python -m benchmarks power --restore

Each configuration is trained --repeats times after a warm-up, in a random order that every second repeat reverses. A
study of limits or clocks also has trials with unchanged limits. The output file keeps time, energy and loss of each
trial; the same command continues a stopped study. The table has the Pareto front of time and energy. A configuration is
recommended if its gain exceeds the noise.

Limits are changed only with --change-limits, during a trial, and restored after it. --restore restores them after a
SIGKILL. Changing limits needs a permission, which is checked before the first trial; --sweep needs none.

Exit code 0: all trials are recorded as ok. 1: a trial failed. 69: the limits cannot be changed. 75: trials remain for
the next call.
"""

import argparse
import hashlib
import itertools
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import Results
from benchmarks.power import report
from benchmarks.power.devices import CPU, GPU, Axes, Devices, opened
from benchmarks.power.pareto import OBJECTIVES
from hpcdist.bench.sweep import definition, results, series, trial
from hpcdist.bench.sweep.definition import Sweep, SweepTrial, TrialVariant
from hpcdist.bench.sweep.series import Measure, SeriesItem, SweepTally
from hpcdist.bench.sweep.trial import Command, TrialOutcome
from hpcdist.cli.bench.trials import SweepRecipes, check_alone, item_line, run_options, run_series, tally_line
from hpcdist.comm.start import Session
from hpcdist.energy import limit_journal, power_limits
from hpcdist.errors import REQUEUE, ConfigurationError, HpcdistError, MissingCapabilityError, UsageError
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import settings

SCHEMA = results.SCHEMA
WRITES_ITSELF = True
NO_CHECK = "it trains the recipe of the user"
OPTIONS: Final = {"objective": OBJECTIVES}

THREADS: Final = "threads"
LIMIT: Final = "limit_w"
CLOCK: Final = "clock_mhz"
FORMATS: Final = {THREADS: "threads={}", LIMIT: "{:g} W", CLOCK: "{:g} MHz"}  # in the name of a trial
LIST_COMMA: Final = re.compile(r",(?![^\[]*\])")  # a comma outside of brackets, as in [0, 1],[2, 3]


class RemainingTrialsError(HpcdistError):
    """Trials remain for the next call of the same command."""

    exit_code = REQUEUE


def options(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("recipe", nargs="?", type=Path, help="recipe to train")
    action.add_argument("--show", type=Path, metavar="FILE", help="show the results in FILE; measure nothing")
    action.add_argument("--restore", action="store_true", help="restore the limits that a killed study left changed")
    add = parser.add_argument
    add("-n", "--ranks", type=count, help="ranks of each trial (default 1)")
    add("--limits", type=numbers, default=(), metavar="W,W", help="power limits of each device in watts")
    add("--clocks", type=clocks, default=(), metavar="MHZ,MHZ", help="frequencies to which the GPU clocks are locked")
    add("--on", choices=(GPU, CPU), help="devices to limit (default: gpu if the trials use GPUs, else cpu)")
    add("--sweep", action="append", default=[], metavar="KEY=V1,V2", help="values of a recipe key, ranks or threads")
    add("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="override a recipe key")
    add("--change-limits", action="store_true", help="change the limits; without this option nothing is changed")
    add("--dry-run", action="store_true", help="print the devices and the trials; change and start nothing")
    add("--repeats", type=count, default=3, help="trials of each configuration (default 3)")
    add("--no-warm-up", action="store_true", help="omit the training before the first trial")
    add(
        "--seed",
        type=lambda text: int(number(text)),
        help="seed of the order of the trials (default: random, stored in the output)",
    )
    add("--max-slowdown", type=at_least_1, metavar="FACTOR", help="recommend no configuration that is slower, e.g. 1.1")
    add("--limit-s", type=at_least_1, default=600.0, help="time limit of a trial in seconds (default 600)")
    add("--budget-s", type=at_least_1, default=math.inf, help="time in seconds after which the study stops")
    add("--ranks-per-node", type=count, help="ranks on each node (default: as the launcher)")
    add("--run-args", default="", help="further options of `hpcdist run` for each trial, in one string")
    add("--retry-failed", action="store_true", help="run the trials again that are recorded as failed")
    parser.set_defaults(output=Path("power.h5"))


def number(text: str, least: float = 0.0) -> float:
    with suppress(ValueError):
        if least <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of at least {least:g}, got {text!r}")


def at_least_1(text: str) -> float:
    return number(text, 1.0)


def count(text: str) -> int:
    if not (value := at_least_1(text)).is_integer():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(value)


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(number, text.split(",")))


def clocks(text: str) -> tuple[float, ...]:
    return tuple(float(count(word)) for word in text.split(","))


def axes_of(chosen: argparse.Namespace) -> Axes:
    """Return the varied values. Raises UsageError for an invalid --sweep, and ConfigurationError for unknown keys."""
    keys: dict[str, tuple[Any, ...]] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for text in chosen.sweep:
        key, equals, values = text.partition("=")
        key, texts = key.strip(), [value.strip() for value in LIST_COMMA.split(values)]
        if not equals or not all(texts):
            raise UsageError(f"--sweep {text}: expected KEY=V1,V2, such as threads=1,2")
        if key in keys or key in counts:
            raise UsageError(f"--sweep {key}=... is given twice; list all values in one --sweep")
        try:
            if key in ("ranks", THREADS):
                counts[key] = tuple(map(count, texts))
            else:
                keys[key] = tuple(override(f"{key}={value}", "--sweep")[key] for value in texts)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--sweep {text}: {error}") from None
    if "ranks" in counts and chosen.ranks is not None:
        raise UsageError(f"-n {chosen.ranks} and --sweep ranks=... exclude each other; leave -n out")
    ranks = counts.get("ranks", (chosen.ranks or 1,))
    return Axes(ranks, counts.get(THREADS, ()), chosen.limits, chosen.clocks, keys)


def override(text: str, option: str) -> dict[str, Any]:
    """Return the recipe key and the value in ``text``, which was given by ``option``. Raises ConfigurationError."""
    try:
        return settings.overrides([text], recipes.known_keys()).values
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("--set", option)) from error


def trials_of(chosen: argparse.Namespace, axes: Axes) -> tuple[list[SweepTrial], Mapping[str, Any]]:
    """Return the trials, and the recipe values without --sweep. Raises ConfigurationError for an invalid trial."""
    overrides = {key: value for text in chosen.overrides for key, value in override(text, "--set").items()}
    if both := sorted(overrides.keys() & axes.keys.keys()):
        raise UsageError(f"{both[0]} is in --set and in --sweep; leave one of them out")
    keys = {key: list(values) for key, values in axes.keys.items()}
    variant = TrialVariant("", overrides, ())
    sweep = Sweep(Path("power"), axes.ranks, chosen.repeats, chosen.recipe, keys, (variant,), ())
    trials: dict[str, SweepTrial] = {}
    bases = definition.expand(sweep, SweepRecipes(sweep))
    for base, threads, limits in itertools.product(bases, axes.threads or (None,), axes.limits):
        changes = {name: value for name, value in zip(FORMATS, (threads, *limits), strict=True) if value is not None}
        words = [base.name] if keys else []
        words += [FORMATS[name].format(value) for name, value in changes.items()]
        words += ["as found"] if len(axes.limits) > 1 and limits == (None, None) else []
        name = " ".join(words) or "recipe"
        text = repr((base.ranks, sorted(changes.items()), base.recipe))
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        if digest in trials:
            raise ConfigurationError(f"two trials are {name!r} on {base.ranks} ranks; list each value once")
        trials[digest] = SweepTrial(digest, name, base.ranks, {**base.settings, **changes}, base.recipe)
    return list(trials.values()), SweepRecipes(sweep).resolve(overrides).values


def plan(trials: Sequence[SweepTrial], repeats: int, path: Path, retry_failed: bool, seed: int) -> list[SeriesItem]:
    """Return all trials in a random order. Every second repeat reverses the order of the repeat before.

    So a drift of the machine affects all configurations alike. Raises StorageError if ``path`` is no results file.
    """
    items = {(item.repeat, item.position): item for item in series.plan(trials, repeats, path, retry_failed)}
    order: list[tuple[int, int]] = []
    for repeat in range(repeats):
        drawn = np.random.Generator(np.random.Philox(key=[seed, repeat // 2])).permutation(len(trials))
        order += [(repeat, int(position)) for position in (drawn if repeat % 2 == 0 else drawn[::-1])]
    return [items[key] for key in order]


def command_of(chosen: argparse.Namespace, axes: Axes) -> Command:
    """Return the function that makes the command line of a trial. Raises UsageError for invalid --run-args."""
    words = run_options(chosen.ranks_per_node, chosen.run_args)
    if axes.threads and any(word.startswith("--cpus-per-task") for word in words):
        raise UsageError("--sweep threads=... also sets --cpus-per-task; leave --cpus-per-task out of --run-args")

    def command(of: SweepTrial, recipe: Path, out: Path) -> list[str]:
        threads = of.settings.get(THREADS)
        return trial.command(of, recipe, out, [*words, *([] if threads is None else ["--cpus-per-task", str(threads)])])

    return command


def provenance_of(chosen: argparse.Namespace, devices: Devices, sources: str) -> dict[str, str]:
    """Return the attributes of the output file. Raises UsageError if an existing file has other devices or trials."""
    seed, names = chosen.seed, devices.names(chosen.anonymous)
    if chosen.output.exists():
        earlier = results.read(chosen.output).provenance
        if report.SEED not in earlier:
            raise UsageError(f"{chosen.output} has the results of another benchmark; choose another --output")
        measured = earlier.get(report.DEVICES, "")
        if names and measured and measured != names:
            raise UsageError(f"{chosen.output} was measured on {measured}, not on {names}; choose another --output")
        seed = int(earlier[report.SEED]) if seed is None else seed
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    attributes = {report.SEED: str(seed), report.DEVICES: names, report.LIMITED: devices.kind}
    return attributes | ({report.DECLARED: "declared"} if sources == "declared" else {})


def under_limits(devices: Devices, warm_up: bool, measure: Measure) -> Measure:
    """Return a function that runs ``measure`` under the limits of a trial, with a warm-up before the first trial."""
    warm_ups = [warm_up]

    def measured(of: SweepTrial, limit_s: float) -> TrialOutcome:
        if warm_ups and warm_ups.pop():
            outcome = measure(of, limit_s)
            failure = f", FAILED, {outcome.reason}" if outcome.reason else ""
            print(f"warm-up: {outcome.wall_s:.1f} s{failure}", file=sys.stderr)
        with ExitStack() as stack:
            try:
                in_force = stack.enter_context(devices.limited(of.settings.get(LIMIT), of.settings.get(CLOCK)))
            except MissingCapabilityError as error:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                return TrialOutcome(trial.FAILED, now, 0.0, 0, f"its limits could not be changed: {error}")
            outcome = measure(of, limit_s)
            after = devices.in_force()
        if outcome.status != trial.OK:
            return outcome
        if reason := invalid_reason(outcome, in_force, after) if devices.kind else "":
            return replace(outcome, status=trial.FAILED, reason=reason, summary={}, samples={})
        figures = {**report.figures(outcome), "in_force_w": in_force}
        figures |= {name: of.settings.get(name) for name in FORMATS}
        return replace(outcome, summary={**outcome.summary, report.GROUP: figures})

    return measured


def invalid_reason(outcome: TrialOutcome, before: float | None, after: float | None) -> str:
    """Return the reason why a trial under limits is invalid, or ""."""
    if before is not None and after is not None and not math.isclose(before, after, abs_tol=0.5):
        return f"another process changed the limit during the trial, from {before:g} W to {after:g} W"
    nodes = {source.get("node") for source in outcome.summary.get("energy_sources", ())}
    return f"it ran on {len(nodes)} nodes, but the limits were changed on one" if len(nodes) > 1 else ""


@dataclass(frozen=True)
class PowerResults(Results):
    """Results of the study; ``tally`` is None if nothing was measured."""

    summary: report.Summary | None = None
    tally: SweepTally | None = None


def measure(chosen: argparse.Namespace, session: Session) -> PowerResults | None:
    if chosen.restore:
        if not power_limits.put_back(limit_journal.directory(), print):
            raise MissingCapabilityError("some limits were not restored; the lines above have the reasons")
        return None
    if chosen.show:
        return PowerResults({}, {}, {}, summary_of(chosen.show, chosen))
    check_alone()
    axes = axes_of(chosen)
    has_limits = bool(axes.limits_w or axes.clocks_mhz)
    if not (has_limits or chosen.sweep):
        raise UsageError("nothing varies; give --limits W,W, --clocks MHZ,MHZ or --sweep KEY=V1,V2")
    if (chosen.change_limits or chosen.on) and not has_limits:
        raise UsageError("--change-limits and --on need --limits or --clocks")
    trials, values = trials_of(chosen, axes)
    if values["energy.sources"] == "none":
        raise ConfigurationError("energy.sources = 'none' measures no energy; add --set energy.sources=auto")
    command = command_of(chosen, axes)
    results.check_place(chosen.output)
    with opened(axes, values, chosen.on) as devices:
        attributes = provenance_of(chosen, devices, values["energy.sources"])

        def items() -> list[SeriesItem]:
            seed = int(attributes[report.SEED])
            return plan(trials, chosen.repeats, chosen.output, chosen.retry_failed, seed)

        if chosen.dry_run:
            show(items(), devices, command)
            return None
        if devices.kind and not chosen.change_limits:
            changes = [f"{value:g} W" for value in axes.limits_w] + [f"{value:g} MHz" for value in axes.clocks_mhz]
            raise UsageError(
                f"this would set {', '.join(changes)} in turn on {devices.names()}, and then restore the limits; "
                "nothing was changed: add --change-limits, or --dry-run to see the plan"
            )
        if devices.kind:
            devices.check_permitted()
        limits = series.SeriesLimits(chosen.limit_s, chosen.budget_s)
        tally = run_series(
            chosen.output, items, limits, chosen.anonymous, command, attributes,
            lambda run_trial: under_limits(devices, not chosen.no_warm_up, run_trial),
        )  # fmt: skip
    print(tally_line(tally, f", in {chosen.output}"), file=sys.stderr)
    return PowerResults({}, {}, {}, summary_of(chosen.output, chosen), tally)


def summary_of(path: Path, chosen: argparse.Namespace) -> report.Summary:
    return report.summarize(results.read(path), chosen.objective, chosen.max_slowdown)


def show(items: Sequence[SeriesItem], devices: Devices, command: Command) -> None:
    """Print the devices, the trials in their order, and the commands."""
    trials = [f"[{number}/{len(items)}] {item_line(item)}" for number, item in enumerate(items, 1)]
    commands = [shlex.join(command(item.trial, Path("RECIPE"), Path("RUN_DIR"))) for item in items]
    print("\n".join([*devices.lines(), *trials, *dict.fromkeys(commands)]))


def lines(result: Any) -> list[str]:
    return report.lines(result.summary)


def plot(result: Any, path: Path) -> None:
    report.plot(result.summary, path)


def failures(result: Any) -> list[str]:
    """Return the failed trials. Raises RemainingTrialsError if trials remain."""
    if result.tally is not None and result.tally.left:
        raise RemainingTrialsError(f"{result.tally.left} trials remain; run the same command again")
    return [f"{result.tally.failed} trials failed"] if result.tally is not None and result.tally.failed else []
