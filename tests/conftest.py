"""Shared by all tests: fresh random inputs from a seed that every failure shows."""

import os
import secrets
import zlib

import hypothesis
import numpy as np
import pytest

SEED_VARIABLE = "HPCDIST_TEST_SEED"

# One seed for all ranks and for the suites that a test starts; CI sets it, so that a run can be repeated.
_fixed = SEED_VARIABLE in os.environ
SEED = int(os.environ.setdefault(SEED_VARIABLE, str(secrets.randbits(32))))

hypothesis.settings.register_profile("hpcdist", deadline=None, derandomize=_fixed, print_blob=True)
hypothesis.settings.load_profile("hpcdist")


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: {SEED_VARIABLE}={SEED}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test."""
    print(f"repeat with {SEED_VARIABLE}={SEED}")  # shown with a failure
    return np.random.Generator(np.random.Philox(key=[SEED, zlib.crc32(request.node.nodeid.encode())]))
