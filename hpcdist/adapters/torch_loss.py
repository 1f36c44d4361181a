"""A user's loss function as the loss of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.adapters.torch_arrays import array_of, computable, library, same_stream, tensor_of
from hpcdist.arrays.backend import Array, Scalar
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
    targets: "torch.Tensor"
    total: "torch.Tensor | None"  # None: nothing was recorded


class TorchLoss(Loss):
    """``function(outputs, targets)`` returns one number: the mean over the samples it is given, or the sum."""

    def __init__(self, function: Callable[..., Any], reduction: str, tokens_per_sample: int) -> None:
        if not callable(function):
            raise UsageError(f"the loss is a {type(function).__name__}; pass a function of (outputs, targets)")
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
        if isinstance(function, library().nn.Module):
            for name, _ in function.named_parameters():
                raise UsageError(f"the loss has a parameter, {name}; put what is trained into the last stage")
        self._function, self._reduction, self._tokens = function, reduction, tokens_per_sample

    def take_example(self, targets: np.ndarray) -> None:
        """Let targets of any number of samples be made of these: those that a measurement of passes asks for."""
        self.example_targets: Callable[[int], np.ndarray] = lambda samples: targets[np.arange(samples) % len(targets)]

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

    def _recorded(self, losses: Losses) -> "torch.Tensor":
        losses.outputs.requires_grad_()
        with library().enable_grad():
            total = self._total(losses)
        if not total.requires_grad:
            raise UsageError("the loss has no gradient: it detaches the outputs of the last stage")
        return total

    def _total(self, losses: Losses) -> "torch.Tensor":
        loss = self._function(losses.outputs, losses.targets)
        if not isinstance(loss, library().Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = tuple(loss.shape) if isinstance(loss, library().Tensor) else type(loss).__name__
            raise UsageError(f"the loss function returns {got}; it has to return one number, as a tensor")
        total: torch.Tensor = loss.reshape(())
        return total * (len(losses.outputs) * self._tokens) if self._reduction == "mean" else total
