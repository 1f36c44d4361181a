"""What a comparison of exchanges measures: each contender on the same model, data and batch, calm and with stragglers.

Trials are those of a sweep (`hpcdist.bench.sweep`), and so are their results: one contender in one scenario is one
configuration, whose name is the two.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.bench.sweep import Recipes, Trial
from hpcdist.errors import HpcdistError

CALM: Final = "calm"
STRAGGLERS: Final = "stragglers"
_BETWEEN: Final = " | "


@dataclass(frozen=True)
class Wanted:
    """``contenders`` by name, on so many ``ranks``, with what is ``common`` to all; ``scenarios`` set the rest."""

    ranks: int
    common: Mapping[str, Any]
    contenders: Mapping[str, Mapping[str, Any]]
    scenarios: Mapping[str, Mapping[str, Any]]


def expand(wanted: Wanted, recipes: Recipes) -> tuple[list[Trial], dict[str, str]]:
    """Return the trials, contender by contender, and why others are left out, by name (local)."""
    trials: list[Trial] = []
    left_out: dict[str, str] = {}
    for contender, own in wanted.contenders.items():
        found = []
        try:
            for scenario, chaos in wanted.scenarios.items():
                settings = {**wanted.common, **own, **chaos}
                found.append(_trial(contender + _BETWEEN + scenario, wanted.ranks, settings, recipes))
        except HpcdistError as error:
            left_out[contender] = str(error)
        else:
            trials += found
    return trials, left_out


def _trial(name: str, ranks: int, settings: Mapping[str, Any], recipes: Recipes) -> Trial:
    text = recipes.resolve(settings, ranks).text
    digest = hashlib.blake2b(f"{ranks}\n{text}".encode(), digest_size=6).hexdigest()
    return Trial(digest, name, ranks, settings, text)


def parts_of(name: str) -> tuple[str, str]:
    """Return contender and scenario of a trial of this name (local)."""
    contender, _, scenario = name.partition(_BETWEEN)
    return contender, scenario


def stragglers(ranks: Sequence[int], factor: float, probability: float) -> dict[str, Any]:
    """Return the settings of the scenario with ``ranks`` that are slow (local)."""
    chaos = {"slow_ranks": list(ranks), "slow_factor": factor, "slow_probability": probability}
    return {f"chaos.{key}": value for key, value in chaos.items()}
