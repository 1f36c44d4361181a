"""Write a directory of Hugging Face: preallocated safetensors files, to which all ranks write their elements.

    prepare   rank 0 creates a temporary directory next to the target: settings, tokenizer, headers of the files
    write     each rank writes elements of tensors at their offsets
    commit    rank 0 renames the directory, or exchanges it with the existing target

A reader sees the old directory, the new one, or no directory.
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist import models
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.piece import Box, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.convert import families, safetensors
from hpcdist.checkpoint.convert.adapters import CONFIG, TENSORS, Merge, config_of, is_adapter, mapped_adapters
from hpcdist.checkpoint.convert.exporting import piece_in_file
from hpcdist.checkpoint.convert.huggingface import INDEX, SINGLE, copy_settings
from hpcdist.checkpoint.convert.tensor_names import MappedTensor, mapped_tensors
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.checkpoint.manifest import Slot
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.errors import StorageError
from hpcdist.hdf5.overlay import pwrite_all
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers.lora import LoraConfig
from hpcdist.reporting import atomic

SUFFIX: Final = ".export.new"  # of the temporary directory
_AT_FDCWD: Final = -100
_EXCHANGE: Final = 2  # flag of renameat2: exchange two paths atomically


def check_target(target: Path, replace: bool, config: str = families.CONFIG) -> None:
    """Raise StorageError if ``target`` exists, unless it has the file ``config`` and ``replace`` is True. Local."""
    if os.path.lexists(target) and not replace:
        raise StorageError(f"{target} exists already; move it away, or choose another one (or --replace)")
    if os.path.lexists(target) and (target.is_symlink() or not (target / config).is_file()):
        raise StorageError(
            f"{target} is not a directory with a {config}, so it is not replaced; choose another directory"
        )


@dataclass(frozen=True)
class ExportPlan:
    """Plan of an exported directory, equal on all ranks.

    ``context``: tokens per sample of the model. ``dtype``: type of the exported tensors. ``settings``: directory with
    the files of the tokenizer, or None. ``origin``: content of the ``config.json`` in this directory. ``replace``: True
    to replace an existing target. ``lora``: adapters of the model, which are merged, or, if ``base`` is a text, written
    as PEFT's files. ``base``: path of the model that they change.
    """

    target: Path
    model: ModelConfig
    context: int
    dtype: str = "float32"
    settings: Path | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    replace: bool = False
    shard_bytes: int = safetensors.SHARD_BYTES
    lora: LoraConfig = LoraConfig()  # noqa: RUF009 - frozen
    base: str | None = None

    @property
    def temporary(self) -> Path:
        """Path of the directory before the commit."""
        return self.target.with_name(f".{self.target.name}{SUFFIX}")

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of ``config.json``: the settings of the imported model, with the keys of this model."""
        origin = self.origin
        context = families.context_of(origin) if origin and self.model.positions == "rotary" else self.context
        config = families.config_of(self.model, context, origin.get("model_type", ""))
        kept = origin if origin.get("model_type") == config["model_type"] else {}
        return {**kept, **config, "torch_dtype": self.dtype, "dtype": self.dtype}

    @cached_property
    def mapped(self) -> dict[str, MappedTensor]:
        """Names and shapes of the tensors, keyed by their names in hpcdist."""
        if self.base is not None:
            return mapped_adapters(self.config["model_type"], self.model, self.context, self.lora)
        return mapped_tensors(self.config["model_type"], models.build(self.model, context=self.context).layout)

    @cached_property
    def files(self) -> dict[str, tuple[bytes, list[tuple[StoredTensor, int]]]]:
        """Header, and tensors with byte offsets, of each safetensors file."""
        tensors = [
            StoredTensor(PARAMETERS, name, self.dtype, mapped.stack.shape)
            for mapped in self.mapped.values()
            for name in mapped.stack.names
        ]
        if self.base is not None:
            return {TENSORS: safetensors.header(tensors, {"format": "pt"})}
        groups = safetensors.split_into_files(tensors, self.shard_bytes)
        count = len(groups)
        names = [SINGLE] if count == 1 else [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
        return {name: safetensors.header(group, {"format": "pt"}) for name, group in zip(names, groups, strict=True)}

    def check(self) -> None:
        """Raise StorageError if the target cannot be written, and ConfigurationError if no family fits. Local."""
        check_target(self.target, self.replace, CONFIG if self.base is not None else families.CONFIG)
        assert self.files

    def prepare(self) -> None:
        """Create the temporary directory with all files. Rank 0 only. Raises StorageError."""
        self.check()
        folder = self.temporary
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if self.base is None:
                self._write_settings(folder)
            else:
                family = self.config["model_type"]
                _write_json(folder / CONFIG, config_of(family, self.lora, [*self.mapped], self.base))
            for name, (head, offsets) in self.files.items():
                with open(folder / name, "xb") as file:
                    file.write(head)
                    file.flush()
                    last, start = max(offsets, key=lambda item: item[1] + item[0].nbytes)
                    os.posix_fallocate(file.fileno(), 0, start + last.nbytes)
            if len(self.files) > 1:
                weight_map = {tensor.name: name for name, (_, group) in self.files.items() for tensor, _ in group}
                total = sum(tensor.nbytes for _, group in self.files.values() for tensor, _ in group)
                _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        except OSError as error:
            self.discard()
            raise _storage_error(folder, error) from error

    def _write_settings(self, folder: Path) -> None:
        if self.settings is not None:
            copy_settings(self.settings, folder)
        ends: dict[str, Any] = {key: self.config[key] for key in ("bos_token_id", "eos_token_id") if key in self.config}
        if not (folder / "generation_config.json").exists():
            _write_json(folder / "generation_config.json", {"_from_model_config": True, **ends})
        _write_json(folder / families.CONFIG, self.config)

    def commit(self) -> None:
        """Rename the temporary directory to the target. Rank 0 only, after all ranks have written."""
        try:
            for path in self.temporary.iterdir():
                _sync_file(path)
            atomic.sync(self.temporary)
            if os.path.lexists(self.target):
                self.check()
                _exchange(self.temporary, self.target)
                shutil.rmtree(self.temporary, ignore_errors=True)
            else:
                self.temporary.rename(self.target)
            atomic.sync(self.target.parent)
        except OSError as error:
            self.discard()
            raise _storage_error(self.target, error) from error

    def discard(self) -> None:
        """Remove the temporary directory. Rank 0 only."""
        shutil.rmtree(self.temporary, ignore_errors=True)


class ExportWriter:
    """Writer of this rank's elements to the files of ``plan``. Local."""

    def __init__(self, plan: ExportPlan) -> None:
        self._plan, self._dtype = plan, dtype_of(plan.dtype)
        self._places = {
            tensor.name: (name, offset) for name, (_, group) in plan.files.items() for tensor, offset in group
        }
        self._open: dict[str, int] = {}

    def write(self, name: str, box: Box, flat: Range, values: np.ndarray) -> None:
        """Write ``values``, the elements ``flat`` of the region ``box`` of the tensor ``name`` of hpcdist."""
        if name not in self._plan.mapped:
            return
        values = values.astype(self._dtype, copy=False)
        for region in self._plan.mapped[name].regions(box, flat):
            file, offset = self._places[region.name]
            data = np.ascontiguousarray(values[region.local]).view(np.uint8).data
            pwrite_all(self._descriptor(file), data, offset + region.file.start * self._dtype.itemsize)

    def _descriptor(self, file: str) -> int:
        if file not in self._open:
            self._open[file] = os.open(self._plan.temporary / file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._open[file]

    def finish(self) -> None:
        """Wait until the written elements are on the disk, and close the files. Raises OSError."""
        try:
            for descriptor in self._open.values():
                os.fsync(descriptor)
        finally:
            self.close()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])


class CheckpointExport:
    """Export of ``plan`` from the data of a checkpoint that is being saved. See `two_phase.Export`."""

    def __init__(self, plan: ExportPlan) -> None:
        self._plan, self._writer, self._error = plan, ExportWriter(plan), ""

    def prepare(self) -> None:
        try:
            self._plan.prepare()
        except StorageError as error:
            self._error = str(error)

    def write(self, slot: Slot, start: int, block: np.ndarray) -> None:
        if slot.kind != PARAMETERS or self._error:
            return
        values = block.view(dtype_of(slot.dtype))
        try:
            self._writer.write(slot.tensor, slot.box, Range(start, start + values.size), values)
        except OSError as error:
            self._error = str(_storage_error(self._plan.target, error))

    def finish(self) -> str:
        try:
            self._writer.finish()
        except OSError as error:
            self._error = self._error or str(_storage_error(self._plan.target, error))
        return self._error

    def commit(self, error: str) -> str:
        error = error or self._error
        try:
            if not error:
                self._plan.commit()
        except StorageError as failure:
            error = str(failure)
        if error:
            self._plan.discard()
        return error


@dataclass(frozen=True)
class _Store:
    # Store of `piece_in_file` that writes a whole tensor of hpcdist.
    writer: ExportWriter
    tensor: StoredTensor
    dtype: np.dtype
    merge: Merge

    def write(self, elements: Range, values: np.ndarray) -> None:
        merged = self.merge.merged(self.tensor, elements, values)
        self.writer.write(self.tensor.name, whole_box(self.tensor.shape), elements, merged)


def export_directory(plan: ExportPlan, checkpoint: Path, tensors: Sequence[StoredTensor]) -> list[Path]:
    """Export ``tensors`` of ``checkpoint`` as ``plan`` says. Return a list of the written files. Raises StorageError.

    A tensor need not fit into memory. Local.
    """
    merge = Merge.of(checkpoint, tensors, plan.lora)
    tensors = [one for one in tensors if is_adapter(one.name) == (plan.base is not None)]
    shapes = {name: mapped.shape for name, mapped in plan.mapped.items()}
    stored = {tensor.name: tensor.shape for tensor in tensors}
    if shapes != stored:
        name = next(name for name in {**shapes, **stored} if shapes.get(name) != stored.get(name))
        raise StorageError(
            f"{checkpoint}: {name} has the shape {stored.get(name)}, but {shapes.get(name)} in the recipe's model; use "
            "the recipe that saved the checkpoint"
        )
    plan.prepare()
    writer = ExportWriter(plan)
    try:
        stores = [_Store(writer, tensor, dtype_of(tensor.dtype), merge) for tensor in tensors]
        restore(checkpoint, [piece_in_file(store.tensor, store) for store in stores])
        writer.finish()
        plan.commit()
    except OSError as error:
        raise error if isinstance(error, StorageError) else _storage_error(plan.target, error) from error
    finally:
        writer.close()
        plan.discard()
    return [plan.target / name for name in (*plan.files, *([INDEX] if len(plan.files) > 1 else []))]


def _exchange(new: Path, old: Path) -> None:
    # Renames ``new`` to ``old`` and ``old`` to ``new``, atomically if the file system supports it.
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None and call(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE) == 0:
        return
    code = ctypes.get_errno() if call is not None else errno.ENOSYS
    if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), os.fspath(old))
    aside = atomic.temporary_path(old)
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written: {error.strerror or error}; check its directory and the free space")
