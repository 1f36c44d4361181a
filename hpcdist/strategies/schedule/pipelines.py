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


class Pass(Enum):
    """One micro-batch through all units of a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


Passes: TypeAlias = list[tuple[Pass, int]]  # (pass, micro-batch)


def gpipe(stage: int, stages: int, microbatches: int) -> Passes:
    """Return all forwards, then all backwards: m micro-batches are alive on every stage."""
    _check(stage, stages, microbatches)
    forwards = [(Pass.FORWARD, microbatch) for microbatch in range(microbatches)]
    return forwards + [(Pass.BACKWARD, microbatch) for microbatch in range(microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Passes:
    """Return as many forwards as fill the stages behind, then forward and backward in turn, then what is left.

    At most min(p - r, m) micro-batches are alive on stage r of p, for any m, also below p.
    """
    _check(stage, stages, microbatches)
    ahead = min(stages - stage - 1, microbatches)
    passes = [(Pass.FORWARD, microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches - ahead):
        passes += [(Pass.FORWARD, microbatch + ahead), (Pass.BACKWARD, microbatch)]
    return passes + [(Pass.BACKWARD, microbatch) for microbatch in range(microbatches - ahead, microbatches)]


PIPELINES: Final[dict[str, Callable[[int, int, int], Passes]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def expand(
    passes: Sequence[tuple[Pass, int]], units: range, stage: int, stages: int, *, recompute: bool = False
) -> list[Operation]:
    """Return the operations of the rank that runs ``passes`` over ``units``, with its messages to its neighbours.

    With ``recompute`` the stage keeps of a micro-batch only its input, and runs its units forward once more before it
    takes the micro-batch back: 1/3 more work at most, memory for the activations of one micro-batch. A micro-batch
    that goes back right after it came is not run twice. The second run does not need the gradient from the next stage,
    so it comes before the wait for it.
    """
    steps: list[Operation] = []
    previous: tuple[Pass, int] | None = None
    for direction, microbatch in passes:
        if direction is Pass.FORWARD:
            steps += _forward(microbatch, units, stage, stages)
        else:
            if recompute and previous != (Pass.FORWARD, microbatch):
                steps += [Operation(Kind.FORWARD, microbatch, unit, recompute=True) for unit in units]
            steps += _backward(microbatch, units, stage, stages)
        previous = (direction, microbatch)
    return steps


def _forward(microbatch: int, units: range, stage: int, stages: int) -> list[Operation]:
    steps = [Operation(Kind.RECV_ACTIVATION, microbatch)] if stage > 0 else []
    steps += [Operation(Kind.FORWARD, microbatch, unit) for unit in units]
    return [*steps, Operation(Kind.SEND_ACTIVATION, microbatch)] if stage < stages - 1 else steps


def _backward(microbatch: int, units: range, stage: int, stages: int) -> list[Operation]:
    steps = [Operation(Kind.RECV_GRADIENT, microbatch)] if stage < stages - 1 else []
    steps += [Operation(Kind.BACKWARD, microbatch, unit) for unit in reversed(units)]
    return [*steps, Operation(Kind.SEND_GRADIENT, microbatch)] if stage > 0 else steps


def _check(stage: int, stages: int, microbatches: int) -> None:
    assert 0 <= stage < stages and microbatches >= 1, f"stage {stage} of {stages}, {microbatches} micro-batches"
