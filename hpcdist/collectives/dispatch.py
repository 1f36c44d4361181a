"""Dispatch of an allreduce by algorithm name or by a table of buffer sizes.

Everything that depends only on algorithm, op and dtype is cached per communicator, since this layer would dominate the
time of an 8-byte allreduce. The text form of an `AlgorithmTable` is a valid algorithm name:

    recursive_doubling<=4096,native<=262144,node_shared

means recursive doubling up to 4096 bytes, the MPI library up to 256 KiB, and shared memory above.
"""

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import INTEGERS, accumulation_dtype, is_16bit_float, name_of
from hpcdist.collectives.algorithms.all_to_all import all_to_all_allreduce
from hpcdist.collectives.algorithms.circulant import circulant_allreduce
from hpcdist.collectives.algorithms.double_tree import double_tree_allreduce
from hpcdist.collectives.algorithms.hierarchical import hierarchical_allreduce
from hpcdist.collectives.algorithms.hypercube import rabenseifner_allreduce, recursive_doubling_allreduce
from hpcdist.collectives.algorithms.ring import ring_allreduce, ring_bidirectional_allreduce
from hpcdist.collectives.gpu import staging
from hpcdist.collectives.half_precision import multiply, round_into, widen, widened_allreduce
from hpcdist.collectives.node.shared_memory import node_shared_allreduce
from hpcdist.collectives.reduction import (
    REFUSALS,
    AllreduceFunction,
    ScaledFunction,
    check_buffer,
    check_op,
    native_allreduce,
)
from hpcdist.collectives.segments import scratch
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.config import fault_in_table
from hpcdist.comm.failure.family import PerCommunicator
from hpcdist.errors import HpcdistError, UsageError


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """Allreduce algorithms by buffer size: ``names[i]`` up to ``limits[i]`` bytes, else the last of ``names``."""

    names: tuple[str, ...]
    limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.limits) + 1 or list(self.limits) != sorted(set(self.limits)):
            raise UsageError(
                "an allreduce table needs ascending limits in bytes and one more name than limits, got "
                f"{self.names} and {self.limits}"
            )

    def at(self, nbytes: int) -> str:
        """Return the algorithm for a buffer of ``nbytes`` bytes. Local."""
        return self.names[bisect_left(self.limits, nbytes)]

    def __str__(self) -> str:
        rows = [f"{name}<={limit}" for name, limit in zip(self.names, self.limits, strict=False)]
        return ",".join([*rows, self.names[-1]])

    @classmethod
    def of(cls, rows: list[tuple[int, str]]) -> "AlgorithmTable":
        """Return the table of ``rows``: (largest size in bytes, algorithm), ascending. The last size is ignored."""
        run_ends = [row for row, after in zip(rows, rows[1:], strict=False) if row[1] != after[1]]
        return cls((*(name for _, name in run_ends), rows[-1][1]), tuple(limit for limit, _ in run_ends))


@functools.lru_cache(maxsize=64)
def parse_algorithm(text: "str | AlgorithmTable") -> AlgorithmTable:
    """Parse ``text``: one allreduce algorithm, or a table by buffer size (NAME<=BYTES,...,NAME). Raises UsageError."""
    names = [*ALLREDUCE, *ON_GPUS]
    fault = fault_in_table(str(text), names)
    if fault:
        raise UsageError(
            f"invalid allreduce algorithm: {fault}; choose one of {', '.join(names)}, or a table by buffer size, "
            "NAME<=BYTES,...,NAME, for example recursive_doubling<=4096,ring"
        )
    return text if isinstance(text, AlgorithmTable) else _rows(text)


def _rows(text: str) -> AlgorithmTable:
    rows = [row.partition("<=") for row in text.split(",")]
    return AlgorithmTable(tuple(name for name, _, _ in rows), tuple(int(limit) for _, _, limit in rows[:-1]))


ALLREDUCE: Final[dict[str, AllreduceFunction]] = {
    "native": native_allreduce,
    "ring": ring_allreduce,
    "ring_bidirectional": ring_bidirectional_allreduce,
    "recursive_doubling": recursive_doubling_allreduce,
    "rabenseifner": rabenseifner_allreduce,
    "circulant": circulant_allreduce,
    "double_tree": double_tree_allreduce,
    "node_shared": node_shared_allreduce,
    "hierarchical": hierarchical_allreduce,
    "all_to_all": all_to_all_allreduce,
}

# Algorithms for GPU buffers, with their fallback for host buffers: a GPU run also reduces norms, losses and flags.
ON_GPUS: Final[dict[str, AllreduceFunction]] = {"nccl": native_allreduce}
_BY_NAME: Final = ALLREDUCE | ON_GPUS

# Algorithms that need no float32 copy, since they send no 16-bit partial sums.
SUM_16_BITS: Final = ("all_to_all", "node_shared", "nccl")


@dataclass(frozen=True, slots=True)
class _Prepared:
    event: str
    dtype: str
    may_scale: bool
    run: AllreduceFunction
    scaled: ScaledFunction


_PREPARED: Final = PerCommunicator[tuple[str, str, np.dtype] | tuple[str, str, np.dtype, str], _Prepared]()


def allreduce(
    comm: Communicator,
    buffer: Array,
    algorithm: str | AlgorithmTable = "native",
    op: str = "sum",
    *,
    scale: float = 1.0,
) -> None:
    """Reduce ``buffer`` in place by ``algorithm``, with equal bits on all ranks. Collective over ``comm``.

    ``buffer``: 1-D, contiguous, of equal size and dtype on every rank. ``op``: "sum", "max" or "min". Keyword-only
    ``scale``: factor of the result, 1 for integers. Raises UsageError for invalid arguments, and BufferHandoverError
    for an unsupported buffer.
    """
    # 16-bit floats are summed in float32 and rounded once.
    if algorithm not in _BY_NAME:
        algorithm = _row(comm, buffer, algorithm, op)
    prepared = comm.caches[_PREPARED].get((algorithm, op, buffer.dtype))
    if prepared is None or type(buffer) is not np.ndarray or buffer.ndim != 1 or not buffer.flags.carray:
        prepared = _prepare(comm, buffer, algorithm, op)
    run = prepared.run
    if scale != 1.0:
        if not prepared.may_scale:
            _refuse_scale(comm, buffer, algorithm, op, scale)
        if comm.size == 1:
            _scale_alone(buffer, scale)
            return
        run = functools.partial(prepared.scaled, scale=scale)
    elif comm.size == 1:
        return
    # One event for the whole call, so that the watchdog can name a rank that skips the call.
    events = comm.events
    token = events.begin(comm.name, prepared.event, prepared.dtype, buffer.size, 0, -1, 0)
    try:
        run(comm, buffer, op)
    except REFUSALS:
        events.end(token)  # no rank waits: an open event would be reported by the watchdog
        raise
    events.end(token)


def _row(comm: Communicator, buffer: Array, algorithm: str | AlgorithmTable, op: str) -> str:
    try:
        return parse_algorithm(algorithm).at(buffer.nbytes)
    except HpcdistError as error:
        checks.announce_refusal(comm, checks.describe_call("allreduce", str(algorithm), buffer, op), error)
        raise


def _prepare(comm: Communicator, buffer: Array, algorithm: str, op: str) -> _Prepared:
    try:
        check_buffer(buffer)
        check_op(op)
    except HpcdistError as error:
        checks.announce_refusal(comm, checks.describe_call("allreduce", algorithm, buffer, op), error)
        raise
    on_gpu = is_device(buffer)
    key = (algorithm, op, buffer.dtype, "gpu") if on_gpu else (algorithm, op, buffer.dtype)
    cache = comm.caches[_PREPARED]
    if key not in cache:
        cache[key] = _compose(comm, algorithm, buffer.dtype, on_gpu)
    return cache[key]


def _compose(comm: Communicator, algorithm: str, dtype: np.dtype, on_gpu: bool) -> _Prepared:
    run: Callable[..., None] = _BY_NAME[algorithm]
    if on_gpu:
        run = staging.route(algorithm, run)
    scaled = with_scale(run)
    if is_16bit_float(dtype) and not (algorithm in SUM_16_BITS and scaled is run):
        scaled = functools.partial(widened_allreduce, scaled)
        run = run if algorithm in SUM_16_BITS else scaled
    if comm.checked:
        run, scaled = checks.with_comparison(run, algorithm), checks.with_comparison(scaled, algorithm)
    name = name_of(dtype)
    return _Prepared(f"{algorithm}_allreduce", name, name not in INTEGERS, run, scaled)


def _refuse_scale(comm: Communicator, buffer: Array, algorithm: str, op: str, scale: float) -> None:
    error = UsageError(f"{name_of(buffer.dtype)} cannot be multiplied by {scale!r}; leave scale = 1, or pass floats")
    checks.announce_refusal(comm, checks.describe_call("allreduce", algorithm, buffer, op), error)
    raise error


def with_scale(function: AllreduceFunction) -> ScaledFunction:
    """Return a version of the allreduce ``function`` whose keyword-only ``scale`` multiplies the result. Local."""
    if "scale" in inspect.signature(function).parameters:
        return cast(ScaledFunction, function)

    def reduce_then_multiply(comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
        function(comm, buffer, op)
        multiply(buffer, scale)

    return reduce_then_multiply


def _scale_alone(buffer: Array, scale: float) -> None:
    if not is_16bit_float(buffer.dtype):
        multiply(buffer, scale)
        return
    wide = scratch("widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
    widen(buffer, wide)
    multiply(wide, scale)
    round_into(buffer, wide)
