"""Jobs of `hpcdist submit` other than one training: --array, --bench, --server-nodes, and programs."""

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
    from hpcdist.batch.site_profile import SiteProfile
    from hpcdist.bench.sweep.definition import Sweep, SweepTrial
    from hpcdist.training.use_cases.batch_job import PlannedJob

# Option of `submit` -> the option that selects its kind of job.
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
    click.option("--array", type=FILE, metavar="SWEEP", help="Submit a sweep file as a job array, one trial per task."),
    click.option("--at-most", type=COUNT, help="Maximum concurrent trials of --array.  [default: all]"),
    click.option("--retry-failed", is_flag=True, help="With --array: repeat the trials that failed before."),
    click.option(
        "--bench",
        metavar="SUITE|SWEEP",
        help=f"Submit a benchmark instead of a training: {', '.join(_SUITES)} or a sweep file.",
    ),
    click.option("--bench-args", help="Options of the `hpcdist bench` command of --bench, in one string."),
    click.option("--server-nodes", type=COUNT, help="Additional nodes for dedicated parameter servers."),
    click.option("--server-ranks-per-node", type=COUNT, help="Servers per --server-nodes node.  [default: 1]"),
    click.option("--server-partition", help="Partition of the server nodes.  [default: that of the workers]"),
    click.option(
        "--server-sbatch-arg", "server_sbatch_args", multiple=True, help="Additional sbatch option for server nodes."
    ),
)


def planned_job(
    recipe: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any], program: tuple[str, ...] = ()
) -> "PlannedJob":
    """Return the batch job for the arguments of `hpcdist submit`. Raises ConfigurationError and UsageError.

    ``recipe``: recipe file or None. ``overrides``: values of --set. ``options``: {option name: value}. ``program``:
    command line to run instead of a recipe.
    """
    from hpcdist.training.use_cases import batch_job as plan

    if program:
        return _program(program, recipe, overrides, options)
    if options["tasks"]:
        raise UsageError(f"--tasks {options['tasks']} needs a program: add -- python SCRIPT, or use --array SWEEP")
    kinds = [name for name in _KIND_OPTIONS if options[name] is not None]
    if len(kinds) > 1:
        raise UsageError(f"{_flag(kinds[0])} and {_flag(kinds[1])} exclude each other; choose one")
    kind = kinds[0] if kinds else None
    for name, owner in _OWNER_OPTION.items():
        if options[name] and owner != kind:
            raise UsageError(f"{_flag(name)} needs {_flag(owner)}; add {_flag(owner)}, or leave both out")
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
            f"{recipe or 'a command of hpcdist'} and -- {program[0]} exclude each other: submit a recipe, or a program "
            "after --"
        )
    if overrides:
        raise UsageError(f"--set {overrides[0]} has no effect on a program: export HPCDIST_SET__SECTION__KEY instead")
    for name in (*_KIND_OPTIONS, *_OWNER_OPTION, "stage_data"):
        if options[name] and name != "at_most":
            raise UsageError(f"{_flag(name)} is for recipes, not for {program[0]}; leave {_flag(name)} out")
    if options["at_most"] and not options["tasks"]:
        raise UsageError("--at-most needs --tasks; add --tasks, or leave both out")
    if not options["tasks"]:
        return plan.plan_script(program, options)
    _site(options, "--tasks")
    return plan.plan_script(program, options, ScriptArrayJob, tasks=options["tasks"], at_most=options["at_most"] or 0)


def _flag(name: str) -> str:
    return "--" + {"server_sbatch_args": "server-sbatch-arg"}.get(name, name.replace("_", "-"))


def _site(options: Mapping[str, Any], flag: str) -> "SiteProfile":
    from hpcdist.batch import site_search

    site = site_search.load_selected(options["site"])
    if site.scheduler.kind != "slurm":
        raise ConfigurationError(
            f"{flag} needs Slurm, but the scheduler of the site {site.name} is {site.scheduler.kind!r}; run `hpcdist "
            "bench`, or the training, in a job script that you write"
        )
    return site


def _refuse_what_trainings_have(
    recipe: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any], flag: str
) -> None:
    if recipe is not None or overrides:
        raise UsageError(
            f"{flag} does not train one recipe, so {recipe or '--set'} has no effect; leave RECIPE and --set out, and "
            "set the recipe keys in a sweep file"
        )
    for name in ("stage_data", "environment", "warmup", "spare_nodes"):
        if options[name]:
            word = {"environment": "stage_environment"}.get(name, name)
            raise UsageError(f"{_flag(word)} works only for trainings, not with {flag}; leave {_flag(word)} out")
    if options["most_fruitless"] != BatchJob.most_fruitless:
        raise UsageError(f"--most-fruitless works only for trainings, not with {flag}; leave --most-fruitless out")


def _sweep(path: Path, site: "SiteProfile", options: Mapping[str, Any]) -> "tuple[Sweep, list[SweepTrial], str]":
    from hpcdist.batch import site_search
    from hpcdist.bench.sweep import definition
    from hpcdist.cli.bench.trials import SweepRecipes

    environment = dict(os.environ)
    if options["site"]:
        environment[site_search.VARIABLE] = str(site_search.path_of(options["site"]).absolute())
    sweep = definition.read(path)
    trials = definition.expand(sweep, SweepRecipes(sweep, environment))
    return sweep, trials, definition.freeze(trials, sweep.repeats)


def _run_dir(options: Mapping[str, Any], text: str) -> Path:
    from hpcdist.training.use_cases import batch_job as plan

    return plan.run_dir_of(options["out"], options["name"], hashlib.sha256(text.encode()).hexdigest()[:12])


def _trial_resources(trials: "list[SweepTrial]", options: Mapping[str, Any]) -> tuple[int, set[str]]:
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
    raise UsageError(f"--bench {named!r} is not a benchmark; {suggestion(named, _SUITES, 'or a sweep.toml')}")


def _arguments(suite: str, text: str) -> tuple[str, ...]:
    from click.core import ParameterSource

    from hpcdist.cli.bench import group

    option, command = f"--bench-args {text!r}", group.command.commands[suite]
    try:
        words = shlex.split(text)
        command.make_context(suite, [*words, *(["SWEEP.toml"] if suite == SWEEP else [])])
        parsed = command.make_context(suite, [*words], resilient_parsing=True)
    except (ValueError, click.UsageError) as error:
        message = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(f"{option} is invalid: {message.rstrip('.')}; see `hpcdist bench {suite} --help`") from error
    for name in ("output", "ranks", "ranks_per_node", "run_args"):
        if parsed.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UsageError(f"{option}: the job sets --{name.replace('_', '-')} itself; remove this option")
    return tuple(words)


def _with_servers(recipe: Path | None, overrides: tuple[str, ...], options: Mapping[str, Any]) -> "PlannedJob":
    from hpcdist.batch.array import ServersJob
    from hpcdist.training.use_cases import batch_job as plan

    site = _site(options, "--server-nodes")
    if site.launcher.kind != "srun":
        raise ConfigurationError(
            f"--server-nodes needs srun to start the ranks of worker and server nodes as one world, but the site "
            f"{site.name} uses {site.launcher.kind}; choose a site with launcher.kind = 'srun', or run the servers on "
            "the nodes of the workers"
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
                f"ranks on server nodes are dedicated servers; set {section}.{name} to {expected!r}, or leave "
                "--server-nodes out"
            )


def _check_nodes_of_servers(job: "ServersJob", site: "SiteProfile") -> None:
    from hpcdist.batch import site_search

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
    site_search.check(servers, site)
