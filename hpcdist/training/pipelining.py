"""From the keys of a recipe to a pipeline: in which order its stages work; which are where: see `partitioning`."""

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigurationError
from hpcdist.reporting import regular
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.tied import tied_tensors
from hpcdist.strategies.schedule.generate import schedule_file
from hpcdist.strategies.schedule.generate.registry import FILE, SCHEDULES
from hpcdist.strategies.schedule.generate.schedule_file import ScheduleText


def written(parallel: ParallelConfig, comm: Communicator) -> ScheduleText | None:
    """Return the schedule of ``parallel.schedule_file``, None where the schedule is none of a file. Collective.

    One rank reads the file. Raises ConfigurationError, on all ranks, where it cannot be read, or is no schedule of this
    pipeline.
    """
    if parallel.order != FILE:
        return None
    text: str | OSError = ""
    if comm.rank == 0:
        try:
            text = regular.text(parallel.schedule_file)
        except (OSError, UnicodeDecodeError) as error:
            text = error if isinstance(error, OSError) else OSError(f"not text: {error}")
    text = comm.broadcast_object(text)
    if isinstance(text, OSError):
        raise ConfigurationError(
            f"parallel.schedule_file = {parallel.schedule_file!r} cannot be read: {text}; write one with "
            "`hpcdist schedule 1f1b --dump FILE`"
        )
    found = schedule_file.read(text, parallel.pipeline, parallel.microbatches, parallel.schedule_file)
    if parallel.recompute and found.keeps:
        raise ConfigurationError(
            f"parallel.recompute = true with parallel.schedule_file = {parallel.schedule_file!r}, which is folded or "
            "splits backwards: what its chunks need stays in memory; set it to false, or make it looped, of F and B"
        )
    return found


def check_exchange(
    parallel: ParallelConfig, found: ScheduleText | None, seat: RankContext, *, accumulates: bool
) -> None:
    """Raise ConfigurationError where gradients would be exchanged before they are complete (local)."""
    if not accumulates and tied_tensors(seat.model, seat.placed):
        raise ConfigurationError(
            f"model.tied = true with parallel.pipeline = {parallel.pipeline} and parallel.strategy = "
            f"{parallel.strategy!r}: the last stage adds to the gradient of the first once a step, and gradients are "
            "reduced after each micro-batch; set zero.keep_gradients = true, or choose allreduce or zero1"
        )
    if not accumulates and splits(parallel, found):
        raise ConfigurationError(
            f"parallel.schedule = {parallel.schedule!r} with parallel.strategy = {parallel.strategy!r}: the gradients "
            "of several micro-batches are under way at once where a backward is split, and cannot be reduced one by "
            "one; set zero.keep_gradients = true, or choose a schedule that does not split, as 1f1b"
        )


def splits(parallel: ParallelConfig, found: ScheduleText | None) -> bool:
    """Whether backwards are done in two passes (local)."""
    if found is None:
        return SCHEDULES[parallel.order].splits
    return found.splits
