"""What unit tests share: a double of cupy in the place of the real one."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpcdist.arrays import device

DOUBLE = Path(__file__).parents[1] / "doubles" / "cupy_double.py"


def _load() -> ModuleType:
    name = "hpcdist_cupy_double"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, DOUBLE)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The double: `run.device = "gpu"` works on this machine, and ``gpu.LOG`` has every transfer and wait."""
    double = _load()
    made = double.module()
    monkeypatch.setattr(device, "cupy", lambda: made)
    double.LOG.clear()
    return double
