"""What unit tests share: a double of cupy in the place of the real one."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpcdist.arrays import device

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))  # tests are no package: this is how they share code

import cupy_double


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The double: `run.device = "gpu"` works on this machine, and ``gpu.LOG`` has every transfer and wait."""
    made = cupy_double.module()
    monkeypatch.setattr(device, "cupy", lambda: made)
    cupy_double.LOG.clear()
    return cupy_double
