"""What the kinds of progress of nonblocking collectives share; see `hpcdist.collectives.nonblocking`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.collectives import checked
from hpcdist.collectives.reduction import REFUSALS, check_buffer, check_op
from hpcdist.collectives.selection import Choice, parse
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, UsageError


class Handle(Protocol):
    """An operation under way. What made it fail is raised by `wait`, and by `test`, each time."""

    def wait(self) -> None:
        """Return when the buffer holds the result (local)."""
        ...

    def test(self) -> bool:
        """Whether the buffer holds the result (local)."""
        ...


class Progress(ABC):
    """Runs nonblocking collectives on a communicator of its own, made from ``comm``. Construction is collective.

    A context manager: leaving it closes; an exception ends it without the other ranks. ``own`` is the communicator that
    operations run on: memory that they shall find shared is allocated over that one.
    """

    algorithms: tuple[str, ...]

    def __init__(self, comm: Communicator, label: str) -> None:
        self.comm, self.own, self._closed = comm, comm.dup(label), False

    @property
    def busy_s(self) -> float:
        """Time spent in communication so far, hidden or not; NaN where nobody can know."""
        return math.nan

    def iallreduce(self, buffer: Array, algorithm: str | Choice = "native", op: str = "sum") -> Handle:
        """Begin to reduce ``buffer`` over all ranks in place. Collective over the communicator: in the same order.

        Arguments and errors are those of `hpcdist.collectives.allreduce`; UsageError also after `close`.
        """
        if self._closed:
            raise UsageError("iallreduce on a Progress that was closed; start it before close()")
        try:
            name = self._name(buffer, algorithm)
            check_op(op)
            check_buffer(buffer)
        except HpcdistError as error:
            if self.own.checked:
                self._refuse(checked.described("iallreduce", str(algorithm), buffer, op), error)
            raise
        if self.comm.size == 1:
            return _DONE
        events = self.comm.events
        # From start to end one event of the caller's communicator: who skips the call is named, as with any collective.
        token = events.begin(self.comm.name, f"{name}_iallreduce", name_of(buffer.dtype), buffer.size, 0, -1, 0)
        try:
            return self._start(buffer, name, op, lambda: events.end(token))
        except REFUSALS:
            events.end(token)
            raise

    def _name(self, buffer: Array, algorithm: str | Choice) -> str:
        """Return the algorithm, that for the size of ``buffer`` where it is a table. Raises UsageError."""
        name = parse(algorithm).at(buffer.nbytes) if algorithm not in self.algorithms else str(algorithm)
        if name not in self.algorithms:
            raise UsageError(
                f"nonblocking allreduce algorithm {name!r} is none of {', '.join(self.algorithms)}, which this "
                "kind of progress has; choose one of them"
            )
        return name

    @abstractmethod
    def _start(self, buffer: Array, algorithm: str, op: str, ended: Callable[[], None]) -> Handle: ...

    @abstractmethod
    def _refuse(self, call: checked.Call, error: HpcdistError) -> None:
        """Tell the other ranks, in checked mode, that this one raises ``error`` instead of joining in ``call``."""

    @abstractmethod
    def progress(self) -> None:
        """Move what is under way, without waiting (local). Nothing to do where a thread does it."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for all that is under way, and raise what made any of it fail."""

    def close(self) -> None:
        """Wait for all that was started and give everything back. Collective; later calls do nothing.

        Raises what made an operation fail. Handles stay valid: they are done.
        """
        if not self._closed:
            self._closed = True
            self._finish()
            self.own.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._closed = True  # the others may never come to a collective end
            self._abandon()

    def _abandon(self) -> None:
        """End what can be ended without the other ranks (local)."""
        return


class _Done:
    def wait(self) -> None:
        return

    def test(self) -> bool:
        return True


_DONE: Final = _Done()
