"""Values as TOML writes them; `hpcdist.reporting.regular` reads them."""

import json
from collections.abc import Mapping
from typing import Any

from hpcdist.errors import ConfigurationError


def toml_value(value: Any) -> str:
    """Return ``value``, a number, text, truth value, sequence or mapping, as it is written in TOML.

    Raises ConfigurationError for text that is not Unicode.
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_value(name)} = {toml_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)  # inf, nan and exponents are written alike in both languages
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{value!r} is not valid Unicode; rename the file or directory") from None
    # A TOML basic string is a JSON string in which DEL must be escaped too.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return a line for each key of ``values``."""
    return [f"{name} = {toml_value(value)}" for name, value in values.items()]
