"""Tests that need a GPU: each skips, with the reason, where cupy or a GPU is missing."""

from types import ModuleType

import pytest

from hpcdist.arrays.gpu import device
from hpcdist.errors import MissingCapabilityError


@pytest.fixture(autouse=True)
def cupy() -> ModuleType:
    """The real cupy, with a GPU made current."""
    try:
        device.choose(0)
    except MissingCapabilityError as error:
        pytest.skip(str(error))
    return device.cupy()
