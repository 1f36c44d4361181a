"""Inverted dropout (Srivastava et al. 2014): kept elements are scaled by 1 / (1 - rate).

Masks do not depend on the number of ranks. They are not stored, but drawn again in backward. Philox4x32-10 (Salmon et
al., SC'11) with the seed as its key draws the numbers for four elements from a counter: (index of the element in the
sample / 4, index of the sample in the global batch, layer and site, step).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array, address, is_device
from hpcdist.arrays.jit import jit
from hpcdist.arrays.rng import philox
from hpcdist.models.layers import cuda_kernels
from hpcdist.models.layers.vector_math import SAMPLE_DTYPES
from hpcdist.models.stage import Draw, Saved

# Dropout sites in a layer. The numbers are part of every mask: use new numbers for new sites.
EMBEDDING, ATTENTION, PROJECTION, DOWN, HIDDEN = range(5)
MAX_SITES: Final = 8  # layer * MAX_SITES + site is one word of the counter
WORDS_PER_COUNTER: Final = 4  # 32-bit words that Philox makes of one counter, one per element


def fits_counter(rows: int, columns: int) -> bool:
    """Return True if a dropout mask of shape (rows, columns) has few enough elements for a 32-bit counter."""
    return rows * -(-columns // WORDS_PER_COUNTER) < 1 << 32


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Dropout mask of an array (samples * groups, rows, columns), or of a shard of the rows of each sample."""

    draw: Draw
    layer: int
    site: int  # use of dropout in the layer
    rate: float
    rows_per_sample: int  # of a whole sample's mask, with `columns` elements each
    columns: int
    first_row: int = 0
    groups: int = 1  # for example attention heads
    pitch: int = 0  # local group g begins at row first_row + g * pitch of the sample's mask

    def drop(self, x: Array, first: int, last: int, width: int, above: int = 0, left: int = 0) -> None:
        """Multiply ``x[:, first:last, :width]`` by the mask in place. x[:, 0, 0] is at mask[``above``, ``left``]."""
        assert x.flags.c_contiguous, "dropout needs a contiguous array"
        assert left % WORDS_PER_COUNTER == 0, f"left = {left} must be a multiple of {WORDS_PER_COUNTER}"
        groups, pitch, rows_per_sample, first_row, blocks = self.place
        position = groups, pitch, rows_per_sample, first_row + above, blocks, left // WORDS_PER_COUNTER
        *counter, limit = self.counters
        if is_device(x):
            cuda_kernels.dropout(x, first, last, width, *position, *counter, limit, self.words, factor=self.scale)
        else:
            _drop(x, first, last, width, *position, *counter, np.uint32(limit), x.dtype.type(self.scale))

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Position and shape of the mask: five integers, in the order of the arguments of the dropout kernels."""
        assert fits_counter(self.rows_per_sample, self.columns), "a sample has too many elements for its counters"
        return self.groups, self.pitch, self.rows_per_sample, self.first_row, -(-self.columns // WORDS_PER_COUNTER)

    @property
    def counters(self) -> tuple[int, int, int, int, int, int]:
        """Arguments for the Philox generator of the kernels: three counter words, two seed words, and dropout limit."""
        # An element is dropped if its word is below the limit: with probability ``rate``, rounded to 2^-32.
        draw, limit = self.draw, min(round(self.rate * (1 << 32)), (1 << 32) - 1)
        site, key = self.layer * MAX_SITES + self.site, (draw.seed & 0xFFFFFFFF, draw.seed >> 32 & 0xFFFFFFFF)
        # first sample in the batch; layer and site; step; seed; limit
        return draw.first_sample, site, draw.step & 0xFFFFFFFF, *key, limit

    @property
    def words(self) -> int:
        """Address of a GPU array (first sample, step), or 0 if the kernels get these two numbers as arguments."""
        return 0 if self.draw.words is None else address(self.draw.words)

    @property
    def scale(self) -> float:
        """Factor 1 / (1 - rate) of the elements that dropout keeps."""
        return 1 / (1 - self.rate)


def mask(saved: Saved, rate: float, site: int, **layout: int) -> Mask | None:
    """Return the mask for dropout call number ``site`` of a layer, or None without dropout."""
    if not rate or saved.draw is None:
        return None
    # `layout`: at least `rows_per_sample` and `columns`
    return Mask(draw=saved.draw, layer=saved.layer, site=site, rate=rate, **layout)


class LocalDropout:
    """Dropout without communication, for arrays of shape (samples, columns) or (samples, rows, columns)."""

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        rows_per_sample, columns = (x.shape[1] if x.ndim > 2 else 1), x.shape[-1]
        dropped = mask(saved, rate, site, rows_per_sample=rows_per_sample, columns=columns)
        if dropped is not None and x.size:
            rows = x.reshape(1, -1, columns)
            dropped.drop(rows, 0, rows.shape[1], columns)
        return x

    def backward(self, dy: Array, rate: float, site: int, saved: Saved) -> Array:
        if not rate or saved.draw is None:
            return dy
        dx = saved.scratch("dropout.dx", dy.shape, dy.dtype)
        dx[...] = dy
        return self.forward(dx, rate, site, saved)


@jit
def _drop(  # type: ignore[no-untyped-def]
    x, first, last, width, groups, pitch, rows_per_sample, first_row, blocks, skipped,
    first_sample, site, step, key0, key1, limit, scale,
):  # fmt: skip
    # Multiply by 0 instead of writing 0, so that NaN and infinity stay visible.
    zero = scale - scale
    words = np.empty(WORDS_PER_COUNTER * blocks, np.uint32)
    for g in range(x.shape[0]):
        # Group g is group g % groups of sample g // groups; its first row is `above`, over the rows of all samples.
        above = g // groups * rows_per_sample + g % groups * pitch + first_row
        for i in range(first, last):
            sample, row = divmod(above + i, rows_per_sample)
            begin = row * blocks + skipped  # every row starts a new counter; x lacks the first `skipped` counters
            counters = (width + WORDS_PER_COUNTER - 1) // WORDS_PER_COUNTER
            philox(words, counters, begin, first_sample + sample, site, step, key0, key1)
            for j in range(width):
                x[g, i, j] *= scale if words[j] >= limit else zero


for _dtype in SAMPLE_DTYPES:
    _cube = np.ones((1, 2, 5), _dtype)
    _drop.sample(lambda x=_cube: (x.copy(), 0, 2, 5, 1, 0, 2, 0, 2, 0, 0, 0, 0, 0, 0, np.uint32(0), x.dtype.type(1)))
