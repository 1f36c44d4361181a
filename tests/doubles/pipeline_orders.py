"""Random cuts of a model, and random orders in which the ranks of a pipeline may work."""

import random

from hpcdist.strategies.schedule.generate.passes import Pass, Passes
from hpcdist.strategies.schedule.operations import StagePlacement

PASSES = {True: (Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT), False: (Pass.FORWARD, Pass.BACKWARD)}


def parts(units: int, chunks: int, draw: random.Random) -> list[range]:
    cuts = [0, *sorted(draw.sample(range(1, units), chunks - 1)), units]
    return [range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]


def legal(placement: StagePlacement, microbatches: int, split: bool, draw: random.Random) -> tuple[Passes, ...]:
    """A random order of all passes that keeps to what they need; each rank takes its own of them.

    Each chunk takes micro-batches in their order in every kind of pass: sums of gradients then have the same bits.
    """
    last = len(placement.chunks) - 1
    done = {(way, chunk): 0 for way in PASSES[split] for chunk in range(last + 1)}
    found: tuple[Passes, ...] = tuple([] for _ in range(placement.stages))
    back = PASSES[split][1]

    def ready(way: Pass, chunk: int) -> bool:
        number = done[way, chunk]
        if number == microbatches:
            return False
        if way is Pass.FORWARD:
            return chunk == 0 or done[way, chunk - 1] > number
        if way is Pass.BACKWARD_WEIGHT:
            return done[back, chunk] > number
        return done[Pass.FORWARD, chunk] > number and (chunk == last or done[back, chunk + 1] > number)

    while choices := [key for key in done if ready(*key)]:
        way, chunk = draw.choice(choices)
        rank = placement.ranks[chunk]
        local = [number for number, owner in enumerate(placement.ranks) if owner == rank].index(chunk)
        found[rank].append((way, done[way, chunk], local))
        done[way, chunk] += 1
    return found
