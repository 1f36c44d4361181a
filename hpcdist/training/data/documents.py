"""Documents of input files: text, JSONL and Parquet, plain or compressed, in pieces that do not depend on ranks.

A row of JSONL or Parquet is a text, a chat, or a prompt with its completion.

A piece is a byte range of a file of lines, a row group of a Parquet file, or a whole file.
"""

import importlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

from hpcdist.errors import DataError, MissingCapabilityError
from hpcdist.reporting.regular import open_regular
from hpcdist.training.data.files import SNIFFED_BYTES, not_text

COMPRESSIONS: Final = (".gz", ".zst")
JSONL: Final = (".jsonl", ".ndjson")
PARQUET: Final = ".parquet"
BUFFER_BYTES: Final = 1 << 20
EXTRA: Final = "pip install 'hpcdist[tokens]'"
CHAT_KEYS: Final = (("messages",), ("prompt", "completion"))


class Row(NamedTuple):
    """Chat with the key ``messages``, or prompt with the keys ``prompt`` and ``completion``."""

    value: dict[str, Any]
    place: Callable[[], str]  # file and line, for messages

    @property
    def text(self) -> str:
        """Text of the row without the marks of a chat template."""
        messages = self.value.get("messages", [self.value.get("prompt"), self.value.get("completion")])
        parts = [one.get("content") if isinstance(one, dict) else one for one in messages or []]
        return "\n".join(part for part in parts if isinstance(part, str))


class FileRange(NamedTuple):
    """Part of an input file: bytes ``start`` to ``stop`` - 1, or row group number ``start`` of a Parquet file."""

    path: str
    start: int
    stop: int  # -1: the whole file


@dataclass(frozen=True)
class Reading:
    """Options that define the documents of input files."""

    key: str = "text"  # JSONL: key of the text or messages in each object; Parquet: name of the column
    lines: bool = False  # each line of a text file is a document; else the whole file is one document
    piece_bytes: int = 64 << 20  # size of the pieces of files of lines, and of the groups of pieces

    def groups(self, paths: Sequence[Path]) -> list[list[FileRange]]:
        """Return all pieces of the files ``paths`` in groups of about ``piece_bytes`` bytes. Raises DataError."""
        groups: list[list[FileRange]] = [[]]
        room = self.piece_bytes
        for path in paths:
            for piece, size in self._pieces(path):
                if size > room and groups[-1]:
                    groups.append([])
                    room = self.piece_bytes
                groups[-1].append(piece)
                room -= size
        return groups if groups[-1] else []

    def _pieces(self, path: Path) -> Iterator[tuple[FileRange, int]]:
        kind, compression = _kind(path)
        try:
            os.close(open_regular(path))
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; give readable files") from error
        if kind == PARQUET:
            metadata = self._parquet(path)[0].metadata
            for number in range(metadata.num_row_groups):
                yield FileRange(str(path), number, number + 1), metadata.row_group(number).total_byte_size
        elif compression or not (kind == JSONL or self.lines):
            yield FileRange(str(path), 0, -1), size
        else:
            for start in range(0, size, self.piece_bytes):
                stop = min(size, start + self.piece_bytes)
                yield FileRange(str(path), start, stop), stop - start

    def documents(self, piece: FileRange) -> Iterator[str | Row]:
        """Yield the text or `Row` of all documents that begin in ``piece``. Raises DataError for invalid content."""
        path = Path(piece.path)
        kind, compression = _kind(path)
        try:
            if kind == PARQUET:
                yield from self._rows(path, piece.start)
                return
            with _opened(path, compression) as file:
                if kind == JSONL or self.lines:
                    read = self._object if kind == JSONL else _text
                    for at, line in _lines(file, piece):
                        yield read(line, path, at)
                else:
                    content = file.read()
                    if reason := not_text(path.with_suffix("") if compression else path, content[:SNIFFED_BYTES]):
                        raise DataError(f"{path} is not text: {reason}; give text, .jsonl or .parquet files")
                    yield _text(content, path, 0)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}; is the file complete?") from error

    def _rows(self, path: Path, number: int) -> Iterator[str | Row]:
        file, columns = self._parquet(path)
        for row, value in enumerate(file.read_row_group(number, columns).to_pylist()):
            yield self._document(value, partial("{}, row {} of row group {}".format, path, row, number))

    def _parquet(self, path: Path) -> tuple[Any, list[str]]:
        # Return (open file, columns to read).
        module = _module("pyarrow.parquet", path)
        try:
            file = module.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow.lib.ArrowInvalid is a ValueError
            raise DataError(f"{path} cannot be read as Parquet: {error}; copy the file again") from error
        names = file.schema_arrow.names
        for columns in ((self.key,), *CHAT_KEYS):
            if set(columns) <= set(names):
                return file, [*columns, *(name for name in names if name == "tools" and columns != (self.key,))]
        raise DataError(f"{path} has no column {self.key!r}; it has {', '.join(names)}: choose another --key")

    def _object(self, line: bytes, path: Path, at: int) -> str | Row:
        place = partial(_line_number, path, at)
        try:
            value = json.loads(line)
            if rb"\ud" in line or rb"\uD" in line:
                json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place()}: invalid JSON: {error}; expected one object on each line") from error
        return self._document(value, place)

    def _document(self, value: Any, place: Callable[[], str]) -> str | Row:
        if isinstance(value, dict):
            text = value.get(self.key)
            if isinstance(text, str):
                return text
            if isinstance(text, list):
                return Row(value | {"messages": text}, place)
            if any(set(keys) <= value.keys() for keys in CHAT_KEYS):
                return Row(value, place)
        names = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise DataError(
            f"{place()}: no text with the key {self.key!r}, no messages, and no prompt with completion; the row has "
            f"{names}; choose another --key"
        )


def _kind(path: Path) -> tuple[Any, str]:
    suffix = path.suffix.lower()
    compression = suffix if suffix in COMPRESSIONS else ""
    inner = path.with_suffix("").suffix.lower() if compression else suffix
    return JSONL if inner in JSONL else PARQUET if suffix == PARQUET else "text", compression


def _opened(path: Path, compression: str) -> BinaryIO:
    descriptor = os.fdopen(open_regular(path), "rb", BUFFER_BYTES)
    if compression == ".gz":
        import gzip

        return cast(BinaryIO, gzip.GzipFile(fileobj=descriptor))
    if compression == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(descriptor, path), BUFFER_BYTES))
    return descriptor


class _ZstdStream(io.RawIOBase):
    # The readers of zstandard end a truncated frame without an error.
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._new = file, _module("zstandard", path).ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = (self._frame.unused_data if self._frame and self._frame.eof else b"") or self._file.read(1 << 17)
            if not block:
                if self._frame and not self._frame.eof:
                    raise EOFError("the last zstd frame is truncated")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            try:
                self._ready = self._frame.decompress(block)
            except Exception as error:  # ZstdError is no OSError
                raise OSError(f"invalid zstd data: {error}") from error
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _lines(file: BinaryIO, piece: FileRange) -> Iterator[tuple[int, bytes]]:
    # Yield (offset, line) of the lines that begin in the piece and are not blank.
    at = piece.start
    if at:
        file.seek(at - 1)
        at += len(file.readline()) - 1
    for line in file:
        if piece.stop >= 0 and at >= piece.stop:
            return
        if content := line.rstrip(b"\r\n"):
            yield at, content
        at += len(line)


def _line_number(path: Path, at: int) -> str:
    with _opened(path, _kind(path)[1]) as file:
        return f"{path}, line {file.read(at).count(10) + 1}"  # 10: line feed


def _text(content: bytes, path: Path, at: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, byte {at + error.start:,}: the text is not UTF-8; convert it, for example by iconv"
        ) from error


def _module(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingCapabilityError(f"{path} needs {name.partition('.')[0]} ({error}); run {EXTRA}") from error
