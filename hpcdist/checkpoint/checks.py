"""What must hold of a manifest before anything that it says is used: whoever wrote it may have meant harm.

The types are right already. Here every number is bounded by the others: a box lies inside its tensor, a stretch inside
its box, its bytes inside a shard, no two of them overlap, and a shard inside the directory. Sizes that are multiplied
stay below 2^60, so that nothing overflows; how much memory a restore takes follows from what is wanted, never from
what a manifest claims. Pure: no file is looked at.
"""

import math
import re
from typing import TYPE_CHECKING, Final

from hpcdist.arrays.dtypes import FLOATS, INTEGERS, dtype_of

if TYPE_CHECKING:
    from hpcdist.checkpoint.manifest import Entry, Manifest

MOST: Final = 1 << 60  # elements of a tensor, and bytes of a file
MOST_DIMS: Final = 32  # of HDF5
LONGEST_NAME: Final = 1024
INDEX: Final = "index.h5"
_SHARD: Final = re.compile(r"([0-9a-f]{2,8}/)?shard-[0-9]{5,9}(-of-[0-9]{1,18})?\.h5")
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


def problem(manifest: "Manifest") -> str:
    """Return why ``manifest`` cannot be used, as the rest of a sentence about its file; "" when it can."""
    if not (0 <= manifest.step < MOST and 1 <= manifest.world < MOST):
        return f"is not valid: step {_short(manifest.step)} of {_short(manifest.world)} ranks"
    for name, size in manifest.files.items():
        if not _SHARD.fullmatch(name):
            return f"names {_short(name)!r}, which is no shard of a checkpoint"
        if not 0 <= size < MOST:
            return f"is not valid: {name} with {_short(size)} bytes"
    index = manifest.index
    if index is not None and not (index.file == INDEX and 0 <= index.nbytes < MOST and _DIGEST.fullmatch(index.digest)):
        return f"is not valid: the index {_short(index.file)!r}"
    for name, digest in manifest.outside.items():
        if name not in manifest.files or not _DIGEST.fullmatch(digest):
            return f"is not valid: {_short(name)!r} has the digest {_short(digest)!r}"
    for entry in (*manifest.pieces, *manifest.unused):
        reason = _why_not(entry, manifest.files, manifest.block_bytes)
        if reason:
            return f"is not valid: {_short(entry.name)}: {reason}"
    return _overlap(manifest)


def _why_not(entry: "Entry", files: dict[str, int], block_bytes: int) -> str:
    """Return what is wrong with one piece."""
    if not 0 < len(entry.kind) + len(entry.tensor) + len(entry.dataset) <= 3 * LONGEST_NAME:
        return f"names of more than {LONGEST_NAME} letters"
    if not (entry.kind + entry.tensor + entry.dataset).isprintable():
        return "names that are no text"
    if entry.dtype not in FLOATS | INTEGERS:
        return f"no dtype is called {_short(entry.dtype)!r}"
    if len(entry.shape) > MOST_DIMS or min(entry.shape, default=0) < 0 or math.prod(map(_one, entry.shape)) > MOST:
        return f"the shape {_short(entry.shape)}"
    if len(entry.box) != len(entry.shape) or not all(
        0 <= start <= stop <= size for (start, stop), size in zip(entry.box, entry.shape, strict=True)
    ):
        return f"the box {_short(entry.box)} is not inside {_short(entry.shape)}"
    if not 0 <= entry.flat[0] <= entry.flat[1] <= math.prod(stop - start for start, stop in entry.box):
        return f"elements {_short(entry.flat)} are not inside the box {_short(entry.box)}"
    if entry.file not in files:
        return f"it lies in {_short(entry.file)!r}, which is no shard of this checkpoint"
    nbytes = (entry.flat[1] - entry.flat[0]) * dtype_of(entry.dtype).itemsize
    if not 0 <= entry.offset <= files[entry.file] - nbytes:
        return f"{nbytes} bytes at {_short(entry.offset)} are not inside {entry.file} of {files[entry.file]} bytes"
    if len(entry.digests) != -(-nbytes // block_bytes) or not all(map(_DIGEST.fullmatch, entry.digests)):
        return f"{len(entry.digests)} digests of {nbytes} bytes"
    return ""


def _overlap(manifest: "Manifest") -> str:
    """Return which pieces share bytes of a file; "" where none do."""
    placed = sorted((e.file, e.offset, e.nbytes, e.name) for e in (*manifest.pieces, *manifest.unused) if e.nbytes)
    for (file, start, size, name), (other_file, other, _, other_name) in zip(placed, placed[1:], strict=False):
        if file == other_file and start + size > other:
            return f"is not valid: {_short(name)} and {_short(other_name)} overlap in {file}"
    return ""


def _one(size: int) -> int:
    """An empty dim must not hide how long the others are."""
    return max(1, size)


def _short(value: object) -> str:
    """Return ``value`` for a message, however long it was forged."""
    if isinstance(value, int) and abs(value) > 1 << 70:
        return "a number of more than 70 bits"
    if isinstance(value, tuple):
        return "[" + ", ".join(_short(item) for item in value[:4]) + (", ...]" if len(value) > 4 else "]")
    text = str(value).encode("ascii", "backslashreplace").decode()  # a terminal must not obey it
    return text if len(text) <= 200 else text[:200] + "..."
