"""A sweep as it was when it was submitted: one file that needs no other, and that no other file changes.

Variables (``HPCDIST_SET__...``) count above it, as above any base recipe: a job that reads it unsets them.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from hpcdist.bench.sweep import Trial

_SECTION: Final = re.compile(r"\[(\w+)\]", re.ASCII)


def text(trials: Sequence[Trial], repeats: int) -> str:
    """Return a sweep file that expands into ``trials``: the same ids, names and order.

    What all trials have in common is its recipe, with every key; each trial has its others.
    """
    keys = {trial.id: _keys(trial.recipe) for trial in trials}
    first = keys[trials[0].id]
    common = {key: value for key, value in first.items() if all(of.get(key) == value for of in keys.values())}
    lines = ["[sweep]", f"repeats = {repeats}"]
    for section, names in itertools.groupby(common, lambda key: key.partition(".")[0]):
        lines += ["", f"[recipe.{section}]", *(f"{key.partition('.')[2]} = {common[key]}" for key in names)]
    for name, of_name in itertools.groupby(trials, lambda trial: trial.name):
        alike = list(of_name)  # one configuration on several numbers of ranks
        own = [f"{key} = {value}" for key, value in keys[alike[0].id].items() if key not in common]
        lines += ["", "[[trial]]", f"name = {_quoted(name)}", f"ranks = {[trial.ranks for trial in alike]}", *own]
    return "\n".join(lines) + "\n"


def _keys(recipe: str) -> Mapping[str, str]:
    """Return the values of a resolved recipe by key, as TOML: it has one key on a line."""
    found: dict[str, str] = {}
    section = ""
    for line in recipe.split("\n"):
        head = _SECTION.fullmatch(line)
        section = head[1] if head else section
        name, equals, value = line.partition(" = ")
        if equals and not head:
            found[f"{section}.{name}"] = value
    return found


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")
