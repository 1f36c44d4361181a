"""A step in progress, its result, and the observers of its steps, such as phase timers and NaN search."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, Scalar
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.record.spans import NULL_SPANS, SpanSink, now_ns
from hpcdist.optim import norms
from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation

Handler: TypeAlias = Callable[[Operation], None]


@dataclass(frozen=True)
class RecomputeVerdict:
    """Result of recomputing a suspicious step: the reason for the suspicion, the faulty ranks, and a description."""

    suspicion: str
    ranks: tuple[int, ...] = ()
    fault: str = ""


@dataclass
class StepResult:
    """Loss, gradient norm, timings and other results of a training step."""

    loss: float = float("nan")
    gradient_norm: float = float("nan")
    stop_requests: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss_scale: float = 1.0
    correction: float = 1.0  # factor of loss and gradient because targets have weights
    skipped: bool = False  # True if the gradient overflowed at ``loss_scale``: nothing was updated
    recomputed: RecomputeVerdict | None = None
    measured: np.ndarray = field(default_factory=lambda: np.zeros(0))  # observers' `counts`, summed over the world
    seconds: dict[str, float] = field(
        default_factory=lambda: {"compute_s": 0.0, "communication_s": 0.0, "update_s": 0.0}
    )


class RunningStep(Protocol):
    """Read access to the current step of the executor or, between two steps, to the last step."""

    @property
    def number(self) -> int:
        """Number of the step; the first step of a run is number 1."""

    @property
    def samples(self) -> int:
        """Number of samples in the step, summed over all replicas."""

    @property
    def sizes(self) -> Sequence[int]:
        """Sequence with the number of samples in each micro-batch of this rank's replica."""

    @property
    def units(self) -> Mapping[int, Range]:
        """Mapping from the number of each layer on this rank to the layer's range of the flat parameter vector."""

    @property
    def outcome(self) -> StepResult:
        """Result of the step. While the step runs, fields can still have default values."""

    @property
    def own_losses(self) -> list[float]:
        """List of the losses of this rank's micro-batches. Each loss is a sum over the micro-batch's targets."""

    def gradients_in(self, part: Range) -> Array | None:
        """Return the gradients of the flat range ``part`` of one layer, or None if other ranks have them. Local."""

    def compute_again(self) -> None:
        """Compute the current step a second time, so that the caller can compare the results. Collective."""


NO_COUNTS: Final = np.zeros(0)


class StepObserver:
    """Base class of step observers, which the executor calls during a step. Only `agreed` is collective."""

    def around(self, kind: Kind, handler: Handler) -> Handler:
        """Return the function to execute operations of type ``kind``: ``handler``, or a wrapper of ``handler``."""
        return handler

    def begin_step(self, number: int, operations: Sequence[Operation], sizes: Sequence[int]) -> None:
        """Called before step ``number``, which runs ``operations``. ``sizes``: samples of each micro-batch."""

    def went_back(self, step: RunningStep, op: Operation) -> None:
        """Called after the backward pass ``op`` of a layer in the current ``step``."""

    def exchanges(self, step: RunningStep, op: Operation) -> None:
        """Called before ``op`` exchanges this rank's complete gradients of the flat range ``op.part``.

        ``step``: the current step.
        """

    def counts(self, step: RunningStep) -> np.ndarray:
        """Return a 1-D array that the executor sums over all ranks. All ranks return the same length. Local."""
        return NO_COUNTS

    def agreed(self, step: RunningStep) -> None:
        """Called before the update, when the loss and the gradient norm are known. Collective."""

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        """Called after the step. ``sums``: the result of this observer's `counts`, summed over all world ranks."""

    def leave_step(self) -> None:
        """Called when the step ends, both after success and after an error."""


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
    """Timer of the compute, communication and update phases of a training step. Local."""

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
        """Record that operation number ``index`` of the step has ended."""
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
    """Interface of a function that opens a profiler range (NVTX) around an operation."""

    def __call__(
        self, phase: str, name: str, microbatch: int = -1, unit: int = -1
    ) -> AbstractContextManager[object, bool | None]:
        """Return a context manager that opens a profiler range, and closes it even after errors.

        The range shows the ``phase``, the operation's ``name``, the micro-batch and the layer ``unit``.
        """


_NOTHING: Final = nullcontext()


def no_ranges(
    phase: str, name: str, microbatch: int = -1, unit: int = -1
) -> AbstractContextManager[object, bool | None]:
    """Return a context manager that does nothing, for runs without a profiler. All arguments are ignored."""
    return _NOTHING


NO_RANGES: Final[ProfilerRanges] = no_ranges


def in_range(ranges: ProfilerRanges, phase: str, handler: Handler) -> Handler:
    """Return a function that runs ``handler`` in a profiler range of the ``phase``, such as "compute".

    ``ranges``: function that opens the profiler range.
    """

    def run(op: Operation) -> None:
        with ranges(phase, op.kind.name, op.microbatch, op.unit):
            handler(op)

    return run


class OperationRanges(StepObserver):
    """Step observer that runs each operation in a profiler range named after the type of the operation. Local."""

    def __init__(self, ranges: ProfilerRanges) -> None:
        self._ranges = ranges

    def around(self, kind: Kind, handler: Handler) -> Handler:
        return in_range(self._ranges, phase_of(kind), handler)


class NanFinder:
    """Search for the first non-finite value that this rank computed. Inactive until `begin`. Local."""

    def __init__(self) -> None:
        self._awake = False
        self._found: str | None = None

    @property
    def is_awake(self) -> bool:
        """True if the search is active."""
        return self._awake

    def begin(self, parameters: FlatStore) -> None:
        """Start the search, and search this rank's ``parameters`` first."""
        tensor = norms.first_nonfinite(parameters)
        self._found = f"parameter {tensor}" if tensor else None
        self._awake = True

    def end(self) -> str | None:
        """Stop the search. Return the name of this rank's first non-finite value, or None if none was found."""
        self._awake = False
        return self._found

    def look(self, name: str, values: Scalar) -> None:
        """Search ``values`` for NaN and infinity, if the search is active. ``name``: name of ``values`` in messages."""
        if self._awake and self._found is None and not _finite(values):
            self._found = name

    def look_at_gradients(self, store: FlatStore, part: Range) -> None:
        """Search the gradients in the flat range ``part`` of ``store`` for NaN and infinity."""
        if self._awake and self._found is None:
            for segment, touched in store.layout.within(part):
                self.look(f"gradient of {segment.key}", store.range(touched))

    def sees_only_finite(self, values: Array) -> bool:
        """Return True if the search is active and all ``values`` are finite."""
        return self._awake and _finite(values)

    def distrust(self, values: Array) -> None:
        """Stop the search if ``values``, which come from another rank, are not finite."""
        if self._awake and not _finite(values):
            self._awake = False

    def distrust_tensors(self, store: FlatStore, part: Range) -> None:
        """Stop the search if ``store`` has non-finite values in the range ``part``, which come from another rank."""
        for _, touched in store.layout.within(part) if self._awake else ():
            self.distrust(store.range(touched))


def _finite(values: Scalar) -> bool:
    return bool(backend.namespace(values).isfinite(values).all())
