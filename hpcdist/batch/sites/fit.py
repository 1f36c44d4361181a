"""Fit of a job to a site: checked against the profile before the scheduler is asked, with the paths nodes see."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from hpcdist.batch.job import BatchJob, memory_mib, walltime_s
from hpcdist.batch.sites.profile import SiteLimits, SiteProfile
from hpcdist.errors import ConfigurationError
from hpcdist.reporting.units import counted

IMAGE = ("/usr", "/opt")  # of the operating system, whose image all nodes have
LAUNCHERS_WITH_SPARES = ("mpirun", "srun")


def check(job: BatchJob, site: SiteProfile) -> None:
    """Raise ConfigurationError where ``site`` cannot run ``job``, as far as its profile says what it has."""
    job = site.complete(job)
    by_variable = site.scheduler.kind == "slurm" and os.environ.get("SBATCH_ACCOUNT")
    if site.scheduler.account_required and job.account is None and not by_variable:
        raise ConfigurationError(f"jobs at the site {site.name} are paid by an account; add --account")
    _check_scheduler(job, site)
    limits, place = _limits_of_job(job, site)
    _check_time(job, limits, place)
    _check_memory(job, limits, place)
    if job.gpus_per_node and site.gpu.unsupported:
        raise ConfigurationError(
            f"{counted(job.gpus_per_node, 'GPU')} a node at the site {site.name}: {site.gpu.unsupported}; compute with "
            "its cores (run.device = 'cpu', and no --gpus-per-node)"
        )
    asked = f"--nodes {job.nodes}" + (f" and --spare-nodes {job.spare_nodes}" if job.spare_nodes else "")
    if limits.max_nodes and job.nodes + job.spare_nodes > limits.max_nodes:
        raise ConfigurationError(f"{asked}: {place} allows {limits.max_nodes} at the most")
    gpus = limits.gpus_per_node if limits.gpus_per_node >= 0 else (site.gpu.per_node or None)
    if gpus is not None and job.gpus_per_node > gpus:
        raise ConfigurationError(
            f"{counted(job.gpus_per_node, 'GPU')} a node (--gpus-per-node, or a GPU for each of --ranks-per-node "
            f"{job.ranks_per_node}), and a node of {place} has {gpus}; use more nodes with fewer ranks each"
        )
    cores = job.ranks_per_node * job.cpus_per_task
    if limits.cores_per_node and cores > limits.cores_per_node:
        raise ConfigurationError(
            f"--ranks-per-node {job.ranks_per_node} x --cpus-per-task {job.cpus_per_task} = {cores} cores, and a node "
            f"of {place} has {limits.cores_per_node}; use fewer of one"
        )
    kind = site.launcher.kind
    if job.survive != "none" and (kind, site.launcher.mpi) != ("mpirun", "openmpi"):
        raise ConfigurationError(
            f"--survive {job.survive} needs the mpirun of an Open MPI 5, and the site {site.name} starts ranks of "
            f"{site.launcher.mpi} with {kind}; use --restarts instead"
        )
    if job.spare_nodes and kind not in LAUNCHERS_WITH_SPARES:
        raise ConfigurationError(
            f"--spare-nodes {job.spare_nodes}: {kind}, the launcher of the site {site.name}, takes all nodes of a job; "
            "leave it out"
        )


def _check_scheduler(job: BatchJob, site: SiteProfile) -> None:
    """Raise ConfigurationError for what the scheduler of ``site`` would never hear of."""
    kind = site.scheduler.kind
    if job.sbatch_args and kind != "slurm":
        raise ConfigurationError(
            f"--sbatch-arg {job.sbatch_args[0]}: the site {site.name} has no sbatch; say options of all its jobs in "
            "its profile, as scheduler.options, or leave it out"
        )
    for option, text in {"--qos": job.qos, "--constraint": job.constraint}.items():
        if text is not None and kind == "pbs":
            raise ConfigurationError(
                f"{option} {text}: the site {site.name} has PBS, which knows no such; choose a queue with --partition, "
                "or say resources in a profile, as scheduler.options"
            )
    if job.mem == "0" and kind == "pbs":
        raise ConfigurationError(f"--mem 0: the site {site.name} has PBS, in which 0 is no memory; give the size")
    if kind != "none":
        return
    asked: dict[str, str | int | None] = {
        "--partition": job.partition,
        "--account": job.account,
        "--qos": job.qos,
        "--constraint": job.constraint,
        "--mem": job.mem,
        "--chain": job.links if job.links > 1 else None,
    }
    for option, value in asked.items():
        if value is not None:
            raise ConfigurationError(
                f"{option} {value}: the site {site.name} has no scheduler, and the job goes on until all steps are "
                "done; leave it out"
            )


def _limits_of_job(job: BatchJob, site: SiteProfile) -> tuple[SiteLimits, str]:
    """Return what counts for the job, and how to call the place. Raises ConfigurationError for no partition of it."""
    limits, place = site.limits, f"the site {site.name}"
    if site.partitions and job.partition is not None:
        limits, place = _of_partition(job.partition, site).over(limits), f"partition {job.partition} of {site.name}"
    qos = job.qos or next((word[len("--qos=") :] for word in job.sbatch_args if word.startswith("--qos=")), None)
    if qos is not None and qos in site.qos:
        limits, place = site.qos[qos].over(limits), f"QOS {qos} of {site.name}"
    return limits, place


def _of_partition(name: str, site: SiteProfile) -> SiteLimits:
    if name not in site.partitions:
        close = difflib.get_close_matches(name, site.partitions, 1)
        cure = f"the nearest known is {close[0]!r}" if close else f"known are: {', '.join(site.partitions)}"
        raise ConfigurationError(f"--partition {name!r}: the site {site.name} has none of this name; {cure}")
    return site.partitions[name]


def _check_memory(job: BatchJob, limits: SiteLimits, place: str) -> None:
    if not limits.mem_per_node or job.mem is None:
        return
    if memory_mib(job.mem) > memory_mib(limits.mem_per_node):
        raise ConfigurationError(f"--mem {job.mem} is more than a node of {place} has, {limits.mem_per_node}")


def _check_time(job: BatchJob, limits: SiteLimits, place: str) -> None:
    if not limits.max_walltime or job.walltime is None:
        return
    if walltime_s(job.walltime) > walltime_s(limits.max_walltime):
        raise ConfigurationError(
            f"--time {job.walltime} is over the limit of {place}, {limits.max_walltime}; ask for less: the job saves "
            "and goes on by itself, or in the next job of a --chain"
        )


def hidden_paths(paths: Mapping[str, Path], site: SiteProfile) -> list[str]:
    """Return what the nodes of ``site`` would not see of ``paths``, by what each is for, with the reason (local)."""
    return [
        f"{what} {path} {reason}" for what, path in paths.items() if (reason := _hidden_reason(path, site)) is not None
    ]


def _hidden_reason(path: Path, site: SiteProfile) -> str | None:
    real = PurePosixPath(os.path.realpath(path))
    if site.storage.roots:
        image = any(real.is_relative_to(each) for each in IMAGE)
        if image or site.root_of(real) or site.root_of(PurePosixPath(path)):
            return None
        return f"is under none of {_listed(root.path for root in site.storage.roots)}, which all nodes see"
    private = next((each for each in site.storage.private if real.is_relative_to(each)), None)
    return None if private is None else f"is under {private}, of which each node has its own"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
