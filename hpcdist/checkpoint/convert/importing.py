"""Import a file of another format as a checkpoint, read by a confined child process that is not trusted (local).

A library that reads a hostile file may crash, loop, or run foreign code. So this process never opens such a file: a
child does (`hpcdist.checkpoint.convert.confined_reader`), without the caller's environment, and hands over names,
shapes and bytes through a pipe. What the child sends is checked here against the size of the file; its death is an
error.
`import_checkpoint` passes the bytes through in blocks and saves them as the only checkpoint of a run.
"""

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np

import hpcdist
from hpcdist.arrays.dtypes import FLOATS, INTEGERS, dtype_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint.convert import torch_state
from hpcdist.checkpoint.convert.confined_reader import ERROR_FLAG, MISSING_LIBRARY_FLAG, file_bytes
from hpcdist.checkpoint.convert.safetensors import INDEX_SUFFIX, MAX_TENSORS, SUFFIX
from hpcdist.checkpoint.listing import StoredTensor
from hpcdist.checkpoint.saving.two_phase import save
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError

ANSWER_TIMEOUT_S: Final = 300.0  # for one answer
MAX_CONTENTS_BYTES: Final = 256 << 20  # of what a file is said to hold
# The largest models have some 100,000 tensors of 60 letters. HDF5 moves all names of a group when it has no room for
# one more, so the time of very many grows with their square.
MAX_NAMES_BYTES: Final = 16 << 20
MAX_NESTING: Final = 16  # groups in one another
MAX_ALIASING: Final = 4  # all tensors together may be so many times the file: some share their bytes
_KIND: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
_PASSED_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME")  # of the environment


@dataclass(frozen=True)
class _DeclaredTensor:
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _DeclaredContents:
    tensors: list[_DeclaredTensor]
    metadata: str
    left_out: list[str]
    not_confined: str


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
    """Foreign file at ``path``, open in a confined child process; a context manager.

    Raises MissingCapabilityError without the library that reads it, StorageError for whatever else goes wrong there.
    """

    def __init__(self, path: Path) -> None:
        self.format, self.path = format_of(path)
        self._nbytes = file_bytes(self.path)
        self._lock = threading.Lock()  # one request at a time, from whatever thread

    def __enter__(self) -> Self:
        package = str(Path(hpcdist.__file__).resolve().parents[1])
        line = [
            sys.executable,
            "-P",
            "-m",
            "hpcdist.checkpoint.convert.confined_reader",
            self.format,
            str(self.path.resolve()),
        ]
        environment = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._child = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, **threads, "PYTHONPATH": package},
            cwd="/",
            start_new_session=True,
        )
        try:
            self._take(self._answer(MAX_CONTENTS_BYTES))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def pieces(self) -> list[Piece]:
        """Return every tensor as a piece whose bytes are asked for when they are read."""
        pieces = []
        for index, tensor in enumerate(self.tensors):
            whole = Range(0, tensor.size)
            lies = FileSlice(_RemoteTensor(self, index, dtype_of(tensor.dtype)), whole)  # type: ignore[arg-type]
            pieces.append(Piece(tensor.kind, tensor.name, tensor.shape, whole_box(tensor.shape), whole, lies))  # type: ignore[arg-type]
        return pieces

    def fetch(self, index: int, part: Range, out: np.ndarray) -> None:
        """Fill ``out`` with elements ``part`` of the tensor of that number."""
        view = out.view(np.uint8).data
        with self._lock:
            assert self._child.stdin is not None
            try:
                self._child.stdin.write(json.dumps([index, part.start, part.stop]).encode() + b"\n")
                self._child.stdin.flush()
            except OSError:
                raise self._died() from None
            data = self._answer(len(view))
        if len(data) != len(view):
            raise StorageError(f"{self.path}: {len(data)} of {len(view)} bytes of {self.tensors[index].name} are there")
        view[:] = data

    def _take(self, data: bytes) -> None:
        """Check what the child says of the contents of the file, and keep it. Raises StorageError."""
        try:
            contents = msgspec.json.decode(data, type=_DeclaredContents)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StorageError(f"{self.path}: what was read of it makes no sense: {error}") from error
        reason = _contents_problem(contents.tensors, self._nbytes)
        if reason:
            raise StorageError(f"{self.path}: {reason}")
        self.tensors = [
            StoredTensor(tensor.kind, tensor.name, tensor.dtype, tensor.shape) for tensor in contents.tensors
        ]
        self.left_out, self.not_confined = contents.left_out, contents.not_confined
        self.metadata = _metadata(contents.metadata)

    def _answer(self, most: int) -> bytes:
        """Return the next frame. Raises StorageError when there is none, or one of more than ``most`` bytes."""
        length = int.from_bytes(self._read(8), "little")
        if length & ERROR_FLAG:
            reason = self._read(min(length & ~(ERROR_FLAG | MISSING_LIBRARY_FLAG), 2048)).decode(errors="replace")
            if length & MISSING_LIBRARY_FLAG:
                raise MissingCapabilityError(f"{self.path} cannot be read here: {reason}")
            raise StorageError(f"{self.path} cannot be read as {self.format}: {reason}")
        if length > most:
            raise StorageError(f"{self.path}: an answer of {length} bytes, expected at most {most}")
        return self._read(length)

    def _read(self, count: int) -> bytes:
        assert self._child.stdout is not None
        fd, parts = self._child.stdout.fileno(), []
        while count:
            if not select.select([fd], [], [], ANSWER_TIMEOUT_S)[0]:
                raise StorageError(f"{self.path}: nothing was read of it in {ANSWER_TIMEOUT_S:g} s")
            part = os.read(fd, min(count, 1 << 20))
            if not part:
                raise self._died()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _died(self) -> StorageError:
        code = self._child.wait()
        how = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
        return StorageError(
            f"{self.path} cannot be read as {self.format}: the process that opened it ended with {how}; it is damaged, "
            "or made to do harm"
        )

    def _end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except BrokenPipeError:  # a request that the child has not read
                pass


@dataclass(frozen=True)
class _RemoteTensor:
    """Tensor of a foreign file, as the store of a `FileSlice`."""

    source: ForeignFile
    index: int
    dtype: np.dtype

    def read(self, wanted: Range, out: np.ndarray) -> None:
        """Read ``wanted`` into ``out``."""
        self.source.fetch(self.index, wanted, out)


def _contents_problem(tensors: list[_DeclaredTensor], file_bytes: int) -> str:
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
    not_confined: str  # why the child could have used the network; "" where it could not
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
            file.not_confined,
            ours and {tensor.kind for tensor in file.tensors} == set(file.metadata["kinds"]),
        )


def _initial_scalars(step: int, inputs: Mapping[str, int]) -> dict[str, Any]:
    """Return the scalars of a state of which only the tensors are known; it names no data, seed or optimizer."""
    known = {"model_inputs": dict(inputs)} if inputs else {}
    return {"steps": step, "samples": 0, "seed": 0, "data": "", "optimizer": {}, "loss_scale": {}, **known}
