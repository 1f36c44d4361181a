"""Costs of a simulated step: seconds of the passes of each unit, of messages between ranks, and of the exchange.

A message or a collective takes a fixed time and its bytes over a bandwidth (`Rate`); a link carries one message after
the other (`LinkCost`). The planner and `hpcdist bench pipeline` fill these in.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcdist.errors import UsageError
from hpcdist.strategies.schedule.operations import Kind, Operation


@dataclass(frozen=True)
class Rate:
    """``seconds``, and what moving bytes takes at ``bytes_per_s``."""

    seconds: float = 0.0
    bytes_per_s: float = math.inf

    def of(self, nbytes: float) -> float:
        """Return the seconds that ``nbytes`` take."""
        return self.seconds + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class LinkCost:
    """From one rank to another: a message takes the link for ``carries``, and arrives ``latency_s`` later."""

    latency_s: float = 0.0
    carries: Rate = field(default_factory=Rate)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds and bytes of one micro-batch, each a sequence by unit of the model.

    ``backward_s`` is that of a joint backward; where it is split, ``input_s`` and ``weight_s`` take its place.
    ``message_bytes`` is the input of a unit, and its gradient; ``kept_bytes`` what a unit keeps from its forward for
    its backward, ``held_bytes`` what it keeps from a BACKWARD_INPUT to its BACKWARD_WEIGHT. Empty: not known, and
    counted as nothing. ``links`` are those between two ranks, by (from, to), that differ from ``link``. ``exchange``
    has the kinds of operations that take time beside the passes: of the bytes of their range, or unit, whose elements
    are ``element_bytes`` each.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]
    message_bytes: Sequence[float] = ()
    kept_bytes: Sequence[float] = ()
    held_bytes: Sequence[float] = ()
    link: LinkCost = LinkCost()
    links: Mapping[tuple[int, int], LinkCost] = field(default_factory=dict)
    exchange: Mapping[Kind, Rate] = field(default_factory=dict)
    element_bytes: int = 4
    unit_sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        rows = {name: getattr(self, name) for name in ("forward_s", "backward_s", "input_s", "weight_s")}
        for name, row in rows.items():
            if len(row) != len(self.forward_s):
                raise UsageError(f"costs: {name} has {len(row)} units, forward_s {len(self.forward_s)}; give one each")
            if not all(math.isfinite(seconds) and seconds >= 0 for seconds in row):
                raise UsageError(f"costs: {name} = {list(row)}; seconds are finite and not negative")

    @classmethod
    def equal(
        cls, units: int, forward_s: float, input_s: float, weight_s: float, *, link: LinkCost | None = None
    ) -> "StepCosts":
        """Return the costs of ``units`` that are all alike, whose joint backward takes as long as the two parts."""
        return cls(
            forward_s=[forward_s] * units,
            backward_s=[input_s + weight_s] * units,
            input_s=[input_s] * units,
            weight_s=[weight_s] * units,
            link=link or LinkCost(),
        )

    def travel_s(self, source: int, target: int, unit: int) -> tuple[float, float]:
        """Return how long the input of ``unit``, or its gradient, takes the link, and how much later it arrives."""
        link = self.links.get((source, target), self.link)
        return link.carries.of(self.message_bytes[unit] if self.message_bytes else 0.0), link.latency_s

    def exchange_s(self, op: Operation) -> float:
        """Return the seconds of an operation of the exchange; 0 for kinds that nothing is said of."""
        rate = self.exchange.get(op.kind)
        if rate is None:
            return 0.0
        if op.range is not None:
            return rate.of(op.range.size * self.element_bytes)
        of_unit = self.unit_sizes[op.unit] if 0 <= op.unit < len(self.unit_sizes) else 0
        return rate.of(of_unit * self.element_bytes)
