"""Shards of a checkpoint, HDF5 files with the tensor data of one writer: blocks, verified reads, writes, index.

The index ``index.h5`` shows every whole tensor to other tools, by virtual datasets. A restore does not need it.
"""

import os
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import xxhash

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.gpu import device, staging
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.manifest import BLOCK_BYTES, IndexFile, Manifest, Slot, StoredPiece
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files, virtual
from hpcdist.hdf5.files import storable
from hpcdist.hdf5.overlay import Overlay
from hpcdist.hdf5.virtual import VirtualDataset, VirtualSource
from hpcdist.reporting.regular import open_regular

SCHEMA: Final = "hpcdist.shard"
INDEX_SCHEMA: Final = "hpcdist.index"
PART_BYTES: Final = 1 << 20  # unit of digesting and writing (empirical)
READ_BYTES: Final = 1 << 19  # unit of reading, digesting and copying: fits in the cache of a core (empirical)
PER_DIRECTORY: Final = 1000  # largest number of shards in one directory
MAX_INDEX_PIECES: Final = 50_000  # HDF5 and its readers become slow above
MAX_OPEN_FILES: Final = 64  # limits the descriptors of a rank that restores from thousands of shards


def file_name(writer: int, writers: int) -> str:
    """Return the path of shard number ``writer`` of ``writers`` shards, relative to the checkpoint directory."""
    name = f"shard-{writer:05d}.h5"
    spread = directories(writers)
    return f"{spread[writer % len(spread)]}/{name}" if spread else name


def directories(writers: int) -> list[str]:
    """Return the names of the subdirectories for ``writers`` shards, or [] if one directory is enough."""
    if writers <= PER_DIRECTORY:
        return []
    # The smallest power of two of directories with at most PER_DIRECTORY shards each.
    count = 1 << (-(-writers // PER_DIRECTORY) - 1).bit_length()
    return [f"{number:02x}" for number in range(count)]


class BlockConsumer(Protocol):
    """Protocol of an object that uses the elements of a stored entry. Blocks arrive in parts, in ascending order."""

    def memory(self, first: int, count: int) -> np.ndarray | None:
        """Return the array for elements ``first`` to ``first + count - 1``, or None to get the elements in `take`."""

    def take(self, first: int, elements: np.ndarray) -> None:
        """Use ``elements``, which begin at index ``first`` of the entry. They are valid until the next call."""


class DamagedError(StorageError):
    """Error: some bytes of a checkpoint are unreadable or changed."""


class BlockReader:
    """Context manager that reads blocks of the shards in ``directory`` and verifies their digests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: OrderedDict[str, int] = OrderedDict()  # descriptors, the least recently used first
        self._memory = np.empty(READ_BYTES, np.uint8)

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(self, *exception: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def read(self, entry: StoredPiece, block: int, consumer: BlockConsumer | None = None) -> int:
        """Read and verify block number ``block`` of ``entry``. Return the number of bytes. Raises DamagedError."""
        offset = block * BLOCK_BYTES
        count = min(BLOCK_BYTES, entry.nbytes - offset)
        byte_range = f"{self._directory.name}/{entry.file}: bytes {offset} to {offset + count} of {entry.name}"
        try:
            read_bytes, digest = self._pass(entry, offset, count, consumer)
        except OSError as error:
            raise DamagedError(f"{byte_range} cannot be read: {error.strerror}") from error
        if read_bytes != count:
            raise DamagedError(f"{byte_range} are missing: the file is too short")
        if block >= len(entry.digests) or digest != entry.digests[block]:
            raise DamagedError(f"{byte_range} are damaged: the digest does not match")
        return count

    def digest_of(self, name: str, ranges: Iterable[Range]) -> tuple[int, str]:
        """Read the byte ``ranges`` of the file ``name``. Return (number of bytes read, digest). Raises OSError."""
        fd, digest, count = self._fd(name), xxhash.xxh3_128(), 0
        for block in (block for byte_range in ranges for block in cut(byte_range, READ_BYTES)):
            view = self._memory.data[: block.size]
            read = read_fully(fd, view, block.start)
            digest.update(view[:read])
            count += read
        return count, digest.hexdigest()

    def _pass(self, entry: StoredPiece, offset: int, count: int, consumer: BlockConsumer | None) -> tuple[int, str]:
        # Returns the number of bytes read and their digest, "" if the file is too short.
        fd, digest = self._fd(entry.file), xxhash.xxh3_128()
        elements = self._memory.view(dtype_of(entry.dtype))  # the same buffer as ``view``, as elements
        itemsize, view = elements.itemsize, self._memory.data
        target: np.ndarray | None = None
        begin, done = entry.offset + offset, 0
        # The first part ends at a multiple of READ_BYTES in the file (in whole elements), so that later preads are
        # page-aligned. If less than an element is left up to there, the first part has READ_BYTES.
        size = (READ_BYTES - begin % READ_BYTES) // itemsize * itemsize or READ_BYTES
        while done < count:
            size = min(size, count - done)
            first, length = (offset + done) // itemsize, size // itemsize
            if consumer is not None:
                target = consumer.memory(first, length)  # a read into the target saves a copy
            part = view[:size] if target is None else target.view(np.uint8).data
            read = os.preadv(fd, [part], begin + done)
            if read < size:  # a signal may interrupt a read; 0 more bytes mean the end of the file
                read += read_fully(fd, part[read:], begin + done + read)
            if read < size:
                return done + read, ""
            digest.update(part)
            if consumer is not None and target is None:
                consumer.take(first, elements[:length])
            done, size = done + size, READ_BYTES
        return count, digest.hexdigest()

    def _fd(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = open_regular(self._directory / name)
        self._open.move_to_end(name)
        return self._open[name]


def read_fully(fd: int, view: memoryview, start: int) -> int:
    """Fill ``view`` from byte ``start`` of the file ``fd``. Return the number of bytes read, fewer if the file ends."""
    done = 0
    while done < len(view) and (read := os.preadv(fd, [view[done:]], start + done)):
        done += read
    return done


def size_mismatch(directory: Path, manifest: Manifest) -> str:
    """Return an error text if a shard in ``directory`` is missing or its size differs from ``manifest``, else ""."""
    for name, size in manifest.files.items():
        try:
            actual = (directory / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if actual != size:
            return f"{name} has {actual} bytes, the manifest says {size}"
    return ""


BlockSource = Callable[[], Iterator[np.ndarray]]  # yields blocks of bytes; each is valid until the next is requested
TAG: Final = 0


class Export(Protocol):
    """Directory of another format that is written with a checkpoint. Methods do not raise: they keep the error text."""

    def prepare(self) -> None:
        """Create the files. Rank 0 only."""

    def write(self, slot: Slot, start: int, block: np.ndarray) -> None:
        """Write the bytes ``block`` of the tensor slice ``slot``, from its element ``start`` on. Local."""

    def finish(self) -> str:
        """Sync and close the files of this rank. Return an error text, or "" on success. Local."""
        ...

    def commit(self, error: str) -> str:
        """Make the directory visible, or discard it if ``error`` is not "". Return an error text. Rank 0 only."""
        ...


def exported_blocks(export: Export, slot: Slot, source: BlockSource) -> Iterator[np.ndarray]:
    """Yield the blocks of ``source``, the data of ``slot``, and also write them to ``export``. Local."""
    start, itemsize = slot.flat[0], dtype_of(slot.dtype).itemsize
    for block in source():
        export.write(slot, start, block)
        start += block.size // itemsize
        yield block


def blocks_of(array: Any) -> Iterator[np.ndarray]:
    """Yield the bytes of ``array`` in blocks. ``array``: an array on the host or on a GPU, or a `FileSlice`. Local."""
    if isinstance(array, FileSlice):
        return _of_file(array)
    return _of_device(array) if backend.is_device(array) else _of_host(array)


def _cuts(size: int, dtype: np.dtype) -> Iterator[Range]:
    return cut(Range(0, size), BLOCK_BYTES // dtype.itemsize)


def _of_host(array: np.ndarray) -> Iterator[np.ndarray]:
    for part in _cuts(array.size, array.dtype):
        yield np.ascontiguousarray(array[part.slice]).view(np.uint8)


def _of_file(source: FileSlice) -> Iterator[np.ndarray]:
    memory = np.empty(min(BLOCK_BYTES // source.dtype.itemsize, source.where.size), source.dtype)
    for part in _cuts(source.where.size, source.dtype):
        source.read(part, memory[: part.size])
        yield memory[: part.size].view(np.uint8)


def _of_device(array: Any) -> Iterator[np.ndarray]:
    # The copies run on another stream, so they must wait for the kernels that produced the array.
    produced = device.record()
    arriving: deque[tuple[np.ndarray, Any]] = deque()
    for part in _cuts(array.size, array.dtype):
        block = staging.lease(part.size, array.dtype)
        arriving.append((block, staging.begin_to_host(array[part.slice], block, produced)))
        if len(arriving) == 2:  # the next block is copied while the caller uses this one
            yield _wait_for_copy(arriving.popleft())
    while arriving:
        yield _wait_for_copy(arriving.popleft())


def _wait_for_copy(copy: tuple[np.ndarray, Any]) -> np.ndarray:
    block, event = copy
    event.synchronize()
    return block.view(np.uint8)


class IncomingBlocks:
    """Receiver of blocks from rank ``peer``, with two buffers. ``sizes``: size of each block in bytes."""

    def __init__(self, comm: Communicator, peer: int, sizes: Sequence[int]) -> None:
        self._comm, self._peer, self._sizes = comm, peer, deque(sizes)
        longest = max(sizes, default=0)
        self._free = deque(np.empty(longest, np.uint8) for _ in range(min(2, len(sizes))))
        self._posted: deque[tuple[Any, np.ndarray]] = deque()
        self._used: np.ndarray | None = None

    def blocks(self, count: int) -> Iterator[np.ndarray]:
        """Yield the next ``count`` blocks. Each block is valid until the next block is requested."""
        for _ in range(count):
            yield self._next()

    def drain(self) -> None:
        """Receive and discard all remaining blocks, so that the sends of the peer complete."""
        while self._posted or self._sizes:
            self._next()

    def _next(self) -> np.ndarray:
        if self._used is not None:  # the caller has finished with the last block: reuse its buffer
            self._free.append(self._used)
        while self._free and self._sizes:
            memory, size = self._free.popleft(), self._sizes.popleft()
            self._posted.append((self._comm.irecv(memory[:size], self._peer, TAG), memory[:size]))
        request, block = self._posted.popleft()
        request.wait()
        # Keep the whole buffer, not the view: a later block may be longer.
        self._used = block if block.base is None else block.base
        return block


def send_blocks(comm: Communicator, peer: int, arrays: Sequence[Any], sizes: Sequence[int]) -> str:
    """Send ``arrays`` to rank ``peer`` in blocks. ``sizes``: bytes of each block. Return an error text, or ""."""
    sent, error = 0, ""
    try:
        for array in arrays:
            for block in blocks_of(array):
                comm.send(block, peer, TAG)
                sent += 1
    except OSError as failure:
        error = str(failure)
    for size in sizes[sent:]:
        comm.send(np.zeros(size, np.uint8), peer, TAG)
    return error


def dataset_names(slots: Sequence[Slot]) -> list[str]:
    """Return a list of unique HDF5 dataset names, one for each slot."""
    datasets: dict[str, None] = {}
    for slot in slots:
        name = f"{slot.kind}/{slot.tensor}"
        if name in datasets:
            corner = ",".join(str(start) for start, _ in slot.box)
            name = f"{name}@{corner}+{slot.flat[0]}"
        if name in datasets:
            name = f"{name}-{slot.flat[1]}"
        assert name not in datasets, f"{name} is saved twice in one shard"
        datasets[name] = None
    return list(datasets)


def first_holders(slots_by_rank: Sequence[Sequence[Slot]]) -> list[list[bool]]:
    """Return a list of flags per rank, one flag per slot: True if no lower rank has this slot."""
    seen: set[Slot] = set()
    flags = []
    for slots in slots_by_rank:
        flags.append([slot not in seen for slot in slots])
        assert len(set(slots)) == len(slots), "a rank must not save a piece twice"
        seen.update(slots)
    return flags


@dataclass(frozen=True)
class WrittenShards:
    """Shard files that one writer rank has written or hard-linked for a checkpoint."""

    files: dict[str, int] = field(default_factory=dict)  # size in bytes
    entries: Sequence[StoredPiece] = ()  # tensor data of this checkpoint in the files
    outside: dict[str, str] = field(default_factory=dict)  # digest of each file's bytes that are not tensor data
    unused: Sequence[StoredPiece] = ()  # tensor data that this checkpoint does not need


@dataclass
class _StoredPieceBlocks:
    slot: Slot
    source: BlockSource
    digests: list[str] = field(default_factory=list)  # filled while `blocks` yields the data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.slot.stored_shape()

    @property
    def dtype(self) -> np.dtype:
        return storable(np.empty(0, dtype_of(self.slot.dtype))).dtype

    def blocks(self, offset: int) -> Iterator[np.ndarray]:
        for block in self.source():
            digest = xxhash.xxh3_128()
            start = 0
            while start < block.size:
                # Up to the next multiple of PART_BYTES in the file.
                part = block[start : start + PART_BYTES - offset % PART_BYTES]
                digest.update(part.data)
                yield part
                start, offset = start + part.size, offset + part.size
            self.digests.append(digest.hexdigest())


def write(
    directory: Path,
    name: str,
    slots: Sequence[Slot],
    sources: Sequence[BlockSource],
    about: Mapping[str, Any],
    opens: Callable[[Path], Overlay] = Overlay.created,
    sync: Callable[[Overlay], object] = files.finish,
) -> WrittenShards:
    """Write the shard ``name`` in ``directory``. Return a description of the shard. Raises StorageError.

    ``sources[i]``: function that yields the bytes of ``slots[i]``. ``about``: attributes of the file. ``opens``:
    function that creates the file. ``sync``: function that gets the complete file, and must fsync and close it.
    """
    datasets = {
        dataset: _StoredPieceBlocks(slot, source)
        for dataset, slot, source in zip(dataset_names(slots), slots, sources, strict=True)
    }
    attributes = {
        dataset: {
            "global_shape": slot.shape,
            "box": np.array(slot.box, np.int64).reshape(-1, 2),
            "flat": slot.flat,
            "dtype": slot.dtype,  # HDF5 has no bfloat16
        }
        for dataset, slot in zip(datasets, slots, strict=True)
    }
    path, outside = directory / name, xxhash.xxh3_128()
    offsets = files.write_contiguous(
        path, datasets, about, attributes,
        schema=SCHEMA, version=manifest.VERSION, opens=opens, outside=outside, sync=sync,
    )  # fmt: skip
    entries = [
        StoredPiece(**vars(slot), file=name, dataset=dataset, offset=offsets[dataset], digests=tuple(stored.digests))
        for slot, (dataset, stored) in zip(slots, datasets.items(), strict=True)
    ]
    return WrittenShards({name: path.stat().st_size}, entries, {name: outside.hexdigest()})


def write_index(directory: Path, entries: Iterable[StoredPiece], step: int) -> IndexFile | None:
    """Write an HDF5 index file to the checkpoint ``directory``. Return a description of the file, or None on failure.

    The file presents the stored slices ``entries`` as whole tensors. ``step``: attribute of the file.
    """
    pieces = [entry for entry in entries if entry.nbytes]
    if len(pieces) > MAX_INDEX_PIECES:
        return None
    path = directory / manifest.INDEX_FILE
    try:
        virtual.write(path, _whole_tensors(pieces), {"step": step}, schema=INDEX_SCHEMA, version=manifest.VERSION)
        data = path.read_bytes()
    except (StorageError, OSError) as error:
        print(
            f"hpcdist: the checkpoint of step {step} has no {manifest.INDEX_FILE}: {error}", file=sys.stderr, flush=True
        )
        return None
    return IndexFile(manifest.INDEX_FILE, len(data), xxhash.xxh3_128_hexdigest(data))


def _whole_tensors(entries: Iterable[StoredPiece]) -> dict[str, VirtualDataset]:
    by_tensor: dict[tuple[str, str], list[StoredPiece]] = {}
    for entry in entries:
        by_tensor.setdefault((entry.kind, entry.tensor), []).append(entry)
    return {
        f"{kind}/{tensor}": VirtualDataset(
            parts[0].shape,
            dtype_of(parts[0].dtype),
            [VirtualSource(part.file, part.dataset, part.stored_shape(), part.box, part.flat) for part in parts],
            {"dtype": parts[0].dtype},
        )
        for (kind, tensor), parts in by_tensor.items()
    }
