"""Partition of the parameters over servers, and the roles of the ranks. Pure functions of the layout.

`Roles` says which ranks compute and which serve; colocated ranks do both. A key is a tensor with the padding behind
it, or a piece of one. Keys go to the servers by size, the largest first, each to the server that has least (Graham
1969, LPT). That is within the longest key of even, so tensors are cut into ever shorter keys until the servers are
within 1 % of each other, and no further: fewer cuts, fewer messages.

Servers that do not wait for each other (asp, ssp) have no common version: two may have applied different pushes when
a worker reads. A tensor that is cut over them could be *torn*, half of it older than the other half. There tensors
stay ``whole``, so that a worker reads one version of each, if not the same of all; the servers are then as even as
the sizes of the tensors allow (`KeyPartition.fullest`). Under bsp all servers are at the same step whenever anybody
reads.
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

if TYPE_CHECKING:  # as in `grid`
    from hpcdist.comm.communicator import Communicator


@dataclass(frozen=True)
class Roles:
    """Ranks of the world that are ``workers`` and those that are ``servers``; colocated ranks are both."""

    workers: range
    servers: range

    @classmethod
    def of(cls, config: ParameterServerConfig, world: int) -> "Roles":
        """Return the roles in a world of so many ranks.

        Raises ConfigurationError, with the whole equation, when nobody would be left to compute, or to be waited for.
        """
        roles = cls._of(config, world)
        workers, backup = len(roles.workers), config.backup_workers
        if backup >= workers:
            raise ConfigurationError(
                f"parameter_server.backup_workers = {backup}, but there are {workers} workers: a step must take at "
                f"least one gradient; use at most {workers - 1}, or more ranks"
            )
        return roles

    @classmethod
    def _of(cls, config: ParameterServerConfig, world: int) -> "Roles":
        if config.placement == "colocated":
            servers = config.servers or world
            if servers > world:
                raise ConfigurationError(
                    f"parameter_server.servers = {servers} colocated, but the world has {counted(world, 'rank')}: "
                    f"at most every rank can serve; use at most {world} servers (0: all), or more ranks"
                )
            return cls(range(world), range(servers))
        servers = config.servers or 1
        if servers >= world:
            raise ConfigurationError(
                f"world {world} - parameter_server.servers {servers} = {world - servers} workers, but at least 1 must "
                f"compute; start at least {servers + 1} ranks, use fewer servers, or set "
                "parameter_server.placement = 'colocated'"
            )
        return cls(range(world - servers), range(world - servers, world))

    def part_of(self, world: "Communicator") -> "Communicator":
        """Return the communicator of the workers to a worker, that of the servers to a dedicated server.

        Collective over ``world``.
        """
        part = world.split(int(world.rank not in self.workers), world.rank, "role")
        assert part is not None
        return part


BALANCE: Final = 0.01  # servers may differ by this fraction of an even share


@dataclass(frozen=True)
class KeyPartition:
    """Ownership of the flat space: ``keys`` tile it in order, key i belongs to server ``owners[i]``."""

    keys: tuple[Range, ...]
    owners: tuple[int, ...]
    servers: int

    @property
    def fullest(self) -> float:
        """Share of the server that holds most, over an even share: 1 is even."""
        held = [sum(part.size for part in self.parts(server)) for server in range(self.servers)]
        return max(held) * self.servers / sum(held)

    def parts(self, server: int) -> list[Range]:
        """Return the ranges of ``server``, ascending, neighbours joined."""
        return [part for part, owner in _joined(zip(self.keys, self.owners, strict=True)) if owner == server]

    def messages(self, units: Mapping[int, Range]) -> list[tuple[Range, int]]:
        """Return ``(range, server)`` of each message: neighbouring keys of one server within one unit.

        ``units`` are the ranges of the layers. The order is that in which backward completes them, last unit first.
        """
        messages: list[tuple[Range, int]] = []
        for unit in sorted(units.values(), reverse=True):
            inside = ((key.intersect(unit), owner) for key, owner in zip(self.keys, self.owners, strict=True))
            messages += _joined((key, owner) for key, owner in inside if key)
        return messages


def partition_keys(
    layout: Layout, servers: int, *, whole: bool = False, within: Sequence[Range] | None = None
) -> KeyPartition:
    """Return the ownership of ``layout`` by so many ``servers``; the same on every rank.

    ``within`` are the ranges of whole layers that are to be owned, by default all. With ``whole`` no tensor is cut.
    Raises ConfigurationError when there are fewer keys than servers, even at the shortest that is possible.
    """
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
                f"{servers} servers, but {size} parameters, padding included, cut into at most {len(keys)} keys of "
                f"{ALIGN_ELEMENTS} elements; set parameter_server.servers to at most {len(keys)}"
            )
        longest = max(ALIGN_ELEMENTS, align_up(longest // 2, ALIGN_ELEMENTS))


def _uncut(layout: Layout, servers: int) -> KeyPartition:
    keys = _cut(layout, max(ALIGN_ELEMENTS, layout.size), (Range(0, layout.size),))
    if len(keys) < servers:
        raise ConfigurationError(
            f"{servers} servers, but the model has {len(keys)} tensors, and servers that do not wait for each other "
            "hold whole ones, or a worker would read half of a tensor older than the other half; set "
            f"parameter_server.servers to at most {len(keys)}, or consistency = 'bsp' without backup_workers"
        )
    return KeyPartition(tuple(keys), tuple(_assign(keys, servers)[0]), servers)


def _cut(layout: Layout, longest: int, within: Sequence[Range]) -> list[Range]:
    """Return keys of at most ``longest`` elements; boundaries within a tensor are aligned."""
    keys = []
    for segment, _ in (segments for part in within for segments in layout.within(part)):
        size = segment.spec.padded  # as on the other tensor ranks, which may have a row more
        pieces = split(size, max(1, -(-size // longest)), itemsize=1, align_bytes=ALIGN_ELEMENTS)
        keys += [piece.shift(segment.range.start) for piece in pieces if piece]
    return keys


def _assign(keys: Sequence[Range], servers: int) -> tuple[list[int], list[int]]:
    """Return the owner of each key and the load of each server in elements; ties go to the lower index."""
    owners, heap = [0] * len(keys), [(0, server) for server in range(servers)]
    for index in sorted(range(len(keys)), key=lambda index: (-keys[index].size, keys[index].start)):
        load, server = heapq.heappop(heap)
        owners[index] = server
        heapq.heappush(heap, (load + keys[index].size, server))
    return owners, [load for load, _ in heap]


def _joined(owned: Iterator[tuple[Range, int]]) -> Iterator[tuple[Range, int]]:
    """Yield the ranges, neighbours of one owner joined."""
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
