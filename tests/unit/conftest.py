"""Fixtures of unit tests: a double of cupy in the place of the real cupy."""

import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from hpcdist.arrays.gpu import device, graphs
from hpcdist.collectives import peer_memory
from hpcdist.comm.failure import failfast
from stubs.gpu import cupy_double


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The double: `run.device = "gpu"` works on this machine, and ``gpu.LOG`` records every transfer and wait."""
    made = cupy_double.module()
    monkeypatch.setattr(device, "cupy", lambda: made)
    monkeypatch.setattr(graphs, "Cublas", cupy_double.Cublas)
    monkeypatch.setattr(
        peer_memory, "process_identity", lambda: threading.current_thread().name
    )  # each rank is a process of its own
    cupy_double.LOG.clear()
    return cupy_double


@pytest.fixture(autouse=True)
def hooks() -> Iterator[None]:
    """Remove the failure hooks that a job installs in this process, so that the next test starts without them."""
    yield
    failfast.uninstall()
