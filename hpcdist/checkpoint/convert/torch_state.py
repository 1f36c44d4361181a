"""PyTorch state dicts (``torch.save``): write them from a checkpoint, read them with ``weights_only``.

A file of parameters alone is a dict of tensors by name, ready for ``load_state_dict``: those of a user's own modules
have the names of the modules, without the layer in front. With the optimizer's state it is a dict of such dicts by
kind (``parameters``, ``optimizer.m``, ...) and ``hpcdist``, the metadata of `exporting.export_metadata`. torch is
imported late, and only here.
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
from hpcdist.checkpoint.convert.exporting import export_metadata, new_files, write_file, write_tensors
from hpcdist.checkpoint.format.manifest import Manifest
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.config import FOREIGN
from hpcdist.reporting import atomic

SUFFIXES: Final = (".pt", ".pth", ".bin")
METADATA_KEY: Final = "hpcdist"
WRAPPERS: Final = ("state_dict", "model", "module", "model_state_dict")  # under which trainers keep the parameters
MAX_PICKLE_BYTES: Final = 100_000_000  # as a header of safetensors: names, shapes and what else is no tensor
_ALIGNED: Final = 64


def import_torch() -> ModuleType:
    """Return the module torch. Raises MissingCapabilityError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingCapabilityError(
            f"PyTorch cannot be imported ({error}); pip install 'hpcdist[torch]', or use safetensors instead"
        ) from error
    return torch


def write(checkpoint: Path, loaded: Manifest, tensors: Sequence[StoredTensor], out: Path, nested: bool) -> list[Path]:
    """Write ``tensors`` of ``checkpoint`` to the file ``out``, with ``nested`` as a dict of dicts by kind.

    Their bytes pass through a mapped temporary file beside it, whose pages the kernel can drop: the tensors need not
    fit into memory. Raises StorageError; no file is left then.
    """
    module = import_torch()
    places, position = [], 0
    for tensor in tensors:
        places.append((tensor, position))
        position = align_up(position + tensor.nbytes, _ALIGNED)
    raw = atomic.temporary_path(out)
    with new_files([out]) as written:
        try:
            write_file(raw, lambda fd: write_tensors(checkpoint, fd, places))
            state: dict[str, Any] = {}
            names = {} if nested else module_names(loaded, tensors)
            for tensor, start in places:
                group = state.setdefault(tensor.kind, {}) if nested else state
                values = _mapped_tensor(module, raw, tensor, start)
                group.update(dict.fromkeys(names.get(tensor.name, (tensor.name,)), values))
            if nested:
                state[METADATA_KEY] = export_metadata(loaded)
            module.save(state, written[out])
            fd = os.open(written[out], os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except RuntimeError as error:  # how torch reports what its writer met
            raise OSError(f"{error}".splitlines()[0]) from error
        finally:
            atomic.discard(raw)
    return [out]


def module_names(loaded: Manifest, tensors: Sequence[StoredTensor]) -> dict[str, tuple[str, ...]]:
    """Return the names of ``tensors`` in the modules that were wrapped, a tied tensor having several (local).

    Empty for a model of the library, and where names without their layer are not those of one tensor each.
    """
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
    """Open file of ``torch.save``, of which no pickled code is run and whose tensors stay mapped.

    Raises whatever torch makes of a damaged or hostile file, as does `read`, ValueError for what is no state dict, and
    MissingCapabilityError without torch. The caller must call `close`.
    """

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

    def read(self, index: int, part: Range, out: np.ndarray) -> None:
        """Fill ``out`` with elements ``part`` of the tensor of that number; the last one stays as it was read."""
        number, flat = self._flat
        if number != index or flat is None:
            flat = self._values[index].contiguous().reshape(-1).view(self._module.uint8).numpy()
            self._flat = index, flat
        out.view(np.uint8)[...] = flat[part.start * out.itemsize : part.stop * out.itemsize]

    def close(self) -> None:
        """Let go of the file."""
        self._values.clear()
        self._flat = -1, None


def _check_records(path: Path) -> None:
    """Raise ValueError for an archive that needs more memory than its size: ``torch.save`` does not compress."""
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no archive of torch.save, or damaged; one of PyTorch before 1.6 must be saved again")
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("it has compressed records, which torch.save does not write")
    nbytes, size = sum(record.file_size for record in records), path.stat().st_size
    if nbytes > size:
        raise ValueError(f"its records have {nbytes} bytes in a file of {size}")
    pickled = max((record.file_size for record in records if record.filename.endswith("data.pkl")), default=0)
    if pickled > MAX_PICKLE_BYTES:
        raise ValueError(f"names and shapes take {pickled} bytes, at most {MAX_PICKLE_BYTES} are read: is it a model?")


def _groups_of(module: ModuleType, state: Any) -> tuple[dict[Any, Mapping[Any, Any]], str, list[str]]:
    """Return the dicts of tensors in ``state`` by kind, our metadata, and the names of what else is in it."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a {type(state).__name__}, expected a dict of tensors")
    metadata = state.get(METADATA_KEY)
    if isinstance(metadata, str):
        groups = {kind: group for kind, group in state.items() if isinstance(group, Mapping)}
        return groups, metadata, [str(name) for name in state if name not in groups and name != METADATA_KEY]
    if any(isinstance(value, module.Tensor) for value in state.values()):
        return {PARAMETERS: state}, "", []
    within = [name for name in WRAPPERS if isinstance(state.get(name), Mapping)]
    if not within:
        held = ", ".join(str(name)[:40] for name in list(state)[:8])
        raise ValueError(f"no tensors, and none of {', '.join(WRAPPERS)}; it holds {held or 'nothing'}")
    return {PARAMETERS: state[within[0]]}, "", [str(name) for name in state if name != within[0]]


def _dtype(value: Any) -> str:
    """Return the name of the dtype in hpcdist, "" for one that is not supported."""
    name = str(value.dtype).removeprefix("torch.")
    return name if name in FLOATS | INTEGERS else ""
