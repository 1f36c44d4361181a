"""A user's PyTorch loss function as the loss of a model.

The loss of a step is the sum of all micro-batch losses, divided by the sum of their weights. So it does not depend on
the number of ranks and micro-batches.
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
    without_autocast,
)
from hpcdist.adapters.torch.attention import SampleCut
from hpcdist.adapters.torch.stage import Inputs
from hpcdist.adapters.torch.values import StageValues
from hpcdist.arrays.backend import Array, ArrayGroup, Scalar
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import LOSS_WEIGHT, Loss
from hpcdist.models.stage import Operations, Saved

if TYPE_CHECKING:
    import torch

REDUCTIONS: Final = ("mean", "sum")


class TorchLoss(Loss):
    """Loss that the user's ``function(outputs, targets)`` computes."""

    takes_several: Final = True
    weighs = True

    def __init__(
        self, function: Callable[..., Any], reduction: str, tokens_per_sample: int, outputs: StageValues
    ) -> None:
        if not callable(function):
            raise UsageError(f"the loss is a {type(function).__name__}; pass a function of (outputs, targets)")
        if reduction not in REDUCTIONS:
            raise ConfigurationError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
        if isinstance(function, library().nn.Module):
            for name, _ in function.named_parameters():
                raise UsageError(f"the loss has a parameter, {name}; move trained parameters into the last stage")
        # The function returns (summed loss, number of counted targets), or a single number: a "mean" or a "sum".
        self._function, self._reduction, self._tokens = function, reduction, tokens_per_sample
        self._outputs = outputs  # of the last stage
        self._returns_weight = False
        self._is_known = False  # True after the comparison of the loss with the losses of half batches
        self._cut: SampleCut | None = None

    def in_context(self, cut: SampleCut) -> "TorchLoss":
        """Return a copy of this loss for this rank's tokens, ``cut``. The loss must have one prediction per token."""
        if self._tokens != cut.whole:
            raise ConfigurationError(
                f"parallel.context needs a loss with one prediction per token, but the loss has {self._tokens} "
                f"predictions and a sample has {cut.whole} tokens (data.context): pass tokens_per_sample to wrap, or "
                "set parallel.context = 1"
            )
        other = copy.copy(self)
        other._tokens, other._cut = cut.tokens, cut
        return other

    def take_example(self, targets: Any) -> None:
        """Store the example's ``targets``. `example_targets(samples)` then repeats them for ``samples`` samples."""
        self.example_targets: Callable[[int], Any] = lambda samples: targets[np.arange(samples) % len(targets)]

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> Scalar:
        if self._cut is not None and not self._cut.calls:
            raise UsageError(
                "no stage calls hpcdist.adapters.torch.context_attention, so each token would see only this rank's "
                "tokens; call context_attention instead of scaled_dot_product_attention, or set parallel.context = 1"
            )
        with share_stream(logits):
            outputs = tensor_of(logits)
            expected = as_computable(targets, outputs.dtype)
            total, weight = self._recorded(outputs if saved.draw is not None else outputs.detach(), expected)
            saved.keep("torch.loss", (outputs, expected, None if saved.draw is None else total))  # total with its graph
            if not self._is_known and len(outputs) > 1:
                self._compare_halves(outputs, expected)
            if total.is_cuda:
                saved.keep(LOSS_WEIGHT, weight if isinstance(weight, int) else array_of(weight))
                return array_of(total.detach().double())
            saved.keep(LOSS_WEIGHT, float(weight))
            return float(total.detach())

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        outputs, targets, total = saved["torch.loss"]
        with share_stream(array_of(outputs)):
            total = self._recorded(outputs, targets)[0] if total is None else total
            outputs.grad = None
            with without_autocast(outputs.device):
                total.backward(total.new_tensor(scale))
            if outputs.grad is None:
                raise UsageError(
                    "the loss does not depend on the outputs of the last stage; compute the loss from them"
                )
            return array_of(outputs.grad)

    def _compare_halves(self, outputs: "torch.Tensor", targets: Inputs) -> None:
        half, count = len(outputs) // 2, len(outputs)
        devices = [outputs.device] if outputs.is_cuda else []
        random = library().get_rng_state if not devices else library().cuda.get_rng_state
        with restored_random(devices):  # so that the loss draws the same numbers in the step
            before = random()
            whole, first, second = (
                float(self._evaluated(self._outputs.rows(outputs, part), targets[part]).double())
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
                f"the loss is not a mean over samples: the loss of {count} samples is {whole / count:.6g}, "
                f"but the mean of the losses of their halves is {(first + second) / count:.6g}; {_CURE}"
            )

    def _evaluated(self, outputs: "torch.Tensor", targets: Inputs) -> "torch.Tensor":
        return self._recorded(outputs.detach(), targets)[0].detach()

    def _recorded(self, outputs: "torch.Tensor", targets: Inputs) -> "tuple[torch.Tensor, int | torch.Tensor]":
        # Returns the sum with its graph, and the divisor that makes the sum a mean.
        outputs.requires_grad_()
        with library().enable_grad():
            given = targets.given if isinstance(targets, ArrayGroup) else targets
            result = self._function(self._outputs.unpack(outputs), given)
            self._returns_weight = isinstance(result, tuple) and len(result) == 2
            loss, weight = result if self._returns_weight else (result, None)
            if not isinstance(loss, library().Tensor) or loss.numel() != 1 or not loss.is_floating_point():
                got = tuple(loss.shape) if isinstance(loss, library().Tensor) else type(loss).__name__
                raise UsageError(
                    f"the loss function returns a result of shape or type {got}; it must return a tensor with one "
                    "floating-point number, or (sum, weight)"
                )
            loss = loss.reshape(()).to(library().promote_types(loss.dtype, outputs.dtype))
            if not loss.requires_grad:
                raise UsageError(
                    "the loss has no gradient: it detaches the outputs of the last stage; remove the detach or no_grad"
                )
            count = len(outputs) * self._tokens
            if self._returns_weight:
                return loss, _as_weight(weight, loss)
            if self._reduction == "sum":
                return loss, count
            several = self._outputs.several
            predictions = count if several else len(outputs) * math.prod(outputs.shape[1:-1])
            share = mean_weight(loss.grad_fn, predictions)
            if isinstance(share, float) and share == 1.0:
                return loss * count, count
            weight = library().as_tensor(share * count, dtype=library().float32, device=loss.device)
            # The mean over no targets is NaN, but the sum is 0.
            return library().where(weight > 0, loss * weight, loss.new_zeros(())), weight


_CURE: Final = (
    "return (sum, weight), the summed loss and the number of targets that count, as in: return cross_entropy(outputs, "
    "targets, reduction='sum'), (targets != -100).sum()"
)
_OTHER: Final = (
    "the loss is wrapped as a {0} over samples, and it is a {1}: pass reduction={1!r} to wrap, or return (sum, weight)"
)


def _as_weight(weight: Any, loss: "torch.Tensor") -> "torch.Tensor":
    tensor = library().as_tensor(weight, device=loss.device)
    if tensor.numel() != 1 or tensor.requires_grad or tensor.is_complex():
        got = "a tensor with a gradient" if tensor.requires_grad else f"a tensor of shape {tuple(tensor.shape)}"
        raise UsageError(
            f"the loss function returns (sum, weight), but the weight is {got}; return one number, detached, as weight"
        )
    return tensor.detach().reshape(()).float()


# Graph nodes of scalars that do not change the weights in a mean, such as a constant factor.
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
_SELECT: Final = ("Index", "MaskedSelect", "IndexSelect", "Take")  # nodes whose output size depends on the data


def mean_weight(node: Any, predictions: int) -> "float | torch.Tensor":
    """Return the average weight of a target in a mean loss, for example 0.9 if the loss ignores 10 % of the targets.

    ``node``: autograd node of the loss. ``predictions``: number of targets, including the ignored targets.
    """
    kind, inputs = _kind(node), _inputs(node)
    if kind in _KEEP and len(inputs) == 1:
        return mean_weight(inputs[0], predictions)
    if kind in ("Add", "Sub", "Rsub") and inputs:
        first, *others = (mean_weight(one, predictions) for one in inputs)
        if not all(math.isclose(float(first), float(other), rel_tol=1e-6) for other in others):
            raise UsageError(f"the loss adds means over different numbers of targets; {_CURE}")
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
            f"the loss is wrapped as a mean over samples, but it ends in {node.name()}, which hides the weight of each "
            f"sample in the mean; {_CURE}"
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
    # ``reduction`` is PyTorch's code: 1 for the mean, 2 for the sum.
    kind = _kind(node)
    if kind == {1: "Mean", 2: "Sum"}[reduction]:
        return math.prod(node._saved_self_sym_sizes)
    if getattr(node, "_saved_reduction", None) != reduction:
        return None
    return int((node._saved_target if kind.startswith("NllLoss") else node._saved_self).numel())


def _counted(node: Any) -> "int | torch.Tensor":
    # Number of targets that are not ignored, or their total class weight.
    targets, weights = node._saved_target, node._saved_weight
    ignored = (node._saved_ignore_index + (1 << 63)) % (1 << 64) - (1 << 63)  # PyTorch returns it as unsigned
    counts = targets != ignored
    if weights is not None:
        return weights[targets[counts]].double().sum()
    counted = counts.sum()
    if not counted.is_cuda and int(counted) == targets.numel():
        return int(targets.numel())
    return counted.double()


def _selects(node: Any) -> bool:
    selects = False
    for operation in _before(node):
        kind = _kind(operation)
        selects |= kind in _SELECT
        if kind.startswith("NllLoss") and operation._saved_reduction == 1:
            counted = _counted(operation)
            if float(counted) != _terms(operation, 1):
                raise UsageError(f"the loss averages means over different numbers of targets; {_CURE}")
    return selects


def _before(node: Any) -> Iterator[Any]:
    seen, left = set(), _inputs(node)
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            yield each
            left += _inputs(each)
