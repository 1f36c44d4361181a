"""Mixed precision: 16-bit parameters and gradients with float32 computation, and loss scaling for float16.

Loss scaling follows Micikevicius et al. (arXiv:1710.03740, section 3.2). The scale is a power of two, so that scaling
is exact. If the norm of the scaled gradient is not finite, all ranks skip the step. A non-finite loss is an error.

Bytes per parameter on N ranks with AdamW, whose master weights and moments take 12 bytes: 16 with allreduce, 4 + 12/N
with zero1, 2 + 14/N with zero2 and 16/N with zero3 (arXiv:1910.02054, section 3.1).
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
from hpcdist.optim import kernels
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.parameter_views import ParameterViews, TransientLayers
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.tied import TiedCopies

INITIAL_SCALE: Final = 2.0**16
MINIMUM_SCALE: Final = 1.0  # default of precision.minimum_scale
MAXIMUM_SCALE: Final = 2.0**24
MAXIMUM_OVERFLOWS: Final = 16  # consecutive overflows at a scale that cannot be lowered


class NoLossScale:
    """Loss scale of 1, without overflow handling: a non-finite gradient ends the run. Local."""

    scale = 1.0
    skipped = 0
    skips_overflow = False  # whether a non-finite gradient skips its step

    def after(self, step: str, norm: float) -> bool:
        """Return True, which lets the step update. Raises NonFiniteError if the gradient ``norm`` is not finite.

        ``step``: name of the step in messages.
        """
        if not math.isfinite(norm):
            raise NonFiniteError(step)
        return True

    def state(self) -> dict[str, Any]:
        """Return {}, because a run without a loss scale has no state to save."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Ignore ``state``. A run without a loss scale may resume a checkpoint with a loss scale."""


@dataclass
class FixedLossScale(NoLossScale):
    """Constant loss scale for mixed precision. Local."""

    # All ranks see the same gradient norms, so they skip the same steps.

    skips_overflow = True
    scale: float
    skipped: int = 0  # skipped steps of the run
    overflows: int = 0  # consecutive skipped steps up to now

    def after(self, step: str, norm: float) -> bool:
        """Return True if the step may update, or False to skip the update because the gradient ``norm`` is not finite.

        Raises NonFiniteError after too many consecutive skips. ``step``: name of the step in messages.
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
        """Record a step without gradient overflow. A constant scale does not change."""

    def _lower(self, step: str) -> None:
        if self.overflows >= MAXIMUM_OVERFLOWS:
            raise self._refusal(step, self.overflows, "a smaller precision.loss_scale, or 0 to let it adapt")

    def _refusal(self, step: str, count: int, cure: str) -> NonFiniteError:
        return NonFiniteError(
            f"{step}: the gradient has overflowed float16 for {count} steps in a row at the loss scale "
            f"{self.scale:g}; try {cure}, or precision.mode = 'bfloat16'"
        )

    def state(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "overflows": self.overflows}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.skipped, self.overflows = int(state.get("skipped", 0)), int(state.get("overflows", 0))


@dataclass
class DynamicLossScale(FixedLossScale):
    """Loss scale that grows after many steps without overflow, and shrinks after overflows."""

    scale: float = INITIAL_SCALE
    interval: int = 2000  # steps without overflow after which the scale doubles
    hysteresis: int = 2  # consecutive overflows from which each overflow halves the scale
    least: float = MINIMUM_SCALE  # the scale never falls below it
    grown: int = 0  # steps since the last overflow or change of scale
    stuck: int = 0  # consecutive overflows at scale ``least``

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
        return super().state() | {"scale": self.scale, "grown": self.grown, "stuck": self.stuck}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.scale = max(float(state.get("scale", self.scale)), self.least)
        self.grown, self.stuck = int(state.get("grown", 0)), int(state.get("stuck", 0))


def build_loss_scale(
    mode: str, fixed: float, interval: int, hysteresis: int, least: float = MINIMUM_SCALE
) -> NoLossScale:
    """Return the loss scale for the precision ``mode``. Only "float16" has a loss scale other than 1.

    ``fixed``: constant scale, or 0 for a dynamic scale with ``interval``, ``hysteresis`` and minimum ``least``.
    """
    if mode != "float16":
        return NoLossScale()
    if fixed:
        return FixedLossScale(fixed)
    return DynamicLossScale(interval=interval, hysteresis=hysteresis, least=least)


class MixedPrecisionViews(ParameterViews):
    """Float32 copies of a layer's 16-bit parameters and gradients while the layer is computed. Local."""

    def __init__(self, context: RankContext, exchange: Exchange, copies: TiedCopies) -> None:
        super().__init__(context, exchange, copies)
        assert all(min(used) == unit for unit, used in _users(context.model.needs).items()), "used before its owner"
        self._ranges, local_units = context.ranges, set(context.units)
        self._needs = {unit: local_units.intersection(used) for unit, used in context.model.needs.items()}
        self._layers = {unit: context.model.stages[unit].layer for unit in context.units}  # that own trained tensors
        self._copied = {
            unit: copies.keys.intersection(context.model.stages[unit].tied.values()) for unit in context.computed_units
        }
        wide = replace(context, working=None, algorithm="native")  # float32; only this rank reads it
        self._wide_parameters = TransientLayers(wide, "parameters", context.units, None)
        self._wide_gradients = TransientLayers(wide, "gradients", context.units, None)
        self._copied_parameters = wide.store("parameters", copies.parameters.parts)  # stays allocated
        self._copied_gradients = wide.store("gradients", copies.gradients.parts)
        self._widened: set[int] = set()  # units with float32 parameters
        self._open: set[int] = set()  # units whose float32 gradients a micro-batch is writing
        self._held: set[int] = set()  # units whose 16-bit gradients hold a micro-batch of this step
        self._held_copies: set[str] = set()  # tied copies whose 16-bit gradients hold a micro-batch of this step
        self._has_copies = False  # whether the float32 parameters of the tied copies are filled

    def begin(self) -> None:
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
        """Return the float32 parameters that layer ``unit`` uses. Free the float32 parameters of other layers."""
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
        if unit not in self._gradients:
            self._open.update(self._needs[unit])
            self._gradients[unit] = self._model.bind_stage_gradients(unit, self._gradients_at, self.written)
        return self._gradients[unit]

    def backward_done(self, unit: int) -> None:
        bound, layer = self.gradients(unit), self._layers.get(unit)
        bound.finish()
        if layer is not None:
            part = self._ranges[unit]
            wide = self._wide_gradients.at(layer).range(part)
            _take_in(self._exchange.gradients_at(layer).range(part), wide, accumulate=unit in self._held)
            self._held.add(unit)
        for key in self._copied[unit] & self.written:
            copy_range = self._copies.gradients.layout.by_key[key].range
            working = self._copies.gradients.range(copy_range)
            _take_in(working, self._copied_gradients.range(copy_range), accumulate=key in self._held_copies)
            self._held_copies.add(key)
            self.written.discard(key)
        bound.begin_step()
        if layer is not None:
            self._wide_gradients.free(layer)
        self._open.discard(unit)
        for user in [user for user in self._gradients if unit in self._needs[user]]:
            del self._gradients[user]

    def no_backward(self, unit: int) -> None:
        if unit in self._layers:
            self._exchange.gradients_at(self._layers[unit])

    def complete(self, unit: int) -> None:
        if unit not in self._held and unit in self._layers:
            self._exchange.gradients_at(self._layers[unit]).range(self._ranges[unit])[...] = 0
            self._held.add(unit)

    def complete_copies(self) -> None:
        for key in self._copies.keys - self._held_copies:
            self._copies.gradients.view(key)[...] = 0
            self._held_copies.add(key)

    def exchanged(self, unit: int) -> None:
        self._held.discard(unit)

    def moved(self, unit: int | None = None) -> None:
        """Do nothing, because float32 copies stay valid when the memory of 16-bit parameters moves."""

    def _parameters_at(self, layer: int) -> FlatStore:
        return self._copied_parameters if layer in self._copies.layers else self._wide_parameters.at(layer)

    def _gradients_at(self, layer: int) -> FlatStore:
        return self._copied_gradients if layer in self._copies.layers else self._wide_gradients.at(layer)


def _take_in(working: Array, wide: Array, *, accumulate: bool) -> None:
    if accumulate:
        kernels.add_rounded(working, wide)
    else:
        kernels.round_into(wide, working)


def _users(needs: dict[int, list[int]]) -> dict[int, list[int]]:
    return {owner: [unit for unit, used in needs.items() if owner in used] for owner in needs}
