"""From the section of a recipe to the exchange of one rank."""

from collections.abc import Callable
from typing import Final

from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.decentralised.gossip import GossipExchange
from hpcdist.strategies.decentralised.local_sgd import LocalSgdExchange
from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.strategies.seat import Seat

# By strategy. Each is collective over the data axis, and raises ConfigurationError on every rank for a graph that is
# none of its ranks.
EXCHANGES: Final[dict[str, Callable[[Seat, DecentralisedConfig], Replicas]]] = {
    "gossip": GossipExchange,
    "local_sgd": LocalSgdExchange,
}
