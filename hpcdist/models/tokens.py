"""Tokens and classes: integers that index a table, checked against its size and made int64 for kernels."""

from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.errors import DataError
from hpcdist.models.stage import Saved

IGNORED: Final = -1  # as a target: no loss, no gradient


def check_tokens(tokens: Array, count: int, what: str, *, ignored: bool = False) -> None:
    """Raise DataError unless all ``tokens`` lie in [0, count), or are IGNORED where that is allowed.

    A GPU is not asked: it would wait.
    """
    if not is_device(tokens) and tokens.size:
        least, most = int(tokens.min()), int(tokens.max())
        if least < (IGNORED if ignored else 0) or most >= count:
            raise DataError(
                f"{what} {most if most >= count else least} is outside [0, {count}); the data does not fit the model: "
                "set model.vocabulary above its largest token, or give other data"
                + (f" ({IGNORED} marks a {what} that does not count)" if ignored else "")
            )


def as_indices(tokens: Array, saved: Saved) -> Array:
    """Return ``tokens`` as int64 (tokens,): kernels are compiled for one type. A scratch array on the CPU.

    So operations keep the tokens as they were given, by reference, and call this again in their backward.
    """
    if is_device(tokens):
        return tokens.reshape(-1).astype(np.int64)
    indices = saved.scratch("tokens.indices", tokens.shape, np.int64)
    indices[...] = tokens
    return indices.reshape(-1)
