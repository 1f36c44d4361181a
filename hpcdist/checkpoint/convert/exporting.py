"""Write whole tensors of a checkpoint to a file of another format, with verified reads.

Parameters keep their names, such as ``3.qkv.weight`` (global layer id and tensor). Other tensors get a prefix, as in
``optimizer.m/3.qkv.weight``. A tensor need not fit into memory.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.listing import PARAMETERS, STATE, STATISTICS, StoredTensor, kind_of_parameters, stored_tensors
from hpcdist.checkpoint.manifest import Manifest
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5.overlay import pwrite_all
from hpcdist.reporting import atomic

METADATA_KEY: Final = "hpcdist"  # of the result of `export_metadata` in an exported file


@dataclass(frozen=True)
class _FileRegion:
    fd: int
    offset: int
    dtype: np.dtype

    def write(self, elements: Range, values: np.ndarray) -> None:
        pwrite_all(self.fd, values.view(np.uint8).data, self.offset + elements.start * self.dtype.itemsize)


def key_of(tensor: StoredTensor) -> str:
    """Return the key of ``tensor`` in an exported file: "name" for a parameter, "kind/name" for any other tensor."""
    return tensor.name if tensor.kind == PARAMETERS else f"{tensor.kind}/{tensor.name}"


def export_metadata(loaded: Manifest) -> str:
    """Return JSON text with the step, the scalars and a list of all tensor kinds from the manifest ``loaded``."""
    kinds = sorted({entry.kind for entry in loaded.pieces})
    return json.dumps({"step": loaded.step, "scalars": loaded.scalars, "kinds": kinds})


def tensors_to_export(loaded: Manifest, optimizer: bool, averaged: bool = False) -> list[StoredTensor]:
    """Return a list of all tensors if ``optimizer``, else of the parameters and the running statistics of BatchNorm.

    ``averaged``: True for parameters with the values of their moving average. Raises UsageError if the list is empty.
    """
    if optimizer and averaged:
        raise UsageError("--optimizer exports the moving average as optimizer.ema; leave out --averaged")
    kind = kind_of_parameters(loaded, averaged)
    tensors = stored_tensors(loaded, None if optimizer else {kind, STATISTICS})
    if not tensors and any(entry.kind == STATE for entry in loaded.pieces):
        raise UsageError(
            "this checkpoint was saved by a script: read it with hpcdist.torch.load if hpcdist.torch.save wrote it, "
            "otherwise with hpcdist.checkpoint.load"
        )
    if not tensors:
        raise UsageError("this checkpoint has no parameters; add --optimizer to export its other tensors")
    return [replace(tensor, kind=PARAMETERS, source=kind) if tensor.kind == kind else tensor for tensor in tensors]


def write_tensors(checkpoint: Path, fd: int, offsets: Sequence[tuple[StoredTensor, int]]) -> None:
    """Copy tensors of a checkpoint to the file ``fd``. ``offsets``: list of (tensor, byte offset in ``fd``)."""
    regions = [(tensor, _FileRegion(fd, offset, dtype_of(tensor.dtype))) for tensor, offset in offsets]
    restore(checkpoint, [piece_in_file(tensor, region) for tensor, region in regions])


def piece_in_file(tensor: StoredTensor, store: Any) -> Piece:
    """Return a `Piece` with all elements of ``tensor``, which ``store`` reads from a file or writes to a file."""
    elements = Range(0, tensor.size)
    array: Any = FileSlice(store, elements)
    return Piece(tensor.source or tensor.kind, tensor.name, tensor.shape, whole_box(tensor.shape), elements, array)


@contextmanager
def new_files(paths: Sequence[Path]) -> Iterator[dict[Path, Path]]:
    """Create all files ``paths``, or no file. Yield {path: temporary path to write to}. Raises StorageError."""
    for path in paths:
        if path.exists():
            raise StorageError(f"{path} exists already; remove the file, or choose another output name")
    written = {path: atomic.temporary_path(path) for path in paths}
    named: list[Path] = []
    try:
        for folder in {path.parent for path in paths}:
            folder.mkdir(parents=True, exist_ok=True)
        yield written
        for path, temporary in written.items():
            temporary.rename(path)
            named.append(path)
        for folder in {path.parent for path in paths}:
            atomic.sync(folder)
    except OSError as error:
        for path in named:
            atomic.discard(path)
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{paths[0]}: cannot be written: {error.strerror or error}; check its directory") from error
    finally:
        for temporary in written.values():
            atomic.discard(temporary)


def write_file(path: Path, write: Callable[[int], None]) -> None:
    """Create the file ``path``, call ``write`` with the file descriptor, and fsync the file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        write(fd)
        os.fsync(fd)
    finally:
        os.close(fd)
