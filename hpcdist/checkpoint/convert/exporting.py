"""Export whole tensors of a checkpoint into a file of another format, block by block, each verified when read.

Names are those of parameters (``3.qkv.weight``: global layer id and tensor); a tensor of another kind, as the
optimizer's state, has the kind in front (``optimizer.m/3.qkv.weight``). No tensor, and no model, need fit into
memory.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.format.manifest import Manifest
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor, stored_tensors
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.errors import StorageError, UsageError
from hpcdist.hdf5.overlay import pwrite_all
from hpcdist.reporting import atomic


@dataclass(frozen=True)
class _FileRegion:
    """Region of a tensor in a file that is written, as the store of a `FileSlice`."""

    fd: int
    offset: int
    dtype: np.dtype

    def write(self, wanted: Range, values: np.ndarray) -> None:
        """Write ``values`` at ``wanted``."""
        pwrite_all(self.fd, values.view(np.uint8).data, self.offset + wanted.start * self.dtype.itemsize)


def key_of(tensor: StoredTensor) -> str:
    """Return the name of ``tensor`` in a file of another format."""
    return tensor.name if tensor.kind == PARAMETERS else f"{tensor.kind}/{tensor.name}"


def export_metadata(loaded: Manifest) -> str:
    """Return step, scalars and kinds of the checkpoint as JSON, so that an export can be imported as one again."""
    kinds = sorted({entry.kind for entry in loaded.pieces})
    return json.dumps({"step": loaded.step, "scalars": loaded.scalars, "kinds": kinds})


def tensors_to_export(loaded: Manifest, optimizer: bool) -> list[StoredTensor]:
    """Return the tensors to export: parameters, with ``optimizer`` all else too. Raises UsageError where none are."""
    tensors = stored_tensors(loaded, None if optimizer else {PARAMETERS})
    if not tensors:
        raise UsageError("this checkpoint has no parameters; add --optimizer to export what it has")
    return tensors


def write_tensors(checkpoint: Path, fd: int, places: Sequence[tuple[StoredTensor, int]]) -> None:
    """Write each tensor of ``checkpoint`` at its byte offset into the file ``fd``. Raises StorageError, OSError."""
    regions = [(tensor, _FileRegion(fd, offset, dtype_of(tensor.dtype))) for tensor, offset in places]
    restore(checkpoint, [piece_in_file(tensor, region) for tensor, region in regions])


def piece_in_file(tensor: StoredTensor, store: Any) -> Piece:
    """Return ``tensor`` as a piece that ``store`` reads or writes in blocks, as a `FileStore` does."""
    whole = Range(0, tensor.size)
    elements: Any = FileSlice(store, whole)
    return Piece(tensor.kind, tensor.name, tensor.shape, whole_box(tensor.shape), whole, elements)


@contextmanager
def new_files(paths: Sequence[Path]) -> Iterator[dict[Path, Path]]:
    """Yield a temporary path for each of ``paths``, none of which may exist; all are renamed, in order, at the end.

    Raises StorageError; then none of ``paths`` exists.
    """
    for path in paths:
        if path.exists():
            raise StorageError(f"{path}: exists already; remove it, or choose another name")
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
        raise StorageError(f"{paths[0]}: cannot be written: {error.strerror or error}") from error
    finally:
        for temporary in written.values():
            atomic.discard(temporary)


def write_file(path: Path, write: Callable[[int], None]) -> None:
    """Make the file at ``path``, let ``write`` fill its descriptor, and wait until it is on the disk."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        write(fd)
        os.fsync(fd)
    finally:
        os.close(fd)
