"""What a collective or a message takes on a cluster: measured where it was, else by formula over the links it crosses.

`span` tells which links a group of an axis crosses, `hpcdist.planner.network_costs` has the formulas with their
sources. What was measured (`hpcdist.planner.cluster.Fit`) comes first, where it was the same algorithm of the same
library, on as many ranks that lie as the group does: neighbours, over links of the same level. Below the smallest size
that was measured the formula holds, and nothing takes longer than that size did. Bytes are those of the whole buffer,
in fits too.
"""

from functools import lru_cache
from typing import Final, NamedTuple

from hpcdist.errors import UsageError
from hpcdist.planner.cluster import Cluster, Fit
from hpcdist.planner.layout import ALGORITHMS, Layout
from hpcdist.planner.network_costs import FORMULAS, WITH_CHANNELS
from hpcdist.planner.network_span import AXES, Span, Tier, group, span

__all__ = [
    "AXES",
    "NOTHING",
    "OPERATIONS",
    "Cost",
    "Span",
    "Tier",
    "collective",
    "group",
    "message",
    "span",
    "substituted",
    "times",
]

OPERATIONS: Final = tuple(FORMULAS)
_NAMES: Final = frozenset(ALGORITHMS) | {name for formulas in FORMULAS.values() for name in formulas}


class Cost(NamedTuple):
    """Seconds, the most bytes that a device sends, and by which algorithm; ``flags`` tell what was assumed."""

    seconds: float
    nbytes: float
    algorithm: str
    flags: tuple[str, ...] = ()


NOTHING: Final = Cost(0.0, 0.0, "none")


def times(cost: Cost, often: float) -> Cost:
    """Return what it takes so often, one after the other (local)."""
    return Cost(cost.seconds * often, cost.nbytes * often, cost.algorithm, cost.flags)


def collective(operation: str, nbytes: float, span: Span, cluster: Cluster, algorithm: str = "auto") -> Cost:
    """Return what ``operation`` on a buffer of ``nbytes`` takes over ``span``.

    ``nbytes`` is the whole buffer: what reduce_scatter begins with, what all_gather ends with, and all that a device
    has in all_to_all, its own part included. "auto" is what was measured, else the fastest formula; where an
    operation has no such algorithm as is asked for (a tree cannot scatter) it is done as the fastest one, too: flagged.
    Raises UsageError for names that are none.
    """
    if span.size <= 1 or nbytes <= 0:
        return NOTHING
    if cluster.fits and span.stride == 1:
        for fit in cluster.fits:
            known = (fit.operation, fit.ranks, fit.algorithm) == (operation, span.size, algorithm)
            if known and _on(fit, span, cluster):
                sent = _least_bytes(operation, nbytes, span.size)
                measured = Cost(_fitted(fit, nbytes), sent, f"measured {algorithm}")
                return _within(fit, nbytes, measured, _cost(operation, nbytes, span, algorithm))
    return _cost(operation, nbytes, span, algorithm)


def message(nbytes: float, layout: Layout, axis: str, cluster: Cluster) -> Cost:
    """Return what a message to the next along ``axis`` takes while all groups send one; of the slowest neighbours."""
    reach = span(layout, axis, cluster)
    if reach.size <= 1 or nbytes <= 0:
        return NOTHING
    tier = reach.tiers[-1]
    formula = Cost(tier.latency_s + nbytes * tier.single, nbytes, "message", reach.flags)
    for fit in cluster.fits:
        if fit.operation == "message" and _on(fit, reach, cluster) and (fit.level or tier.outer == 0):
            return _within(fit, nbytes, Cost(_fitted(fit, nbytes), nbytes, "measured"), formula)
    return formula


def _on(fit: Fit, span: Span, cluster: Cluster) -> bool:
    """Return whether the outermost links of ``span``, and its library, are those that were measured."""
    if fit.library and (fit.library == "nccl") != span.channels:
        return False
    return not fit.level or fit.level == cluster.levels[span.tiers[-1].outer].name


def _within(fit: Fit, nbytes: float, measured: Cost, formula: Cost) -> Cost:
    """Return what was ``measured``, flagged beyond its sizes; below them the ``formula`` (see above)."""
    if fit.from_bytes <= nbytes <= fit.until_bytes[-1]:
        return measured
    sizes = f"measured from {fit.from_bytes:.3g} to {fit.until_bytes[-1]:.3g} bytes"
    if nbytes > fit.until_bytes[-1]:
        return measured._replace(flags=(f"extrapolated: {fit.operation} over {fit.ranks} ranks, {sizes}",))
    flag = f"extrapolated by formula: {fit.operation} over {fit.ranks} ranks, {sizes}"
    return formula._replace(seconds=min(formula.seconds, _fitted(fit, fit.from_bytes)), flags=(*formula.flags, flag))


def _fitted(fit: Fit, nbytes: float) -> float:
    """Return the seconds of the line that ``nbytes`` lie on."""
    pieces = len(fit.until_bytes)
    piece = next((piece for piece in range(pieces) if nbytes <= fit.until_bytes[piece]), pieces - 1)
    return fit.latency_s[piece] + nbytes * fit.s_per_byte[piece]


def _least_bytes(operation: str, nbytes: float, p: int) -> float:
    """Return what a device has to send at least (Patarasuk and Yuan 2009): of measured ones nobody knows more."""
    if operation == "broadcast":
        return nbytes
    return (2 if operation == "allreduce" else 1) * (p - 1) / p * nbytes


@lru_cache(maxsize=1 << 16)
def _cost(operation: str, nbytes: float, span: Span, algorithm: str) -> Cost:
    if operation not in FORMULAS:
        raise UsageError(f"collective {operation!r}; choose one of {', '.join(OPERATIONS)}")
    if algorithm not in _NAMES:
        raise UsageError(f"algorithm {algorithm!r}; choose one of {', '.join(sorted(_NAMES))}")
    known = FORMULAS[operation]
    if algorithm in known:
        return _named(operation, algorithm, nbytes, span)
    names = [name for name in known if not span.channels or name in WITH_CHANNELS]
    best = min((_named(operation, name, nbytes, span) for name in names), key=lambda cost: cost.seconds)
    if algorithm == "auto":
        return best
    return best._replace(flags=(*best.flags, substituted(algorithm, operation, best.algorithm)))


def substituted(algorithm: str, operation: str, taken: str) -> str:
    """Return the flag of an ``operation`` that goes another way than by the ``algorithm`` that was asked for."""
    return f"algorithm = {algorithm}: {operation} has none of that name, and goes by {taken}"


def _named(operation: str, name: str, nbytes: float, span: Span) -> Cost:
    seconds, sent = FORMULAS[operation][name](nbytes, span)
    return Cost(seconds, sent, name, span.flags)
