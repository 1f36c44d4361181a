"""The grid of ranks along the axes of parallelism: tensor, context, data, pipeline.

A `ProcessGrid` is a handful of integers, passed and never global. Ranks count with the tensor axis fastest (its
messages are the most frequent, so its members should share a node), then context, then data, and the pipeline axis
slowest. `GridCommunicators` splits the world into the communicators of the axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hpcdist.errors import ConfigurationError

if TYPE_CHECKING:  # a grid is asked for where numpy is not loaded
    from hpcdist.comm.communicator import Communicator

ORDER = ("pipeline", "data", "context", "tensor")  # slowest to fastest
SHOWN: Final = 4  # so many of the first and of the last groups of a long row are shown


@dataclass(frozen=True, kw_only=True)
class ProcessGrid:
    """Degrees of parallelism; their product is the size of the world."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1  # consecutive replicas that share out the experts: no factor of the product

    @classmethod
    def of(
        cls,
        world: int,
        *,
        data: int = 0,
        pipeline: int = 1,
        tensor: int = 1,
        context: int = 1,
        servers: int = 0,
        expert: int = 1,
    ) -> "ProcessGrid":
        """Return the grid of ``world`` ranks; ``data = 0`` takes what the other degrees leave.

        ``servers`` of the ranks do not compute. Raises ConfigurationError, with the whole equation, when the product is
        not the number of those that do, or ``expert`` does not divide the replicas.
        """
        total, world = world, world - servers
        others = pipeline * tensor * context
        data = data or max(1, world // others)
        grid = cls(data=data, pipeline=pipeline, tensor=tensor, context=context, expert=expert)
        if grid.size != world:
            divisors = [d for d in range(1, world + 1) if world % d == 0]
            left = f"{total} ranks - {servers} dedicated servers = {world} workers" if servers else f"{world} ranks"
            raise ConfigurationError(
                f"parallel.data {grid.data} x parallel.pipeline {pipeline} x parallel.tensor {tensor} x "
                f"parallel.context {context} = {grid.size}, but the world has {left}; "
                f"each degree must be a divisor of {world}: {divisors}"
            )
        if grid.replicas % expert:
            divisors = [d for d in range(1, grid.replicas + 1) if grid.replicas % d == 0]
            choice = f"choose one of {divisors}" if len(divisors) > 1 else "set parallel.expert = 1"
            raise ConfigurationError(
                f"parallel.expert = {expert} does not divide parallel.data {data} x parallel.context {context} (of "
                f"{world} ranks = data {data} x pipeline {pipeline} x tensor {tensor} x context {context}), whose "
                f"ranks share out the experts; {choice}; a checkpoint can be resumed with any number of expert ranks"
            )
        return grid

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, and sum their gradients: those of the data and the context axis."""
        return self.data * self.context

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` along each axis."""
        assert 0 <= rank < self.size
        place: dict[str, int] = {}
        for axis in reversed(ORDER):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    @property
    def tensor_groups(self) -> list[range]:
        """The ranks that compute the same layers together: neighbours."""
        return [range(first, first + self.tensor) for first in range(0, self.size, self.tensor)]


def rank_map(grid: ProcessGrid, nodes: Sequence[Sequence[int]]) -> list[str]:
    """Return a line for each stage of the pipeline: its ranks, and their nodes of ``nodes``.

    Ranks in brackets compute each layer together. ``nodes`` are the ranks of each node.
    """
    node_of = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    groups_per_stage = len(grid.tensor_groups) // grid.pipeline
    lines = []
    for stage in range(grid.pipeline):
        where: dict[tuple[int, ...], list[str]] = {}
        for group in grid.tensor_groups[stage * groups_per_stage : (stage + 1) * groups_per_stage]:
            where.setdefault(tuple(sorted({node_of[rank] for rank in group})), []).append(_bracketed(group))
        places = [f"node {'+'.join(map(str, on))} {' '.join(_few(groups))}" for on, groups in where.items()]
        lines.append(f"stage {stage}: {'; '.join(_few(places))}")
    return lines


def spread_groups(grid: ProcessGrid, nodes: Sequence[Sequence[int]]) -> str:
    """Return a warning of tensor groups that are on several of ``nodes``, "" where none is."""
    node_of = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    spread = [group for group in grid.tensor_groups if len({node_of[rank] for rank in group}) > 1]
    if not spread:
        return ""
    return (
        f"ranks {_bracketed(spread[0])} of one tensor group are on several nodes, as are those of {len(spread)} of "
        f"{len(grid.tensor_groups)} groups: each layer waits for the network between them several times; give every "
        f"node a multiple of parallel.tensor = {grid.tensor} ranks"
    )


def _bracketed(group: range) -> str:
    return f"[{group[0]}]" if len(group) == 1 else f"[{group[0]}-{group[-1]}]"


def _few(words: list[str]) -> list[str]:
    return words if len(words) <= 2 * SHOWN else [*words[:SHOWN], "...", *words[-SHOWN:]]


class GridCommunicators:
    """Communicators along the axes of a grid, split when they are first used, until `free`.

    Every rank must ask for the same axis at the same point: the split is collective over ``comm``.
    """

    def __init__(self, grid: ProcessGrid, comm: "Communicator") -> None:
        assert grid.size == comm.size
        self.grid, self.world = grid, comm
        self.place = grid.coordinates(comm.rank)
        self._split: dict[str, Communicator] = {}

    def _along(self, *axes: str) -> "Communicator":
        color = key = 0
        for axis in ORDER:
            degree, place = getattr(self.grid, axis), self.place[axis]
            color, key = (color, key * degree + place) if axis in axes else (color * degree + place, key)
        return self._part(self.world, color, key, " x ".join(axes))

    def _part(self, whole: "Communicator", color: int, key: int, name: str) -> "Communicator":
        # No functools.cached_property: until Python 3.12 it holds a lock that all ranks of one process would share.
        if name not in self._split:
            part = whole.split(color, key, name)
            assert part is not None
            self._split[name] = part
        return self._split[name]

    @property
    def data(self) -> "Communicator":
        """Ranks that hold the same parameters and see different samples."""
        return self._along("data")

    @property
    def context(self) -> "Communicator":
        """Ranks that hold the same parameters and see other tokens of the same samples."""
        return self._along("context")

    @property
    def replicas(self) -> "Communicator":
        """Ranks that hold the same parameters, and sum their gradients."""
        return self.data if self.grid.context == 1 else self._along("data", "context")

    @property
    def pipeline(self) -> "Communicator":
        """Ranks that hold the other stages of the same replica, in order of the stages."""
        return self._along("pipeline")

    @property
    def tensor(self) -> "Communicator":
        """Ranks that hold the other parts of the same tensors, and compute the same samples."""
        return self._along("tensor")

    def experts(self, degree: int) -> "Communicator":
        """Return the ``degree`` consecutive replicas that share out experts: neighbours on the context axis first.

        A group of all of them is that of the replicas itself: what is shared there is found again.
        """
        replicas = self.replicas
        if degree == replicas.size:
            return replicas
        return self._part(replicas, replicas.rank // degree, replicas.rank, "experts")

    def free(self) -> None:
        """Free the communicators; no operation over one of them may be under way. Collective over ``comm``."""
        for comm in self._split.values():
            comm.free()
        self._split.clear()
