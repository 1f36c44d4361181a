"""Formatting of values as TOML. `hpcdist.reporting.regular` reads TOML."""

import json
from collections.abc import Mapping
from typing import Any

from hpcdist.errors import ConfigurationError


def toml_value(value: Any) -> str:
    """Return a number, text, bool, sequence or mapping as TOML text. Raises ConfigurationError for invalid Unicode."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_value(name)} = {toml_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf, nan and exponents have the same form in both languages
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the path {value!r} is not valid Unicode; rename the file or directory") from None
    # A TOML basic string is a JSON string in which DEL is escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return one line ``key = value`` for each entry of ``values``."""
    return [f"{name} = {toml_value(value)}" for name, value in values.items()]
