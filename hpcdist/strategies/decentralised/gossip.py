"""Gossip (decentralised parallel SGD): each rank mixes its parameters with those of its neighbours alone.

D-PSGD (Lian et al., arXiv:1705.09056, Algorithm 1), with the direction u_i of any optimizer in the place of the
gradient. W is doubly stochastic (see `graphs`), x_i the parameters of rank i, g_i its gradient at x_i:

    combine first   x_i <- sum_j W_ij x_j - rate u_i(x_i, g_i)        the messages go beside the computation of g_i
    adapt first     x_i <- sum_j W_ij (x_j - rate u_j(x_j, g_j))      the messages wait for the update

In either order the mean of the replicas takes the step of SGD under the mean of their gradients. On the complete
graph adapt first is allreduce; combine first is not, since each replica is a step of its own away from the mean when
the next gradients are taken. Adapt first contracts the steps too, and bears larger rates.

g_i is p times this rank's share of the mean gradient of all samples, so that the mean over the ranks is exact however
unevenly samples are spread. Directions, and the decay of weights in them, are those of the weights before mixing;
LARS, whose decay enters with the ratio, has that of the weights after it where combining comes first.

With Psi bytes of parameters a rank sends and receives d Psi a step, for d neighbours: ring 2, torus 4 (3 or 2 where
axes have two ranks), exponential ceil(log2 p), one peer 1. It sends out of the memory in which its parameters are,
bucket by bucket (`NeighbourMixing`); what comes takes d Psi of memory. The complete graph takes an allreduce: 2 Psi
(p-1)/p. All ranks still agree on a few numbers (loss, finiteness, the request to stop) in every step.
"""

from collections.abc import Callable
from typing import Final

from hpcdist.arrays.backend import is_device, namespace
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Request
from hpcdist.optim.base import ElementWise
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.decentralised.graphs import Graph, build
from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.strategies.schedule.operations import Kind, Operation

BLOCK: Final = 1 << 14  # elements of each replica that are mixed at a time: they stay in the cache


class NeighbourMixing:
    """Mixes ``parameters`` of this rank with those of its neighbours. Construction is collective over the data axis.

    ``start`` and ``wait`` are called by all ranks in the same round; in between the parameters must not change.
    """

    def __init__(self, seat: RankContext, graph: Graph, parameters: FlatStore, ranges: list[Range]) -> None:
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


LAST: Final = (Kind.APPLY, Kind.MIX, Kind.AVERAGE)  # each of them may end a step


class GossipExchange(Replicas):
    """D-PSGD on the graph of ``config``. Collective over the data axis, but for what is said to be local."""

    def __init__(self, seat: RankContext, config: DecentralisedConfig) -> None:
        super().__init__(seat)
        self.config, self.factor = config, float(seat.data.size)
        self.graph = build(config.graph, seat.data.size, config.edges)
        self._mixing = NeighbourMixing(seat, self.graph, self.parameters, self.ranges) if self.graph.rounds else None
        self._round = 0
        if config.order == "combine_first" and isinstance(self.owner.optimizer, ElementWise):
            self.owner.optimizer.direct_before()  # the step is that of the weights before they are mixed
        self._last = self.plan()[-1]
        mixing = {Kind.MIX_START: self.start, Kind.POLL: self.poll, Kind.MIX_WAIT: self.wait, Kind.MIX: self.mix}
        together = mixing if self._mixing is not None else {Kind.AVERAGE: self.take_mean}
        handlers = {**self.carries_out, **together}
        self.carries_out = handlers | {kind: self._then_look(handlers[kind]) for kind in LAST if kind in handlers}

    def plan(self) -> list[Operation]:
        """Return the local step, with the messages before it or behind it."""
        part = self.seat.part
        keep, agree = Operation(Kind.KEEP, range=part), Operation(Kind.AGREE)
        *directions, apply = self.owner.plan()
        combines_first = self.config.order == "combine_first"
        if self._mixing is None:
            mean = [Operation(Kind.AVERAGE, range=part)] if self.seat.data.size > 1 else []
            return [keep, agree, *directions, *([*mean, apply] if combines_first else [apply, *mean])]
        start, wait, mix = (Operation(kind, range=part) for kind in (Kind.MIX_START, Kind.MIX_WAIT, Kind.MIX))
        if combines_first:
            return [start, keep, wait, agree, *directions, mix, apply]
        return [keep, agree, *directions, apply, start, wait, mix]

    def count_samples(self, own: int, samples: int) -> None:
        """Take note of the round that the step mixes in (local)."""
        self._round = self.step

    def start(self, op: Operation) -> None:
        """Begin to exchange parameters with the neighbours (local)."""
        assert self._mixing is not None
        self._mixing.start(self._round)

    def poll(self, op: Operation) -> None:
        """Move what was started (local)."""
        assert self._mixing is not None
        self._mixing.poll()

    def wait(self, op: Operation) -> None:
        """Return when the neighbours' parameters are here, and the own ones there."""
        assert self._mixing is not None
        self._mixing.wait()

    def mix(self, op: Operation) -> None:
        """Take the weighted mean (local)."""
        assert self._mixing is not None
        self._mixing.combine(self._round)

    def take_mean(self, op: Operation) -> None:
        """Replace the parameters by their mean over all ranks: mixing on the complete graph."""
        self.average(self.parameters)

    def _then_look(self, handler: Callable[[Operation], None]) -> Callable[[Operation], None]:
        """Return ``handler`` with a look at the consensus distance behind the last operation of a step."""

        def carry_out(op: Operation) -> None:
            handler(op)
            every = self.config.report_every
            if op == self._last and every and self.step % every == 0:
                self.measure()

        return carry_out

    def described(self) -> str:
        """Return graph, spectral gap and order (local)."""
        return f"{self.graph.described()}, {self.config.order.replace('_', ' ')}"
