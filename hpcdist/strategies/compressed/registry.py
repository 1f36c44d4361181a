"""Compressors and reductions by their names in a recipe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import ALIGN_BYTES, Range, align_up
from hpcdist.comm.communicator import Communicator
from hpcdist.compression.adaptive import Adaptive
from hpcdist.compression.casts import BFloat16, Float16
from hpcdist.compression.compressor import Compressor
from hpcdist.compression.randomk import RandomK
from hpcdist.compression.sign import SignSgd
from hpcdist.compression.topk import TopK
from hpcdist.compression.uniform import NEAREST, STOCHASTIC, Blockwise, Qsgd
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
from hpcdist.strategies.core.rank_context import RankContext, buckets_of_layers, groups_of_layers

# Integers are rounded to nearest with error feedback, else stochastically (unbiased).
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


@dataclass(frozen=True)
class Compression:
    """Compressor ``name`` of gradients ("none" for no compressor), its options, and the seed of the run."""

    name: str
    config: CompressionConfig
    seed: int


def compressor(name: str, config: CompressionConfig) -> Compressor:
    """Return the compressor that a recipe calls ``name``, such as "topk", with the options in ``config``. Local."""
    return _MAKE[name](config)


_ITEMSIZE: Final = np.dtype(np.float32).itemsize  # of encoded values, whatever the dtype of gradients


@dataclass(frozen=True)
class BucketReduction:
    """Compressed allreduce of gradients over the data axis, bucket by bucket."""

    comm: Communicator
    buckets: tuple[Range, ...]  # ranges of the flat gradient vector
    codes: GradientCoder | PowerSgdReduction  # encoder, which keeps compression errors for the next step
    reduction: CompressedReduction  # allreduce of compressed buckets over ``comm``

    def kept(self) -> list[Range]:
        """Return a list of the flat gradient ranges that this rank compresses, in ascending order. Local."""
        parts = [part for bucket in self.buckets for part in self.reduction.kept(bucket)]
        return sorted(parts, key=lambda part: part.start)


def bucket_reduction(context: RankContext, name: str, config: CompressionConfig, seed: int) -> BucketReduction:
    """Return the compressed allreduce of gradients over the data axis. Collective over the data axis.

    ``name``, ``config``: compressor and its options. ``seed``: seed of the compressor's random numbers.
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
    algorithm: str,  # allreduce algorithm for compressors whose payloads are summed
    on: str = "cpu",
) -> BucketReduction:
    """Return an object that allreduces gradients over ``data`` with the compressor ``name``. Collective.

    ``buckets``: flat ranges, each reduced by one call. ``on``: device of the gradients, "cpu" or "gpu".
    """
    comm = inter_node(data) if config.across_nodes else data
    codes: GradientCoder | PowerSgdReduction
    reduction: CompressedReduction
    if name in LOW_RANK:
        codes = reduction = PowerSgdReduction(comm, layout, buckets, config.rank, seed, algorithm, on)
    else:
        # Summed payloads need equal indices on all ranks, so all ranks use the random stream of rank 0.
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
    if name in LOW_RANK:  # they need whole tensors, and two rounds of messages per bucket
        return list(groups_of_layers(context.layout.units.values(), -(-context.bucket_bytes // _ITEMSIZE), part))
    # Random draws of a piece are keyed by its first line, so no two pieces may begin in the same line.
    return buckets_of_layers(context.layout, _ITEMSIZE, align_up(context.bucket_bytes, ALIGN_BYTES), part)
