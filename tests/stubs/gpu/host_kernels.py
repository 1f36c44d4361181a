"""Numpy memory passed to GPU kernels, so that a test of a loop also tests the corresponding kernel."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpcdist.arrays.gpu import device, kernels
from stubs.gpu import cupy_double


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let ``modules`` treat every array as a GPU array, and let kernels accept numpy memory."""
    passed, made = kernels._kernel_argument, cupy_double.module()

    def shown(name: str, arg: Any, real: Any) -> Any:
        return passed(name, cupy_double._device(arg) if isinstance(arg, np.ndarray) else arg, real)

    for module in modules:
        monkeypatch.setattr(module, "is_device", lambda array: True)
    monkeypatch.setattr(kernels, "_kernel_argument", shown)
    monkeypatch.setattr(device, "cupy", lambda: made)
