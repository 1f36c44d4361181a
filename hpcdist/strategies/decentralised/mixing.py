"""The messages between neighbours on a graph, and the weighted mean that a rank makes of what came.

A rank sends its parameters, bucket by bucket, to those that take from it, out of the memory in which they are; what
it takes has memory of its own: Psi bytes for each rank that it takes from in a round.
"""

from typing import Final

from hpcdist.arrays.backend import is_device, namespace
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Request
from hpcdist.strategies.decentralised.graphs import Graph
from hpcdist.strategies.seat import Seat

BLOCK: Final = 1 << 14  # elements of each replica that are mixed at a time: they stay in the cache


class Mixing:
    """Mixes ``parameters`` of this rank with those of its neighbours. Construction is collective over the data axis.

    ``start`` and ``wait`` are called by all ranks in the same round; in between the parameters must not change.
    """

    def __init__(self, seat: Seat, graph: Graph, parameters: FlatStore, ranges: list[Range]) -> None:
        self._comm = seat.data.dup("mixing")
        self._parameters, self._ranges = parameters, ranges
        rank = self._comm.rank
        self._rounds = [
            (graph.sources(rank, number), graph.targets(rank, number)) for number in range(len(graph.rounds))
        ]
        most = max(len(sources) for sources, _ in self._rounds)
        self._arrived = [seat.store("communication") for _ in range(most)]
        self._under_way: list[Request] = []

    def start(self, number: int) -> None:
        """Begin to send and to receive what round ``number`` mixes."""
        sources, targets = self._rounds[number % len(self._rounds)]
        for tag, part in enumerate(self._ranges):
            for (peer, _), store in zip(sources, self._arrived, strict=False):
                self._under_way.append(self._comm.irecv(store.range(part), peer, tag))
        for tag, part in enumerate(self._ranges):
            own = self._parameters.range(part)
            self._under_way += [self._comm.isend(own, peer, tag) for peer in targets]

    def poll(self) -> None:
        """Let what is under way move (local)."""
        self._under_way = [request for request in self._under_way if not request.test()]

    def wait(self) -> None:
        """Return when all has come and gone."""
        for request in self._under_way:
            request.wait()
        self._under_way.clear()

    def combine(self, number: int) -> None:
        """Turn the parameters into the weighted mean of round ``number`` (local).

        As x + sum_j w_j (x_j - x), in the order of the ranks: where all are equal the mean is exact, however the
        weights are rounded, and what one rank of a pair gains, the other loses.
        """
        sources, _ = self._rounds[number % len(self._rounds)]
        xp = namespace(self._parameters.array)
        longest = self._parameters.size if is_device(self._parameters.array) else BLOCK
        for part in self._ranges:
            for block in cut(part, max(1, longest)):
                own = self._parameters.range(block)
                theirs = [store.range(block) for store, _ in zip(self._arrived, sources, strict=False)]
                for values, (_, weight) in zip(theirs, sources, strict=True):
                    xp.subtract(values, own, out=values)
                    values *= values.dtype.type(weight)
                for values in theirs:
                    own += values
