"""The process grid: the ranks along the tensor, context, data and pipeline axes.

Consecutive ranks are neighbours on the tensor axis, whose messages are the most frequent, so they share a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hpcdist.errors import ConfigurationError

if TYPE_CHECKING:  # grids are also used without numpy
    from hpcdist.comm.communicator import Communicator

ORDER = ("pipeline", "data", "context", "tensor")  # slowest to fastest
SHOWN: Final = 4  # number of first and of last groups that a long row shows


@dataclass(frozen=True)
class ShardingDegrees:
    """Numbers of ranks that shard parameters, gradients and optimizer state.

    ``parameters`` divides ``gradients``, and ``gradients`` divides ``optimizer``, because shards are divided further.
    """

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, kw_only=True)
class ProcessGrid:
    """Number of ranks along each axis of parallelism of a job."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1  # consecutive replicas that distribute the experts; not a factor of the world size

    @classmethod
    def of(
        cls,
        world: int,
        *,
        data: int = 0,
        pipeline: int = 1,
        tensor: int = 1,
        context: int = 1,
        servers: int = 0,  # ranks that do not compute
        expert: int = 1,
    ) -> "ProcessGrid":
        """Return the process grid for ``world`` ranks. Raises ConfigurationError if the degrees do not fit."""
        total, world = world, world - servers
        others = pipeline * tensor * context
        data = data or max(1, world // others)
        grid = cls(data=data, pipeline=pipeline, tensor=tensor, context=context, expert=expert)
        if grid.size != world:
            divisors = [d for d in range(1, world + 1) if world % d == 0]
            workers = f"{total} ranks - {servers} dedicated servers = {world} workers" if servers else f"{world} ranks"
            raise ConfigurationError(
                f"parallel.data {grid.data} x parallel.pipeline {pipeline} x parallel.tensor {tensor} x "
                f"parallel.context {context} = {grid.size}, but the world has {workers}; "
                f"choose degrees from {divisors} whose product is {world}"
            )
        if grid.replicas % expert:
            divisors = [d for d in range(1, grid.replicas + 1) if grid.replicas % d == 0]
            suggestion = f"set parallel.expert to one of {divisors}" if len(divisors) > 1 else "set parallel.expert = 1"
            raise ConfigurationError(
                f"parallel.expert = {expert} does not divide parallel.data {data} x parallel.context {context} = "
                f"{grid.replicas}, the number of replicas with {world} ranks; {suggestion} (a checkpoint can be "
                "resumed with any number of expert ranks)"
            )
        return grid

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters and sum their gradients: data times context ranks."""
        return self.data * self.context

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a dict {axis name: index of ``rank`` along this axis}."""
        assert 0 <= rank < self.size
        indices: dict[str, int] = {}
        for axis in reversed(ORDER):
            rank, indices[axis] = divmod(rank, getattr(self, axis))
        return indices

    @property
    def tensor_groups(self) -> list[range]:
        """List of the tensor groups: ranges of consecutive ranks that compute the same layers together."""
        return [range(first, first + self.tensor) for first in range(0, self.size, self.tensor)]


def rank_map(grid: ProcessGrid, nodes: Sequence[Sequence[int]]) -> list[str]:
    """Return a list with one line of text per pipeline stage: the nodes and tensor groups of the stage.

    ``nodes``: ranks of each node.
    """
    node_of = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    groups_per_stage = len(grid.tensor_groups) // grid.pipeline
    lines = []
    for stage in range(grid.pipeline):
        groups_by_nodes: dict[tuple[int, ...], list[str]] = {}
        for group in grid.tensor_groups[stage * groups_per_stage : (stage + 1) * groups_per_stage]:
            groups_by_nodes.setdefault(tuple(sorted({node_of[rank] for rank in group})), []).append(_bracketed(group))
        node_texts = [
            f"node {'+'.join(map(str, node_set))} {' '.join(_few(groups))}"
            for node_set, groups in groups_by_nodes.items()
        ]
        lines.append(f"stage {stage}: {'; '.join(_few(node_texts))}")
    return lines


def spread_groups(grid: ProcessGrid, nodes: Sequence[Sequence[int]]) -> str:
    """Return a warning text if a tensor group spans several nodes, else "". ``nodes``: ranks of each node."""
    node_of = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    spread = [group for group in grid.tensor_groups if len({node_of[rank] for rank in group}) > 1]
    if not spread:
        return ""
    return (
        f"ranks {_bracketed(spread[0])} of one tensor group are on several nodes ({len(spread)} of "
        f"{len(grid.tensor_groups)} groups are): each layer waits for the network between the nodes several times; "
        f"give every node a multiple of parallel.tensor = {grid.tensor} ranks"
    )


def _bracketed(group: range) -> str:
    return f"[{group[0]}]" if len(group) == 1 else f"[{group[0]}-{group[-1]}]"


def _few(words: list[str]) -> list[str]:
    return words if len(words) <= 2 * SHOWN else [*words[:SHOWN], "...", *words[-SHOWN:]]


class GridCommunicators:
    """Communicators along the axes of ``grid``. The first use of each communicator is collective over ``comm``."""

    def __init__(self, grid: ProcessGrid, comm: "Communicator") -> None:
        assert grid.size == comm.size
        self.grid, self.world = grid, comm
        self.place = grid.coordinates(comm.rank)
        self._split: dict[str, Communicator] = {}

    def _along(self, *axes: str) -> "Communicator":
        color = key = 0
        for axis in ORDER:
            degree, index = getattr(self.grid, axis), self.place[axis]
            color, key = (color, key * degree + index) if axis in axes else (color * degree + index, key)
        return self._part(self.world, color, key, " x ".join(axes))

    def _part(self, whole: "Communicator", color: int, key: int, name: str) -> "Communicator":
        # No functools.cached_property: before Python 3.12 it holds a lock that all ranks of one process would share.
        if name not in self._split:
            part = whole.split(color, key, name)
            assert part is not None
            self._split[name] = part
        return self._split[name]

    @property
    def data(self) -> "Communicator":
        """Communicator of the ranks that hold the same parameters and process different samples."""
        return self._along("data")

    @property
    def context(self) -> "Communicator":
        """Communicator of the ranks that hold the same parameters and process different tokens of the same samples."""
        return self._along("context")

    @property
    def replicas(self) -> "Communicator":
        """Communicator of the ranks that hold the same parameters and sum their gradients."""
        return self.data if self.grid.context == 1 else self._along("data", "context")

    @property
    def pipeline(self) -> "Communicator":
        """Communicator of the ranks that hold the stages of one replica, in stage order."""
        return self._along("pipeline")

    @property
    def tensor(self) -> "Communicator":
        """Communicator of the ranks that hold the shards of the same tensors and process the same samples."""
        return self._along("tensor")

    @property
    def statistics(self) -> "Communicator":
        """Communicator of `replicas` for collectives inside of a stage's passes, which no other message disturbs."""
        return self._part(self.replicas, 0, self.replicas.rank, "statistics")

    def experts(self, degree: int) -> "Communicator":
        """Return the communicator of the ``degree`` replicas, including this rank, that divide the experts."""
        replicas = self.replicas
        if degree == replicas.size:
            return replicas
        return self._part(replicas, replicas.rank // degree, replicas.rank, "experts")

    def free(self) -> None:
        """Free the communicators. No operation may be in flight on any communicator. Collective over ``comm``."""
        for comm in self._split.values():
            comm.free()
        self._split.clear()
