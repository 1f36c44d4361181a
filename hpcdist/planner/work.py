"""Operations of a step: of the model, of the hardware that computes some again, and of the pairs that are looked at.

Appendix A of arXiv:2205.05198 (Korthikanti et al.), for L blocks of width h, vocabulary v, s tokens and batch B:

    model                  72 B L s h^2 (1 + s / (6 h) + v / (12 h L))
    hardware, selective    72 B L s h^2 (1 + s / (3 h) + v / (12 h L))
    hardware, full         96 B L s h^2 (1 + s / (6 h) + v / (16 h L)), which is equation 3 of arXiv:2104.04473

It is 2 for each multiplication and addition of a matrix product, twice as much back as forward, and attention over all
pairs, causal or not. With "selective" the paper counts attention twice, back too, though one more forward alone is
less, s / (4.5 h); the utilisations of the hardware that it prints follow the formula, and so does this. Here it is
summed over the products of each unit, so it holds for grouped keys, gated feed-forwards and experts, too.

The kernels of this toolkit compute the scores once more in their backward, which keeps none of them
(`hpcdist.models.attention`): half of attention's forward, whatever is recomputed besides, and "selective" has nothing
to add. In a pipeline they repeat whole chunks, with "full", but for a last chunk whose backward follows its forward.

All of that is counted over all pairs, so that it compares with what is published. Operations that are "exact" are those
of the model over the pairs that are looked at, "executed" those of the hardware: the kernels of this toolkit skip
tokens that a causal attention does not look at, the published ones compute and mask them.
"""

from functools import lru_cache

from hpcdist.planner.description import Description, Unit
from hpcdist.planner.estimate import Work
from hpcdist.planner.layout import Layout


def work(description: Description, layout: Layout, global_batch: int) -> Work:
    """Return the operations of a step of ``global_batch`` samples, on all devices together (local)."""
    is_ours = layout.implementation == "hpcdist"
    model, hardware, exact, executed = _of_sample(description, layout.recompute, is_ours)
    if is_ours and layout.recompute == "full":
        cut = layout.pipeline, layout.chunks, layout.schedule
        again, seen = _again(description, *cut)
        hardware += again
        executed += seen
    return Work(
        model_flops=model * global_batch,
        hardware_flops=hardware * global_batch,
        exact_flops=exact * global_batch,
        executed_flops=executed * global_batch,
    )


def matrix_flops(unit: Unit) -> float:
    """Return the operations of the products of one ``unit``, forward, of a sample."""
    return sum(
        2.0 * product.rows * product.inner * product.columns * product.experts * product.share
        for product in unit.products
    )


def forward_flops(unit: Unit, *, exact: bool = False) -> float:
    """Return the operations of one ``unit``, forward, of a sample: of all pairs, or those that are looked at."""
    return matrix_flops(unit) + attention_flops(unit, exact=exact)


def attention_flops(unit: Unit, *, exact: bool = False) -> float:
    """Return the operations of its attention, forward, of a sample: of all pairs, or those that are looked at."""
    if unit.attention is None:
        return 0.0
    attention = unit.attention
    return 4.0 * attention.heads * attention.size * (attention.pairs if exact else attention.context**2)


@lru_cache(maxsize=4096)
def _again(description: Description, pipeline: int, chunks: int, schedule: str) -> tuple[float, float]:
    """Return what our "full" recomputation repeats of the forward of a sample: of all pairs, of those looked at."""
    from hpcdist.planner.again import repeated  # which cuts units by what is counted here

    layout = Layout(pipeline=pipeline, chunks=chunks, schedule=schedule, implementation="hpcdist", recompute="full")
    shares = [share for chunk in repeated(description, layout) for share in chunk.shares]
    every = sum([share.times * forward_flops(share.unit) for share in shares])
    return every, sum([share.times * forward_flops(share.unit, exact=True) for share in shares])


@lru_cache(maxsize=1024)
def _of_sample(description: Description, recompute: str, is_ours: bool) -> tuple[float, float, float, float]:
    model = hardware = exact = executed = 0.0
    for unit in description.units:
        matrices, scores, seen = matrix_flops(unit), attention_flops(unit), attention_flops(unit, exact=True)
        back = 1 if unit.first else 2
        each = (1 + back) * matrices + 3 * scores
        needed = (1 + back) * matrices + 3 * seen
        again = 0.0
        if is_ours:
            again = scores / 2
        elif unit.attention is not None and recompute != "none":
            again = 3 * scores if recompute == "selective" else matrices + scores
        model += unit.count * each
        hardware += unit.count * (each + again)
        exact += unit.count * needed
        executed += unit.count * (needed + seen / 2 if is_ours else each + again)
    return model, hardware, exact, executed
