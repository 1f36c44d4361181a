"""Buckets: ranges of the flat parameter vector whose gradients are reduced in one message."""

from collections.abc import Iterable, Iterator

from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range, cut
from hpcdist.strategies.core.rank_context import RankContext


def groups_of_layers(units: Iterable[Range], longest: int, part: Range) -> Iterator[Range]:
    """Divide ``part`` into ranges of whole layers. Yield the ranges from last to first, as backward completes them.

    ``units``: flat range of each layer. ``longest``: number of elements at which a range is complete.
    """
    # ``part`` must start and end at layer boundaries.
    stop = part.stop
    for unit in sorted(filter(part.intersect, units), reverse=True):
        if stop - unit.start >= longest or unit.start == part.start:
            yield Range(unit.start, stop)
            stop = unit.start


def buckets_of_layers(
    layout: Layout, itemsize: int, bucket_bytes: int, part: Range | None = None, units: Iterable[Range] = ()
) -> list[Range]:
    """Divide a range of the flat parameter vector into communication buckets, from last to first.

    ``itemsize``: bytes per element. ``bucket_bytes``: maximum size of a bucket. ``part``: range to divide, by default
    all. ``units``: range of each layer, by default from ``layout``.
    """
    longest = max(1, bucket_bytes // itemsize)
    # Groups of layers with at least ``bucket_bytes`` bytes are cut into buckets of at most ``bucket_bytes`` bytes.
    groups = groups_of_layers(units or layout.units.values(), longest, part or Range(0, layout.size))
    return [bucket for group in groups for bucket in reversed(list(cut(group, longest)))]


def buckets_of_rank(context: RankContext, itemsize: int) -> list[Range]:
    """Return the buckets of this rank's layers in backward order. ``itemsize``: bytes per element. Local."""
    units = [*context.ranges.values()]
    return [
        bucket
        for part in reversed(context.parts)
        for bucket in buckets_of_layers(context.layout, itemsize, context.bucket_bytes, part, units)
    ]
