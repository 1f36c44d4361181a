"""Training data: sources, samples by global index, sample order, and prefetching.

The samples of a batch depend only on the seed and the global sample index, not on the number of ranks. May import
`arrays`, `comm`, `hdf5`, `models` and `recipe.config`. Begin with `source.open_source` and `prefetch.Prefetcher`.
"""

from hpcdist.training.data.prefetch import Prefetcher, own_samples
from hpcdist.training.data.sampler import (
    FEISTEL,
    RULES,
    UNIFORM,
    LoadBalancer,
    SampleOrder,
    SampleShares,
    microbatches,
    shards,
)
from hpcdist.training.data.source import Source, open_source, script_source

__all__ = [
    "FEISTEL",
    "RULES",
    "UNIFORM",
    "LoadBalancer",
    "Prefetcher",
    "SampleOrder",
    "SampleShares",
    "Source",
    "microbatches",
    "open_source",
    "own_samples",
    "script_source",
    "shards",
]
