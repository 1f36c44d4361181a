"""The front door of the allreduces: refusals, the event, 16-bit floats and the scale, whatever the algorithm.

On eight bytes this layer is most of what is not the MPI library, so what depends only on the algorithm, the op and the
dtype is settled at the first such call on a communicator and kept there; a call then looks at the flags of its buffer.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.dtypes import INTEGERS, accumulation_dtype, is_16bit_float, name_of
from hpcdist.collectives import on_device
from hpcdist.collectives.all_to_all import all_to_all_allreduce
from hpcdist.collectives.circulant import circulant_allreduce
from hpcdist.collectives.double_tree import double_tree_allreduce
from hpcdist.collectives.hierarchical import hierarchical_allreduce
from hpcdist.collectives.low_precision import multiply, round_into, widen, widened_allreduce
from hpcdist.collectives.native import native_allreduce
from hpcdist.collectives.node_shared import node_shared_allreduce
from hpcdist.collectives.rabenseifner import rabenseifner_allreduce
from hpcdist.collectives.recursive_doubling import recursive_doubling_allreduce
from hpcdist.collectives.reduction import REFUSALS, AllreduceFunction, ScaledFunction, check_buffer, check_op
from hpcdist.collectives.ring import ring_allreduce, ring_bidirectional_allreduce
from hpcdist.collectives.selection import Choice, parse
from hpcdist.collectives.workspace import scratch
from hpcdist.comm import checked
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import HpcdistError, UsageError

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

ON_GPUS: Final[dict[str, AllreduceFunction]] = {"nccl": on_device.on_host}  # what these do on the host
_BY_NAME: Final = ALLREDUCE | ON_GPUS

SUM_16_BITS: Final = ("all_to_all", "node_shared")  # no partial sum travels in 16 bits: they need no float32 copy


@dataclass(frozen=True, slots=True)
class _Settled:
    """What is the same for all calls of an algorithm with an op and a dtype; ``run`` and ``scaled`` refuse nothing."""

    event: str
    dtype: str
    may_scale: bool
    run: AllreduceFunction
    scaled: ScaledFunction


def allreduce(
    comm: Communicator, buffer: Array, algorithm: str | Choice = "native", op: str = "sum", *, scale: float = 1.0
) -> None:
    """Reduce ``buffer`` over all ranks in place; afterwards all hold the same bits. Collective over ``comm``.

    ``buffer`` is 1-D, contiguous, of the same size and dtype on every rank; ``op`` is "sum", "max" or "min". The result
    is multiplied by ``scale``, the same on every rank, once. 16-bit floats are summed and scaled in float32 and rounded
    once; algorithms that are not in `SUM_16_BITS` send float32 for them. Raises UsageError for an unknown algorithm or
    op and for integers that are to be scaled, BufferHandoverError for a buffer that cannot travel.
    """
    if algorithm not in _BY_NAME:
        algorithm = _row(comm, buffer, algorithm, op)
    settled: _Settled | None = comm.settled.get((algorithm, op, buffer.dtype))
    if settled is None or type(buffer) is not np.ndarray or buffer.ndim != 1 or not buffer.flags.carray:
        settled = _settle(comm, buffer, algorithm, op)
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
        events.end(token)  # nobody waits: left open, it would be over its deadline some day
        raise
    events.end(token)


def _row(comm: Communicator, buffer: Array, algorithm: str | Choice, op: str) -> str:
    """Return the algorithm that the table ``algorithm`` has for the size of ``buffer``."""
    try:
        return parse(algorithm).at(buffer.nbytes)
    except HpcdistError as error:
        checked.refuse(comm, checked.described("allreduce", str(algorithm), buffer, op), error)
        raise


def _settle(comm: Communicator, buffer: Array, algorithm: str, op: str) -> _Settled:
    """Refuse what cannot be done, and return how the rest is done."""
    try:
        check_buffer(buffer)
        check_op(op)
    except HpcdistError as error:
        checked.refuse(comm, checked.described("allreduce", algorithm, buffer, op), error)
        raise
    on_gpu = is_device(buffer)
    key = (algorithm, op, buffer.dtype, "gpu") if on_gpu else (algorithm, op, buffer.dtype)
    if key not in comm.settled:
        comm.settled[key] = _how(comm, algorithm, buffer.dtype, on_gpu)
    found: _Settled = comm.settled[key]
    return found


def _how(comm: Communicator, algorithm: str, dtype: np.dtype, on_gpu: bool) -> _Settled:
    """Return how an allreduce is done that nothing speaks against (local)."""
    run: Callable[..., None] = _BY_NAME[algorithm]
    if on_gpu:
        run = on_device.route(algorithm, run)
    scaled = with_scale(run)
    if is_16bit_float(dtype) and not (algorithm in SUM_16_BITS and scaled is run):
        scaled = functools.partial(widened_allreduce, scaled)
        run = run if algorithm in SUM_16_BITS else scaled
    if comm.checked:
        run, scaled = checked.watched(run, algorithm), checked.watched(scaled, algorithm)
    name = name_of(dtype)
    return _Settled(f"{algorithm}_allreduce", name, name not in INTEGERS, run, scaled)


def _refuse_scale(comm: Communicator, buffer: Array, algorithm: str, op: str, scale: float) -> None:
    error = UsageError(f"{name_of(buffer.dtype)} cannot be multiplied by {scale!r}; leave scale = 1, or pass floats")
    checked.refuse(comm, checked.described("allreduce", algorithm, buffer, op), error)
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
