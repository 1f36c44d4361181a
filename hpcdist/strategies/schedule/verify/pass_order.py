"""Quick proof of a schedule from the passes of all ranks alone, before it has units and exchanges.

A pass forward waits for the one of the chunk before, a pass back for the one of the chunk behind and for its own
forward, the gradients of weights for those of the input. The passes are gone through without computing anything: O(1)
for each of them. `proof.verify` proves the lists of operations that they become, and all that exchanges add.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from hpcdist.errors import ScheduleError
from hpcdist.strategies.schedule.generate.passes import Pass, Passes, Peak, spell
from hpcdist.strategies.schedule.placement import StagePlacement

Step = tuple[Pass, int, int]  # (pass, micro-batch, chunk of the rank)
BACK = (Pass.BACKWARD, Pass.BACKWARD_INPUT)
# What may follow, for the same micro-batch and chunk.
DUE: Final[dict[Pass | None, tuple[Pass, ...]]] = {
    None: (Pass.FORWARD,),
    Pass.FORWARD: BACK,
    Pass.BACKWARD_INPUT: (Pass.BACKWARD_WEIGHT,),
    Pass.BACKWARD: (),
    Pass.BACKWARD_WEIGHT: (),
}


def prove(
    passes: Sequence[Passes], placement: StagePlacement, microbatches: int, names: Sequence[str] | None = None
) -> list[Peak]:
    """Return what each rank has begun at once, given the ``passes`` of all of them.

    Raises ScheduleError, which names rank, as ``names`` do, and pass, where a micro-batch does not go once forward and
    once back through every chunk, or ranks wait for each other in a circle.
    """
    names = names or [f"rank {rank}" for rank in range(len(passes))]
    assert len(passes) == placement.stages, f"passes of {len(passes)} ranks for {placement.stages}"
    peaks = [
        _of_rank(name, steps, len(placement.of(rank)), microbatches)
        for rank, (name, steps) in enumerate(zip(names, passes, strict=True))
    ]
    _run(passes, placement, names)
    return peaks


def _of_rank(name: str, steps: Passes, chunks: int, microbatches: int) -> Peak:
    """Return the peak of one rank, which takes each micro-batch through each of its chunks, forward and then back."""
    done: dict[tuple[int, int], Pass] = {}  # (micro-batch, chunk) -> its last pass
    live = held = 0
    most = Peak(0, 0, 0)
    for step in steps:
        way, microbatch, chunk = step
        at = microbatch, chunk
        if not (0 <= microbatch < microbatches and 0 <= chunk < chunks):
            raise ScheduleError(
                f"{name}: {spell(step)} is beyond its {microbatches} micro-batches, 0 to {microbatches - 1}, or "
                f"its chunks, 0 to {chunks - 1}"
            )
        before = done.get(at)
        if way not in DUE[before]:
            wanted = " or ".join(spell((other, *at)) for other in DUE[before]) or "nothing more of the micro-batch"
            behind = f", behind {spell((before, *at))}" if before else ""
            raise ScheduleError(f"{name}: {spell(step)} comes where {wanted} is due{behind}")
        done[at] = way
        live += (way is Pass.FORWARD) - (way in BACK)
        held += (way is Pass.BACKWARD_INPUT) - (way is Pass.BACKWARD_WEIGHT)
        most = Peak(max(most.live, live), max(most.held, held), max(most.both, live + held))
    for microbatch in range(microbatches):
        for chunk in range(chunks):
            last = done.get((microbatch, chunk))
            if last not in (Pass.BACKWARD, Pass.BACKWARD_WEIGHT):
                missing = {None: "forward", Pass.FORWARD: "back"}.get(last, "to the gradients of its weights (W)")
                raise ScheduleError(
                    f"{name}: micro-batch {microbatch} never goes {missing} through chunk {chunk} of the rank"
                )
    return most


def _run(passes: Sequence[Passes], placement: StagePlacement, names: Sequence[str]) -> None:
    """Go through the passes of all ranks, each as soon as what it waits for is done."""
    numbers: list[list[int]] = [[] for _ in passes]  # of a rank's chunks in the model
    for number, rank in enumerate(placement.ranks):
        numbers[rank].append(number)
    done: set[tuple[bool, int, int]] = set()  # (back, micro-batch, chunk of the model)
    waiting: dict[tuple[bool, int, int], int] = {}  # what is not done -> the rank that has stopped for it
    at = [0] * len(passes)
    ready = list(range(len(passes)))
    while ready:
        rank = ready.pop()
        steps, own = passes[rank], numbers[rank]
        while at[rank] < len(steps):
            way, microbatch, chunk = steps[at[rank]]
            needed = _needed(steps[at[rank]], own, placement)
            if needed is not None and needed not in done:
                waiting[needed] = rank
                break
            at[rank] += 1
            if way is not Pass.BACKWARD_WEIGHT:
                event = way is not Pass.FORWARD, microbatch, own[chunk]
                done.add(event)
                if event in waiting:
                    ready.append(waiting.pop(event))
    if waiting:
        raise ScheduleError(_circle(passes, placement, names, at, waiting))


def _needed(step: Step, own: Sequence[int], placement: StagePlacement) -> tuple[bool, int, int] | None:
    """Return what of another chunk has to be done before a pass."""
    way, microbatch, chunk = step
    if way is Pass.FORWARD and own[chunk] > 0:
        return False, microbatch, own[chunk] - 1
    if way in BACK and own[chunk] + 1 < len(placement.chunks):
        return True, microbatch, own[chunk] + 1
    return None


def _circle(
    passes: Sequence[Passes],
    placement: StagePlacement,
    names: Sequence[str],
    at: Sequence[int],
    waiting: Mapping[tuple[bool, int, int], int],
) -> str:
    """Say who waits for whom, around the circle."""
    chain: list[int] = []
    told: list[str] = []
    needs = {rank: needed for needed, rank in waiting.items()}
    rank = min(needs)
    while rank not in chain:
        back, microbatch, number = needs[rank]
        other = placement.ranks[number]
        local = placement.ranks[:number].count(other)
        way = next(
            way for way, mb, chunk in passes[other] if (mb, chunk) == (microbatch, local) and (way in BACK) == back
        )
        chain.append(rank)
        told.append(
            f"{names[rank]} waits before {spell(passes[rank][at[rank]])} for {spell((way, microbatch, local))} of rank "
            f"{other}"
        )
        rank = other
    return f"a cyclic wait: {'; '.join(told[chain.index(rank) :])}"
