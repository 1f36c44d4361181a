"""Interleaved 1F1B: several chunks on every rank of a pipeline, so that it fills and drains in smaller pieces.

D. Narayanan et al. (arXiv:2104.04473, section 2.2): with v chunks on each of p ranks (`looped`), and m micro-batches,
the idle time of a step is that of 1F1B over v,

    (p - 1) (tF + tB) / v      (p - 1)/(v m) of the work; tF and tB are of all chunks of a rank together

and messages are v times as many. The activations of more chunks are alive, each of 1/v of the units of a rank: those of

    min(2 (p - 1 - r) + (v - 1) G + 1, m v)      chunks on rank r, after as many forwards but one as fill the pipeline

Chunks take turns by groups of G micro-batches: virtual step k is the k-th entry of

    for each group: for each chunk: for each micro-batch of the group

for forwards, and with the chunks backwards for backwards. A group has p micro-batches or more, or a chunk would wait
for its own rank; the paper's are of p, which then has to divide m. `group` takes the smallest that leaves no shorter
one at the end, as Megatron-LM allows: it costs memory, and no time.
"""

from hpcdist.strategies.schedule.pipelines import Pass, Passes


def group(ranks: int, microbatches: int) -> int:
    """Return G: the smallest number of micro-batches, from ``ranks`` on, after whose groups none or as many are left.

    There is one for every ``microbatches >= ranks``.
    """
    assert microbatches >= ranks, f"{microbatches} micro-batches in groups of {ranks} or more"
    return next(size for size in range(ranks, microbatches + 1) if not 0 < microbatches % size < ranks)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Passes:
    """Return as many forwards as fill the chunks behind, then forward and backward in turn, then what is left."""
    size = group(ranks, microbatches)
    table = [
        (chunk, microbatch)
        for first in range(0, microbatches, size)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + size, microbatches))
    ]
    forwards = [(Pass.FORWARD, microbatch, chunk) for chunk, microbatch in table]
    backwards = [(Pass.BACKWARD, microbatch, chunks - 1 - chunk) for chunk, microbatch in table]
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * size, len(table))
    passes = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        passes += [forward, backward]
    return passes + backwards[len(table) - ahead :]
