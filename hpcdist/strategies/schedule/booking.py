"""What each operation of a step is booked under, and for how long: the seconds by phase, and a span for each."""

from collections.abc import MutableMapping, Sequence
from typing import Final

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.comm.spans import NULL_SPANS, SpanSink, now_ns
from hpcdist.strategies.schedule.operations import COMPUTE, Kind, Operation

# All other kinds are communication.
PHASES: Final = {
    **dict.fromkeys(COMPUTE, "compute"),
    Kind.ADD: "compute",
    Kind.KEEP: "compute",
    Kind.DIRECTION: "update",
    Kind.APPLY: "update",
    Kind.MIX: "update",
    Kind.MIRROR: "update",
}


def phase_of(kind: Kind) -> str:
    """Return the phase that operations of a ``kind`` are booked under."""
    return PHASES.get(kind, "communication")


class Booking:
    """Books ``operations`` of ``step``, one after the other, from its construction on (local).

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
        self._first = 0  # operation since the last booking
        self._clock_ns = now_ns()

    def done(self, place: int) -> None:
        """Book the operation at ``place``, which has just returned."""
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
