"""Forward, loss and backward of a whole model on one rank, without an exchange or an update."""

from collections.abc import Iterable
from typing import Any

from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.model import Model
from hpcdist.models.stage import Draw


class Passes:
    """A model with random parameters from ``seed``, and gradients. ``options`` are passed to the stores."""

    def __init__(self, model: Model, seed: int = 0, **options: Any) -> None:
        self.model, self.arena = model, Arena()
        self.store, self.gradient = (FlatStore(model.layout, model.dtype, **options) for _ in range(2))
        model.initialise(self.store, seed)
        self.parameters, self.gradients = model.bind(self.store), model.bind_gradients(self.gradient)

    def forward(self, x: Array, draw: Draw | None = None, microbatch: int = 0) -> Array:
        """Return the output of the last stage."""
        return self.model.forward(self.parameters, x, self.arena, microbatch, draw)

    def loss(self, outputs: Array, targets: Array, microbatch: int = 0) -> float:
        """Return the summed loss."""
        saved = self.arena.saved(self.model.stages[-1].layer, microbatch)
        return float(self.model.loss.forward(outputs, targets, self.model.operations, saved))

    def backward(self, scale: float, microbatch: int = 0) -> None:
        """Write or add the gradients of ``scale`` times the loss."""
        self.model.backward(self.parameters, self.gradients, scale, self.arena, microbatch)

    def begin_step(self) -> None:
        """Let the next backward overwrite the gradients."""
        for stage in self.gradients:
            stage.begin_step()

    def step(self, batches: Iterable[tuple[Array, Array]], scale: float, draw: Draw | None = None) -> float:
        """Return the summed loss of micro-batches. The gradient of ``scale`` times the loss is in its store."""
        self.begin_step()
        total = 0.0
        for number, (x, targets) in enumerate(batches):
            total += self.loss(self.forward(x, draw, number), targets, number)
            self.backward(scale, number)
        for stage in self.gradients:
            stage.finish()
        return total
