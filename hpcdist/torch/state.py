"""Checkpoints of a PyTorch script: `save` and `load` models, optimizers and other objects in hpcdist's format.

The state is a dict. Each value with a state dict (model, optimizer, scheduler, scaler, DataLoader) is saved under its
key. Tensors become arrays of the checkpoint (`hpcdist.checkpoint.state`), all other values become JSON. DDP, FSDP2,
DTensor and 2-D meshes store the names and shapes of one process, so any number of ranks can load the checkpoint.
"""

import functools
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict as distributed_state
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcdist.arrays.piece import Box, Piece, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import state as arrays
from hpcdist.checkpoint.listing import STATE
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch.environment import RUN_DIR
from hpcdist.comm.mpi.world import communicator_of
from hpcdist.constants import PROGRESS_FILE
from hpcdist.errors import StorageError, UsageError
from hpcdist.reporting import atomic
from hpcdist.torch import metrics
from hpcdist.torch.buffers import Buffer

TENSOR: Final = "__tensor__"  # in the JSON tree: the dtype of a tensor, whose name is its path in the tree
VALUE: Final = "__value__"  # dtype and value of a tensor without dimensions
TUPLE: Final = "__tuple__"
ITEMS: Final = "__items__"  # items of a dict with keys that are not strings


@runtime_checkable
class Stateful(Protocol):
    """Object with a state dict: a model, optimizer, scheduler, scaler or stateful DataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this object as a dict."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state of this object from ``state_dict``."""


class RandomState:
    """Random state of each rank: PyTorch (CPU and current GPU), numpy's global generator and Python's `random`.

    Add an instance to the dict ``state`` of `save` and `load`. A rank without a saved state keeps its current state.
    """

    def pack(self) -> torch.Tensor:
        """Return the random state of this rank as a uint8 tensor of shape (n,)."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = _numpy_generator().get_state(legacy=True)
        numbers = np.array([*words, position, has_gauss], np.uint32)
        floats = np.array([cached, np.nan if gauss is None else gauss])
        parts = [torch.get_rng_state().numpy(), numbers.view(np.uint8), keys.view(np.uint8), floats.view(np.uint8)]
        if torch.cuda.is_available():
            parts.append(torch.cuda.get_rng_state().numpy())
        assert (version, name) == (3, "MT19937"), "the layout below is for these generators"
        return torch.from_numpy(np.concatenate(parts))

    def unpack(self, packed: torch.Tensor) -> None:
        """Restore the random state of this rank from ``packed``, the result of `pack`."""
        data = packed.numpy()
        sizes = [torch.get_rng_state().numel(), 4 * 627, 4 * 624, 16]
        cpu, numbers, keys, floats, gpu = np.split(data, np.cumsum(sizes))
        words = numbers.copy().view(np.uint32).tolist()
        cached, gauss = floats.copy().view(np.float64).tolist()
        torch.set_rng_state(torch.from_numpy(cpu.copy()))
        random.setstate((3, tuple(words[:625]), None if np.isnan(gauss) else gauss))
        _numpy_generator().set_state(("MT19937", keys.copy().view(np.uint32), words[625], words[626], cached))
        if gpu.size and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.from_numpy(gpu.copy()))


def _numpy_generator() -> Any:
    return np.random.mtrand._rand  # the generator of numpy.random.rand and others


State: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class _Held:
    # A tensor of the state and the region of the whole tensor that it holds. ``replicas``: the ranks with the same
    # elements, as a name, their number, and this rank's number among them; the number -1 means that this rank writes
    # nothing.
    buffer: Buffer
    shape: tuple[int, ...]
    box: Box
    replicas: tuple[Any, int, int]
    value: torch.Tensor

    def piece(self, name: str) -> Piece:
        flat = self.buffer.array
        return Piece(STATE, name, self.shape, self.box, Range(0, flat.size), flat)


class _Collector:
    # Collects the tensors of a state by name, and describes its structure as JSON. Not collective by itself, but state
    # dicts of FSDP2 are.
    def __init__(self, comm: Communicator, state: State) -> None:
        self._comm, self._state = comm, state
        self._modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
        self.tensors: dict[str, _Held] = {}
        self._extent = functools.cache(compute_local_shape_and_global_offset)  # a state has few different shapes
        self._shared: set[str] = set()  # names of parameters and optimizer state, which all ranks write together

    def trees(self) -> dict[str, Any]:
        """Collect the tensors of the state. Return {key: JSON tree of the value}, where a tensor is only its dtype."""
        return {name: self._tree(name, self._content(name, value)) for name, value in self._state.items()}

    def check_values(self) -> None:
        """Raise UsageError if `save` rejects a value without a state dict. Local."""
        # State dicts are not checked: PyTorch's get_optimizer_state_dict makes a step if the optimizer has no state.
        for name, value in self._state.items():
            if not isinstance(value, Stateful):
                self._tree(name, value)

    def pieces_to_save(self) -> list[Piece]:
        """Return the tensor slices that this rank saves. Call `trees` first."""
        groups: dict[tuple[Any, int, int], list[Piece]] = {}
        for name, held in self.tensors.items():
            if held.replicas[2] >= 0:
                groups.setdefault(held.replicas, []).append(held.piece(name))
        parts = (arrays.parts_to_save(pieces, count, index) for (_, count, index), pieces in groups.items())
        return [piece for part in parts for piece in part]

    def _content(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            content = distributed_state.get_model_state_dict(value)
            # Wrappers rename parameters and buffers, so buffers are recognised by their memory.
            buffers = {buffer.data_ptr() for buffer in value.buffers()}
            plain = {k: v for k, v in content.items() if isinstance(v, torch.Tensor) and not isinstance(v, DTensor)}
            self._shared |= {f"{name}/{key}" for key, tensor in plain.items() if tensor.data_ptr() not in buffers}
            return content
        if isinstance(value, torch.optim.Optimizer):
            self._shared.add(f"{name}/state/")
            model = self.model_of(value)
            return value.state_dict() if model is None else distributed_state.get_optimizer_state_dict(model, value)
        if isinstance(value, RandomState):
            return value
        return value.state_dict() if isinstance(value, Stateful) else value

    def model_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the model in the state that contains all parameters of ``optimizer``, or None without a match."""
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = (model for model in self._modules if updated <= {id(parameter) for parameter in model.parameters()})
        return next(owners, None)

    def _tree(self, name: str, value: Any) -> Any:
        if isinstance(value, RandomState):
            packed = value.pack()[None]
            rank, ranks = self._comm.rank, self._comm.size
            box = (rank, rank + 1), (0, packed.shape[1])
            self.tensors[name] = _Held(Buffer(packed), (ranks, packed.shape[1]), box, _ALONE, packed)
            return {TENSOR: "uint8"}
        if isinstance(value, torch.Tensor):
            if not value.ndim and not isinstance(value, DTensor) and value.dtype in _EXACT:
                return {VALUE: [str(value.dtype).removeprefix("torch."), value.item()]}
            if name in self.tensors:
                raise UsageError(f"two tensors of the state have the name {name!r}; use keys without '/'")
            self.tensors[name] = self._held(name, value)
            return {TENSOR: str(value.dtype).removeprefix("torch.")}
        if isinstance(value, np.ndarray):
            raise UsageError(f"{name} is a numpy array; save torch.from_numpy(value), or use hpcdist.checkpoint.save")
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and not key.startswith("__") for key in value):
                return {key: self._tree(f"{name}/{key}", member) for key, member in value.items()}
            return {ITEMS: [[key, self._tree(f"{name}/{key}", member)] for key, member in value.items()]}
        if isinstance(value, list | tuple):
            members = [self._tree(f"{name}/{index}", member) for index, member in enumerate(value)]
            return {TUPLE: members} if isinstance(value, tuple) else members
        if value is None or isinstance(value, bool | int | float | str):
            return value
        cure = "give it the methods state_dict and load_state_dict, or save its tensors and JSON values"
        if isinstance(value, Stateful):
            cure = "use a separate key of the state for this object"
        raise UsageError(
            f"{name} is an object of type {type(value).__name__}, but only tensors, JSON values and objects with a "
            f"state dict can be saved; {cure}"
        )

    def _held(self, name: str, value: torch.Tensor) -> _Held:
        if not isinstance(value, DTensor):
            is_shared = name in self._shared or any(name.startswith(part) for part in self._shared if part[-1] == "/")
            rank = self._comm.rank
            replicas = ("all", self._comm.size, rank) if is_shared else ("rank 0", 1, 0 if rank == 0 else -1)
            shape = _with_pairs(value.shape, value)
            return _Held(Buffer(value), shape, whole_box(shape), replicas, value)
        mesh, placements, count, index = value.device_mesh, value.placements, 1, 0
        axes = tuple(axis for axis, placement in enumerate(placements) if placement.is_replicate())
        for axis, placement in enumerate(placements):
            if placement.is_partial():
                raise UsageError(f"{name} is a DTensor with a pending sum; call redistribute() before saving")
            if placement.is_replicate():
                count, index = count * mesh.size(axis), index * mesh.size(axis) + mesh.get_local_rank(axis)
        extent, start = self._extent(value.shape, mesh, placements)
        local = value.to_local()
        box = tuple((begin, begin + size) for begin, size in zip(start, extent, strict=True))
        if 0 in extent:
            box = tuple((0, size) for size in extent)
        pairs = ((0, 2),) if value.is_complex() else ()
        return _Held(
            Buffer(local), _with_pairs(value.shape, value), (*box, *pairs), ((mesh, axes), count, index), value
        )


_ALONE: Final = "this rank", 1, 0  # replicas of a tensor that only this rank holds
_EXACT: Final = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)  # dtypes that JSON represents


def _with_pairs(shape: Sequence[int], value: torch.Tensor) -> tuple[int, ...]:
    return (*shape, 2) if value.is_complex() else tuple(shape)


def _restore(comm: Communicator, path: Path, state: State) -> dict[str, Any]:
    collector = _Collector(comm, state)
    collector.trees()
    entries = arrays.stored_entries(comm, path)
    stored, values = entries.shapes(STATE), entries.scalars
    if missing := [name for name in state if name not in values]:
        raise StorageError(f"{path} has no values for {', '.join(missing)}; its keys are {', '.join(values)}")
    dtypes = {name: dtype for key in state for name, dtype in _tensors_in(values[key], key)}
    tensors = collector.tensors
    if missing := sorted(tensors.keys() - dtypes.keys()):
        raise StorageError(f"{path} lacks tensors {', '.join(missing[:5])}; use the model and optimizer of the save")
    held = {name: tensors.get(name) or _fresh(stored[name][0], dtype) for name, dtype in dtypes.items()}
    pieces = []
    for name, part in held.items():
        if isinstance(state.get(name), RandomState):
            if comm.rank >= stored[name][0][0]:  # more ranks than in the checkpoint
                continue
            part = held[name] = replace(part, shape=stored[name][0])
        pieces.append(part.piece(name))
        arrays.check_stored(path, pieces[-1], stored[name])
    arrays.restore_together(comm, path, pieces, stored=entries)
    for part in held.values():
        part.buffer.finish()
    content = {name: _decoded(values[name], name, held) for name in state}
    for name, value in state.items():
        if isinstance(value, RandomState):
            value.unpack(content[name][0])
        elif isinstance(value, torch.nn.Module):
            distributed_state.set_model_state_dict(value, content[name])
        elif isinstance(value, torch.optim.Optimizer) and (model := collector.model_of(value)) is not None:
            distributed_state.set_optimizer_state_dict(model, value, content[name])
        elif isinstance(value, Stateful):
            value.load_state_dict(content[name])
        elif isinstance(value, torch.Tensor):
            content[name] = value  # filled in place
    return {name: content[name] for name, value in state.items() if not isinstance(value, RandomState | Stateful)}


def _fresh(shape: tuple[int, ...], dtype: str) -> _Held:
    # A tensor of the checkpoint that the state of this program does not have yet.
    kind = getattr(torch, dtype)
    value = torch.empty(shape[:-1] if kind.is_complex else shape, dtype=kind)
    return _Held(Buffer(value), shape, whole_box(shape), _ALONE, value)


def _tensors_in(tree: Any, name: str) -> Iterator[tuple[str, str]]:
    # (name, dtype) of each tensor in a JSON tree.
    if isinstance(tree, dict) and TENSOR in tree:
        yield name, tree[TENSOR]
    for key, member in _members(tree):
        yield from _tensors_in(member, f"{name}/{key}")


def _members(tree: Any) -> list[tuple[Any, Any]]:
    # (key or index, subtree) of a JSON tree.
    if isinstance(tree, list):
        return list(enumerate(tree))
    if not isinstance(tree, dict) or TENSOR in tree or VALUE in tree:
        return []
    if TUPLE in tree:
        return list(enumerate(tree[TUPLE]))
    return [(key, member) for key, member in tree[ITEMS]] if ITEMS in tree else list(tree.items())


def _decoded(tree: Any, name: str, held: Mapping[str, _Held]) -> Any:
    members = {key: _decoded(member, f"{name}/{key}", held) for key, member in _members(tree)}
    if isinstance(tree, list):
        return list(members.values())
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree:
        return held[name].value
    if VALUE in tree:
        dtype, value = tree[VALUE]
        return torch.tensor(value, dtype=getattr(torch, dtype))
    return tuple(members.values()) if TUPLE in tree else members


def save(
    directory: str | Path,
    state: State,
    *,
    step: int | None = None,
    keep: int = 2,
    background: bool = False,
    comm: Any = None,
) -> Path:
    """Save ``state`` as a checkpoint in ``directory``. Return the checkpoint's path. Collective over ``comm``.

    ``state``: dict of models, optimizers, other objects with `state_dict`, tensors and JSON values. All ranks must pass
    the same keys. Buffers, plain tensors and JSON values are saved from rank 0. ``step``: by default, the last
    saved step + 1. Raises UsageError for unsupported values, and StorageError on all ranks if a rank cannot write.
    ``comm``: ranks that save, such as a process group of this backend; None means all ranks.

    ``background``: copy the state and return, while a thread writes it. The checkpoint is complete after one of the
    next calls of `should_stop` or `save`, or at the latest after `finish_saves` or `destroy_process_group`.
    """
    where = communicator_of(comm)
    with metrics.phase("checkpoint"):
        collector = _Collector(where, state)
        trees = collector.trees()
        pieces = collector.pieces_to_save()
        path = arrays.save_pieces(directory, pieces, trees, step=step, keep=keep, comm=where, background=background)
    if step is not None:
        metrics.note_step(int(step))
    if comm is None:
        metrics.settle()
    return path


def load(directory: str | Path, state: State, *, comm: Any = None) -> dict[str, Any] | None:
    """Restore ``state`` from the newest intact checkpoint in ``directory``. Collective over ``comm``.

    Models, optimizers, other objects and tensors in ``state`` are restored in place. Return {key: restored value} for
    the tensors and JSON values in ``state``, or None without a checkpoint. Raises StorageError if the keys or shapes in
    the checkpoint do not match ``state``, and UsageError for values that `save` rejects, also without a checkpoint.
    """
    where = communicator_of(comm)
    _Collector(where, state).check_values()
    arrays.finish_saves(where)

    def take(path: Path | None) -> dict[str, Any] | None:
        if path is None:
            return None
        metrics.start_at(int(path.name.partition(".")[0].removeprefix("step-")))
        return _restore(where, path, state)

    return arrays.from_newest_intact(directory, where, arrays.newest_complete(directory, where), take)


def saved(path: str | Path, step: int) -> None:
    """Report that this script has saved a checkpoint of step ``step`` in the file ``path``, in any format. Local.

    Restarts and requeues then count the checkpoint as progress, and `last_saved` returns its path. If several ranks
    write the checkpoint, call it after all ranks have written, for example after a barrier. Without a run directory
    (`hpcdist run --out`), the call has no effect.
    """
    metrics.note_step(int(step))
    folder = os.environ.get(RUN_DIR)
    if folder and communicator_of(None).rank == 0:
        atomic.save(Path(folder) / PROGRESS_FILE, json.dumps({"checkpoint": str(path), "step": int(step)}))


def last_saved() -> str | None:
    """Return the path of the newest checkpoint that `saved` reported, or None without a report. Local.

    A checkpoint that a crash left incomplete is not reported. Without a run directory (`hpcdist run --out`), the result
    is None. Raises StorageError if the report is damaged.
    """
    path = Path(os.environ.get(RUN_DIR) or os.devnull) / PROGRESS_FILE
    if not path.exists():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["checkpoint"])
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged ({error!r}); delete it, and resume from a checkpoint by hand") from error
