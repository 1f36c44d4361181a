"""Conversion to JSON values: records become objects, paths and enums texts, and non-finite numbers null."""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any


def json_number(value: float) -> float | None:
    """Return ``value`` as a float, or None (JSON null) if ``value`` is not finite."""
    return float(value) if math.isfinite(value) else None


def jsonable(value: Any) -> Any:
    """Return ``value``, which may nest dataclasses, mappings and sequences, as an object that `json.dumps` accepts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: jsonable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, PurePath | Enum):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_number(value: Any) -> Any:
    """Return the numpy scalar ``value`` as a Python number, or any other ``value`` unchanged."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0 else value
