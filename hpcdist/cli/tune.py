"""Fill caches for later trainings: `hpcdist tune` (fastest allreduce) and `hpcdist warmup` (compiled kernels)."""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hpcdist.cli.common import BYTE_SIZE, COUNT, DIRECTORY, json_option
from hpcdist.reporting.units import counted

if TYPE_CHECKING:  # late at run time: --help must not load numpy
    from hpcdist.collectives.tuning_cache import Tuning
    from hpcdist.comm.start import Session


MOST_JOBS: Final = 8
KERNEL_PACKAGES: Final = ("arrays", "collectives", "models", "optim", "strategies", "training.data")


@click.command()
@click.option(
    "--max-bytes",
    type=BYTE_SIZE,
    default="4M",
    help="Largest buffer to measure: at least the bytes of the gradients, or communication.bucket_bytes; with "
    "--sharded the gradient bytes of a layer, rounded up to a power of two.",
)
@click.option(
    "--dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Element type of the gradients."
)
@click.option(
    "--buffer",
    type=click.Choice(["shared", "host", "device"]),
    default="shared",
    help="Memory of the buffers: shared (memory of the node, as `train` on CPUs uses), host or device (GPU).",
)
@click.option("--sharded", is_flag=True, help="Tune reduce-scatter and all-gather instead of allreduce (zero1-3).")
@click.option(
    "--budget-s", type=click.FloatRange(min=0.01), help="Time budget of the measurement in s.  [default: as in `train`]"
)
@click.option("--ranks-per-node", type=COUNT, help="Number of consecutive ranks to treat as one node.")
@click.option("--no-cache", is_flag=True, help="Measure, but do not store the result.")
@click.option("--show", is_flag=True, help="Print the stored results; measure nothing.")
@click.option("--clear", is_flag=True, help="Remove all stored results.")
@json_option
def tune(show: bool, clear: bool, as_json: bool, **measured: Any) -> None:
    """Time the algorithms from which communication.algorithm = "auto" chooses, on all ranks of the launcher.

    `hpcdist train` also does so when it starts, unless a result is stored for its ranks, nodes and buffer sizes.
    `hpcdist tune` replaces a stored result. It prints the predicted and measured times in us for each buffer size, and
    the chosen value of communication.algorithm.
    """
    if show and clear:
        raise click.UsageError("--show and --clear exclude each other; choose one")
    if show or clear:
        _show_cache(clear, as_json)
    else:
        _measure(as_json, **measured)


def _show_cache(clear: bool, as_json: bool) -> None:
    from hpcdist.collectives import tuning_cache
    from hpcdist.comm.launch.environment import launch_environment

    launched = launch_environment()
    if launched is not None and launched.rank:
        return
    if clear:
        count = tuning_cache.clear()
        click.echo(json.dumps({"removed": count}) if as_json else f"{count} files removed")
        return
    contents: dict[Path, dict[str, Any]] = {}
    for path in sorted(tuning_cache.directory().glob("*.json")):
        try:
            key, tuning = tuning_cache.load(path)
            contents[path] = tuning_cache.content_of(tuning, key)
        except (OSError, ValueError) as error:
            contents[path] = {"error": str(error)}
    if as_json:
        click.echo(json.dumps({str(path): content for path, content in contents.items()}))
        return
    for path, content in contents.items():
        click.echo(path)
        if "error" in content:
            click.echo(f"  not used: {content['error']}")
            continue
        about = {name: value for name, value in content["key"].items() if value}
        click.echo("".join(f"  {name}: {value}\n" for name, value in about.items()), nl=False)
        click.echo(f"  chosen on {content['created_utc']}: {content['text']}")
    click.echo(f"{len(contents)} in {tuning_cache.directory()}")


def _measure(
    as_json: bool,
    max_bytes: int,
    dtype: str,
    buffer: str,
    sharded: bool,
    budget_s: float | None,
    ranks_per_node: int | None,
    no_cache: bool,
) -> None:
    import numpy as np

    from hpcdist.collectives import autotune
    from hpcdist.collectives.node import shared_memory
    from hpcdist.comm.start import start
    from hpcdist.errors import OK

    session = start("gpu" if buffer == "device" else "cpu", ranks_per_node)
    kind = np.dtype(dtype)
    request = autotune.TuningRequest(
        max_bytes=max_bytes,
        dtype=kind,
        kind=autotune.SHARDED_KIND if sharded else autotune.ALLREDUCE_KIND,
        buffer=buffer,
        allocate=(lambda size: shared_memory.allocate(session.comm, size, kind)) if buffer == "shared" else None,
        budget_s=budget_s or autotune.BUDGET_S,
    )
    comm = session.comm
    tuning = autotune.select(comm, comm, request, session.library, cached=not no_cache, renewed=True)
    if comm.rank == 0:
        click.echo(json.dumps(_as_json(tuning, session)) if as_json else _table(tuning, session))
    session.leave(OK)


def _as_json(tuning: "Tuning", session: "Session") -> dict[str, Any]:
    from hpcdist.collectives import tuning_cache

    content = tuning_cache.content_of(tuning, {})
    del content["key"]
    return {**content, "ranks": session.comm.size, "mpi_library": session.library, "note": tuning.note or None}


def _table(tuning: "Tuning", session: "Session") -> str:
    lines = [f"{counted(session.comm.size, 'rank')} on {counted(session.place.nodes, 'node')}; {session.library}"]
    if tuning.machine is not None:
        for name, link in tuning.machine.links.items():
            lines.append(f"link {name}: {link.latency_s * 1e6:.1f} us and {_rate(link.s_per_byte)}")
        lines.append(f"sums: {_rate(tuning.machine.reduce_s_per_byte)}")
    for row in tuning.rows:
        lines.append(f"{row.nbytes} bytes                  measured   predicted us")
        for name in sorted(row.measured, key=row.measured.__getitem__):
            predicted = f"{row.predicted[name] * 1e6:11.1f}" if name in row.predicted else f"{'-':>11}"
            star = "*" if name == row.chosen else " "
            lines.append(f"  {star} {name:22s}{row.measured[name] * 1e6:11.1f} {predicted}")
    lines.append(f"communication.algorithm = {tuning.text!r} ({tuning.source} in {tuning.seconds:.2f} s)")
    return "\n".join([*lines, tuning.note] if tuning.note else lines)


def _rate(s_per_byte: float) -> str:
    return f"{1e-9 / s_per_byte:.2f} GB/s" if s_per_byte else "too fast to measure"


@click.command("warmup")
@click.option(
    "--cache",
    type=DIRECTORY,
    help="Directory for compiled kernels; jobs find it by NUMBA_CACHE_DIR.  [default: this user's cache on this node]",
)
@click.option("--jobs", type=COUNT, help="Number of compiling processes.  [default: one per core, at most 8]")
def warmup(cache: Path | None, jobs: int | None) -> None:
    """Compile the CPU kernels into a cache, for this processor and this version of hpcdist.

    Anyone who can write to a cache can run code in the jobs that load it. Only an administrator should share a cache.
    """
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        os.environ["NUMBA_CACHE_DIR"] = str(cache.resolve())
    from hpcdist.arrays import jit

    began = time.perf_counter()
    _import_kernels()
    jit.prepare_cache()  # before the fork, so that all processes use one cache
    _compile(jobs or min(MOST_JOBS, len(os.sched_getaffinity(0))))
    click.echo(f"{jit.count()} kernels in {jit.cache_directory()} ({time.perf_counter() - began:.1f} s)")
    if cache is not None:
        click.echo(f"use them with: export NUMBA_CACHE_DIR={cache.resolve()}")


def _compile(jobs: int) -> None:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed

    from tqdm import tqdm

    from hpcdist.arrays import jit
    from hpcdist.errors import HpcdistError

    count, fork = jit.count(), multiprocessing.get_context("fork")  # children inherit the registered kernels
    with ProcessPoolExecutor(jobs, fork) as pool, tqdm(total=count, unit="kernel", disable=None) as bar:
        for compiled in as_completed([pool.submit(_compile_kernel, number, count) for number in range(count)]):
            if (error := compiled.exception()) is not None:
                raise HpcdistError(
                    f"numba failed to compile a kernel ({type(error).__name__}: {error}); reinstall numba"
                ) from error
            bar.update()


def _compile_kernel(number: int, count: int) -> None:
    from hpcdist.arrays import jit

    for _ in jit.warm(number, count):
        pass


def _import_kernels() -> None:
    import importlib
    import pkgutil

    import hpcdist

    for package in KERNEL_PACKAGES:
        path = [str(Path(folder, *package.split("."))) for folder in hpcdist.__path__]
        for module in pkgutil.walk_packages(path, f"hpcdist.{package}."):
            importlib.import_module(module.name)  # registers its kernels with `arrays.jit`
