"""Dispatch of an allreduce by algorithm name, by a table of buffer sizes, and by the memory of the buffer.

Everything that depends only on algorithm, op and dtype is cached per communicator, since this layer would dominate the
time of an 8-byte allreduce. The text form of an `AlgorithmTable` is a valid algorithm name:

    recursive_doubling<=4096,native<=262144,node_shared

means recursive doubling up to 4096 bytes, the MPI library up to 256 KiB, and shared memory above.

Routes of GPU buffers:

    nccl          NCCL
    node_shared   kernels that read peer GPU memory (`peer_memory`), if IPC handles can be opened
    others        device pointers passed to MPI, if the probe of `comm.mpi.cuda_aware` succeeded
    otherwise     the host algorithm on pinned memory, in segments

Copies of staged segments overlap with the reduction. With n bytes, link bandwidth B, time T of the algorithm and k
segments, staging takes about max(n/B, T) + 2 n/(k B) instead of 2 n/B + T.
"""

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import INTEGERS, accumulation_dtype, is_16bit_float, name_of
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.gpu.device import Event
from hpcdist.arrays.ranges import Range, cut
from hpcdist.collectives import nccl, peer_memory
from hpcdist.collectives.algorithms.all_to_all import all_to_all_allreduce
from hpcdist.collectives.algorithms.circulant import circulant_allreduce
from hpcdist.collectives.algorithms.double_tree import double_tree_allreduce
from hpcdist.collectives.algorithms.hierarchical import hierarchical_allreduce
from hpcdist.collectives.algorithms.hypercube import rabenseifner_allreduce, recursive_doubling_allreduce
from hpcdist.collectives.algorithms.ring import ring_allreduce, ring_bidirectional_allreduce
from hpcdist.collectives.node.shared_memory import node_shared_allreduce
from hpcdist.collectives.reduction import (
    REFUSALS,
    AllreduceFunction,
    ScaledFunction,
    check_buffer,
    check_op,
    may_lose_nan,
    multiply,
    native_allreduce,
    round_into,
    widen,
    widened_allreduce,
)
from hpcdist.collectives.segments import scratch
from hpcdist.comm import checks
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.config import fault_in_table
from hpcdist.comm.failure.family import PerCommunicator
from hpcdist.comm.handover import MESSAGES
from hpcdist.errors import HpcdistError, UsageError


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """Allreduce algorithms by buffer size: ``names[i]`` up to ``limits[i]`` bytes, ``names[-1]`` for larger buffers."""

    names: tuple[str, ...]
    limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.names) != len(self.limits) + 1 or list(self.limits) != sorted(set(self.limits)):
            raise UsageError(
                "an allreduce table needs ascending limits in bytes and one more name than limits, got the names "
                f"{self.names} and the limits {self.limits}"
            )

    def at(self, nbytes: int) -> str:
        """Return the name of the algorithm for a buffer of ``nbytes`` bytes. Local."""
        return self.names[bisect_left(self.limits, nbytes)]

    def __str__(self) -> str:
        rows = [f"{name}<={limit}" for name, limit in zip(self.names, self.limits, strict=False)]
        return ",".join([*rows, self.names[-1]])

    @classmethod
    def of(cls, rows: list[tuple[int, str]]) -> "AlgorithmTable":
        """Convert ascending ``rows`` (largest size in bytes, algorithm) to a table. The last size is ignored."""
        run_ends = [row for row, after in zip(rows, rows[1:], strict=False) if row[1] != after[1]]
        return cls((*(name for _, name in run_ends), rows[-1][1]), tuple(limit for limit, _ in run_ends))


@functools.lru_cache(maxsize=64)
def parse_algorithm(text: "str | AlgorithmTable") -> AlgorithmTable:
    """Convert ``text``, an algorithm NAME or NAME<=BYTES,...,NAME, to an `AlgorithmTable`. Raises UsageError."""
    names = [*ALLREDUCE, *ON_GPUS]
    fault = fault_in_table(str(text), names)
    if fault:
        raise UsageError(
            f"invalid allreduce algorithm: {fault}; choose one of {', '.join(names)}, or a table by buffer size, "
            "NAME<=BYTES,...,NAME, for example recursive_doubling<=4096,ring"
        )
    if isinstance(text, AlgorithmTable):
        return text
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
    """Reduce ``buffer`` in place by ``algorithm``, with equal bits on all ranks. Collective over ``comm``."""
    # 16-bit floats are summed in float32 and rounded once. ``scale`` multiplies the result; integers need 1.
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
        run = _route(algorithm, run)
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
    """Return the allreduce ``function`` with an additional keyword ``scale`` that multiplies the result. Local."""
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


ReduceScatter = Callable[[Communicator, np.ndarray, Sequence[Range], str], None]
AllGather = Callable[[Communicator, np.ndarray, Sequence[Range]], None]

SEGMENT_BYTES: Final = 8 << 20  # large compared with message and copy latency (to be measured on a GPU)
BLOCKS: Final = 3  # one block is being filled, one reduced, one emptied


def staged_allreduce(function: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    """Reduce a GPU ``buffer`` in place by ``function``, an allreduce that runs on a host copy. Collective."""
    produced = device.record()
    segments = [part.slice for part in cut(Range(0, buffer.size), max(1, SEGMENT_BYTES // buffer.itemsize))]
    size = min(buffer.size, max(1, SEGMENT_BYTES // buffer.itemsize))
    blocks = [staging.lease(size, buffer.dtype) for _ in range(min(BLOCKS, len(segments)))]
    filled = [_fill(buffer[part], block, produced) for part, block in zip(segments, blocks, strict=False)]
    for index, part in enumerate(segments):
        block = blocks[index % BLOCKS][: part.stop - part.start]
        filled[index].synchronize()
        function(comm, block, op)
        emptied = staging.to_device(block, buffer[part])
        if index + BLOCKS < len(segments):
            # The event of the copy back also follows the kernels that produced the buffer.
            following = segments[index + BLOCKS]
            filled.append(_fill(buffer[following], blocks[index % BLOCKS], emptied))


def _fill(source: Array, block: np.ndarray, after: Event) -> Event:
    return staging.begin_to_host(source, block[: source.size], after)


def staged_reduce_scatter(
    function: ReduceScatter, comm: Communicator, buffer: Array, shares: Sequence[Range], op: str = "sum"
) -> None:
    """Reduce-scatter a GPU ``buffer`` by ``function`` on a host copy. Rank r gets ``buffer[shares[r]]``. Collective."""
    host = staging.to_host(buffer)
    function(comm, host, shares, op)
    share = shares[comm.rank]
    if share:
        staging.to_device(host[share.slice], buffer[share.slice])


def staged_all_gather(function: AllGather, comm: Communicator, buffer: Array, shares: Sequence[Range]) -> None:
    """All-gather a GPU ``buffer`` by ``function`` on a host copy. Rank r sends ``buffer[shares[r]]``. Collective."""
    host = staging.lease(buffer.size, buffer.dtype)
    share = shares[comm.rank]
    if share:
        staging.begin_to_host(buffer[share.slice], host[share.slice]).synchronize()
    function(comm, host, shares)
    staging.to_device(host, buffer)


NCCL: Final = "nccl"
# MPI operations that algorithms need; all other algorithms only send messages.
_ASKS: Final = {"native": "allreduce", "all_to_all": "all_to_all"}
# Algorithms that always work in host memory.
_ON_HOST: Final = ("hierarchical",)


def _route(algorithm: str, function: AllreduceFunction) -> AllreduceFunction:
    if algorithm == NCCL:
        return nccl.nccl_allreduce
    if algorithm == "node_shared":
        return functools.partial(_shared, function)
    if algorithm in _ON_HOST:
        return functools.partial(staged_allreduce, function)
    return functools.partial(_pointers, function, _ASKS.get(algorithm, MESSAGES))


def _shared(function: AllreduceFunction, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    if peer_memory.refusal(comm):
        staged_allreduce(function, comm, buffer, op)
    else:
        peer_memory.device_shared_allreduce(comm, buffer, op)


def _pointers(function: AllreduceFunction, asks: str, comm: Communicator, buffer: Array, op: str = "sum") -> None:
    # The MPI operators that propagate NaN run on the host (`comm.mpi.communicator`).
    if takes_pointers(comm, asks) and not (asks == "allreduce" and may_lose_nan(buffer, op)):
        function(comm, buffer, op)
    else:
        staged_allreduce(function, comm, buffer, op)


def takes_pointers(comm: Communicator, operation: str) -> bool:
    """Return True if ``comm`` may pass GPU pointers to the MPI ``operation``, such as "allreduce". Local."""
    return isinstance(comm, Communicator) and operation in comm.handover.pointers
