"""The table of operations that computes everything on this rank; strategies replace entries (`dataclasses.replace`)."""

from typing import Final

from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.layers.activation import LocalActivation
from hpcdist.models.layers.cross_entropy import LocalCrossEntropy
from hpcdist.models.layers.dropout import LocalDropout
from hpcdist.models.layers.embedding import LocalEmbedding, LocalPositions, LocalRotary
from hpcdist.models.layers.linear import LocalLinear
from hpcdist.models.layers.norm import LocalNorm
from hpcdist.models.stage import Operations

LOCAL: Final = Operations(
    linear_column=LocalLinear(),
    linear_row=LocalLinear(),
    embed=LocalEmbedding(),
    positions=LocalPositions(),
    rotary=LocalRotary(),
    norm=LocalNorm(),
    attention=LocalAttention(),
    activation=LocalActivation(),
    dropout=LocalDropout(),
    cross_entropy=LocalCrossEntropy(),
)
