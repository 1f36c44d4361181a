"""Channel on which every rank sends rows of metrics to rank 0, without waiting for other ranks."""

import pickle
from collections import Counter
from typing import Any

import numpy as np

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transport import Message, Request


class RowChannel:
    """Channel for Python objects from every rank to rank 0. Construction, `drain` and `free` are collective."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._channel = comm, comm.dup("rows")
        self._channel.observe_nothing()  # a message in flight is no wait: no deadline, and no finding of `hpcdist hang`
        self._in_flight: list[Request] = []
        self._sent = 0  # messages from this rank since the start
        self._received: Counter[int] = Counter()  # messages received by rank 0, by sender

    def test(self) -> None:
        """Complete the messages from this rank that have been delivered."""
        self._in_flight = [request for request in self._in_flight if not request.test()]

    def send(self, rows: Any) -> None:
        """Send ``rows`` to rank 0, without waiting. Not on rank 0."""
        self.test()
        message = np.frombuffer(bytearray(pickle.dumps(rows)), np.uint8)
        self._in_flight.append(self._channel.isend(message, 0))
        self._sent += 1

    def arrived(self) -> list[tuple[int, Any]]:
        """Return a list of (sender, rows), one per message that has arrived since the last call. Rank 0 only."""
        messages = []
        while (message := self._channel.poll()) is not None:
            messages.append(self._receive(message))
        return messages

    def drain(self) -> list[tuple[int, Any]]:
        """Wait until rank 0 has received all messages sent so far. Return the new messages as in `arrived`. Collective.

        Ranks other than 0 return [].
        """
        messages = []
        counts = self._comm.allgather_object(self._sent)
        events = self._comm.events
        token = events.begin(self._comm.name, "drain", "uint8", 0, 0, -1, 0)  # with a deadline
        for rank, count in enumerate(counts):
            while self._comm.rank == 0 and self._received[rank] < count:
                messages.append(self._receive(self._channel.probe(rank)))
        for request in self._in_flight:
            request.wait()
        events.end(token)
        self._in_flight.clear()
        return messages

    def _receive(self, message: Message) -> tuple[int, Any]:
        content = np.zeros(message.nbytes, np.uint8)
        message.recv(content)
        self._received[message.source] += 1
        return message.source, pickle.loads(content.tobytes())

    def free(self) -> None:
        self._channel.free()
