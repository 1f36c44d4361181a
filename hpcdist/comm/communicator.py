"""Communicator protocol: the operations that every transport offers to the algorithms above.

Buffers are 1-D, C-contiguous numpy or cupy arrays. A call is collective over the communicator (every member must make
it, in the same order) unless its docstring says "local" or names a peer. Implementations:
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
    """A message under way. Its buffer must not be touched before `wait` has returned or `test` was true."""

    def wait(self) -> None:
        """Return when the message is complete (local)."""

    def test(self) -> bool:
        """Whether the message is complete (local)."""


class Message(Protocol):
    """A message that a matched probe took out of the matching: only `recv` here can receive it."""

    source: int
    tag: int
    nbytes: int

    def recv(self, buffer: Array) -> None:
        """Receive it into ``buffer``, which must have ``nbytes`` bytes (local)."""


class SharedBlock(Protocol):
    """Memory of a node that all members can read and write, or private memory where none can be shared.

    ``views`` are the bytes of each member; where ``is_shared`` is false, only those of this rank are there.
    """

    views: list[np.ndarray]
    is_shared: bool

    def progress(self) -> None:
        """Let messages progress, receiving none (local): call it while waiting in the memory.

        Call `check_alive` now and then, too: only that promises to report a rank failure.
        """

    def check_alive(self, since: float) -> None:
        """Let messages progress, and raise RankDiedError when a member has died (local).

        ``since`` is the reading of `time.monotonic` at which the wait in the memory began.
        """

    def close(self) -> None:
        """Free the memory; the views must not be used again. Collective, or local after `Communicator.revoke`."""


@dataclass(frozen=True)
class Nodes:
    """A communicator split by node.

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
    """A group of ranks and a message context of its own: messages never match those of another communicator."""

    name: str
    rank: int
    size: int
    events: EventSink
    checked: bool  # the ranks compare their calls before each collective; the same on every rank
    is_comparing: bool  # during that comparison: see `hpcdist.comm.checks`
    settled: dict[Any, Any]  # a cache of callers for this communicator; setting `checked` empties it

    def send(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Send ``buffer`` to ``peer``; it may be changed when the call returns."""

    def recv(self, buffer: Array, peer: int, tag: int = 0) -> None:
        """Receive from ``peer`` into ``buffer``, whose size must be that of the message."""

    def sendrecv(self, send: Array, to: int, receive: Array, source: int, tag: int = 0) -> None:
        """Send to one rank and receive from another at the same time."""

    def isend(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Begin to send to ``peer``."""

    def irecv(self, buffer: Array, peer: int, tag: int = 0) -> Request:
        """Begin to receive from ``peer``."""

    def wait_any(self, requests: Sequence[Request]) -> int:
        """Return the index of a request that is complete, waiting for the first (local)."""

    def probe(self, peer: int = ANY, tag: int = ANY) -> Message:
        """Wait for a message and take it out of the matching, not yet receiving it (local)."""

    def poll(self, peer: int = ANY, tag: int = ANY) -> Message | None:
        """Return a message as `probe` does when one has come, None otherwise: nothing is waited for (local)."""

    def barrier(self) -> None:
        """Return when every member has called."""

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Overwrite ``buffer`` with the root's."""

    def allreduce(self, buffer: Array, op: str = "sum") -> None:
        """Reduce over the members by the native algorithm, in place. Not for 16-bit floats."""

    def iallreduce(self, buffer: Array, op: str = "sum") -> Request:
        """Begin to reduce natively, in place: ``buffer`` belongs to the request until that is complete.

        Not for 16-bit floats. The MPI library decides whether data moves before the request is waited for; its sum may
        differ from that of `allreduce` in the last bits.
        """

    def reduce_scatter(self, buffer: Array, ranges: Sequence[Range], op: str = "sum") -> None:
        """Reduce natively; afterwards only ``buffer[ranges[rank]]`` is defined.

        ``ranges`` tile the buffer in rank order.
        """

    def all_gather(self, buffer: Array, ranges: Sequence[Range]) -> None:
        """Give ``buffer[ranges[rank]]`` to all and fill the other ranges, in place."""

    def all_to_all(
        self, send: Array, receive: Array, send_ranges: Sequence[Range], receive_ranges: Sequence[Range]
    ) -> None:
        """Send ``send[send_ranges[q]]`` to each rank q and receive its part into ``receive[receive_ranges[q]]``."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the small picklable values of all members in rank order. For set-up, never in a step."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's small picklable value. For set-up, never in a step."""

    def split(self, color: int | None, key: int = 0, label: str = "split") -> "Communicator | None":
        """Return the communicator of the members of equal ``color``, ordered by ``(key, rank)``; None for None."""

    def dup(self, label: str = "dup") -> "Communicator":
        """Return a communicator of the same members whose messages never meet those of this one."""

    def nodes(self) -> Nodes:
        """Return this communicator split by node; made at the first call and kept."""

    def shared(self, nbytes: int) -> SharedBlock:
        """Return ``nbytes`` of zeroed memory of each member, readable by all. All members must be on one node.

        Where they cannot share memory (containers, no room), the block says so and holds private memory.
        """

    def window(self, nbytes: int) -> Window:
        """Return ``nbytes`` of zeroed memory of this rank for one-sided access (put, get) by all members.

        The members may ask for different sizes. Raises MissingCapabilityError without one-sided communication.
        """

    def supports(self, feature: str) -> bool:
        """Whether ``feature`` is there (local): "device_pointers", "thread_multiple", or "ulfm".

        "ulfm": the survivors can go on when a rank dies. Without it `revoke`, `agree` and `shrink` raise
        MissingCapabilityError.
        """

    def revoke(self) -> None:
        """Make all operations on this communicator, and on all made from it, fail on every rank (local).

        To be called by a rank that has met a rank failure (see `rank_failures.is_rank_failure`): it releases ranks that
        wait for one that has left. Only `failed`, `agree`, `shrink` and `abandon` work afterwards.
        """

    def failed(self) -> tuple[int, ...]:
        """Return the ranks that are known here to have failed, ascending; another rank may know others (local)."""

    def agree(self, flag: bool) -> bool:
        """Return whether all survivors passed true: the same answer on all, also where ranks die meanwhile.

        Collective over the survivors, revoked or not.
        """

    def shrink(self, label: str = "world") -> "Communicator":
        """Return a communicator of the survivors in the order of their ranks, named ``label``.

        Collective over the survivors, revoked or not. A rank that died meanwhile may still be a member; the next
        operation reports it.
        """

    def abandon(self) -> None:
        """Free a revoked communicator, and those made from it; errors of MPI are ignored (local)."""

    def free(self) -> None:
        """Free the communicator; no operation may be under way."""
