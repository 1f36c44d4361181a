"""Reduction of memory at several addresses, as compiled loops.

Addresses are integers, in arrays with one for each rank. Ranks are taken in their order whatever the size is and
wherever the result goes, so that all ways give the same bits. 16-bit floats, held as uint16, are summed in float32 and
rounded once.

``like`` is any array of the dtype that lies at the addresses; ``total`` has BLOCK elements of the dtype of sums;
``width`` says what a uint16 is.
"""

from typing import Any, Final

from hpcdist.arrays.atomics import array_at
from hpcdist.arrays.jit import jit
from hpcdist.collectives.half import round_bfloat16, round_float16, widen_bfloat16, widen_float16

SUM: Final = 0
MAX: Final = 1
MIN: Final = 2
OPS: Final = {"sum": SUM, "max": MAX, "min": MIN}

WHOLE: Final = 0  # widths
FLOAT16: Final = 1
BFLOAT16: Final = 2

BLOCK: Final = 2048  # elements reduced at a time: in the first cache, with their sum (empirical)


@jit
def combine(op: int, left: Any, right: Any, out: Any) -> None:
    """Reduce two arrays into a third."""
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
def combine_into(op: int, right: Any, out: Any) -> None:
    """Reduce an array into another. Not `combine`: two names of one array keep the compiler from vectors."""
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
def copy(source: Any, target: Any) -> None:
    """Copy an array."""
    for i in range(target.size):
        target[i] = source[i]


@jit
def sum_of_three(a: Any, b: Any, c: Any, out: Any) -> None:
    """Put the sum of three arrays into a fourth."""
    for i in range(out.size):
        out[i] = a[i] + b[i] + c[i]


@jit
def add_two(a: Any, b: Any, out: Any) -> None:
    """Add two arrays to a third, one after the other: it goes through the registers once instead of twice."""
    for i in range(out.size):
        out[i] = out[i] + a[i] + b[i]


@jit
def sum_into_two(a: Any, b: Any, scale: Any) -> None:
    """Put the sum of two arrays into both."""
    for i in range(a.size):
        total = (a[i] + b[i]) * scale
        a[i] = total
        b[i] = total


@jit
def sum_into_three(a: Any, b: Any, c: Any, scale: Any) -> None:
    """Put the sum of three arrays into all of them."""
    for i in range(a.size):
        total = (a[i] + b[i] + c[i]) * scale
        a[i] = total
        b[i] = total
        c[i] = total


@jit
def sum_into_four(a: Any, b: Any, c: Any, d: Any, scale: Any) -> None:
    """Put the sum of four arrays into all of them."""
    for i in range(a.size):
        total = (a[i] + b[i] + c[i] + d[i]) * scale
        a[i] = total
        b[i] = total
        c[i] = total
        d[i] = total


@jit
def reduce_block(inputs: Any, at: int, op: int, block: Any) -> None:
    """Reduce what lies ``at`` bytes behind each of ``inputs`` into ``block``."""
    ranks, count = inputs.size, block.size
    first = array_at(inputs[0] + at, count, block)
    if ranks == 1:
        copy(first, block)
        return
    second = array_at(inputs[1] + at, count, block)
    if ranks == 2 or op != SUM:
        combine(op, first, second, block)
        rank = 2
    else:
        sum_of_three(first, second, array_at(inputs[2] + at, count, block), block)
        rank = 3
        while rank + 1 < ranks:
            add_two(array_at(inputs[rank] + at, count, block), array_at(inputs[rank + 1] + at, count, block), block)
            rank += 2
    while rank < ranks:
        combine_into(op, array_at(inputs[rank] + at, count, block), block)
        rank += 1


@jit
def widen(width: int, halves: Any, out: Any) -> None:
    """Widen an array of 16-bit floats."""
    if width == FLOAT16:
        widen_float16(halves, out)
    else:
        widen_bfloat16(halves, out)


@jit
def reduce_halves(inputs: Any, at: int, op: int, width: int, halves: Any, addend: Any, block: Any) -> None:
    """Reduce the 16-bit floats ``at`` bytes behind each of ``inputs`` into the float32 ``block``."""
    widen(width, array_at(inputs[0] + at, block.size, halves), block)
    for rank in range(1, inputs.size):
        widen(width, array_at(inputs[rank] + at, block.size, halves), addend)
        combine_into(op, addend, block)


@jit
def scaled(block: Any, scale: Any) -> None:
    """Multiply a block in place."""
    if scale != 1:
        for i in range(block.size):
            block[i] *= scale


@jit
def reduce_range(inputs: Any, outputs: Any, size: int, op: int, scale: Any, like: Any, total: Any) -> None:
    """Reduce ``size`` elements at each of ``inputs`` times ``scale`` to all ``outputs``, which may be inputs."""
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        at, block = start * like.itemsize, total[:count]
        reduce_block(inputs, at, op, block)
        scaled(block, scale)
        for rank in range(outputs.size):
            copy(block, array_at(outputs[rank] + at, count, like))


@jit
def reduce_range_of_halves(
    inputs: Any, outputs: Any, size: int, op: int, scale: Any, width: int, halves: Any, total: Any
) -> None:
    """Do the same with 16-bit floats; ``total`` has room for two blocks."""
    for start in range(0, size, BLOCK):
        count = min(BLOCK, size - start)
        at, block = start * 2, total[:count]
        reduce_halves(inputs, at, op, width, halves, total[BLOCK : BLOCK + count], block)
        scaled(block, scale)
        target = array_at(outputs[0] + at, count, halves)
        if width == FLOAT16:
            round_float16(target, block)
        else:
            round_bfloat16(target, block)
        for rank in range(1, outputs.size):
            copy(target, array_at(outputs[rank] + at, count, halves))


@jit
def reduce_in_place(buffers: Any, size: int, op: int, scale: Any, like: Any, total: Any) -> None:
    """Reduce ``size`` elements at each of ``buffers`` times ``scale`` into all of them."""
    if op == SUM and 2 <= buffers.size <= 4:  # no block between: each element is read once and written once
        a, b = array_at(buffers[0], size, like), array_at(buffers[1], size, like)
        if buffers.size == 2:
            sum_into_two(a, b, scale)
            return
        c = array_at(buffers[2], size, like)
        if buffers.size == 3:
            sum_into_three(a, b, c, scale)
        else:
            sum_into_four(a, b, c, array_at(buffers[3], size, like), scale)
    else:
        reduce_range(buffers, buffers, size, op, scale, like, total)


@jit
def reduce_any(
    inputs: Any, outputs: Any, size: int, op: int, scale: Any, width: int, like: Any, halves: Any, total: Any
) -> None:
    """Reduce to all ``outputs``, whatever the dtype is; ``halves`` is an array of uint16."""
    if width == WHOLE:
        reduce_range(inputs, outputs, size, op, scale, like, total)
    else:
        reduce_range_of_halves(inputs, outputs, size, op, scale, width, halves, total)
