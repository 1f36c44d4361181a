"""The model of one rank of the context axis: whole layers for this rank's tokens of each sample.

`cut_context` replaces the operations that depend on token positions. Other operations act on each token separately.
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
from hpcdist.models.config import Rotation
from hpcdist.models.experts.mixture import LocalExperts, WholeSamples
from hpcdist.models.layers.dropout import LocalDropout, mask
from hpcdist.models.layers.embedding import LocalPositions
from hpcdist.models.layers.linear import LocalLinear, add_to_rows, column_sums
from hpcdist.models.layers.rotary import rotary_table, turn, turn_in_documents
from hpcdist.models.model import Model
from hpcdist.models.stage import AttentionOperation, Gradients, Parameters, Saved
from hpcdist.models.transformer import TokenEmbedding
from hpcdist.strategies.context.all_to_all import AllToAllAttention
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.context.ring import RingAttention


class PiecePositions:
    """Learned position embedding of this rank's tokens."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        assert context == self._axis.tokens
        if saved.documents is not None:
            return LocalPositions().forward(parameters, prefix, y, context, saved)
        rows = self._axis.rows(parameters[f"{prefix}.weight"])
        add_to_rows(y.reshape(y.shape[0], -1), rows.reshape(-1))
        return y

    def backward(self, gradients: Gradients, prefix: str, dy: Array, saved: Saved) -> None:
        if saved.documents is not None:
            LocalPositions().backward(gradients, prefix, dy, saved)
            return
        into, add = gradients.into(f"{prefix}.weight")
        if not add:
            into[...] = 0
        sums = saved.scratch("tokens.sums", dy.shape[1:], into.dtype)
        column_sums(dy.reshape(dy.shape[0], -1), sums.reshape(-1), False)
        for start, end, position in self._axis.own:
            into[position : position + end - start] += sums[start:end]


class PieceRotary:
    """Rotary position encoding of this rank's tokens."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis
        self._tables: dict[object, Array] = {}

    def forward(self, x: Array, rotation: Rotation, rotated: int, saved: Saved) -> Array:
        if saved.documents is not None:
            return turn_in_documents(x, rotation, rotated, saved.documents, 1)
        return turn(x, rotated, self._table(rotation, x), 1)

    def backward(self, dx: Array, rotation: Rotation, rotated: int, saved: Saved) -> Array:
        if saved.documents is not None:
            return turn_in_documents(dx, rotation, rotated, saved.documents, -1)
        return turn(dx, rotated, self._table(rotation, dx), -1)

    def _table(self, rotation: Rotation, like: Array) -> Array:
        key = rotation, like.dtype, is_device(like)
        if key not in self._tables:
            self._tables[key] = self._axis.rows(rotary_table(self._axis.context, rotation, like))
        return self._tables[key]


class PieceDropout(LocalDropout):
    """Dropout of this rank's tokens, with the mask that a single rank with whole samples would use."""

    def __init__(self, pieces: Pieces, context: int) -> None:
        self._pieces, self._context = pieces, context

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        dropped = mask(saved, rate, site, rows_per_sample=self._context, columns=x.shape[-1])
        if dropped is not None and x.size:
            for start, end, position in self._pieces:
                dropped.drop(x, start, end, x.shape[-1], above=position - start)
        return x


class PieceSamples(WholeSamples):
    """Layout of samples whose tokens are divided over the context ranks."""

    def __init__(self, axis: ContextAxis) -> None:
        self._axis = axis

    def placed(self, tokens: int) -> tuple[int, Pieces]:
        assert tokens == self._axis.tokens
        return self._axis.context, self._axis.own

    def join(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not len(counts):
            return super().join(counts)
        axis = self._axis
        by_rank = axis.all_gather(counts)  # (ranks, samples, head and tail, experts)
        pieces = np.concatenate([by_rank[:, :, 0], by_rank[::-1, :, 1]])  # in token order
        ends = np.cumsum(pieces, axis=0, dtype=np.int64)
        before = (ends - pieces)[[axis.rank, 2 * axis.size - 1 - axis.rank]]
        return np.ascontiguousarray(before.swapaxes(0, 1)), ends[-1]


METHODS: Final[dict[str, Callable[[ContextAxis], AttentionOperation]]] = {
    "ring": RingAttention,
    "all_to_all": AllToAllAttention,
}


def cut_context(model: Model, axis: ContextAxis | None) -> Model:
    """Return a copy of ``model`` that computes only this rank's tokens of each sample. Local.

    ``axis``: the context ranks that divide the tokens, or None to return ``model`` itself.
    """
    if axis is None:
        return model
    # The caller must select this rank's inputs with `ContextAxis.cut`. PyTorch modules must use
    # `hpcdist.adapters.torch.attention`.
    local_model, attention = copy.copy(model), METHODS[axis.method](axis)
    local_model.clocks, local_model.watch = (*model.clocks, axis.taken_s), axis.watch
    if all(isinstance(stage, TorchStage) for stage in model.stages) and isinstance(model.loss, TorchLoss):
        cut = SampleCut(attention, axis.rows(np.arange(axis.context)), axis.context)
        local_model.stages = tuple(stage.in_context(cut) for stage in model.stages if isinstance(stage, TorchStage))
        local_model.loss = model.loss.in_context(cut)
        return local_model
    if not isinstance(model.stages[0], TokenEmbedding):
        raise ConfigurationError(
            f"parallel.context = {axis.size} divides each sample over ranks, which only transformers and PyTorch "
            "modules support; set parallel.context = 1"
        )
    local_model.stages = tuple(stage.with_tokens(axis.tokens) for stage in model.stages)  # type: ignore[attr-defined]
    experts, dropout = model.operations.experts, PieceDropout(axis.own, axis.context)
    low_rank = getattr(model.operations.linear_row, "low_rank", None)
    linear = LocalLinear(None if low_rank is None else replace(low_rank, dropout=dropout))
    local_model.operations = replace(
        model.operations,
        linear_column=linear,
        linear_row=linear,
        experts=replace(experts, samples=PieceSamples(axis)) if isinstance(experts, LocalExperts) else None,
        positions=PiecePositions(axis),
        rotary=PieceRotary(axis),
        dropout=dropout,
        attention=attention,
    )
    return local_model
