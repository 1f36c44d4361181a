"""Checks of the parameter pytrees of a JAX model, and arrays shared with JAX or copied from it.

JAX arrays are immutable, so gradients and outputs are copied out once. Input memory that is aligned to a cache line is
shared with JAX; other memory is copied. The caller waits for JAX before it changes shared memory.
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
    """Import and return the jax module. Raises MissingCapabilityError, with the reason, if this fails."""
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise MissingCapabilityError(
            f"jax cannot be imported ({error}); install hpcdist[jax], or train a built-in model"
        ) from error


def submodule(name: str) -> ModuleType:
    """Import and return the submodule ``name`` of jax. ``import jax`` alone may not import the submodule."""
    library()
    return importlib.import_module(f"jax.{name}")


@dataclass
class JaxTraffic:
    """Counters of the tensors and bytes that hpcdist shared with JAX, copied to JAX, and copied from JAX."""

    seen: int = 0  # tensors shared without a copy
    seen_bytes: int = 0
    copied_in: int = 0  # tensors copied to JAX
    copied_in_bytes: int = 0
    copied_out: int = 0  # tensors copied back
    copied_out_bytes: int = 0

    def bring(self, array: Array) -> Any:
        """Return ``array`` as a JAX array on the same device. Raises DataError if integers do not fit JAX's dtype."""
        array = _computable(array)
        source: Any = array  # a numpy or cupy array
        if is_device(array):
            device.synchronise()  # JAX uses its own streams
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
        """Copy the JAX array ``values`` into the array ``into``. ``add`` True: add to ``into`` instead."""
        on_device = is_device(into)
        source = device.cupy().from_dlpack(values) if on_device else np.asarray(values)
        if add:
            with np.errstate(all="ignore"):  # the caller checks for infinity, as after a collective
                into += source
        else:
            into[...] = source
        if on_device:
            device.synchronise()  # else JAX could reuse its memory too early
        self.copied_out += 1
        self.copied_out_bytes += into.nbytes


def repeat_samples(rows: np.ndarray, samples: int) -> np.ndarray:
    """Return an array of ``samples`` rows, made by cycling through the rows of the array ``rows``: a, b, c, a, b."""
    return np.resize(rows, (samples, *rows.shape[1:]))


def jax_dtype(dtype: Any) -> np.dtype:
    """Return the dtype that JAX uses for ``dtype``. Without ``jax_enable_x64``, 64-bit types become 32-bit types."""
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
                f"the data contains {least if least < limits.min else most}, which does not fit JAX's dtype {dtype}; "
                "enable 64 bits (JAX_ENABLE_X64=1), or give smaller numbers"
            )
    converted: Array = array.astype(dtype)
    return converted


DTYPES: Final = ("float32", "float64")  # of params; functions may convert to 16 bits inside
PLATFORMS: Final = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True)
class ParameterLeaves:
    """Leaf arrays of one user function's params pytree. ``values()`` returns the initial values of all leaves."""

    tree: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    arrays: tuple[Any, ...]  # as passed by the user, or only shapes and dtypes if a function creates them
    values: Callable[[], Sequence[Any]]

    @classmethod
    def of(cls, params: Any, where: str) -> "ParameterLeaves":
        """Return the leaves of ``params``, a pytree or a function that creates it. ``where``: name in errors."""
        jax = library()
        makes = callable(params) and jax.tree_util.all_leaves([params])
        pairs, tree = jax.tree_util.tree_flatten_with_path(jax.eval_shape(params) if makes else params)
        names = tuple(_name(path) for path, _ in pairs)
        arrays = tuple(leaf for _, leaf in pairs)
        for name, leaf in zip(names, arrays, strict=True):
            if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
                raise UsageError(
                    f"{name} in the {where} is a {type(leaf).__name__}, but all leaves must be arrays; turn values "
                    "that are not trained into constants of the function"
                )
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"two leaves of the {where} have the name {twice}; rename the key of one leaf")
        return cls(
            tree,
            names,
            tuple(tuple(leaf.shape) for leaf in arrays),
            arrays,
            (lambda: _initial_value(params, tree, where)) if makes else (lambda: arrays),
        )


def _name(path: Sequence[Any]) -> str:
    parts = [next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)) for key in path]
    return ".".join(str(part).replace("/", ".") for part in parts) or "value"


def _initial_value(create: Callable[[], Any], tree: Any, where: str) -> Sequence[Any]:
    leaves, structure = library().tree_util.tree_flatten(create())
    if structure != tree:
        raise UsageError(
            f"the function that makes the {where} returned the pytree {structure}, but its first call returned the "
            f"pytree {tree}; return the same structure in every call"
        )
    return list(leaves)


def group_by_stage(leaves: Sequence[ParameterLeaves]) -> list[list[int]]:
    """Group a model's functions into stages. Return one list of function indices per stage."""
    # Each function with params starts a stage. A function without params joins the stage before it, or the first stage.
    groups: list[list[int]] = []
    leading: list[int] = []
    for number, function_leaves in enumerate(leaves):
        if function_leaves.names:
            groups.append([*leading, number])
            leading = []
        elif groups:
            groups[-1].append(number)
        else:
            leading.append(number)
    if not groups:
        raise UsageError("the params have no leaf: there is nothing to train; pass at least one array in params")
    return groups


def common_dtype(leaves: Sequence[ParameterLeaves]) -> np.dtype:
    """Return the dtype of all arrays in ``leaves``. Raises ConfigurationError for mixed or unsupported dtypes."""
    pairs = [
        (f"{name} in the params of stage {number}", np.dtype(leaf.dtype))
        for number, group in enumerate(leaves)
        for name, leaf in zip(group.names, group.arrays, strict=True)
    ]
    first, expected = pairs[0]
    for name, dtype in pairs:
        if dtype.name not in DTYPES:
            raise ConfigurationError(
                f"{name} is {dtype}, but params must be {' or '.join(DTYPES)}; convert the params to train, and make "
                "other values constants of the function. The function itself may compute in 16 bits"
            )
        if dtype != expected:
            raise ConfigurationError(f"{name} is {dtype}, but {first} is {expected}; convert all params to one dtype")
    if jax_dtype(expected) != expected:
        raise ConfigurationError(
            f"the params are {expected}, which JAX has disabled; set JAX_ENABLE_X64=1, or convert the params to "
            f"{jax_dtype(expected)}"
        )
    return expected


def platform_of(leaves: Sequence[ParameterLeaves]) -> str | None:
    """Return the platform of the JAX arrays in ``leaves``, "cpu" or "gpu", or None if there are no JAX arrays."""
    platforms = {
        device.platform
        for group in leaves
        for leaf in group.arrays
        if hasattr(leaf, "devices")
        for device in leaf.devices()
    }
    if not platforms:
        return None
    if len(platforms) > 1 or not platforms <= PLATFORMS.keys():
        raise ConfigurationError(
            f"the params are on {', '.join(sorted(platforms))}; put all params on the CPU, or all on one GPU "
            "(jax.device_put)"
        )
    return PLATFORMS[platforms.pop()]


def check_ties(tied: Mapping[str, str], layers: Sequence[ParameterLeaves]) -> list[dict[str, str]]:
    """Return a list of one dict per layer: {NAME of a tied tensor: "LAYER.NAME" of the owner}.

    A tied tensor shares the values of its owner, a tensor of an earlier layer. ``tied``: {"LAYER.NAME" of a tied
    tensor: "LAYER.NAME" of the owner}. ``layers``: parameters of each layer. Raises UsageError for invalid ties.
    """
    # Two layers with the same array and no tie are also an error.
    shapes = {
        f"{layer}.{name}": shape
        for layer, group in enumerate(layers)
        for name, shape in zip(group.names, group.shapes, strict=True)
    }
    ties: list[dict[str, str]] = [{} for _ in layers]
    for key, owner in tied.items():
        for named in (key, owner):
            if named not in shapes:
                raise UsageError(f"tied names the tensor {named!r}, which does not exist; use {', '.join(shapes)}")
        number, _, name = key.partition(".")
        layer, before = int(number), int(owner.partition(".")[0])
        if owner in tied or before >= layer:
            raise UsageError(
                f"tensor {key} is tied to {owner}; the owner must be in an earlier stage and must not be tied itself "
                "(within one stage, let the function use one leaf twice)"
            )
        if shapes[key] != shapes[owner]:
            raise UsageError(f"tied tensors {key} and {owner} have different shapes, {shapes[key]} and {shapes[owner]}")
        ties[layer][name] = owner
    for stage, group in enumerate(layers):
        if len(ties[stage]) == len(group.names):
            raise UsageError(
                f"all tensors of stage {stage} are tied to earlier stages, but a stage needs at least one untied "
                "tensor; merge this stage's function with another stage's function"
            )
    _check_objects(layers, ties)
    return ties


def _check_objects(layers: Sequence[ParameterLeaves], ties: Sequence[Mapping[str, str]]) -> None:
    seen: dict[int, tuple[int, str]] = {}
    for layer, group in enumerate(layers):
        for name, array in zip(group.names, group.arrays, strict=True):
            before, other = seen.setdefault(id(array), (layer, name))
            if before != layer and name not in ties[layer]:
                raise UsageError(
                    f"{layer}.{name} and {before}.{other} are the same array: to train them as one, pass tied="
                    f"{{'{layer}.{name}': '{before}.{other}'}}; to train them separately, copy one of the arrays"
                )
