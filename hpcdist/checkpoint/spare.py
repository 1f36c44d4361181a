"""Spare memory for a snapshot: taken at the first save, kept for the next ones (local)."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hpcdist.arrays import backend, device, staging
from hpcdist.arrays.filestore import Stretch
from hpcdist.arrays.ledger import Ledger
from hpcdist.arrays.ranges import ALIGN_BYTES, align_up
from hpcdist.checkpoint.sources import Source, held
from hpcdist.checkpoint.writers import Delivery
from hpcdist.errors import MissingCapabilityError


class Spare:
    """As many bytes as the state that this rank writes; pinned where that comes from a GPU."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._memory.nbytes

    def fill(self, delivery: Delivery) -> list[Source]:
        """Copy all that ``delivery`` brings, and return where it lies: the state may change from then on.

        On the writer of a group; the others `Delivery.bring` meanwhile.
        """
        sizes = [slot.nbytes for slot in delivery.slots]
        self._reserve(sum(align_up(size, ALIGN_BYTES) for size in sizes), delivery.arrays)
        places, start = [], 0
        for size in sizes:
            places.append(self._memory[start : start + size])
            start += align_up(size, ALIGN_BYTES)
        own = len(delivery.arrays)
        copies = [_copy(array, place) for array, place in zip(delivery.arrays, places[:own], strict=True)]
        for source, place in zip(delivery.sources()[own:], places[own:], strict=True):
            _take(source(), place)
        for event in (copy for copy in copies if copy is not None):
            event.synchronize()
        return [partial(held, place) for place in places]

    def _reserve(self, nbytes: int, arrays: Sequence[Any]) -> None:
        if self._memory.nbytes >= nbytes:
            return
        self._memory = np.empty(0, np.uint8)  # given back before more is taken
        self._memory = _pinned(nbytes) if any(map(backend.is_device, arrays)) else np.empty(nbytes, np.uint8)
        if self._ledger is not None:
            self._ledger.track(self._memory, "checkpoint")


def _pinned(nbytes: int) -> np.ndarray:
    """Return page-locked memory, or where that is refused, pageable memory: slower, otherwise the same."""
    try:
        return np.frombuffer(device.pinned(nbytes), np.uint8, nbytes)
    except MissingCapabilityError:
        return np.empty(nbytes, np.uint8)


def _copy(array: Any, place: np.ndarray) -> Any:
    """Copy ``array`` into the bytes ``place``; from a GPU, return the event after which they are there."""
    if isinstance(array, np.ndarray):
        place.view(array.dtype)[...] = array
    elif isinstance(array, Stretch):
        _take(held(array), place)
    elif place.size:
        return staging.begin_to_host(array, place.view(array.dtype))
    return None


def _take(blocks: Iterator[np.ndarray], place: np.ndarray) -> None:
    start = 0
    for block in blocks:
        place[start : start + block.size] = block
        start += block.size
