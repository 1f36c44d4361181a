"""What steps of a training allocate once they have run: Python's memory, numpy's included, and the ledger.

Messages between ranks that are threads are copied by their communicator, as an MPI library does in memory of its own:
`unseen_messages` puts those copies where nothing counts them.
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

WARM = 3  # steps after which everything is there; the second has the first gradient that is summed up late
LOOKS = 3  # steps that are looked at, each by itself; one step is made under the tracer before


@dataclass
class Steady:
    """What a step added, in bytes, and what the ledger of a rank held around `LOOKS` of them.

    Memory is that of the process: of all ranks together where they are threads, and then counted by the first one.
    A step allocates the same each time; another thread of the process (of the test runner, or that an earlier test has
    left) allocates at moments of its own. So ``transient`` is the least of the looks.
    """

    transient: int = 0  # the most at once, above what there was before
    left: int = 0  # after all of them
    before: tuple[dict[str, int], dict[str, int]] = ({}, {})  # bytes by category, and their peaks
    after: tuple[dict[str, int], dict[str, int]] = ({}, {})
    largest: int = 0  # bytes of the model's largest tensor


class _Unseen:
    """A message whose copy lies in memory that is taken from the kernel."""

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
    """Let no copy of a message between threads count."""
    send, exchange = ThreadCommunicator._send, ThreadCommunicator._all_to_all
    monkeypatch.setattr(
        ThreadCommunicator, "_send", lambda self, message, peer, tag: send(self, _Unseen(message), peer, tag)
    )
    monkeypatch.setattr(
        ThreadCommunicator, "_all_to_all", lambda self, message, *rest: exchange(self, _Unseen(message), *rest)
    )


@contextmanager
def most_under_way(trainer: Trainer) -> Iterator[None]:
    """Let every message of a pipeline be under way to the end of its step: so much memory a slow receiver may cost."""
    neighbours: Any = trainer.executor._stages.neighbours
    neighbours._reap = lambda: None
    yield
    del neighbours._reap


def steady(keys: dict[str, object], ranks: int = 1, change: Callable[[Trainer], None] = lambda trainer: None) -> Steady:
    """Return what steps of ``keys`` allocate on ranks that are threads; their ledgers are those of the last one.

    Those of the others are flat, too: else AssertionError.
    """
    if ranks == 1:
        return steps_of(solo(), keys, change=change)
    found = run_threads(ranks, lambda comm: steps_of(comm, keys, counts=comm.rank == 0, change=change))
    assert all(one.before == one.after for one in found)
    return replace(found[-1], transient=found[0].transient, left=found[0].left)


def steps_of(
    comm: Communicator,
    keys: dict[str, object],
    *,
    counts: bool = True,
    change: Callable[[Trainer], None] = lambda trainer: None,
) -> Steady:
    """Return what the steps after the first ones of a run of ``keys`` allocate. Collective. Data are read before."""
    trainer, found = trainer_of(comm, keys), Steady()
    change(trainer)
    with trainer.batches(WARM + 1 + LOOKS) as batches:
        given = [trainer.cut(trainer.place(batch)) for batch in batches]

    def run(first: int, last: int) -> None:
        for step in range(first, last + 1):
            trainer.step(step, given[step - 1], np.zeros(2))
        comm.barrier()

    with most_under_way(trainer):
        run(1, WARM)
    found.before = trainer.ledger.current, trainer.ledger.peak
    found.largest = max(s.range.size for s in trainer.model.layout.segments) * trainer.model.dtype.itemsize
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
        found.transient, found.left = min(peaks), tracemalloc.get_traced_memory()[0] - began
        tracemalloc.stop()
    found.after = trainer.ledger.current, trainer.ledger.peak
    comm.barrier()
    return found
