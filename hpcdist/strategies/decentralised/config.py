"""The ``[decentralised]`` section of a recipe: graph, order of mixing, period, moments, and the outer optimizer.

Light: imports nothing but the errors and `reporting`.
"""

import re
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import at_least, check_section, finite, must, one_of, rule

STRATEGIES: Final = ("gossip", "local_sgd")
GRAPHS: Final = ("ring", "torus", "exponential", "one_peer", "complete", "edges")
ORDERS: Final = ("combine_first", "adapt_first")
MOMENTS: Final = ("keep", "average", "reset")
KEYS: Final = {
    "gossip": ("graph", "edges", "order", "report_every"),
    "local_sgd": ("period", "moments", "outer_learning_rate", "outer_momentum"),
}
CORRECTED: Final = ("adamw", "lamb")  # optimizers that divide their moments by what a start at zero makes them lack
_EDGE: Final = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
RULES: Final = (
    one_of("decentralised.graph", GRAPHS),
    one_of("decentralised.order", ORDERS),
    one_of("decentralised.moments", MOMENTS),
    *at_least(0, "decentralised.report_every"),
    *at_least(1, "decentralised.period"),
    finite("decentralised.outer_learning_rate", lambda rate: rate > 0, "above 0"),
    must("decentralised.outer_momentum", lambda momentum: 0 <= momentum < 1, "it must be at least 0 and below 1"),
    rule("decentralised.edges= with decentralised.graph=edges", cure="give them as in '0-1, 1-2'"),
    rule("decentralised.edges with decentralised.graph!=edges", cure="set decentralised.graph = 'edges'"),
)


@dataclass(frozen=True, kw_only=True)
class DecentralisedConfig:
    """Section ``[decentralised]``: mixing and averaging of replicas that make steps of their own.

    Of the strategy gossip: after each step a rank takes a weighted mean of its parameters and those of its neighbours
    on ``graph`` (see `hpcdist.strategies.decentralised.gossip`); ``edges``, such as "0-1, 1-2", are those of the graph
    "edges". ``order`` says whether parameters are mixed before the step, beside the computation of its gradient
    ("combine_first"), or after it ("adapt_first"). Every ``report_every`` steps it is measured how far the replicas are
    apart (0: when they are saved only).

    Of the strategy local_sgd: parameters are averaged over all ranks every ``period`` steps. The moments of the
    optimizer then stay those of each rank ("keep"), or are averaged, or begin anew. The mean is a step of an outer
    optimizer, SGD with Nesterov's ``outer_momentum``: with the defaults the mean itself.
    """

    graph: str = "ring"
    edges: str = ""
    order: str = "combine_first"
    report_every: int = 100
    period: int = 8
    moments: str = "keep"
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0

    @property
    def has_outer_optimizer(self) -> bool:
        """Whether an averaging is more than the mean."""
        return self.outer_learning_rate != 1.0 or self.outer_momentum != 0.0

    def __post_init__(self) -> None:
        check_section(RULES, "decentralised", self)
        seen: set[frozenset[int]] = set()
        for first, other in parse_edges(self.edges):
            if frozenset((first, other)) in seen:
                raise ConfigurationError(
                    f"decentralised.edges: {first}-{other} comes twice, in one direction or the other; name each edge "
                    "once, its weight follows from the graph"
                )
            seen.add(frozenset((first, other)))
            if first == other:
                raise ConfigurationError(
                    f"decentralised.edges: {first}-{other} joins a rank to itself, as every rank is anyway; remove it"
                )


def parse_edges(text: str) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ranks in a text such as "0-1, 1-2". Raises ConfigurationError."""
    edges = []
    for word in text.replace(",", " ").split():
        match = _EDGE.fullmatch(word)
        if match is None:
            raise ConfigurationError(f"decentralised.edges: {word!r} is no edge; give pairs of ranks, as in '0-1, 1-2'")
        edges.append((int(match[1]), int(match[2])))
    return tuple(edges)
