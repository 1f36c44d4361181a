"""Pytrees of parameters of a JAX model, checked before anything is computed, and arrays shared or exchanged with JAX.

Of the leaves of a pytree a model has names, shapes, types and ties.

JAX arrays are immutable and lie in memory of its own, so gradients and outputs are copied out of it, once each. On the
way in, memory that begins on a cache line is read where it is; other memory is copied. The caller waits until JAX is
done before that memory changes.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np

from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.gpu import device
from hpcdist.errors import ConfigurationError, DataError, MissingCapabilityError, UsageError


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
    """Traffic between the arrays of a run and JAX so far, tensor by tensor: bytes, and numbers of tensors.

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
        source: Any = array  # numpy's, or cupy's
        if is_device(array):
            device.synchronise()  # JAX has streams of its own
            value, address = submodule("dlpack").from_dlpack(source), source.data.ptr
        else:
            home = library().local_devices(backend="cpu")[0]
            value, address = library().device_put(source, home, may_alias=True), source.ctypes.data
        if array.size and value.unsafe_buffer_pointer() == address:
            self.seen += 1
            self.seen_bytes += array.nbytes
        else:
            self.copied_in += 1
            self.copied_in_bytes += array.nbytes
        return value

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
    converted: Array = array.astype(dtype)
    return converted


DTYPES: Final = ("float32", "float64")  # of params; what is 16 bits wide is so inside of a function
PLATFORMS: Final = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True)
class ParameterLeaves:
    """The leaves of one pytree of params, in its order; ``values`` makes their initial values."""

    tree: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    arrays: tuple[Any, ...]  # as they were given; shapes and types alone where a function makes them
    values: Callable[[], Sequence[Any]]

    @classmethod
    def of(cls, given: Any, where: str) -> "ParameterLeaves":
        """Return the leaves of a pytree, or of what a function of no arguments makes. Raises UsageError for others."""
        jax = library()
        makes = callable(given) and jax.tree_util.all_leaves([given])
        pairs, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(given) if makes else given)
        names = tuple(_name(path) for path, _ in pairs)
        arrays = tuple(leaf for _, leaf in pairs)
        for name, leaf in zip(names, arrays, strict=True):
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise UsageError(
                    f"{name} in the {where} is a {type(leaf).__name__}; leaves have to be arrays: what is not trained "
                    "belongs into the function"
                )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"two leaves of the {where} are called {twice}; give them other keys")
        return cls(
            tree,
            names,
            tuple(tuple(leaf.shape) for leaf in arrays),
            arrays,
            (lambda: _initial_value(given, tree, where)) if makes else (lambda: arrays),
        )


def _name(path: Sequence[Any]) -> str:
    """Return the keys of ``path`` with dots between them; slashes, which some libraries have in keys, become dots."""
    parts = [next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)) for key in path]
    return ".".join(str(part).replace("/", ".") for part in parts) or "value"


def _initial_value(given: Callable[[], Any], tree: Any, where: str) -> Sequence[Any]:
    leaves, structure = library().tree_util.tree_flatten(given())
    if structure != tree:
        raise UsageError(f"the function that makes the {where} returned {structure}, and {tree} when it was looked at")
    return list(leaves)


def group_by_stage(leaves: Sequence[ParameterLeaves]) -> list[list[int]]:
    """Return which functions make each stage: one without params goes with that before it, or behind it at the front.

    Raises UsageError where there is nothing to train.
    """
    groups: list[list[int]] = []
    leading: list[int] = []
    for number, own in enumerate(leaves):
        if own.names:
            groups.append([*leading, number])
            leading = []
        elif groups:
            groups[-1].append(number)
        else:
            leading.append(number)
    if not groups:
        raise UsageError("the params have no leaf: there is nothing to train")
    return groups


def common_dtype(leaves: Sequence[ParameterLeaves]) -> np.dtype:
    """Return the type of all leaves. Raises ConfigurationError where they differ, or no run computes in it."""
    pairs = [
        (f"{name} in the params of stage {number}", np.dtype(leaf.dtype))
        for number, own in enumerate(leaves)
        for name, leaf in zip(own.names, own.arrays, strict=True)
    ]
    first, alike = pairs[0]
    for name, dtype in pairs:
        if dtype.name not in DTYPES:
            raise ConfigurationError(
                f"{name} is {dtype}; params are {' or '.join(DTYPES)}: convert them, and let the function "
                "convert to 16 bits where it wants; what is not trained belongs into the function"
            )
        if dtype != alike:
            raise ConfigurationError(f"{name} is {dtype} and {first} {alike}; convert all params to one type")
    if jax_dtype(alike) != alike:
        raise ConfigurationError(
            f"the params are {alike}, which JAX has disabled; set JAX_ENABLE_X64=1, "
            f"or convert them to {jax_dtype(alike)}"
        )
    return alike


def platform_of(leaves: Sequence[ParameterLeaves]) -> str | None:
    """Return where the leaves were put, "cpu" or "gpu"; None where they are no arrays of JAX."""
    platforms = {
        device.platform
        for own in leaves
        for leaf in own.arrays
        if hasattr(leaf, "devices")
        for device in leaf.devices()
    }
    if not platforms:
        return None
    if len(platforms) > 1 or not platforms <= PLATFORMS.keys():
        raise ConfigurationError(
            f"the params are on {', '.join(sorted(platforms))}; put them all on the CPU, or all on one GPU "
            "(jax.device_put)"
        )
    return PLATFORMS[platforms.pop()]


def check_ties(tied: Mapping[str, str], layers: Sequence[ParameterLeaves]) -> list[dict[str, str]]:
    """Return, for each layer, the local names of tensors that an earlier one owns, with the key there.

    Raises UsageError for ties that cannot be kept, and where two layers were given the same array without a tie.
    """
    shapes = {
        f"{layer}.{name}": shape
        for layer, own in enumerate(layers)
        for name, shape in zip(own.names, own.shapes, strict=True)
    }
    ties: list[dict[str, str]] = [{} for _ in layers]
    for key, owner in tied.items():
        for named in (key, owner):
            if named not in shapes:
                raise UsageError(f"tied names {named!r}, which is none of {', '.join(shapes)}")
        number, _, name = key.partition(".")
        layer, before = int(number), int(owner.partition(".")[0])
        if owner in tied or before >= layer:
            raise UsageError(
                f"{key} is tied to {owner}; the owner has to be in an earlier stage and no tied tensor itself (inside "
                "of a stage, let the function use one leaf twice)"
            )
        if shapes[key] != shapes[owner]:
            raise UsageError(f"{key} has shape {shapes[key]} and {owner} {shapes[owner]}; tied tensors have one shape")
        ties[layer][name] = owner
    for place, own in enumerate(layers):
        if len(ties[place]) == len(own.names):
            raise UsageError(f"all tensors of stage {place} are tied; join its function to that of another stage")
    _check_objects(layers, ties)
    return ties


def _check_objects(layers: Sequence[ParameterLeaves], ties: Sequence[Mapping[str, str]]) -> None:
    seen: dict[int, tuple[int, str]] = {}
    for layer, own in enumerate(layers):
        for name, array in zip(own.names, own.arrays, strict=True):
            before, other = seen.setdefault(id(array), (layer, name))
            if before != layer and name not in ties[layer]:
                raise UsageError(
                    f"{layer}.{name} and {before}.{other} are the same array: to train them as one, pass tied="
                    f"{{'{layer}.{name}': '{before}.{other}'}}; to train two that start alike, give one a copy"
                )
