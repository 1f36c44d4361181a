"""Which run a recipe describes, whatever it is made with. Light: imports nothing that starts MPI or reads files."""

import hashlib
from collections.abc import Sequence
from typing import Final

from hpcdist.training import recipe as recipes
from hpcdist.training.config import written
from hpcdist.training.recipe import Recipe

# What a run is made with, not what it is: a run may go on with other values, in another layout, on other machines.
OPERATIONAL: Final = (
    *("parallel.", "parameter_server.", "zero.", "decentralised.", "communication."),
    *("checkpoint.", "energy.", "telemetry.", "chaos.", "survival."),
    "precision.",  # no bit of the state is rounded: see `contradictions`
)
OPERATIONAL_KEYS: Final = (
    "run.steps",
    "data.digest",
    "data.shares",
    "data.staged",
    "run.device",
    "run.logical_shards",
    "run.sentinel_every_steps",
    "run.suspicious_factor",
    "run.recompute_every_steps",
    "run.noise_scale_every_steps",
    "run.log_every_s",
)


def operational(key: str) -> bool:
    """Whether a run may go on with another value of ``key`` (local)."""
    return key.startswith(OPERATIONAL) or key in OPERATIONAL_KEYS


def differences(stored: Recipe, recipe: Recipe) -> dict[str, str]:
    """Return, for each key in which the ``stored`` recipe differs, both values as text; none when it is the same run.

    A recipe of an older version lacks keys: they had their defaults.
    """
    before, now = recipes.flat(stored), recipes.flat(recipe)
    return {
        key: f"{key} = {written(before[key])} there, {written(value)} now"
        for key, value in now.items()
        if before[key] != value
    }


def contradictions(stored: Recipe, recipe: Recipe) -> list[str]:
    """Return what makes ``recipe`` another run than the ``stored`` one, as texts; none where it may go on with that."""
    rounded = stored.precision.computes != recipe.precision.computes
    return [
        text
        for key, text in differences(stored, recipe).items()
        if not operational(key) or (rounded and key == "precision.mode")
    ]


def begin_from(run_dir: object, contradictions: Sequence[str]) -> str:
    """Return how another run begins with the parameters of this one, "" where its model is another (local)."""
    if any(text.startswith("model.") for text in contradictions):
        return ""
    return f"; to begin another run with its parameters: --out OTHER --init-from {run_dir}"


def run_id(recipe: Recipe) -> str:
    """Return a short name for the run of ``recipe``: the same for all recipes that it may go on with."""
    kept = {key: value for key, value in recipes.flat(recipe).items() if not operational(key)}
    kept["precision.mode"] = recipe.precision.computes
    return hashlib.blake2b(repr(sorted(kept.items())).encode(), digest_size=4).hexdigest()
