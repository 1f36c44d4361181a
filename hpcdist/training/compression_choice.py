"""What gradients are compressed by, and where that comes from: the recipe, the checkpoint, or a measurement."""

from typing import Final

from hpcdist.strategies.compressed.autoselect import NONE, CompressionDecision, decide
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.zero.config import STAGES
from hpcdist.training.origin import Origin
from hpcdist.training.recipe import Recipe
from hpcdist.training.selection import AUTO, is_off

HALVED: Final = tuple(STAGES)  # strategies whose gradients are summed to their owners, and no further


def resolve(seat: RankContext, recipe: Recipe, origin: Origin | None) -> CompressionDecision:
    """Return the choice of a run, the same on all ranks. Collective over the world.

    A run that goes on with as many ranks keeps that of its checkpoint: it would not have the same bits otherwise.
    """
    asked = recipe.communication.compression
    if asked != AUTO:
        return CompressionDecision(asked, "recipe")
    kept = _kept(seat, recipe, origin)
    if kept is not None:
        return CompressionDecision(kept, "checkpoint")
    if is_off(seat.world):
        return CompressionDecision(NONE, "default", note="not measured")
    halved = recipe.parallel.strategy in HALVED
    return decide(seat, recipe.compression, recipe.run.seed, halved=halved)


def _kept(seat: RankContext, recipe: Recipe, origin: Origin | None) -> str | None:
    """Return what the checkpoint says, where it fits (local)."""
    if origin is None or origin.scalars.get("world") != seat.world.size:
        return None
    name = origin.scalars.get("compression")
    return str(name) if name in (NONE, *recipe.compression.candidates) else None
