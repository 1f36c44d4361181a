"""Pipeline schedules as orders of passes: sequential, GPipe, 1F1B, interleaved 1F1B, and zero bubble.

Symbols: p stages (ranks), m micro-batches, rank r = 0..p-1, v chunks per rank.

GPipe (Y. Huang et al., arXiv:1811.06965) and 1F1B (D. Narayanan et al., "PipeDream", SOSP 2019; with a flush after
every step) leave a stage idle for (p-1)/(m+p-1) of the step. Stage r holds the activations of m micro-batches in GPipe,
min(p-r, m) in 1F1B.

Interleaved 1F1B (arXiv:2104.04473, section 2.2; `looped` placement) divides the idle time of 1F1B by v, and has v times
as many messages. Rank r holds min(2 (p - 1 - r) + (v - 1) G + 1, m v) chunks; G is the `interleaved_group`.

Zero bubble splits the backward pass: B is the input gradient, and W the weight gradients, which fill idle time. ZB-H1,
ZB-H2 and ZB-V are from P. Qi et al. (arXiv:2401.10241); ZB-V is V-ZB in arXiv:2405.15362. With tF, tB and tW the
seconds of a pass of a stage, M_B bytes of activations until B and M_W bytes between B and W, for m >= p (ZB-H2, ZB-V:
m >= 2p - 1), while these times are not negative:

             longest idle time of a stage            activations at once on stage r
    1F1B     (p - 1) (tF + tB + tW)                  (p - r) M_B
    ZB-H1    (p - 1) (tF + tB - tW)                  (p - r) M_B + r M_W
    ZB-H2    (p - 1) (tF + tB - 2 tW)                (2 (p - r) - 1) M_B + 2 r M_W
    ZB-V     0 (needs tF = tB = tW)                  p M_B, in 2p halves: a stage has two chunks

All schedules sum gradients in micro-batch order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation, StagePlacement

Pass: TypeAlias = tuple[Kind, int, int]  # (one of `COMPUTE`, micro-batch, local chunk): all units of the chunk
Passes: TypeAlias = list[Pass]
LETTERS: Final = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


@dataclass(frozen=True)
class Peak:
    """Largest numbers of micro-batches that a rank has in progress at once, summed over the rank's model chunks."""

    live: int  # after forward, before backward (or its input-gradient half), with all activations
    held: int  # between the input-gradient and the weight-gradient half of a split backward pass
    both: int  # live or held


def spell(step: Pass) -> str:
    """Return the pass ``step`` in schedule-file notation, such as "F3.1"."""
    return f"{LETTERS[step[0]]}{step[1]}.{step[2]}"


def sequential(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return the passes of ``rank`` in gradient accumulation.

    The backward pass of a micro-batch comes before the forward pass of the next micro-batch.
    """
    _check(rank, ranks, microbatches)
    return [(kind, microbatch, 0) for microbatch in range(microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD)]


def gpipe(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return the passes of ``rank`` in GPipe: all forward passes, then all backward passes."""
    _check(rank, ranks, microbatches)
    forwards = [(Kind.FORWARD, microbatch, 0) for microbatch in range(microbatches)]
    return forwards + [(Kind.BACKWARD, microbatch, 0) for microbatch in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return the passes of ``rank`` in 1F1B: fill the pipeline, alternate forward and backward passes, drain."""
    _check(rank, ranks, microbatches)
    # Warm-up: one forward pass per later stage, before the first gradient can arrive.
    ahead = min(ranks - rank - 1, microbatches)
    passes = [(Kind.FORWARD, microbatch, 0) for microbatch in range(ahead)]
    # Steady state: at most ahead + 1 micro-batches are live.
    for microbatch in range(microbatches - ahead):
        passes += [(Kind.FORWARD, microbatch + ahead, 0), (Kind.BACKWARD, microbatch, 0)]
    return passes + [(Kind.BACKWARD, microbatch, 0) for microbatch in range(microbatches - ahead, microbatches)]


def expand(passes: Sequence[Pass], placement: StagePlacement, rank: int, *, recompute: bool = False) -> list[Operation]:
    """Expand ``passes`` through chunks to a list of operations of ``rank``: passes through layers, and messages.

    ``placement``: assignment of layers to ranks.
    """
    # With ``recompute``, a chunk keeps only the input of each micro-batch, and runs forward again before the backward
    # pass.
    assert not (recompute and placement.skips), "outputs that other chunks take are not computed again"
    chunks, end = placement.of(rank), placement.units.stop
    steps: list[Operation] = []
    previous: Pass | None = None
    for direction, microbatch, chunk in passes:
        units = chunks[chunk]
        before, after = placement.crosses(units.start), units.stop < end and placement.crosses(units.stop)
        if direction is Kind.FORWARD:
            steps += [Operation(Kind.RECV_ACTIVATION, microbatch, units.start)] * before
            for unit in units:
                steps += _skips(Kind.RECV_ACTIVATION, microbatch, unit, placement)
                steps.append(Operation(Kind.FORWARD, microbatch, unit))
                steps += _skips(Kind.SEND_ACTIVATION, microbatch, unit, placement)
            steps += [Operation(Kind.SEND_ACTIVATION, microbatch, units.stop)] * after
        elif direction is Kind.BACKWARD_WEIGHT:
            steps += [Operation(Kind.BACKWARD_WEIGHT, microbatch, unit) for unit in reversed(units)]
        else:
            if recompute and previous != (Kind.FORWARD, microbatch, chunk):  # else the activations still exist
                steps += [Operation(Kind.FORWARD, microbatch, unit, recompute=True) for unit in units]
            steps += [Operation(Kind.RECV_GRADIENT, microbatch, units.stop)] * after
            for unit in reversed(units):
                steps += _skips(Kind.RECV_GRADIENT, microbatch, unit, placement)
                steps.append(Operation(direction, microbatch, unit))
                steps += _skips(Kind.SEND_GRADIENT, microbatch, unit, placement)
            steps += [Operation(Kind.SEND_GRADIENT, microbatch, units.start)] * before
        previous = (direction, microbatch, chunk)
    return steps


def _skips(kind: Kind, microbatch: int, unit: int, placement: StagePlacement) -> list[Operation]:
    if not placement.skips:
        return []
    enters = kind in (Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT)
    ends = [(source, unit) for source in placement.skips_into(unit)]
    ends = ends if enters else [(unit, target) for target in placement.skips_from(unit)]
    apart = [(first, other) for first, other in ends if placement.rank_of(first) != placement.rank_of(other)]
    return [Operation(kind, microbatch, target, source=source) for source, target in apart]


def _check(rank: int, ranks: int, microbatches: int) -> None:
    assert 0 <= rank < ranks and microbatches >= 1, f"rank {rank} of {ranks}, {microbatches} micro-batches"


def interleaved_group(ranks: int, microbatches: int) -> int:
    """Return the group size of interleaved 1F1B: the number of micro-batches that a rank runs in a row in one chunk.

    The result is the smallest size for which every group has at least ``ranks`` micro-batches.
    """
    # A rank runs a whole group of micro-batches through one chunk before its next chunk. The last group may be smaller.
    assert microbatches >= ranks, f"{microbatches} micro-batches in groups of {ranks} or more"
    return next(size for size in range(ranks, microbatches + 1) if not 0 < microbatches % size < ranks)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Passes:
    """Return the passes of ``rank`` in interleaved 1F1B, in which each rank has ``chunks`` model chunks."""
    size = interleaved_group(ranks, microbatches)
    table = [
        (chunk, microbatch)
        for first in range(0, microbatches, size)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + size, microbatches))
    ]
    forwards = [(Kind.FORWARD, microbatch, chunk) for chunk, microbatch in table]
    # Backward passes use the same table with reversed chunks: the last chunk of a rank comes first.
    backwards = [(Kind.BACKWARD, microbatch, chunks - 1 - chunk) for chunk, microbatch in table]
    # A micro-batch comes back after a whole group in all chunks but the last, and 2 (p - 1 - r) more forward passes.
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * size, len(table))
    passes = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        passes += [forward, backward]
    return passes + backwards[len(table) - ahead :]


def zb_h1(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return the passes of ``rank`` in ZB-H1, a zero-bubble schedule.

    The pass for weight gradients of a micro-batch comes ``rank`` micro-batches after the pass for input gradients.
    """
    return _put_off(microbatches, ahead=ranks - 1 - rank, delay=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return the passes of ``rank`` in ZB-H2, a zero-bubble schedule.

    No rank is idle between its passes if all take equal time and there are at least 2 * ``ranks`` - 1 micro-batches.
    """
    return _put_off(microbatches, ahead=2 * (ranks - 1 - rank), delay=2 * rank)


def _put_off(microbatches: int, *, ahead: int, delay: int) -> Passes:
    passes = [(Kind.FORWARD, microbatch, 0) for microbatch in range(min(ahead, microbatches))]
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            passes.append((Kind.FORWARD, microbatch + ahead, 0))
        passes.append((Kind.BACKWARD_INPUT, microbatch, 0))
        if microbatch >= delay:
            passes.append((Kind.BACKWARD_WEIGHT, microbatch - delay, 0))
    remaining = range(max(0, microbatches - delay), microbatches)
    return passes + [(Kind.BACKWARD_WEIGHT, microbatch, 0) for microbatch in remaining]


class _Counting:
    # List of passes. An added pass gets the next micro-batch number of its type and chunk.
    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.passes: Passes = []
        self.done = {(direction, chunk): 0 for direction in COMPUTE for chunk in range(2)}

    def add(self, direction: Kind, chunk: int) -> None:
        microbatch = self.done[direction, chunk]
        self.done[direction, chunk] += 1
        if microbatch < self.microbatches:
            self.passes.append((direction, microbatch, chunk))

    def back(self, chunk: int) -> None:
        self.add(Kind.BACKWARD_INPUT, chunk)
        self.add(Kind.BACKWARD_WEIGHT, chunk)


def zb_v(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return the passes of ``rank`` in ZB-V, a zero-bubble schedule with two model chunks per rank.

    The chunk placement is `folded`: rank r has the chunks r and 2 * ``ranks`` - 1 - r.
    """
    steps, rounds = _Counting(microbatches), max(2 * ranks - 1, microbatches)
    for _ in range(2 * (ranks - rank) - 1):  # until the first micro-batch returns from the later ranks
        steps.add(Kind.FORWARD, 0)
    for _ in range(rank):
        steps.add(Kind.FORWARD, 1)
        steps.add(Kind.FORWARD, 0)
    for _ in range(ranks - rank):
        steps.add(Kind.FORWARD, 1)
        steps.back(1)
    while steps.done[Kind.FORWARD, 1] < rounds:
        if steps.done[Kind.FORWARD, 0] < rounds:
            steps.add(Kind.FORWARD, 0)
        steps.back(0)
        steps.add(Kind.FORWARD, 1)
        steps.back(1)
    for _ in range(rank):
        steps.add(Kind.BACKWARD_INPUT, 0)
        steps.add(Kind.BACKWARD_INPUT, 1)
    for _ in range(ranks - rank):
        steps.back(0)
    for chunk in (1, 0):
        while steps.done[Kind.BACKWARD_WEIGHT, chunk] < rounds:
            steps.add(Kind.BACKWARD_WEIGHT, chunk)
    return steps.passes
