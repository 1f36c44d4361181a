"""Safetensors format: an 8-byte header length, a JSON header, and the bytes of the tensors without gaps.

Source: https://github.com/huggingface/safetensors. A model of several files has a ``model.safetensors.index.json``,
which maps tensor names to files.
"""

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.convert.exporting import (
    METADATA_KEY,
    export_metadata,
    key_of,
    new_files,
    write_file,
    write_tensors,
)
from hpcdist.checkpoint.listing import PARAMETERS, StoredTensor
from hpcdist.checkpoint.manifest import Manifest, unique_keys
from hpcdist.hdf5.overlay import pread_all, pwrite_all
from hpcdist.reporting import regular

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the library; used for an index, too
MAX_TENSORS: Final = 1 << 18
SHARD_BYTES: Final = 5 << 30
_CODES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}
DTYPES: Final = {code: name for name, code in _CODES.items()}


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a file. ``start``: byte offset of the tensor's first element."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def write(
    checkpoint: Path, loaded: Manifest, tensors: Sequence[StoredTensor], out: Path, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write ``tensors`` to one or more safetensors files. Return a list of paths, with the path of the index file last.

    ``checkpoint``: directory to read. ``loaded``: manifest of the checkpoint. ``out``: path of the file. The names of
    several files get numbers, and an index file is added. ``shard_bytes``: see `split_into_files`.
    """
    groups = split_into_files(tensors, shard_bytes)
    stem = out.name.removesuffix(SUFFIX)
    numbered = [out.with_name(f"{stem}-{k + 1:05d}-of-{len(groups):05d}{SUFFIX}") for k in range(len(groups))]
    paths = [out] if len(groups) == 1 else numbered
    index = [out.with_name(stem + INDEX_SUFFIX)] if len(groups) > 1 else []
    # "pt" means row-major tensors, which all writers use; some readers refuse files without it.
    metadata = {"format": "pt", METADATA_KEY: export_metadata(loaded)}
    with new_files([*paths, *index]) as written:
        for path, group in zip(paths, groups, strict=True):
            head, offsets = header(group, metadata)

            def body(fd: int, head: bytes = head, offsets: list[tuple[StoredTensor, int]] = offsets) -> None:
                pwrite_all(fd, head, 0)
                write_tensors(checkpoint, fd, offsets)

            write_file(written[path], body)
        for path in index:
            weight_map = {
                key_of(tensor): file.name for file, group in zip(paths, groups, strict=True) for tensor in group
            }
            total = sum(tensor.nbytes for tensor in tensors)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
            write_file(written[path], lambda fd, text=text: pwrite_all(fd, text.encode(), 0))  # type: ignore[misc]
    return [*paths, *index]


def split_into_files(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Split ``tensors`` into lists of at most ``max_bytes`` bytes. A larger tensor gets a separate list."""
    groups: list[list[StoredTensor]] = [[]]
    group_bytes = 0
    for tensor in tensors:
        if groups[-1] and group_bytes + tensor.nbytes > max_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += tensor.nbytes
    return groups


def header(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[StoredTensor, int]]]:
    """Return (bytes of a file header with ``metadata``, list of (tensor, byte offset in the file)) for ``tensors``."""
    # Tensors with the widest elements come first, so that every tensor is aligned to its element size without holes.
    ordered = sorted(tensors, key=lambda item: -dtype_of(item.dtype).itemsize)
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, position = [], 0
    for tensor in ordered:
        starts.append(position)
        end = position + tensor.nbytes
        entries[key_of(tensor)] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, [(tensor, len(head) + start) for tensor, start in zip(ordered, starts, strict=True)]


def read_header(fd: int) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """Return ({tensor name: `TensorLocation`}, {name: text} of the metadata) of the file ``fd``. Raises ValueError."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(pread_all(fd, 8, 0), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(
            f"the header of {length} bytes is too long or too short for a file of {size} bytes; copy or save "
            "the file again"
        )
    entries = json.loads(pread_all(fd, length, 8), object_pairs_hook=unique_keys)
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object; copy or save the file again")
    if len(entries) > MAX_TENSORS:
        raise ValueError(f"the header names {len(entries)} tensors, expected at most {MAX_TENSORS}; split the file")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("__metadata__ in the header must map names to strings; save the file again")
    locations = {name: _location(name, entry, 8 + length) for name, entry in entries.items()}
    position = 8 + length
    for name, location in sorted(locations.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if location.start != position:
            raise ValueError(
                f"tensor {name} begins at byte {location.start}, expected {position}; save the file again without a "
                "hole or an overlap between tensors"
            )
        position += location.nbytes
    if position != size:
        raise ValueError(
            f"tensors end at byte {position}, expected the end of the file at byte {size}; copy or save the file again"
        )
    return locations, metadata


def _location(name: str, entry: Any, begin: int) -> TensorLocation:
    try:
        code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_valid = all(type(number) is int and 0 <= number < 1 << 60 for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError):
        raise ValueError(
            f"tensor {name}: expected dtype, shape and data_offsets, got {str(entry)[:80]}; save the file again"
        ) from None
    if not is_valid or code not in DTYPES:
        raise ValueError(
            f"tensor {name}: dtype {str(code)[:20]} with shape {str(shape)[:80]} is not supported; use a dtype "
            f"of {', '.join(DTYPES)}, and sizes of at least 0"
        )
    nbytes = math.prod(shape) * dtype_of(DTYPES[code]).itemsize
    if stop - start != nbytes:
        raise ValueError(
            f"tensor {name} has {stop - start} bytes in data_offsets, but {code} {list(shape)} needs {nbytes}; save "
            "the file again"
        )
    return TensorLocation(DTYPES[code], shape, begin + start, nbytes)


class SafetensorsReader:
    """Reader of a safetensors file, or of all files listed in an index file. Damage raises ValueError or OSError."""

    def __init__(self, path: Path) -> None:
        self.tensors: list[StoredTensor] = []
        self.left_out: list[str] = []
        self.metadata = ""
        self._locations: list[tuple[int, TensorLocation]] = []
        with ExitStack() as files:
            for file, listed in _files_of(path).items():
                fd = regular.open_regular(file)
                files.callback(os.close, fd)
                self._add(fd, file, listed)
            self.close = files.pop_all().close

    def _add(self, fd: int, file: Path, listed: Collection[str] | None) -> None:
        # ``listed``: tensors that the index expects in ``file``, or None without an index
        try:
            locations, metadata = read_header(fd)
        except ValueError as error:
            if listed is None:
                raise
            raise ValueError(f"{file.name}: {error}") from error
        if missing := sorted(set(listed or ()) - set(locations)):
            raise ValueError(
                f"{file.name} has no tensor {missing[0]}, which the index lists there; copy the file again"
            )
        if listed is not None:
            self.left_out += [name for name in locations if name not in listed]
            locations = {name: location for name, location in locations.items() if name in listed}
        exported = metadata.get(METADATA_KEY, "")
        self.metadata = self.metadata or exported
        for key, location in locations.items():
            kind, slash, name = key.partition("/")
            kind, name = (kind, name) if exported and slash else (PARAMETERS, key)
            self.tensors.append(StoredTensor(kind, name, location.dtype, location.shape))
            self._locations.append((fd, location))

    def read(self, index: int, elements: Range, out: np.ndarray) -> None:
        fd, location = self._locations[index]
        data = pread_all(fd, out.nbytes, location.start + elements.start * out.itemsize)
        if len(data) != out.nbytes:
            raise ValueError(
                f"{out.nbytes} bytes of tensor {self.tensors[index].name} were requested, but the file ends after "
                f"{len(data)} of these bytes; copy the file again"
            )
        out.view(np.uint8).data[:] = data


def _files_of(path: Path) -> dict[Path, set[str] | None]:
    # Returns {file: names of its tensors according to the index, or None without an index}.
    if not path.name.endswith(INDEX_SUFFIX):
        return {path: None}
    index = regular.json_value(path, MAX_HEADER_BYTES)
    weight_map = index["weight_map"] if isinstance(index, dict) else {}
    names: dict[str, set[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise ValueError(
                f"the index lists {str(name)[:80]!r}, expected names of files in its directory; correct the index"
            )
        listed = names.setdefault(name, set())
        assert listed is not None
        listed.add(tensor)
    if not names:
        raise ValueError("the index lists no files, expected names of files in its directory; correct the index")
    return {path.with_name(name): listed for name, listed in sorted(names.items())}
