"""User modules as a `hpcdist.models.stage.Stage`: forward keeps PyTorch's graph, and backward runs the graph."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from hpcdist.adapters.torch.arrays import (
    array_of,
    as_computable,
    flop_counter,
    fresh_casts,
    library,
    seeded_random,
    share_stream,
    tensor_of,
    without_autocast,
)
from hpcdist.adapters.torch.attention import CURRENT, SampleCut
from hpcdist.adapters.torch.batchnorm import StatisticsAxis, synchronised
from hpcdist.adapters.torch.modules import ParameterBinding, StageModules
from hpcdist.adapters.torch.values import StageValues
from hpcdist.arrays.backend import Array, ArrayGroup, arrays_in
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.stage import Draw, Gradients, Operations, Parameters, Saved, StreamOf

if TYPE_CHECKING:
    import torch

# Texts of PyTorch's errors if a module overwrites the input of its stage, or one of several inputs.
OVERWRITES: Final = ("leaf Variable", "output of a function that returns multiple views")
Inputs: TypeAlias = "torch.Tensor | ArrayGroup"  # a group only for the first stage, if the user passes several inputs


class TorchStage:
    """Pipeline stage that runs consecutive PyTorch modules."""

    def __init__(
        self,
        layer: int,
        cut: StageModules,
        binding: ParameterBinding,
        adapted: Callable[[str, "torch.nn.Parameter"], bool],
        arriving: StageValues | None,
    ):
        self.layer, self.modules, self.binding = layer, cut, binding
        self.name = str(cut)
        self.tied = {name: f"{owner}.{there}" for name, (owner, there) in cut.tied.items()}
        self._specs = tuple(
            TensorSpec(layer, name, tuple(parameter.shape), adapted(name, parameter))
            for name, parameter in cut.owned.items()
        )
        self._output: tuple[int, ...] | None = None
        self._constants = dict(cut.constants())
        self._example: Inputs | None = None
        self._inside = False  # True during a pass of the run
        self._arriving = arriving  # of the stage before; None for the first stage
        self.leaving = StageValues(f"stage {layer}, {self.name},")
        self._cut: SampleCut | None = None
        self._synchronised = cut.synchronised()
        self._statistics_axis: StatisticsAxis | None = None  # None: one replica
        self.uncut = ""  # sentence with the reason why ``cut=True`` of `wrap` left the module whole
        self.forward_flops: float | None = None  # of products, per sample; None without an example

    def in_context(self, cut: SampleCut) -> "TorchStage":
        """Return a copy of this stage that computes only this rank's tokens, ``cut``. Each token has one output row."""
        other = copy.copy(self)
        if self._output is not None:
            if self._output[:1] != (cut.whole,):
                raise ConfigurationError(
                    f"parallel.context needs one output row per token, but stage {self.layer}, {self.name}, returns "
                    f"{self._output} for a sample of {cut.whole} tokens (data.context); set parallel.context = 1"
                )
            other._output = (cut.tokens, *self._output[1:])
        other._cut = cut
        return other

    def in_replicas(self, axis: StatisticsAxis) -> "TorchStage":
        """Return a copy of this stage whose SyncBatchNorm modules use the statistics of all ranks of ``axis``."""
        other = copy.copy(self)
        other._statistics_axis = axis
        return other

    @property
    def attends(self) -> bool:
        """True if a replica must run training passes of the stage even if a micro-batch has no samples."""
        return self._statistics_axis is not None and bool(self._synchronised)

    def synchronised(self) -> list[str]:
        """Return a list of the names of the SyncBatchNorm modules."""
        return list(self._synchronised)

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def untrained(self) -> dict[str, "torch.Tensor"]:
        """Return {name: tensor} of the frozen parameters, the buffers and the running statistics of the stage."""
        return {**dict(self.modules.constants()), **self.modules.statistics()}

    def script_only(self) -> list[str]:
        """Return a list of the names of frozen parameters and running statistics, which only scripts support."""
        frozen = [name for name, tensor in self.modules.constants() if isinstance(tensor, library().nn.Parameter)]
        return [*frozen, *self.modules.statistics()]

    def share_untrained(self, broadcast: Callable[[Array], object]) -> None:
        """Overwrite the tensors of `untrained` with the values of rank 0, by ``broadcast(array)``. Collective."""
        torch = library()
        for name, tensor in self.untrained().items():
            plain = tensor.detach().clone(memory_format=torch.contiguous_format)
            if plain.numel():
                broadcast(array_of(plain.reshape(-1).view(torch.uint8)))
            if not torch.equal(plain, tensor):
                try:
                    tensor.detach().copy_(plain)
                except RuntimeError as error:  # an expanded tensor
                    raise UsageError(
                        f"buffer {name} of stage {self.layer} differs between ranks and shares memory between its "
                        "elements; make it contiguous, or equal on all ranks"
                    ) from error

    def statistics(self) -> dict[str, Array]:
        """Return {name: 1-D array over the memory of a running statistic}. Forward passes in training change them."""
        return {name: array_of(buffer.reshape(-1)) for name, buffer in self.modules.statistics().items()}

    def output_shape(self, samples: int) -> tuple[int, ...]:
        """Return the output shape for ``samples`` samples. Raises ConfigurationError if the stage has not run yet."""
        if self._output is None:
            raise ConfigurationError(
                f"the output shape of stage {self.layer}, {self.name}, is unknown before its first run; pass example=x "
                "to wrap, an input with any number of samples"
            )
        return samples, *self._output

    def example_input(self, samples: int) -> Array:
        """Return an input of ``samples`` samples, made by repeating the example's samples."""
        if self._example is None:
            raise ConfigurationError(
                f"there is no example input for stage {self.layer}, {self.name}; pass example=x to wrap"
            )
        chosen = self._select(self._example, [number % len(self._example) for number in range(samples)])
        return chosen.map(array_of) if isinstance(chosen, ArrayGroup) else array_of(chosen)  # type: ignore[return-value]

    @property
    def takes_several(self) -> bool:
        """True if this stage takes several values: inputs of a batch, or values of the stage before."""
        return self._arriving is None or self._arriving.several

    def _select(self, x: Inputs, samples: list[int]) -> Inputs:
        return x[samples] if self._arriving is None else self._arriving.rows(cast("torch.Tensor", x), samples)

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        for name, values in self.binding.initial(self.modules).items():
            parameters[name][...] = values

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        self.binding.bind(self.modules, parameters, arrays_in(x)[0])
        with share_stream(x):
            leaf = as_computable(x, self.binding.dtype) if self.layer == 0 else tensor_of(x)
            if saved.draw is None:
                y = self._evaluated(leaf)
            else:
                self.binding.free_initial(saved.draw.step)
                y = self._recorded(leaf, saved.draw)
            saved.keep("torch.run", (leaf, None if saved.draw is None else y))  # y with its graph
            return array_of(self._checked(y, leaf))

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        self.binding.bind(self.modules, parameters, dy)
        with share_stream(dy):
            x, y = saved["torch.run"]
            y = self._recorded(x, None) if y is None else y
            if not y.requires_grad:
                raise UsageError(
                    f"the output of stage {self.layer}, {self.name}, does not depend on its parameters; use the "
                    "parameters in the forward"
                )
            if self.layer > 0:
                x.grad = None
            # Modules may recompute activations.
            collecting = self.binding.collect(self.modules, gradients)
            with self._on_axes(), without_autocast(self.binding.device), collecting as written:
                y.backward(tensor_of(dy))
            self._check_written(written)
            if self.layer == 0:
                return None
            if x.grad is None:
                raise UsageError(
                    f"the output of stage {self.layer}, {self.name}, does not depend on its input; look for detach() "
                    "or no_grad() in the stage"
                )
            return array_of(x.grad)

    def guard(self, why: str) -> None:
        """Make this stage's modules raise UsageError with the text ``why`` if user code calls them."""

        def check(module: "torch.nn.Module", inputs: object) -> None:
            if not self._inside and self.binding.has(self.modules):
                raise UsageError(f"{self.name} was called outside of a step: {why}")

        for module in self.modules.entries:
            module.register_forward_pre_hook(check)

    def trace(self, x: "Inputs") -> "torch.Tensor":
        """Run the stage on the example input ``x``, and return the output. Store ``x`` and the FLOPs per sample."""
        # Under the counter, PyTorch would give up compiling the modules for the rest of the process.
        stance = library().compiler.set_stance if self.modules.is_compiled else contextlib.nullcontext
        with stance("force_eager"), flop_counter() as counter:
            y = self._evaluated(x)
        self._example, self.forward_flops = x, counter.get_total_flops() / len(x)
        return self._checked(y, x)

    def _evaluated(self, x: "Inputs") -> "torch.Tensor":
        self._set_mode(training=False)
        with library().no_grad():
            return self._run(x)

    def _recorded(self, x: Any, draw: Draw | None) -> "torch.Tensor":
        torch = library()
        self._set_mode(training=draw is not None)
        if self.layer > 0:
            x.requires_grad_()
        with torch.enable_grad(), self.binding.saving(self.modules):
            if draw is None:
                return self._run(x)
            with seeded_random(draw, self.layer, self.binding.device):
                return self._run(x)

    def _run(self, x: "Inputs") -> "torch.Tensor":
        self._inside = True
        try:
            with self._on_axes(), fresh_casts():
                return self._through(x)
        except RuntimeError as error:
            if len(x):
                raise
            raise UsageError(
                f"stage {self.layer}, {self.name}, cannot run without samples: {error}. SyncBatchNorm modules take "
                "part in the statistics of all replicas even if this replica has no samples for a micro-batch; give "
                "each replica at least parallel.microbatches samples of a step"
            ) from error
        finally:
            self._inside = False

    @contextlib.contextmanager
    def _on_axes(self) -> Iterator[None]:
        # Modules inside use the tokens of all context ranks and the statistics of all replicas.
        before = CURRENT.set(self._cut)
        try:
            with synchronised(self._synchronised.values(), self._statistics_axis):
                yield
        finally:
            CURRENT.reset(before)

    def _through(self, x: "Inputs") -> "torch.Tensor":
        before = [constant._version for constant in self._constants.values()]
        y: Any = x if self._arriving is None else self._arriving.unpack(cast("torch.Tensor", x))
        for prefix, module in self.modules.modules:
            try:
                y = self._call(prefix, module, y)
            except RuntimeError as error:
                if not any(text in str(error) for text in OVERWRITES):
                    raise
                raise UsageError(
                    f"stage {self.layer}, {self.name}, overwrites its input in {prefix or 'module'} "
                    f"({type(module).__name__}); the stage before still needs the input: use inplace=False"
                ) from error
        self._check_constants(before)
        return self.leaving.pack(y, len(x), self.binding.dtype)

    def _call(self, prefix: str, module: "torch.nn.Module", x: "Inputs") -> Any:
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
                described = f"inputs by name, {', '.join(named)}" if named else f"{len(arguments)} input(s)"
                raise UsageError(
                    f"stage {self.layer}, {self.name}: {prefix or 'module'} ({type(module).__name__}) cannot be called "
                    f"with {described}: {unbound}; the first module of a model gets all inputs of a batch (a tuple or "
                    "dict) as arguments, and each later module gets the output of the module before"
                ) from error
            raise

    def _checked(self, y: "torch.Tensor", x: "Inputs") -> "torch.Tensor":
        expected = y.shape[1:] if self._output is None or self.leaving.learns else self._output
        if y.dim() == 0 or tuple(y.shape) != (len(x), *expected):
            raise UsageError(
                f"stage {self.layer}, {self.name}, returns {tuple(y.shape)} for {len(x)} samples, expected "
                f"{(len(x), *expected)}; dim 0 must be the samples, and the other dims must be the same in all calls"
            )
        if self._cut is not None and self.leaving.several:
            raise ConfigurationError(
                f"parallel.context needs one tensor between stages, but stage {self.layer}, {self.name}, returns "
                "several; set parallel.context = 1"
            )
        self._output = tuple(y.shape[1:])
        shared = y.untyped_storage().data_ptr()
        starts = {tensor.untyped_storage().data_ptr() for tensor in arrays_in(x)}
        if y.numel() and (shared in starts or self.binding.holds(self.modules, shared)):
            return y.detach().clone()  # this memory may be freed before the output is used
        return y

    def _set_mode(self, *, training: bool) -> None:
        self.modules.set_modes(self.modules.modes if training else dict.fromkeys(self.modules.modes, False))

    def _check_constants(self, before: list[int]) -> None:
        now = dict(self.modules.constants())
        for (name, constant), version in zip(self._constants.items(), before, strict=True):
            if now.get(name) is not constant or constant._version != version:
                raise UsageError(
                    f"buffer {name} of stage {self.layer}, {self.name}, changes in the forward: replicas would differ, "
                    "and no checkpoint contains buffers other than those of BatchNorm; keep the buffer constant, or "
                    "use the backend of torch.distributed (hpcdist.torch) instead of Training"
                )

    def _check_written(self, written: set[str]) -> None:
        missing = [name for name in (*self.modules.owned, *self.modules.tied) if name not in written]
        if missing:
            raise UsageError(
                f"no gradient reached parameter {', '.join(missing)} of stage {self.layer}, {self.name}: the stage's "
                "forward does not use the parameter, or detaches it; remove the parameter from the module, or "
                "register it as a buffer"
            )
