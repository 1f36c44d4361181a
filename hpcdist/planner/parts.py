"""What a rank of a pipeline has, in numbers: its parameters, by what cuts them, its units, the borders of its chunks.

Of the ranks that have the same units the first and the last may need most memory: those between them have, in every
schedule, no more micro-batches than one of the two.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from hpcdist.planner.cut import Cut, Share, chunks_of_cut, stages_of_cut
from hpcdist.planner.description import Description


class Part(NamedTuple):
    """What a pipeline rank has: numbers of its parameters, and its units.

    ``cut`` parameters are divided by the tensor axis, ``experts`` by the expert axis as well, ``copied`` are tied ones
    of another rank, and ``longest`` those of its largest unit, without its ``longest_experts``. ``chunks`` are (place
    of the first unit, ((place, times), ...)), ``present`` all places, and ``borders`` those of units whose input comes
    or goes as a message.
    """

    rank: int
    whole: float
    cut: float
    experts: float
    copied: float
    longest: float
    longest_experts: float
    chunks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    present: tuple[int, ...]
    borders: tuple[int, ...]


@lru_cache(maxsize=8192)
def parts(description: Description, cut: Cut) -> tuple[Part, ...]:
    """Return the parts where the worst may be: the first and the last of those that have the same units (local)."""
    ends: dict[tuple[Share, ...], tuple[int, int]] = {}
    for rank, own in enumerate(stages_of_cut(description, cut)):
        ends[own] = ends.get(own, (rank, rank))[0], rank
    ranks = sorted({rank for both in ends.values() for rank in both})
    return tuple(part_of(description, cut, rank) for rank in ranks)


@lru_cache(maxsize=65536)
def part_of(description: Description, cut: Cut, rank: int) -> Part:
    """Return what one ``rank`` of the pipeline has (local)."""
    own = [chunk.shares for chunk in chunks_of_cut(description, cut) if chunk.rank == rank]
    shares = [share for shares in own for share in shares]
    last = len(description.units) - 1
    present = tuple(sorted({share.place for share in shares}))
    dense = [share.times * (share.unit.parameters - share.unit.expert_parameters) for share in shares]
    # Biases behind a sum are whole in an expert, too; they are counted as cut.
    divided = [share.times * max(0, share.unit.cut_parameters - share.unit.expert_parameters) for share in shares]
    tied = description.tied_parameters if last in present and 0 not in present else 0
    longest = max((share.unit for share in shares), key=lambda unit: unit.parameters)
    order = [(chunk.rank, chunk.shares[0].place) for chunk in chunks_of_cut(description, cut)]
    borders = _borders(order, rank) if cut.pipeline > 1 else ()
    return Part(
        rank=rank,
        whole=sum(dense) - sum(divided),
        cut=sum(divided),
        experts=sum(share.times * share.unit.expert_parameters for share in shares),
        copied=tied,
        longest=longest.parameters - longest.expert_parameters,
        longest_experts=longest.expert_parameters,
        chunks=tuple((shares[0].place, tuple((share.place, share.times) for share in shares)) for shares in own),
        present=present,
        borders=tuple(borders),
    )


def _borders(firsts: Sequence[tuple[int, int]], rank: int) -> Iterator[int]:
    """Yield the first units of the chunks of ``rank``, and of those behind them.

    ``firsts`` are (rank, place) of all chunks, in the order of the model.
    """
    for number, (owner, place) in enumerate(firsts):
        if number and owner == rank:
            yield place
        if number and firsts[number - 1][0] == rank:
            yield place
