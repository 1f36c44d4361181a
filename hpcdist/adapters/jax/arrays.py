"""Arrays and JAX: what is only read is seen where it lies, what is written is copied once.

JAX arrays are immutable and lie in memory of its own, so gradients and outputs are copied out of it, once each. On the
way in, memory that begins on a cache line is read where it is; other memory is copied. Whoever calls waits until JAX is
done before that memory changes.
"""

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.gpu import device
from hpcdist.errors import DataError, MissingCapabilityError


@functools.cache
def library() -> ModuleType:
    """Return the jax module. Raises MissingCapabilityError, with the reason, where it cannot be imported."""
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise MissingCapabilityError(
            f"jax cannot be imported ({error}); install hpcdist[jax], or train a built-in model"
        ) from error


def submodule(name: str) -> ModuleType:
    """Return a module of jax that ``import jax`` does not bring along."""
    library()
    return importlib.import_module(f"jax.{name}")


@dataclass
class JaxTraffic:
    """What went between the arrays of a run and JAX so far, tensor by tensor: bytes, and how many tensors.

    ``seen``: read where they lie. ``copied_in``, ``copied_out``: once each.
    """

    seen: int = 0
    seen_bytes: int = 0
    copied_in: int = 0
    copied_in_bytes: int = 0
    copied_out: int = 0
    copied_out_bytes: int = 0

    def bring(self, array: Array) -> Any:
        """Return ``array`` as a JAX array on its side of the bus, in a type that JAX has enabled (local).

        Where it was not copied, its memory must not change while JAX may read it. Raises DataError on integers that do
        not fit.
        """
        array = _computable(array)
        there: Any = array  # numpy's, or cupy's
        if is_device(array):
            device.synchronise()  # JAX has streams of its own
            found, address = submodule("dlpack").from_dlpack(there), there.data.ptr
        else:
            home = library().local_devices(backend="cpu")[0]
            found, address = library().device_put(there, home, may_alias=True), there.ctypes.data
        if array.size and found.unsafe_buffer_pointer() == address:
            self.seen += 1
            self.seen_bytes += array.nbytes
        else:
            self.copied_in += 1
            self.copied_in_bytes += array.nbytes
        return found

    def take(self, values: Any, into: Array, *, add: bool = False) -> None:
        """Write the JAX array ``values`` over ``into``, or add it, in one pass (local).

        ``into`` is in order when this returns, also on a GPU.
        """
        on_device = is_device(into)
        source = device.cupy().from_dlpack(values) if on_device else np.asarray(values)
        if add:
            with np.errstate(all="ignore"):  # infinity is for the caller to find, as in a collective
                into += source
        else:
            into[...] = source
        if on_device:
            device.synchronise()  # or JAX would reuse its memory too early
        self.copied_out += 1
        self.copied_out_bytes += into.nbytes


def repeat_samples(rows: np.ndarray, samples: int) -> np.ndarray:
    """Return so many samples, which repeat ``rows``."""
    return np.resize(rows, (samples, *rows.shape[1:]))


def jax_dtype(dtype: Any) -> np.dtype:
    """Return the type in which JAX has data of ``dtype``: without ``jax_enable_x64``, 64 bits become 32."""
    return np.dtype(library().dtypes.canonicalize_dtype(dtype))


def _computable(array: Array) -> Array:
    dtype = jax_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if np.issubdtype(dtype, np.integer) and array.size:
        limits = np.iinfo(dtype)
        least, most = int(array.min()), int(array.max())
        if least < limits.min or most > limits.max:
            raise DataError(
                f"the data has {least if least < limits.min else most}, which JAX would make {dtype} and wrap around; "
                "enable 64 bits (JAX_ENABLE_X64=1), or give smaller numbers"
            )
    found: Array = array.astype(dtype)
    return found
