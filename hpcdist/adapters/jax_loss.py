"""A pure function of JAX as the loss of a model."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcdist.adapters.jax_arrays import Traffic, enabled, library, repeated
from hpcdist.arrays.backend import Array
from hpcdist.errors import UsageError
from hpcdist.models.model import Loss
from hpcdist.models.operations import Operations
from hpcdist.models.stage import Saved


class JaxLoss(Loss):
    """The losses ``call(y, targets)``, summed: over samples (samples, ...), or a mean times the number of samples.

    ``output`` is shape and type of a sample of y, ``example`` has targets. Raises UsageError where losses
    are no such array.
    """

    def __init__(
        self,
        call: Callable[[Any, Any], Any],
        traffic: Traffic,
        *,
        output: tuple[tuple[int, ...], np.dtype],
        example: np.ndarray,
    ) -> None:
        self._call, self._traffic, self._example = call, traffic, example
        target = example.shape[1:], enabled(example.dtype)
        one, two = (self._shape(samples, output, target) for samples in (1, 2))
        self.is_mean = one == two == ()
        if not self.is_mean and (one[:1] != (1,) or two != (2, *one[1:])):
            raise UsageError(
                f"the loss has shape {one} for 1 sample and {two} for 2; return losses (samples, ...), or "
                "their mean as a number"
            )
        if self.is_mean:
            self._check_mean(output)
        self.per_sample = int(np.prod(one))  # losses a sample, which the mean divides by
        jax = library()
        self._losses = jax.jit(call)
        self._gradient = jax.jit(lambda y, targets, scale: jax.vjp(lambda y: self._sum(y, targets), y)[1](scale)[0])

    def example_targets(self, samples: int) -> np.ndarray:
        """Return targets of so many samples, those of the example."""
        return repeated(self._example, samples)

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> float:
        """Return the sum in float64; ``logits`` (samples, ...) are what the last stage gave, and stay as they are."""
        y, inside = self._traffic.bring(logits), self._traffic.bring(targets)
        total = float(np.asarray(self._losses(y, inside)).astype(np.float64).sum())
        saved.keep("jax.loss", (logits, y, inside))
        return total * len(logits) if self.is_mean else total

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        """Return the gradient of ``scale`` times the sum, over the output of the last stage."""
        logits, y, targets = saved["jax.loss"]
        found = library().block_until_ready(self._gradient(y, targets, logits.dtype.type(scale)))
        self._traffic.take(found, logits)
        result: Array = logits
        return result

    def _check_mean(self, output: tuple[tuple[int, ...], np.dtype]) -> None:
        """Hold the loss of a sample against that of the same one twice: a mean is the same, and a sum is not."""
        shape, dtype = output
        y = np.random.default_rng(0).random((1, *shape)).astype(dtype)
        target = self._example[:1].astype(enabled(self._example.dtype))
        one, two = (
            float(self._call(np.repeat(y, count, axis=0), np.repeat(target, count, axis=0))) for count in (1, 2)
        )
        if abs(two - one) > 1e-3 * abs(one) and abs(two - 2 * one) <= 1e-3 * abs(two):
            raise UsageError(
                f"the loss is a sum, {one:.6g} for a sample and {two:.6g} for it twice; return losses (samples, ...), "
                "or their mean as a number"
            )

    def _sum(self, y: Any, targets: Any) -> Any:
        losses = self._call(y, targets)
        return (losses * y.shape[0] if self.is_mean else losses.sum()).astype(y.dtype)

    def _shape(
        self, samples: int, output: tuple[tuple[int, ...], np.dtype], target: tuple[tuple[int, ...], np.dtype]
    ) -> tuple[int, ...]:
        struct = library().ShapeDtypeStruct
        found = library().eval_shape(
            self._call, *(struct((samples, *shape), dtype) for shape, dtype in (output, target))
        )
        if not hasattr(found, "dtype") or not np.issubdtype(found.dtype, np.floating):
            raise UsageError(f"the loss is {found}; return losses (samples, ...), or their mean as a number")
        return tuple(found.shape)
