"""MPI operators for the maximum and the minimum of floats, with NaN wherever any rank has NaN.

The built-in MPI.MAX and MPI.MIN compare: the order of the operands then decides whether a NaN survives. The operators
here are numpy.maximum and numpy.minimum, which propagate NaN.
"""

import functools
from typing import Any, Final

import numpy as np

_UFUNCS: Final = {"max": np.maximum, "min": np.minimum}


@functools.cache  # MPI has few slots for operators of users; these live as long as MPI
def operator(mpi: Any, op: str, code: str) -> Any:
    """Return the MPI operator ``op``, "max" or "min", for floats of the dtype character ``code`` (local)."""
    ufunc, dtype = _UFUNCS[op], np.dtype(code)

    def reduce(left: Any, right: Any, datatype: Any) -> None:
        out = np.frombuffer(right, dtype)
        with np.errstate(all="ignore"):
            ufunc(np.frombuffer(left, dtype), out, out=out)

    return mpi.Op.Create(reduce, commute=True)
