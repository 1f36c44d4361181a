"""The oldest pipeline schedules: in which order one stage takes its micro-batches forward and back.

With p stages and m micro-batches of equal cost both leave a stage idle for (p-1)/(m+p-1) of the step. They differ in
memory: stage r of GPipe (Y. Huang et al., arXiv:1811.06965) holds the activations of all m micro-batches, that of 1F1B
(D. Narayanan et al., "PipeDream", SOSP 2019; flushed after every step as in Megatron-LM, arXiv:2104.04473) of
min(p-r, m). Backward goes through the micro-batches in their order in both, so gradients are summed in the same order
and come out with the same bits.

First the passes of a stage, which know nothing of units, then `expand` turns them into the operations of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
LETTERS: Final = {
    Pass.FORWARD: "F",
    Pass.BACKWARD: "B",
    Pass.BACKWARD_INPUT: "I",
    Pass.BACKWARD_WEIGHT: "W",
}


@dataclass(frozen=True)
class Peak:
    """The most micro-batches of chunks that a rank has begun at once, each counted once for each chunk that it is in.

    ``live``: between forward and backward, or the first half of one that is split: all its activations are there.
    ``held``: between the halves: what the gradients of the weights need. ``both``: in either state.
    """

    live: int
    held: int
    both: int


def spell(step: tuple[Pass, int, int]) -> str:
    """Return a pass as schedule files have it, as F3.1: forward of micro-batch 3 through chunk 1 of the rank."""
    return f"{LETTERS[step[0]]}{step[1]}.{step[2]}"


def sequential(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return each micro-batch forward and back before the next: gradient accumulation, with one of them alive."""
    _check(rank, ranks, microbatches)
    return [(way, microbatch, 0) for microbatch in range(microbatches) for way in (Pass.FORWARD, Pass.BACKWARD)]


def gpipe(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return all forwards, then all backwards: m micro-batches are alive on every rank."""
    _check(rank, ranks, microbatches)
    forwards = [(Pass.FORWARD, microbatch, 0) for microbatch in range(microbatches)]
    return forwards + [(Pass.BACKWARD, microbatch, 0) for microbatch in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return as many forwards as fill the stages behind, then forward and backward in turn, then what is left.

    At most min(p - r, m) micro-batches are alive on rank r of p, for any m, also below p.
    """
    _check(rank, ranks, microbatches)
    ahead = min(ranks - rank - 1, microbatches)
    passes = [(Pass.FORWARD, microbatch, 0) for microbatch in range(ahead)]
    for microbatch in range(microbatches - ahead):
        passes += [(Pass.FORWARD, microbatch + ahead, 0), (Pass.BACKWARD, microbatch, 0)]
    return passes + [(Pass.BACKWARD, microbatch, 0) for microbatch in range(microbatches - ahead, microbatches)]


def expand(
    passes: Sequence[tuple[Pass, int, int]], placement: Placement, rank: int, *, recompute: bool = False
) -> list[Operation]:
    """Return the operations of the rank that runs ``passes`` over its chunks, with its messages to other ranks.

    With ``recompute`` a chunk keeps of a micro-batch only its input, and runs its units forward once more before it
    takes the micro-batch back: 1/3 more work at most, memory for the activations of one micro-batch. A micro-batch
    that goes back right after it came is not run twice. The second run does not need the gradient from the next chunk,
    so it comes before the wait for it. Skip connections and ``recompute`` do not go together: what they take would be
    gone.
    """
    assert not (recompute and placement.skips), "outputs that other chunks take are not computed again"
    chunks, end = placement.of(rank), placement.units.stop
    steps: list[Operation] = []
    previous: tuple[Pass, int, int] | None = None
    for direction, microbatch, chunk in passes:
        units = chunks[chunk]
        before, behind = placement.crosses(units.start), units.stop < end and placement.crosses(units.stop)
        if direction is Pass.FORWARD:
            steps += [Operation(Kind.RECV_ACTIVATION, microbatch, units.start)] * before
            for unit in units:
                steps += _skips(Kind.RECV_ACTIVATION, microbatch, unit, placement)
                steps.append(Operation(Kind.FORWARD, microbatch, unit))
                steps += _skips(Kind.SEND_ACTIVATION, microbatch, unit, placement)
            steps += [Operation(Kind.SEND_ACTIVATION, microbatch, units.stop)] * behind
        elif direction is Pass.BACKWARD_WEIGHT:
            steps += [Operation(Kind.BACKWARD_WEIGHT, microbatch, unit) for unit in reversed(units)]
        else:
            if recompute and previous != (Pass.FORWARD, microbatch, chunk):
                steps += [Operation(Kind.FORWARD, microbatch, unit, recompute=True) for unit in units]
            steps += [Operation(Kind.RECV_GRADIENT, microbatch, units.stop)] * behind
            for unit in reversed(units):
                steps += _skips(Kind.RECV_GRADIENT, microbatch, unit, placement)
                steps.append(Operation(Kind[direction.name], microbatch, unit))
                steps += _skips(Kind.SEND_GRADIENT, microbatch, unit, placement)
            steps += [Operation(Kind.SEND_GRADIENT, microbatch, units.start)] * before
        previous = (direction, microbatch, chunk)
    return steps


def _skips(kind: Kind, microbatch: int, unit: int, placement: Placement) -> list[Operation]:
    """Return the messages of ``unit`` over skip connections to other ranks."""
    if not placement.skips:
        return []
    enters = kind in (Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT)
    ends = [(source, unit) for source in placement.skips_into(unit)]
    ends = ends if enters else [(unit, target) for target in placement.skips_from(unit)]
    apart = [(one, other) for one, other in ends if placement.rank_of(one) != placement.rank_of(other)]
    return [Operation(kind, microbatch, target, source=source) for source, target in apart]


def _check(rank: int, ranks: int, microbatches: int) -> None:
    assert 0 <= rank < ranks and microbatches >= 1, f"rank {rank} of {ranks}, {microbatches} micro-batches"
