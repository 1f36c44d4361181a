"""The model of one rank of the context axis: whole layers, for its own tokens of each sample.

`cut_context` replaces what depends on places in a sample: learned and rotary positions, dropout, attention, and how
often a sample chose each expert. All else acts on each token by itself and stays as it is.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from hpcdist.adapters.torch.attention import SampleCut
from hpcdist.adapters.torch.loss import TorchLoss
from hpcdist.adapters.torch.stage import TorchStage
from hpcdist.arrays.backend import Array, is_device
from hpcdist.errors import ConfigurationError
from hpcdist.models.attention.tiles import Pieces
from hpcdist.models.experts.mixture import LocalExperts, WholeSamples
from hpcdist.models.layers.dropout import LocalDropout, mask
from hpcdist.models.layers.embedding import LocalPositions, rotary_table, turn, turn_in_documents
from hpcdist.models.layers.linear import add_to_rows, column_sums
from hpcdist.models.model import Model
from hpcdist.models.stage import AttentionOperation, Gradients, Parameters, Saved
from hpcdist.models.transformer import TokenEmbedding
from hpcdist.strategies.context.all_to_all import AllToAllAttention
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.context.ring import RingAttention


class PiecePositions:
    """Learned positions of the own tokens. The gradient of the table is that of its own rows, others are zero."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        """Add the rows of the own places to y (batch, own tokens, hidden), in place; return y."""
        assert context == self._axis.tokens
        if saved.documents is not None:
            return LocalPositions().forward(parameters, prefix, y, context, saved)
        rows = self._axis.rows(parameters[f"{prefix}.weight"])
        add_to_rows(y.reshape(y.shape[0], -1), rows.reshape(-1))
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        """Add dy (batch, own tokens, hidden), summed over samples, to the own rows of the table's gradient."""
        if saved.documents is not None:
            LocalPositions().backward(gradients, prefix, dy, saved)
            return
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        sums = saved.scratch("tokens.sums", dy.shape[1:], into.dtype)
        column_sums(dy.reshape(dy.shape[0], -1), sums.reshape(-1), False)
        for start, end, place in self._axis.own:
            into[place : place + end - start] += sums[start:end]


class PieceRotary:
    """Rotary positions of the own tokens."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis
        self._tables: dict[object, Array] = {}

    def forward(self, x: Array, head_size: int, rotated: int, saved: Saved) -> Array:
        """Turn columns [0, rotated) of x (batch, own tokens, columns), in place; return x."""
        if saved.documents is not None:
            return turn_in_documents(x, head_size, rotated, saved.documents, 1)
        return turn(x, rotated, self._table(head_size, x), 1)

    def backward(self, dx: Array, head_size: int, rotated: int, saved: Saved) -> Array:
        """Turn columns [0, rotated) of the gradient back, in place; return it."""
        if saved.documents is not None:
            return turn_in_documents(dx, head_size, rotated, saved.documents, -1)
        return turn(dx, rotated, self._table(head_size, dx), -1)

    def _table(self, head_size: int, like: Array) -> Array:
        key = head_size, like.dtype, is_device(like)
        if key not in self._tables:
            self._tables[key] = self._axis.rows(rotary_table(self._axis.context, head_size, like))
        return self._tables[key]


class PieceDropout(LocalDropout):
    """Dropout of the own tokens: what the whole samples would drop of them."""

    def __init__(self, pieces: Pieces, context: int) -> None:
        self._pieces, self._context = pieces, context

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return x (batch, own tokens, columns), which is overwritten."""
        dropped = mask(saved, rate, site, rows_per_sample=self._context, columns=x.shape[-1])
        if dropped is not None and x.size:
            for start, end, place in self._pieces:
                dropped.drop(x, start, end, x.shape[-1], above=place - start)
        return x


class PieceSamples(WholeSamples):
    """Samples of which each rank of ``axis`` routes its own tokens, with capacities and losses of whole samples."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    def placed(self, tokens: int) -> tuple[int, Pieces]:
        """Return the tokens of whole samples, and the own pieces."""
        assert tokens == self._axis.tokens
        return self._axis.context, self._axis.own

    def join(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gather the choices in all pieces; return those in front of the own ones, and in whole samples.

        Collective over the axis; without samples, which no rank of it has then, local.
        """
        if not len(counts):
            return super().join(counts)
        axis = self._axis
        by_rank = axis.all_gather(counts)  # (ranks, samples, head and tail, experts)
        pieces = np.concatenate([by_rank[:, :, 0], by_rank[::-1, :, 1]])  # in the order of their places
        ends = np.cumsum(pieces, axis=0, dtype=np.int64)
        before = (ends - pieces)[[axis.rank, 2 * axis.size - 1 - axis.rank]]
        return np.ascontiguousarray(before.swapaxes(0, 1)), ends[-1]


METHODS: Final[dict[str, Callable[[ContextAxis], AttentionOperation]]] = {
    "ring": RingAttention,
    "all_to_all": AllToAllAttention,
}


def cut_context(model: Model, axis: ContextAxis | None) -> Model:
    """Return ``model`` for the tokens of this rank of ``axis``, and its attention; as it is without one.

    Modules of PyTorch take attention and places from `hpcdist.adapters.torch.attention`. Local. Forward and backward of
    what is returned are collective over the axis, and see samples that `ContextAxis.cut` has cut. Raises
    ConfigurationError for a model of other stages.
    """
    if axis is None:
        return model
    own, attention = copy.copy(model), METHODS[axis.method](axis)
    own.clocks, own.watch = (*model.clocks, axis.taken_s), axis.watch
    if all(isinstance(stage, TorchStage) for stage in model.stages) and isinstance(model.loss, TorchLoss):
        cut = SampleCut(attention, axis.rows(np.arange(axis.context)), axis.context)
        own.stages = tuple(stage.in_context(cut) for stage in model.stages if isinstance(stage, TorchStage))
        own.loss = model.loss.in_context(cut)
        return own
    if not isinstance(model.stages[0], TokenEmbedding):
        raise ConfigurationError(
            f"parallel.context = {axis.size}: the stages of this model do not say what they do with the places of "
            "tokens, as those of a gpt and modules of PyTorch do; set it to 1"
        )
    own.stages = tuple(stage.with_tokens(axis.tokens) for stage in model.stages)  # type: ignore[attr-defined]
    experts = model.operations.experts
    own.operations = replace(
        model.operations,
        experts=replace(experts, samples=PieceSamples(axis)) if isinstance(experts, LocalExperts) else None,
        positions=PiecePositions(axis),
        rotary=PieceRotary(axis),
        dropout=PieceDropout(axis.own, axis.context),
        attention=attention,
    )
    return own
