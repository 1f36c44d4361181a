"""Zero-bubble schedules: a backward is split, and what nobody waits for fills the time in which a stage would be idle.

B is the gradient of the input, which the stage before waits for, W those of the weights. P. Qi et al., "Zero Bubble
Pipeline Parallelism" (arXiv:2401.10241): ZB-H1 and ZB-H2 in section 2, ZB-V later in the same report, and as V-ZB in
arXiv:2405.15362. With p stages, tF, tB and tW seconds for a pass of a stage, and activations of M_B bytes until B and
M_W bytes from there to W, on stage r = 0..p-1 of enough micro-batches (m >= p, for ZB-H2 and ZB-V 2p - 1):

             idle time of the stage that has most    activations at once on stage r
    1F1B     (p - 1) (tF + tB + tW)                  (p - r) M_B
    ZB-H1    (p - 1) (tF + tB - tW)                  (p - r) M_B + r M_W
    ZB-H2    (p - 1) (tF + tB - 2 tW)                (2 (p - r) - 1) M_B + 2 r M_W
    ZB-V     0                                       p M_B, in 2p halves: a stage is cut into two chunks

as long as these times are not negative, and for ZB-V tF = tB = tW. ZB-H2 reaches 0 for equal times too. Where a pass of
one stage is longer than the others', they wait for it, whatever the order. All of them run for any m.

The numbers that are exact, and proven in the tests, are of micro-batches, or for ZB-V chunks of them, on stage r:

             between F and B                between B and W        both
    ZB-H1    min(p - r, m)                  min(r + 1, m)          min(p, m)
    ZB-H2    min(2 (p - r) - 1, m)          min(2 r + 1, m)        min(2 p - 1, m)
    ZB-V     min(2 p, 2 m, m + r + 1)       2 r + 1, if m >= 2p-1  as between F and B

W follow in the order of their micro-batches, so that gradients are summed in the same order as everywhere else.
"""

from hpcdist.strategies.schedule.pipelines import Pass, Passes


def zb_h1(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return 1F1B with the weights' gradients of stage r put off by r micro-batches: no more memory than 1F1B's."""
    return _put_off(microbatches, ahead=ranks - 1 - rank, behind=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return ZB-H1 with twice the forwards ahead and the W behind: twice the memory, and no idle time between."""
    return _put_off(microbatches, ahead=2 * (ranks - 1 - rank), behind=2 * rank)


def _put_off(microbatches: int, *, ahead: int, behind: int) -> Passes:
    """Return ``ahead`` forwards, then F, B and W in turn, where W is that of ``behind`` micro-batches ago."""
    passes = [(Pass.FORWARD, microbatch, 0) for microbatch in range(min(ahead, microbatches))]
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            passes.append((Pass.FORWARD, microbatch + ahead, 0))
        passes.append((Pass.BACKWARD_INPUT, microbatch, 0))
        if microbatch >= behind:
            passes.append((Pass.BACKWARD_WEIGHT, microbatch - behind, 0))
    left = range(max(0, microbatches - behind), microbatches)
    return passes + [(Pass.BACKWARD_WEIGHT, microbatch, 0) for microbatch in left]


class _Counting:
    """Passes as they are added, each with the next micro-batch of its kind and chunk."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.passes: Passes = []
        self.done = {(direction, chunk): 0 for direction in Pass for chunk in range(2)}

    def add(self, direction: Pass, chunk: int) -> None:
        """Add a pass, unless its micro-batch is beyond the last: the pattern is that of many."""
        microbatch = self.done[direction, chunk]
        self.done[direction, chunk] += 1
        if microbatch < self.microbatches:
            self.passes.append((direction, microbatch, chunk))

    def back(self, chunk: int) -> None:
        """Add B and, at once, a W."""
        self.add(Pass.BACKWARD_INPUT, chunk)
        self.add(Pass.BACKWARD_WEIGHT, chunk)


def zb_v(rank: int, ranks: int, microbatches: int) -> Passes:
    """Return the passes over two chunks of a `folded` placement: 0 on the way to the last rank, 1 on the way back.

    Fewer than 2p - 1 micro-batches take the places of the first ones in the pattern of 2p - 1.
    """
    steps, rounds = _Counting(microbatches), max(2 * ranks - 1, microbatches)
    for _ in range(2 * (ranks - rank) - 1):  # until the first one is back from the other ranks
        steps.add(Pass.FORWARD, 0)
    for _ in range(rank):
        steps.add(Pass.FORWARD, 1)
        steps.add(Pass.FORWARD, 0)
    for _ in range(ranks - rank):
        steps.add(Pass.FORWARD, 1)
        steps.back(1)
    while steps.done[Pass.FORWARD, 1] < rounds:
        if steps.done[Pass.FORWARD, 0] < rounds:
            steps.add(Pass.FORWARD, 0)
        steps.back(0)
        steps.add(Pass.FORWARD, 1)
        steps.back(1)
    for _ in range(rank):
        steps.add(Pass.BACKWARD_INPUT, 0)
        steps.add(Pass.BACKWARD_INPUT, 1)
    for _ in range(ranks - rank):
        steps.back(0)
    for chunk in (1, 0):
        while steps.done[Pass.BACKWARD_WEIGHT, chunk] < rounds:
            steps.add(Pass.BACKWARD_WEIGHT, chunk)
    return steps.passes
