"""Placement of a model's units on pipeline ranks: looped or folded chunks, also called virtual stages.

The units are cut into chunks of consecutive ones, and dealt out to the ranks:

    looped   chunk i to rank i mod p: with one chunk a rank the plain pipeline, with v the interleaved one of
             D. Narayanan et al. (arXiv:2104.04473, section 2.2)
    folded   forth and back: chunk i to rank i, chunk p + i to rank p - 1 - i, so that the last rank has two adjacent
             chunks, and the first rank both ends of the model (P. Qi et al., arXiv:2405.15362)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StagePlacement:
    """``chunks`` of consecutive units, in the order of the model, and the pipeline rank of each of them.

    ``skips`` are the pairs (unit, later unit that takes its output too) of a model that has some.
    """

    chunks: tuple[range, ...]
    ranks: tuple[int, ...]
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.chunks) == len(self.ranks) > 0, "one rank for each chunk"
        assert all(before.stop == after.start for before, after in zip(self.chunks, self.chunks[1:], strict=False))
        assert all(self.chunks) and set(self.ranks) == set(range(max(self.ranks) + 1)), "nobody without a unit"
        assert all(source + 1 < target for source, target in self.skips), "the unit before is no skip connection"

    @property
    def stages(self) -> int:
        """Number of ranks of the pipeline."""
        return max(self.ranks) + 1

    @property
    def units(self) -> range:
        """All units of the model."""
        return range(self.chunks[0].start, self.chunks[-1].stop)

    def of(self, rank: int) -> tuple[range, ...]:
        """Return the chunks of ``rank``, by their local number: ascending."""
        return tuple(chunk for chunk, owner in zip(self.chunks, self.ranks, strict=True) if owner == rank)

    def rank_of(self, unit: int) -> int:
        """Return the rank that computes ``unit``."""
        return self._ranks[unit]

    def crosses(self, unit: int) -> bool:
        """Whether the input of ``unit`` comes from another rank: that of the unit before."""
        return unit > self.chunks[0].start and self._ranks[unit] != self._ranks[unit - 1]

    def skips_into(self, unit: int) -> list[int]:
        """Return the units whose outputs ``unit`` takes beside that of the one before it, ascending."""
        return sorted(source for source, target in self.skips if target == unit)

    def skips_from(self, unit: int) -> list[int]:
        """Return the units that take the output of ``unit`` beside the one behind it, ascending."""
        return sorted(target for source, target in self.skips if source == unit)

    def edge(self, source: int, target: int) -> int:
        """Return the number of a connection: that of the target, from the unit before it; skips come behind those."""
        return target if source in (-1, target - 1) else self.units.stop + self.skips.index((source, target))

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {unit: rank for chunk, rank in zip(self.chunks, self.ranks, strict=True) for unit in chunk}


def looped(parts: Sequence[range], ranks: int) -> StagePlacement:
    """Return the placement of ``parts``, v for each of ``ranks``, one after the other, v times around."""
    assert len(parts) % ranks == 0, f"{len(parts)} chunks for {ranks} ranks"
    return StagePlacement(tuple(parts), tuple(number % ranks for number in range(len(parts))))


def folded(parts: Sequence[range], ranks: int) -> StagePlacement:
    """Return the placement of ``parts``, two for each of ``ranks``, to the last rank and back."""
    assert len(parts) == 2 * ranks, f"{len(parts)} chunks for {ranks} ranks"
    return StagePlacement(tuple(parts), (*range(ranks), *reversed(range(ranks))))
