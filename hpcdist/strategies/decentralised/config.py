"""The ``[decentralised]`` section of a recipe. Imports only the errors and `reporting`."""

import re
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import rule
from hpcdist.reporting.schema import check_section, key

STRATEGIES: Final = ("gossip", "local_sgd")
GRAPHS: Final = ("ring", "torus", "exponential", "one_peer", "complete", "edges")
ORDERS: Final = ("combine_first", "adapt_first")
MOMENTS: Final = ("keep", "average", "reset")
KEYS: Final = {
    "gossip": ("graph", "edges", "order", "report_every"),
    "local_sgd": ("period", "moments", "outer_learning_rate", "outer_momentum"),
}
CORRECTED: Final = ("adamw", "lamb", "muon")  # optimizers with bias correction of their moments
_EDGE: Final = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
RULES: Final = (
    rule("decentralised.edges= with decentralised.graph=edges", cure="give them as in '0-1, 1-2'"),
    rule("decentralised.edges with decentralised.graph!=edges", cure="set decentralised.graph = 'edges'"),
)


@dataclass(frozen=True, kw_only=True)
class DecentralisedConfig:
    """Section ``[decentralised]``: options of strategies in which each replica makes its own steps."""

    graph: str = key("ring", "Graph of the ranks that exchange parameters.", choices=GRAPHS)
    edges: str = key("", 'Edges of the graph, as "0-1, 1-2".')
    order: str = key(
        "combine_first",
        "combine_first: mix while the gradient is computed. adapt_first: mix after the update.",
        choices=ORDERS,
    )
    report_every: int = key(100, "Steps between measurements of the distance between replicas. 0: only at saves.", ge=0)
    period: int = key(8, "Number of local steps between averagings.", ge=1)
    moments: str = key(
        "keep", "Optimizer moments at an averaging: keep them local, average them, or reset them.", choices=MOMENTS
    )
    outer_learning_rate: float = key(1.0, "Learning rate of the outer optimizer (DiLoCo). 1: plain mean.", gt=0)
    outer_momentum: float = key(0.0, "Nesterov momentum of the outer optimizer.", ge=0, lt=1)

    @property
    def has_outer_optimizer(self) -> bool:
        """True if the outer optimizer's result differs from the plain mean of the parameters."""
        return self.outer_learning_rate != 1.0 or self.outer_momentum != 0.0

    def __post_init__(self) -> None:
        check_section(RULES, "decentralised", self)
        seen: set[frozenset[int]] = set()
        for first, other in parse_edges(self.edges):
            if frozenset((first, other)) in seen:
                raise ConfigurationError(
                    f"decentralised.edges: the edge between ranks {first} and {other} is listed twice (0-1 and 1-0 are "
                    "the same edge); list each edge only once"
                )
            seen.add(frozenset((first, other)))
            if first == other:
                raise ConfigurationError(
                    f"decentralised.edges: the edge {first}-{other} joins a rank to itself; remove this edge, because "
                    "every rank's average always includes its own parameters"
                )


def parse_edges(text: str) -> tuple[tuple[int, int], ...]:
    """Return a tuple of the pairs of ranks in a text like "0-1, 1-2". Raises ConfigurationError for others."""
    edges = []
    for word in text.replace(",", " ").split():
        match = _EDGE.fullmatch(word)
        if match is None:
            raise ConfigurationError(
                f"decentralised.edges: {word!r} is not an edge; give pairs of ranks, as in '0-1, 1-2'"
            )
        edges.append((int(match[1]), int(match[2])))
    return tuple(edges)
