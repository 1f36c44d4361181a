"""A user's loss function of PyTorch as the loss of a model.

The mean loss of a step is the sum of the losses of all micro-batches over the sum of their weights. A function that
returns (sum, weight) says both. A function that returns a mean hides its weight: `mean_weight` finds the weight in the
graph that PyTorch records of the loss, or refuses the function. So the loss of a step is the loss of the whole batch
on any number of ranks and micro-batches.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.adapters.torch.arrays import (
    array_of,
    as_computable,
    library,
    restored_random,
    share_stream,
    tensor_of,
)
from hpcdist.adapters.torch.attention import SampleCut
from hpcdist.adapters.torch.stage import Inputs
from hpcdist.arrays.backend import Array, ArrayGroup, Scalar
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import LOSS_WEIGHT, Loss
from hpcdist.models.stage import Operations, Saved

if TYPE_CHECKING:
    import torch

REDUCTIONS: Final = ("mean", "sum")


class TorchLoss(Loss):
    """Loss of ``function(outputs, targets)``, which returns (sum, weight), or one number: a mean or a sum.

    Targets that are several come to it as they were given: as a tuple, or a dict.
    """

    takes_several: Final = True
    weighs = True

    def __init__(self, function: Callable[..., Any], reduction: str, tokens_per_sample: int) -> None:
        if not callable(function):
            raise UsageError(f"the loss is a {type(function).__name__}; pass a function of (outputs, targets)")
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
        if isinstance(function, library().nn.Module):
            for name, _ in function.named_parameters():
                raise UsageError(f"the loss has a parameter, {name}; put what is trained into the last stage")
        self._function, self._reduction, self._tokens = function, reduction, tokens_per_sample
        self._returns_weight = False
        self._is_known = False  # whether the loss was compared with the losses of halves of a batch
        self._cut: SampleCut | None = None

    def in_context(self, cut: SampleCut) -> "TorchLoss":
        """Return this loss for the tokens of ``cut``. Raises ConfigurationError for losses of less than all tokens."""
        if self._tokens != cut.whole:
            raise ConfigurationError(
                f"parallel.context with a loss of {self._tokens} predictions a sample, which has {cut.whole} tokens "
                "(data.context): pass wrap tokens_per_sample, or set parallel.context = 1"
            )
        other = copy.copy(self)
        other._tokens, other._cut = cut.tokens, cut
        return other

    def take_example(self, targets: Any) -> None:
        """Store example targets, repeated to any number of samples by a measurement of passes."""
        self.example_targets: Callable[[int], Any] = lambda samples: targets[np.arange(samples) % len(targets)]

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> Scalar:
        """Return the sum over samples and their predictions, in float64; the outputs stay as they are."""
        if self._cut is not None and not self._cut.calls:
            raise UsageError(
                "no stage calls hpcdist.adapters.torch.context_attention: with parallel.context each token would see "
                "those of this rank alone; call it in the place of scaled_dot_product_attention, or set it to 1"
            )
        with share_stream(logits):
            outputs = tensor_of(logits)
            wanted = as_computable(targets, outputs.dtype)
            total, weight = self._recorded(outputs if saved.draw is not None else outputs.detach(), wanted)
            saved.keep("torch.loss", (outputs, wanted, None if saved.draw is None else total))  # total with its graph
            if not self._is_known and len(outputs) > 1:
                self._compare_halves(outputs, wanted)
            if total.is_cuda:
                saved.keep(LOSS_WEIGHT, weight if isinstance(weight, int) else array_of(weight))
                return array_of(total.detach().double())
            saved.keep(LOSS_WEIGHT, float(weight))
            return float(total.detach())

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        """Return the gradient of ``scale`` times the sum with respect to the outputs."""
        outputs, targets, total = saved["torch.loss"]
        with share_stream(array_of(outputs)):
            total = self._recorded(outputs, targets)[0] if total is None else total
            outputs.grad = None
            total.backward(total.new_tensor(scale))
            if outputs.grad is None:
                raise UsageError("the loss does not depend on the outputs of the last stage")
            return array_of(outputs.grad)

    def _compare_halves(self, outputs: "torch.Tensor", targets: Inputs) -> None:
        """Compare the loss of a batch, once, with the losses of its halves, unless it draws random numbers.

        Raises UsageError if a sum is a mean, and if a mean is no mean over samples: steps would depend on how a batch
        is cut.
        """
        half, count = len(outputs) // 2, len(outputs)
        devices = [outputs.device] if outputs.is_cuda else []
        random = library().get_rng_state if not devices else library().cuda.get_rng_state
        with restored_random(devices):  # a loss that draws draws in the step as without this
            before = random()
            whole, first, second = (
                float(self._evaluated(outputs[part], targets[part]).double())
                for part in (slice(None), slice(half), slice(half, None))
            )
            draws = not library().equal(before, random())
        self._is_known = True
        apart = abs(whole - first - second) > 1e-3 * max(map(abs, (whole, first, second)))
        if not apart or draws or self._returns_weight:
            return
        mean = (first * half + second * (count - half)) / count
        if self._reduction == "sum" and abs(whole - mean) <= 1e-3 * abs(whole):
            raise UsageError(_OTHER.format("sum", "mean"))
        if self._reduction == "mean":
            raise UsageError(
                f"the loss is wrapped as a mean over samples, and the loss of {count} samples is no mean of the losses "
                f"of their halves: {whole / count:.6g}, expected {(first + second) / count:.6g}; {_CURE}"
            )

    def _evaluated(self, outputs: "torch.Tensor", targets: Inputs) -> "torch.Tensor":
        return self._recorded(outputs.detach(), targets)[0].detach()

    def _recorded(self, outputs: "torch.Tensor", targets: Inputs) -> "tuple[torch.Tensor, int | torch.Tensor]":
        """Return the summed loss, with its graph, and its weight (float32, or the number of predictions)."""
        outputs.requires_grad_()
        with library().enable_grad():
            given = self._function(outputs, targets.given if isinstance(targets, ArrayGroup) else targets)
            self._returns_weight = isinstance(given, tuple) and len(given) == 2
            loss, weight = given if self._returns_weight else (given, None)
            if not isinstance(loss, library().Tensor) or loss.numel() != 1 or not loss.is_floating_point():
                got = tuple(loss.shape) if isinstance(loss, library().Tensor) else type(loss).__name__
                raise UsageError(
                    f"the loss function returns {got}; it has to return one number, as a tensor, or (sum, weight)"
                )
            loss = loss.reshape(())
            if not loss.requires_grad:
                raise UsageError("the loss has no gradient: it detaches the outputs of the last stage")
            count = len(outputs) * self._tokens
            if self._returns_weight:
                return loss, _as_weight(weight, loss)
            if self._reduction == "sum":
                return loss, count
            share = mean_weight(loss.grad_fn, len(outputs) * math.prod(outputs.shape[1:-1]))
            if isinstance(share, float) and share == 1.0:
                return loss * count, count
            weight = library().as_tensor(share * count, dtype=library().float32, device=loss.device)
            # The mean over no target is NaN; its sum is 0.
            return library().where(weight > 0, loss * weight, loss.new_zeros(())), weight


_CURE: Final = (
    "return (sum, weight), the summed loss and the number of targets that count, as in: return cross_entropy(outputs, "
    "targets, reduction='sum'), (targets != -100).sum()"
)
_OTHER: Final = (
    "the loss is wrapped as a {0} over samples, and it is a {1}: pass wrap reduction={1!r}, or return (sum, weight)"
)


def _as_weight(weight: Any, loss: "torch.Tensor") -> "torch.Tensor":
    """Return the ``weight`` that a loss function returned, in float32. Raises UsageError if it is no plain number."""
    tensor = library().as_tensor(weight, device=loss.device)
    if tensor.numel() != 1 or tensor.requires_grad or tensor.is_complex():
        got = "a tensor with a gradient" if tensor.requires_grad else f"shape {tuple(tensor.shape)}"
        raise UsageError(f"the loss function returns (sum, weight) with {got} as weight; return one number, detached")
    return tensor.detach().reshape(()).float()


# Nodes of a graph, of scalars, that keep the weights of what they take; a constant factor does not change a mean.
_KEEP: Final = (
    "View",
    "ReshapeAlias",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Neg",
    "Mul",
)
_SELECT: Final = ("Index", "MaskedSelect", "IndexSelect", "Take")  # nodes whose number of elements the data decides


def mean_weight(node: Any, predictions: int) -> "float | torch.Tensor":
    """Return the share of the predictions that count in a mean loss, whose graph ends in ``node``; 1.0 for all.

    ``predictions`` is the number of all predictions. A mean by mean(), by a loss of PyTorch, or by a division of a sum
    is found. Class weights count as shares. Raises UsageError if the graph does not show how much each sample counts.
    Costs some microseconds and a pass over the targets.
    """
    kind, inputs = _kind(node), _inputs(node)
    if kind in _KEEP and len(inputs) == 1:
        return mean_weight(inputs[0], predictions)
    if kind in ("Add", "Sub", "Rsub") and inputs:
        first, *others = (mean_weight(one, predictions) for one in inputs)
        if not all(math.isclose(float(first), float(other), rel_tol=1e-6) for other in others):
            raise UsageError(f"the loss is a sum of means over different numbers of targets; {_CURE}")
        return first
    if kind == "Div" and len(inputs) == 1:
        summed = inputs[0]
        while _kind(summed) in _KEEP and len(_inputs(summed)) == 1:
            summed = _inputs(summed)[0]
        if (terms := _terms(summed, 2)) is None:
            return mean_weight(inputs[0], predictions)
        divisor = node._saved_other.double() if hasattr(node._saved_other, "double") else float(node._saved_other)
        share: float | torch.Tensor = divisor / (predictions if _selects(summed) else terms)
        return share
    if (terms := _terms(node, 1)) is None:
        if _terms(node, 2) is not None:
            raise UsageError(_OTHER.format("mean", "sum"))
        raise UsageError(
            f"the loss is wrapped as a mean over samples, and it ends in {node.name()}, which hides how much each "
            f"sample counts; {_CURE}"
        )
    selects = _selects(node)
    if kind.startswith("NllLoss"):
        counted = _counted(node)
        if isinstance(counted, int) and not selects:
            return 1.0
        return counted / (predictions if selects else terms)
    return terms / predictions if selects else 1.0


def _kind(node: Any) -> str:
    return _without_suffix(node.name())


@lru_cache(1024)
def _without_suffix(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def _inputs(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _terms(node: Any, reduction: int) -> int | None:
    """Return the number of terms of a mean (``reduction`` 1) or a sum (2); None if ``node`` is no such node."""
    kind = _kind(node)
    if kind == {1: "Mean", 2: "Sum"}[reduction]:
        return math.prod(node._saved_self_sym_sizes)
    if getattr(node, "_saved_reduction", None) != reduction:
        return None
    return int((node._saved_target if kind.startswith("NllLoss") else node._saved_self).numel())


def _counted(node: Any) -> "int | torch.Tensor":
    """Return the sum of the weights of the targets of a cross entropy; an int if all targets count alike."""
    targets, weights = node._saved_target, node._saved_weight
    ignored = (node._saved_ignore_index + (1 << 63)) % (1 << 64) - (1 << 63)  # PyTorch shows it as unsigned
    counts = targets != ignored
    if weights is not None:
        return weights[targets[counts]].double().sum()
    counted = counts.sum()
    if not counted.is_cuda and int(counted) == targets.numel():
        return int(targets.numel())
    return counted.double()


def _selects(node: Any) -> bool:
    """Return True if the data decides how many elements the operations before ``node`` select.

    Raises UsageError for a mean over some targets among these operations: a mean of such means has no one weight.
    """
    found = False
    for each in _before(node):
        kind = _kind(each)
        found |= kind in _SELECT
        if kind.startswith("NllLoss") and each._saved_reduction == 1:
            counted = _counted(each)
            if float(counted) != _terms(each, 1):
                raise UsageError(f"the loss is a mean of means over different numbers of targets; {_CURE}")
    return found


def _before(node: Any) -> Iterator[Any]:
    """Yield the nodes of the graph before ``node``, each once."""
    seen, left = set(), _inputs(node)
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            yield each
            left += _inputs(each)
