"""Gossip (decentralised parallel SGD): each rank mixes its parameters with those of its neighbours alone.

D-PSGD (Lian et al., arXiv:1705.09056, Algorithm 1), with the direction u_i of any optimizer in the place of the
gradient. W is doubly stochastic (see `Graph`), x_i the parameters of rank i, g_i its gradient at x_i:

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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import is_device, namespace
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import wait_all
from hpcdist.comm.communicator import Request
from hpcdist.errors import ConfigurationError
from hpcdist.optim.base import ElementWise
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.decentralised.config import DecentralisedConfig, parse_edges
from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.strategies.schedule.operations import Kind, Operation

Sources: TypeAlias = tuple[tuple[int, float], ...]  # (rank, weight) of those that a rank takes from, itself left out
MOST_FOR_A_GAP: Final = 1024  # ranks of a graph of edges, whose eigenvalues take p^3 operations
_NOTHING: Final = 1e-12  # below it an eigenvalue is what rounding left of zero


@dataclass(frozen=True)
class Graph:
    """Mixing graph: ``rounds`` in turns, in each of which a rank takes from its sources with their weights.

    A complete graph has none: its mean is that of all. ``gap`` is 1 - rho, in the geometric mean of several rounds; NaN
    where it was too much work.
    """

    name: str
    size: int
    rounds: tuple[tuple[Sources, ...], ...]
    gap: float

    def sources(self, rank: int, number: int) -> Sources:
        """Return the sources of ``rank`` in round ``number``, by ascending rank."""
        return self.rounds[number][rank]

    def targets(self, rank: int, number: int) -> list[int]:
        """Return the ranks that take from ``rank`` in round ``number``."""
        return [other for other, taken in enumerate(self.rounds[number]) if any(peer == rank for peer, _ in taken)]

    def matrix(self, number: int = 0) -> np.ndarray:  # (ranks, ranks)
        """Return W of round ``number``: row i has the weights of the mean of rank i."""
        if not self.rounds:
            return np.full((self.size, self.size), 1.0 / self.size)
        return _matrix(self.rounds[number])

    def described(self) -> str:
        """Return the graph in words, with its spectral gap."""
        gap = "not computed" if math.isnan(self.gap) else f"{self.gap:.3g}"
        return f"{self.name}, spectral gap {gap}"


def build(graph: str, size: int, edges: str = "") -> Graph:
    """Return the graph of this name on ``size`` ranks.

    Raises ConfigurationError for ``edges`` that name other ranks, or leave the graph in several components.
    """
    if graph == "edges":
        return _of_edges(size, parse_edges(edges))
    if graph == "complete" or size == 1:
        return Graph(f"complete graph of {size} ranks" if size > 1 else "one rank", size, (), 1.0)
    if graph == "torus":
        rows = max(side for side in range(1, math.isqrt(size) + 1) if size % side == 0)
        if rows > 1:
            shape = (rows, size // rows)
            return _regular(f"torus of {rows} x {shape[1]} ranks", shape, [[(1, 0), (-1, 0), (0, 1), (0, -1)]])
        return _regular(f"ring of {size} ranks (a prime: no torus)", (size,), [[(1,), (-1,)]])
    steps = [(-(1 << power),) for power in range((size - 1).bit_length())]
    if graph == "exponential":
        return _regular(f"exponential graph of {size} ranks", (size,), [steps])
    if graph == "one_peer":
        return _regular(f"one-peer exponential graph of {size} ranks", (size,), [[step] for step in steps])
    return _regular(f"ring of {size} ranks", (size,), [[(1,), (-1,)]])


def _regular(name: str, shape: tuple[int, ...], rounds: Sequence[Sequence[tuple[int, ...]]]) -> Graph:
    """Return the graph of ranks on a grid of ``shape`` without borders, of which each takes from those ``steps`` away.

    Its matrices are diagonal in Fourier's basis, so their products are those of eigenvalues.
    """
    size = math.prod(shape)
    taken = tuple(tuple(_neighbours(rank, shape, steps) for rank in range(size)) for steps in rounds)
    eigenvalues = np.ones(shape, np.complex128)
    for rows in taken:
        # All rows of a (block) circulant matrix are shifts of the first, so its eigenvalues are the transform of it.
        first = np.zeros(size)
        first[0] = 1.0 - sum(weight for _, weight in rows[0])
        for peer, weight in rows[0]:
            first[peer] = weight
        eigenvalues *= np.fft.fftn(first.reshape(shape))
    # Without the eigenvalue 1 of the mean, which is the first; several rounds count in their geometric mean.
    rho = float(np.abs(eigenvalues).reshape(-1)[1:].max(initial=0.0))
    return Graph(name, size, taken, 1.0 - (rho if rho > _NOTHING else 0.0) ** (1.0 / len(rounds)))


def _neighbours(rank: int, shape: tuple[int, ...], steps: Iterable[tuple[int, ...]]) -> Sources:
    place = np.unravel_index(rank, shape)
    peers = {int(np.ravel_multi_index(tuple(np.add(place, step)), shape, mode="wrap")) for step in steps} - {rank}
    return tuple((peer, 1.0 / (1 + len(peers))) for peer in sorted(peers))


def _of_edges(size: int, edges: Sequence[tuple[int, int]]) -> Graph:
    peers: list[set[int]] = [set() for _ in range(size)]
    for first, other in edges:
        if max(first, other) >= size:
            raise ConfigurationError(
                f"decentralised.edges: {first}-{other} names rank {max(first, other)}, but there are {size} data "
                f"ranks, 0 to {size - 1}; name those, or start more"
            )
        peers[first].add(other)
        peers[other].add(first)
    parts = _components(peers)
    if len(parts) > 1:
        named = " and ".join(f"{{{', '.join(map(str, part))}}}" for part in parts)
        raise ConfigurationError(
            f"decentralised.edges: the graph of {size} ranks is not connected: {named} never hear of each other; "
            "add an edge between them"
        )
    # Metropolis weights: symmetric, so doubly stochastic with what is left on the diagonal, whatever the degrees.
    rows = tuple(tuple((peer, 1.0 / (1 + max(len(own), len(peers[peer])))) for peer in sorted(own)) for own in peers)
    gap = math.nan
    if size <= MOST_FOR_A_GAP:
        eigenvalues = np.linalg.eigvalsh(_matrix(rows))  # ascending, the last is 1
        gap = 1.0 - float(np.abs(eigenvalues[:-1]).max(initial=0.0))
    return Graph(f"graph of {size} ranks and {sum(map(len, peers)) // 2} edges", size, (rows,), gap)


def _components(peers: Sequence[set[int]]) -> list[list[int]]:
    """Return the sets of ranks that reach each other, each ascending."""
    components: list[list[int]] = []
    seen: set[int] = set()
    for first in range(len(peers)):
        if first in seen:
            continue
        reached, todo = {first}, [first]
        while todo:
            new = peers[todo.pop()] - reached
            reached |= new
            todo += new
        seen |= reached
        components.append(sorted(reached))
    return components


def _matrix(rows: Sequence[Sources]) -> np.ndarray:  # (ranks, ranks)
    weights = np.zeros((len(rows), len(rows)))
    for rank, taken in enumerate(rows):
        for peer, weight in taken:
            weights[rank, peer] = weight
        weights[rank, rank] = 1.0 - sum(weight for _, weight in taken)
    return weights


BLOCK: Final = 1 << 14  # elements of each replica that are mixed at a time: they stay in the cache


class NeighbourMixing:
    """Mixing of ``parameters`` with those of neighbours. Construction is collective over the data axis.

    ``start`` and ``wait`` are called by all ranks in the same round; in between the parameters must not change.
    """

    def __init__(self, context: RankContext, graph: Graph, parameters: FlatStore, ranges: list[Range]) -> None:
        self._comm = context.data.dup("mixing")
        self._parameters, self._ranges = parameters, ranges
        rank = self._comm.rank
        self._rounds = [
            (graph.sources(rank, number), graph.targets(rank, number)) for number in range(len(graph.rounds))
        ]
        most = max(len(sources) for sources, _ in self._rounds)
        self._arrived = [context.store("communication") for _ in range(most)]
        self._under_way: list[Request] = []

    def start(self, number: int) -> None:
        """Begin to send and to receive the parameters of round ``number``."""
        sources, targets = self._rounds[number % len(self._rounds)]
        # Receives before sends: a message that finds its receive goes straight to its place. The tag is the bucket.
        for tag, part in enumerate(self._ranges):
            for (peer, _), store in zip(sources, self._arrived, strict=False):
                self._under_way.append(self._comm.irecv(store.range(part), peer, tag))
        for tag, part in enumerate(self._ranges):
            own = self._parameters.range(part)
            self._under_way += [self._comm.isend(own, peer, tag) for peer in targets]

    def poll(self) -> None:
        """Make progress on the messages under way (local)."""
        self._under_way = [request for request in self._under_way if not request.test()]

    def wait(self) -> None:
        """Wait for all messages of the round."""
        wait_all(self._under_way)
        self._under_way.clear()

    def combine(self, number: int) -> None:
        """Replace the parameters by the weighted mean of round ``number`` (local).

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
                # All differences come before the first sum: they are to ``own`` as it was.
                for values, (_, weight) in zip(theirs, sources, strict=True):
                    xp.subtract(values, own, out=values)
                    values *= values.dtype.type(weight)
                for values in theirs:
                    own += values

    def close(self) -> None:
        """Free the communicator. Collective over the data axis."""
        self._comm.free()


LAST: Final = (Kind.APPLY, Kind.MIX, Kind.AVERAGE)  # each of them may end a step


class GossipExchange(Replicas):
    """D-PSGD on the graph of ``config``. Collective over the data axis, but where it says local."""

    def __init__(self, context: RankContext, config: DecentralisedConfig) -> None:
        super().__init__(context)
        self.config, self.factor = config, float(context.data.size)
        self.graph = build(config.graph, context.data.size, config.edges)
        self._mixing = NeighbourMixing(context, self.graph, self.parameters, self.ranges) if self.graph.rounds else None
        self._round = 0
        if config.order == "combine_first" and isinstance(self.sharded_update.optimizer, ElementWise):
            self.sharded_update.optimizer.direct_before()  # the step is that of the weights before they are mixed
        self._last = self.plan()[-1]
        handlers = {**self.handlers, **self._mixes()}
        self.handlers = handlers | {kind: self._measured_after(handlers[kind]) for kind in LAST if kind in handlers}

    def plan(self) -> list[Operation]:
        """Return the local step, with the messages before it or behind it."""
        part = self.context.part
        keep, agree = Operation(Kind.KEEP, range=part), Operation(Kind.AGREE)
        *directions, apply = self.sharded_update.plan()
        combines_first = self.config.order == "combine_first"
        if self._mixing is None:
            mean = [Operation(Kind.AVERAGE, range=part)] if self.context.data.size > 1 else []
            return [keep, agree, *directions, *([*mean, apply] if combines_first else [apply, *mean])]
        start, wait, mix = (Operation(kind, range=part) for kind in (Kind.MIX_START, Kind.MIX_WAIT, Kind.MIX))
        if combines_first:
            return [start, keep, wait, agree, *directions, mix, apply]
        return [keep, agree, *directions, apply, start, wait, mix]

    def close(self) -> None:
        """Free what the mixing has made. Collective over the data axis."""
        if self._mixing is not None:
            self._mixing.close()

    def count_samples(self, own: int, samples: int) -> None:
        """Record the round that the step mixes in (local)."""
        self._round = self.step

    def take_mean(self, op: Operation) -> None:
        """Replace the parameters by their mean over all ranks: mixing on the complete graph."""
        self.average(self.parameters)

    def _mixes(self) -> Handlers:
        """Return the handlers that mix, with the neighbours or on the complete graph."""
        mixing = self._mixing
        if mixing is None:
            return {Kind.AVERAGE: self.take_mean}
        return {
            Kind.MIX_START: lambda op: mixing.start(self._round),
            Kind.POLL: lambda op: mixing.poll(),
            Kind.MIX_WAIT: lambda op: mixing.wait(),
            Kind.MIX: lambda op: mixing.combine(self._round),
        }

    def _measured_after(self, handler: Callable[[Operation], None]) -> Callable[[Operation], None]:
        """Return ``handler`` with a measurement of the consensus distance after the last operation of a step."""

        def measure_after(op: Operation) -> None:
            handler(op)
            every = self.config.report_every
            if op == self._last and every and self.step % every == 0:
                self.measure()

        return measure_after

    def consensus(self) -> Mapping[str, float]:
        """Return the spectral gap of the graph, and the last consensus distance (local)."""
        return {**super().consensus(), "spectral_gap": self.graph.gap}

    def describe(self) -> str:
        """Return graph, spectral gap and order (local)."""
        return f"{self.graph.described()}, {self.config.order.replace('_', ' ')}"
