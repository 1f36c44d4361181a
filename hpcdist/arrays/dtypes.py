"""Element types: their names in recipes and files, and the precision in which each is summed."""

from typing import Final

import ml_dtypes
import numpy as np

from hpcdist.errors import UsageError

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOATS: Final = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {"bfloat16": BFLOAT16}
INTEGERS: Final = {
    name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
_BY_NAME: Final = FLOATS | INTEGERS
_NAMES: Final = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_of(name: str) -> np.dtype:
    """Return the dtype called ``name``, bfloat16 (which numpy lacks) included."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UsageError(f"dtype {name!r} is not supported; choose one of {', '.join(_BY_NAME)}") from None


def name_of(dtype: np.dtype) -> str:
    """Return the name under which ``dtype`` stands in recipes, files and errors."""
    try:
        return _NAMES[np.dtype(dtype)]
    except KeyError:
        return str(dtype)


def is_supported(dtype: np.dtype) -> bool:
    """Whether buffers of ``dtype`` may be sent and reduced (native byte order only)."""
    return dtype in _NAMES


def fault_in(dtype: np.dtype) -> str:
    """Return why buffers of ``dtype`` are rejected, and what to pass instead; "" for a supported dtype."""
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
    """Whether sums of ``dtype`` are carried in float32 and rounded once."""
    return dtype == BFLOAT16 or dtype == np.float16


def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are summed."""
    return FLOATS["float32"] if is_16bit_float(dtype) else np.dtype(dtype)
