"""Checks of the bindings of each node's ranks: GPUs, cores, memory domains, and local ranks.

Faults are described without rank numbers, so that a fault of all nodes is reported once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hpcdist.comm.doctor.facts import THREADS
from hpcdist.comm.doctor.job_checks import Lint, RankRow, RankTable, apply_lints
from hpcdist.comm.doctor.mpi_library import FAIL, OK, WARN, Check
from hpcdist.comm.placement import is_permutation, shown
from hpcdist.constants import VISIBLE_GPUS
from hpcdist.reporting.units import counted, format_ranges

MOST_SHOWN: Final = 4
_BIND: Final = "under Slurm `hpcdist run` binds by --cpus-per-task, or says why not; else srun -c N --cpu-bind=cores"
NO_GPU: Final = "ask for GPUs (--gpus-per-node) and install hpcdist[cuda12x] (or 13x), or set run.device = 'cpu'"


def check_local_ranks(table: RankTable) -> Check:
    """Check that launcher and Slurm number the n ranks of each node from 0 to n - 1. ``table``: facts of all ranks."""
    name = "local ranks"
    lints = (
        Lint(
            lambda rows: _numbering([row.facts.announced for row in rows], rows[0].facts.launcher),
            FAIL,
            "start the job with one launcher, the one that belongs to the MPI library",
        ),
        Lint(
            lambda rows: _numbering([row.facts.slurm_local for row in rows], "SLURM_LOCALID"),
            WARN,
            "MPI and Slurm divide the job into nodes differently: Slurm may bind GPUs of other ranks",
        ),
    )
    wrong = apply_lints(table, name, lints)
    return wrong or Check(name, OK, "MPI and the launcher agree")


def _numbering(numbers: Sequence[int | None], who: str) -> str:
    announced = [number for number in numbers if number is not None]
    if len(announced) < len(numbers) or is_permutation(announced):
        return ""
    return f"{who} numbers the {len(numbers)} ranks of the node {shown(announced)}"


def check_gpus(table: RankTable, device_kind: str, job_has_gpus: bool) -> Check:
    """Check that each rank has a separate GPU, and sees all GPUs of its node. ``table``: facts of all ranks.

    ``device_kind``: requested device, such as "cpu". ``job_has_gpus``: True if the scheduler granted GPUs.
    """
    name = "GPUs"
    if device_kind == "cpu" or not any(row.facts.gpu.count for row in table.rows):
        reason = table.by_node([rows[0].facts.gpu.reason for rows in table.nodes])
        if device_kind == "gpu":
            return Check(name, FAIL, f"no rank sees a GPU: {reason}", NO_GPU)
        if job_has_gpus and device_kind != "cpu":
            cure = "install hpcdist[cuda12x] (or 13x) and hand the driver into the container (--nv), or ask for no GPU"
            return Check(name, WARN, f"the job holds GPUs, but no rank sees a GPU: {reason}", cure)
        return Check(name, OK, f"none: {reason}")
    missing = FAIL if device_kind == "gpu" else WARN
    lints = (
        Lint(_without_gpu, missing, "every rank needs a GPU: ask for the same --gpus-per-node on all nodes"),
        Lint(
            _isolated,
            WARN,
            "this prevents CUDA IPC between the ranks of a node: use --gpus-per-node=N --gpu-bind=none instead of "
            "--gpus-per-task; hpcdist chooses by local rank",
        ),
        Lint(_sharing, WARN, "ranks take turns, and NCCL may refuse: start at most as many ranks as the node has GPUs"),
    )
    wrong = apply_lints(table, name, lints)
    gpus = ["one for each rank: " + ", ".join(row.facts.gpu.name for row in rows) for rows in table.nodes]
    return wrong or Check(name, OK, table.by_node(gpus))


def _without_gpu(rows: list[RankRow]) -> str:
    without = [row for row in rows if not row.facts.gpu.count]
    if not without:
        return ""
    return f"{len(without)} of {counted(len(rows), 'rank')} without a GPU: {without[0].facts.gpu.reason}"


def _isolated(rows: list[RankRow]) -> str:
    used = {row.facts.gpu.name for row in rows}
    least = min(rows, key=lambda row: row.facts.gpu.count).facts.gpu
    if least.count >= len(used):
        return ""
    cause = f"{VISIBLE_GPUS}={least.visible}" if least.visible is not None else "hidden by the system"
    return f"the ranks use {len(used)} GPUs, and see only {least.count} each ({cause})"


def _sharing(rows: list[RankRow]) -> str:
    ranks = Counter(row.facts.gpu.name for row in rows)
    shared = [gpu for gpu, count in ranks.items() if count > 1]
    return f"{counted(len(rows), 'rank')} on {counted(len(ranks), 'GPU')}" if shared else ""


def check_cores(table: RankTable, scheduler: str = "") -> Check:
    """Check that the ranks have disjoint cores, and as many as requested. ``table``: facts of all ranks.

    ``scheduler``: name of the scheduler, or "" if there is no scheduler.
    """
    name = "cores"
    of = {rows[0].node: machine for rows, machine in zip(table.nodes, table.machines, strict=True)}

    def core(row: RankRow) -> dict[int, int]:
        return {thread: threads[0] for threads in of[row.node].hardware_threads for thread in threads}

    lints = (
        Lint(
            _same_core,
            FAIL,
            "ranks take turns while cores are idle: hpcdist run --mpi-args '--bind-to none', or srun -c N "
            "--cpu-bind=cores",
        ),
        Lint(
            lambda rows: _crowded(rows, core(rows[0])),
            WARN,
            "ranks take turns: start at most as many ranks on a node as it has cores; if a task is one hardware "
            "thread, sbatch --threads-per-core=1",
        ),
        Lint(_overlapping, WARN, f"ranks take turns while cores are idle: {_BIND}"),
        Lint(
            lambda rows: _side_by_side(rows, core(rows[0])),
            WARN,
            "ranks slow each other down: sbatch --threads-per-core=1, with which --cpus-per-task counts cores",
        ),
        Lint(
            _cut,
            WARN,
            "srun does not take -c from sbatch: export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; Open MPI's mpirun: "
            "--map-by ppr:R:node:PE=N --bind-to core",
        ),
        Lint(_threads, WARN, f"threads take turns: export {THREADS}=$SLURM_CPUS_PER_TASK, or 1 as `hpcdist run` does"),
        Lint(lambda rows: _unbound(rows, core(rows[0])) if scheduler else "", WARN, f"ranks may move: {_BIND}"),
        Lint(
            lambda rows: _straddling(rows, of[rows[0].node].numa),
            WARN,
            "memory of another socket is slower: srun --cpu-bind=cores --distribution=block:block, Open MPI's "
            "mpirun: --map-by numa",
        ),
    )
    wrong = apply_lints(table, name, lints)
    return wrong or Check(name, OK, table.by_node([_own_cores(rows, core(rows[0])) for rows in table.nodes]))


def _union(rows: list[RankRow]) -> set[int]:
    return {core for row in rows for core in row.facts.cores}


def _physical(processors: Iterable[int], core: Mapping[int, int]) -> set[int]:
    return {core.get(processor, processor) for processor in processors}


def _same_core(rows: list[RankRow]) -> str:
    alone = Counter(row.facts.cores for row in rows if len(row.facts.cores) == 1)
    shared = sorted(cores[0] for cores, ranks in alone.items() if ranks > 1)
    if not shared or len(_union(rows)) < len(rows):  # fewer cores than ranks: no binding is better
        return ""
    cores = format_ranges(shared)
    return f"several ranks are bound to the same core ({cores}), although the job has {len(_union(rows))} cores"


def _crowded(rows: list[RankRow], core: Mapping[int, int]) -> str:
    processors = _union(rows)
    cores = len(_physical(processors, core))
    if len(rows) <= cores:
        return ""
    threads = f" ({len(processors)} hardware threads)" if len(processors) > cores else ""
    return f"{counted(len(rows), 'rank')} on {counted(cores, 'core')}{threads}"


def _overlapping(rows: list[RankRow]) -> str:
    owners = Counter(core for row in rows for core in row.facts.cores)
    shared = sorted(core for core, ranks in owners.items() if ranks > 1)
    if not shared or len({row.facts.cores for row in rows}) == 1:
        return ""
    return f"several of {len(rows)} ranks share cores {format_ranges(shared)} of {format_ranges(sorted(owners))}"


def _side_by_side(rows: list[RankRow], core: Mapping[int, int]) -> str:
    if len({row.facts.cores for row in rows}) == 1:
        return ""
    owners = Counter(first for row in rows for first in _physical(row.facts.cores, core))
    shared = sorted(first for first, ranks in owners.items() if ranks > 1)
    if not shared:
        return ""
    return f"several of {len(rows)} ranks are bound to hardware threads of the same cores ({format_ranges(shared)})"


def _unbound(rows: list[RankRow], core: Mapping[int, int]) -> str:
    if len(rows) == 1 or len({row.facts.cores for row in rows}) > 1:
        return ""
    cores = len(_physical(rows[0].facts.cores, core))
    return f"{len(rows)} ranks share all {counted(cores, 'core')} ({format_ranges(rows[0].facts.cores)}), none is bound"


def _cut(rows: list[RankRow]) -> str:
    short = [row for row in rows if row.facts.cores_asked is not None and len(row.facts.cores) < row.facts.cores_asked]
    if not short:
        return ""
    least = min(short, key=lambda row: len(row.facts.cores)).facts
    return (
        f"a rank may use {counted(len(least.cores), 'core')}, and {least.cores_asked} were asked for (--cpus-per-task)"
    )


def _threads(rows: list[RankRow]) -> str:
    settings = [row.facts.threads for row in rows]
    counts = [
        int(text) if text and text.isascii() and text.isdigit() else len(row.facts.cores)
        for text, row in zip(settings, rows, strict=True)
    ]
    setting = f"{THREADS}={settings[0]}" if settings[0] else f"{THREADS} is unset"
    for count, row in zip(counts, rows, strict=True):
        if count > len(row.facts.cores):
            return f"{counted(count, 'thread')} on {counted(len(row.facts.cores), 'core')} of a rank ({setting})"
    cores = len(_union(rows))
    if sum(counts) > cores and len(rows) > 1:
        return f"{sum(counts)} threads of {counted(len(rows), 'rank')} on {counted(cores, 'core')} ({setting})"
    return ""


def _straddling(rows: list[RankRow], domains: Sequence[Sequence[int]]) -> str:
    if len(domains) < 2:
        return ""
    sets = [set(domain) for domain in domains]
    across = [row for row in rows if sum(bool(cores & set(row.facts.cores)) for cores in sets) > 1]
    avoidable = [row for row in across if any(len(row.facts.cores) <= len(cores) for cores in sets)]
    if not avoidable or len(across) == len(rows):
        return ""
    first = format_ranges(avoidable[0].facts.cores)
    return f"{len(avoidable)} of {len(rows)} ranks lie across memory domains (cores {first}), the others in one"


def _own_cores(rows: list[RankRow], core: Mapping[int, int]) -> str:
    sets = {row.facts.cores for row in rows}
    threads = rows[0].facts.threads
    thread_setting = f"; {THREADS}={threads}" if threads else ""
    if len(sets) == 1:
        shared = ", which they share" if len(rows) > 1 else ""
        return f"{counted(len(rows), 'rank')} on all of {format_ranges(rows[0].facts.cores)}{shared}{thread_setting}"
    counts = sorted({len(_physical(cores, core)) for cores in sets})
    cores_each = counted(counts[0], "core") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} cores"
    texts = [format_ranges(row.facts.cores) for row in rows]
    return (
        f"{cores_each} each: {' | '.join(texts[:MOST_SHOWN])}{' | ...' if len(texts) > MOST_SHOWN else ''}"
        f"{thread_setting}"
    )
