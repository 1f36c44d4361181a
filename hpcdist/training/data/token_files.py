"""Tokens in many files, read as one array: directories of `hpcdist data tokenize`, Megatron files, flat files.

Opening reads one index, not the shards. At most MOST_OPEN_FILES shards are open at a time.
"""

import glob
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.errors import DataError, StorageError
from hpcdist.reporting import regular
from hpcdist.training.data.samples import FileArray, allocated

MOST_OPEN_FILES: Final = 128
INDEX_NAME: Final = "tokens.json"  # written last by `hpcdist data tokenize`
INDEX_SCHEMA: Final = "hpcdist.tokens"
INDEX_VERSION: Final = 1
MOST_INDEX_BYTES: Final = 1 << 30
MEGATRON_MAGIC: Final = b"MMIDIDX\0\0"
FAIRSEQ_MAGIC: Final = b"TNTIDX\0\0"
# Codes of Megatron's element types that can hold tokens. int32 is read as uint32: valid tokens have the same bytes.
MEGATRON_TYPES: Final = {1: "<u1", 4: "<u4", 5: "<i8", 8: "<u2"}
_MEGATRON_HEADER: Final = np.dtype([("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
LLMC_MAGIC: Final = 20240520  # first int32 of the header of llm.c files
LLMC_HEADER_BYTES: Final = 1024


class Shard(NamedTuple):
    """Contiguous elements in a file."""

    path: Path
    offset: int  # of the first element, in bytes
    size: int  # number of elements


class ShardedArray:
    """Lazy 1-D array of the elements of all ``shards``, in their order. Raises StorageError for a missing file."""

    def __init__(self, shards: Sequence[Shard], dtype: Any) -> None:
        self._shards, self._stored = shards, np.dtype(dtype)
        self.dtype = self._stored.newbyteorder("=")
        self.ends = np.cumsum([shard.size for shard in shards], dtype=np.int64)
        self.shape = (int(self.ends[-1]) if len(shards) else 0,)
        self.place = [[shard.offset, shard.size] for shard in shards]
        # No reference to this object: a dropped array must close its files at once.
        stored = self._stored
        self._file = lru_cache(MOST_OPEN_FILES)(
            lambda number: FileArray(shards[number].path, stored, shards[number].offset, (shards[number].size,))
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any, /) -> Any:
        if not isinstance(index, slice):
            return self.gather(np.array([range(len(self))[index]]), 1)[0, 0]
        start, stop, step = index.indices(len(self))
        return self.gather(np.array([start]), max(0, stop - start))[0, ::step]

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """Return a list of (path, `os.stat` result) of all shards. Raises StorageError for a truncated shard."""
        states = []
        for shard in self._shards:
            try:
                state = shard.path.stat()
            except OSError as error:
                raise StorageError(f"the token shard {shard.path} cannot be read: {error.strerror}") from error
            if state.st_size < shard.offset + shard.size * self._stored.itemsize:
                FileArray(shard.path, self._stored, shard.offset, (shard.size,))  # raises the error
            states.append((shard.path.absolute(), state))
        return states

    def gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        rows = allocated((len(starts), length), self.dtype, self._shards[0].path)
        if not rows.size:
            return rows
        assert starts.min() >= 0 and starts.max() + length <= len(self)
        numbers = np.searchsorted(self.ends, starts, "right")
        is_inside = starts + length <= self.ends[numbers]
        for number in np.unique(numbers[is_inside]).tolist():
            in_shard = is_inside & (numbers == number)
            rows[in_shard] = self._file(number).gather(starts[in_shard] - self.first(number), length)
        for row in np.flatnonzero(~is_inside).tolist():
            position, number = int(starts[row]), int(numbers[row])
            stop, done = position + length, 0
            while position < stop:
                first, end = self.first(number), min(stop, int(self.ends[number]))
                if end > position:
                    rows[row, done : done + end - position] = self._file(number)[position - first : end - first]
                done, position, number = done + end - position, end, number + 1
        return rows

    def first(self, number: int) -> int:
        """Return the index of the first element of shard ``number``."""
        return int(self.ends[number]) - self._shards[number].size


@dataclass(frozen=True)
class TokenShards:
    """Tokens of a data set, and the ends of its documents."""

    tokens: ShardedArray
    description: str
    # Ends of the documents of shard number i, relative to the shard. None: the files do not store documents.
    shard_ends: Callable[[int], np.ndarray] | None
    vocabulary: int = 0  # number of different tokens of the tokenizer; 0: not stored
    trained: ShardedArray | None = None  # uint8 array: 1 for each trained token; None: all tokens are trained

    def document_ends(self) -> np.ndarray | None:
        """Return a sorted int64 array of the ends of all documents, or None if the files do not store documents."""
        if self.shard_ends is None:
            return None
        tokens = self.tokens
        parts = [self.shard_ends(number) + tokens.first(number) for number in range(len(tokens.ends))]
        return np.concatenate(parts).astype(np.int64)

    def border(self, position: int) -> int:
        """Return the end of the last document that ends at or before ``position``, or 0 if there is no such end.

        Reads the document ends of one shard. If the files do not store documents, return ``position``.
        """
        if self.shard_ends is None or position >= len(self.tokens):
            return position
        number = int(np.searchsorted(self.tokens.ends, position, "right"))
        first = self.tokens.first(number)
        ends = self.shard_ends(number)
        before = int(np.searchsorted(ends, position - first, "right"))
        return first + (int(ends[before - 1]) if before else 0)


def paths_of(path: str) -> list[Path]:
    """Return the files that ``path`` names: an existing file, the sorted matches of a pattern, or a Megatron prefix."""
    if os.path.exists(path):
        return [Path(path)]
    if matches := sorted(glob.glob(path)):
        return [Path(match) for match in matches]
    return [Path(f"{path}.idx")] if os.path.exists(f"{path}.idx") else []


def open_shards(path: str, dtype: str) -> TokenShards | None:
    """Open the token files that ``path`` names, or return None for other kinds of data. Raises DataError.

    ``dtype``: element type of flat files, or "" for files that store their type.
    """
    paths = paths_of(path)
    if dtype:
        return _flat(path, paths, dtype)
    if len(paths) == 1 and (paths[0] / INDEX_NAME).is_file():
        return open_directory(paths[0])
    prefixes = list(dict.fromkeys(file.with_suffix("") for file in paths if file.suffix in (".bin", ".idx")))
    indexes = [prefix.with_name(f"{prefix.name}.idx") for prefix in prefixes]
    if prefixes and len(prefixes) <= len(paths) and all(map(os.path.exists, indexes)):
        return _megatron(path, indexes)
    if len(paths) > 1 or any(file.suffix == ".bin" for file in paths):
        raise DataError(
            f"{path}: tokens in flat files need their type, and Megatron files a .idx file for each .bin file; set "
            "data.dtype to uint16 or uint32, or provide the .idx files"
        )
    if paths and paths[0].is_dir() and any(paths[0].glob("tokens-*.h5")):
        raise DataError(
            f"{path}: the token directory has no {INDEX_NAME}: its tokenization is not finished; run the same "
            "`hpcdist data tokenize` command again, which continues it"
        )
    return None


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of the token directory ``folder``. Raises DataError for a missing or damaged index."""
    path = folder / INDEX_NAME
    try:
        index: dict[str, Any] = json.loads(regular.read(path, MOST_INDEX_BYTES))
        if index["schema"] != INDEX_SCHEMA or index["version"] > INDEX_VERSION:
            raise DataError(
                f"{path}: schema {index['schema']} version {index['version']}, expected {INDEX_SCHEMA} version "
                f"{INDEX_VERSION} or older; update hpcdist"
            )
        for shard in index["shards"]:
            if Path(shard["file"]).name != shard["file"]:
                raise DataError(f"{path}: the shard name {shard['file']!r} has a directory; tokenize the data again")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; is {folder} a token directory?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}; tokenize the data again") from error
    return index


def open_directory(folder: Path) -> TokenShards:
    """Open the token directory ``folder``, an output of `hpcdist data tokenize`. Raises DataError."""
    index = read_index(folder)
    with regular.damage(folder / INDEX_NAME, "has damaged entries; tokenize the data again"):
        stored, vocabulary = np.dtype(index["dtype"]).newbyteorder("<"), int(index["vocabulary"])
        shards = [item for item in index["shards"] if item["tokens"]]
        places = [Shard(folder / item["file"], item["offset"], item["tokens"]) for item in shards]
        tokens, trained = ShardedArray(places, stored), None
        if "trained" in index:
            masks = [place._replace(offset=item["trained_offset"]) for place, item in zip(places, shards, strict=True)]
            trained = ShardedArray(masks, np.uint8)
    if not shards:
        raise DataError(f"{folder}: the token directory has no documents; tokenize files with text")
    if index.get("trained") == 0:
        raise DataError(f"{folder}: no token is trained, so there is no loss; tokenize chats with answers")

    def ends(number: int) -> np.ndarray:
        shard = shards[number]
        whole = FileArray(folder / shard["file"], "<i8", shard["ends_offset"], (shard["documents"],))
        return np.asarray(whole[:])

    return TokenShards(tokens, f"{folder}, {len(shards):,} shards", ends, vocabulary, trained)


def _flat(path: str, paths: Sequence[Path], dtype: str) -> TokenShards:
    kind, shards = np.dtype(dtype).newbyteorder("<"), []
    for file in paths:
        try:
            with open(regular.open_regular(file), "rb") as opened:
                head, size = opened.read(4), os.fstat(opened.fileno()).st_size
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}; expected a flat file of {dtype}") from error
        offset = LLMC_HEADER_BYTES if int.from_bytes(head, "little") == LLMC_MAGIC else 0
        count, rest = divmod(size - offset, kind.itemsize)
        if rest or head.startswith((b"\x93NUM", b"\x89HDF")):
            raise DataError(f"{file}: {size:,} bytes are not a flat file of {dtype}; set data.dtype to its type, or ''")
        if count > 0:
            shards.append(Shard(file, offset, count))
    if not shards:
        raise DataError(f"{path}: no tokens; expected at least one flat file with tokens of the type {dtype}")
    what = path if len(paths) == 1 else f"{path}, {len(shards):,} files"
    return TokenShards(ShardedArray(shards, kind), what, None)


def _megatron(path: str, indexes: Sequence[Path]) -> TokenShards:
    shards, ends = [], []
    kinds: dict[str, Path] = {}
    for index in indexes:
        kind, size, documents = _megatron_index(index)
        kinds.setdefault(kind, index)
        if size:
            shards.append(Shard(index.with_suffix(".bin"), 0, size))
            ends.append(documents)
    if len(kinds) > 1:
        first, second = list(kinds.values())[:2]
        raise DataError(f"{path}: {first} and {second} have tokens of different types; make them separate data.source")
    if not shards:
        raise DataError(f"{path}: the Megatron files have no tokens; expected at least one document")
    what = path if len(indexes) == 1 else f"{path}, {len(shards):,} files"
    return TokenShards(ShardedArray(shards, next(iter(kinds))), what, ends.__getitem__)


def _megatron_index(path: Path) -> tuple[str, int, np.ndarray]:
    # Return (element type, number of tokens, end of each document) of a Megatron index.
    with regular.damage(path, "is not a valid Megatron index; copy it again"):
        content = np.memmap(path, np.uint8, "r")
        magic = content[: len(MEGATRON_MAGIC)].tobytes()
        if magic.startswith(FAIRSEQ_MAGIC):
            raise DataError(f"{path}: an index of fairseq's old format TNTIDX; convert it by Megatron's tools")
        if magic != MEGATRON_MAGIC:
            raise DataError(f"{path} does not begin with MMIDIDX; expected the index of a Megatron .bin file")
        at = len(MEGATRON_MAGIC) + _MEGATRON_HEADER.itemsize
        header = content[len(MEGATRON_MAGIC) : at].view(_MEGATRON_HEADER)[0]
        if header["version"] != 1 or int(header["code"]) not in MEGATRON_TYPES:
            raise DataError(
                f"{path}: version {header['version']} and element type {header['code']}; expected version 1 and "
                f"integers (codes {', '.join(map(str, MEGATRON_TYPES))})"
            )
        kind, count, borders = MEGATRON_TYPES[int(header["code"])], int(header["sequences"]), int(header["documents"])
        lengths = np.frombuffer(content, "<i4", count, at)
        pointers = np.frombuffer(content, "<i8", count, at + 4 * count)
        documents = np.frombuffer(content, "<i8", borders, at + 12 * count)
        stops = np.cumsum(lengths, dtype=np.int64)
        itemsize = np.dtype(kind).itemsize
        is_ordered = borders >= 1 and documents[0] == 0 and documents[-1] == count and (np.diff(documents) >= 0).all()
        if not is_ordered or (pointers != (stops - lengths) * itemsize).any():
            raise DataError(f"{path}: its documents are not stored one after the other; build the index again")
        size = int(stops[-1]) if count else 0
        return kind, size, np.concatenate([[0], stops])[documents[1:]]
