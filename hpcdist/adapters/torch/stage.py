"""User modules as a `hpcdist.models.stage.Stage`, and a user's loss function as the loss of a model.

Parameters and gradients lie in the memory of the run. Forward keeps the graph of PyTorch, backward runs it and writes
each gradient to its place.
"""

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from hpcdist.adapters.torch.arrays import (
    array_of,
    as_computable,
    flop_counter,
    library,
    restored_random,
    seeded_random,
    share_stream,
    tensor_of,
)
from hpcdist.adapters.torch.attention import CURRENT, SampleCut
from hpcdist.adapters.torch.modules import ParameterBinding, StageModules
from hpcdist.arrays.backend import Array, ArrayGroup, Scalar, arrays_in
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import Loss
from hpcdist.models.stage import Draw, Gradients, Operations, Parameters, Saved, StreamOf

if TYPE_CHECKING:
    import torch

Inputs: TypeAlias = "torch.Tensor | ArrayGroup"  # of the first stage several, if its user gives them


class TorchStage:
    """One or more modules that run one after the other. Several inputs are arguments of the first module of a model.

    In a step each module is in the mode that the user gave it, in an evaluation none trains. What they draw at random
    follows from (seed, step, first sample of the micro-batch, layer).
    """

    def __init__(
        self,
        layer: int,
        cut: StageModules,
        binding: ParameterBinding,
        adapted: Callable[[str, "torch.nn.Parameter"], bool],
    ):
        self.layer, self.cut, self.binding = layer, cut, binding
        self.name = str(cut)
        self.tied = {name: f"{owner}.{there}" for name, (owner, there) in cut.tied.items()}
        self._specs = tuple(
            TensorSpec(layer, name, tuple(parameter.shape), adapted(name, parameter))
            for name, parameter in cut.own.items()
        )
        self._output: tuple[int, ...] | None = None
        self._buffers = dict(cut.buffers())
        self._example: Inputs | None = None
        self.takes_several = layer == 0
        self._inside = False  # of a pass of the run
        self._cut: SampleCut | None = None
        self.forward_flops: float | None = None  # a sample, of products; None: not known without an example

    def in_context(self, cut: SampleCut) -> "TorchStage":
        """Return this stage for the tokens of ``cut``; its output, where that is known, has those of whole samples.

        Raises ConfigurationError for other outputs.
        """
        other = copy.copy(self)
        if self._output is not None:
            if self._output[:1] != (cut.whole,):
                raise ConfigurationError(
                    f"parallel.context with stage {self.layer}, {self.name}: it gives {self._output} for a sample, "
                    f"expected one row for each of its {cut.whole} tokens (data.context); set parallel.context = 1"
                )
            other._output = (cut.tokens, *self._output[1:])
        other._cut = cut
        return other

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of the own parameters, in the order of the modules."""
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape for so many samples. Raises ConfigurationError while it is not known."""
        if self._output is None:
            raise ConfigurationError(
                f"the output shape of stage {self.layer}, {self.name}, is not known before it has run; pass wrap an "
                "example of the input: example=x, with any number of samples"
            )
        return samples, *self._output

    def example_input(self, samples: int) -> Array:
        """Return an input of so many samples: that of the example, again and again."""
        if self._example is None:
            raise ConfigurationError(f"there is no input for stage {self.layer}, {self.name}; pass wrap example=x")
        chosen = self._example[[number % len(self._example) for number in range(samples)]]
        return chosen.map(array_of) if isinstance(chosen, ArrayGroup) else array_of(chosen)  # type: ignore[return-value]

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        """Take the values that the modules had when they were wrapped."""
        for name, values in self.binding.initial(self.cut).items():
            parameters[name][...] = values

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        """Return the output of the last module for x (samples, ...)."""
        self.binding.bind(self.cut, parameters, arrays_in(x)[0])
        with share_stream(x):
            leaf = as_computable(x, self.binding.dtype) if self.layer == 0 else tensor_of(x)
            if saved.draw is None:
                y = self._evaluated(leaf)
            else:
                self.binding.settle(saved.draw.step)
                y = self._recorded(leaf, saved.draw)
            saved.keep("torch.run", (leaf, None if saved.draw is None else y))  # y with its graph
            return array_of(self._checked(y, leaf))

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        """Write or add the gradients; return that of the input, None in the first stage.

        All of it is done here, also where a schedule would have those of the weights later.
        """
        self.binding.bind(self.cut, parameters, dy)
        with share_stream(dy):
            x, y = saved["torch.run"]
            y = self._recorded(x, None) if y is None else y
            if not y.requires_grad:
                raise UsageError(f"the output of stage {self.layer}, {self.name}, depends on no parameter of it")
            if self.layer > 0:
                x.grad = None
            before = CURRENT.set(self._cut)  # modules may compute activations again
            try:
                with self.binding.collect(self.cut, gradients) as written:
                    y.backward(tensor_of(dy))
            finally:
                CURRENT.reset(before)
            self._check_written(written)
            if self.layer == 0:
                return None
            if x.grad is None:
                raise UsageError(f"the output of stage {self.layer}, {self.name}, does not depend on its input")
            return array_of(x.grad)

    def guard(self, why: str) -> None:
        """Make forwards outside of a step raise UsageError with the reason ``why``, while parameters are not whole."""

        def check(module: "torch.nn.Module", inputs: object) -> None:
            if not self._inside and self.binding.has(self.cut):
                raise UsageError(f"{self.name} was called outside of a step: {why}")

        for _, module in self.cut.modules:
            module.register_forward_pre_hook(check)

    def trace(self, x: "Inputs") -> "torch.Tensor":
        """Return the output for ``x``; record its shape and the operations that it takes."""
        with flop_counter() as counter:
            y = self._evaluated(x)
        self._example, self.forward_flops = x, counter.get_total_flops() / len(x)
        return self._checked(y, x)

    def _evaluated(self, x: "Inputs") -> "torch.Tensor":
        self._set_mode(training=False)
        with library().no_grad():
            return self._run(x)

    def _recorded(self, x: Any, draw: Draw | None) -> "torch.Tensor":
        """Run with a graph; without a ``draw`` as in an evaluation."""
        torch = library()
        self._set_mode(training=draw is not None)
        if self.layer > 0:
            x.requires_grad_()
        with torch.enable_grad(), self.binding.saving(self.cut):
            if draw is None:
                return self._run(x)
            with seeded_random(draw, self.layer, self.binding.device):
                return self._run(x)

    def _run(self, x: "Inputs") -> "torch.Tensor":
        self._inside, before = True, CURRENT.set(self._cut)
        try:
            return self._through(x)
        finally:
            CURRENT.reset(before)
            self._inside = False

    def _through(self, x: "Inputs") -> "torch.Tensor":
        before = [buffer._version for buffer in self._buffers.values()]
        y: Any = x
        for prefix, module in self.cut.modules:
            try:
                y = self._call(prefix, module, y)
            except RuntimeError as error:
                if "leaf Variable" not in str(error):
                    raise
                raise UsageError(
                    f"stage {self.layer}, {self.name}, writes over its input in {prefix or 'module'} "
                    f"({type(module).__name__}); the stage before still needs it: use inplace=False"
                ) from error
            if not isinstance(y, library().Tensor):
                raise UsageError(
                    f"{prefix or 'module'} ({type(module).__name__}) in stage {self.layer} returns a "
                    f"{type(y).__name__}; a stage returns one tensor, so that it can be cut off from the next"
                )
        self._check_buffers(before)
        return y

    def _call(self, prefix: str, module: "torch.nn.Module", x: "Inputs") -> Any:
        """Call a module with one tensor, or with several as arguments, positional or by name."""
        arguments: tuple[Any, ...] = (x,)
        named: dict[str, Any] = {}
        if isinstance(x, ArrayGroup):
            arguments, named = (x.arrays, {}) if x.names is None else ((), dict(zip(x.names, x.arrays, strict=True)))
        try:
            return module(*arguments, **named)
        except TypeError as error:
            try:
                inspect.signature(module.forward).bind(*arguments, **named)
            except TypeError as unbound:
                given = f"inputs by name, {', '.join(named)}" if named else f"{len(arguments)} input(s)"
                raise UsageError(
                    f"stage {self.layer}, {self.name}: {prefix or 'module'} ({type(module).__name__}) cannot be called "
                    f"with {given}: {unbound}; the first module of a model gets all inputs of a batch, a tuple or a "
                    "dict of them as arguments, and each later one what the one before returns"
                ) from error
            raise

    def _checked(self, y: "torch.Tensor", x: "Inputs") -> "torch.Tensor":
        """Return the output ``y``, where it is what the next stage expects, in memory of its own."""
        expected = y.shape[1:] if self._output is None else self._output
        if y.dim() == 0 or tuple(y.shape) != (len(x), *expected):
            raise UsageError(
                f"stage {self.layer}, {self.name}, gives {tuple(y.shape)} for {len(x)} samples, expected "
                f"{(len(x), *expected)}: the first dim is that of the samples, and the others stay the same in a run"
            )
        if y.dtype != self.binding.dtype:
            raise UsageError(
                f"stage {self.layer}, {self.name}, gives {y.dtype}, its parameters are {self.binding.dtype}; convert "
                "what it returns"
            )
        self._output = tuple(y.shape[1:])
        shared = y.untyped_storage().data_ptr()
        starts = {tensor.untyped_storage().data_ptr() for tensor in arrays_in(x)}
        if y.numel() and (shared in starts or self.binding.holds(self.cut, shared)):
            return y.detach().clone()  # that memory is given back earlier than this
        return y

    def _set_mode(self, *, training: bool) -> None:
        self.cut.set_modes(self.cut.modes if training else dict.fromkeys(self.cut.modes, False))

    def _check_buffers(self, before: list[int]) -> None:
        now = dict(self.cut.buffers())
        for (name, buffer), version in zip(self._buffers.items(), before, strict=True):
            if now.get(name) is not buffer or buffer._version != version:
                raise UsageError(
                    f"buffer {name} of stage {self.layer}, {self.name}, changes in the forward: each replica would "
                    "have another one, and no checkpoint has it; keep buffers constant, or make it a parameter"
                )

    def _check_written(self, written: set[str]) -> None:
        missing = [name for name in (*self.cut.own, *self.cut.tied) if name not in written]
        if missing:
            raise UsageError(
                f"no gradient reached parameter {', '.join(missing)} of stage {self.layer}, {self.name}: its forward "
                "does not use it, or detaches it; remove it from the module, or register it as a buffer"
            )


REDUCTIONS: Final = ("mean", "sum")


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
            if saved.draw is None:
                with library().no_grad():
                    total = self._total(outputs, wanted)
            else:
                total = self._recorded(outputs, wanted)
            saved.keep("torch.loss", (outputs, wanted, None if saved.draw is None else total))  # total with its graph
            if not self._is_known and len(outputs) > 1:
                self._look(outputs, wanted)
            if total.is_cuda:
                return array_of(total.double())
            return float(total.detach())

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        """Return the gradient of ``scale`` times the sum with respect to the outputs."""
        outputs, targets, total = saved["torch.loss"]
        with share_stream(array_of(outputs)):
            total = self._recorded(outputs, targets) if total is None else total
            outputs.grad = None
            total.backward(total.new_tensor(scale))
            if outputs.grad is None:
                raise UsageError("the loss does not depend on the outputs of the last stage")
            return array_of(outputs.grad)

    def _look(self, outputs: "torch.Tensor", targets: Inputs) -> None:
        """Compare the loss of a batch, once, with the losses of its halves.

        Raises UsageError where it is the other reduction: steps would depend on how a batch is cut.
        """
        half, count = len(outputs) // 2, len(outputs)
        devices = [outputs.device] if outputs.is_cuda else []
        with library().no_grad(), restored_random(devices):  # a loss that draws draws in the step as without this
            parts = (slice(None), slice(half), slice(half, None))
            values = [self._one(outputs[part], targets[part]) for part in parts]
        whole, first, second = (float(loss.double()) for loss in values)
        expected = {"mean": (first * half + second * (count - half)) / count, "sum": first + second}
        fits = {name: abs(whole - value) <= 1e-3 * abs(whole) for name, value in expected.items()}
        (other,) = set(REDUCTIONS) - {self._reduction}
        if fits[other] and not fits[self._reduction]:
            raise UsageError(
                f"the loss is wrapped as a {self._reduction} over samples, and it is a {other}: {whole:.6g} for "
                f"{count} samples, {first:.6g} and {second:.6g} for their halves; pass wrap reduction={other!r}"
            )
        self._is_known = True

    def _recorded(self, outputs: "torch.Tensor", targets: Inputs) -> "torch.Tensor":
        outputs.requires_grad_()
        with library().enable_grad():
            total = self._total(outputs, targets)
        if not total.requires_grad:
            raise UsageError("the loss has no gradient: it detaches the outputs of the last stage")
        return total

    def _total(self, outputs: "torch.Tensor", targets: Inputs) -> "torch.Tensor":
        total = self._one(outputs, targets)
        return total * (len(outputs) * self._tokens) if self._reduction == "mean" else total

    def _one(self, outputs: "torch.Tensor", targets: Inputs) -> "torch.Tensor":
        loss = self._function(outputs, targets.given if isinstance(targets, ArrayGroup) else targets)
        if not isinstance(loss, library().Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = tuple(loss.shape) if isinstance(loss, library().Tensor) else type(loss).__name__
            raise UsageError(f"the loss function returns {got}; it has to return one number, as a tensor")
        total: torch.Tensor = loss.reshape(())
        return total
