"""Graphs of ranks with doubly stochastic mixing weights: neighbours, spectral gap, bytes. Pure functions.

    graph        neighbours a step      spectral gap 1 - rho        sent a step and rank, with Psi bytes of parameters
    ring         2                      O(1/p^2)                    2 Psi
    torus        4 (2 x n: 3, 2 x 2: 2) O(1/p)                      as many Psi
    exponential  ceil(log2 p)           2/(1 + ceil(log2 p)) *      ceil(log2 p) Psi
    one_peer     1, another every step  exact after log2 p steps *  Psi
    complete     all                    1                           2 Psi (p-1)/p, by an allreduce
    edges        as given               depends                     (most edges of a rank) Psi

(* where p is a power of two.) The consensus distance contracts by rho a step, where rho = ||W - 11'/p||.

Rank i of an exponential graph takes from the ranks i - 1, i - 2, i - 4, ... (mod p); one_peer takes from one of them
at a time, in turn (Assran et al., arXiv:1811.10792; Ying et al., arXiv:2110.13363: both mix as quickly in theory, and
one peer costs as much as one neighbour). A torus is the most square of its number of ranks; where that is a prime
there is none, and the ring takes its place. All of these are regular, with the same weight for a rank and each of its
neighbours; a graph of edges has Metropolis' weights 1/(1 + max(degree_i, degree_j)) (Xiao, Boyd & Lall, IPSN 2005).
Rows and columns of W add up to 1, so that the mean over the ranks stays what it is.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.decentralised.config import parse_edges

Sources: TypeAlias = tuple[tuple[int, float], ...]  # (rank, weight) of those that a rank takes from, itself left out
MOST_FOR_A_GAP: Final = 1024  # ranks of a graph of edges, whose eigenvalues take p^3 operations
_NOTHING: Final = 1e-12  # below it an eigenvalue is what rounding left of zero


@dataclass(frozen=True)
class Graph:
    """``rounds`` of mixing that follow each other, again and again: for each rank what it takes from whom.

    A complete graph has none: its mean is that of all. ``gap`` is 1 - rho, in the geometric mean of several rounds; NaN
    where it was too much work.
    """

    name: str
    size: int
    rounds: tuple[tuple[Sources, ...], ...]
    gap: float

    @property
    def degree(self) -> int:
        """The most ranks that one rank takes from in a step."""
        if not self.rounds:
            return self.size - 1
        return max(len(taken) for rows in self.rounds for taken in rows)

    def sources(self, rank: int, number: int) -> Sources:
        """Return what ``rank`` takes in round ``number``, by ascending rank."""
        return self.rounds[number][rank]

    def targets(self, rank: int, number: int) -> list[int]:
        """Return the ranks that take from ``rank`` in round ``number``."""
        return [other for other, taken in enumerate(self.rounds[number]) if any(peer == rank for peer, _ in taken)]

    def matrix(self, number: int = 0) -> np.ndarray:  # (ranks, ranks)
        """Return W of round ``number``: row i says what the mean of rank i consists of."""
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
        first = np.zeros(size)
        first[0] = 1.0 - sum(weight for _, weight in rows[0])
        for peer, weight in rows[0]:
            first[peer] = weight
        eigenvalues *= np.fft.fftn(first.reshape(shape))
    rho = float(np.abs(eigenvalues).reshape(-1)[1:].max(initial=0.0))
    return Graph(name, size, taken, 1.0 - (rho if rho > _NOTHING else 0.0) ** (1.0 / len(rounds)))


def _neighbours(rank: int, shape: tuple[int, ...], steps: Iterable[tuple[int, ...]]) -> Sources:
    place = np.unravel_index(rank, shape)
    found = {int(np.ravel_multi_index(tuple(np.add(place, step)), shape, mode="wrap")) for step in steps} - {rank}
    return tuple((peer, 1.0 / (1 + len(found))) for peer in sorted(found))


def _of_edges(size: int, edges: Sequence[tuple[int, int]]) -> Graph:
    peers: list[set[int]] = [set() for _ in range(size)]
    for one, other in edges:
        if max(one, other) >= size:
            raise ConfigurationError(
                f"decentralised.edges: {one}-{other} names rank {max(one, other)}, but there are {size} data ranks, "
                f"0 to {size - 1}; name those, or start more"
            )
        peers[one].add(other)
        peers[other].add(one)
    parts = _components(peers)
    if len(parts) > 1:
        named = " and ".join(f"{{{', '.join(map(str, part))}}}" for part in parts)
        raise ConfigurationError(
            f"decentralised.edges: the graph of {size} ranks is not connected: {named} never hear of each other; "
            "add an edge between them"
        )
    rows = tuple(tuple((peer, 1.0 / (1 + max(len(own), len(peers[peer])))) for peer in sorted(own)) for own in peers)
    gap = math.nan
    if size <= MOST_FOR_A_GAP:
        eigenvalues = np.linalg.eigvalsh(_matrix(rows))  # ascending, the last is 1
        gap = 1.0 - float(np.abs(eigenvalues[:-1]).max(initial=0.0))
    return Graph(f"graph of {size} ranks and {sum(map(len, peers)) // 2} edges", size, (rows,), gap)


def _components(peers: Sequence[set[int]]) -> list[list[int]]:
    """Return the sets of ranks that reach each other, each ascending."""
    found: list[list[int]] = []
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
        found.append(sorted(reached))
    return found


def _matrix(rows: Sequence[Sources]) -> np.ndarray:  # (ranks, ranks)
    found = np.zeros((len(rows), len(rows)))
    for rank, taken in enumerate(rows):
        for peer, weight in taken:
            found[rank, peer] = weight
        found[rank, rank] = 1.0 - sum(weight for _, weight in taken)
    return found
