"""Pipeline schedules as orders of passes: sequential, GPipe, 1F1B, interleaved 1F1B, and zero bubble.

GPipe and 1F1B: with p stages and m micro-batches of equal cost both leave a stage idle for (p-1)/(m+p-1) of the step.
They differ in memory: stage r of GPipe (Y. Huang et al., arXiv:1811.06965) holds the activations of all m
micro-batches, that of 1F1B (D. Narayanan et al., "PipeDream", SOSP 2019; flushed after every step as in Megatron-LM,
arXiv:2104.04473) of min(p-r, m). Backward goes through the micro-batches in their order in both, so gradients are
summed in the same order and come out with the same bits. First come the passes of a stage, which know nothing of
units, then `expand` turns them into the operations of a rank.

Interleaved 1F1B (arXiv:2104.04473, section 2.2): several chunks on every rank, so that the pipeline fills and drains
in smaller pieces. With v chunks on each of p ranks (`looped`), and m micro-batches, the idle time is that of 1F1B
over v,

    (p - 1) (tF + tB) / v      (p - 1)/(v m) of the work; tF and tB are of all chunks of a rank together

and messages are v times as many. The activations of more chunks are alive, each of 1/v of the units of a rank: those
of

    min(2 (p - 1 - r) + (v - 1) G + 1, m v)      chunks on rank r, after as many forwards but one as fill the pipeline

Chunks take turns by groups of G micro-batches: virtual step k is the k-th entry of

    for each group: for each chunk: for each micro-batch of the group

for forwards, and with the chunks backwards for backwards. A group has p micro-batches or more, or a chunk would wait
for its own rank; the paper's are of p, which then has to divide m. `interleaved_group` takes the smallest that leaves
no shorter one at the end, as Megatron-LM allows: it costs memory, and no time.

Zero bubble: a backward is split, and the half that nobody waits for fills the time in which a stage would be idle. B
is the gradient of the input, which the stage before waits for, W those of the weights. P. Qi et al., "Zero Bubble
Pipeline Parallelism" (arXiv:2401.10241): ZB-H1 and ZB-H2 in section 2, ZB-V later in the same report, and as V-ZB in
arXiv:2405.15362. With p stages, tF, tB and tW seconds for a pass of a stage, and activations of M_B bytes until B and
M_W bytes from there to W, on stage r = 0..p-1 of enough micro-batches (m >= p, for ZB-H2 and ZB-V 2p - 1):

             idle time of the stage that has most    activations at once on stage r
    1F1B     (p - 1) (tF + tB + tW)                  (p - r) M_B
    ZB-H1    (p - 1) (tF + tB - tW)                  (p - r) M_B + r M_W
    ZB-H2    (p - 1) (tF + tB - 2 tW)                (2 (p - r) - 1) M_B + 2 r M_W
    ZB-V     0                                       p M_B, in 2p halves: a stage is cut into two chunks

as long as these times are not negative, and for ZB-V tF = tB = tW. ZB-H2 reaches 0 for equal times too. Where a pass
of one stage is longer than the others', they wait for it, whatever the order. All of them run for any m.

The numbers that are exact, and proven in the tests, are of micro-batches, or for ZB-V chunks of them, on stage r:

             between F and B                between B and W        both
    ZB-H1    min(p - r, m)                  min(r + 1, m)          min(p, m)
    ZB-H2    min(2 (p - r) - 1, m)          min(2 r + 1, m)        min(2 p - 1, m)
    ZB-V     min(2 p, 2 m, m + r + 1)       2 r + 1, if m >= 2p-1  as between F and B

W follow in the order of their micro-batches, so that gradients are summed in the same order as everywhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from hpcdist.strategies.schedule.operations import COMPUTE, Kind, Operation, StagePlacement

Pass: TypeAlias = tuple[Kind, int, int]  # (one of `COMPUTE`, micro-batch, chunk of the rank): all units of that chunk
Passes: TypeAlias = list[Pass]
LETTERS: Final = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


@dataclass(frozen=True)
class Peak:
    """Largest number of micro-batches that a rank has begun at once, each counted for each of its chunks.

    ``live``: between forward and backward, or the first half of one that is split: all its activations are there.
    ``held``: between the halves: what the gradients of the weights need. ``both``: in either state.
    """

    live: int
    held: int
    both: int


def spell(step: Pass) -> str:
    """Return a pass as schedule files write it: F3.1 is forward of micro-batch 3 through chunk 1 of the rank."""
    return f"{LETTERS[step[0]]}{step[1]}.{step[2]}"


def sequential(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return each micro-batch forward and back before the next: gradient accumulation, with one of them alive."""
    _check(rank, ranks, microbatches)
    return [(way, microbatch, 0) for microbatch in range(microbatches) for way in (Kind.FORWARD, Kind.BACKWARD)]


def gpipe(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return all forwards, then all backwards: m micro-batches are alive on every rank."""
    _check(rank, ranks, microbatches)
    forwards = [(Kind.FORWARD, microbatch, 0) for microbatch in range(microbatches)]
    return forwards + [(Kind.BACKWARD, microbatch, 0) for microbatch in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return 1F1B: forwards that fill the later stages, then forward and backward in turn, then backwards.

    At most min(p - r, m) micro-batches are alive on rank r of p, for any m, also below p.
    """
    _check(rank, ranks, microbatches)
    # Warm-up: one forward for each later stage. The first gradient can be back only after so many.
    ahead = min(ranks - rank - 1, microbatches)
    passes = [(Kind.FORWARD, microbatch, 0) for microbatch in range(ahead)]
    # Steady state: each backward frees the activations of one micro-batch before the next forward takes its place, so
    # at most ahead + 1 are alive.
    for microbatch in range(microbatches - ahead):
        passes += [(Kind.FORWARD, microbatch + ahead, 0), (Kind.BACKWARD, microbatch, 0)]
    # Cool-down: the backwards of the forwards that were ahead.
    return passes + [(Kind.BACKWARD, microbatch, 0) for microbatch in range(microbatches - ahead, microbatches)]


def expand(passes: Sequence[Pass], placement: StagePlacement, rank: int, *, recompute: bool = False) -> list[Operation]:
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
    previous: Pass | None = None
    for direction, microbatch, chunk in passes:
        units = chunks[chunk]
        before, behind = placement.crosses(units.start), units.stop < end and placement.crosses(units.stop)
        if direction is Kind.FORWARD:
            steps += [Operation(Kind.RECV_ACTIVATION, microbatch, units.start)] * before
            for unit in units:
                steps += _skips(Kind.RECV_ACTIVATION, microbatch, unit, placement)
                steps.append(Operation(Kind.FORWARD, microbatch, unit))
                steps += _skips(Kind.SEND_ACTIVATION, microbatch, unit, placement)
            steps += [Operation(Kind.SEND_ACTIVATION, microbatch, units.stop)] * behind
        elif direction is Kind.BACKWARD_WEIGHT:
            steps += [Operation(Kind.BACKWARD_WEIGHT, microbatch, unit) for unit in reversed(units)]
        else:
            if recompute and previous != (Kind.FORWARD, microbatch, chunk):  # else its activations are still there
                steps += [Operation(Kind.FORWARD, microbatch, unit, recompute=True) for unit in units]
            steps += [Operation(Kind.RECV_GRADIENT, microbatch, units.stop)] * behind
            for unit in reversed(units):
                steps += _skips(Kind.RECV_GRADIENT, microbatch, unit, placement)
                steps.append(Operation(direction, microbatch, unit))
                steps += _skips(Kind.SEND_GRADIENT, microbatch, unit, placement)
            steps += [Operation(Kind.SEND_GRADIENT, microbatch, units.start)] * before
        previous = (direction, microbatch, chunk)
    return steps


def _skips(kind: Kind, microbatch: int, unit: int, placement: StagePlacement) -> list[Operation]:
    """Return the messages of ``unit`` over skip connections to other ranks."""
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
    """Return G: the smallest group of ``ranks`` or more micro-batches that leaves no shorter group at the end.

    There is one for every ``microbatches >= ranks``.
    """
    assert microbatches >= ranks, f"{microbatches} micro-batches in groups of {ranks} or more"
    return next(size for size in range(ranks, microbatches + 1) if not 0 < microbatches % size < ranks)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Passes:
    """Return interleaved 1F1B: forwards that fill the pipeline, forward and backward in turn, backwards."""
    size = interleaved_group(ranks, microbatches)
    table = [
        (chunk, microbatch)
        for first in range(0, microbatches, size)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + size, microbatches))
    ]
    forwards = [(Kind.FORWARD, microbatch, chunk) for chunk, microbatch in table]
    # Backwards take the same table with the chunks reversed: the last chunk of a rank goes back first.
    backwards = [(Kind.BACKWARD, microbatch, chunks - 1 - chunk) for chunk, microbatch in table]
    # A micro-batch comes back after all chunks but the last have had a whole group, and after the way from this rank to
    # the last one and back: 2 (p - 1 - r) more.
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * size, len(table))
    passes = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        passes += [forward, backward]
    return passes + backwards[len(table) - ahead :]


def zb_h1(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return ZB-H1: 1F1B with the W of stage r delayed by r micro-batches, in no more memory than 1F1B."""
    return _put_off(microbatches, ahead=ranks - 1 - rank, behind=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return ZB-H2: twice the forwards ahead of ZB-H1 and twice the delay of W, for no idle time between."""
    return _put_off(microbatches, ahead=2 * (ranks - 1 - rank), behind=2 * rank)


def _put_off(microbatches: int, *, ahead: int, behind: int) -> Passes:
    """Return ``ahead`` forwards, then F, B and W in turn, where W is that of ``behind`` micro-batches ago."""
    passes = [(Kind.FORWARD, microbatch, 0) for microbatch in range(min(ahead, microbatches))]
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            passes.append((Kind.FORWARD, microbatch + ahead, 0))
        passes.append((Kind.BACKWARD_INPUT, microbatch, 0))
        if microbatch >= behind:
            passes.append((Kind.BACKWARD_WEIGHT, microbatch - behind, 0))
    left = range(max(0, microbatches - behind), microbatches)
    return passes + [(Kind.BACKWARD_WEIGHT, microbatch, 0) for microbatch in left]


class _Counting:
    """Growing list of passes, each with the next micro-batch of its kind and chunk."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.passes: Passes = []
        self.done = {(direction, chunk): 0 for direction in COMPUTE for chunk in range(2)}

    def add(self, direction: Kind, chunk: int) -> None:
        """Add a pass, unless its micro-batch is beyond the last: the pattern is that of many."""
        microbatch = self.done[direction, chunk]
        self.done[direction, chunk] += 1
        if microbatch < self.microbatches:
            self.passes.append((direction, microbatch, chunk))

    def back(self, chunk: int) -> None:
        """Add B and a W at once."""
        self.add(Kind.BACKWARD_INPUT, chunk)
        self.add(Kind.BACKWARD_WEIGHT, chunk)


def zb_v(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return ZB-V, over two chunks of a `folded` placement: 0 on the way to the last rank, 1 on the way back.

    Fewer than 2p - 1 micro-batches take the places of the first ones in the pattern of 2p - 1.
    """
    steps, rounds = _Counting(microbatches), max(2 * ranks - 1, microbatches)
    for _ in range(2 * (ranks - rank) - 1):  # until the first one is back from the other ranks
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
