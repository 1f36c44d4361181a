"""What one rank has to do in a step, as the checks of the verifier look at it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from operator import itemgetter

from hpcdist.arrays.ranges import Range, coverage
from hpcdist.errors import ScheduleError
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.placement import Placement


@dataclass(frozen=True)
class Share:
    """What a rank has to do: its list, and ``units``, the range of each stage of the model that it computes.

    A parameter server has no units, and no ``place``: which rank of which pipeline this is. ``needs`` maps a unit to
    all units whose parameters it uses. ``accumulates``: gradients are exchanged once a step, not after every
    micro-batch; ``alone``: there is nobody to exchange with.
    ``combines``: a REDUCE does not sum over all replicas, and a COMBINE has to; ``refreshes``: what is kept of a unit
    that is gathered and freed is more than this rank steps, and a REFRESH has to bring the rest.
    """

    rank: int
    steps: Sequence[Operation]
    units: Mapping[int, Range]
    place: tuple[Placement, int] | None
    microbatches: int
    needs: Mapping[int, Collection[int]]
    accumulates: bool
    combines: bool
    refreshes: bool
    alone: bool

    def where(self, *kinds: Kind) -> list[tuple[int, Operation]]:
        """Return (position, operation) of ``kinds``, in their order."""
        found = [self._by_kind[kind] for kind in dict.fromkeys(kinds) if kind in self._by_kind]
        return list(merge(*found, key=itemgetter(0)))

    @cached_property
    def _by_kind(self) -> dict[Kind, list[tuple[int, Operation]]]:
        found: dict[Kind, list[tuple[int, Operation]]] = {}
        for index, op in enumerate(self.steps):
            found.setdefault(op.kind, []).append((index, op))
        return found

    def ranges(self, *kinds: Kind) -> list[Range]:
        """Return the ranges of all operations of ``kinds``."""
        return [op.range for _, op in self.where(*kinds) if op.range is not None]

    def refuse(self, why: str) -> ScheduleError:
        """Return the error that says so of this rank."""
        return ScheduleError(f"rank {self.rank}: {why}")


def covered(whole: Range, parts: Iterable[Range]) -> bool:
    """Whether ``parts`` together are all of ``whole``."""
    return all(times for _, times in coverage(whole, parts))


def text(part: Range) -> str:
    """Return the range as errors show it."""
    return f"[{part.start}:{part.stop}]"
