"""Values as JSON has them: records are objects, paths and names texts, and what is not finite is null."""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any


def json_number(value: float) -> float | None:
    """Return ``value`` as a JSON number; None, which is null, for what is not finite."""
    return float(value) if math.isfinite(value) else None


def jsonable(value: Any) -> Any:
    """Return ``value``, also of dataclasses, mappings and sequences in one another, as `json.dumps` takes it."""
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
    """Return ``value`` as a number of Python if it is a scalar of numpy, else unchanged."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0 else value
