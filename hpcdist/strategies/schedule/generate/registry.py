"""The table of all schedules by name: their passes, what they need and refuse, their memory and their bubble.

Light: no array, no MPI. A micro-batch of a chunk is alive from its forward to its backward, or to the first half of
one that is split; what is held between the halves is counted apart (`Peak`). On rank r of p, with m micro-batches and
v chunks on every rank:

    schedule      live                                     held           both
    sequential    1                                        0              = live
    gpipe         m                                        0              = live
    1f1b          min(p - r, m)                            0              = live
    interleaved   min(2 (p-1-r) + (v-1) G + 1, m v)        0              = live     G: see `passes.interleaved_group`
    zb-h1         min(p - r, m)                            min(r+1, m)    min(p, m)
    zb-h2         min(2 (p - r) - 1, m)                    min(2r+1, m)   min(2p - 1, m)
    zb-v          min(2 p, 2 m, m + r + 1)                 2r+1           = live      held: less for m < 2p - 1

`bubble` has their bubbles in closed form, for stages that are all alike and messages that take nothing. With F, I and
W the seconds of a stage for a micro-batch:

    gpipe, 1f1b    (p-1) / (m + p-1)                                          arXiv:1811.06965, arXiv:2104.04473
    interleaved    (p-1) / (v m + p-1), m a multiple of p                     arXiv:2104.04473
    zb-h1          (p-1)(F + I - W) / (m (F + I + W) + (p-1)(F + I - W))      arXiv:2401.10241, table 1
    zb-h2          (p-1)(F + I - 2W) / (m (F + I + W) + (p-1)(F + I - 2W))    the same
    zb-v           0                                                          the same, and arXiv:2405.15362

The paper gives those of zb-h1 and zb-h2 as seconds of bubble, which is the numerator; it calls I "B". They hold while
the weights' gradients fit into the bubbles: W <= I and m >= p for zb-h1, F = I = W and m >= 2p - 1 for the last two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.schedule.generate.passes import (
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
from hpcdist.strategies.schedule.operations import StagePlacement, folded, looped


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
    """Return the bubble of the longest stage; None for schedules, or cases, without a closed form (local)."""
    behind, whole_s = stages - 1, forward_s + input_s + weight_s
    if schedule in ("gpipe", "1f1b"):
        return behind / (microbatches + behind)
    if schedule == "interleaved":
        return behind / (chunks * microbatches + behind) if microbatches % stages == 0 else None
    if schedule == "zb-h1" and weight_s <= input_s and microbatches >= stages:
        return _share(behind * (forward_s + input_s - weight_s), microbatches * whole_s)
    if schedule in ("zb-h2", "zb-v") and forward_s == input_s == weight_s and microbatches >= 2 * stages - 1:
        return (
            0.0 if schedule == "zb-v" else _share(behind * (forward_s + input_s - 2 * weight_s), microbatches * whole_s)
        )
    return None


def _share(idle_s: float, busy_s: float) -> float:
    return idle_s / (busy_s + idle_s) if busy_s + idle_s else 0.0


FILE: Final = "file"  # the schedule that a file has


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Row of the table `SCHEDULES`: passes, peaks and requirements of one schedule.

    ``passes`` takes rank, ranks, micro-batches and chunks; ``peak`` the same. A rank has ``least`` to ``most`` chunks,
    placed forth and back where it is ``folded``. ``splits``: gradients of inputs and of weights are passes of their
    own. ``pipelines``: for more than one rank. ``fewest``: the least micro-batches for so many ranks.
    """

    passes: Callable[[int, int, int, int], Passes]
    peak: Callable[[int, int, int, int], Peak]
    least: int = 1
    most: int | None = 1
    folded: bool = False
    splits: bool = False
    pipelines: bool = True
    fewest: Callable[[int], int] = lambda ranks: 1

    def place(self, parts: Sequence[range], ranks: int) -> StagePlacement:
        """Return the placement of ``parts`` of consecutive units, as many for each of ``ranks``."""
        return (folded if self.folded else looped)(parts, ranks)


def _one(generate: Callable[[int, int, int], Passes]) -> Callable[[int, int, int, int], Passes]:
    return lambda rank, ranks, microbatches, chunks: generate(rank, ranks, microbatches)


def _joint(live: Callable[[int, int, int, int], int]) -> Callable[[int, int, int, int], Peak]:
    """Return the peak of a schedule whose backwards are one pass."""

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
        peak=lambda r, p, m, v: Peak(live := min(2 * p, 2 * m, m + r + 1), 2 * r + 1, live),
        least=2,
        most=2,
        folded=True,
        splits=True,
    ),
}
NAMES: Final = (*SCHEDULES, FILE)


def chunks_of(name: str, chunks: int = 1) -> int:
    """Return the chunks of every rank: ``chunks``, or the number that the schedule needs where it is one.

    1 is taken for "not asked for". Raises ConfigurationError.
    """
    schedule = SCHEDULES[name]
    if schedule.most is not None and chunks in (1, schedule.most):
        return schedule.most
    if schedule.least <= chunks <= (schedule.most or chunks):
        return chunks
    if schedule.most is None:
        wanted = (
            f"it is made of {schedule.least} or more on every rank; set parallel.chunks = {schedule.least} or above"
        )
    else:
        wanted = f"it has {schedule.most} on every rank; leave parallel.chunks out, or choose interleaved"
    raise ConfigurationError(f"parallel.chunks = {chunks} with parallel.schedule = {name!r}: {wanted}")


def check_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> int:
    """Return the chunks of every rank. Raises ConfigurationError where the schedule cannot run so (local).

    A file is checked where it is read.
    """
    if name == FILE:
        return chunks
    if name not in SCHEDULES:
        raise ConfigurationError(f"parallel.schedule = {name!r}; choose one of {', '.join(NAMES)}")
    schedule = SCHEDULES[name]
    if ranks > 1 and not schedule.pipelines:
        raise ConfigurationError(
            f"parallel.schedule = {name!r} with parallel.pipeline = {ranks}: all stages but one would wait; choose "
            "1f1b, or another one for pipelines"
        )
    fewest = schedule.fewest(ranks)
    if microbatches < fewest:
        raise ConfigurationError(
            f"parallel.schedule = {name!r} with parallel.pipeline = {ranks} and parallel.microbatches = "
            f"{microbatches}: a group of micro-batches has as many as there are ranks, or more; set "
            f"parallel.microbatches = {fewest} or above, or choose 1f1b"
        )
    return chunks_of(name, chunks)
