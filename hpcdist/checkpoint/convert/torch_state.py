"""PyTorch state dicts (``torch.save``): write them from a checkpoint, read them with ``weights_only``.

A file of parameters alone is a dict of tensors by name, ready for ``load_state_dict``: those of a user's own modules
have the names of the modules, without the layer in front. With the optimizer's state it is a dict of such dicts by
kind (``parameters``, ``optimizer.m``, ...) and ``hpcdist``, the metadata of `exporting.export_metadata`. torch is
imported late, and only here.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import BFLOAT16, FLOATS, INTEGERS, dtype_of
from hpcdist.arrays.ranges import align_up
from hpcdist.checkpoint.convert.exporting import export_metadata, new_files, write_file, write_tensors
from hpcdist.checkpoint.format.manifest import Manifest
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.config import FOREIGN
from hpcdist.reporting import atomic

SUFFIXES: Final = (".pt", ".pth", ".bin")
METADATA_KEY: Final = "hpcdist"
WRAPPERS: Final = ("state_dict", "model", "module", "model_state_dict")  # under which trainers keep the parameters
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
            raw.unlink(missing_ok=True)
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


def read(path: Path) -> tuple[dict[tuple[str, str], Any], str, list[str]]:
    """Return tensors by kind and name, our metadata, and what was left out, of the file at ``path``.

    Raises ValueError for what is no state dict. To be called where the file may be hostile: see
    `hpcdist.checkpoint.convert.importing`.
    """
    module = import_torch()
    state = module.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(state, Mapping):
        raise ValueError(f"a {type(state).__name__}, expected a dict of tensors")
    metadata = state.get(METADATA_KEY)
    if isinstance(metadata, str):
        groups = {kind: group for kind, group in state.items() if isinstance(group, Mapping)}
        others = [str(name) for name in state if name not in groups and name != METADATA_KEY]
    elif any(isinstance(value, module.Tensor) for value in state.values()):
        metadata, groups, others = "", {PARAMETERS: state}, []
    else:
        within = [name for name in WRAPPERS if isinstance(state.get(name), Mapping)]
        if not within:
            held = ", ".join(str(name)[:40] for name in list(state)[:8])
            raise ValueError(f"no tensors, and none of {', '.join(WRAPPERS)}; it holds {held or 'nothing'}")
        metadata, groups = "", {PARAMETERS: state[within[0]]}
        others = [str(name) for name in state if name != within[0]]
    tensors = {}
    for kind, group in groups.items():
        for name, value in group.items():
            if isinstance(value, module.Tensor) and _dtype(value) and value.layout == module.strided:
                tensors[str(kind), str(name)] = value.detach()
            else:
                others.append(f"{kind}/{name}")
    return tensors, metadata, others


def _dtype(value: Any) -> str:
    """Return the name of the dtype in hpcdist, "" for one that is not supported."""
    name = str(value.dtype).removeprefix("torch.")
    return name if name in FLOATS | INTEGERS else ""
