"""Model of a recipe: with its adapters, and with its frozen tensors."""

from collections.abc import Iterable, Mapping

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.convert.adapters import is_adapter
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.errors import ConfigurationError
from hpcdist.models.frozen import FrozenStage, freeze
from hpcdist.models.model import Model
from hpcdist.optim import kernels
from hpcdist.strategies.core.exchange import pieces_of
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.sharded_update import counted
from hpcdist.training.recipe.recipe import Recipe


def build_model(recipe: Recipe, dtype: str, inputs: Mapping[str, int]) -> Model:
    """Build the model of the sections [model] and [lora]. ``inputs``: the sizes of the data, as for `models.build`."""
    model = models.build(recipe.model, dtype, **inputs)
    if not recipe.lora.rank:
        return model
    from hpcdist.models.transformer import with_adapters

    return with_adapters(model, recipe.lora)


def frozen_model(recipe: Recipe, model: Model) -> Model:
    """Return a copy of this rank's ``model`` with frozen tensors as the recipe says. Local.

    A group of ``optimizer.groups`` says so with ``frozen``. With adapters, all other tensors are frozen by default.
    Raises ConfigurationError for a group with ``frozen=1`` that matches no tensor.
    """
    keys = [segment.key for segment in model.layout.segments]
    for text, group in zip(recipe.optimizer.groups, recipe.optimizer.parsed_groups, strict=True):
        if group.frozen and not any(map(group.has, keys)):
            raise ConfigurationError(
                f"the group {text!r} in optimizer.groups freezes no tensor; use names such as {', '.join(keys[:4])}"
            )
    frozen_by_default = recipe.lora.rank > 0
    return freeze(
        model,
        lambda key: recipe.optimizer.freezes(key, frozen_by_default and not is_adapter(key)),
    )


def frozen_stages(context: RankContext) -> list[FrozenStage]:
    """Return the stages of this rank that have frozen tensors. Local."""
    units = context.computed_units if context.computes else ()
    return [stage for unit in units if isinstance(stage := context.model.stages[unit], FrozenStage)]


def hold_frozen(context: RankContext, ledger: Ledger | None) -> None:
    """Allocate the frozen tensors of this rank. Local."""
    for stage in frozen_stages(context):
        stage.hold(context.model.dtype, context.on, ledger)


def round_frozen(context: RankContext) -> None:
    """Round the frozen tensors to the type in which the strategy keeps the trained parameters. Local."""
    if context.working is None or context.working == context.model.dtype:
        return
    for store in _stores(frozen_stages(context)):
        working = backend.empty(store.size, np.dtype(context.working), context.on)
        kernels.round_into(store.array, working)
        kernels.widen(working, store.array)


def frozen_pieces(context: RankContext, *, saved: bool) -> list[Piece]:
    """Return the pieces of the frozen tensors that this rank reads, or saves if ``saved`` is True. Local."""
    stages = frozen_stages(context)
    if not saved:
        return [piece for store in _stores(stages) for piece in pieces_of({PARAMETERS: store}, store.parts)]
    pieces, data = list[Piece](), context.data
    for store in (stage.store for stage in stages):
        assert store is not None
        shares = [
            split(part.size, data.size, store.dtype.itemsize)[data.rank].shift(part.start) for part in store.parts
        ]
        pieces += pieces_of({PARAMETERS: store}, counted(store.layout, shares, context.tensor))
    return pieces


def _stores(stages: Iterable[FrozenStage]) -> list[FlatStore]:
    return list({id(store): store for stage in stages for store in stage.stores()}.values())
