"""Non-blocking messages between threads that use memory as freely as MPI may.


The buffer of `isend` is read only when its receiver waits. The buffer of `irecv` is full of 0xFF from the call on, and
is filled at the wait. Memory that is written, read or reused too early is thereby detected.
"""

from typing import Any

import numpy as np
import pytest

from hpcdist.arrays.backend import Array
from hpcdist.comm.threads.communicator import ThreadCommunicator
from hpcdist.comm.threads.group import PostedReceive, deliver
from hpcdist.comm.transport import Request


class _Late:
    """A message whose contents are read from the sender's memory when it is received; also the sender's request."""

    def __init__(self, comm: ThreadCommunicator, message: Array, tag: int) -> None:
        self._comm, self._message = comm, message
        self.source, self.tag, self.taken = comm.rank, tag, False

    @property
    def payload(self) -> Array:
        return self._message.view(np.uint8)

    def test(self) -> bool:
        return self.taken

    def wait(self) -> None:
        changed = self._comm._group.changed
        with changed:
            self._comm._wait(changed, lambda: self.taken, None, "a send that nobody takes")


class _Receive:
    def __init__(self, comm: ThreadCommunicator, message: Array, posted: PostedReceive) -> None:
        self._comm, self._message, self._posted = comm, message, posted

    def test(self) -> bool:
        return False

    def wait(self) -> None:
        envelope: Any = self._comm._arrived(self._posted)
        deliver(envelope, self._message)
        with self._comm._group.changed:
            envelope.taken = True
            self._comm._group.changed.notify_all()


def _isend(comm: ThreadCommunicator, message: Array, peer: int, tag: int) -> Request:
    envelope: Any = _Late(comm, message, tag)
    group = comm._group
    with group.changed:
        line = group.posted[peer]
        first = next((posted for posted in line if posted.matches(envelope)), None)
        if first is None:
            group.unexpected[peer].append(envelope)
        else:
            line.remove(first)
            first.envelope = envelope
        group.changed.notify_all()
    return envelope


def _irecv(comm: ThreadCommunicator, message: Array, peer: int, tag: int) -> Request:
    message.view(np.uint8)[...] = 0xFF
    return _Receive(comm, message, comm._post(peer, tag))


def _recv(comm: ThreadCommunicator, message: Array, peer: int, tag: int) -> None:
    _Receive(comm, message, comm._post(peer, tag)).wait()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `isend` and `irecv` of threads late."""
    for name, function in (("_isend", _isend), ("_irecv", _irecv), ("_recv", _recv)):
        monkeypatch.setattr(ThreadCommunicator, name, function)
