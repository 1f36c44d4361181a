"""Suggestions for misspelt names: the nearest known one, or all that there are."""

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return that of the ``known`` names which is most like ``name``; None where none is near."""
    from difflib import get_close_matches  # late: for errors alone

    return next(iter(get_close_matches(name, list(known), 1, cutoff)), None)


def suggestion(name: str, known: Iterable[str], more: str = "", prefix: str = "") -> str:
    """Return the cure of an unknown ``name``: the nearest of ``known``, with ``prefix``, else all, and ``more``."""
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"the nearest known is {prefix + near!r}"
    return f"known are: {', '.join([*names, *([more] if more else [])])}"
