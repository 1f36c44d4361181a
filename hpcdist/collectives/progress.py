"""What the kinds of progress of nonblocking collectives share; see `hpcdist.collectives.nonblocking`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import name_of
from hpcdist.collectives.reduction import check_buffer
from hpcdist.collectives.selection import parse
from hpcdist.comm.communicator import REDUCTIONS, Communicator
from hpcdist.errors import UsageError


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

    def iallreduce(self, buffer: Array, algorithm: str = "native", op: str = "sum") -> Handle:
        """Begin to reduce ``buffer`` over all ranks in place. Collective over the communicator: in the same order.

        Arguments and errors are those of `hpcdist.collectives.allreduce`; UsageError also after `close`.
        """
        if self._closed:
            raise UsageError("iallreduce on a Progress that was closed; start it before close()")
        if "<=" in algorithm:
            algorithm = parse(algorithm).at(buffer.nbytes)  # a table of them by size
        if algorithm not in self.algorithms:
            raise UsageError(
                f"nonblocking allreduce algorithm {algorithm!r} is none of {', '.join(self.algorithms)}, which this "
                "kind of progress has; choose one of them"
            )
        if op not in REDUCTIONS:
            raise UsageError(f"reduction {op!r} is unknown; choose one of {', '.join(REDUCTIONS)}")
        check_buffer(buffer)
        if self.comm.size == 1:
            return _DONE
        events = self.comm.events
        # From start to end one event of the caller's communicator: who skips the call is named, as with any collective.
        token = events.begin(self.comm.name, f"{algorithm}_iallreduce", name_of(buffer.dtype), buffer.size, 0, -1, 0)
        return self._start(buffer, algorithm, op, lambda: events.end(token))

    @abstractmethod
    def _start(self, buffer: Array, algorithm: str, op: str, ended: Callable[[], None]) -> Handle: ...

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
