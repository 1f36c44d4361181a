"""Training data: sources, samples by global index, sample order, and prefetching.

The samples of a batch depend only on the seed and the global sample index, not on the number of ranks. May import
`arrays`, `comm`, `hdf5`, `models` and `recipe.config`. Begin with `source.open_source` and `prefetch.Prefetcher`.
"""

from hpcdist.training.data.mixture import MixedSampler, sampler_of
from hpcdist.training.data.prefetch import Prefetcher, own_samples
from hpcdist.training.data.sampler import (
    FEISTEL,
    RULES,
    UNIFORM,
    LoadBalancer,
    SampleOrder,
    Sampler,
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
    "MixedSampler",
    "Prefetcher",
    "SampleOrder",
    "SampleShares",
    "Sampler",
    "Source",
    "microbatches",
    "open_source",
    "own_samples",
    "sampler_of",
    "script_source",
    "shards",
]
