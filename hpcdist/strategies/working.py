"""16-bit working copies: what a rank keeps and sends of parameters and gradients, where stages compute in float32.

The parameters of a stage are widened into a float32 layer for its forward and its backward. Its backward writes a
float32 layer of gradients, which is rounded to 16 bits once a micro-batch has gone back through the stage; later
micro-batches of a step are added to what is there in float32, and the sum is rounded again. So of float32 there are
never more than the layers that are alive together: that of the stage, and one that others are tied to. Where a backward
is done in two passes (zero-bubble schedules) the gradients of all stages between them are float32: 4 bytes more for
each of their parameters. In a pipeline activations and their gradients travel in float32, as the stages compute them;
copies of tensors that are tied across it, and their gradients, are 16-bit floats like all others.

With N ranks, and for AdamW, whose master and moments are K = 12 bytes a parameter: 16 bytes a parameter with allreduce,
4 + 12/N in zero1, 2 + 14/N in zero2 and 16/N in zero3 (arXiv:1910.02054, section 3.1).
"""

from dataclasses import replace

from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.models.model import BoundGradients
from hpcdist.models.stage import Parameters
from hpcdist.optim import kernels
from hpcdist.strategies.bound import Bound
from hpcdist.strategies.exchange import Exchange
from hpcdist.strategies.pipeline import Copies
from hpcdist.strategies.seat import Seat
from hpcdist.strategies.zero.transient import Transient


class WorkingCopies(Bound):
    """Float32 layers that come and go over the 16-bit stores of an exchange, and of copies. All of it is local.

    A tensor that another stage uses is owned by one before it: what this rank adds to its gradient is complete when its
    own stage has gone back or, for a copy of another rank's, when the stage that uses it has.
    """

    def __init__(self, seat: Seat, exchange: Exchange, copies: Copies) -> None:
        super().__init__(seat, exchange, copies)
        assert all(min(used) == unit for unit, used in _users(seat.model.needs).items()), "used before its owner"
        self._ranges, own = seat.ranges, set(seat.units)
        self._needs = {unit: own.intersection(used) for unit, used in seat.model.needs.items()}  # of what is kept here
        self._layers = {unit: seat.model.stages[unit].layer for unit in seat.units}
        self._copied = {unit: copies.keys.intersection(seat.model.stages[unit].tied.values()) for unit in seat.units}
        wide = replace(seat, working=None, algorithm="native")  # float32, and no other rank looks at it
        self._wide_parameters = Transient(wide, "parameters", seat.units, None)
        self._wide_gradients = Transient(wide, "gradients", seat.units, None)
        self._copied_parameters = wide.store("parameters", copies.parameters.parts)  # of float32 they stay
        self._copied_gradients = wide.store("gradients", copies.gradients.parts)
        self._widened: set[int] = set()  # units whose parameters are there in float32
        self._open: set[int] = set()  # units whose gradients a micro-batch is writing in float32
        self._held: set[int] = set()  # units whose 16-bit gradients hold a micro-batch of this step
        self._held_copies: set[str] = set()  # copies of which it is so
        self._has_copies = False  # whether those are there in float32

    def begin(self) -> None:
        """Forget what an earlier list has widened and written."""
        super().begin()
        self._keep(set())
        for unit in self._open:
            self._wide_gradients.free(self._layers[unit])
        self._open.clear()
        self._gradients.clear()
        self._held.clear()
        self._held_copies.clear()
        self._has_copies = False

    def parameters(self, unit: int) -> Parameters:
        """Return the parameters of a stage in float32; those of another stage are dropped."""
        if unit not in self._parameters:
            self._keep(self._needs[unit])
            for used in self._needs[unit] - self._widened:
                layer, part = self._layers[used], self._ranges[used]
                source = self._exchange.parameters_at(layer).range(part)
                kernels.widen(source, self._wide_parameters.at(layer).range(part))
                self._widened.add(used)
            if self._copied[unit] and not self._has_copies:
                kernels.widen(self._copies.parameters.array, self._copied_parameters.array)
                self._has_copies = True
            self._parameters[unit] = self._model.bind_stage(unit, self._parameters_at)
        return self._parameters[unit]

    def _keep(self, units: set[int]) -> None:
        for other in self._widened - units:
            self._wide_parameters.free(self._layers[other])
        self._widened &= units
        self._parameters.clear()

    def gradients(self, unit: int) -> BoundGradients:
        """Return where a micro-batch writes the gradients of a stage, in float32."""
        if unit not in self._gradients:
            self._open.update(self._needs[unit])
            self._gradients[unit] = self._model.bind_stage_gradients(unit, self._gradients_at, self.written)
        return self._gradients[unit]

    def backward_done(self, unit: int) -> None:
        """Round the gradients of a stage, those of a micro-batch, into the 16-bit store, or add them to it."""
        own, layer, part = self.gradients(unit), self._layers[unit], self._ranges[unit]
        own.finish()
        wide = self._wide_gradients.at(layer).range(part)
        _take_in(self._exchange.gradients_at(layer).range(part), wide, again=unit in self._held)
        self._held.add(unit)
        for key in self._copied[unit] & self.written:
            where = self._copies.gradients.layout.by_key[key].range
            working = self._copies.gradients.range(where)
            _take_in(working, self._copied_gradients.range(where), again=key in self._held_copies)
            self._held_copies.add(key)
            self.written.discard(key)
        own.begin_step()
        self._wide_gradients.free(layer)
        self._open.discard(unit)
        for user in [user for user in self._gradients if unit in self._needs[user]]:
            del self._gradients[user]

    def no_backward(self, unit: int) -> None:
        """Take 16-bit memory where `backward_done` of other ranks does."""
        self._exchange.gradients_at(self._layers[unit])

    def complete(self, unit: int) -> None:
        """Zero the gradients of a stage that no micro-batch has gone back through."""
        if unit not in self._held:
            self._exchange.gradients_at(self._layers[unit]).range(self._ranges[unit])[...] = 0
            self._held.add(unit)

    def complete_copies(self) -> None:
        """Zero the gradients of copies that no micro-batch has gone back through."""
        for key in self._copies.keys - self._held_copies:
            self._copies.gradients.view(key)[...] = 0
            self._held_copies.add(key)

    def exchanged(self, unit: int) -> None:
        """Take note that the 16-bit gradients of a stage are the exchange's now."""
        self._held.discard(unit)

    def moved(self, unit: int | None = None) -> None:
        """What is widened stays as it is until the next list begins."""

    def _parameters_at(self, layer: int) -> FlatStore:
        return self._copied_parameters if layer in self._copies.layers else self._wide_parameters.at(layer)

    def _gradients_at(self, layer: int) -> FlatStore:
        return self._copied_gradients if layer in self._copies.layers else self._wide_gradients.at(layer)


def _take_in(working: Array, wide: Array, *, again: bool) -> None:
    """Round the float32 ``wide`` into ``working`` or, where that holds something ``again``, add it in float32."""
    if again:
        kernels.add_rounded(working, wide)
    else:
        kernels.round_into(wide, working)


def _users(needs: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return, for each unit, those that use its parameters."""
    return {owner: [unit for unit, used in needs.items() if owner in used] for owner in needs}
