"""Memory allocated by steady steps of a training: Python's memory, including numpy's, and the ledger.


Messages between thread ranks are copied by the communicator, like an MPI library copies in its memory.
`unseen_messages` moves those copies to memory that is not counted.
"""

import mmap
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from harness.trainings import trainer_of
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import ThreadCommunicator, run_threads, solo
from hpcdist.training.build.trainer import Trainer

WARM = 3  # warm-up steps; the second step has the first gradient that is summed late
LOOKS = 3  # steps that are measured, each separately; one step runs under the tracer before


@dataclass
class Steady:
    """The bytes that a step allocated, and the ledger of a rank before and after `LOOKS` steps.


    Memory is counted per process: thread ranks share it, and the first rank counts it. A step always allocates the same
    amount, but other threads of the process (of the test runner or of earlier tests) allocate at random moments.
    Therefore ``transient`` is the minimum over the steps.
    """

    transient: int = 0  # peak above the bytes before the step
    left: int = 0  # remaining after all steps
    before: tuple[dict[str, int], dict[str, int]] = ({}, {})  # bytes by category, and their peaks
    after: tuple[dict[str, int], dict[str, int]] = ({}, {})
    largest: int = 0  # bytes of the model's largest tensor


class _Unseen:
    """A message whose copy lies in memory mapped from the kernel, which tracemalloc does not see."""

    def __init__(self, message: np.ndarray) -> None:
        self._message = message

    def view(self, dtype: Any) -> "_Unseen":
        return _Unseen(self._message.view(dtype))

    def __getitem__(self, part: slice) -> "_Unseen":
        return _Unseen(self._message[part])

    def copy(self) -> np.ndarray:
        message = self._message
        if not message.size:
            return message.copy()
        memory = np.frombuffer(mmap.mmap(-1, message.nbytes), message.dtype).reshape(message.shape)
        memory[...] = message
        return memory


def unseen_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the copies of messages between threads from the memory count."""
    send, exchange = ThreadCommunicator._send, ThreadCommunicator._all_to_all
    monkeypatch.setattr(
        ThreadCommunicator, "_send", lambda self, message, peer, tag: send(self, _Unseen(message), peer, tag)
    )
    monkeypatch.setattr(
        ThreadCommunicator, "_all_to_all", lambda self, message, *rest: exchange(self, _Unseen(message), *rest)
    )


@contextmanager
def keep_messages_in_flight(trainer: Trainer) -> Iterator[None]:
    """Keep every pipeline message in flight until the end of its step: the worst case of a slow receiver."""
    neighbours: Any = trainer.executor._stages.neighbours
    neighbours._reap = lambda: None
    yield
    del neighbours._reap


def measure_steady_steps(
    keys: dict[str, object], ranks: int = 1, change: Callable[[Trainer], None] = lambda trainer: None
) -> Steady:
    """Return the allocations of steady steps of ``keys`` on thread ranks, with the ledger of the last rank.


    Raises AssertionError if the ledger of another rank changes.
    """
    if ranks == 1:
        return steps_of(solo(), keys, change=change)
    results = run_threads(ranks, lambda comm: steps_of(comm, keys, counts=comm.rank == 0, change=change))
    assert all(one.before == one.after for one in results)
    return replace(results[-1], transient=results[0].transient, left=results[0].left)


def steps_of(
    comm: Communicator,
    keys: dict[str, object],
    *,
    counts: bool = True,
    change: Callable[[Trainer], None] = lambda trainer: None,
) -> Steady:
    """Return the allocations of the steps after the first ones of a run of ``keys``.

    The data is read before. Collective.
    """
    trainer, result = trainer_of(comm, keys), Steady()
    change(trainer)
    with trainer.batches(WARM + 1 + LOOKS) as batches:
        given = [trainer.cut(trainer.place(batch)) for batch in batches]

    def run(first: int, last: int) -> None:
        for step in range(first, last + 1):
            trainer.step(step, given[step - 1], np.zeros(2))
        comm.barrier()

    with keep_messages_in_flight(trainer):
        run(1, WARM)
    result.before = trainer.ledger.current, trainer.ledger.peak
    result.largest = max(s.range.size for s in trainer.model.layout.segments) * trainer.model.dtype.itemsize
    if counts:
        tracemalloc.start()
    comm.barrier()
    run(WARM + 1, WARM + 1)  # what is kept between steps was not counted when it was made
    began = tracemalloc.get_traced_memory()[0] if counts else 0
    peaks = []
    for look in range(1, LOOKS + 1):
        before = 0
        if counts:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
        comm.barrier()
        run(WARM + 1 + look, WARM + 1 + look)
        if counts:
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
        comm.barrier()  # the next step of another rank is not this one's
    if counts:
        result.transient, result.left = min(peaks), tracemalloc.get_traced_memory()[0] - began
        tracemalloc.stop()
    result.after = trainer.ledger.current, trainer.ledger.peak
    comm.barrier()
    return result
