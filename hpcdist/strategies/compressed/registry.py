"""Compressors and reductions by the names of a recipe.

`compressor` makes a quantiser or sparsifier, `bucket_reduction` what sums the gradients of a rank with it: the
buckets, their coder, and the reduction of `hpcdist.strategies.compressed.reduction` that suits the compressor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up
from hpcdist.comm.communicator import Communicator
from hpcdist.compression.casts import BFloat16, Float16
from hpcdist.compression.compressor import Compressor
from hpcdist.compression.quantise.adaptive import Adaptive
from hpcdist.compression.quantise.sign import SignSgd
from hpcdist.compression.quantise.uniform import NEAREST, STOCHASTIC, Blockwise, Qsgd
from hpcdist.compression.sparsify.randomk import RandomK
from hpcdist.compression.sparsify.topk import TopK
from hpcdist.strategies.allreduce import buckets_of_layers, groups_of_layers
from hpcdist.strategies.compressed.config import LOW_RANK, QUANTISED, SUMMED, CompressionConfig
from hpcdist.strategies.compressed.low_rank import PowerSgdReduction
from hpcdist.strategies.compressed.reduction import (
    CompressedReduction,
    GatheredReduction,
    GradientCoder,
    InterNodeReduction,
    PayloadAllreduce,
    QuantisedReduction,
    inter_node,
)
from hpcdist.strategies.core.rank_context import RankContext

# Integers are rounded to nearest where what that loses is fed back, else by draws: without bias.
_MAKE: Final[dict[str, Callable[[CompressionConfig], Compressor]]] = {
    "float16": lambda config: Float16(),
    "bfloat16": lambda config: BFloat16(),
    "int8": lambda config: Blockwise(bits=8, rounding=NEAREST if config.error_feedback else STOCHASTIC),
    "int4": lambda config: Blockwise(bits=4, rounding=NEAREST if config.error_feedback else STOCHASTIC),
    "adaptive": lambda config: Adaptive(),
    "qsgd": lambda config: Qsgd(bits=config.bits),
    "sign": lambda config: SignSgd(),
    "topk": lambda config: TopK(density=config.density),
    "randomk": lambda config: RandomK(density=config.density, scaled=not config.error_feedback),
}


def compressor(name: str, config: CompressionConfig) -> Compressor:
    """Return the compressor ``name``, one of `config.QUANTISED` or `config.SPARSE` (local)."""
    return _MAKE[name](config)


_ITEMSIZE: Final = np.dtype(np.float32).itemsize  # of what is encoded, whatever gradients are kept as


@dataclass(frozen=True)
class BucketReduction:
    """Sum of the gradients of a rank over the ranks of ``comm``, bucket by bucket.

    ``codes`` holds the state between steps; ``reduction`` is what sums: itself, or something around it.
    """

    comm: Communicator
    buckets: tuple[Range, ...]
    codes: GradientCoder | PowerSgdReduction
    reduction: CompressedReduction

    def kept(self) -> list[Range]:
        """Return the ranges of which this rank may have residuals, ascending (local)."""
        parts = [part for bucket in self.buckets for part in self.reduction.kept(bucket)]
        return sorted(parts, key=lambda part: part.start)


def bucket_reduction(context: RankContext, name: str, config: CompressionConfig, seed: int) -> BucketReduction:
    """Return the sum over the data axis compressed by ``name``, without feedback. Collective over that axis.

    Raises ConfigurationError where nodes that ``config`` tells apart have different numbers of ranks.
    """
    buckets = tuple(bucket for part in reversed(context.parts) for bucket in _cut(context, name, part))
    return reduction_of(context.data, context.layout, buckets, name, config, seed, context.algorithm, context.on)


def reduction_of(
    data: Communicator,
    layout: Layout,
    buckets: tuple[Range, ...],
    name: str,
    config: CompressionConfig,
    seed: int,
    algorithm: str,
    on: str = "cpu",
) -> BucketReduction:
    """Return the sum of ``buckets`` of ``layout`` over ``data``, compressed by ``name``. Collective over ``data``.

    ``on`` is "cpu" or "gpu". Raises ConfigurationError as `bucket_reduction` does.
    """
    comm = inter_node(data) if config.across_nodes else data
    codes: GradientCoder | PowerSgdReduction
    reduction: CompressedReduction
    if name in LOW_RANK:
        codes = reduction = PowerSgdReduction(comm, layout, buckets, config.rank, seed, algorithm, on)
    else:
        # Payloads that are summed as they are name the same elements: their draws are those of rank 0 everywhere.
        codes = coder = GradientCoder(layout, compressor(name, config), seed, 0 if name in SUMMED else comm.rank)
        if name in QUANTISED:
            reduction = QuantisedReduction(comm, coder)
        elif name in SUMMED:
            reduction = PayloadAllreduce(comm, coder, algorithm)
        else:
            reduction = GatheredReduction(comm, coder)
    return BucketReduction(
        comm, buckets, codes, InterNodeReduction(data, reduction) if config.across_nodes else reduction
    )


def _cut(context: RankContext, name: str, part: Range) -> list[Range]:
    """Return the buckets of ``part``, in the order in which gradients are complete (local).

    They are as long as those of float32 gradients. Factors are of whole tensors, and each bucket of them takes two
    rounds of messages: theirs are as many layers as make such a bucket.
    """
    if name in LOW_RANK:
        return list(groups_of_layers(context.layout.units.values(), -(-context.bucket_bytes // _ITEMSIZE), part))
    # The draws of a piece are named by the line that it begins in: no two begin in the same one.
    return buckets_of_layers(context.layout, _ITEMSIZE, align_up(context.bucket_bytes, ALIGN_BYTES), part)
