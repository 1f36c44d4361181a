"""Virtual datasets (VDS): whole tensors composed of datasets in other files, for h5ls, h5dump, h5py and viewers.

If a file is missing, HDF5 silently shows the fill value: NaN for floats, the minimum for signed and the maximum for
unsigned integers.
"""

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdist.errors import StorageError
from hpcdist.hdf5.datasets import Box, DatasetMaker, Region
from hpcdist.hdf5.files import CHECKSUMMED, FAILURES, storable
from hpcdist.hdf5.overlay import Overlay
from hpcdist.reporting import atomic


@dataclass(frozen=True)
class VirtualSource:
    """Dataset in another file that stores some elements of a virtual dataset, and the region of these elements."""

    file: str  # relative to the directory of the virtual dataset's file
    dataset: str
    shape: tuple[int, ...]
    box: Box  # region of the virtual dataset: (start, stop) of each dimension
    flat: tuple[int, int]  # (start, stop) of the supplied elements, in row-major order within `box`


@dataclass(frozen=True)
class VirtualDataset:
    """Virtual HDF5 dataset: its elements are stored in datasets of other files, the ``parts``."""

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: Sequence[VirtualSource]
    attributes: Mapping[str, Any]


def rectangles(extent: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that cover elements ``start`` to ``stop - 1`` of an array of shape ``extent``, in ascending order."""
    if start >= stop:
        return
    if not extent:
        yield ()
        return
    # The range is the tail of a row of dim 0, whole rows, and the head of a row. Tail and head are ranges of an array
    # with one dim less; the whole rows are one box. `inner` is the number of elements per row.
    inner = math.prod(extent[1:])
    first, last = start // inner, stop // inner
    if start % inner:
        end = min(stop - first * inner, inner)
        yield from (((first, first + 1), *box) for box in rectangles(extent[1:], start - first * inner, end))
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in extent[1:]))
    if first <= last:
        yield from (((last, last + 1), *box) for box in rectangles(extent[1:], 0, stop - last * inner))


def write(
    path: str | os.PathLike[str],
    datasets: Mapping[str, VirtualDataset],
    attributes: Mapping[str, Any],
    *,
    schema: str,
    version: int,
) -> None:
    """Write ``datasets``, {name: `VirtualDataset`}, to a new HDF5 file, and fsync it. Raises StorageError."""
    path = Path(path)
    try:
        with Overlay(path, create=True) as overlay:
            with h5py.File(overlay, "w", libver=CHECKSUMMED) as file:
                file.attrs.update({"schema": schema, "schema_version": version, **attributes})
                maker = DatasetMaker(file)
                for name, dataset in datasets.items():
                    if not dataset.shape:  # HDF5 has no virtual scalars
                        file[name] = h5py.ExternalLink(dataset.parts[0].file, dataset.parts[0].dataset)
                        continue
                    regions = (region for part in dataset.parts for region in _regions(part))
                    dtype, fill = _stored(dataset.dtype)
                    maker.virtual(name, dataset.shape, dtype, regions, fill, dataset.attributes)
            overlay.commit(wait=False)
            overlay.fsync()
    except FAILURES as error:
        atomic.discard(path)
        raise StorageError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


@functools.cache
def _stored(dtype: np.dtype) -> tuple[np.dtype, np.ndarray]:
    # Dtype in the file, and fill value.
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return storable(np.empty(0, dtype)).dtype, np.array([bounds.min or bounds.max], dtype)
    fill = storable(np.array([np.nan]).astype(dtype))
    return fill.dtype, fill


def _regions(part: VirtualSource) -> Iterator[Region]:
    extent = tuple(stop - start for start, stop in part.box)
    if part.shape == extent:
        yield part.box, part.file, part.dataset, part.shape, tuple((0, size) for size in extent)
        return
    done = 0
    for box in rectangles(extent, *part.flat):
        size = math.prod(stop - start for start, stop in box)
        spot = tuple((origin + start, origin + stop) for (origin, _), (start, stop) in zip(part.box, box, strict=True))
        yield spot, part.file, part.dataset, part.shape, ((done, done + size),)
        done += size
