"""Checkpoints: one shard per writer and a manifest, saved on any number of ranks and restored on any other.

Floor 5: imports models and everything below, no other package of this floor. `format` is what lies on the disk,
`saving` and `restoring` the two directions, `partner` the copies in memory that survive the death of a rank,
`convert` files of other formats; beside them are the directory, its lock, listing, verification, pruning and
striping. Begin with `saving.two_phase.save` and `restoring.restore.restore`.

The names in ``__all__`` are part of the public API: see `hpcdist.checkpoint.state`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdist.checkpoint.state import Sharded, load, save

__all__ = ["Sharded", "load", "save"]


def __getattr__(name: str) -> Any:
    """Load a public name at its first use: importing a module of this package loads no MPI."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpcdist.checkpoint.state"), name)
