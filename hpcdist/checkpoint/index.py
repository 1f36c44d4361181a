"""The index of a checkpoint: ``index.h5``, in which every tensor is whole, whatever shards it lies in (local).

For people and tools. A restore does not look at it, and a checkpoint whose index could not be written is complete.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

from hpcdist.arrays.dtypes import dtype_of
from hpcdist.checkpoint import checks, manifest
from hpcdist.checkpoint.manifest import Entry, Index
from hpcdist.checkpoint.slots import Slot
from hpcdist.errors import StorageError
from hpcdist.hdf5 import virtual
from hpcdist.hdf5.virtual import Part, Whole

SCHEMA: Final = "hpcdist.index"
MOST_PIECES: Final = 50_000  # HDF5 takes long for more, and so do its readers


def write(directory: Path, entries: Iterable[Entry], step: int) -> Index | None:
    """Write the index of ``entries`` into ``directory``; None, and a word on stderr, where that was not possible."""
    pieces = [entry for entry in entries if entry.nbytes]
    if len(pieces) > MOST_PIECES:
        return None
    path = directory / checks.INDEX
    try:
        virtual.write(path, _wholes(pieces), {"step": step}, schema=SCHEMA, version=manifest.VERSION)
        data = path.read_bytes()
    except (StorageError, OSError) as error:
        print(f"hpcdist: the checkpoint of step {step} has no {checks.INDEX}: {error}", file=sys.stderr, flush=True)
        return None
    return Index(checks.INDEX, len(data), xxhash.xxh3_128_hexdigest(data))


def _wholes(entries: Iterable[Entry]) -> dict[str, Whole]:
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.kind, entry.tensor), []).append(entry)
    return {
        f"{kind}/{tensor}": Whole(
            parts[0].shape, dtype_of(parts[0].dtype), [_part(part) for part in parts], {"dtype": parts[0].dtype}
        )
        for (kind, tensor), parts in found.items()
    }


def _part(entry: Entry) -> Part:
    slot = Slot(entry.kind, entry.tensor, entry.dtype, entry.shape, entry.box, entry.flat)
    return Part(entry.file, entry.dataset, slot.stored_shape(), entry.box, entry.flat)
