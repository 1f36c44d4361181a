"""Jobs of `hpcdist submit` other than one training: --array, --bench, --server-nodes, and programs.

Each kind has options of its own, which are refused without it. An array runs one trial a task, and a second job merges
the results; a benchmark runs on nodes of its own; parameter servers may have nodes of a second kind.
"""

import hashlib
import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.batch.job import SUITES, SWEEP, BatchJob
from hpcdist.cli.common import COUNT, FILE, stacked
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.reporting.nearest import suggestion
from hpcdist.reporting.units import counted

if TYPE_CHECKING:  # late at run time: --help is instant
    from hpcdist.batch.array import ServersJob
    from hpcdist.batch.sites.profile import SiteProfile
    from hpcdist.bench.sweep.definition import Sweep, SweepTrial
    from hpcdist.training.use_cases.batch_job import PlannedJob

# Option of `submit` -> the option that decides the kind of the job, without which it means nothing.
_OWNER_OPTION: Final = {
    "at_most": "array",
    "retry_failed": "array",
    "bench_args": "bench",
    "server_ranks_per_node": "server_nodes",
    "server_partition": "server_nodes",
    "server_sbatch_args": "server_nodes",
}
_SUITES: Final = [name for name in SUITES if name != SWEEP]
_KIND_OPTIONS: Final = ("array", "bench", "server_nodes")
kind_options = stacked(
    click.option(
        "--array", type=FILE, metavar="SWEEP", help="Instead of a training: a sweep as a job array, one trial a task."
    ),
    click.option("--at-most", type=COUNT, help="Trials of --array at a time.  [default: all]"),
    click.option("--retry-failed", is_flag=True, help="With --array: run trials again that are recorded as failed."),
    click.option(
        "--bench",
        metavar="SUITE|SWEEP",
        help=f"Instead of a training: a benchmark on nodes of its own: {', '.join(_SUITES)} or a sweep file.",
    ),
    click.option("--bench-args", help="Options of that `hpcdist bench`, in one string."),
    click.option("--server-nodes", type=COUNT, help="Nodes more, for dedicated parameter servers alone."),
    click.option("--server-ranks-per-node", type=COUNT, help="Servers on each of them.  [default: 1]"),
    click.option("--server-partition", help="Partition that they are in.  [default: that of the workers]"),
    click.option(
        "--server-sbatch-arg", "server_sbatch_args", multiple=True, help="Further option of sbatch for their nodes."
    ),
)


def planned_job(
    recipe: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any], program: tuple[str, ...] = ()
) -> "PlannedJob":
    """Return the job that the options ask for; a training without one of _KIND_OPTIONS and without a ``program``.

    Raises ConfigurationError and UsageError, as `batch_job.plan_training` does.
    """
    from hpcdist.training.use_cases import batch_job as plan

    if program:
        return _program(program, recipe, overrides, options)
    if options["tasks"]:
        raise UsageError(f"--tasks {options['tasks']} is for a program; add it: -- python SCRIPT, or use --array SWEEP")
    kinds = [name for name in _KIND_OPTIONS if options[name] is not None]
    if len(kinds) > 1:
        raise UsageError(f"{_flag(kinds[0])} and {_flag(kinds[1])} are jobs of two kinds; choose one")
    kind = kinds[0] if kinds else None
    for name, owner in _OWNER_OPTION.items():
        if options[name] and owner != kind:
            raise UsageError(f"{_flag(name)} belongs to {_flag(owner)}; add it, or leave both out")
    if kind is None:
        return plan.plan_training(recipe, overrides, options)
    if kind == "server_nodes":
        return _with_servers(recipe, overrides, options)
    _refuse_what_trainings_have(recipe, overrides, options, _flag(kind))
    site = _site(options, _flag(kind))
    return _array(site, options) if kind == "array" else _benchmark(site, options)


def _program(
    program: tuple[str, ...], recipe: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any]
) -> "PlannedJob":
    from hpcdist.batch.array import ScriptArrayJob
    from hpcdist.cli.main import COMMANDS
    from hpcdist.training.use_cases import batch_job as plan

    if recipe is not None or program[0] in COMMANDS:
        raise UsageError(
            f"-- {program[0]} with {recipe or 'a command of hpcdist'}: a recipe is submitted by its name alone, and a "
            "program by what stands behind --; keep one"
        )
    if overrides:
        raise UsageError(f"--set {overrides[0]}: the recipe is that of the script; export HPCDIST_SET__SECTION__KEY")
    for name in (*_KIND_OPTIONS, *_OWNER_OPTION, "stage_data"):
        if options[name] and name != "at_most":
            raise UsageError(f"{_flag(name)} is for recipes, not for {program[0]}; leave it out")
    if options["at_most"] and not options["tasks"]:
        raise UsageError("--at-most belongs to --tasks; add it, or leave both out")
    if not options["tasks"]:
        return plan.plan_script(program, options)
    _site(options, "--tasks")
    return plan.plan_script(program, options, ScriptArrayJob, tasks=options["tasks"], at_most=options["at_most"] or 0)


def _flag(name: str) -> str:
    return "--" + {"server_sbatch_args": "server-sbatch-arg"}.get(name, name.replace("_", "-"))


def _site(options: Mapping[str, Any], flag: str) -> "SiteProfile":
    from hpcdist.batch.sites import search

    site = search.load_selected(options["site"])
    if site.scheduler.kind != "slurm":
        raise ConfigurationError(
            f"{flag} at the site {site.name}, whose scheduler is {site.scheduler.kind!r}: such jobs are written for "
            "Slurm alone; start `hpcdist bench`, or the training, in a job of your own"
        )
    return site


def _refuse_what_trainings_have(
    recipe: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any], flag: str
) -> None:
    if recipe is not None or overrides:
        raise UsageError(f"{flag} with {recipe or '--set'}: it trains no recipe of yours; write it into a sweep file")
    for name in ("stage_data", "environment", "warmup", "spare_nodes"):
        if options[name]:
            word = {"environment": "stage_environment"}.get(name, name)
            raise UsageError(f"{flag} with {_flag(word)}, which is for trainings; leave it out")
    if options["most_fruitless"] != BatchJob.most_fruitless:
        raise UsageError(f"{flag} with --most-fruitless, which is for trainings; leave it out")


def _sweep(path: Path, site: "SiteProfile", options: Mapping[str, Any]) -> "tuple[Sweep, list[SweepTrial], str]":
    """Return a sweep, its trials with the defaults of the site, and its text, which needs no other file."""
    from hpcdist.batch.sites import search
    from hpcdist.bench.sweep import definition
    from hpcdist.cli.bench.trials import SweepRecipes

    environment = dict(os.environ)
    if options["site"]:
        environment[search.VARIABLE] = str(search.path_of(options["site"]).absolute())
    sweep = definition.read(path)
    trials = definition.expand(sweep, SweepRecipes(sweep, environment))
    return sweep, trials, definition.freeze(trials, sweep.repeats)


def _run_dir(options: Mapping[str, Any], text: str) -> Path:
    from hpcdist.training.use_cases import batch_job as plan

    return plan.run_dir_of(options["out"], options["name"], hashlib.sha256(text.encode()).hexdigest()[:12])


def _trial_resources(trials: "list[SweepTrial]", options: Mapping[str, Any]) -> tuple[int, set[str]]:
    """Return the GPUs that a node needs for ``trials``, and the data that they read."""
    trees = [tomllib.loads(trial.recipe) for trial in trials]
    on_gpu = any(tree["run"]["device"] == "gpu" for tree in trees)
    gpus = options["gpus_per_node"]
    return (options["ranks_per_node"] if on_gpu else 0) if gpus is None else gpus, {
        tree["data"]["path"] for tree in trees
    }


def _array(site: "SiteProfile", options: Mapping[str, Any]) -> "PlannedJob":
    from hpcdist.batch.array import SweepJob
    from hpcdist.training.use_cases import batch_job as plan

    sweep, trials, text = _sweep(options["array"], site, options)
    shared, lines = plan.shared_fields(options, site)
    gpus, data = _trial_resources(trials, options)
    job = SweepJob(
        **shared,
        run_dir=_run_dir(options, text),
        gpus_per_node=gpus,
        sweep=text,
        trial_ranks=tuple(trial.ranks for trial in trials),
        at_most=options["at_most"] or 0,
        retry_failed=options["retry_failed"],
    )
    shape = f"{counted(len(trials), 'trial')} x {counted(sweep.repeats, 'repeat')}"
    return plan.checked_job(job, site, f"{shape}, each on {counted(job.nodes, 'node')}", lines, sorted(data))


def _benchmark(site: "SiteProfile", options: Mapping[str, Any]) -> "PlannedJob":
    from hpcdist.batch.array import BenchmarkJob
    from hpcdist.training.use_cases import batch_job as plan

    suite = _suite(options["bench"])
    arguments = _arguments(suite, options["bench_args"] or "")
    trials: list[SweepTrial] = []
    text = ""
    if suite == SWEEP:
        _, trials, text = _sweep(Path(options["bench"]), site, options)
    shared, lines = plan.shared_fields(options, site)
    gpus, data = _trial_resources(trials, options)
    job = BenchmarkJob(
        **shared,
        run_dir=_run_dir(options, f"{suite} {shlex.join(arguments)}\n{text}"),
        gpus_per_node=gpus,
        suite=suite,
        arguments=arguments,
        sweep=text,
        trial_ranks=tuple(trial.ranks for trial in trials),
    )
    return plan.checked_job(job, site, f"bench {suite} on {plan.size_of(job)}", lines, sorted(data))


def _suite(named: str) -> str:
    if named in _SUITES:
        return named
    if named.endswith(".toml"):
        return SWEEP
    raise UsageError(f"--bench {named!r} is no benchmark; {suggestion(named, _SUITES, 'or a sweep.toml')}")


def _arguments(suite: str, text: str) -> tuple[str, ...]:
    """Return the words of --bench-args. Raises UsageError here for what `hpcdist bench` would refuse on the node."""
    from click.core import ParameterSource

    from hpcdist.cli.bench import group

    place, command = f"--bench-args {text!r}", group.command.commands[suite]
    try:
        words = shlex.split(text)
        command.make_context(suite, [*words, *(["SWEEP.toml"] if suite == SWEEP else [])])
        parsed = command.make_context(suite, [*words], resilient_parsing=True)
    except (ValueError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(f"{place}: {message.rstrip('.')}; see `hpcdist bench {suite} --help`") from error
    for name in ("output", "ranks", "ranks_per_node", "run_args"):
        if parsed.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{place}: the job itself says --{name.replace('_', '-')}; leave it out")
    return tuple(words)


def _with_servers(recipe: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any]) -> "PlannedJob":
    from hpcdist.batch.array import ServersJob
    from hpcdist.training.use_cases import batch_job as plan

    site = _site(options, "--server-nodes")
    if site.launcher.kind != "srun":
        raise ConfigurationError(
            f"--server-nodes at the site {site.name}, which starts ranks with {site.launcher.kind}: only srun starts "
            "those of both kinds of nodes as one world; choose a site with launcher.kind = 'srun', or leave the "
            "servers on the nodes of the workers"
        )
    nodes, ranks = options["server_nodes"], options["server_ranks_per_node"] or 1
    planned = plan.plan_training(
        recipe,
        (f"parameter_server.servers={nodes * ranks}", *overrides),
        options,
        ServersJob,
        server_nodes=nodes,
        server_ranks_per_node=ranks,
        server_partition=options["server_partition"],
        server_sbatch_args=options["server_sbatch_args"],
    )
    job = planned.job
    assert isinstance(job, ServersJob)
    _check_servers(job)
    _check_nodes_of_servers(job, site)
    return planned


def _check_servers(job: "ServersJob") -> None:
    """Raise ConfigurationError where the recipe has other servers than the ranks of their nodes."""
    tree = tomllib.loads(job.recipe)
    for section, name, expected in (
        ("parallel", "strategy", "parameter_server"),
        ("parameter_server", "placement", "dedicated"),
        ("parameter_server", "servers", job.servers),
    ):
        value = tree[section][name]
        if value != expected:
            raise ConfigurationError(
                f"{section}.{name} = {value!r} with --server-nodes {job.server_nodes} x {job.server_ranks_per_node}: "
                f"ranks on nodes of their own are dedicated servers; set it to {expected!r}, or leave "
                "--server-nodes out"
            )


def _check_nodes_of_servers(job: "ServersJob", site: "SiteProfile") -> None:
    """Raise ConfigurationError where ``site`` does not have the nodes of the servers."""
    from hpcdist.batch.sites import search

    workers = {item.name: getattr(job, item.name) for item in fields(BatchJob)}
    servers = BatchJob(
        **workers
        | {
            "nodes": job.server_nodes,
            "ranks_per_node": job.server_ranks_per_node,
            "gpus_per_node": job.server_gpus_per_node,
            "partition": job.server_partition or job.partition,
        }
    )
    search.check(servers, site)
