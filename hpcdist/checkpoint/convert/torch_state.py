"""PyTorch state dicts (``torch.save``): write them from a checkpoint, read them with ``weights_only``.

A file without optimizer state is a dict for ``load_state_dict``. A file with optimizer state is a dict of dicts by kind
(``parameters``, ``optimizer.m``, ...), plus ``hpcdist``, the metadata of `exporting.export_metadata`.
"""

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import BFLOAT16, FLOATS, INTEGERS, dtype_of
from hpcdist.arrays.ranges import Range, align_up
from hpcdist.checkpoint.convert.exporting import METADATA_KEY, export_metadata, new_files, write_file, write_tensors
from hpcdist.checkpoint.listing import PARAMETERS, STATISTICS, StoredTensor
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.config import FOREIGN
from hpcdist.reporting import atomic

SUFFIXES: Final = (".pt", ".pth", ".bin")
WRAPPERS: Final = ("state_dict", "model", "module", "model_state_dict")  # keys under which trainers store parameters
MAX_PICKLE_BYTES: Final = 100_000_000  # of names, shapes and all other data except tensors, as in safetensors
COUNTER: Final = ".num_batches_tracked"  # of BatchNorm: no dimensions in a module, shape (1,) in a checkpoint
_ALIGNED: Final = 64


def import_torch() -> ModuleType:
    """Import and return torch. Raises MissingCapabilityError if the import fails."""
    try:
        import torch
    except ImportError as error:
        raise MissingCapabilityError(
            f"PyTorch cannot be imported ({error}); run pip install 'hpcdist[torch]', or use safetensors"
        ) from error
    return torch


def write(checkpoint: Path, loaded: Manifest, tensors: Sequence[StoredTensor], out: Path, nested: bool) -> list[Path]:
    """Write ``tensors`` to the file ``out`` by ``torch.save``. Return a list with only this path. Raises StorageError.

    ``checkpoint``: directory to read. ``loaded``: manifest of the checkpoint. ``nested``: write {kind: {name: tensor}}.
    """
    module = import_torch()
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append((tensor, position))
        position = align_up(position + tensor.nbytes, _ALIGNED)
    raw = atomic.temporary_path(out)
    with new_files([out]) as written:
        try:
            write_file(raw, lambda fd: write_tensors(checkpoint, fd, offsets))
            state: dict[str, Any] = {}
            names = {} if nested else module_names(loaded, tensors)
            for tensor, start in offsets:
                group = state.setdefault(tensor.kind, {}) if nested else state
                values = _mapped_tensor(module, raw, tensor, start)
                if tensor.kind == STATISTICS and tensor.name.endswith(COUNTER):
                    values = values.reshape(())
                group.update(dict.fromkeys(names.get(tensor.name, (tensor.name,)), values))
            if nested:
                state[METADATA_KEY] = export_metadata(loaded)
            module.save(state, written[out])
            fd = os.open(written[out], os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except RuntimeError as error:  # torch reports an error of its file writer like this
            raise OSError(f"{error}".splitlines()[0]) from error
        finally:
            atomic.discard(raw)
    return [out]


def module_names(loaded: Manifest, tensors: Sequence[StoredTensor]) -> dict[str, tuple[str, ...]]:
    """Return {name in the checkpoint: names in the user's PyTorch model}, or {} if unknown or ambiguous."""
    recipe, tied = loaded.about.get("recipe"), loaded.about.get("tied")
    if not isinstance(recipe, dict) or recipe.get("model.kind") not in FOREIGN:
        return {}
    names: dict[str, tuple[str, ...]] = {tensor.name: (tensor.name.partition(".")[2],) for tensor in tensors}
    if len(set(names.values())) < len(names) or ("",) in names.values():
        return {}
    for name, key in tied.items() if isinstance(tied, dict) else ():
        if key in names:
            names[key] += (name,)
    return names


def _mapped_tensor(module: ModuleType, raw: Path, tensor: StoredTensor, start: int) -> Any:
    dtype = dtype_of(tensor.dtype)
    stored = np.dtype(np.int16) if dtype == BFLOAT16 else dtype
    if not tensor.size:
        return module.empty(tensor.shape, dtype=getattr(module, tensor.dtype))
    view = np.memmap(raw, stored, "r+", start, tensor.shape or (1,)).reshape(tensor.shape)
    tensor_view = module.from_numpy(view)
    return tensor_view.view(module.bfloat16) if dtype == BFLOAT16 else tensor_view


class TorchReader:
    """Reader of a state dict from ``torch.save``. Does not run pickled code. May raise any exception of torch."""

    def __init__(self, path: Path) -> None:
        module = import_torch()
        _check_records(path)
        state = module.load(path, map_location="cpu", weights_only=True, mmap=True)
        groups, self.metadata, self.left_out = _groups_of(module, state)
        self.tensors: list[StoredTensor] = []
        self._module, self._values = module, []
        for kind, group in groups.items():
            for name, value in group.items():
                if isinstance(value, module.Tensor) and _dtype(value) and value.layout == module.strided:
                    self.tensors.append(StoredTensor(str(kind), str(name), _dtype(value), tuple(value.shape)))
                    self._values.append(value.detach())
                else:
                    self.left_out.append(f"{kind}/{name}")
        self._flat: tuple[int, np.ndarray | None] = (-1, None)

    def read(self, index: int, elements: Range, out: np.ndarray) -> None:
        """Fill ``out`` with the range ``elements`` of the flattened tensor ``self.tensors[index]``."""
        number, flat = self._flat
        if number != index or flat is None:
            flat = self._values[index].contiguous().reshape(-1).view(self._module.uint8).numpy()
            self._flat = index, flat
        out.view(np.uint8)[...] = flat[elements.start * out.itemsize : elements.stop * out.itemsize]

    def close(self) -> None:
        """Release the memory-mapped tensors."""
        self._values.clear()
        self._flat = -1, None


def _check_records(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "the PyTorch file is damaged or not from torch.save; if PyTorch before version 1.6 wrote the file, convert "
            "the file with torch.load and torch.save of a newer PyTorch"
        )
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(
            "the PyTorch file has compressed records, expected uncompressed ones; save the file again with torch.save"
        )
    nbytes, size = sum(record.file_size for record in records), path.stat().st_size
    if nbytes > size:  # reading must not take more memory than the file's size
        raise ValueError(
            f"the records of the PyTorch file have {nbytes} bytes according to its zip index, but the file has only "
            f"{size} bytes; save the file again with torch.save"
        )
    pickled = max((record.file_size for record in records if record.filename.endswith("data.pkl")), default=0)
    if pickled > MAX_PICKLE_BYTES:
        raise ValueError(
            f"the names, shapes and other pickled data of the PyTorch file take {pickled} bytes, expected at most "
            f"{MAX_PICKLE_BYTES}; save only a state dict of tensors"
        )


def _groups_of(module: ModuleType, state: Any) -> tuple[dict[Any, Mapping[Any, Any]], str, list[str]]:
    # Returns tensors by kind, metadata text or "", and ignored keys.
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the PyTorch file holds a {type(state).__name__}, expected a dict of tensors; save model.state_dict()"
        )
    metadata = state.get(METADATA_KEY)
    if isinstance(metadata, str):
        groups = {kind: group for kind, group in state.items() if isinstance(group, Mapping)}
        return groups, metadata, [str(name) for name in state if name not in groups and name != METADATA_KEY]
    if any(isinstance(value, module.Tensor) for value in state.values()):
        return {PARAMETERS: state}, "", []
    within = [name for name in WRAPPERS if isinstance(state.get(name), Mapping)]
    if not within:
        held = ", ".join(str(name)[:40] for name in list(state)[:8])
        raise ValueError(
            f"the dict in the PyTorch file has no tensors and no dict under one of the keys {', '.join(WRAPPERS)}; the "
            f"keys of the dict are {held or 'none'}; save model.state_dict()"
        )
    return {PARAMETERS: state[within[0]]}, "", [str(name) for name in state if name != within[0]]


def _dtype(value: Any) -> str:
    name = str(value.dtype).removeprefix("torch.")
    return name if name in FLOATS | INTEGERS else ""
