"""Tests that need a GPU: each skips, with the reason, where cupy or a GPU is missing."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpcdist.arrays.gpu import device
from hpcdist.errors import MissingCapabilityError

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))  # tests are no package: this is how they share code


@pytest.fixture(autouse=True)
def cupy() -> ModuleType:
    """The real cupy, with a GPU made current."""
    try:
        device.choose(0)
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    return device.cupy()
