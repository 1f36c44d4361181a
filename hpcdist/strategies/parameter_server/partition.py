"""Partition of the parameters over servers, and the roles of the ranks. Pure functions of the layout.

A key is a tensor with its padding, or a range of this. The largest keys are assigned first, to the server with the
least load (Graham 1969, LPT). Tensors are divided until the servers' loads differ by at most 1 %, but asynchronous
servers hold ``whole`` tensors.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hpcdist.arrays.layout import ALIGN_ELEMENTS, Layout
from hpcdist.arrays.ranges import Range, align_up, split
from hpcdist.errors import ConfigurationError
from hpcdist.reporting.units import counted
from hpcdist.strategies.parameter_server.config import ParameterServerConfig

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True)
class Roles:
    """World ranks of the workers and of the parameter servers. A rank can be both worker and server."""

    workers: range
    servers: range

    @classmethod
    def of(cls, config: ParameterServerConfig, world: int) -> "Roles":
        """Return the `Roles` in a world of ``world`` ranks. Raises ConfigurationError if there are too few ranks."""
        roles = cls._of(config, world)
        workers, backup = len(roles.workers), config.backup_workers
        if backup >= workers:
            raise ConfigurationError(
                f"parameter_server.backup_workers = {backup}, but there are only {workers} workers. Every step must "
                "use the gradient of at least 1 worker; set parameter_server.backup_workers to at most "
                f"{workers - 1}, or start more ranks"
            )
        return roles

    @classmethod
    def _of(cls, config: ParameterServerConfig, world: int) -> "Roles":
        if config.placement == "colocated":
            servers = config.servers or world
            if servers > world:
                raise ConfigurationError(
                    f"parameter_server.servers = {servers} with parameter_server.placement = 'colocated', but the "
                    f"world has only {counted(world, 'rank')}; set parameter_server.servers to at most {world}, or to "
                    "0 to make every rank a server, or start more ranks"
                )
            return cls(range(world), range(servers))
        servers = config.servers or 1
        if servers >= world:
            raise ConfigurationError(
                f"{servers} dedicated parameter servers in a world of {counted(world, 'rank')} leave no worker, but "
                f"training needs at least 1 worker; start at least {servers + 1} ranks, reduce "
                "parameter_server.servers, or set parameter_server.placement = 'colocated'"
            )
        return cls(range(world - servers), range(world - servers, world))

    def part_of(self, world: "Communicator") -> "Communicator":
        """Split ``world``. Return the communicator of all workers or, on a dedicated server, of all dedicated servers.

        Collective over ``world``.
        """
        part = world.split(int(world.rank not in self.workers), world.rank, "role")
        assert part is not None
        return part


BALANCE: Final = 0.01  # servers may differ by this fraction of an even share


@dataclass(frozen=True)
class KeyPartition:
    """Assignment of ranges of the flat parameter vector to servers."""

    keys: tuple[Range, ...]
    owners: tuple[int, ...]  # owners[i]: server of the range keys[i]
    servers: int

    @property
    def fullest(self) -> float:
        """Ratio of the largest number of parameters on a server to the mean number of parameters per server."""
        held = [sum(part.size for part in self.parts(server)) for server in range(self.servers)]
        return max(held) * self.servers / sum(held)

    def parts(self, server: int) -> list[Range]:
        """Return a list of the flat parameter ranges that ``server`` owns, in ascending order.

        Adjacent ranges are merged into one range.
        """
        return [part for part, owner in _joined(zip(self.keys, self.owners, strict=True)) if owner == server]

    def messages(self, units: Mapping[int, Range]) -> list[tuple[Range, int]]:
        """Return a list of pairs (range, server), one per gradient message, in the order of the backward pass.

        ``units`` maps each layer to its range of the flat parameter vector.
        """
        messages: list[tuple[Range, int]] = []
        for unit in sorted(units.values(), reverse=True):
            inside = ((key.intersect(unit), owner) for key, owner in zip(self.keys, self.owners, strict=True))
            messages += _joined((key, owner) for key, owner in inside if key)
        return messages


def partition_keys(
    layout: Layout, servers: int, *, whole: bool = False, within: Sequence[Range] | None = None
) -> KeyPartition:
    """Return the assignment of parameter ranges to servers. Raises ConfigurationError if there are too many servers."""
    # With ``whole``, no tensor is split. ``within``: ranges of the flat vector to assign, by default all.
    if whole:
        return _uncut(layout, servers)
    within = (Range(0, layout.size),) if within is None else within
    size = sum(part.size for part in within)
    share, longest = size / servers, max(ALIGN_ELEMENTS, size)
    while True:
        keys = _cut(layout, longest, within)
        shortest = longest <= ALIGN_ELEMENTS
        if len(keys) >= servers:
            owners, loads = _assign(keys, servers)
            if shortest or max(loads) - min(loads) <= BALANCE * share:
                return KeyPartition(tuple(keys), tuple(owners), servers)
        elif shortest:
            raise ConfigurationError(
                f"there are {servers} parameter servers, but the {size} parameters (with padding) can be split into at "
                f"most {len(keys)} ranges of {ALIGN_ELEMENTS} elements; set parameter_server.servers to at most "
                f"{len(keys)}"
            )
        longest = max(ALIGN_ELEMENTS, align_up(longest // 2, ALIGN_ELEMENTS))


def _uncut(layout: Layout, servers: int) -> KeyPartition:
    keys = _cut(layout, max(ALIGN_ELEMENTS, layout.size), (Range(0, layout.size),))
    if len(keys) < servers:
        raise ConfigurationError(
            f"there are {servers} parameter servers, but the model has only {len(keys)} tensors. Asynchronous servers "
            "hold whole tensors, so that no worker reads a half-updated tensor; set parameter_server.servers to at "
            f"most {len(keys)}, or set parameter_server.consistency = 'bsp' without parameter_server.backup_workers"
        )
    return KeyPartition(tuple(keys), tuple(_assign(keys, servers)[0]), servers)


def _cut(layout: Layout, longest: int, within: Sequence[Range]) -> list[Range]:
    keys = []
    for segment, _ in (segments for part in within for segments in layout.within(part)):
        size = segment.spec.padded  # equal on all tensor ranks
        pieces = split(size, max(1, -(-size // longest)), itemsize=1, align_bytes=ALIGN_ELEMENTS)
        keys += [piece.shift(segment.range.start) for piece in pieces if piece]
    return keys


def _assign(keys: Sequence[Range], servers: int) -> tuple[list[int], list[int]]:
    owners, heap = [0] * len(keys), [(0, server) for server in range(servers)]
    for index in sorted(range(len(keys)), key=lambda index: (-keys[index].size, keys[index].start)):
        load, server = heapq.heappop(heap)
        owners[index] = server
        heapq.heappush(heap, (load + keys[index].size, server))
    return owners, [load for load, _ in heap]


def _joined(owned: Iterator[tuple[Range, int]]) -> Iterator[tuple[Range, int]]:
    before: tuple[Range, int] | None = None
    for part, owner in owned:
        if before is not None and before[1] == owner and before[0].stop == part.start:
            before = Range(before[0].start, part.stop), owner
            continue
        if before is not None:
            yield before
        before = part, owner
    if before is not None:
        yield before
