"""Tests that need a GPU: each skips, with the reason, where cupy or a GPU is missing."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness import jobs
from harness.jobs import figures
from hpcdist.arrays.gpu import device
from hpcdist.comm.launch import mpirun
from hpcdist.errors import MissingCapabilityError


@pytest.fixture(autouse=True)
def cupy() -> ModuleType:
    """The real cupy, after a GPU was made current."""
    try:
        device.choose(0)
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    return device.cupy()


@pytest.fixture
def job() -> Callable[..., Any]:
    """``job(program, ranks, *words, **variables)``: run a program as a job and return the output of rank 0."""

    def run(program: Path, ranks: int, *words: str, **variables: str) -> Any:
        try:
            launcher = mpirun.find()
        except MissingCapabilityError as error:
            pytest.skip(str(error))
        environment = os.environ | mpirun.settings(launcher) | variables
        line = mpirun.command(launcher, ranks, [sys.executable, str(program), *words], variables)
        return figures(jobs.run(line, env=environment))

    return run
