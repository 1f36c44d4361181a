"""Import a file of another format as a checkpoint (local).

The file may be damaged or hostile: no pickled code is run (``weights_only``), what it says of its tensors is checked
against its size before any is read, and whatever a library raises on the way is a StorageError. `import_checkpoint`
passes the bytes through in blocks and saves them as the only checkpoint of a run.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from hpcdist.arrays.dtypes import FLOATS, INTEGERS, dtype_of
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.convert import torch_state
from hpcdist.checkpoint.convert.exporting import piece_in_file
from hpcdist.checkpoint.convert.safetensors import INDEX_SUFFIX, MAX_TENSORS, SUFFIX, SafetensorsReader
from hpcdist.checkpoint.convert.torch_state import TorchReader
from hpcdist.checkpoint.listing import StoredTensor
from hpcdist.checkpoint.saving.two_phase import save
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError

# The largest models have some 100,000 tensors of 60 letters. HDF5 moves all names of a group when it has no room for
# one more, so the time of very many grows with their square.
MAX_NAMES_BYTES: Final = 16 << 20
MAX_NESTING: Final = 16  # groups in one another
MAX_ALIASING: Final = 4  # all tensors together may be so many times the file: some share their bytes
_KIND: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
_READERS: Final[dict[str, Callable[[Path], SafetensorsReader | TorchReader]]] = {
    "safetensors": SafetensorsReader,
    "torch": TorchReader,
}


def format_of(path: Path) -> tuple[str, Path]:
    """Return the format of ``path``, and the file to open: of a directory, the one or the index that it has.

    Raises StorageError where there is none, UsageError for a format that is not known.
    """
    if path.is_dir():
        matches = sorted(path.glob("*" + INDEX_SUFFIX)) or sorted(path.glob("*" + SUFFIX))
        if len(matches) != 1:
            held = f"{len(matches)} of them" if matches else "none"
            raise StorageError(f"{path}: expected one {SUFFIX} file, or an index of several, found {held}")
        path = matches[0]
    if not path.is_file():
        raise StorageError(f"{path}: there is no such file")
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return "safetensors", path
    if path.suffix in torch_state.SUFFIXES:
        return "torch", path
    known = ", ".join((SUFFIX, INDEX_SUFFIX, *torch_state.SUFFIXES))
    raise UsageError(f"{path}: a file of an unknown format; known by their ends are {known}")


class ForeignFile:
    """Foreign file at ``path``, open for reading; a context manager.

    Raises MissingCapabilityError without the library that reads it, StorageError for whatever else goes wrong there.
    """

    def __init__(self, path: Path) -> None:
        self.format, self.path = format_of(path)
        with self._library_errors():
            nbytes = _file_bytes(self.path)
            self._reader = _READERS[self.format](self.path)
        self.tensors: Sequence[StoredTensor] = self._reader.tensors
        self.left_out: Sequence[str] = self._reader.left_out
        self.metadata = _metadata(self._reader.metadata)
        reason = _contents_problem(self.tensors, nbytes)
        if reason:
            self._reader.close()
            raise StorageError(f"{self.path}: {reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.close()

    def pieces(self) -> list[Piece]:
        """Return every tensor as a piece whose bytes are read when they are asked for, before the file is closed."""
        return [
            piece_in_file(tensor, _ForeignTensor(self, index, dtype_of(tensor.dtype)))
            for index, tensor in enumerate(self.tensors)
        ]

    def fetch(self, index: int, part: Range, out: np.ndarray) -> None:
        """Fill ``out`` with elements ``part`` of the tensor of that number."""
        with self._library_errors():
            self._reader.read(index, part, out)

    @contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Turn what a library raises inside the block into an error of this file."""
        try:
            yield
        except MissingCapabilityError as error:
            raise MissingCapabilityError(f"{self.path} cannot be read here: {error}") from error
        except Exception as error:  # whatever a hostile file makes of a library
            reason = (str(error).strip().splitlines() or [""])[0][:500]
            text = f"{self.path} cannot be read as {self.format}: {type(error).__name__}: {reason}"
            raise StorageError(text) from error


def _file_bytes(path: Path) -> int:
    """Return the bytes of the file at ``path``, or, of an index, of all files of its format beside it."""
    files = path.parent.glob("*" + SUFFIX) if path.name.endswith(INDEX_SUFFIX) else [path]
    return sum(file.stat().st_size for file in files)


@dataclass(frozen=True)
class _ForeignTensor:
    """Tensor of a foreign file, as the store of a `FileSlice`."""

    source: ForeignFile
    index: int
    dtype: np.dtype

    def read(self, wanted: Range, out: np.ndarray) -> None:
        """Read ``wanted`` into ``out``."""
        self.source.fetch(self.index, wanted, out)


def _contents_problem(tensors: Sequence[StoredTensor], file_bytes: int) -> str:
    """Return which of ``tensors`` is impossible or cannot be stored, as the rest of a sentence, else ""."""
    names_bytes = sum(len(tensor.name) for tensor in tensors)
    if len(tensors) > MAX_TENSORS or names_bytes > MAX_NAMES_BYTES:
        return (
            f"it has {len(tensors)} tensors, whose names have {names_bytes} letters; at most {MAX_TENSORS} and "
            f"{MAX_NAMES_BYTES} are read: is it a model?"
        )
    total, seen = 0, set()
    for tensor in tensors:
        parts = tensor.name.split("/")
        plain = tensor.name.isprintable() and len(tensor.name) <= 512 and not {"", ".", ".."} & set(parts)
        plain = plain and len(parts) <= MAX_NESTING
        if not plain or len(tensor.kind) > 64 or not _KIND.fullmatch(tensor.kind):
            return (
                f"a tensor is called {tensor.name[:80]!r} of {tensor.kind[:80]!r}, which cannot be a name of a dataset"
            )
        if tensor.dtype not in FLOATS | INTEGERS:
            return f"{tensor.name} has dtype {tensor.dtype[:20]!r}, known are {', '.join(FLOATS | INTEGERS)}"
        if len(tensor.shape) > 32 or not all(0 <= size < 1 << 48 for size in tensor.shape):
            return f"{tensor.name} has the shape {str(tensor.shape)[:80]}"
        nbytes = math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize
        total += nbytes
        if nbytes > file_bytes or total > MAX_ALIASING * file_bytes:
            return f"{tensor.name} of shape {list(tensor.shape)} is more than a file of {file_bytes} bytes can hold"
        if (tensor.kind, tensor.name) in seen:
            return f"{tensor.name} comes twice"
        seen.add((tensor.kind, tensor.name))
    for kind, name in seen:
        above = name.split("/")[:-1]
        if any((kind, "/".join(above[: k + 1])) in seen for k in range(len(above))):
            return f"{name} lies inside another tensor of that name; rename one of them"
    return ""


def _metadata(text: str) -> Mapping[str, Any]:
    """Return the metadata of an export of hpcdist (`exporting.export_metadata`); {} for files of others."""
    try:
        metadata = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(metadata, dict) or not isinstance(metadata.get("scalars"), dict):
        return {}
    step, kinds = metadata.get("step"), metadata.get("kinds")
    return metadata if type(step) is int and 0 <= step < 1 << 60 and isinstance(kinds, list) else {}


@dataclass(frozen=True)
class ImportedCheckpoint:
    """Result of an import: the checkpoint at ``path``, and what was read and left out of the file."""

    path: Path
    format: str
    step: int
    tensors: tuple[StoredTensor, ...]
    left_out: tuple[str, ...]
    resumable: bool  # whether it has what a training needs to go on: it is one of our exports, with all that there was


def import_checkpoint(
    source: Path,
    run_dir: Path,
    step: int | None = None,
    inputs: Mapping[str, int] | None = None,
    keys: Mapping[str, str] | None = None,
) -> ImportedCheckpoint:
    """Save what the file ``source`` holds as the only checkpoint of ``run_dir``.

    Without ``step``, an export of hpcdist has its own, and other files get 0. With a recipe, ``inputs`` are what the
    data decides of its model, and ``keys`` the names that the tensors get, by those in the file; other tensors are left
    out. Raises StorageError where the file cannot be read or the checkpoint not be written, UsageError when there are
    checkpoints already.
    """
    directory = run_dir / "checkpoints"
    if names.candidates(directory):
        raise UsageError(f"{directory} has checkpoints already; import into the directory of a new run")
    with ForeignFile(source) as file:
        if not file.tensors:
            raise StorageError(f"{file.path} holds no tensors")
        ours = bool(file.metadata)
        number = (file.metadata["step"] if ours else 0) if step is None else step
        scalars = file.metadata["scalars"] if ours else _initial_scalars(number, inputs or {})
        scalars = {**scalars, "imported": file.path.name}
        pieces = file.pieces()
        if keys is not None:
            pieces = [replace(piece, tensor=keys[piece.tensor]) for piece in pieces if piece.tensor in keys]
        path = save(directory, number, pieces, scalars, solo(), keep=1)
        return ImportedCheckpoint(
            path,
            file.format,
            number,
            tuple(file.tensors),
            tuple(file.left_out),
            ours and {tensor.kind for tensor in file.tensors} == set(file.metadata["kinds"]),
        )


def _initial_scalars(step: int, inputs: Mapping[str, int]) -> dict[str, Any]:
    """Return the scalars of a state of which only the tensors are known; it names no data, seed or optimizer."""
    known = {"model_inputs": dict(inputs)} if inputs else {}
    return {"steps": step, "samples": 0, "seed": 0, "data": "", "optimizer": {}, "loss_scale": {}, **known}
