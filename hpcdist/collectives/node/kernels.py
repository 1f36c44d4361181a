"""Compiled reduction kernels over memory at several addresses, for every dtype and op.

Operands are combined in rank order, so all kernels give the same bits. 16-bit floats, stored as uint16, are summed in
float32 and rounded once.
"""

from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import BFLOAT16, name_of
from hpcdist.arrays.intrinsics import array_at, array_behind
from hpcdist.arrays.jit import jit
from hpcdist.collectives.reduction import round_bfloat16, round_float16, widen_bfloat16, widen_float16

SUM: Final = 0
MAX: Final = 1
MIN: Final = 2
OPS: Final = {"sum": SUM, "max": MAX, "min": MIN}

BLOCK: Final = 2048  # elements reduced at a time, so that operands and sum fit in the L1 cache (empirical)


# Maximum and minimum propagate NaN: `a != a` selects a NaN in a; comparisons with a NaN in b are false and select b.


@jit
def _combine(op: int, left: Any, right: Any, out: Any) -> None:
    if op == SUM:
        for i in range(out.size):
            out[i] = left[i] + right[i]
    elif op == MAX:
        for i in range(out.size):
            a, b = left[i], right[i]
            out[i] = a if a >= b or a != a else b
    else:
        for i in range(out.size):
            a, b = left[i], right[i]
            out[i] = a if a <= b or a != a else b


@jit
def _combine_into(op: int, right: Any, out: Any) -> None:
    # Unlike `_combine`, the compiler vectorises this.
    if op == SUM:
        for i in range(out.size):
            out[i] += right[i]
    elif op == MAX:
        for i in range(out.size):
            a, b = out[i], right[i]
            out[i] = a if a >= b or a != a else b
    else:
        for i in range(out.size):
            a, b = out[i], right[i]
            out[i] = a if a <= b or a != a else b


@jit
def _copy(source: Any, target: Any) -> None:
    for i in range(target.size):
        target[i] = source[i]


@jit
def _sum_of_three(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = a[i] + b[i] + c[i]


@jit
def _add_two(a: Any, b: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = out[i] + a[i] + b[i]


@jit
def _sum_into_two(a: Any, b: Any, scale: Any) -> None:
    for i in range(a.size):
        total = (a[i] + b[i]) * scale
        a[i] = total
        b[i] = total


@jit
def _sum_into_three(a: Any, b: Any, c: Any, scale: Any) -> None:
    for i in range(a.size):
        total = (a[i] + b[i] + c[i]) * scale
        a[i] = total
        b[i] = total
        c[i] = total


@jit
def _sum_into_four(a: Any, b: Any, c: Any, d: Any, scale: Any) -> None:
    for i in range(a.size):
        total = (a[i] + b[i] + c[i] + d[i]) * scale
        a[i] = total
        b[i] = total
        c[i] = total
        d[i] = total


@jit
def _sum_of_two_to(a: Any, b: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = (a[i] + b[i]) * scale


@jit
def _sum_of_three_to(a: Any, b: Any, c: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = (a[i] + b[i] + c[i]) * scale


@jit
def _sum_of_four_to(a: Any, b: Any, c: Any, d: Any, scale: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = (a[i] + b[i] + c[i] + d[i]) * scale


@jit
def _reduce_block(inputs: Any, at: int, op: int, block: Any) -> None:
    # Two or three operands per pass halve the traffic of the block; the order of the ranks is kept.
    ranks, count = inputs.size, block.size
    first = array_at(inputs[0] + at, count, block)
    if ranks == 1:
        _copy(first, block)
        return
    second = array_at(inputs[1] + at, count, block)
    if ranks == 2 or op != SUM:
        _combine(op, first, second, block)
        rank = 2
    else:
        _sum_of_three(first, second, array_at(inputs[2] + at, count, block), block)
        rank = 3
        while rank + 1 < ranks:
            _add_two(array_at(inputs[rank] + at, count, block), array_at(inputs[rank + 1] + at, count, block), block)
            rank += 2
    while rank < ranks:
        _combine_into(op, array_at(inputs[rank] + at, count, block), block)
        rank += 1


@jit
def _scaled(block: Any, scale: Any) -> None:
    for i in range(block.size):
        block[i] *= scale


@jit
def _reduce_into_all(buffers: Any, size: int, scale: Any, like: Any) -> None:
    a, b = array_at(buffers[0], size, like), array_at(buffers[1], size, like)
    if buffers.size == 2:
        _sum_into_two(a, b, scale)
        return
    c = array_at(buffers[2], size, like)
    if buffers.size == 3:
        _sum_into_three(a, b, c, scale)
    else:
        _sum_into_four(a, b, c, array_at(buffers[3], size, like), scale)


@jit
def _reduce_into_one(buffers: Any, output: int, size: int, scale: Any, like: Any) -> None:
    a, b, out = array_at(buffers[0], size, like), array_at(buffers[1], size, like), array_at(output, size, like)
    if buffers.size == 2:
        _sum_of_two_to(a, b, scale, out)
        return
    c = array_at(buffers[2], size, like)
    if buffers.size == 3:
        _sum_of_three_to(a, b, c, scale, out)
    else:
        _sum_of_four_to(a, b, c, array_at(buffers[3], size, like), scale, out)


@jit
def _is_among(address: int, addresses: Any) -> bool:
    present = False
    for other in addresses:
        present = present or other == address
    return present


@jit
def _reduce_at(
    inputs_at: int, ranks: int, outputs_at: int, copies: int, nbytes: int, op: int, scale: float, pointer: Any
) -> None:
    # ``inputs_at``, ``outputs_at``: addresses of arrays of addresses, which may be equal. ``pointer``: scratch memory
    # of BLOCK elements, whose dtype is the dtype of all data.
    total = array_behind(pointer, BLOCK)
    size = nbytes // total.itemsize
    words = np.empty(0, np.int64)
    inputs, outputs = array_at(inputs_at, ranks, words), array_at(outputs_at, copies, words)
    total[0] = scale
    factor = total[0]  # cast to the dtype of the sum
    if op == SUM and 2 <= ranks <= 4:  # no scratch buffer needed
        if inputs_at == outputs_at:  # same addresses: results overwrite operands
            _reduce_into_all(inputs, size, factor, total)
            return
        if copies == 1 and not _is_among(outputs[0], inputs):
            _reduce_into_one(inputs, outputs[0], size, factor, total)
            return
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        at, block = start * total.itemsize, total[:count]
        _reduce_block(inputs, at, op, block)
        if factor != 1:
            _scaled(block, factor)
        for rank in range(copies):
            _copy(block, array_at(outputs[rank] + at, count, total))


@jit
def _reduce_halves_at(
    inputs_at: int, ranks: int, outputs_at: int, copies: int, nbytes: int, op: int, scale: float, pointer: Any,
    is_bfloat16: bool,
) -> None:  # fmt: skip
    # Sums in float32. ``pointer``: address of float32 scratch memory.
    blocks, halves, words = array_behind(pointer, 2 * BLOCK), np.empty(0, np.uint16), np.empty(0, np.int64)
    inputs, outputs = array_at(inputs_at, ranks, words), array_at(outputs_at, copies, words)
    blocks[0] = scale
    factor = blocks[0]  # in float32
    for at in range(0, nbytes, 2 * BLOCK):  # in bytes: two per element
        count = min(BLOCK, (nbytes - at) // 2)
        total, addend = blocks[:count], blocks[BLOCK : BLOCK + count]
        for rank in range(ranks):
            widened = addend if rank else total
            if is_bfloat16:
                widen_bfloat16(array_at(inputs[rank] + at, count, halves), widened)
            else:
                widen_float16(array_at(inputs[rank] + at, count, halves), widened)
            if rank:
                _combine_into(op, addend, total)
        if factor != 1:
            _scaled(total, factor)
        target = array_at(outputs[0] + at, count, halves)
        if is_bfloat16:
            round_bfloat16(target, total)
        else:
            round_float16(target, total)
        for rank in range(1, copies):
            _copy(target, array_at(outputs[rank] + at, count, halves))


@jit
def _reduce_float16_at(
    inputs_at: int, ranks: int, outputs_at: int, copies: int, nbytes: int, op: int, scale: float, pointer: Any
) -> None:
    _reduce_halves_at(inputs_at, ranks, outputs_at, copies, nbytes, op, scale, pointer, False)


@jit
def _reduce_bfloat16_at(
    inputs_at: int, ranks: int, outputs_at: int, copies: int, nbytes: int, op: int, scale: float, pointer: Any
) -> None:
    _reduce_halves_at(inputs_at, ranks, outputs_at, copies, nbytes, op, scale, pointer, True)


_NUMBERS: Final = ("int64",) * 6 + ("float64",)  # types of all arguments except the last
for _kernel in (_reduce_float16_at, _reduce_bfloat16_at, _reduce_at):
    _kernel.sample_address(*_NUMBERS, "float32*")
_reduce_at.sample_address(*_NUMBERS, "float64*")


def address_of(dtype: np.dtype) -> int:
    """Return the address of the reduction kernel for ``dtype``. Compile the kernel if it is not cached. Local."""
    if dtype == BFLOAT16:
        return _reduce_bfloat16_at.address(*_NUMBERS, "float32*")
    if dtype == np.float16:
        return _reduce_float16_at.address(*_NUMBERS, "float32*")
    return _reduce_at.address(*_NUMBERS, name_of(dtype) + "*")
