"""Suggestions for misspelt names: the nearest known one, or all that there are."""

from collections.abc import Iterable
from typing import Final

# What other tools call it: the key, value or page here.
SYNONYMS: Final = {
    "batch_size": "run.global_batch",
    "lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "max_steps": "run.steps",
    "seq_len": "data.context",
    "gradient_accumulation_steps": "parallel.microbatches",
    "dp": "parallel.data",
    "pp": "parallel.pipeline",
    "tp": "parallel.tensor",
    "cp": "parallel.context",
    "ep": "parallel.expert",
    "moe": "model.experts",
    "ddp": "allreduce",
    "fsdp": "zero3",
    "ulysses": "all_to_all",
}


def synonym(name: str) -> str:
    """Return what is called ``name`` elsewhere, by its name here; "" for nothing."""
    return SYNONYMS.get(name.lower().replace("-", "_"), "")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return that of the ``known`` names which is called ``name`` elsewhere, or most like it; None: none is near."""
    from difflib import get_close_matches  # late: for errors alone

    names, here = list(known), synonym(name)
    same = [each for each in (here, here.rpartition(".")[2]) if each and each in names]
    return next(iter(same or get_close_matches(name, names, 1, cutoff)), None)


def suggestion(name: str, known: Iterable[str], more: str = "", prefix: str = "") -> str:
    """Return the cure of an unknown ``name``: the nearest of ``known``, with ``prefix``, else all, and ``more``."""
    names = list(known)
    near = nearest(name, names)
    if near is not None:
        return f"the nearest known is {prefix + near!r}"
    return f"known are: {', '.join([*names, *([more] if more else [])])}"
