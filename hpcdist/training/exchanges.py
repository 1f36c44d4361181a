"""From a recipe to what turns gradients into parameters."""

from hpcdist.strategies import build as decentralised
from hpcdist.strategies import build as parameter_server
from hpcdist.strategies import build as strategies
from hpcdist.strategies.allreduce import FixedTreeExchange
from hpcdist.strategies.compressed.dgc import DgcExchange
from hpcdist.strategies.compressed.exchange import CompressedExchange
from hpcdist.strategies.compressed.onebit import OneBitExchange
from hpcdist.strategies.compressed.zero import CompressedZero
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.logical_shards import LogicalShards
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.delayed import DelayedExchange
from hpcdist.strategies.parameter_server.compressed import PushCompression
from hpcdist.strategies.zero.config import STAGES
from hpcdist.strategies.zero.exchange import ZeroExchange
from hpcdist.training.recipe import Recipe


def build(seat: RankContext, recipe: Recipe, compression: str) -> Exchange:
    """Return the exchange of the recipe's strategy; ``compression`` is what `auto` has become. Collective."""
    shards = LogicalShards(seat, recipe.run.logical_shards) if recipe.run.logical_shards else None
    if recipe.parallel.strategy == "parameter_server":
        given = compression, recipe.compression, recipe.run.seed
        pushed = None if compression == "none" else PushCompression(*given)
        return parameter_server.server_exchange(seat, recipe.parameter_server, shards, pushed)
    if recipe.parallel.strategy in decentralised.DECENTRALISED_EXCHANGES:
        return decentralised.DECENTRALISED_EXCHANGES[recipe.parallel.strategy](seat, recipe.decentralised)
    if recipe.parallel.strategy in STAGES:
        stage = STAGES[recipe.parallel.strategy]
        if compression != "none" or recipe.compression.parameters != "none":
            return CompressedZero(seat, stage, recipe.zero, compression, recipe.compression, recipe.run.seed)
        return ZeroExchange(seat, stage, recipe.zero, shards)
    if shards is not None:
        return FixedTreeExchange(seat, shards)
    if recipe.communication.delayed:
        return DelayedExchange(seat)
    if compression == "dgc":
        return DgcExchange(seat, recipe.compression)
    if compression == "onebit":
        return OneBitExchange(seat, recipe.compression, recipe.run.seed)
    if compression != "none":
        return CompressedExchange(seat, compression, recipe.compression, recipe.run.seed)
    return strategies.EXCHANGES[recipe.parallel.strategy](seat)
