"""Garbage collection at the start of a command: imports make hardly any garbage, and collections take time."""

import gc
from typing import Final

SELDOM: Final = (100_000, 20, 20)
USUAL: Final = gc.get_threshold()


def collect_seldom() -> None:
    """Run Python's garbage collection less often, until `collect_as_usual` is called. Local."""
    gc.set_threshold(*SELDOM)


def collect_as_usual() -> None:
    """Undo `collect_seldom`, unless other code has changed the thresholds of the garbage collection. Local."""
    if gc.get_threshold() == SELDOM:
        gc.set_threshold(*USUAL)
