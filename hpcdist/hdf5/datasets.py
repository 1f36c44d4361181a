"""Dataset creation by the low-level calls of h5py, and checks of the filters that a dataset needs.

`DatasetMaker` makes datasets and attributes in great number in a tenth of the time of h5py's own calls: types, spaces
and property lists are made once for a file. What it makes is the same as by ``attrs[...] = ...`` and
``create_dataset``: strings are of variable length in UTF-8, numbers int64.

`check_filters` finds the filters that this Python cannot read through, and names the package that brings them. HDF5
itself has deflate, shuffle and such, and h5py lzf; others are plugins, most of them in the package hdf5plugin.
"""

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import h5py
import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t

from hpcdist.errors import MissingCapabilityError
from hpcdist.reporting.regular import BROKEN_LIBRARY_ERRORS

Box = tuple[tuple[int, int], ...]
Region = tuple[Box, str, str, Sequence[int], Box]  # box of the whole; file, dataset, its shape, and box in that


class DatasetMaker:
    """Makes datasets in the open ``file``, and the groups that their names need."""

    def __init__(self, file: h5py.File) -> None:
        self._file = file
        self._links = h5p.create(h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._links.set_char_encoding(h5t.CSET_UTF8)
        self._contiguous = h5p.create(h5p.DATASET_CREATE)
        self._contiguous.set_layout(h5d.CONTIGUOUS)
        self._contiguous.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._contiguous.set_fill_time(h5d.FILL_TIME_NEVER)
        self._contiguous.set_obj_track_times(False)  # the same state is the same bytes, whenever it is saved
        self._types: dict[Any, h5t.TypeID] = {}
        self._spaces: dict[tuple[int, ...], h5s.SpaceID] = {}
        self._text = h5py.string_dtype()
        self._text_type = h5t.py_create(self._text, logical=True)
        self._text_in_memory = h5t.py_create(self._text)

    def contiguous(self, name: str, shape: Sequence[int], dtype: np.dtype, attributes: Mapping[str, Any]) -> int:
        """Make a dataset whose bytes have a place in the file, and are not written; return that place."""
        made = h5d.create(
            self._file.id, name.encode(), self._type(dtype), self._space(shape), self._contiguous, self._links
        )
        self._describe(made, attributes)
        return int(made.get_offset() or 0)  # an empty dataset has no place

    def virtual(
        self,
        name: str,
        shape: Sequence[int],
        dtype: np.dtype,
        regions: Iterable[Region],
        fill: np.ndarray,
        attributes: Mapping[str, Any],
    ) -> None:
        """Make a virtual dataset out of ``regions``; where one cannot be read, its elements are that of ``fill``."""
        plan = h5p.create(h5p.DATASET_CREATE)
        plan.set_layout(h5d.VIRTUAL)
        for box, file, dataset, source_shape, source_box in regions:
            here, there = self._boxed(shape, box), self._boxed(source_shape, source_box)
            plan.set_virtual(here, file.encode(), dataset.encode(), there)
        plan.set_fill_value(fill)
        made = h5d.create(self._file.id, name.encode(), self._type(dtype), self._space(shape), plan, self._links)
        self._describe(made, attributes)

    def _type(self, dtype: np.dtype) -> h5t.TypeID:
        if dtype not in self._types:
            self._types[dtype] = h5t.py_create(dtype, logical=True)
        return self._types[dtype]

    def _describe(self, made: h5d.DatasetID, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            if isinstance(value, str):
                attribute = h5a.create(made, name.encode(), self._text_type, self._space(()))
                attribute.write(np.array(value, dtype=self._text), mtype=self._text_in_memory)
                continue
            numbers = np.asarray(value, np.int64)
            attribute = h5a.create(made, name.encode(), self._type(numbers.dtype), self._space(numbers.shape))
            if numbers.size:
                attribute.write(numbers)

    def _space(self, shape: Sequence[int]) -> h5s.SpaceID:
        """Return the space of that shape, all of it selected."""
        key = tuple(shape)
        if key not in self._spaces:
            self._spaces[key] = h5s.create_simple(key) if key else h5s.create(h5s.SCALAR)
        return self._spaces[key]

    def _boxed(self, shape: Sequence[int], box: Box) -> h5s.SpaceID:
        """Return a space of that shape in which ``box`` is selected."""
        if all(start == 0 and stop == size for (start, stop), size in zip(box, shape, strict=True)):
            return self._space(shape)
        space = h5s.create_simple(tuple(shape))
        space.select_hyperslab(tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
        return space


FILTER_PACKAGE: Final = "hdf5plugin"
FILTER_NAMES: Final = {
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32018: "fcidecomp",
    32024: "sz3",
    32026: "blosc2",
    32028: "sperr",
    32033: "htj2k",
}  # by the numbers that the HDF Group has registered; those that hdf5plugin has


def check_filters(dataset: h5py.Dataset) -> None:
    """Raise MissingCapabilityError where ``dataset`` has a filter that is not there, with what brings it.

    The package is imported where it is installed, which makes its filters known. An optional filter that was not there
    when the dataset was written, either, is not needed: its elements can be read.
    """
    if not _missing_filters(dataset):
        return
    problem = _import_filters()
    missing = _missing_filters(dataset)
    if not missing or _is_readable(dataset):
        return
    code, name = next(iter(missing.items()))
    what = (
        f"{dataset.file.filename}: dataset {dataset.name} has the HDF5 filter {FILTER_NAMES.get(code, name)} ({code})"
    )
    if code in FILTER_NAMES and problem:
        raise MissingCapabilityError(f"{what}, for which {sys.executable} needs the module {FILTER_PACKAGE}: {problem}")
    raise MissingCapabilityError(f"{what}, which is not known here: set HDF5_PLUGIN_PATH to the folder of its plugin")


def _missing_filters(dataset: h5py.Dataset) -> dict[int, str]:
    """Return the filters of ``dataset`` that cannot decode here, with the names that its writer gave them."""
    properties = dataset.id.get_create_plist()
    found = {}
    for place in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(place)
        decodes = h5py.h5z.filter_avail(code) and (
            h5py.h5z.get_filter_info(code) & h5py.h5z.FILTER_CONFIG_DECODE_ENABLED
        )
        if not decodes:
            found[code] = name.decode(errors="replace").split(" ")[0][:40]
    return found


def _import_filters() -> str:
    """Import the package; return what to do where that does not work, "" where it does."""
    try:
        importlib.import_module(FILTER_PACKAGE)
    except ModuleNotFoundError:
        return "pip install 'hpcdist[hdf5]'"
    except (ImportError, *BROKEN_LIBRARY_ERRORS) as error:  # as one that was made for another HDF5 than that of h5py
        return f"it is there, and cannot be imported: {error}"
    return ""


def _is_readable(dataset: h5py.Dataset) -> bool:
    """Whether the first element can be read."""
    try:
        dataset[(0,) * len(dataset.shape)]
    except (OSError, RuntimeError, ValueError, IndexError):
        return not dataset.size  # of an empty one there is nothing to read
    return True
