"""Communicator protocol: the operations that every transport offers to the algorithms above.

Buffers are 1-D, C-contiguous numpy or cupy arrays. A call is collective over the communicator unless its docstring
says "local" or names a peer: then every member must make it, in the same order. Implementations:
`mpi.communicator.MpiCommunicator`, and `threads.communicator` for N ranks in one process and for a single rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.comm.events import EventSink
from hpcdist.comm.window import Window

ANY: Final = -1  # any source or any tag, in `probe`
REDUCTIONS: Final = ("sum", "max", "min")


class Request(Protocol):
    """A message under way. Its buffer must not be touched before `wait` returned or `test` was true."""

    def wait(self) -> None:
        """Return when the message is complete (local)."""
        ...

    def test(self) -> bool:
        """Whether the message is complete (local)."""
        ...


class Message(Protocol):
    """A message that `probe` found and took out of the matching: nobody else can receive it."""

    source: int
    tag: int
    nbytes: int

    def recv(self, buffer: Array) -> None:
        """Receive it into ``buffer``, which must have ``nbytes`` bytes (local)."""
        ...


class SharedBlock(Protocol):
    """Memory that all members of a communicator can read and write, or that is private where none can be shared.

    ``views`` are the bytes of each member; where ``is_shared`` is false, only the own ones are there.
    """

    views: list[np.ndarray]
    is_shared: bool

    def progress(self) -> None:
        """Let messages progress, taking none (local): to be called by whoever waits in the memory.

        Whoever does must also call `check_alive`, which alone promises to tell of a death.
        """
        ...

    def check_alive(self, since: float) -> None:
        """Let messages progress, and raise RankDiedError when a member is seen to have died (local).

        To be called by whoever has waited in the memory ``since`` this reading of `time.monotonic`.
        """
        ...

    def close(self) -> None:
        """Give the memory back; the views must not be used again. Collective, or local after `Communicator.revoke`."""
        ...


@dataclass(frozen=True)
class Nodes:
    """A communicator cut by node.

    ``intra`` joins the ranks of this node, ``peers`` the ranks of equal index in their nodes, ``leaders`` the first
    rank of each node (None on the others). ``uniform``: every node has the same number of ranks; only then do the
    ``peers`` communicators reach every node. This is node ``index`` of ``count``; ``members`` are the ranks of
    each node, ascending.
    """

    intra: "Communicator"
    peers: "Communicator"
    leaders: "Communicator | None"
    uniform: bool
    index: int
    count: int
    members: tuple[tuple[int, ...], ...]


class Communicator(Protocol):
    """A group of ranks that exchange messages and nobody else's."""

    name: str
    rank: int
    size: int
    events: EventSink
    checked: bool  # the ranks compare their calls before each collective; the same on every rank
    is_comparing: bool  # in the exchange for that: see `hpcdist.comm.checks`
    settled: dict[Any, Any]  # what callers keep for this communicator, by keys of their own; a new `checked` empties it

    def send(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Send ``buffer`` to ``peer``; it may be changed when the call returns."""
        ...

    def recv(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Receive from ``peer`` into ``buffer``, whose size must be that of the message."""
        ...

    def sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int = 0) -> None:
        """Send to one rank and receive from another at the same time."""
        ...

    def isend(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Begin to send to ``peer``."""
        ...

    def irecv(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Begin to receive from ``peer``."""
        ...

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Return the index of a request that is complete, waiting for the first (local)."""
        ...

    def probe(self, peer: int = ANY, tag: int = ANY) -> Message:
        """Wait for a message and take it out of the matching, not yet receiving it (local)."""
        ...

    def poll(self, peer: int = ANY, tag: int = ANY) -> Message | None:
        """Return a message as `probe` does when one has come, None otherwise: nothing is waited for (local)."""
        ...

    def barrier(self) -> None:
        """Return when every member has called."""
        ...

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Overwrite ``buffer`` with the root's."""
        ...

    def allreduce(self, buffer: Array, op: str = "sum") -> None:
        """Reduce over the members by the native algorithm, in place. Not for 16-bit floats."""
        ...

    def iallreduce(self, buffer: Array, op: str = "sum") -> Request:
        """Begin to reduce natively, in place: ``buffer`` belongs to the request until that is complete.

        Not for 16-bit floats. Whether anything moves before the request is waited for is the MPI library's affair; its
        sum may differ from that of `allreduce` in the last bits.
        """
        ...

    def reduce_scatter(self, buffer: Array, ranges: Sequence[Range], op: str = "sum") -> None:
        """Reduce natively; afterwards only ``buffer[ranges[rank]]`` is defined.

        ``ranges`` tile the buffer in rank order.
        """
        ...

    def all_gather(self, buffer: Array, ranges: Sequence[Range]) -> None:
        """Give ``buffer[ranges[rank]]`` to all and fill the other ranges, in place."""
        ...

    def all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None:
        """Send ``send[send_ranges[q]]`` to each rank q and receive its part into ``receive[receive_ranges[q]]``."""
        ...

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the small picklable values of all members in rank order. For set-up, never in a step."""
        ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's small picklable value. For set-up, never in a step."""
        ...

    def split(self, color: int | None, key: int = 0, label: str = "split") -> "Communicator | None":
        """Return the communicator of the members of equal ``color``, ordered by ``(key, rank)``; None for None."""
        ...

    def dup(self, label: str = "dup") -> "Communicator":
        """Return a communicator of the same members whose messages never meet those of this one."""
        ...

    def nodes(self) -> Nodes:
        """Return this communicator cut by node; made at the first call and kept."""
        ...

    def shared(self, nbytes: int) -> SharedBlock:
        """Return ``nbytes`` of zeroed memory of each member, readable by all. All members must be on one node.

        Where they cannot share memory (containers, no room), the block says so and holds private memory.
        """
        ...

    def window(self, nbytes: int) -> Window:
        """Return ``nbytes`` of zeroed memory of this rank that the members read and write by themselves.

        The members may ask for different sizes. Raises MissingCapabilityError where there is no such communication.
        """
        ...

    def supports(self, feature: str) -> bool:
        """Whether ``feature`` is there (local): "device_pointers", "thread_multiple", or "ulfm".

        "ulfm": the ranks that live can go on when one dies. Without it `revoke`, `agree` and `shrink` raise
        MissingCapabilityError.
        """
        ...

    def revoke(self) -> None:
        """Make all operations on this communicator, and on all made from it, fail on every rank (local).

        To be called by whoever has met a death (see `deaths.is_death`): it releases those who wait for somebody who
        has left. Only `failed`, `agree`, `shrink` and `abandon` work afterwards.
        """
        ...

    def failed(self) -> tuple[int, ...]:
        """Return the ranks that this one knows to be dead, ascending; another rank may know others (local)."""
        ...

    def agree(self, flag: bool) -> bool:
        """Return whether all the living brought true: the same on all, also where ranks die meanwhile.

        Collective over the living, revoked or not.
        """
        ...

    def shrink(self, label: str = "world") -> "Communicator":
        """Return a communicator of the living in the order of their ranks, named ``label``.

        Collective over the living, revoked or not. One that died meanwhile may still be a member; the next operation
        tells.
        """
        ...

    def abandon(self) -> None:
        """Give a revoked communicator back, and what was made from it; errors in it are swallowed (local)."""
        ...

    def free(self) -> None:
        """Give the communicator back; no operation may be under way."""
        ...
