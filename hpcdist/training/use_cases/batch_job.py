"""Batch job of a recipe or a program for a site.

The recipe gets the site's defaults and, if no key sets it, a checkpoint interval. Light: loads neither MPI nor HDF5.
"""

import dataclasses
import getpass
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hpcdist.batch import site_search
from hpcdist.batch.job import BatchJob, walltime_s
from hpcdist.batch.site_profile import SiteLimits, SiteProfile
from hpcdist.comm.launch import mpirun
from hpcdist.comm.launch.environment import launcher_options, source_folder
from hpcdist.constants import RECIPE_FILE, SETTINGS_PREFIX
from hpcdist.errors import ConfigurationError, HpcdistError, MissingCapabilityError, UsageError
from hpcdist.reporting.units import counted
from hpcdist.strategies.decentralised.config import STRATEGIES as DECENTRALISED
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import requirements
from hpcdist.training.recipe.requirements import degrees_equation

if TYPE_CHECKING:
    from hpcdist.training.recipe.recipe import Recipe, ResolvedRecipe

# Options of `submit` that are copied to fields of a `BatchJob`.
_FIELDS: Final = (
    *("nodes", "ranks_per_node", "cpus_per_task", "walltime", "partition", "account", "name", "signal_s", "links"),
    *("qos", "constraint", "mem"),
    *("restarts", "spare_nodes", "survive", "most_fruitless", "check", "warmup", "mpi_args", "sbatch_args"),
)
_STRIPE: Final = "checkpoint.stripe"
_DEFAULT_SAVES: Final = 20  # number of checkpoints in a run whose ranks are not in lock-step
_DAY_S: Final = 86400.0


@dataclass(frozen=True)
class PlannedJob:
    """Batch job with its site profile, its recipe, and messages for the user."""

    job: BatchJob
    site: SiteProfile
    notes: tuple[str, ...]
    hidden: tuple[str, ...]  # messages about files that compute nodes cannot see
    recipe: "Recipe | None" = None
    missing: tuple[str, ...] = ()  # messages about modules that the job's Python lacks


def plan_training(
    path: Path | None,
    overrides: tuple[str, ...],
    options: Mapping[str, Any],
    job_class: type[BatchJob] = BatchJob,
    **more: Any,
) -> PlannedJob:
    """Return a `PlannedJob` that trains with the recipe file ``path`` (or None). Raises HpcdistError.

    ``overrides``: values of --set. ``options``: options of `hpcdist submit`. ``job_class``: type of the job.
    ``**more``: further fields of the job.
    """
    site = site_search.load_selected(options["site"])
    resolved = _resolved(path, overrides, site, options["site"])
    run_dir = run_dir_of(options["out"], options["name"], recipes.run_id(resolved.recipe))
    _check_same_run(run_dir, resolved.recipe)
    resolved = _with_stripe(resolved, path, overrides, site, options["site"], run_dir)
    shared, notes = shared_fields(options, site)
    recipe, saves = _with_checkpoints(resolved, options, site)
    local = _node_local_folder(options, site, run_dir)
    data = _staged_data(options["stage_data"], recipe)
    if data is not None and local is not None:
        staged = dataclasses.replace(recipe.data, staged=str(local / "data" / data.name))
        recipe = dataclasses.replace(recipe, data=staged)
    gpus = options["gpus_per_node"]
    if gpus is None:
        gpus = options["ranks_per_node"] if recipe.run.device == "gpu" else 0
    if recipe.run.device == "gpu" and gpus == 0:
        raise ConfigurationError(
            "run.device = 'gpu' with --gpus-per-node 0; give the number of GPUs per node, or leave --gpus-per-node out"
        )
    job = job_class(
        **shared,
        **more,
        recipe=recipes.dump(recipe),
        run_dir=run_dir,
        gpus_per_node=gpus,
        environment=options["environment"] and options["environment"].absolute(),
        data=data,
        local=local,
    )
    site_search.check(job, site)
    shape = f"{size_of(job)}: {degrees_equation(recipe, job.ranks)}"
    planned = checked_job(job, site, shape, [*notes, *saves], recipe.data.paths)
    # Another Python of the ranks may have the modules that this Python lacks: see `hpcdist doctor --job`.
    own_python = not job.python_of_ranks and job.environment is None
    missing = tuple(requirements.missing_packages(recipe)) if own_python else ()
    return dataclasses.replace(planned, recipe=recipe, missing=missing)


def plan_script(
    program: tuple[str, ...], options: Mapping[str, Any], job_class: type[BatchJob] = BatchJob, **more: Any
) -> PlannedJob:
    """Return a `PlannedJob` that runs the command line ``program``. Raises HpcdistError.

    ``options``: options of `hpcdist submit`. ``job_class``: type of the job. ``**more``: further fields of the job. The
    job gets the HPCDIST_SET__... variables of this process.
    """
    site = site_search.load_selected(options["site"])
    words = "\0".join((os.getcwd(), *program))
    run_dir = run_dir_of(options["out"], options["name"], hashlib.sha256(os.fsencode(words)).hexdigest()[:12])
    shared, notes = shared_fields(options, site)
    job = job_class(
        **shared,
        **more,
        recipe="",
        program=program,
        program_keys=tuple(sorted(item for item in os.environ.items() if item[0].startswith(SETTINGS_PREFIX))),
        run_dir=run_dir,
        gpus_per_node=options["gpus_per_node"] or 0,
        environment=options["environment"] and options["environment"].absolute(),
        local=_node_local_folder(options, site, run_dir),
    )
    if job.gpus_per_node and not job.python_of_ranks and job.environment is None:
        notes += [f"warning: {line}" for line in requirements.missing_for_gpu_tensors(program)]
    return checked_job(job, site, f"{size_of(job)}: {shlex.join(program)}", notes, [])


def size_of(job: BatchJob) -> str:
    """Return a text such as "2 nodes x 4 ranks" for the size of ``job``."""
    return f"{counted(job.nodes, 'node')} x {counted(job.ranks_per_node, 'rank')}"


def checked_job(
    job: BatchJob, site: SiteProfile, size_text: str, notes: Iterable[str], data_paths: Iterable[str]
) -> PlannedJob:
    """Return a `PlannedJob` of ``job``, with messages. Raises ConfigurationError if ``site`` cannot run ``job``.

    ``size_text``: text about the size of the job. ``notes``: further messages for the user. ``data_paths``: data files.
    The result lists files that compute nodes cannot see.
    """
    site_search.check(job, site)
    lines = [f"site {site.name}; {size_text}", *_time_note(job, site), *_core_note(job, site), *notes]
    own_python = not job.python_of_ranks and job.environment is None
    if own_python and (second := mpirun.second_mpi(site.environment.modules)):
        lines.append(f"warning: {second}; {mpirun.SECOND_MPI_CURE}")
    return PlannedJob(job, site, tuple(lines), tuple(hidden_paths(job, site, data_paths)))


def _time_note(job: BatchJob, site: SiteProfile) -> list[str]:
    if job.walltime is not None or site.scheduler.kind == "none":
        return []
    if site.scheduler.kind == "slurm" and os.environ.get("SBATCH_TIMELIMIT"):
        return [f"no --time: SBATCH_TIMELIMIT={os.environ['SBATCH_TIMELIMIT']} is the time limit"]
    job = site.complete(job)
    limits, place = site_search.limits_of_job(job, site)
    named = f" {job.partition}" if job.partition else ""
    kind = "partition" if site.scheduler.kind == "slurm" else "queue"
    most = f"; the longest of {place} is {limits.max_walltime}" if limits.max_walltime else ""
    asked = " (`sinfo -o '%P %L'` shows it)" if kind == "partition" else ""
    return [f"no --time: the time limit is the default of the {kind}{named}{asked}{most}"]


def _core_note(job: BatchJob, site: SiteProfile) -> list[str]:
    cores = site_search.limits_of_job(site.complete(job), site)[0].cores_per_node
    if site.scheduler.kind == "none":
        cores = len(os.sched_getaffinity(0))
    cores_each = cores // job.ranks_per_node
    if job.cpus_per_task > 1 or cores_each < 2:
        return []
    used = f"{job.ranks_per_node * job.cpus_per_task} of {counted(cores, 'core')} of a node"
    return [f"the ranks use {used}: --cpus-per-task {cores_each} gives each rank {cores_each}, and as many threads"]


def shared_fields(options: Mapping[str, Any], site: SiteProfile) -> tuple[dict[str, Any], list[str]]:
    """Return ({field: value} of fields that all job types share, list of notes for the user). Raises UsageError.

    ``options``: options of `hpcdist submit`.
    """
    # The container comes from the site profile.
    launcher_options(options["mpi_args"])  # raise errors here, not on the node
    begin, notes = _carbon_begin(options)
    fields = {name: options[name] for name in _FIELDS}
    fields |= {"python": sys.executable, "python_path": source_folder(), "begin": begin}
    image = options["container"] or site.container.image
    python_of_ranks = (*site.container.runtime, image, site.container.python) if image else ()
    return fields | {"python_of_ranks": python_of_ranks}, notes


def check_visible(planned: PlannedJob) -> None:
    """Raise ConfigurationError if other compute nodes cannot see files of the job ``planned``. Local."""
    if not planned.hidden or (planned.site.scheduler.kind == "slurm" and _is_whole_cluster()):
        return
    raise ConfigurationError(
        f"compute nodes cannot see files of the job: {'; '.join(planned.hidden)}. Submit from a file system that all "
        "nodes see, or list such file systems in the site profile (storage.roots and storage.private)"
    )


def check_packages(planned: PlannedJob) -> None:
    """Raise MissingCapabilityError if Python modules that ``planned`` needs are missing.

    If the site's environment may provide these modules, only print a warning.
    """
    if not planned.missing:
        return
    environment = planned.site.environment
    if not (environment.init or environment.modules or "PYTHONPATH" in environment.variables):
        raise MissingCapabilityError("; ".join(planned.missing))
    for line in planned.missing:
        print(f"hpcdist submit: warning: unless a module of the site brings it, {line}", file=sys.stderr)


def _is_whole_cluster() -> bool:
    from hpcdist.batch.schedulers import slurm

    return shutil.which("sbatch") is None or slurm.is_this_machine()


def _resolved(path: Path | None, overrides: tuple[str, ...], site: SiteProfile, named: str | None) -> "ResolvedRecipe":
    environment = dict(os.environ)
    if named:
        environment[site_search.VARIABLE] = str(site_search.path_of(named).absolute())
    return recipes.load(path, overrides, environment)


def _with_stripe(
    resolved: "ResolvedRecipe",
    path: Path | None,
    overrides: tuple[str, ...],
    site: SiteProfile,
    named: str | None,
    run_dir: Path,
) -> "ResolvedRecipe":
    root = site.root_of(run_dir)
    if root is None or not root.stripe or not resolved.origin[_STRIPE].startswith((recipes.DEFAULT, "site profile")):
        return resolved
    return _resolved(path, (*overrides, f"{_STRIPE}={root.stripe}"), site, named)


def _with_checkpoints(
    resolved: "ResolvedRecipe", options: Mapping[str, Any], site: SiteProfile
) -> tuple["Recipe", list[str]]:
    # The checkpoint interval is computed if the user set none.
    recipe = resolved.recipe
    if any(resolved.origin[f"checkpoint.{key}"] != recipes.DEFAULT for key in ("every_steps", "mtbf_s")):
        return recipe, []
    strategy = recipe.parallel.strategy
    if strategy in DECENTRALISED or (strategy == "parameter_server" and not recipe.parameter_server.lock_step):
        every = max(1, recipe.run.steps // _DEFAULT_SAVES)  # saves average the replicas, so they must be regular
        checkpoint = dataclasses.replace(recipe.checkpoint, every_steps=every)
        setting = f"every_steps = {every}: {_DEFAULT_SAVES} times in the run"
    else:
        mtbf_s, reason = _mtbf_s(options, site)
        checkpoint = dataclasses.replace(recipe.checkpoint, mtbf_s=mtbf_s)
        setting = f"mtbf_s = {mtbf_s:.10g}: Daly's interval for {reason}"
    note = f"when to save is not set, so checkpoint.{setting}; checkpoint.every_steps=0 saves at the end alone"
    return dataclasses.replace(recipe, checkpoint=checkpoint), [note]


def _mtbf_s(options: Mapping[str, Any], site: SiteProfile) -> tuple[float, str]:
    cluster = options["cluster"] or site.cluster
    if cluster:
        from hpcdist.planner.cluster import toml_file

        try:
            mtbf_s = toml_file.read(cluster).failures.node_mtbf_s / options["nodes"]
            return float(round(mtbf_s)), f"{counted(options['nodes'], 'node')} of {cluster}"
        except HpcdistError:  # the estimate reports why that file cannot be used
            pass
    partition = options["partition"] or site.scheduler.partition
    of_qos = site.qos.get(options["qos"] or site.scheduler.qos, SiteLimits())
    limits = of_qos.with_defaults(site.partitions.get(partition, SiteLimits()).with_defaults(site.limits))
    walltime = options["walltime"] or limits.max_walltime
    if walltime:
        return float(walltime_s(walltime)), f"a failure in each walltime of {walltime}"
    return _DAY_S, "a failure a day, as no walltime is known"


def run_dir_of(out: Path | None, name: str, run_id: str) -> Path:
    """Return the absolute path of ``out``, or of "runs/<name>-<run_id>" if ``out`` is None."""
    if out is not None:
        return out.absolute()
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    return (Path("runs") / f"{plain}-{run_id}").absolute()


def _check_same_run(run_dir: Path, recipe: "Recipe") -> None:
    stored = run_dir / RECIPE_FILE
    if not (stored.exists() and (run_dir / "checkpoints").exists()):
        return
    differences = recipes.contradictions(recipes.load_stored(stored), recipe)
    if differences:
        raise ConfigurationError(
            f"{run_dir} holds another run: {', '.join(differences[:3])}; choose another --out, or continue that run by "
            f"submitting its recipe {stored}{recipes.init_from_hint(run_dir, differences)}"
        )


def _carbon_begin(options: Mapping[str, Any]) -> tuple[datetime | None, list[str]]:
    timing = {name: options[name] for name in ("deadline", "within", "power_w") if options[name] is not None}
    if options["carbon"] is None:
        if timing:
            raise UsageError(
                f"--{next(iter(timing)).removesuffix('_w')} has no effect without --carbon FORECAST.csv; add --carbon"
            )
        return None, []
    if "deadline" in timing and "within" in timing:
        raise UsageError("--deadline and --within both set the latest end; keep one of them")
    from hpcdist.batch import carbon

    limit = None if options["walltime"] is None else walltime_s(options["walltime"])
    text = options["deadline"] or options["within"]
    return carbon.plan_begin(options["carbon"], text, limit, datetime.now(UTC), options["power_w"])


def _staged_data(is_requested: bool, recipe: "Recipe") -> Path | None:
    if not is_requested:
        return None
    if not recipe.data.path:
        raise ConfigurationError(
            "--stage-data: data.path is empty, so there is nothing to copy (a data.source is not copied); leave "
            "--stage-data out"
        )
    return Path(recipe.data.path)


def _node_local_folder(options: Mapping[str, Any], site: SiteProfile, run_dir: Path) -> Path | None:
    if not (options["stage_data"] or options["environment"] or options["warmup"]):
        return None
    place = hashlib.blake2b(os.fsencode(run_dir), digest_size=4).hexdigest()
    folder = site.storage.node_local
    if "$USER" in folder:
        folder = folder.replace("$USER", getpass.getuser())
    return Path(folder) / f"hpcdist-{os.getuid()}-{place}"


def hidden_paths(job: BatchJob, site: SiteProfile, data_paths: Iterable[str]) -> list[str]:
    """Return a list with a message for each file of ``job`` that compute nodes of ``site`` cannot see.

    ``data_paths``: files of the training data.
    """
    if site.scheduler.kind == "none":
        return []
    paths = {"the current directory (for the log)": Path.cwd(), "the run directory": job.run_dir}
    paths["this Python"] = Path(job.python)
    if job.python_path is not None:
        paths["hpcdist"] = Path(job.python_path)
    if job.environment is not None:
        paths["--stage-environment"] = job.environment
    groups = [paths, *({"data.path =": Path(path)} for path in data_paths if path)]
    return [line for places in groups for line in site_search.hidden_paths(places, site)]
