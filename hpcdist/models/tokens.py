"""Tokens and classes: integers that index a table."""

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.errors import DataError


def check_tokens(tokens: Array, count: int, what: str) -> Array:
    """Return ``tokens`` as int64. Raises DataError unless all lie in [0, count); a GPU is not asked, it would wait."""
    if not is_device(tokens) and tokens.size:
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= count:
            raise DataError(
                f"{what} {least if least < 0 else most} is outside [0, {count}); the data does not fit the model: "
                "set model.vocabulary above its largest token, or give other data"
            )
    indices: Array = tokens.astype(np.int64)
    return indices
