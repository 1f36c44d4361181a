"""Saving in two phases: every rank writes its shard, all agree, and rank 0 makes the checkpoint visible."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import name_of
from hpcdist.arrays.filestore import Stretch
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import Range, cut
from hpcdist.checkpoint import directory as names
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.manifest import Entry
from hpcdist.checkpoint.retention import Retention
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files
from hpcdist.hdf5.files import storable


def save(
    directory: str | Path,
    step: int,
    pieces: Sequence[Piece],
    scalars: dict[str, Any],
    comm: Communicator,
    keep: int | Retention = 2,
) -> Path:
    """Save the checkpoint of ``step`` in ``directory`` and return ``directory/step-N``. Collective over ``comm``.

    ``pieces`` are this rank's share: together the ranks must cover every tensor, and what two ranks bring is written
    twice. They are only read, and may change when the call returns. ``scalars`` (JSON values) are taken from rank 0.
    The checkpoints that ``keep`` says stay (a number: the newest so many). Raises StorageError on all ranks when one
    of them cannot write; the checkpoints that were there are then untouched.
    """
    keep = Retention.of(keep)
    directory = Path(directory)
    error = ""
    if comm.rank == 0:
        try:
            names.begin(directory, step)
        except OSError as failure:
            error = f"{directory} cannot be written: {failure.strerror}"
    _agree(comm, error)
    temporary = directory / f"step-{step}.tmp"
    shard: tuple[dict[str, int], list[Entry]] = ({}, [])
    try:
        shard = _write_shard(temporary, step, pieces, comm.rank)
    except StorageError as failure:
        error = str(failure)
    outcomes = comm.allgather_object((error, *shard))
    if comm.rank == 0:
        error = next((f"rank {rank}: {outcome[0]}" for rank, outcome in enumerate(outcomes) if outcome[0]), "")
        error = error or _commit(directory, step, scalars, keep, outcomes)
        if error:
            names.discard(temporary)
    _agree(comm, error if comm.rank == 0 else "")
    return directory / f"step-{step}"


def _agree(comm: Communicator, error: str) -> None:
    """Raise StorageError on every rank when rank 0 has an error."""
    error = comm.broadcast_object(error)
    if error:
        raise StorageError(f"the checkpoint was not saved: {error}")


def _commit(directory: Path, step: int, scalars: dict[str, Any], keep: Retention, outcomes: list[Any]) -> str:
    """Make the checkpoint visible; return the reason when that fails."""
    sizes = {name: size for _, found, _ in outcomes for name, size in found.items()}
    entries = [entry for _, _, found in outcomes for entry in found]
    try:
        text = manifest.encode(manifest.build(step, len(outcomes), scalars, sizes, entries))
        names.commit(directory, step, text, keep)
    except StorageError as failure:
        return str(failure)
    except OSError as failure:
        return f"{directory} cannot be written: {failure.strerror}"
    return ""


def _write_shard(temporary: Path, step: int, pieces: Sequence[Piece], rank: int) -> tuple[dict[str, int], list[Entry]]:
    """Write this rank's shard; return its size by name, and its entries."""
    name = f"shard-{rank:05d}.h5"
    datasets: dict[str, np.ndarray | _Streamed] = {}
    attributes: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        dataset = _dataset_name(piece, datasets)
        if isinstance(piece.array, Stretch):
            datasets[dataset] = _Streamed(piece.array, _shape(piece))
        else:
            datasets[dataset] = storable(backend.to_host(piece.array)).reshape(_shape(piece))
        attributes[dataset] = {"global_shape": piece.global_shape, "box": np.array(piece.box).reshape(-1, 2)}
        attributes[dataset] |= {"flat": (piece.flat.start, piece.flat.stop), "dtype": name_of(piece.array.dtype)}
    root = {"step": step, "rank": rank}
    offsets = files.write_contiguous(
        temporary / name, datasets, root, attributes, schema="hpcdist.shard", version=manifest.VERSION
    )
    entries = [
        Entry(
            kind=piece.kind,
            tensor=piece.tensor,
            dtype=name_of(piece.array.dtype),
            shape=piece.global_shape,
            box=piece.box,
            flat=(piece.flat.start, piece.flat.stop),
            file=name,
            dataset=dataset,
            offset=offsets[dataset],
            digests=manifest.block_digests(data.reshape(-1)) if isinstance(data, np.ndarray) else tuple(data.digests),
        )
        for piece, (dataset, data) in zip(pieces, datasets.items(), strict=True)
    ]
    return {name: (temporary / name).stat().st_size}, entries


@dataclass
class _Streamed:
    """A piece that is not in memory, as `hpcdist.hdf5.files.Blocks`: its digests are taken as the blocks come by."""

    source: Stretch
    shape: tuple[int, ...]
    digests: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> np.dtype:
        """As HDF5 has it."""
        return storable(np.empty(0, self.source.dtype)).dtype

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the blocks of the manifest, one after the other in the same memory."""
        longest = manifest.BLOCK_BYTES // self.source.dtype.itemsize
        memory = np.empty(min(longest, self.source.where.size), self.source.dtype)
        for part in cut(Range(0, self.source.where.size), longest):
            block = memory[: part.size]
            self.source.read(part, block)
            self.digests += manifest.block_digests(block)
            yield storable(block)


def _dataset_name(piece: Piece, taken: Container[str]) -> str:
    """Return the tensor's name; a further piece of the same tensor gets the place where it begins behind it."""
    name = piece.name
    if name in taken:
        corner = ",".join(str(start) for start, _ in piece.box)
        name = f"{name}@{corner}+{piece.flat.start}"
    assert name not in taken, f"{name} is saved twice by one rank"
    return name


def _shape(piece: Piece) -> tuple[int, ...]:
    """Return how a piece is stored: a whole tensor or box in its shape, a flat part of one in one dim."""
    if piece.flat != Range(0, piece.box_size):
        return (piece.flat.size,)
    if piece.box == whole_box(piece.global_shape):
        return piece.global_shape
    return tuple(stop - start for start, stop in piece.box)
