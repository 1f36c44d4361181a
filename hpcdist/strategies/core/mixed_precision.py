"""Mixed precision: 16-bit parameters and gradients with float32 computation, and loss scaling for float16.

Loss scaling: Micikevicius et al., arXiv:1710.03740, section 3.2. Gradients that float16 would flush to zero are
computed of a loss times a scale, and divided by it. One scale for the whole job, a power of two, so that it rounds
nothing. The ranks agree on the norm of the scaled gradient before anybody touches a weight; where it is not finite,
all of them skip the step: no weight, moment, count or rate changes. Loss and activations are float32 and are not
scaled until the backward, so that a loss that is not finite is an error at any scale.

16-bit copies: the parameters of a stage are widened into a float32 layer for its forward and its backward. Its
backward writes a float32 layer of gradients, which is rounded to 16 bits once a micro-batch has gone back through the
stage; later micro-batches of a step are added to what is there in float32, and the sum is rounded again. So of
float32 there are never more than the layers that are alive together: that of the stage, and one that others are tied
to. Where a backward is done in two passes (zero-bubble schedules) the gradients of all stages between them are
float32: 4 bytes more for each of their parameters. In a pipeline activations and their gradients travel in float32,
as the stages compute them; copies of tensors that are tied across it, and their gradients, are 16-bit floats like all
others.

With N ranks, and for AdamW, whose master and moments are K = 12 bytes a parameter: 16 bytes a parameter with
allreduce, 4 + 12/N in zero1, 2 + 14/N in zero2 and 16/N in zero3 (arXiv:1910.02054, section 3.1).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import NonFiniteError
from hpcdist.models.model import BoundGradients
from hpcdist.models.stage import Parameters
from hpcdist.optim.update import kernels
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.parameter_views import ParameterViews, TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.tied import TiedCopies

INITIAL_SCALE: Final = 2.0**16
MINIMUM_SCALE: Final = 1.0  # unless a recipe says otherwise: precision.minimum_scale
MAXIMUM_SCALE: Final = 2.0**24
MAXIMUM_OVERFLOWS: Final = 16  # overflows in a row at a scale that cannot be lowered


class NoLossScale:
    """Loss scale of 1: a gradient that is not finite ends the run. Local."""

    scale = 1.0
    skipped = 0
    skips_overflow = False  # whether a gradient that is not finite skips its step

    def after(self, step: str, norm: float) -> bool:
        """Return True: the step updates. Raises NonFiniteError, which names ``step``, for a ``norm`` not finite."""
        if not math.isfinite(norm):
            raise NonFiniteError(step)
        return True

    def state(self) -> dict[str, Any]:
        """Return nothing for a checkpoint."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore nothing; a checkpoint of scaled steps goes on without a scale."""


@dataclass
class FixedLossScale(NoLossScale):
    """Constant loss scale. Local: every rank sees the same norms.

    ``skipped`` counts the steps of the whole run that were given up, ``overflows`` those in a row.
    """

    skips_overflow = True
    scale: float
    skipped: int = 0
    overflows: int = 0

    def after(self, step: str, norm: float) -> bool:
        """Return whether the step updates: where ``norm``, agreed on by all ranks, is finite.

        Raises NonFiniteError after `MAXIMUM_OVERFLOWS` overflows in a row that no lower scale could end.
        """
        if math.isfinite(norm):
            self.overflows = 0
            self._grow()
            return True
        self.skipped += 1
        self.overflows += 1
        self._lower(step)
        return False

    def _grow(self) -> None:
        """Record a step without overflow."""

    def _lower(self, step: str) -> None:
        if self.overflows >= MAXIMUM_OVERFLOWS:
            raise self._refusal(step, self.overflows, "a smaller precision.loss_scale, or 0 to let it adapt")

    def _refusal(self, step: str, count: int, cure: str) -> NonFiniteError:
        return NonFiniteError(
            f"{step}: it has overflowed float16 for {count} steps in a row at the loss scale {self.scale:g}; try "
            f"{cure}, or precision.mode = 'bfloat16'"
        )

    def state(self) -> dict[str, Any]:
        """Return the counts that a checkpoint keeps."""
        return {"skipped": self.skipped, "overflows": self.overflows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, of this kind or another."""
        self.skipped, self.overflows = int(state.get("skipped", 0)), int(state.get("overflows", 0))


@dataclass
class DynamicLossScale(FixedLossScale):
    """Loss scale that doubles after ``interval`` steps without overflow, and halves at overflow ``hysteresis``.

    That is in a row, and each further one of the row halves it again, but never below ``least``. ``grown`` counts the
    steps since the last overflow or change, ``stuck`` the overflows in a row at the least scale.
    """

    scale: float = INITIAL_SCALE
    interval: int = 2000
    hysteresis: int = 2
    least: float = MINIMUM_SCALE
    grown: int = 0
    stuck: int = 0

    def _grow(self) -> None:
        self.stuck = 0
        self.grown += 1
        if self.grown >= self.interval:
            self.grown = 0
            self.scale = min(2.0 * self.scale, MAXIMUM_SCALE)

    def _lower(self, step: str) -> None:
        self.grown = 0
        if self.scale == self.least:
            self.stuck += 1
        if self.stuck >= MAXIMUM_OVERFLOWS:
            raise self._refusal(step, self.stuck, "a lower optimizer.learning_rate or precision.minimum_scale")
        if self.overflows >= self.hysteresis:
            self.scale = max(0.5 * self.scale, self.least)

    def state(self) -> dict[str, Any]:
        """Return the scale and the counts that a checkpoint keeps."""
        return super().state() | {"scale": self.scale, "grown": self.grown, "stuck": self.stuck}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; a run that had no such scale begins with the first one."""
        super().restore(state)
        self.scale = max(float(state.get("scale", self.scale)), self.least)
        self.grown, self.stuck = int(state.get("grown", 0)), int(state.get("stuck", 0))


def build_loss_scale(
    mode: str, fixed: float, interval: int, hysteresis: int, least: float = MINIMUM_SCALE
) -> NoLossScale:
    """Return the scale of ``precision.mode``: only float16 has one, ``fixed`` or, where that is 0, a dynamic one."""
    if mode != "float16":
        return NoLossScale()
    if fixed:
        return FixedLossScale(fixed)
    return DynamicLossScale(interval=interval, hysteresis=hysteresis, least=least)


class MixedPrecisionViews(ParameterViews):
    """Float32 layers over the 16-bit stores of an exchange and of tied copies. All of it is local.

    A tied tensor is owned by the first of the stages that use it: the gradient of this rank is complete after the
    backward of the owning stage or, for a copy of another rank's tensor, after that of the stage that uses it.
    """

    def __init__(self, context: RankContext, exchange: Exchange, copies: TiedCopies) -> None:
        super().__init__(context, exchange, copies)
        assert all(min(used) == unit for unit, used in _users(context.model.needs).items()), "used before its owner"
        self._ranges, own = context.ranges, set(context.units)
        self._needs = {
            unit: own.intersection(used) for unit, used in context.model.needs.items()
        }  # of what is kept here
        self._layers = {unit: context.model.stages[unit].layer for unit in context.units}
        self._copied = {
            unit: copies.keys.intersection(context.model.stages[unit].tied.values()) for unit in context.units
        }
        wide = replace(context, working=None, algorithm="native")  # float32, and no other rank looks at it
        self._wide_parameters = TransientLayers(wide, "parameters", context.units, None)
        self._wide_gradients = TransientLayers(wide, "gradients", context.units, None)
        self._copied_parameters = wide.store("parameters", copies.parameters.parts)  # of float32 they stay
        self._copied_gradients = wide.store("gradients", copies.gradients.parts)
        self._widened: set[int] = set()  # units whose parameters are there in float32
        self._open: set[int] = set()  # units whose gradients a micro-batch is writing in float32
        self._held: set[int] = set()  # units whose 16-bit gradients hold a micro-batch of this step
        self._held_copies: set[str] = set()  # copies of which it is so
        self._has_copies = False  # whether those are there in float32

    def begin(self) -> None:
        """Drop the float32 layers of an earlier list."""
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
        """Return the float32 views into which a micro-batch writes the gradients of a stage."""
        if unit not in self._gradients:
            self._open.update(self._needs[unit])
            self._gradients[unit] = self._model.bind_stage_gradients(unit, self._gradients_at, self.written)
        return self._gradients[unit]

    def backward_done(self, unit: int) -> None:
        """Round the gradients of a stage into the 16-bit store or, after the first micro-batch, add them."""
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
        """Allocate 16-bit memory where `backward_done` of other ranks does."""
        self._exchange.gradients_at(self._layers[unit])

    def complete(self, unit: int) -> None:
        """Zero the gradients of a stage without a backward."""
        if unit not in self._held:
            self._exchange.gradients_at(self._layers[unit]).range(self._ranges[unit])[...] = 0
            self._held.add(unit)

    def complete_copies(self) -> None:
        """Zero the gradients of tied copies without a backward."""
        for key in self._copies.keys - self._held_copies:
            self._copies.gradients.view(key)[...] = 0
            self._held_copies.add(key)

    def exchanged(self, unit: int) -> None:
        """Record that the exchange has taken the 16-bit gradients of a stage."""
        self._held.discard(unit)

    def moved(self, unit: int | None = None) -> None:
        """Do nothing: widened parameters stay as they are until the next list begins."""

    def _parameters_at(self, layer: int) -> FlatStore:
        return self._copied_parameters if layer in self._copies.layers else self._wide_parameters.at(layer)

    def _gradients_at(self, layer: int) -> FlatStore:
        return self._copied_gradients if layer in self._copies.layers else self._wide_gradients.at(layer)


def _take_in(working: Array, wide: Array, *, again: bool) -> None:
    """Round the float32 ``wide`` into ``working`` or, with ``again``, add it to what is there in float32."""
    if again:
        kernels.add_rounded(working, wide)
    else:
        kernels.round_into(wide, working)


def _users(needs: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return, for each unit, those that use its parameters."""
    return {owner: [unit for unit, used in needs.items() if owner in used] for owner in needs}
