"""The source of a run whose script brings the batches."""

import numpy as np

from hpcdist.training.data.samples import Batch
from hpcdist.training.data.source import Source


class NoSamples:
    """Stands for samples that only the script knows."""

    count, shifts = 1, 1

    def take(self, indices: np.ndarray, shift: int) -> Batch:
        """Return nothing: nobody may ask."""
        raise AssertionError("the batches of this run come from its script")


def of_script() -> Source:
    """Return the source of such a run: what it holds is the script's affair, validation included."""
    return Source("of the script", NoSamples(), None, None, {}, "of the script")
