"""Activities of a script on one rank: its time is divided into waits for other ranks, phases and computation.

A wait counts as communication also within a phase. Waits of several threads count once. Each activity becomes a span
for `hpcdist trace`, and its seconds are the metrics of the step, so both agree.
"""

import threading
from collections import defaultdict
from typing import Any, Final

import numpy as np
import torch

from hpcdist.comm.record.spans import Spans, SpanSink, now_ns

COMPUTE: Final = ("compute", "compute")
GRADIENTS: Final = "gradients"  # name of the wait of DistributedDataParallel, at the end of the backward pass


class Activities:
    """Disjoint activities of this rank from the construction on, in ``spans`` and in seconds. Thread-safe. Local."""

    def __init__(self, spans: SpanSink) -> None:
        self._spans = spans
        self._lock = threading.Lock()
        self._phase: tuple[str, str] | None = None
        self._waits: list[str] = []  # operations in which threads wait
        self._futures: dict[int, int] = {}  # futures that a backward pass waits for at its end: id -> graph task
        self._is_awaiting = False  # True: the backward pass waits for these futures
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since_ns = self._step_ns = now_ns()
        self.step = 0  # the last completed step

    def _cut(self) -> None:
        # End the current activity now, before another activity begins.
        now = now_ns()
        if self._waits or self._is_awaiting:
            phase, name = "communication", f"wait {self._waits[0] if self._waits else GRADIENTS}"
        else:
            phase, name = self._phase or COMPUTE
        if now > self._since_ns:
            self._spans.add(phase, name, self.step + 1, self._since_ns, now)
            self._seconds[phase] += (now - self._since_ns) / 1e9
        self._since_ns = now

    def begin_wait(self, name: str) -> None:
        """Record that a thread begins to wait for other ranks in the operation ``name``."""
        with self._lock:
            self._cut()
            self._waits.append(name)

    def end_wait(self, name: str) -> None:
        """Record that the wait ``name`` of `begin_wait` has ended."""
        with self._lock:
            self._cut()
            self._waits.remove(name)

    def enter(self, phase: str, name: str = "") -> bool:
        """Begin ``phase``, unless another phase has begun. Return True if it begins. ``name``: label of the span."""
        with self._lock:
            if self._phase is not None:
                return False
            self._cut()
            self._is_awaiting, self._phase = False, (phase, name or phase)
            return True

    def leave(self) -> None:
        """End the phase."""
        with self._lock:
            self._cut()
            self._phase = None

    def end_step(self, step: int) -> None:
        """Record that all steps until ``step`` have ended."""
        with self._lock:
            self._cut()
            self._is_awaiting = False
            self._spans.add("step", "step", step, self._step_ns, self._since_ns)
            self.step, self._step_ns = step, self._since_ns

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of each phase until the last change of the activity, since the previous call."""
        with self._lock:
            seconds, self._seconds = self._seconds, defaultdict(float)
            return dict(seconds)

    def drain(self) -> np.ndarray:
        """Return the new spans as `Spans.drain` does, or no spans without a spans file."""
        with self._lock:
            return self._spans.drain() if isinstance(self._spans, Spans) else np.empty((0, 3), np.int64)

    def await_future(self, future: int) -> None:
        """Record that the program has requested the future with the id ``future``. No effect outside a backward pass.

        PyTorch's C++ code waits for such futures at the end of the backward pass, which no Python code sees.
        """
        task = torch._C._current_graph_task_id()
        if task < 0:
            return
        with self._lock:
            # In a nested backward pass, the outer pass may continue to compute.
            self._is_awaiting = False
            is_first = task not in self._futures.values()
            self._futures[future] = task
        if is_first:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        with self._lock:
            self._cut()
            self._is_awaiting = bool(self._futures)

    def end_future(self, future: int) -> None:
        """Record that the future with the id ``future`` is complete."""
        with self._lock:
            if self._futures.pop(future, None) is not None and not self._futures and self._is_awaiting:
                self._cut()
                self._is_awaiting = False


_current: Final[list[Activities]] = []  # of the program, while its steps are recorded


def current() -> Activities | None:
    """Return the activities that are recorded, or None."""
    return _current[0] if _current else None


def set_current(activities: Activities | None) -> None:
    """Record the following waits in ``activities``, or nowhere if None."""
    _current[:] = [] if activities is None else [activities]


class waiting:  # noqa: N801 - a context manager, used as a function
    """Context manager whose body waits for other ranks in the operation ``name``, such as "all_gather"."""

    __slots__ = ("_activities", "_name")

    def __init__(self, name: str) -> None:
        self._name, self._activities = name, current()

    def __enter__(self) -> None:
        if self._activities is not None:
            self._activities.begin_wait(self._name)

    def __exit__(self, *exception: object) -> None:
        if self._activities is not None:
            self._activities.end_wait(self._name)
