"""Gossip (decentralised parallel SGD): each rank mixes its parameters with its neighbours' parameters only.

D-PSGD (Lian et al., arXiv:1705.09056, Algorithm 1), with the direction u_i of any optimizer instead of the gradient. W
is doubly stochastic (see `Graph`), x_i are the parameters of rank i, g_i is its gradient at x_i:

    combine first   x_i <- sum_j W_ij x_j - rate u_i(x_i, g_i)        messages overlap the computation of g_i
    adapt first     x_i <- sum_j W_ij (x_j - rate u_j(x_j, g_j))      messages wait for the update

The mean of the replicas takes the SGD step of the mean of their gradients. Directions and weight decay use the weights
before mixing (LARS with combine first: decay after mixing).

With Psi bytes of parameters and d neighbours, a rank sends, receives and buffers d Psi per step. The number d is 2 on a
ring, at most 4 on a torus, ceil(log2 p) on the exponential graph, and 1 for one peer.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np

from hpcdist.arrays.backend import is_device, namespace
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.segments import wait_all
from hpcdist.comm.transport import Request
from hpcdist.errors import ConfigurationError
from hpcdist.optim.base import ElementWise
from hpcdist.strategies.core.exchange import Handlers
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.decentralised.config import DecentralisedConfig, parse_edges
from hpcdist.strategies.decentralised.replicas import Replicas

Sources: TypeAlias = tuple[tuple[int, float], ...]  # (rank, weight) of the peers of a rank, without itself
MOST_FOR_A_GAP: Final = 1024  # largest number of ranks for the eigenvalues of a graph of edges: p^3 operations
_NOTHING: Final = 1e-12  # smaller eigenvalues are rounding errors of zero


@dataclass(frozen=True)
class Graph:
    """Mixing graph of gossip: the neighbours of each rank in each mixing round, and the weights of the neighbours."""

    # Step i uses round i modulo the number of rounds. In a complete graph, all ranks average with equal weights.

    name: str
    size: int
    rounds: tuple[tuple[Sources, ...], ...]  # empty for a complete graph
    # Spectral gap 1 - r^(1/k) for k rounds, or NaN if not computed. r: second largest absolute eigenvalue of the
    # product of all mixing matrices.
    gap: float

    def sources(self, rank: int, number: int) -> Sources:
        """Return a tuple of pairs (neighbour that sends parameters to ``rank`` in round ``number``, its weight)."""
        return self.rounds[number][rank]

    def targets(self, rank: int, number: int) -> list[int]:
        """Return a list of the ranks to which ``rank`` must send its parameters in round ``number``."""
        return [other for other, sources in enumerate(self.rounds[number]) if any(peer == rank for peer, _ in sources)]

    def matrix(self, number: int = 0) -> np.ndarray:  # (ranks, ranks)
        """Return the mixing matrix W of round ``number``. W[i, j]: weight of rank j in rank i's mean."""
        if not self.rounds:
            return np.full((self.size, self.size), 1.0 / self.size)
        return _matrix(self.rounds[number])

    def described(self) -> str:
        """Return a text with the name and the spectral gap of the graph."""
        gap = "not computed" if math.isnan(self.gap) else f"{self.gap:.3g}"
        return f"{self.name}, spectral gap {gap}"


def build(graph: str, size: int, edges: str = "") -> Graph:
    """Return the mixing graph named ``graph``, such as "torus", on ``size`` ranks.

    ``edges``: pairs of ranks as text, for the graph "edges". Raises ConfigurationError if ``edges`` is invalid.
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
    # ``rounds``: grid offsets to a rank's neighbours in each round, on a periodic grid.
    size = math.prod(shape)
    sources = tuple(tuple(_neighbours(rank, shape, steps) for rank in range(size)) for steps in rounds)
    eigenvalues = np.ones(shape, np.complex128)
    for rows in sources:
        # Rows of a (block) circulant matrix are shifts of the first row, whose transform gives the eigenvalues.
        first = np.zeros(size)
        first[0] = 1.0 - sum(weight for _, weight in rows[0])
        for peer, weight in rows[0]:
            first[peer] = weight
        eigenvalues *= np.fft.fftn(first.reshape(shape))
    # Leave out the first eigenvalue, 1 of the mean; take the geometric mean over the rounds.
    rho = float(np.abs(eigenvalues).reshape(-1)[1:].max(initial=0.0))
    return Graph(name, size, sources, 1.0 - (rho if rho > _NOTHING else 0.0) ** (1.0 / len(rounds)))


def _neighbours(rank: int, shape: tuple[int, ...], steps: Iterable[tuple[int, ...]]) -> Sources:
    position = np.unravel_index(rank, shape)
    peers = {int(np.ravel_multi_index(tuple(np.add(position, step)), shape, mode="wrap")) for step in steps} - {rank}
    return tuple((peer, 1.0 / (1 + len(peers))) for peer in sorted(peers))


def _of_edges(size: int, edges: Sequence[tuple[int, int]]) -> Graph:
    peers: list[set[int]] = [set() for _ in range(size)]
    for first, other in edges:
        if max(first, other) >= size:
            raise ConfigurationError(
                f"decentralised.edges: {first}-{other} names rank {max(first, other)}, but there are only {size} data "
                f"ranks, 0 to {size - 1}; remove this edge, or start more ranks"
            )
        peers[first].add(other)
        peers[other].add(first)
    parts = _components(peers)
    if len(parts) > 1:
        groups = " and ".join(f"{{{', '.join(map(str, part))}}}" for part in parts)
        raise ConfigurationError(
            f"decentralised.edges: the graph of {size} ranks is not connected: the groups of ranks {groups} never "
            "exchange parameters; add edges between these groups"
        )
    # Metropolis weights: symmetric, and with the remainder on the diagonal doubly stochastic for any degrees.
    rows = tuple(tuple((peer, 1.0 / (1 + max(len(row), len(peers[peer])))) for peer in sorted(row)) for row in peers)
    gap = math.nan
    if size <= MOST_FOR_A_GAP:
        eigenvalues = np.linalg.eigvalsh(_matrix(rows))  # ascending, the last is 1
        gap = 1.0 - float(np.abs(eigenvalues[:-1]).max(initial=0.0))
    return Graph(f"graph of {size} ranks and {sum(map(len, peers)) // 2} edges", size, (rows,), gap)


def _components(peers: Sequence[set[int]]) -> list[list[int]]:
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
    for rank, sources in enumerate(rows):
        for peer, weight in sources:
            weights[rank, peer] = weight
        weights[rank, rank] = 1.0 - sum(weight for _, weight in sources)
    return weights


BLOCK: Final = 1 << 14  # elements of each replica mixed at a time, to stay in the cache


class NeighbourMixing:
    """Gossip averaging of parameters with the neighbours in a graph. Construction is collective over the data axis."""

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
        """Start mixing round ``number``: start to exchange parameters with this rank's neighbours.

        The parameters must not change until `wait`.
        """
        sources, targets = self._rounds[number % len(self._rounds)]
        # Receives are posted first, so that messages arrive in place. The tag is the bucket.
        for tag, part in enumerate(self._ranges):
            for (peer, _), store in zip(sources, self._arrived, strict=False):
                self._under_way.append(self._comm.irecv(store.range(part), peer, tag))
        for tag, part in enumerate(self._ranges):
            values = self._parameters.range(part)
            self._under_way += [self._comm.isend(values, peer, tag) for peer in targets]

    def poll(self) -> None:
        """Make progress on the messages in flight. Local."""
        self._under_way = [request for request in self._under_way if not request.test()]

    def wait(self) -> None:
        """Wait until all messages of the started mixing round are complete."""
        wait_all(self._under_way)
        self._under_way.clear()

    def combine(self, number: int) -> None:
        """Replace the parameters by the weighted mean of mixing round ``number``. Call `wait` first. Local."""
        # For parameters x, and neighbour j with parameters x_j and weight w_j, the mean is x + sum_j w_j (x_j - x).
        sources, _ = self._rounds[number % len(self._rounds)]
        xp = namespace(self._parameters.array)
        longest = self._parameters.size if is_device(self._parameters.array) else BLOCK
        for part in self._ranges:
            for block in cut(part, max(1, longest)):
                mixed = self._parameters.range(block)
                received = [store.range(block) for store, _ in zip(self._arrived, sources, strict=False)]
                # All differences are computed before the first addition changes the parameters.
                for values, (_, weight) in zip(received, sources, strict=True):
                    xp.subtract(values, mixed, out=values)
                    values *= values.dtype.type(weight)
                for values in received:
                    mixed += values

    def close(self) -> None:
        """Free the communicator used for mixing. Collective over the data axis."""
        self._comm.free()


LAST: Final = (Kind.APPLY, Kind.MIX, Kind.AVERAGE)  # kinds that may end a step


class GossipExchange(Replicas):
    """Strategy "gossip" (D-PSGD): a rank updates with its own gradient, and averages parameters with its neighbours."""

    def __init__(self, context: RankContext, config: DecentralisedConfig) -> None:
        super().__init__(context)
        self.config, self.factor = config, float(context.data.size)
        self.graph = build(config.graph, context.data.size, config.edges)
        self._mixing = NeighbourMixing(context, self.graph, self.parameters, self.ranges) if self.graph.rounds else None
        self._round = 0
        self.traits = replace(self.traits, mixing=f"{self.graph.described()}, {config.order.replace('_', ' ')}")
        if config.order == "combine_first" and isinstance(self.update.optimizer, ElementWise):
            self.update.optimizer.direct_before()  # decay uses the weights before mixing
        self._last = self.plan()[-1]
        handlers = {**self.handlers, **self._mixes()}
        self.handlers = handlers | {kind: self._measured_after(handlers[kind]) for kind in LAST if kind in handlers}

    def plan(self) -> list[Operation]:
        part = self.context.part
        keep, agree = Operation(Kind.KEEP, range=part), Operation(Kind.AGREE)
        *directions, apply = self.update.plan()
        combines_first = self.config.order == "combine_first"
        if self._mixing is None:
            mean = [Operation(Kind.AVERAGE, range=part)] if self.context.data.size > 1 else []
            return [keep, agree, *directions, *([*mean, apply] if combines_first else [apply, *mean])]
        start, wait, mix = (Operation(kind, range=part) for kind in (Kind.MIX_START, Kind.MIX_WAIT, Kind.MIX))
        if combines_first:
            return [start, keep, wait, agree, *directions, mix, apply]
        return [keep, agree, *directions, apply, start, wait, mix]

    def close(self) -> None:
        if self._mixing is not None:
            self._mixing.close()

    def count_samples(self, local_samples: int, samples: int) -> None:
        self._round = self.step

    def take_mean(self, op: Operation) -> None:
        self.average(self.parameters)

    def _mixes(self) -> Handlers:
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

        def measure_after(op: Operation) -> None:
            handler(op)
            every = self.config.report_every
            if op == self._last and every and self.step % every == 0:
                self.measure()

        return measure_after

    def consensus(self) -> Mapping[str, float]:
        return {**super().consensus(), "spectral_gap": self.graph.gap}
