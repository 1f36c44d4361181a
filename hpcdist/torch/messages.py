"""Point-to-point messages of a process group.

MPI moves large messages only inside MPI calls, so a thread polls the messages in flight if MPI allows a second thread.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Final, TypeAlias

import torch

from hpcdist.arrays.dtypes import name_of
from hpcdist.collectives import segments
from hpcdist.comm.communicator import ANY, Communicator
from hpcdist.comm.transport import Request
from hpcdist.errors import DeadlineError
from hpcdist.torch.activity import waiting
from hpcdist.torch.buffers import Buffer
from hpcdist.torch.streams import Streams
from hpcdist.torch.work import END_S, LOOK_S, Work

IDLE_LOOKS: Final = 50  # polls without a message in flight until the thread sleeps
ON_HOST: Final = nullcontext()
_given_up: Final = list["MessageWork"]()  # abandoned messages: MPI may use their tensors until the process ends


class _AnySource:
    def __init__(self, comm: Communicator, buffer: Buffer, tag: int) -> None:
        self._comm, self._buffer, self._tag = comm, buffer, tag
        self.source = ANY
        self._events = comm.events  # an unsuccessful poll records no event, so has no deadline
        self._token = self._events.begin(comm.name, "recv", name_of(buffer.array.dtype), buffer.array.size, 0, ANY, tag)

    def test(self) -> bool:
        message = self._comm.poll(ANY, self._tag)
        if message is None:
            return False
        self.source = message.source
        message.recv(self._buffer.array)
        self._events.end(self._token)
        return True


Pending: TypeAlias = Request | _AnySource


class MessageWork(Work):
    """Handle of a point-to-point message, as returned by PyTorch's isend and irecv."""

    def __init__(
        self,
        mailbox: "Mailbox",
        begin: Callable[[], Pending],
        tensor: torch.Tensor,
        finish: Callable[[], None],
        peer: int,
        streams: Streams | None,
    ) -> None:
        super().__init__([tensor], streams)
        self._mailbox, self._finish, self._peer = mailbox, finish, peer
        self._start_event = None if streams is None else streams.mark()
        with self._in_order():
            self._request = begin()

    def _in_order(self) -> AbstractContextManager[None]:
        return ON_HOST if self.streams is None else self.streams.communicating(self._start_event)

    def look(self) -> bool:
        """Poll the message. Return True if it has been sent or received. The caller must hold the mailbox's lock."""
        if self.done:
            return True
        error = None
        try:
            with self._in_order():
                if not self._request.test():
                    return False
                self._finish()
                self.end_event = None if self.streams is None else self.streams.mark()
        except BaseException as raised:  # noqa: BLE001 (raised again by `wait`)
            error = raised
        self.end(error)
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self._mailbox.look(self)
        return super().is_completed()

    def source_rank(self) -> int:
        """Return the rank of the sender, or ANY if the sender of an awaited message is not determined yet."""
        return self._request.source if isinstance(self._request, _AnySource) else self._peer

    _source_rank = source_rank

    def _complete(self, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        limit = time.monotonic() + seconds if seconds > 0 else None
        with waiting("message"):
            while not self._mailbox.look(self):
                time.sleep(0)
                if limit is not None and time.monotonic() > limit:
                    raise DeadlineError(
                        f"a message from or to {self._peer_name()} on the communicator {self._mailbox.name} has not "
                        f"ended within {seconds:g} s; check that the peer makes the matching call, or pass a longer "
                        "timeout"
                    )

    def _peer_name(self) -> str:
        return "any rank" if self._peer == ANY else f"rank {self._peer}"

    def _let_end(self) -> None:
        if not self._mailbox.has_thread:
            self.wait()


class Mailbox:
    """Sender and receiver of the point-to-point messages of one process group. It polls the messages in flight."""

    def __init__(self, comm: Communicator, has_thread: bool) -> None:
        self.comm, self.has_thread, self.name = comm, has_thread, comm.name
        self._lock = threading.Lock()
        self._under_way: list[MessageWork] = []
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_awake = False

    def send(self, tensor: torch.Tensor, peer: int, tag: int, streams: Streams | None) -> MessageWork:
        """Start sending ``tensor`` to rank ``peer``, and return a handle. Local.

        ``streams``: CUDA streams to use for a GPU tensor, or None for a CPU tensor.
        """
        buffer = Buffer(tensor)

        def begin() -> Pending:
            return self.comm.isend(buffer.array, peer, tag)

        return self._post(MessageWork(self, begin, tensor, lambda: None, peer, streams))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, streams: Streams | None) -> MessageWork:
        """Start receiving into ``tensor`` from rank ``peer``, or from any rank if ``peer`` is ANY. Return a handle.

        ``streams``: CUDA streams to use for a GPU tensor, or None for a CPU tensor. Local.
        """
        buffer = Buffer(tensor)

        def begin() -> Pending:
            return _AnySource(self.comm, buffer, tag) if peer == ANY else self.comm.irecv(buffer.array, peer, tag)

        return self._post(MessageWork(self, begin, tensor, buffer.finish, peer, streams))

    def _post(self, message: MessageWork) -> MessageWork:
        with self._lock:
            self._under_way.append(message)
            wake, self._is_awake = self.has_thread and not self._is_awake, True
        if wake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"messages of {self.name}", daemon=True)
                self._thread.start()
            self._calls.put(True)
        return message

    def look(self, message: MessageWork) -> bool:
        """Poll the `MessageWork` ``message``, and return True if it has been sent or received. Local."""
        with self._lock:
            ended = message.look()
            if ended and message in self._under_way:
                self._under_way.remove(message)
        if ended:
            message.settle()
        return ended

    def _serve(self) -> None:
        while self._calls.get():
            idle = 0
            while idle < IDLE_LOOKS:
                time.sleep(LOOK_S)
                with self._lock:
                    ended = [message for message in self._under_way if message.look()]
                    self._under_way = [message for message in self._under_way if not message.done]
                    idle = 0 if self._under_way else idle + 1
                    if idle == IDLE_LOOKS:
                        self._is_awake = False
                for message in ended:
                    message.settle()
                ended.clear()
        segments.release()  # waits for copies that read pinned memory

    def finish(self) -> None:
        """Poll messages in flight until all have ended, for at most one second. Local."""
        limit = time.monotonic() + END_S
        while self._under_way and time.monotonic() < limit:
            for message in list(self._under_way):
                self.look(message)
            time.sleep(0)

    def close(self) -> None:
        """End the polling thread, and abandon the messages in flight. Local.

        The tensors of abandoned messages stay in memory, because MPI may still use them.
        """
        with self._lock:
            _given_up.extend(self._under_way)
            self._under_way.clear()
        if self._thread is not None:
            self._calls.put(False)
            if self._thread is not threading.current_thread():
                self._thread.join(END_S)
            self._thread = None
