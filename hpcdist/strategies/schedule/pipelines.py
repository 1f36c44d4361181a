"""Pipeline schedules: in which order one stage takes its micro-batches forward and back.

With p stages and m micro-batches of equal cost both leave a stage idle for (p-1)/(m+p-1) of the step. They differ in
memory: stage r of GPipe (Y. Huang et al., arXiv:1811.06965) holds the activations of all m micro-batches, that of 1F1B
(D. Narayanan et al., "PipeDream", SOSP 2019; flushed after every step as in Megatron-LM, arXiv:2104.04473) of
min(p-r, m). Backward goes through the micro-batches in their order in both, so gradients are summed in the same order
and come out with the same bits.

First the passes of a stage, which know nothing of units, then `expand` turns them into the operations of a rank.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, TypeAlias

from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.schedule.placement import Placement


class Pass(Enum):
    """One micro-batch through all units of a chunk."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


Passes: TypeAlias = list[tuple[Pass, int, int]]  # (pass, micro-batch, chunk of the rank)


def gpipe(stage: int, stages: int, microbatches: int) -> Passes:
    """Return all forwards, then all backwards: m micro-batches are alive on every stage."""
    _check(stage, stages, microbatches)
    forwards = [(Pass.FORWARD, microbatch, 0) for microbatch in range(microbatches)]
    return forwards + [(Pass.BACKWARD, microbatch, 0) for microbatch in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Passes:
    """Return as many forwards as fill the stages behind, then forward and backward in turn, then what is left.

    At most min(p - r, m) micro-batches are alive on stage r of p, for any m, also below p.
    """
    _check(stage, stages, microbatches)
    ahead = min(stages - stage - 1, microbatches)
    passes = [(Pass.FORWARD, microbatch, 0) for microbatch in range(ahead)]
    for microbatch in range(microbatches - ahead):
        passes += [(Pass.FORWARD, microbatch + ahead, 0), (Pass.BACKWARD, microbatch, 0)]
    return passes + [(Pass.BACKWARD, microbatch, 0) for microbatch in range(microbatches - ahead, microbatches)]


PIPELINES: Final[dict[str, Callable[[int, int, int], Passes]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def expand(
    passes: Sequence[tuple[Pass, int, int]], placement: Placement, rank: int, *, recompute: bool = False
) -> list[Operation]:
    """Return the operations of the rank that runs ``passes`` over its chunks, with its messages to other ranks.

    With ``recompute`` a chunk keeps of a micro-batch only its input, and runs its units forward once more before it
    takes the micro-batch back: 1/3 more work at most, memory for the activations of one micro-batch. A micro-batch
    that goes back right after it came is not run twice. The second run does not need the gradient from the next chunk,
    so it comes before the wait for it.
    """
    chunks, end = placement.of(rank), placement.units.stop
    steps: list[Operation] = []
    previous: tuple[Pass, int, int] | None = None
    for direction, microbatch, chunk in passes:
        units = chunks[chunk]
        before, behind = placement.crosses(units.start), units.stop < end and placement.crosses(units.stop)
        if direction is Pass.FORWARD:
            steps += [Operation(Kind.RECV_ACTIVATION, microbatch, units.start)] * before
            steps += [Operation(Kind.FORWARD, microbatch, unit) for unit in units]
            steps += [Operation(Kind.SEND_ACTIVATION, microbatch, units.stop)] * behind
        elif direction is Pass.BACKWARD_WEIGHT:
            steps += [Operation(Kind.BACKWARD_WEIGHT, microbatch, unit) for unit in reversed(units)]
        else:
            if recompute and previous != (Pass.FORWARD, microbatch, chunk):
                steps += [Operation(Kind.FORWARD, microbatch, unit, recompute=True) for unit in units]
            steps += [Operation(Kind.RECV_GRADIENT, microbatch, units.stop)] * behind
            steps += [Operation(Kind[direction.name], microbatch, unit) for unit in reversed(units)]
            steps += [Operation(Kind.SEND_GRADIENT, microbatch, units.start)] * before
        previous = (direction, microbatch, chunk)
    return steps


def _check(stage: int, stages: int, microbatches: int) -> None:
    assert 0 <= stage < stages and microbatches >= 1, f"stage {stage} of {stages}, {microbatches} micro-batches"
