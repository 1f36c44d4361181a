"""Suggestions for misspelt names: the nearest known name, or all known names."""

from collections.abc import Iterable
from typing import Final

# Names in other tools, and the corresponding key, value or page of hpcdist.
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
    """Return hpcdist's equivalent of ``name``, a name in other tools such as "lr", or "" if there is no equivalent."""
    return SYNONYMS.get(name.lower().replace("-", "_"), "")


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate that is a `synonym` of ``name``, else the most similar one above ``cutoff``, or None."""
    from difflib import get_close_matches  # late: needed only for errors

    names, here = list(candidates), synonym(name)
    same = [alias for alias in (here, here.rpartition(".")[2]) if alias and alias in names]
    return next(iter(same or get_close_matches(name, names, 1, cutoff)), None)


def suggestion(name: str, candidates: Iterable[str], ending: str = "") -> str:
    """Return a hint for an unknown ``name``. It names the nearest candidate, or lists all candidates and ``ending``."""
    names = list(candidates)
    near = nearest(name, names)
    if near is not None:
        return f"the nearest known is {near!r}"
    return f"known are: {', '.join([*names, *([ending] if ending else [])])}"
