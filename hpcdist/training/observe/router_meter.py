"""Router figures of a mixture of experts per step, and the balancing biases.

Cost: (E + 4) numbers in the message of the loss for each of L layers with E experts. Loads are integers, so the biases
are equal on every rank. Formulas: `hpcdist.models.experts.router`.
"""

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.models.experts.router import RouterState
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.step import RunningStep, StepObserver

MANY_DROPPED: Final = 0.5  # fraction of dropped choices that prints a warning


class RouterFigures(NamedTuple):
    """Load balance and losses of the expert routers in one step, averaged over the model's layers."""

    imbalance: float  # load of the busiest expert divided by the mean load
    worst: float  # largest imbalance of a layer
    entropy: float  # of a token's router scores, in nats
    dropped: float  # fraction of the tokens' expert choices that were dropped
    balance_loss: float  # without its coefficient
    z_loss: float  # without its coefficient


class RouterMeter(StepObserver):
    """Step observer that sums the routers' token counts over all ranks, and updates the router biases."""

    def __init__(self, context: RankContext, state: RouterState) -> None:
        self._state = state
        self._speaks = context.computes and context.tensor.rank == 0  # ranks of a tensor axis see the same tokens
        self._warns = context.world.rank == 0
        self._rows: list[tuple[float, ...]] = []
        self.last: RouterFigures | None = None
        self.loads = np.zeros((len(state.seen), state.experts))  # loads of the last step, by layer
        self.step = 0

    def begin_step(self, number: int, *_: object) -> None:
        self._state.take()

    def counts(self, step: RunningStep) -> np.ndarray:  # (layers x (experts + EXTRA),)
        seen = self._state.take()
        return (seen if self._speaks else np.zeros_like(seen)).reshape(-1)

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        seen, experts = sums.reshape(self._state.seen.shape), self._state.experts
        self.loads, self.step = seen[:, :experts].copy(), step.number
        if not step.outcome.skipped:
            self._state.balance(self.loads)
        choices = max(1.0, float(self.loads[0].sum()))
        tokens = choices / self._state.per_token
        busiest = self.loads.max(axis=1) * experts / choices
        dropped, entropy, balance, z = seen[:, experts:].mean(axis=0).tolist()
        self.last = RouterFigures(
            float(busiest.mean()),
            float(busiest.max()),
            entropy / tokens,
            dropped / choices,
            balance / tokens,
            z / tokens,
        )
        self._rows.append((step.number, *self.last))
        if self._warns and self.last.dropped > MANY_DROPPED:
            self._warns = False
            print(
                f"hpcdist: step {step.number}: experts dropped {self.last.dropped:.0%} of the choices of tokens, and "
                f"the busiest had {self.last.worst:.2f} times the mean load; raise model.capacity_factor, or set it "
                "to 0 to drop nothing",
                file=sys.stderr,
                flush=True,
            )

    def taken(self) -> list[tuple[float, ...]]:
        """Return a tuple for each step since the last call: the step number, then the fields of `RouterFigures`."""
        rows, self._rows = self._rows, []
        return rows


def router_figures(meter: RouterMeter | None) -> dict[str, Any]:
    """Return a dict of the last step's router figures, or {} for a model without experts (``meter`` None). Local."""
    if meter is None or meter.last is None:
        return {}
    return {"router": {name: float(value) for name, value in meter.last._asdict().items()}}


def describe_router(summary: Mapping[str, Any]) -> list[str]:
    """Return a list with the text line about the routers in a run's ``summary``, or [] for a model without experts."""
    router = summary.get("router")
    if router is None:
        return []
    dropped = f"{router['dropped']:.1%} of their choices dropped" if router["dropped"] else "nothing dropped"
    line = f"experts: the busiest of a layer had {router['imbalance']:.2f} times the mean load ({router['worst']:.2f} "
    return [f"{line}in the worst layer), entropy of a token {router['entropy']:.2f} nats, {dropped}"]
