"""Nonblocking collectives without a thread: algorithms in steps, moved on whenever somebody looks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype, is_16bit_float, name_of
from hpcdist.collectives.progress import Handle, Progress, described
from hpcdist.collectives.resumable import ALL_GATHER, REDUCE_SCATTER, RESUMABLE, Lane, Task
from hpcdist.collectives.workspace import Kept, scratch_in
from hpcdist.comm import checked
from hpcdist.comm.communicator import Communicator, Request
from hpcdist.errors import CommunicationError, HpcdistError, MissingCapabilityError

TAGS: Final = 1 << 15  # MPI promises tags up to 32767


class _Operation:
    """Lanes under way, each with the requests that it waits for."""

    def __init__(self, owner: "PollProgress", slot: int, lanes: Sequence[Lane], finish: Callable[[], None]) -> None:
        self._owner, self.slot, self._finish = owner, slot, finish
        self._lanes: list[tuple[Lane, Sequence[Request]]] = [(lane, ()) for lane in lanes]
        self._over = False

    def advance(self) -> bool:
        """Take each lane as far as it goes without waiting; whether all are at their end (local)."""
        lanes = []
        for lane, pending in self._lanes:
            following: Sequence[Request] | None = pending
            while following is not None and all(request.test() for request in following):
                following = next(lane, None)
            if following is not None:
                lanes.append((lane, following))
        self._lanes = lanes
        if not lanes and not self._over:
            self._finish()
            self._over = True
        return self._over

    def waits_for(self) -> list[list[Request]]:
        """Return, for each lane, the requests that are not complete (local)."""
        return [[request for request in pending if not request.test()] for _, pending in self._lanes]

    def wait(self) -> None:
        """Move everything that is under way until this is complete."""
        while not self.test():
            self._owner.wait_for_more()

    def test(self) -> bool:
        """Move everything that is under way; whether this is complete."""
        if not self._over:
            self._owner.progress()
        return self._over


class PollProgress(Progress):
    """Moves its operations within `progress`, `Handle.test` and `Handle.wait`, and nowhere else.

    After a failure nothing moves any more: the ranks may be out of step. "ring" gives the bits of the blocking ring,
    "native" those of MPI_Iallreduce, which may add in another order than MPI_Allreduce: in Open MPI 5, on 3 ranks, a
    fifth of 30,000 floats differ.
    """

    algorithms: ClassVar = {operation: tuple(known) for operation, known in RESUMABLE.items()}

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, "polled")
        self._active: list[_Operation] = []
        self._kept: Kept = {}  # scratch, by slots: another progress of this thread is under way beside this one
        self._tag = 0
        self._failed: BaseException | None = None

    def _start(self, task: Task, ended: Callable[[], None]) -> Handle:
        self._check()
        if task.operation == REDUCE_SCATTER and is_16bit_float(task.buffer.dtype):
            raise MissingCapabilityError(
                f"a reduce-scatter of {name_of(task.buffer.dtype)} has no steps to be polled in: its addends go to the "
                "owner of a share at once; set communication.overlap = 'thread', or 'none'"
            )
        if self.own.checked:
            with self._in_step():
                checked.compare_while(self.own, described(task), self.wait_a_little)
        slots = {operation.slot for operation in self._active}
        slot = next(number for number in range(len(slots) + 1) if number not in slots)
        buffer = wide = task.buffer
        if is_16bit_float(buffer.dtype) and task.operation != ALL_GATHER:
            # Summed in float32 and rounded once, as by the blocking algorithms.
            wide = scratch_in(self._kept, f"{slot} widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
            wide[...] = buffer

        def arrivals(size: int) -> Array:
            return scratch_in(self._kept, f"{slot}", size, wide.dtype, wide)

        def finish() -> None:
            if wide is not buffer:
                with np.errstate(over="ignore"):  # infinity is the message: loss scaling looks for it
                    buffer[...] = wide
            ended()

        lanes = RESUMABLE[task.operation][task.algorithm](
            self.own, replace(task, buffer=wide), arrivals, self._next_tag
        )
        operation = _Operation(self, slot, lanes, finish)
        self._active.append(operation)
        self.progress()  # the first messages leave now
        return operation

    def _refuse(self, call: checked.Call, error: HpcdistError) -> None:
        checked.refuse(self.own, call, error, self.wait_a_little)

    def _next_tag(self) -> int:
        self._tag = (self._tag + 1) % TAGS
        return self._tag

    def progress(self) -> None:
        """Take every operation as far as it goes without waiting (local)."""
        self._check()
        with self._in_step():
            self._active = [operation for operation in self._active if not operation.advance()]

    def wait_a_little(self, *others: Request) -> None:
        """Move what can move, and wait until one more message, or one of ``others``, is complete (local)."""
        self.progress()
        self.wait_for_more(*others)

    def wait_for_more(self, *others: Request) -> None:
        """Wait until one more message, or one of ``others``, is complete, unless one is by now (local)."""
        with self._in_step():
            lanes = [lane for each in self._active for lane in each.waits_for()]
            lanes += [[] if request.test() else [request] for request in others]
            if lanes and all(lanes):  # a lane that can go on by now is not waited beside: others may wait for it
                self.own.wait_any([request for lane in lanes for request in lane])

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failed = error
            raise

    def _check(self) -> None:
        if self._failed is not None:
            raise CommunicationError(
                f"a nonblocking collective failed before ({self._failed!r}): nothing is moved any more"
            ) from self._failed

    def _finish(self) -> None:
        for operation in list(self._active):
            operation.wait()
        self._kept.clear()
