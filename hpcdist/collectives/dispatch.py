"""Dispatch of an allreduce by name or by a table of sizes: checks, 16-bit floats, scale, recording.

`allreduce` is the function that strategies call, whatever the algorithm. On eight bytes this layer takes most of the
time that the MPI library does not, so everything that depends only on the algorithm, the op and the dtype is prepared
at the first such call on a communicator and cached there; later calls only check the flags of the buffer.

An `AlgorithmTable` selects the algorithm by the size of the buffer. Its text is itself the name of an algorithm:

    recursive_doubling<=4096,native<=262144,node_shared

is recursive doubling up to 4096 bytes, the MPI library's up to 256 KiB, shared memory beyond. A single name is a
table of one row. Checkpoints and summaries store this text. The size of a buffer is the same on all ranks, so all
ranks select the same row.
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
from hpcdist.errors import HpcdistError, UsageError


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """Algorithms by size: ``names[i]`` for buffers up to ``limits[i]`` bytes, ascending, the last name beyond."""

    names: tuple[str, ...]
    limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.limits) + 1 or list(self.limits) != sorted(set(self.limits)):
            raise UsageError(
                f"a choice of allreduce has limits that ascend and one name more than limits, got {self.names} and "
                f"{self.limits}"
            )

    def at(self, nbytes: int) -> str:
        """Return the algorithm for a buffer of ``nbytes`` bytes (local)."""
        return self.names[bisect_left(self.limits, nbytes)]

    def __str__(self) -> str:
        rows = [f"{name}<={limit}" for name, limit in zip(self.names, self.limits, strict=False)]
        return ",".join([*rows, self.names[-1]])

    @classmethod
    def of(cls, rows: list[tuple[int, str]]) -> "AlgorithmTable":
        """Return the table in which ``rows`` are (largest size in bytes, name), ascending; the last has no end."""
        run_ends = [row for row, after in zip(rows, rows[1:], strict=False) if row[1] != after[1]]
        return cls((*(name for _, name in run_ends), rows[-1][1]), tuple(limit for limit, _ in run_ends))


@functools.lru_cache(maxsize=64)
def parse_algorithm(text: "str | AlgorithmTable") -> AlgorithmTable:
    """Return the choice that ``text`` stands for, of algorithms that exist (local). Raises UsageError."""
    known = [*ALLREDUCE, *ON_GPUS]
    fault = fault_in_table(str(text), known)
    if fault:
        raise UsageError(
            f"allreduce algorithm{',' * fault.startswith('row')} {fault}; choose one of {', '.join(known)}, or a table "
            "NAME<=BYTES,...,NAME of them, for example recursive_doubling<=4096,ring"
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

# What these do on the host: a run on GPUs reduces norms, losses and flags there.
ON_GPUS: Final[dict[str, AllreduceFunction]] = {"nccl": native_allreduce}
_BY_NAME: Final = ALLREDUCE | ON_GPUS

# No partial sum travels in 16 bits: they need no float32 copy.
SUM_16_BITS: Final = ("all_to_all", "node_shared", "nccl")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Prepared call for an algorithm, an op and a dtype; ``run`` and ``scaled`` check no argument again."""

    event: str
    dtype: str
    may_scale: bool
    run: AllreduceFunction
    scaled: ScaledFunction


def allreduce(
    comm: Communicator,
    buffer: Array,
    algorithm: str | AlgorithmTable = "native",
    op: str = "sum",
    *,
    scale: float = 1.0,
) -> None:
    """Reduce ``buffer`` over all ranks in place; afterwards all hold the same bits. Collective over ``comm``.

    ``buffer`` is 1-D, contiguous, of the same size and dtype on every rank; ``op`` is "sum", "max" or "min". The result
    is multiplied by ``scale``, the same on every rank, once. 16-bit floats are summed and scaled in float32 and rounded
    once; algorithms that are not in `SUM_16_BITS` send float32 for them. Raises UsageError for an unknown algorithm or
    op and for integers that are to be scaled, BufferHandoverError for a buffer that cannot travel.
    """
    if algorithm not in _BY_NAME:
        algorithm = _row(comm, buffer, algorithm, op)
    settled: _Prepared | None = comm.settled.get((algorithm, op, buffer.dtype))
    if settled is None or type(buffer) is not np.ndarray or buffer.ndim != 1 or not buffer.flags.carray:
        settled = _prepare(comm, buffer, algorithm, op)
    if scale != 1.0 and not settled.may_scale:
        _refuse_scale(comm, buffer, algorithm, op, scale)
    if comm.size == 1:
        if scale != 1.0:
            _scale_alone(buffer, scale)
        return
    # One event over the messages within: a rank that skips the call is then named, whatever the algorithm.
    events = comm.events
    token = events.begin(comm.name, settled.event, settled.dtype, buffer.size, 0, -1, 0)
    try:
        if scale == 1.0:
            settled.run(comm, buffer, op)
        else:
            settled.scaled(comm, buffer, op, scale=scale)
    except REFUSALS:
        events.end(token)  # no rank waits in it: left open, the watchdog would report it after its deadline
        raise
    events.end(token)


def _row(comm: Communicator, buffer: Array, algorithm: str | AlgorithmTable, op: str) -> str:
    """Return the algorithm that the table ``algorithm`` has for the size of ``buffer``."""
    try:
        return parse_algorithm(algorithm).at(buffer.nbytes)
    except HpcdistError as error:
        checks.announce_refusal(comm, checks.describe_call("allreduce", str(algorithm), buffer, op), error)
        raise


def _prepare(comm: Communicator, buffer: Array, algorithm: str, op: str) -> _Prepared:
    """Return the prepared call for ``buffer``, cached on ``comm``. Raises as `allreduce` does."""
    try:
        check_buffer(buffer)
        check_op(op)
    except HpcdistError as error:
        checks.announce_refusal(comm, checks.describe_call("allreduce", algorithm, buffer, op), error)
        raise
    on_gpu = is_device(buffer)
    key = (algorithm, op, buffer.dtype, "gpu") if on_gpu else (algorithm, op, buffer.dtype)
    if key not in comm.settled:
        comm.settled[key] = _compose(comm, algorithm, buffer.dtype, on_gpu)
    prepared: _Prepared = comm.settled[key]
    return prepared


def _compose(comm: Communicator, algorithm: str, dtype: np.dtype, on_gpu: bool) -> _Prepared:
    """Return the prepared call of ``algorithm`` for buffers of ``dtype`` (local)."""
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
    """Return ``function`` where it takes a ``scale``, else one that multiplies its result (local)."""
    if "scale" in inspect.signature(function).parameters:
        return cast(ScaledFunction, function)

    def reduce_then_multiply(comm: Communicator, buffer: Array, op: str = "sum", *, scale: float = 1.0) -> None:
        function(comm, buffer, op)
        multiply(buffer, scale)

    return reduce_then_multiply


def _scale_alone(buffer: Array, scale: float) -> None:
    """Multiply the ``buffer`` of the only rank (local)."""
    if not is_16bit_float(buffer.dtype):
        multiply(buffer, scale)
        return
    wide = scratch("widened", buffer.size, accumulation_dtype(buffer.dtype), buffer)
    widen(buffer, wide)
    multiply(wide, scale)
    round_into(buffer, wide)
