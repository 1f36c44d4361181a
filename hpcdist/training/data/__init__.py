"""Training data: sources in files, samples by global index, and reading ahead."""

from hpcdist.training.data.prefetch import Prefetcher, own_samples
from hpcdist.training.data.sampler import FEISTEL, RULES, UNIFORM, Order, microbatches, shards
from hpcdist.training.data.script import of_script
from hpcdist.training.data.shares import Balance, Shares
from hpcdist.training.data.source import Source, open_source

__all__ = [
    "FEISTEL",
    "RULES",
    "UNIFORM",
    "Balance",
    "Order",
    "Prefetcher",
    "Shares",
    "Source",
    "microbatches",
    "of_script",
    "open_source",
    "own_samples",
    "shards",
]
