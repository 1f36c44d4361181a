"""Observers of a step on one rank: phase timer, profiler ranges, search for NaN.

`PhaseTimer` counts the seconds of each operation in its phase, with a span for each. `ProfilerRanges` is the
protocol of profilers (NVTX), and `OperationRanges` the observer that runs every operation within one of them.
`NanFinder` remembers the first value that is not finite while a failed step is computed again.
"""

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Scalar
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink, now_ns
from hpcdist.optim import norms
from hpcdist.strategies.schedule.operations import COMPUTE, Kind, Operation
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
    """Return the phase whose time operations of a ``kind`` count in."""
    return PHASES.get(kind, "communication")


class PhaseTimer:
    """Timer of the ``operations`` of ``step``, one after the other, from its construction on (local).

    ``seconds`` gets what each phase took, as ``compute_s``. On a GPU, which works on what was launched until somebody
    waits for it, operations of one phase are one span: they are waited for together, at the end of the phase.
    ``array`` says which device that is.
    """

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
        self._first = 0  # the first operation of the span that is open
        self._clock_ns = now_ns()

    def done(self, place: int) -> None:
        """Add the time of the operation at ``place``, which has just returned."""
        phases = self._phases
        phase = phases[place]
        ends = place + 1 == len(phases) or phase != phases[place + 1]
        if not (ends or self._each):
            return
        if ends:
            # What a GPU still computes belongs to this phase; a message would wait for it anyway.
            backend.synchronise(self._array)
        begun, self._clock_ns = self._clock_ns, now_ns()
        self._seconds[f"{phase}_s"] += (self._clock_ns - begun) / 1e9
        first, last = self._operations[self._first], self._operations[place]
        if self._first == place:
            self._spans.add(phase, last.kind.name, self._step, begun, self._clock_ns, last.microbatch, last.unit)
        else:
            name = first.kind.name if first.kind is last.kind else f"{first.kind.name} to {last.kind.name}"
            self._spans.add(phase, name, self._step, begun, self._clock_ns)
        self._first = place + 1


class ProfilerRanges(Protocol):
    """Factory of profiler ranges (NVTX) around the operations of the rank."""

    def __call__(
        self, phase: str, name: str, microbatch: int = -1, unit: int = -1
    ) -> AbstractContextManager[object, bool | None]:
        """Return the context manager of a range, which ends also when it raises. Ranges nest (local)."""


_NOTHING: Final = nullcontext()


def no_ranges(
    phase: str, name: str, microbatch: int = -1, unit: int = -1
) -> AbstractContextManager[object, bool | None]:
    """Mark nothing: the `ProfilerRanges` of a run without a profiler."""
    return _NOTHING


NO_RANGES: Final[ProfilerRanges] = no_ranges


def in_range(ranges: ProfilerRanges, phase: str, handler: Handler) -> Handler:
    """Return ``handler``, each call of which is within one of ``ranges``."""

    def run(op: Operation) -> None:
        with ranges(phase, op.kind.name, op.microbatch, op.unit):
            handler(op)

    return run


class OperationRanges(StepObserver):
    """Runs every operation within one of ``ranges``, named by its kind (local)."""

    def __init__(self, ranges: ProfilerRanges) -> None:
        self._ranges = ranges

    def around(self, kind: Kind, handler: Handler) -> Handler:
        """Return ``handler`` within a range of its phase."""
        return in_range(self._ranges, phase_of(kind), handler)


class NanFinder:
    """Search for the first value of this rank's own work that is not finite; off until `begin`. Local."""

    def __init__(self) -> None:
        self._awake = False
        self._found: str | None = None

    @property
    def is_awake(self) -> bool:
        """Whether the search is on."""
        return self._awake

    def begin(self, parameters: FlatStore) -> None:
        """Start the search, with the parameters that this rank keeps."""
        tensor = norms.first_nonfinite(parameters)
        self._found = f"parameter {tensor}" if tensor else None
        self._awake = True

    def end(self) -> str | None:
        """Stop the search; return the place of the first bad value."""
        self._awake = False
        return self._found

    def look(self, what: str, values: Scalar) -> None:
        """Check ``values``, which this rank has computed."""
        if self._awake and self._found is None and not _finite(values):
            self._found = what

    def look_at_gradients(self, store: FlatStore, part: Range) -> None:
        """Check the gradients of the tensors in ``part``."""
        if self._awake and self._found is None:
            for segment, touched in store.layout.within(part):
                self.look(f"gradient of {segment.key}", store.range(touched))

    def sees_only_finite(self, values: Array) -> bool:
        """Whether the search is on, and ``values``, which this rank has computed, are finite."""
        return self._awake and _finite(values)

    def distrust(self, values: Array) -> None:
        """Stop the search where ``values`` of another rank are bad: what follows is not this rank's fault."""
        if self._awake and not _finite(values):
            self._awake = False

    def distrust_tensors(self, store: FlatStore, part: Range) -> None:
        """Stop the search where tensors in ``part``, which came from another rank, are bad."""
        for _, touched in store.layout.within(part) if self._awake else ():
            self.distrust(store.range(touched))


def _finite(values: Scalar) -> bool:
    return bool(backend.namespace(values).isfinite(values).all())
