"""What a communicator reports of every operation, and to whom."""

from typing import Final, Protocol

UNKNOWN_BYTES: Final = -1  # the MPI library chose the algorithm: how much it sends is its own affair


class EventSink(Protocol):
    """Looks on: told when an operation begins and when it ends.

    An operation that raises never ends, so that the last open event is the place of the failure.
    """

    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        """Note an operation on ``count`` elements and return a token for `end`.

        ``sent_bytes`` is what this rank puts on the wire as messages, or `UNKNOWN_BYTES`; ``peer`` is -1 where
        there is none.
        """
        ...

    def end(self, token: int) -> None:
        """Note that the operation behind ``token`` is complete."""
        ...


class _NullSink:
    def begin(self, comm: str, op: str, dtype: str, count: int, sent_bytes: int, peer: int, tag: int) -> int:
        return 0

    def end(self, token: int) -> None:
        return None


NULL_SINK: Final[EventSink] = _NullSink()
