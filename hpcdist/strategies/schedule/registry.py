"""The table of schedules by name: passes, requirements, peak activations and bubbles. Without arrays or MPI.

Largest numbers of micro-batches at once (`Peak`) on rank r of p, with m micro-batches and v chunks per rank; G is the
`interleaved_group`:

    schedule      live                                     held           both
    sequential    1                                        0              = live
    gpipe         m                                        0              = live
    1f1b          min(p - r, m)                            0              = live
    interleaved   min(2 (p-1-r) + (v-1) G + 1, m v)        0              = live
    zb-h1         min(p - r, m)                            min(r+1, m)    min(p, m)
    zb-h2         min(2 (p - r) - 1, m)                    min(2r+1, m)   min(2p - 1, m)
    zb-v          min(2 p, 2 m, m + r + 1)                 2r+1           = live      held: less for m < 2p - 1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.operations import StagePlacement, folded, looped
from hpcdist.strategies.schedule.passes import (
    Passes,
    Peak,
    gpipe,
    interleaved,
    interleaved_group,
    one_f_one_b,
    sequential,
    zb_h1,
    zb_h2,
    zb_v,
)


def bubble(
    schedule: str,
    stages: int,
    microbatches: int,
    *,
    chunks: int = 1,
    forward_s: float = 1.0,
    input_s: float = 1.0,
    weight_s: float = 1.0,
) -> float | None:
    """Return the fraction of a step in which the slowest rank is idle, or None if ``schedule`` has no formula.

    ``stages``: number of pipeline ranks.
    """
    # Fraction of the time from a rank's first to its last pass. Symbols: p ranks (``stages``), m micro-batches, v
    # chunks per rank; F, I, W: seconds of forward pass, input gradient (B in the papers) and weight gradients. Equal
    # stages and free messages are assumed. Papers: arXiv:1811.06965 (gpipe), 2104.04473 (1f1b, interleaved), 2401.10241
    # (zb-h1, zb-h2), 2405.15362 (zb-v).
    later, whole_s = stages - 1, forward_s + input_s + weight_s
    if schedule in ("gpipe", "1f1b"):
        return later / (microbatches + later)
    if schedule == "interleaved":
        return later / (chunks * microbatches + later) if microbatches % stages == 0 else None
    if schedule == "zb-h1" and weight_s <= input_s and microbatches >= stages:
        return _share(later * (forward_s + input_s - weight_s), microbatches * whole_s)
    if schedule in ("zb-h2", "zb-v") and forward_s == input_s == weight_s and microbatches >= 2 * stages - 1:
        return (
            0.0 if schedule == "zb-v" else _share(later * (forward_s + input_s - 2 * weight_s), microbatches * whole_s)
        )
    return None


def _share(idle_s: float, busy_s: float) -> float:
    return idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0


FILE: Final = "file"  # a schedule read from a file


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Built-in pipeline schedule: passes, peak memory, and the supported numbers of chunks and micro-batches."""

    # ``passes``, ``peak``: functions of (rank, ranks, micro-batches, chunks).
    passes: Callable[[int, int, int, int], Passes]
    peak: Callable[[int, int, int, int], Peak]
    least: int = 1  # minimum number of chunks per rank
    most: int | None = 1  # maximum number of chunks per rank; None: no maximum
    folded: bool = False  # chunks are placed in a V shape, not round-robin
    splits: bool = False  # input and weight gradients are separate passes
    pipelines: bool = True  # supports several ranks
    fewest: Callable[[int], int] = lambda ranks: 1  # minimum number of micro-batches

    def place(self, parts: Sequence[range], ranks: int) -> StagePlacement:
        """Return the placement of model chunks on ``ranks`` ranks. ``parts``: range of layers of each chunk."""
        return (folded if self.folded else looped)(parts, ranks)


def _one(generate: Callable[[int, int, int], Passes]) -> Callable[[int, int, int, int], Passes]:
    return lambda rank, ranks, microbatches, chunks: generate(rank, ranks, microbatches)


def _joint(live: Callable[[int, int, int, int], int]) -> Callable[[int, int, int, int], Peak]:

    def peak(rank: int, ranks: int, microbatches: int, chunks: int) -> Peak:
        most = live(rank, ranks, microbatches, chunks)
        return Peak(most, 0, most)

    return peak


SCHEDULES: Final[dict[str, Schedule]] = {
    "sequential": Schedule(passes=_one(sequential), peak=_joint(lambda r, p, m, v: 1), pipelines=False),
    "gpipe": Schedule(passes=_one(gpipe), peak=_joint(lambda r, p, m, v: m)),
    "1f1b": Schedule(passes=_one(one_f_one_b), peak=_joint(lambda r, p, m, v: min(p - r, m))),
    "interleaved": Schedule(
        passes=interleaved,
        peak=_joint(lambda r, p, m, v: min(2 * (p - 1 - r) + (v - 1) * interleaved_group(p, m) + 1, m * v)),
        least=2,
        most=None,
        fewest=lambda ranks: ranks,
    ),
    "zb-h1": Schedule(
        passes=_one(zb_h1), peak=lambda r, p, m, v: Peak(min(p - r, m), min(r + 1, m), min(p, m)), splits=True
    ),
    "zb-h2": Schedule(
        passes=_one(zb_h2),
        peak=lambda r, p, m, v: Peak(min(2 * (p - r) - 1, m), min(2 * r + 1, m), min(2 * p - 1, m)),
        splits=True,
    ),
    "zb-v": Schedule(
        passes=_one(zb_v),
        peak=lambda r, p, m, v: Peak(live := min(2 * p, 2 * m, m + r + 1), 2 * r + 1, live),  # fewer held if m < 2p - 1
        least=2,
        most=2,
        folded=True,
        splits=True,
    ),
}
NAMES: Final = (*SCHEDULES, FILE)


def chunks_of(name: str, chunks: int = 1) -> int:
    """Return the number of model chunks per rank in schedule ``name``. ``chunks`` = 1 selects the schedule's default.

    Raises ConfigurationError if the schedule does not support ``chunks``.
    """
    # The recipe's default ``chunks`` = 1 selects the schedule's maximum, if there is a maximum.
    schedule = SCHEDULES[name]
    if schedule.most is not None and chunks in (1, schedule.most):
        return schedule.most
    if schedule.least <= chunks <= (schedule.most or chunks):
        return chunks
    if schedule.most is None:
        requirement = f"this schedule needs at least {schedule.least} chunks on every rank; increase parallel.chunks"
    else:
        requirement = f"this schedule has {schedule.most} per rank; remove parallel.chunks, or choose interleaved"
    raise ConfigurationError(
        f"parallel.chunks = {chunks} cannot be used with parallel.schedule = {name!r}: {requirement}"
    )


def check_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> int:
    """Check that schedule ``name`` supports these numbers. Return the number of chunks per rank, like `chunks_of`.

    Raises ConfigurationError if the schedule is unknown, or does not support one of the numbers.
    """
    if name == FILE:
        return chunks
    if name not in SCHEDULES:
        raise ConfigurationError(f"parallel.schedule = {name!r} is unknown; choose one of {', '.join(NAMES)}")
    schedule = SCHEDULES[name]
    if ranks > 1 and not schedule.pipelines:
        raise ConfigurationError(
            f"parallel.schedule = {name!r} with parallel.pipeline = {ranks}: in this schedule, only one pipeline rank "
            "computes at a time; set parallel.schedule = '1f1b', or another pipeline schedule"
        )
    fewest = schedule.fewest(ranks)
    if microbatches < fewest:
        raise ConfigurationError(
            f"parallel.schedule = {name!r} with parallel.pipeline = {ranks} and parallel.microbatches = "
            f"{microbatches}: this schedule needs at least {fewest} micro-batches; set parallel.microbatches to at "
            f"least {fewest}, or set parallel.schedule = '1f1b'"
        )
    return chunks_of(name, chunks)
