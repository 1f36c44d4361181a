"""Observers of a step on one rank: phase timer, profiler ranges and NaN search."""

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Scalar
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink, now_ns
from hpcdist.optim import norms
from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation
from hpcdist.strategies.schedule.step import Handler, StepObserver

# All other kinds are communication.
PHASES: Final = {
    **dict.fromkeys(COMPUTE, "compute"),
    Kind.ADD: "compute",
    Kind.KEEP: "compute",
    Kind.DIRECTION: "update",
    Kind.APPLY: "update",
    Kind.MIX: "update",
}


def phase_of(kind: Kind) -> str:
    """Return the phase ("compute", "communication" or "update") of operations of type ``kind``."""
    return PHASES.get(kind, "communication")


class PhaseTimer:
    """Timer of the operations of a training step. Local.

    It starts at construction, and adds to ``seconds["compute_s"]`` and the seconds of other phases.
    """

    # On a GPU, consecutive operations of a phase are timed as one.
    def __init__(
        self,
        operations: Sequence[Operation],
        seconds: MutableMapping[str, float],
        step: int,
        array: Array,
        spans: SpanSink = NULL_SPANS,
    ) -> None:
        self._operations, self._seconds, self._step, self._array, self._spans = operations, seconds, step, array, spans
        self._phases = [phase_of(operation.kind) for operation in operations]
        self._each = spans is not NULL_SPANS and not backend.is_device(array)
        self._first = 0  # first operation of the open span
        self._clock_ns = now_ns()

    def done(self, index: int) -> None:
        """Record that the operation number ``index`` of the step (from 0) has just ended."""
        phases = self._phases
        phase = phases[index]
        ends = index + 1 == len(phases) or phase != phases[index + 1]
        if not (ends or self._each):
            return
        if ends:
            # GPU work in flight belongs to this phase; a message would wait for it anyway.
            backend.synchronise(self._array)
        start_ns, self._clock_ns = self._clock_ns, now_ns()
        self._seconds[f"{phase}_s"] += (self._clock_ns - start_ns) / 1e9
        first, last = self._operations[self._first], self._operations[index]
        if self._first == index:
            self._spans.add(phase, last.kind.name, self._step, start_ns, self._clock_ns, last.microbatch, last.unit)
        else:
            name = first.kind.name if first.kind is last.kind else f"{first.kind.name} to {last.kind.name}"
            self._spans.add(phase, name, self._step, start_ns, self._clock_ns)
        self._first = index + 1


class ProfilerRanges(Protocol):
    """Interface of functions that open a profiler range (NVTX) around an operation."""

    def __call__(
        self, phase: str, name: str, microbatch: int = -1, unit: int = -1
    ) -> AbstractContextManager[object, bool | None]:
        """Return a context manager that opens a profiler range and closes it even on errors. Ranges may nest. Local."""


_NOTHING: Final = nullcontext()


def no_ranges(
    phase: str, name: str, microbatch: int = -1, unit: int = -1
) -> AbstractContextManager[object, bool | None]:
    """Return a context manager that does nothing, for runs without a profiler."""
    return _NOTHING


NO_RANGES: Final[ProfilerRanges] = no_ranges


def in_range(ranges: ProfilerRanges, phase: str, handler: Handler) -> Handler:
    """Return ``handler`` wrapped in a profiler range, which ``ranges`` opens. ``phase``: phase of the operations."""

    def run(op: Operation) -> None:
        with ranges(phase, op.kind.name, op.microbatch, op.unit):
            handler(op)

    return run


class OperationRanges(StepObserver):
    """Observer that runs every operation within a profiler range named after the operation type. Local."""

    def __init__(self, ranges: ProfilerRanges) -> None:
        self._ranges = ranges

    def around(self, kind: Kind, handler: Handler) -> Handler:
        return in_range(self._ranges, phase_of(kind), handler)


class NanFinder:
    """Search for the first non-finite value that this rank itself computed. Inactive until `begin`. Local."""

    def __init__(self) -> None:
        self._awake = False
        self._found: str | None = None

    @property
    def is_awake(self) -> bool:
        """True if the search for non-finite values is active: after `begin`, until it is stopped."""
        return self._awake

    def begin(self, parameters: FlatStore) -> None:
        """Start the search for this rank's first non-finite value; look first in its ``parameters``."""
        tensor = norms.first_nonfinite(parameters)
        self._found = f"parameter {tensor}" if tensor else None
        self._awake = True

    def end(self) -> str | None:
        """Stop the search for non-finite values; return a text that names the first such value, or None."""
        self._awake = False
        return self._found

    def look(self, what: str, values: Scalar) -> None:
        """Check ``values`` for NaN and infinity. If they are the first in this search, store their name ``what``."""
        if self._awake and self._found is None and not _finite(values):
            self._found = what

    def look_at_gradients(self, store: FlatStore, part: Range) -> None:
        """Check the gradients in ``part``, a range of ``store``. Store the first tensor that has NaN or infinity."""
        if self._awake and self._found is None:
            for segment, touched in store.layout.within(part):
                self.look(f"gradient of {segment.key}", store.range(touched))

    def sees_only_finite(self, values: Array) -> bool:
        """Return True if a search for NaN is active and all ``values`` are finite, else False."""
        return self._awake and _finite(values)

    def distrust(self, values: Array) -> None:
        """Stop the search if ``values``, received from another rank, are not finite: that rank had the first NaN."""
        if self._awake and not _finite(values):
            self._awake = False

    def distrust_tensors(self, store: FlatStore, part: Range) -> None:
        """Stop the search if ``part``, a range of ``store`` received from another rank, has non-finite values."""
        for _, touched in store.layout.within(part) if self._awake else ():
            self.distrust(store.range(touched))


def _finite(values: Scalar) -> bool:
    return bool(backend.namespace(values).isfinite(values).all())
