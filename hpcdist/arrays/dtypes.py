"""Element types: names in recipes and files, and the dtype in which each type is summed."""

from typing import Final

import ml_dtypes
import numpy as np

from hpcdist.errors import UsageError

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOAT32: Final = np.dtype(np.float32)
FLOATS: Final = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {"bfloat16": BFLOAT16}
INTEGERS: Final = {
    name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
_BY_NAME: Final = FLOATS | INTEGERS
_NAMES: Final = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_of(name: str) -> np.dtype:
    """Return the numpy dtype with this ``name``, including bfloat16 (from ml_dtypes)."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UsageError(f"dtype {name!r} is not supported; choose one of {', '.join(_BY_NAME)}") from None


def name_of(dtype: np.dtype) -> str:
    """Return the name of ``dtype`` as used in recipes, files and error messages."""
    try:
        return _NAMES[np.dtype(dtype)]
    except KeyError:
        return str(dtype)


def is_supported(dtype: np.dtype) -> bool:
    """Return True if arrays of ``dtype`` can be sent and reduced. Non-native byte order is not supported."""
    return dtype in _NAMES


def fault_in(dtype: np.dtype) -> str:
    """Return the reason why ``dtype`` is not supported and what to use instead, or "" if it is supported."""
    if is_supported(dtype):
        return ""
    if dtype.kind in "SUV":
        advice = "pass array.view(np.uint8) to move the bytes of a contiguous array"
    elif not dtype.isnative:
        advice = "pass array.astype(array.dtype.newbyteorder('='))"
    elif dtype.char in "FD":
        advice = f"pass array.view(np.float{4 * dtype.itemsize})"
    elif dtype.kind == "b":
        advice = "pass array.view(np.uint8)"
    elif dtype.kind in "mM":
        advice = "pass array.view(np.int64)"
    elif dtype.kind == "O":
        advice = "use bcast and allgather of hpcdist.World, which pickle"
    else:
        advice = "convert it by array.astype"
    return f"dtype {dtype} is not supported; {advice}, or choose one of {', '.join(_BY_NAME)} in native byte order"


def is_16bit_float(dtype: np.dtype) -> bool:
    """Return True if ``dtype`` is float16 or bfloat16. Sums in these dtypes use float32 and are rounded once."""
    return dtype == BFLOAT16 or dtype == np.float16


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which sums of ``dtype`` values are computed."""
    return FLOATS["float32"] if is_16bit_float(dtype) else np.dtype(dtype)
