"""`hpcdist warmup`: compile once what every rank of every job would otherwise compile at its first step."""

import os
import time
from pathlib import Path
from typing import Final

import click

PACKAGES: Final = ("arrays", "collectives", "models", "optim", "strategies", "training.data")  # those with kernels


@click.command("warmup")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of compiled kernels; jobs find it through NUMBA_CACHE_DIR.  [default: that of this user and node]",
)
def command(cache: Path | None) -> None:
    """Compile the kernels into a cache, for this processor and this version of hpcdist.

    Whoever may write into the cache may run code in the jobs that load it: a site's cache belongs to the administrator.
    """
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        os.environ["NUMBA_CACHE_DIR"] = str(cache.resolve())
    from hpcdist.arrays import jit

    began = time.perf_counter()
    _import_kernels()
    names = jit.warm()
    click.echo(f"{len(names)} kernels in {jit.cache_directory()} ({time.perf_counter() - began:.1f} s)")
    if cache is not None:
        click.echo(f"use them with: export NUMBA_CACHE_DIR={cache.resolve()}")


def _import_kernels() -> None:
    """Import every module of the floors that hold kernels: they register themselves with `arrays.jit`."""
    import importlib
    import pkgutil

    import hpcdist

    for package in PACKAGES:
        path = [str(Path(folder, *package.split("."))) for folder in hpcdist.__path__]
        for module in pkgutil.walk_packages(path, f"hpcdist.{package}."):
            importlib.import_module(module.name)
