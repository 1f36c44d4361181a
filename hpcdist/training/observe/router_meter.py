"""Load balance, entropy and drops of the routers of a mixture of experts, step by step; the biases that balance them.

What the routers of all ranks did is summed in the message that has the loss: (E + 4) numbers for each of L layers.
Loads are whole numbers, so biases that follow from them are the same on every rank. Formulas are in
`hpcdist.models.experts.router`.
"""

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.models.experts.router import RouterState
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.schedule.step import RunningStep, StepObserver

MANY_DROPPED: Final = 0.5  # of all choices: a warning


class RouterFigures(NamedTuple):
    """Figures of the routers in one step: means over the layers.

    ``imbalance`` is the load of the busiest expert over the mean load, ``worst`` that of the worst layer; ``entropy``
    is that of a token's scores in nats; ``dropped`` is the share of choices; the losses, means over tokens, are without
    coefficients.
    """

    imbalance: float
    worst: float
    entropy: float
    dropped: float
    balance_loss: float
    z_loss: float


class RouterMeter(StepObserver):
    """Observer that sums what the routers of all ranks did, and moves the biases of the router."""

    def __init__(self, context: RankContext, state: RouterState) -> None:
        self._state = state
        self._speaks = context.computes and context.tensor.rank == 0  # the ranks of a tensor axis see the same tokens
        self._warns = context.world.rank == 0
        self._rows: list[tuple[float, ...]] = []
        self.last: RouterFigures | None = None
        self.loads = np.zeros((len(state.seen), state.experts))  # of the last step, by layer
        self.step = 0

    def begin_step(self, number: int, *_: object) -> None:
        """Forget what a step that was given up has left."""
        self._state.take()

    def counts(self, step: RunningStep) -> np.ndarray:  # (layers x (experts + EXTRA),)
        """Return what the routers of this rank did in the micro-batches of the step."""
        seen = self._state.take()
        return (seen if self._speaks else np.zeros_like(seen)).reshape(-1)

    def complete_step(self, step: RunningStep, sums: np.ndarray) -> None:
        """Take the sums over the ranks, and move the biases by them, unless the step was skipped."""
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
        """Return the rows since the last call: a step and its `RouterFigures` each."""
        rows, self._rows = self._rows, []
        return rows


def router_figures(meter: RouterMeter | None) -> dict[str, Any]:
    """Return the figures of the last step's routers for a summary, {} for a dense model (local)."""
    if meter is None or meter.last is None:
        return {}
    return {"router": {name: float(value) for name, value in meter.last._asdict().items()}}


def describe_router(summary: Mapping[str, Any]) -> list[str]:
    """Return the line of a summary about the routers, if there are any."""
    router = summary.get("router")
    if router is None:
        return []
    dropped = f"{router['dropped']:.1%} of their choices dropped" if router["dropped"] else "nothing dropped"
    line = f"experts: the busiest of a layer had {router['imbalance']:.2f} times the mean load ({router['worst']:.2f} "
    return [f"{line}in the worst layer), entropy of a token {router['entropy']:.2f} nats, {dropped}"]
