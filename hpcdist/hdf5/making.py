"""Datasets and attributes in great number, by the low-level calls of h5py: a tenth of the time of its own ones.

Types, spaces and property lists are made once for a file. What is made is the same as by ``attrs[...] = ...`` and
``create_dataset``: strings are of variable length in UTF-8, numbers int64.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t

Box = tuple[tuple[int, int], ...]
Region = tuple[Box, str, str, Sequence[int], Box]  # box of the whole; file, dataset, its shape, and box in that


class Maker:
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
