"""Which units are computed again before, or with, their backward: for the time of a step and for its operations.

Without a pipeline "full" repeats every unit but the first, which keeps what it has to, and the last, whose backward
follows at once: ours (`hpcdist.models.recompute`), and the blocks of Megatron-LM (arXiv:2205.05198, section 5), in its
pipelines too. Ours repeat whole chunks in a pipeline, the ends of the model as well, and nothing where the backward of
a chunk always follows its forward at once: in the last chunk of 1f1b and of interleaved
(`hpcdist.strategies.schedule.generate.passes.expand`). "selective" repeats attention, where its scores were in
memory: ours never are. Memory counts the same of ours by their own arrays (`hpcdist.models.counts.kept_again`) and
passes.
"""

from functools import lru_cache
from typing import Final

from hpcdist.planner.cut import Chunk, Share, chunks, stages
from hpcdist.planner.description import Description
from hpcdist.planner.layout import Layout

AT_ONCE: Final = ("1f1b", "interleaved")  # schedules whose last chunk goes back as soon as it came


def ahead(layout: Layout) -> bool:
    """Whether chunks are computed again before the gradient is there."""
    return layout.implementation == "hpcdist" and layout.pipeline > 1 and layout.recompute == "full"


def repeated(description: Description, layout: Layout) -> tuple[Chunk, ...]:
    """Return what of each chunk is computed again for a micro-batch, in the order of the model (local).

    With "selective" it is the attention of these units. Raises what `hpcdist.planner.cut.chunks` raises.
    """
    return _repeated(
        description, layout.pipeline, layout.chunks, layout.schedule, layout.implementation, layout.recompute
    )


@lru_cache(maxsize=4096)
def _repeated(
    description: Description, pipeline: int, each: int, schedule: str, implementation: str, recompute: str
) -> tuple[Chunk, ...]:
    layout = Layout(
        pipeline=pipeline, chunks=each, schedule=schedule, implementation=implementation, recompute=recompute
    )
    if pipeline == 1:
        parts: tuple[Chunk, ...] = (Chunk(0, stages(description, layout)[0]),)
    else:
        parts = chunks(description, layout)
    last = len(parts) - 1
    found = []
    for number, (rank, shares) in enumerate(parts):
        if recompute == "full" and ahead(layout):
            own = () if schedule in AT_ONCE and number == last else shares
        elif recompute == "full":
            own = _between(shares, is_first=number == 0, is_last=number == last)
        else:
            is_kept = recompute == "none" or implementation == "hpcdist"
            own = () if is_kept else tuple(share for share in shares if share.unit.attention is not None)
        found.append(Chunk(rank, own))
    return tuple(found)


def _between(shares: tuple[Share, ...], *, is_first: bool, is_last: bool) -> tuple[Share, ...]:
    """Return ``shares`` without the first unit of the model, and without its last."""
    times = [share.times for share in shares]
    times[0] -= is_first
    times[-1] -= is_last
    return tuple(share._replace(times=left) for share, left in zip(shares, times, strict=True) if left > 0)
