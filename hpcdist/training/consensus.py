"""What a run of replicas that differ says of them: in its metrics, and at its end."""

import math
from collections.abc import Mapping
from typing import Any

from hpcdist.strategies.decentralised.gossip import GossipExchange
from hpcdist.strategies.decentralised.replicas import Replicas
from hpcdist.telemetry.metrics import side_tables
from hpcdist.training.metrics import Metrics
from hpcdist.training.trainer import Trainer


def note(metrics: Metrics, trainer: Trainer) -> None:
    """Write the consensus distances that were measured since the last call (rank 0 does, the others forget them)."""
    if isinstance(trainer.exchange, Replicas):
        new = trainer.exchange.taken()
        if new:
            metrics.include(lambda file, session: side_tables.append_consensus(file, session, new))


def figures(trainer: Trainer) -> dict[str, Any]:
    """Return what the summary of such a run has beside the figures of all runs, {} for others (local).

    ``consensus_distance`` is the last one, measured before the replicas became one model. What nobody knows is None.
    """
    exchange = trainer.exchange
    if not isinstance(exchange, Replicas):
        return {}
    gap = exchange.graph.gap if isinstance(exchange, GossipExchange) else math.nan
    return {"spectral_gap": _number(gap), "consensus_distance": _number(exchange.distance)}


def described(summary: Mapping[str, Any]) -> list[str]:
    """Return the line of a summary that says so, if there is anything to say."""
    distance = summary.get("consensus_distance")
    return [] if distance is None else [f"replicas were {distance:.3g} of the norm of their mean apart, then averaged"]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
