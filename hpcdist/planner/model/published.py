"""Published transformers by name: the table ``models.toml`` with the shape, source and parameters of each.

Light: `names` also completes the option ``--model`` in a shell.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Final

from hpcdist.errors import ConfigurationError
from hpcdist.planner.model.description import TransformerShape

ABOUT: Final = ("source", "printed", "but")  # keys that are no numbers of a shape


def names() -> tuple[str, ...]:
    """Return the names, in the order of the table (local)."""
    return tuple(_table())


def named(name: str) -> TransformerShape:
    """Return the shape of the model called ``name``, in any case (local).

    Raises ConfigurationError for one that is not there, with the nearest.
    """
    entry = _entry(name)
    return TransformerShape(**{key: value for key, value in entry.items() if key not in ABOUT})


def about(name: str) -> str:
    """Return where the numbers of ``name`` are from, how many parameters are printed there, and what differs (local).

    Raises ConfigurationError as `named` does.
    """
    entry = _entry(name)
    differs = f"; but: {entry['but']}" if "but" in entry else ""
    return f"{entry['source']}: {entry['printed']} parameters{differs}"


def printed(name: str) -> tuple[float, int]:
    """Return the parameters that the source of ``name`` prints, and how many digits of them (local)."""
    text = _entry(name)["printed"]
    digits = text[:-1]
    return float(digits) * {"M": 1e6, "B": 1e9, "T": 1e12}[text[-1]], len(digits.replace(".", ""))


def _entry(name: str) -> Mapping[str, Any]:
    table = _table()
    found = name.lower()
    if found not in table:
        near = get_close_matches(found, table, n=3, cutoff=0.5)
        hint = f"the nearest names are {' and '.join(near)}" if near else f"choose one of {', '.join(table)}"
        raise ConfigurationError(
            f"there is no model called {name!r}; {hint}, or give its numbers (layers, hidden, heads, ...)"
        )
    return table[found]


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    text = files("hpcdist.planner").joinpath("models.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = tomllib.loads(text)
    known = {item.name for item in fields(TransformerShape)} | set(ABOUT)
    for name, entry in table.items():
        unknown = set(entry) - known
        assert not unknown, f"models.toml: {name} has unknown keys {sorted(unknown)}"
    return table
