"""Ranges around what a rank does, for profilers: a seam, so that nothing is marked where nobody asked."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from hpcdist.strategies.schedule.operations import Operation


class Ranges(Protocol):
    """Hands out the range around something that the rank does."""

    def __call__(
        self, phase: str, name: str, microbatch: int = -1, unit: int = -1
    ) -> AbstractContextManager[object, bool | None]:
        """Return what is entered before and left after it, also when it raises. Ranges nest (local)."""
        ...


_NOTHING: Final = nullcontext()


def no_ranges(
    phase: str, name: str, microbatch: int = -1, unit: int = -1
) -> AbstractContextManager[object, bool | None]:
    """Mark nothing: the `Ranges` of a run that nobody profiles."""
    return _NOTHING


NO_RANGES: Final[Ranges] = no_ranges


def within(ranges: Ranges, phase: str, handler: Callable[[Operation], None]) -> Callable[[Operation], None]:
    """Return ``handler``, each call of which is within one of ``ranges``."""

    def run(op: Operation) -> None:
        with ranges(phase, op.kind.name, op.microbatch, op.unit):
            handler(op)

    return run
