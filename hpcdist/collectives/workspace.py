"""Scratch memory of the algorithms, reused from call to call.

A fresh array in every step would cause page faults again and again, and caches of registered memory in the message
layer are keyed by address. Each thread has its own, so that a collective may run beside another one.
"""

import threading
from typing import TypeAlias

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.gpu import staging
from hpcdist.arrays.memory import Ledger

Buffers: TypeAlias = dict[tuple[str, str], Array]  # (name, "cpu" or "gpu") -> bytes


class _Workspace(threading.local):
    def __init__(self) -> None:
        self.arrays: Buffers = {}
        self.ledger: Ledger | None = None


_here = _Workspace()


def scratch(name: str, size: int, dtype: np.dtype, like: Array) -> Array:
    """Return ``size`` uninitialised elements where ``like`` lives; the next call of this name overwrites them (local).

    Callers that may be active at once use different names.
    """
    return scratch_in(_here.arrays, name, size, dtype, like)


def scratch_in(kept: Buffers, name: str, size: int, dtype: np.dtype, like: Array) -> Array:
    """Return what `scratch` does, out of ``kept``, which belongs to the caller (local)."""
    nbytes = size * dtype.itemsize
    key = (name, "gpu" if backend.is_device(like) else "cpu")
    if key not in kept or kept[key].nbytes < nbytes:
        kept.pop(key, None)  # not both at once
        kept[key] = count_in_ledger(backend.empty(nbytes, np.dtype(np.uint8), key[1]))
    return kept[key][:nbytes].view(dtype)


def count_in_ledger(array: Array) -> Array:
    """Enter ``array`` in this thread's ledger, if it has one, and return it (local)."""
    return array if _here.ledger is None else _here.ledger.track(array, "communication")


def account(ledger: Ledger | None) -> None:
    """Count the scratch of this thread, held now or later, as "communication" of ``ledger``; None stops (local)."""
    if ledger is not None and ledger is not _here.ledger:
        for array in _here.arrays.values():
            ledger.track(array, "communication")
    _here.ledger = ledger
    staging.account(ledger)


def ledger() -> Ledger | None:
    """Return the ledger that counts the scratch of this thread, for a thread that works for it (local)."""
    return _here.ledger


def release() -> None:
    """Drop the scratch of this thread, and pinned memory that nobody uses (local)."""
    _here.arrays.clear()
    staging.release()
