"""Garbage collection while a command starts: hardly anything that imports make is garbage, and looking takes time."""

import gc
from typing import Final

SELDOM: Final = (100_000, 20, 20)
USUAL: Final = gc.get_threshold()


def collect_seldom() -> None:
    """Look for garbage seldom, until `collect_as_usual` (local)."""
    gc.set_threshold(*SELDOM)


def collect_as_usual() -> None:
    """Undo `collect_seldom`, unless somebody has set other thresholds since (local)."""
    if gc.get_threshold() == SELDOM:
        gc.set_threshold(*USUAL)
