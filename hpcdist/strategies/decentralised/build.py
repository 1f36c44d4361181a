"""From the section of a recipe to the exchange of one rank."""

from hpcdist.strategies.decentralised.config import STRATEGIES, DecentralisedConfig
from hpcdist.strategies.decentralised.gossip import GossipExchange
from hpcdist.strategies.decentralised.local_sgd import LocalSgdExchange
from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.strategies.seat import Seat


def exchange(seat: Seat, strategy: str, config: DecentralisedConfig) -> Replicas:
    """Return the exchange of the rank in ``seat`` for ``strategy``. Collective.

    Raises ConfigurationError on every rank for a graph that is none of the ranks of the data axis.
    """
    if strategy == "gossip":
        return GossipExchange(seat, config)
    assert strategy in STRATEGIES, f"{strategy} is no decentralised strategy"
    return LocalSgdExchange(seat, config)
