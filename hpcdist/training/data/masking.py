"""Text with some tokens hidden, for an encoder to say (Devlin et al. 2018).

Of each sample exactly `predictions` tokens are chosen. Of these four in five become the mask, one in ten another token,
one in ten stays; all are targets. What is chosen is a function of (seed, epoch, sample) and of nothing else: the same
under every cut of a batch, and other places in every epoch. Words come from Philox4x32-10 (Salmon et al., SC'11).
"""

from typing import Final

import numpy as np

from hpcdist.arrays.rng import philox_arrays
from hpcdist.models.tokens import IGNORED
from hpcdist.models.transformer import masked_predictions
from hpcdist.training.data.samples import Batch, Samples

MASKED: Final = 0.8  # the share of the chosen tokens that become the mask
OTHER: Final = 0.1  # and another token
VALIDATION: Final = 0xFFFFFFFF  # the epoch, under seed 0, whose masks validation has: no run comes as far
WORDS: Final = 4  # of a counter
_WORD: Final = 0xFFFFFFFF
_APART: Final = 0x6D61736B  # tells these words from those of dropout under the same seed


class Masked:
    """The samples of ``windows`` with tokens hidden as ``epoch`` has it; targets are what they were, or IGNORED.

    ``mask`` stands for a hidden token, of ``vocabulary`` tokens.
    """

    def __init__(self, windows: Samples, mask: int, vocabulary: int, seed: int = 0, epoch: int = VALIDATION) -> None:
        assert 0 <= mask < vocabulary and vocabulary > 1
        self._windows, self._mask, self._vocabulary = windows, mask, vocabulary
        self._seed, self._epoch = seed, epoch
        self.count, self.shifts = windows.count, windows.shifts

    def in_epoch(self, seed: int, epoch: int) -> "Masked":
        """Return the same samples as ``epoch`` of a run with ``seed`` has them."""
        return Masked(self._windows, self._mask, self._vocabulary, seed, epoch)

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return inputs (n, context), in a type that has room for the mask, and targets (n, context) int64."""
        tokens, _ = self._windows.take(indices, shift)
        count, context = tokens.shape
        chosen = masked_predictions(context)
        words = self._words(indices, context + 2 * chosen)
        # Of random words the places of the least are a random choice; the place behind the word makes all different.
        order = words[:, :context] << np.uint64(32) | np.arange(context, dtype=np.uint64)
        places = np.partition(order, chosen - 1, axis=1)[:, :chosen] & np.uint64(_WORD)
        places = np.sort(places, axis=1).astype(np.int64)
        fates, draws = words[:, context : context + chosen], words[:, context + chosen :]
        others = (draws * np.uint64(self._vocabulary - 1) >> np.uint64(32)).astype(np.int64)
        others += others >= self._mask  # any token but the mask
        said = np.take_along_axis(tokens, places, axis=1).astype(np.int64)
        masked, other = fates < round(MASKED * 2**32), fates < round((MASKED + OTHER) * 2**32)
        read = np.where(masked, self._mask, np.where(other, others, said))
        inputs = tokens.astype(np.result_type(tokens.dtype, np.min_scalar_type(self._vocabulary - 1)))
        np.put_along_axis(inputs, places, read.astype(inputs.dtype), axis=1)
        targets = np.full((count, context), IGNORED, np.int64)
        np.put_along_axis(targets, places, said, axis=1)
        return inputs, targets

    def _words(self, indices: np.ndarray, count: int) -> np.ndarray:
        """Return (n, count) random words below 2^32 as uint64, a row for each sample."""
        sample = indices.astype(np.uint64)[:, None]
        place = np.arange(-(-count // WORDS), dtype=np.uint64)[None, :]
        place = place + np.zeros_like(sample)
        key = self._seed & _WORD ^ _APART, self._seed >> 32 & _WORD
        words = philox_arrays((place, sample & np.uint64(_WORD), sample >> np.uint64(32), self._epoch & _WORD), key)
        found: np.ndarray = np.stack(np.broadcast_arrays(*words), axis=2).reshape(len(indices), WORDS * place.shape[1])
        return found[:, :count]
