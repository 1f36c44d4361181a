"""How many micro-batches of each chunk a rank of a pipeline has in memory at once.

From the closed forms of `hpcdist.strategies.schedule.generate.registry`: for 1F1B p on the first rank
(arXiv:2104.04473), for the interleaved schedule with v chunks p v + p - 1 chunks of 1/v of its layers each, which is
the (1 + (p - 1) / (p v)) of arXiv:2205.05198, section 4.2.3. For short pipelines from the operations that are executed
(`hpcdist.strategies.pipeline.memory.moments`), exactly, which knows chunks that are not alike.
"""

from functools import lru_cache
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.pipeline.memory import LiveMicroBatches, Moment, moments
from hpcdist.strategies.schedule.generate.passes import expand, interleaved_group
from hpcdist.strategies.schedule.generate.registry import FILE, SCHEDULES, check_schedule

SHORT: Final = 16  # chunks of a pipeline whose operations are looked at
STEADY: Final = 4  # times as many micro-batches as ranks: after those every schedule but gpipe repeats itself


@lru_cache(maxsize=65536)
def in_flight(
    schedule: str, ranks: int, microbatches: int, chunks: int, rank: int, *, recompute: bool
) -> tuple[Moment, ...]:
    """Return the moments at which ``rank`` may need most, each by its chunks (local).

    ``recompute``: chunks keep their input only, and are computed again. Raises ConfigurationError for another schedule
    than those of the catalogue, and for one that cannot run so.
    """
    if schedule == FILE:
        raise ConfigurationError(f"the schedule {schedule!r} has no closed form; choose one of {', '.join(SCHEDULES)}")
    each = check_schedule(schedule, ranks, microbatches, chunks)
    known = SCHEDULES[schedule]
    if ranks * each <= SHORT:
        steady = microbatches
        if schedule != "gpipe" and (schedule != "interleaved" or microbatches % ranks == 0):
            steady = min(microbatches, STEADY * ranks)
        return _executed(schedule, ranks, steady, each, rank, recompute)
    peak = known.peak(rank, ranks, microbatches, each)
    if recompute and not (schedule == "1f1b" and rank == ranks - 1):
        waiting = _dealt(schedule, ranks, microbatches, each, peak.both)
        return tuple(
            tuple(LiveMicroBatches(inputs=count, kept=int(number == place)) for number, count in enumerate(waiting))
            for place in range(each)
        )
    both = _dealt(schedule, ranks, microbatches, each, peak.both)
    live = _dealt(schedule, ranks, microbatches, each, peak.live)
    return (
        tuple(
            LiveMicroBatches(inputs=all_of, kept=some, held=all_of - some)
            for all_of, some in zip(both, live, strict=True)
        ),
    )


def _dealt(schedule: str, ranks: int, microbatches: int, chunks: int, total: int) -> list[int]:
    """Return ``total`` live chunks by their number: in the order in which the first forwards come."""
    if chunks == 1:
        return [total]
    if schedule != "interleaved":  # forth and back
        return [total - total // 2, total // 2]
    size = interleaved_group(ranks, microbatches)
    found = [min(size, max(0, total - number * size)) for number in range(chunks)]
    found[0] += total - sum(found)
    return found


@lru_cache(maxsize=4096)
def _executed(
    schedule: str, ranks: int, microbatches: int, chunks: int, rank: int, recompute: bool
) -> tuple[Moment, ...]:
    known = SCHEDULES[schedule]
    placement = known.place([range(unit, unit + 1) for unit in range(ranks * chunks)], ranks)
    steps = expand(known.passes(rank, ranks, microbatches, chunks), placement, rank, recompute=recompute)
    return moments(steps, placement.of(rank))
