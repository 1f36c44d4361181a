"""Where the stages of a rank read parameters and leave gradients: in the memory of its exchange."""

from hpcdist.arrays.store import FlatStore
from hpcdist.models.model import BoundGradients
from hpcdist.models.stage import Parameters
from hpcdist.strategies.exchange import Exchange
from hpcdist.strategies.pipeline import Copies
from hpcdist.strategies.seat import Seat


class Bound:
    """Views of what an exchange keeps, bound while its memory stays where it is. All of it is local."""

    def __init__(self, seat: Seat, exchange: Exchange, copies: Copies) -> None:
        self._model, self._exchange, self._copies = seat.model, exchange, copies
        self._parameters: dict[int, Parameters] = {}  # by unit
        self._gradients: dict[int, BoundGradients] = {}
        self._complete: set[int] = set()
        self.written: set[str] = set()  # tensors that have a gradient in this step

    def begin(self) -> None:
        """Forget what an earlier list has written."""
        self.written.clear()
        self._complete.clear()
        if self._exchange.alternates:
            self._gradients.clear()

    def parameters(self, unit: int) -> Parameters:
        """Return the parameters of a stage, tied ones included."""
        if unit not in self._parameters:
            self._parameters[unit] = self._model.bind_stage(unit, self._parameters_at)
        return self._parameters[unit]

    def gradients(self, unit: int) -> BoundGradients:
        """Return where a stage writes its gradients, or adds them."""
        if unit not in self._gradients:
            self._gradients[unit] = self._model.bind_stage_gradients(unit, self._gradients_at, self.written)
        return self._gradients[unit]

    def backward_done(self, unit: int) -> None:
        """Take note that a micro-batch has gone back through a stage."""

    def no_backward(self, unit: int) -> None:
        """Take the memory into which a micro-batch without samples writes nothing: others take theirs here too."""
        self.gradients(unit)

    def complete(self, unit: int) -> None:
        """Zero what no micro-batch has written of a stage, once all have gone back."""
        if unit not in self._complete:
            self.gradients(unit).finish()  # or it would be last step's
            self._complete.add(unit)

    def complete_copies(self) -> None:
        """Zero what no micro-batch has written of the tensors that other ranks own."""
        for key in self._copies.keys - self.written:
            self._copies.gradients.view(key)[...] = 0

    def exchanged(self, unit: int) -> None:
        """Take note that the gradients of a stage are the exchange's now: the next micro-batch has its own memory."""
        self._gradients.pop(unit).begin_step()
        self._complete.discard(unit)

    def moved(self, unit: int | None = None) -> None:
        """Take note that the parameters of a stage, or all, lie elsewhere now."""
        for user in [user for user in self._parameters if unit is None or unit in self._model.needs[user]]:
            del self._parameters[user]

    def _parameters_at(self, layer: int) -> FlatStore:
        return self._copies.parameters if layer in self._copies.layers else self._exchange.parameters_at(layer)

    def _gradients_at(self, layer: int) -> FlatStore:
        return self._copies.gradients if layer in self._copies.layers else self._exchange.gradients_at(layer)
