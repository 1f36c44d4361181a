"""Import a file of another format as the only checkpoint of a run, block by block. Local.

The file may be hostile: no pickled code is run, and tensors are checked against the file size.
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
from hpcdist.checkpoint.convert import dcp, torch_state
from hpcdist.checkpoint.convert.dcp import DcpReader
from hpcdist.checkpoint.convert.exporting import piece_in_file
from hpcdist.checkpoint.convert.families import GGUF_SUFFIX
from hpcdist.checkpoint.convert.gguf_file import GgufReader
from hpcdist.checkpoint.convert.safetensors import INDEX_SUFFIX, MAX_TENSORS, SUFFIX, SafetensorsReader
from hpcdist.checkpoint.convert.torch_state import TorchReader
from hpcdist.checkpoint.listing import StoredTensor
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError

# The largest models have about 100,000 tensors with names of 60 letters. The time to write names to an HDF5 group grows
# with their square.
MAX_NAMES_BYTES: Final = 16 << 20
MAX_NESTING: Final = 16  # nested groups
MAX_ALIASING: Final = 4  # largest ratio of tensor bytes to file bytes: tensors may share bytes
_KIND: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
_READERS: Final[dict[str, Callable[[Path], SafetensorsReader | TorchReader | GgufReader | DcpReader]]] = {
    "safetensors": SafetensorsReader,
    "torch": TorchReader,
    "gguf": GgufReader,
    "dcp": DcpReader,
}


def format_of(path: Path) -> tuple[str, Path]:
    """Return (name of the format, file to open) for the file or directory ``path``. Raises HpcdistError."""
    if path.is_dir():
        matches = sorted(path.glob("*" + INDEX_SUFFIX)) or sorted(path.glob("*" + SUFFIX))
        if len(matches) != 1:
            raise StorageError(f"{path} must have one {SUFFIX} or index file, but has {len(matches)}; name one file")
        path = matches[0]
    if not path.is_file():
        raise StorageError(f"{path}: there is no such file; correct the path")
    if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
        return "safetensors", path
    if path.suffix in torch_state.SUFFIXES:
        return "torch", path
    if path.suffix == GGUF_SUFFIX or path.name == dcp.METADATA:
        return ("gguf" if path.suffix == GGUF_SUFFIX else "dcp"), path
    suffixes = ", ".join((SUFFIX, INDEX_SUFFIX, *torch_state.SUFFIXES))
    raise UsageError(f"{path} has an unknown format; choose a file whose name ends in one of: {suffixes}")


class ForeignFile:
    """Open safetensors or PyTorch file, as a context manager that closes the file. Raises HpcdistError."""

    def __init__(self, path: Path) -> None:
        self.format, self.path = format_of(path)
        with self.library_errors():
            nbytes = _file_bytes(self.path)
            self.reader = _READERS[self.format](self.path)
        self.tensors: Sequence[StoredTensor] = self.reader.tensors
        self.left_out: Sequence[str] = self.reader.left_out
        self.metadata = _metadata(self.reader.metadata)
        reason = _contents_problem(self.tensors, nbytes)
        if reason:
            self.reader.close()
            raise StorageError(f"{self.path} cannot be imported: {reason}; choose another file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.reader.close()

    def pieces(self) -> list[Piece]:
        """Return a list with one `Piece` per tensor in the file. The elements are read on demand."""
        return [
            piece_in_file(tensor, _ForeignTensor(self, index, dtype_of(tensor.dtype)))
            for index, tensor in enumerate(self.tensors)
        ]

    @contextmanager
    def library_errors(self) -> Iterator[None]:
        """Context manager that converts any exception of a reader to an HpcdistError."""
        try:
            yield
        except MissingCapabilityError as error:
            raise MissingCapabilityError(f"{self.path} cannot be read: {error}") from error
        except Exception as error:  # a hostile file may make a library raise anything
            reason = (str(error).strip().splitlines() or [""])[0][:500]
            text = f"{self.path} cannot be read as {self.format}: {type(error).__name__}: {reason}"
            raise StorageError(text) from error


def _file_bytes(path: Path) -> int:
    # Elements of a quantized GGUF tensor have at least 1 bit, and become 32.
    if path.suffix == GGUF_SUFFIX:
        return 32 * path.stat().st_size
    pattern = "*" + SUFFIX if path.name.endswith(INDEX_SUFFIX) else dcp.DATA if path.name == dcp.METADATA else ""
    return sum(file.stat().st_size for file in (path.parent.glob(pattern) if pattern else [path]))


@dataclass(frozen=True)
class _ForeignTensor:
    source: ForeignFile
    index: int
    dtype: np.dtype

    def read(self, elements: Range, out: np.ndarray) -> None:
        with self.source.library_errors():
            self.source.reader.read(self.index, elements, out)


def _contents_problem(tensors: Sequence[StoredTensor], file_bytes: int) -> str:
    names_bytes = sum(len(tensor.name) for tensor in tensors)
    if len(tensors) > MAX_TENSORS or names_bytes > MAX_NAMES_BYTES:
        return (
            f"it has {len(tensors)} tensors, whose names have {names_bytes} letters; at most {MAX_TENSORS} tensors and "
            f"{MAX_NAMES_BYTES} letters are read: is it a model?"
        )
    total, seen = 0, set()
    for tensor in tensors:
        parts = tensor.name.split("/")
        plain = tensor.name.isprintable() and len(tensor.name) <= 512 and not {"", ".", ".."} & set(parts)
        plain = plain and len(parts) <= MAX_NESTING
        if not plain or len(tensor.kind) > 64 or not _KIND.fullmatch(tensor.kind):
            return f"the name {tensor.name[:80]!r} of kind {tensor.kind[:80]!r} cannot be a name of an HDF5 dataset"
        if tensor.dtype not in FLOATS | INTEGERS:
            return f"{tensor.name} has dtype {tensor.dtype[:20]!r}; supported: {', '.join(FLOATS | INTEGERS)}"
        if len(tensor.shape) > 32 or not all(0 <= size < 1 << 48 for size in tensor.shape):
            return f"{tensor.name} has the unsupported shape {str(tensor.shape)[:80]}"
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
            return f"{name} lies inside another tensor, whose name is a prefix of it; rename one of the two"
    return ""


def _metadata(text: str) -> Mapping[str, Any]:
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
    """Result of an import: the new checkpoint, the tensors in the file, and the names of ignored file entries."""

    path: Path
    format: str
    step: int
    tensors: tuple[StoredTensor, ...]
    left_out: tuple[str, ...]
    resumable: bool  # True if training can resume: the file is a complete export of hpcdist


def import_checkpoint(
    source: Path,
    run_dir: Path,
    step: int | None = None,
    inputs: Mapping[str, int] | None = None,
    keys: Mapping[str, str] | None = None,
    opens: Callable[[Path], ForeignFile] = ForeignFile,
) -> ImportedCheckpoint:
    """Save the tensors of the file ``source`` as the first checkpoint of ``run_dir``. Raises StorageError, UsageError.

    ``step``: step number; None means the step in the file, or 0 without one. ``inputs``: {name of a model size: value}.
    ``keys``: {name in the file: new name} of the tensors to import, or None to import all tensors. ``opens``: function
    that opens ``source``.
    """
    # ``inputs`` is ignored if hpcdist exported the file.
    directory = run_dir / "checkpoints"
    if names.candidates(directory):
        raise UsageError(f"{directory} has checkpoints already; import into the directory of a new run")
    with opens(source) as file:
        if not file.tensors:
            raise StorageError(f"{file.path} has no tensors to import; choose a file with tensors")
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
    model_inputs = {"model_inputs": dict(inputs)} if inputs else {}
    return {"steps": step, "samples": 0, "seed": 0, "data": "", "optimizer": {}, "loss_scale": {}, **model_inputs}
