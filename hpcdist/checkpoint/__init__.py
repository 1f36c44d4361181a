"""Checkpoints: one shard per writer and a manifest, saved on any number of ranks and restored on any other number.

Floor 5: imports models and everything below, no other package of this floor. `manifest` and `shard` define the files.
`partner` keeps in-memory copies that survive the death of a rank. Start with `two_phase.save` and
`restoring.restore.restore`. Public API: ``__all__``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdist.checkpoint.state import Sharded, finish_saves, load, save

__all__ = ["Sharded", "finish_saves", "load", "save"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing this package does not load MPI."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpcdist.checkpoint.state"), name)
