"""Random numbers by logical stream: counter-based, so that no cut of the work changes a draw."""

import numpy as np


def stream(seed: int, *keys: int) -> np.random.Generator:
    """Return the generator of the stream named by ``(seed, *keys)``: the same on every rank, in any order of use.

    Philox4x64 (Salmon et al., SC'11) is keyed by a hash of the names (numpy's ``SeedSequence``), so a stream can be
    opened anywhere, for example by (seed, step, micro-batch, global layer).
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *keys])))
