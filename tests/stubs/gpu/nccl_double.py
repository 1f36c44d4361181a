"""A double of cupy.cuda.nccl over threads: communicators with the same id form a group and use array addresses."""

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from harness.jobs import LIMIT_S
from stubs.gpu import cuda_double

NCCL_SUM, NCCL_MAX, NCCL_MIN = 0, 2, 3
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = 6, 7, 8
_DTYPES = dict(enumerate(("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")))
_UFUNCS = {NCCL_SUM: np.add, NCCL_MAX: np.fmax, NCCL_MIN: np.fmin}

available = True
VERSION = [22703]  # as get_version gives it: 2.27.3; tests change it
_ids = itertools.count(1)
_meetings: dict[tuple[int, ...], "_Meeting"] = {}
_lock = threading.Lock()
_local = threading.local()


class NcclError(RuntimeError):
    """An error of NCCL."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[Any] = [None] * size
        self.sent = {(rank, peer): queue.SimpleQueue() for rank in range(size) for peer in range(size)}


def get_version() -> int:
    return VERSION[0]


def get_unique_id() -> tuple[int, ...]:
    return (next(_ids), *([0] * 127))


def groupStart() -> None:
    _local.group = []


def groupEnd() -> None:
    group, _local.group = _local.group, None
    for _, call in sorted(group, key=lambda pair: pair[0]):  # all are under way at once: no send waits for a receive
        call()


def _grouped(call: Callable[[], None], waits: bool = False) -> None:
    if getattr(_local, "group", None) is not None:
        _local.group.append((waits, call))
    else:
        call()


class NcclCommunicator:
    """One rank. All ranks must make every call."""

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:  # noqa: N803
        assert len(commId) == 128
        with _lock:
            self._meeting = _meetings.setdefault(commId, _Meeting(ndev))
        self._rank = rank
        self._everyone(None)

    def destroy(self) -> None:
        self._meeting = None  # type: ignore[assignment]

    def _everyone(self, value: Any) -> list[Any]:
        self._meeting.brought[self._rank] = value
        self._meeting.barrier.wait(LIMIT_S)
        values = list(self._meeting.brought)
        self._meeting.barrier.wait(LIMIT_S)
        return values

    def send(self, address: int, count: int, dtype: int, peer: int, stream: int) -> None:
        current, sent = _ordered(stream), self._meeting.sent[self._rank, peer]

        def call() -> None:
            current._run(current._given)
            sent.put(_at(address, count, dtype).copy())

        _grouped(call)

    def recv(self, address: int, count: int, dtype: int, peer: int, stream: int) -> None:
        current, sent = _ordered(stream), self._meeting.sent[peer, self._rank]

        def call() -> None:
            _at(address, count, dtype)[...] = sent.get(timeout=LIMIT_S)
            current._give()

        _grouped(call, waits=True)

    def _launch(self, stream: int, sent: np.ndarray, finish: Callable[[list[np.ndarray]], None]) -> None:
        current = _ordered(stream)

        def call() -> None:
            current._run(current._given)
            finish(self._everyone(sent.copy()))
            current._give()

        _grouped(call)

    def allReduce(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int) -> None:
        def finish(parts: list[np.ndarray]) -> None:
            _at(receive, count, dtype)[...] = _reduced(parts, op)

        self._launch(stream, _at(send, count, dtype), finish)

    def reduce(self, send: int, receive: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        def finish(parts: list[np.ndarray]) -> None:
            if self._rank == root:
                _at(receive, count, dtype)[...] = _reduced(parts, op)

        self._launch(stream, _at(send, count, dtype), finish)

    def broadcast(self, send: int, receive: int, count: int, dtype: int, root: int, stream: int) -> None:
        def finish(parts: list[np.ndarray]) -> None:
            _at(receive, count, dtype)[...] = parts[root]

        self._launch(stream, _at(send, count, dtype), finish)


def _ordered(stream: int) -> cuda_double.Stream:
    current = cuda_double.current_stream()
    assert stream == current.ptr, "the stream is not the current one: nothing orders it behind the kernels"
    return current


def _at(address: int, count: int, dtype: int) -> np.ndarray:
    kind = np.dtype(_DTYPES[dtype])
    if count == 0:
        return np.empty(0, kind)
    memory = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind)


def _reduced(parts: list[np.ndarray], op: int) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        _UFUNCS[op](total, part, out=total)
    return total
