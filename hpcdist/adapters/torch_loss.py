"""A user's loss function as the loss of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.adapters.torch_arrays import array_of, computable, library, same_stream, tensor_of
from hpcdist.arrays.backend import Array, Scalar, Several
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import Loss
from hpcdist.models.operations import Operations
from hpcdist.models.stage import Saved

if TYPE_CHECKING:
    import torch

REDUCTIONS: Final = ("mean", "sum")


@dataclass
class Losses:
    """The loss of a micro-batch: what it was computed from, and itself with its graph, times what makes it a sum."""

    outputs: "torch.Tensor"
    targets: "torch.Tensor | Several"
    total: "torch.Tensor | None"  # None: nothing was recorded


class TorchLoss(Loss):
    """``function(outputs, targets)`` returns one number: the mean over the samples it is given, or the sum.

    Targets that are several come to it as they were given: as a tuple, or a dict.
    """

    takes_several: Final = True

    def __init__(self, function: Callable[..., Any], reduction: str, tokens_per_sample: int) -> None:
        if not callable(function):
            raise UsageError(f"the loss is a {type(function).__name__}; pass a function of (outputs, targets)")
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
        if isinstance(function, library().nn.Module):
            for name, _ in function.named_parameters():
                raise UsageError(f"the loss has a parameter, {name}; put what is trained into the last stage")
        self._function, self._reduction, self._tokens = function, reduction, tokens_per_sample
        self._is_known = False  # whether the reduction has been looked at

    def take_example(self, targets: Any) -> None:
        """Let targets of any number of samples be made of these: those that a measurement of passes asks for."""
        self.example_targets: Callable[[int], Any] = lambda samples: targets[np.arange(samples) % len(targets)]

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> Scalar:
        """Return the sum over samples and their predictions, in float64; the outputs stay as they are."""
        with same_stream(logits):
            outputs = tensor_of(logits)
            losses = Losses(outputs, computable(targets, outputs.dtype), None)
            saved.keep("torch.loss", losses)
            if saved.draw is None:
                with library().no_grad():
                    total = self._total(losses)
            else:
                total = losses.total = self._recorded(losses)
            if not self._is_known and len(outputs) > 1:
                self._look(losses)
            if total.is_cuda:
                return array_of(total.double())
            return float(total.detach())

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        """Return the gradient of ``scale`` times the sum with respect to the outputs."""
        losses: Losses = saved["torch.loss"]
        with same_stream(array_of(losses.outputs)):
            total = self._recorded(losses) if losses.total is None else losses.total
            losses.outputs.grad = None
            total.backward(total.new_tensor(scale))
            if losses.outputs.grad is None:
                raise UsageError("the loss does not depend on the outputs of the last stage")
            return array_of(losses.outputs.grad)

    def _look(self, losses: Losses) -> None:
        """Hold the loss of a batch, once, against those of its halves.

        Raises UsageError where it is the other reduction: steps would depend on how a batch is cut.
        """
        half, count = len(losses.outputs) // 2, len(losses.outputs)
        torch = library()
        devices = [losses.outputs.device] if losses.outputs.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices):  # a loss that draws draws in the step as without this
            parts = (slice(None), slice(half), slice(half, None))
            found = [self._one(losses.outputs[part], losses.targets[part]) for part in parts]
        whole, first, second = (float(loss.double()) for loss in found)
        expected = {"mean": (first * half + second * (count - half)) / count, "sum": first + second}
        fits = {name: abs(whole - value) <= 1e-3 * abs(whole) for name, value in expected.items()}
        (other,) = set(REDUCTIONS) - {self._reduction}
        if fits[other] and not fits[self._reduction]:
            raise UsageError(
                f"the loss is wrapped as a {self._reduction} over samples, and it is a {other}: {whole:.6g} for "
                f"{count} samples, {first:.6g} and {second:.6g} for their halves; pass wrap reduction={other!r}"
            )
        self._is_known = True

    def _recorded(self, losses: Losses) -> "torch.Tensor":
        losses.outputs.requires_grad_()
        with library().enable_grad():
            total = self._total(losses)
        if not total.requires_grad:
            raise UsageError("the loss has no gradient: it detaches the outputs of the last stage")
        return total

    def _total(self, losses: Losses) -> "torch.Tensor":
        total = self._one(losses.outputs, losses.targets)
        return total * (len(losses.outputs) * self._tokens) if self._reduction == "mean" else total

    def _one(self, outputs: "torch.Tensor", targets: "torch.Tensor | Several") -> "torch.Tensor":
        loss = self._function(outputs, targets.given if isinstance(targets, Several) else targets)
        if not isinstance(loss, library().Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = tuple(loss.shape) if isinstance(loss, library().Tensor) else type(loss).__name__
            raise UsageError(f"the loss function returns {got}; it has to return one number, as a tensor")
        total: torch.Tensor = loss.reshape(())
        return total
