"""What steps of a training allocate once they have run: Python's memory, numpy's included, and the ledger.

Messages between ranks that are threads are copied by the communicator, as an MPI library would in memory of its own:
`unseen_messages` puts those copies where nothing counts them.
"""

import mmap
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from rank_runs import trainer_of

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.solo import solo
from hpcdist.comm.threads import ThreadCommunicator, run_threads
from hpcdist.training.trainer import Trainer

WARM = 3  # steps after which everything is there; the second has the first gradient that is summed up late
MEASURED = 3


@dataclass
class Steady:
    """What `MEASURED` steps of all ranks together added, in bytes, and what one rank's ledger held around them."""

    transient: int  # the most at once, above what there was before
    left: int  # afterwards
    ledgers: list[tuple[dict[str, int], dict[str, int]]]  # of each rank: (bytes by category, their peaks), before
    after: list[tuple[dict[str, int], dict[str, int]]]
    largest: int  # bytes of the model's largest tensor


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


def steady(keys: dict[str, object], ranks: int = 1, change: Callable[[Trainer], None] = lambda trainer: None) -> Steady:
    """Return what the steps after the first ones of a run of ``keys`` allocate. The data are read before."""
    shared: dict[str, Any] = {"ledgers": [None] * ranks, "after": [None] * ranks}

    def body(comm: Communicator) -> None:
        trainer = trainer_of(comm, keys)
        change(trainer)
        with trainer.batches(WARM + MEASURED) as batches:
            given = [trainer.cut(trainer.place(batch)) for batch in batches]

        def run(first: int, last: int) -> None:
            for step in range(first, last + 1):
                trainer.step(step, given[step - 1], np.zeros(2))
            comm.barrier()

        run(1, WARM)
        shared["ledgers"][comm.rank] = (trainer.ledger.current, trainer.ledger.peak)
        shared["largest"] = max(s.range.size for s in trainer.model.layout.segments) * trainer.model.dtype.itemsize
        if comm.rank == 0:
            tracemalloc.start()
        comm.barrier()
        run(WARM + 1, WARM + 1)  # what is made once and kept was not counted when it was made
        if comm.rank == 0:
            shared["before"] = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
        comm.barrier()
        run(WARM + 2, WARM + MEASURED)
        if comm.rank == 0:
            shared["now"], shared["peak"] = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        shared["after"][comm.rank] = (trainer.ledger.current, trainer.ledger.peak)
        comm.barrier()

    if ranks == 1:
        body(solo())
    else:
        run_threads(ranks, body)
    before = shared["before"]
    return Steady(
        shared["peak"] - before, shared["now"] - before, shared["ledgers"], shared["after"], shared["largest"]
    )
