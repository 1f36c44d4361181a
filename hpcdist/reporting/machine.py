"""CPU model, load average and package versions of this machine."""

import importlib.metadata
import math
import os
import platform
from pathlib import Path


def processor() -> str:
    """Return the model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []  # not Linux
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float:
    """Return the load average of the last minute, or NaN if the system does not report a load average."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return math.nan


def package_version(package: str, absent: str = "") -> str:
    """Return the version of the Python package ``package`` as text, or ``absent`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return absent
