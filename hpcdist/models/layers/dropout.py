"""Dropout (Srivastava et al. 2014), inverted: what is kept grows by 1 / (1 - rate), so evaluation changes nothing.

Whether an element is dropped is a function of (seed, step, layer, site, place of the sample in the batch of the whole
step, place of the element in the sample) and of nothing else: the same under every cut of the work into micro-batches,
replicas, stages and parts of a sample, and when a forward is computed again. So no mask is stored: backward draws it
once more. Philox4x32-10 (Salmon et al., SC'11) with the seed as its key gives four elements a counter of (place in the
sample / 4, sample, layer and site, step); a row begins with a counter of its own. An element costs 0.3 to 0.4 ns on a
processor with AVX-512 where rows are long, and up to 3 ns in rows of a dozen.
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

# Where a layer drops. The numbers are part of every mask: give new sites new ones.
EMBEDDING, ATTENTION, PROJECTION, DOWN, HIDDEN = range(5)
MAX_SITES: Final = 8  # layer * MAX_SITES + site is one word of the counter
WORDS_PER_COUNTER: Final = 4  # of 32 bits, that Philox makes of one counter: one for each element


def fits_counter(rows: int, columns: int) -> bool:
    """Return whether a word counts all counters of a sample with so many rows of ``columns`` (local)."""
    return rows * -(-columns // WORDS_PER_COUNTER) < 1 << 32


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The mask of a site, and where an array (groups, rows, columns) lies in it. All of it is local.

    A sample has ``rows_per_sample`` rows of ``columns``. The first row of the array is ``first_row``, counted from
    that of the first sample on. ``groups`` follow each other by ``pitch`` rows; then the next sample begins.
    """

    draw: Draw
    layer: int
    site: int
    rate: float
    rows_per_sample: int
    columns: int
    first_row: int = 0
    groups: int = 1
    pitch: int = 0

    def drop(self, x: Array, first: int, last: int, width: int, above: int = 0, left: int = 0) -> None:
        """Multiply the first ``width`` columns of rows [first, last) of contiguous x (groups, rows, columns).

        Factors are 0 and 1 / (1 - rate). ``above`` rows of each group are not in x, and neither are the first ``left``
        columns, a multiple of 4.
        """
        assert x.flags.c_contiguous, "rows of this array are no memory of one piece"
        assert left % WORDS_PER_COUNTER == 0, "a counter stands for four columns"
        groups, pitch, rows_per_sample, first_row, blocks = self.place
        place = groups, pitch, rows_per_sample, first_row + above, blocks, left // WORDS_PER_COUNTER
        *counter, limit = self.counters
        if is_device(x):
            cuda_kernels.dropout(x, first, last, width, *place, *counter, limit, self.words, factor=self.scale)
        else:
            _drop(x, first, last, width, *place, *counter, np.uint32(limit), x.dtype.type(self.scale))

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Numbers from an element to its counter: groups, pitch, rows of a sample, first row, counters a row."""
        assert fits_counter(self.rows_per_sample, self.columns), "the model should have been refused"
        return self.groups, self.pitch, self.rows_per_sample, self.first_row, -(-self.columns // WORDS_PER_COUNTER)

    @property
    def counters(self) -> tuple[int, int, int, int, int, int]:
        """The other words of all counters, those of the key, and the least word of an element that is kept."""
        # An element is dropped where its word is below the limit: with probability rate, to 2^-32.
        draw, limit = self.draw, min(round(self.rate * (1 << 32)), (1 << 32) - 1)
        site, key = self.layer * MAX_SITES + self.site, (draw.seed & 0xFFFFFFFF, draw.seed >> 32 & 0xFFFFFFFF)
        return draw.first_sample, site, draw.step & 0xFFFFFFFF, *key, limit

    @property
    def words(self) -> int:
        """Address on a GPU of the first sample and the step; 0 where they are those of `counters`."""
        return 0 if self.draw.words is None else address(self.draw.words)

    @property
    def scale(self) -> float:
        """The factor of what is kept."""
        return 1 / (1 - self.rate)


def mask(saved: Saved, rate: float, site: int, **place: int) -> Mask | None:
    """Return the mask of a site for what ``saved`` belongs to, None where nothing is dropped: `Mask` has the rest."""
    if not rate or saved.draw is None:
        return None
    return Mask(draw=saved.draw, layer=saved.layer, site=site, rate=rate, **place)


class LocalDropout:
    """Dropout of (samples, columns) or (samples, rows, columns)."""

    def forward(self, x: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return x, which is overwritten."""
        rows_per_sample, columns = (x.shape[1] if x.ndim > 2 else 1), x.shape[-1]
        dropped = mask(saved, rate, site, rows_per_sample=rows_per_sample, columns=columns)
        if dropped is not None and x.size:
            rows = x.reshape(1, -1, columns)
            dropped.drop(rows, 0, rows.shape[1], columns)
        return x

    def backward(self, dy: Array, rate: float, site: int, saved: Saved) -> Array:
        """Return dx, a scratch array; dy itself where nothing was dropped."""
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
    # A product with 0 instead of a plain 0: NaN and infinity stay visible.
    zero = scale - scale
    words = np.empty(WORDS_PER_COUNTER * blocks, np.uint32)
    for g in range(x.shape[0]):
        # Group g is group g % groups of sample g // groups; its first row is `above`, over the rows of all samples.
        above = g // groups * rows_per_sample + g % groups * pitch + first_row
        for i in range(first, last):
            sample, row = divmod(above + i, rows_per_sample)
            begin = row * blocks + skipped  # every row begins with a counter of its own; `skipped` ones are not in x
            counters = (width + WORDS_PER_COUNTER - 1) // WORDS_PER_COUNTER
            philox(words, counters, begin, first_sample + sample, site, step, key0, key1)
            for j in range(width):
                x[g, i, j] *= scale if words[j] >= limit else zero


for _dtype in SAMPLE_DTYPES:
    _cube = np.ones((1, 2, 5), _dtype)
    _drop.sample(lambda x=_cube: (x.copy(), 0, 2, 5, 1, 0, 2, 0, 2, 0, 0, 0, 0, 0, 0, np.uint32(0), x.dtype.type(1)))
