"""Find and read site profiles, and check a job against the profile of its site.

A profile with ``based_on`` overrides tables of another profile, key by key.
"""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from hpcdist.batch import job
from hpcdist.batch.job import BatchJob, memory_mib, walltime_s
from hpcdist.batch.site_profile import SiteLimits, SiteProfile
from hpcdist.comm.launch import mpirun
from hpcdist.errors import ConfigurationError, MissingCapabilityError
from hpcdist.reporting import regular
from hpcdist.reporting.nearest import suggestion
from hpcdist.reporting.schema import Field, TableFormat
from hpcdist.reporting.units import counted

VARIABLE: Final = "HPCDIST_SITE"
SEARCH_PATH: Final = "HPCDIST_SITE_PATH"
SYSTEM: Final = Path("/etc/hpcdist/sites")
BASED_ON: Final = "based_on"
IMAGE: Final = ("/usr", "/opt")  # folders of the operating system image, which all nodes have
LAUNCHERS_WITH_SPARES: Final = ("mpirun", "srun")

_GENERIC: Final = {mpirun.MPICH: "slurm-mpich"}  # MPI on PATH -> default profile, if no site is given


def check(job: BatchJob, site: SiteProfile) -> None:
    """Raise ConfigurationError if ``site`` cannot run ``job``, according to the site profile."""
    job = site.complete(job)
    by_variable = site.scheduler.kind == "slurm" and os.environ.get("SBATCH_ACCOUNT")
    by_option = any(option.startswith(("--account=", "-A")) for option in site.scheduler.options)
    if site.scheduler.account_required and job.account is None and not by_variable and not by_option:
        raise ConfigurationError(f"jobs at the site {site.name} need an account; add --account")
    _check_scheduler(job, site)
    limits, place = limits_of_job(job, site)
    if limits.max_walltime and job.walltime is not None and walltime_s(job.walltime) > walltime_s(limits.max_walltime):
        raise ConfigurationError(
            f"--time {job.walltime} is over the limit of {place}, {limits.max_walltime}; use a shorter --time: the job "
            "saves a checkpoint, and continues after a requeue or in the next job of a --chain"
        )
    if limits.mem_per_node and job.mem is not None and memory_mib(job.mem) > memory_mib(limits.mem_per_node):
        raise ConfigurationError(
            f"--mem {job.mem} is more than {limits.mem_per_node}, the memory of a node of {place}; reduce --mem"
        )
    if job.gpus_per_node and site.gpu.unsupported:
        raise ConfigurationError(
            f"{counted(job.gpus_per_node, 'GPU')} per node at the site {site.name} cannot be used: "
            f"{site.gpu.unsupported}; use CPU cores instead (run.device = 'cpu', and no --gpus-per-node)"
        )
    node_options = f"--nodes {job.nodes}" + (f" and --spare-nodes {job.spare_nodes}" if job.spare_nodes else "")
    if limits.max_nodes and job.nodes + job.spare_nodes > limits.max_nodes:
        raise ConfigurationError(f"{node_options}: {place} allows at most {limits.max_nodes} nodes per job")
    gpus = limits.gpus_per_node if limits.gpus_per_node >= 0 else (site.gpu.per_node or None)
    if gpus is not None and job.gpus_per_node > gpus:
        raise ConfigurationError(
            f"the job needs {counted(job.gpus_per_node, 'GPU')} per node for --ranks-per-node {job.ranks_per_node}, "
            f"but a node of {place} has {gpus}; reduce --gpus-per-node, or use more nodes with fewer ranks per node"
        )
    cores = job.ranks_per_node * job.cpus_per_task
    if limits.cores_per_node and cores > limits.cores_per_node:
        raise ConfigurationError(
            f"--ranks-per-node {job.ranks_per_node} x --cpus-per-task {job.cpus_per_task} needs {cores} cores, but a "
            f"node of {place} has {limits.cores_per_node} cores; reduce one of the two options"
        )
    kind = site.launcher.kind
    if job.survive != "none" and (kind, site.launcher.mpi) != ("mpirun", "openmpi"):
        raise ConfigurationError(
            f"--survive {job.survive} needs the mpirun of an Open MPI 5, but the site {site.name} starts ranks of "
            f"{site.launcher.mpi} with {kind}; use --restarts instead"
        )
    if job.spare_nodes and kind not in LAUNCHERS_WITH_SPARES:
        raise ConfigurationError(
            f"--spare-nodes {job.spare_nodes}: {kind}, the launcher of the site {site.name}, uses all nodes of a job; "
            "leave --spare-nodes out"
        )


def _check_scheduler(job: BatchJob, site: SiteProfile) -> None:
    kind = site.scheduler.kind
    if job.sbatch_args and kind != "slurm":
        raise ConfigurationError(
            f"--sbatch-arg {job.sbatch_args[0]}: the site {site.name} has no sbatch (its scheduler is {kind!r}); leave "
            "--sbatch-arg out, and set scheduler.options in the site profile instead"
        )
    for option, text in {"--qos": job.qos, "--constraint": job.constraint}.items():
        if text is not None and kind == "pbs":
            raise ConfigurationError(
                f"{option} {text}: the site {site.name} has PBS, which does not support this option; choose a queue "
                "with --partition, or set scheduler.options in a profile"
            )
    if job.mem == "0" and kind == "pbs":
        raise ConfigurationError(f"--mem 0: PBS at the site {site.name} reads 0 as no memory; give a size, e.g. 200G")
    if kind != "none":
        return
    options: dict[str, str | int | None] = {
        "--partition": job.partition,
        "--account": job.account,
        "--qos": job.qos,
        "--constraint": job.constraint,
        "--mem": job.mem,
        "--chain": job.links if job.links > 1 else None,
    }
    for option, value in options.items():
        if value is not None:
            raise ConfigurationError(
                f"{option} {value}: the site {site.name} has no scheduler, which this option needs; leave {option} out"
            )


def limits_of_job(job: BatchJob, site: SiteProfile) -> tuple[SiteLimits, str]:
    """Return (`SiteLimits` for ``job``, text that names the partition, QOS or site that sets the limits)."""
    limits, place = site.limits, f"the site {site.name}"
    if site.partitions and job.partition is not None:
        if job.partition not in site.partitions:
            raise ConfigurationError(
                f"--partition {job.partition!r}: the site {site.name} has no such partition; "
                f"{suggestion(job.partition, site.partitions)}"
            )
        limits = site.partitions[job.partition].with_defaults(limits)
        place = f"partition {job.partition} of {site.name}"
    qos = job.qos or next((word[len("--qos=") :] for word in job.sbatch_args if word.startswith("--qos=")), None)
    if qos is not None and qos in site.qos:
        limits, place = site.qos[qos].with_defaults(limits), f"QOS {qos} of {site.name}"
    return limits, place


def hidden_paths(paths: Mapping[str, Path], site: SiteProfile) -> list[str]:
    """Return a list of warnings about paths that the nodes of ``site`` cannot see. ``paths``: {purpose: path}."""
    return [
        f"{what} {path} {reason}" for what, path in paths.items() if (reason := _hidden_reason(path, site)) is not None
    ]


def _hidden_reason(path: Path, site: SiteProfile) -> str | None:
    real = PurePosixPath(os.path.realpath(path))
    if site.storage.roots:
        image = any(real.is_relative_to(folder) for folder in IMAGE)
        if image or site.root_of(real) or site.root_of(PurePosixPath(path)):
            return None
        return f"is not below {', '.join(root.path for root in site.storage.roots)}, which all nodes see"
    private = next((folder for folder in site.storage.private if real.is_relative_to(folder)), None)
    return None if private is None else f"is below {private}, which is separate on each node"


def folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders to search for site profiles, in search order. ``environment``: environment variables."""
    listed = [Path(text).expanduser() for text in environment.get(SEARCH_PATH, "").split(os.pathsep) if text]
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "~"), ".config")
    user_folder = Path(home).expanduser() / "hpcdist" / "sites"
    return [user_folder, *listed, SYSTEM, *shipped_folders()]


def shipped_folders() -> list[Path]:
    """Return the folders of the profiles that come with hpcdist: generic sites and named machines."""
    return [job.folder(job.PROFILES) / kind for kind in ("generic", "machines")]


def names(environment: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Return {profile name: path} for all site profiles. If several folders contain a name, the first folder wins.

    ``environment``: environment variables that determine the `folders`.
    """
    paths: dict[str, Path] = {}
    for folder in folders(environment):
        for path in sorted(folder.glob("*.toml")):
            paths.setdefault(path.stem, path)
    return paths


def path_of(named: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the site profile ``named`` (a name or path). Raises ConfigurationError for an unknown name.

    ``environment``: environment variables that set the search path.
    """
    if os.sep in named or named.endswith(".toml"):
        return Path(named).expanduser()
    profiles = names(environment)
    if named not in profiles:
        raise ConfigurationError(
            f"site profile {named!r} does not exist; {suggestion(named, profiles)} (searched "
            f"{', '.join(str(folder) for folder in folders(environment))}; put your profiles into the first folder)"
        )
    return profiles[named]


def load(named: str, environment: Mapping[str, str] = os.environ) -> SiteProfile:
    """Read the site profile ``named`` (a name or path). Raises ConfigurationError for an unknown or invalid profile.

    ``environment``: environment variables that set the search path.
    """
    path = path_of(named, environment)
    tree = _load_tables(path, environment, ())
    try:
        site: SiteProfile = _TABLES.read(SiteProfile, tree)
        return dataclasses.replace(site, name=path.stem, origin=str(path))
    except ConfigurationError as error:
        raise ConfigurationError(f"site profile {path}: {error}") from error


def load_selected(named: str | None, environment: Mapping[str, str] = os.environ) -> SiteProfile:
    """Read the site profile ``named``, or the profile that HPCDIST_SITE in ``environment`` names if ``named`` is None.

    If both are unset, read a generic profile that fits the scheduler and MPI commands on PATH.
    """
    named = named or environment.get(VARIABLE)
    if named:
        return load(named, environment)
    search = environment.get("PATH", "")
    if shutil.which("qsub", path=search) and not shutil.which("sbatch", path=search):
        return load("pbs", environment)
    try:
        vendor = mpirun.find(environment).vendor
    except MissingCapabilityError:
        vendor = mpirun.UNKNOWN
    return load(_GENERIC.get(vendor, "slurm-openmpi"), environment)


def recipe_of(named: str, environment: Mapping[str, str] = os.environ) -> tuple[Mapping[str, Any], Path]:
    """Return (nested dict of the recipe settings in the site profile ``named``, path of the profile).

    ``named``: name or path of the profile. ``environment``: environment variables that set the search path.
    """
    path = path_of(named, environment)
    return load(named, environment).recipe, path


def _load_tables(path: Path, environment: Mapping[str, str], above: tuple[Path, ...]) -> dict[str, Any]:
    tree = regular.settings(path, "site profile")
    named = tree.get("cluster")
    if isinstance(named, str) and (os.sep in named or named.endswith(".toml")):
        tree["cluster"] = str(path.parent / Path(named).expanduser())  # relative to the profile
    base = tree.pop(BASED_ON, None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigurationError(
            f"site profile {path}: {BASED_ON} = {base!r} is not a text; give the name of another profile"
        )
    base_path = _base(base, path, environment)
    if base_path in (*above, path):
        raise ConfigurationError(
            f"{BASED_ON} = {base!r} in site profile {path}: the profile is based on itself, directly or through other "
            "profiles; name another profile"
        )
    below = _load_tables(base_path, environment, (*above, path))
    # Tests of the base profile do not cover this profile.
    below["proven"] = f"not stated; {base} was: {below['proven']}" if below.get("proven") else ""
    return _merge_tables(below, tree)


def _base(named: str, path: Path, environment: Mapping[str, str]) -> Path:
    # ``named``: name or path of the base profile of the profile at ``path``.
    if os.sep in named or named.endswith(".toml"):
        return path.parent / Path(named).expanduser()
    if named == path.stem:
        places = [folder / path.name for folder in folders(environment)]
        # Only later folders: a user's "cray" extends the shipped "cray", never itself.
        later = places[places.index(path) + 1 :] if path in places else places
        return next((path_of_base for path_of_base in later if path_of_base.exists()), path)
    return path_of(named, environment)


def _merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        are_tables = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merge_tables(merged[name], value) if are_tables else value
    return merged


def _leaf(raw: Any, field: Field, where: str) -> Any:
    if raw is None:
        raise ConfigurationError(f"{where} is missing")
    try:
        return msgspec.convert(raw, field.type)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where} = {raw!r} has the wrong type: {error}; correct the file") from error


_TABLES: Final = TableFormat(_leaf)
