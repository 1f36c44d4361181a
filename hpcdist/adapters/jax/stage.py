"""JAX function as a stage of a model: compiled forward and backward, and their residuals.

A stage keeps the residuals of ``jax.vjp`` that depend on its input. Parameters are not kept, so ZeRO-3 may free them
between the passes. ``keep`` selects the kept residuals:

    products    results of matrix products and convolutions, except batched products (such as attention scores)
    everything  all residuals
    nothing     none: the backward recomputes the forward
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from hpcdist.adapters.jax.parameters import JaxTraffic, ParameterLeaves, jax_dtype, library, repeat_samples, submodule
from hpcdist.arrays.backend import Array
from hpcdist.arrays.layout import TensorSpec
from hpcdist.errors import DataError, UsageError
from hpcdist.models.stage import Draw, Gradients, Operations, Parameters, Saved, StreamOf

KEEPS: Final = ("products", "everything", "nothing")
# (parameter leaves, x, draw) -> y; draw is None, or (seed, step, first sample) as uint32.
Compute = Callable[[Sequence[Any], Any, Any], Any]


@dataclass(frozen=True)
class CompiledPasses:
    """Forward and backward pass of a stage, compiled by JAX for one input shape."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    unused: tuple[int, ...]  # indices of the parameters without gradient
    kept_bytes: int  # activations stored for the backward pass


def compile_passes(
    compute: Compute, leaves: Sequence[Any], x: Any, draw: Any, *, input_gradient: bool, keep: str
) -> CompiledPasses:
    """Compile the forward and backward pass of a stage function ``compute(leaves, x, draw)``. Local.

    ``leaves``, ``x`` and ``draw`` are the parameters, the input and the random draw: arrays, or `ShapeDtypeStruct`
    objects. Only their shapes and dtypes matter.
    """
    jax = library()
    policies = jax.checkpoint_policies
    policy = {
        "products": _is_product,
        "everything": policies.everything_saveable,
        "nothing": policies.nothing_saveable,
    }[keep]
    structure: dict[str, Any] = {}

    def traced(leaves: Sequence[Any], x: Any, draw: Any) -> Any:
        def run(leaves: Sequence[Any], x: Any) -> Any:
            return compute(leaves, x, draw)

        # prevent_cse is not needed: the passes are compiled separately, so recomputed values cannot be merged.
        checkpointed = jax.checkpoint(run, policy=policy, prevent_cse=False)
        if input_gradient:
            y, back = jax.vjp(checkpointed, leaves, x)
        else:
            y, back = jax.vjp(lambda leaves: checkpointed(leaves, x), leaves)
        residuals, structure["tree"] = jax.tree_util.tree_flatten(back)
        return y, residuals

    closed, (output, residuals) = jax.make_jaxpr(traced, return_shape=True)(list(leaves), x, draw)
    traced_outputs = submodule("extend.core").jaxpr_as_fun(closed)
    kept_indices = _input_residuals(closed, len(leaves))

    def outputs(leaves: Sequence[Any], x: Any, draw: Any) -> Any:
        return traced_outputs(*leaves, x, *jax.tree_util.tree_leaves(draw))

    def forward(leaves: Sequence[Any], x: Any, draw: Any) -> Any:
        y, *values = outputs(leaves, x, draw)
        return y, [values[index] for index in kept_indices]

    def backward(leaves: Sequence[Any], x: Any, draw: Any, held: Sequence[Any], dy: Any) -> Any:
        _, *values = outputs(leaves, x, draw)  # the compiler removes the values that are overwritten here
        for index, value in zip(kept_indices, held, strict=True):
            values[index] = value
        gradients = jax.tree_util.tree_unflatten(structure["tree"], values)(dy)
        return gradients if input_gradient else (*gradients, None)

    sizes = [residuals[index] for index in kept_indices]
    after, (leaf_gradients, _) = jax.make_jaxpr(backward, return_shape=True)(list(leaves), x, draw, sizes, output)
    return CompiledPasses(
        forward=jax.jit(forward),
        backward=jax.jit(backward),
        unused=tuple(index for index in range(len(leaf_gradients)) if not _uses(after, index)[-1]),
        kept_bytes=sum(value.size * value.dtype.itemsize for value in sizes),
    )


def _is_product(primitive: Any, *_: Any, **parameters: Any) -> bool:
    if primitive.name == "dot_general":
        _, batch = parameters["dimension_numbers"]
        return not any(batch)
    return bool(primitive.name == "conv_general_dilated")


def _input_residuals(closed: Any, leaves: int) -> list[int]:
    x = closed.jaxpr.invars[leaves]
    # A residual that occurs twice is kept twice; jit gives both the same memory.
    outputs = enumerate(closed.jaxpr.outvars[1:])
    return [index for index, var in outputs if var is not x and _uses(closed, index + 1)[leaves]]


def _uses(closed: Any, output: int) -> list[bool]:
    selected = [index == output for index in range(len(closed.jaxpr.outvars))]
    _, used = submodule("interpreters.partial_eval").dce_jaxpr(closed.jaxpr, selected)
    return list(used)


KEY_WORDS: Final = 5  # number of 32-bit words that determine the keys of a stage: see `_words`


@dataclass(frozen=True)
class StageFunction:
    """User function ``(params, x) -> y`` or ``(params, x, keys) -> y``, and the pytree structure of its params."""

    call: Callable[..., Any]
    tree: Any
    keyed: bool

    @classmethod
    def of(cls, call: Callable[..., Any], tree: Any, where: str) -> "StageFunction":
        """Wrap the user function ``call``. Raises UsageError unless it has 2 or 3 required arguments.

        ``tree``: pytree structure of the function's params. ``where``: name of the stage in errors.
        """
        if not callable(call):
            raise UsageError(f"the function of {where} is a {type(call).__name__}; give a function (params, x) -> y")
        required = [
            parameter
            for parameter in inspect.signature(call).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        ]
        if len(required) not in (2, 3):
            names = ", ".join(parameter.name for parameter in required)
            raise UsageError(
                f"the function of {where} has the arguments ({names}); give a function (params, x) or (params, x, keys)"
            )
        return cls(call, tree, len(required) == 3)


@dataclass(frozen=True)
class FunctionChain:
    """The user functions of one stage, in order. Each function gets the output of the function before it."""

    functions: tuple[StageFunction, ...]

    @property
    def keyed(self) -> bool:
        """True if any function of the stage takes random keys."""
        return any(function.keyed for function in self.functions)

    def __call__(self, leaves: Sequence[Any], x: Any, draw: Any) -> Any:
        rest = list(leaves)
        for index, function in enumerate(self.functions):
            leaves_here, rest = rest[: function.tree.num_leaves], rest[function.tree.num_leaves :]
            params = library().tree_util.tree_unflatten(function.tree, leaves_here)
            keys = (_keys(draw, index, x.shape[0]),) if function.keyed else ()
            x = function.call(params, x, *keys)
        return x

    @property
    def key(self) -> tuple[Any, ...]:
        """Cache key for the compiled stage: a tuple with the id and the params structure of each function."""
        return tuple((id(function.call), function.tree) for function in self.functions)

    def __str__(self) -> str:
        return " + ".join(
            getattr(function.call, "__name__", type(function.call).__name__) for function in self.functions
        )


def _keys(draw: Any, index: int, samples: int) -> Any:
    if draw is None:
        return None
    random = library().random
    seed, *others, first = draw
    key = random.key(seed)
    for word in (*others, index):
        key = random.fold_in(key, word)
    return library().vmap(lambda sample: random.fold_in(key, sample))(first + np.arange(samples, dtype=np.uint32))


Sample: TypeAlias = tuple[tuple[int, ...], np.dtype]  # shape and dtype of one sample
Adapted: TypeAlias = Callable[[str, Any], bool]


@dataclass(frozen=True)
class SharedContext:
    """Settings and compiled functions that all stages of a JAX model share."""

    computes: np.dtype
    keep: str
    traffic: JaxTraffic
    passes: dict[Any, CompiledPasses]
    adapted: Adapted
    example: np.ndarray  # inputs of the first stage


class JaxStage:
    """Pipeline stage whose forward and backward pass are computed by JAX."""

    def __init__(
        self,
        layer: int,
        chain: FunctionChain,
        leaves: ParameterLeaves,
        tied: dict[str, str],  # parameter name -> "LAYER.NAME" of its owner in an earlier layer
        sample: Sample,  # shape and dtype of an input sample
        shared: SharedContext,
    ) -> None:
        self.layer, self.chain, self.tied, self._leaves, self._shared = layer, chain, tied, leaves, shared
        self._sample, self._dtype = sample
        self._traffic, self._computes = shared.traffic, shared.computes
        self._specs = tuple(
            TensorSpec(layer, name, tuple(leaf.shape), adapted=bool(shared.adapted(f"{layer}.{name}", leaf)))
            for name, leaf in zip(leaves.names, leaves.arrays, strict=True)
            if name not in tied
        )
        self._output: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"stage {self.layer} ({self.chain})"

    def tensors(self) -> tuple[TensorSpec, ...]:
        return self._specs

    def output_shape(self, samples: int) -> tuple[int, ...]:
        if self._output is None:
            self._output = self._checked(1)[1:]
        return samples, *self._output

    def example_input(self, samples: int) -> np.ndarray:
        rows = np.zeros((1, *self._sample), self._dtype) if self.layer else self._shared.example
        return repeat_samples(rows, samples)

    def kept_bytes(self, samples: int) -> int:
        """Return the bytes of activations that backward needs for ``samples`` samples, without input and output."""
        return self.passes(samples).kept_bytes

    def unused(self, samples: int) -> list[str]:
        """Return a list of the names of the parameters without gradient in a batch of ``samples`` samples."""
        return [self._leaves.names[index] for index in self.passes(samples).unused]

    def passes(self, samples: int, *, draws: bool = True) -> CompiledPasses:
        """Return the compiled forward and backward functions of this stage for ``samples`` samples."""
        drawn = draws and self.chain.keyed
        key = (self.chain.key, self._leaves.shapes, self._sample, self._dtype, self.layer > 0, samples, drawn)
        if key not in self._shared.passes:
            shape = self._checked(samples)
            if shape != self.output_shape(samples):
                raise UsageError(
                    f"{self} returns shape {shape} for {samples} samples, and {self.output_shape(1)} for one sample; "
                    "return one row per sample. The shape of a row must not depend on the number of samples"
                )
            arguments = self._arguments(samples, drawn=drawn)
            with self._noted(samples):
                built = compile_passes(self.chain, *arguments, input_gradient=self.layer > 0, keep=self._shared.keep)
            self._shared.passes[key] = built
        return self._shared.passes[key]

    def initialise(self, parameters: Parameters, rng_of: StreamOf) -> None:
        for name, value in zip(self._leaves.names, self._leaves.values(), strict=True):
            if name not in self.tied:
                parameters[name][...] = np.asarray(value)

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        if x.shape[1:] != self._sample or jax_dtype(x.dtype) != self._dtype:
            raise DataError(
                f"{self} got samples of shape {x.shape[1:]} and type {x.dtype}, but the samples of the example have "
                f"shape {self._sample} and type {self._dtype}; convert the data, or pass another example to wrap"
            )
        passes = self.passes(len(x), draws=saved.draw is not None)
        inside = self._traffic.bring(x)
        y, residuals = passes.forward(self._bring(parameters), inside, self._draw(saved))
        library().block_until_ready((y, residuals))  # shared memory may change from here on
        saved.keep("jax.x", inside)
        saved.keep("jax.kept", residuals)
        result = saved.empty("jax.y", y.shape, self._computes)
        self._traffic.take(y, result)
        return result

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        passes = self.passes(len(dy), draws=saved.draw is not None)
        leaves, x, draw = self._bring(parameters), saved["jax.x"], self._draw(saved)
        leaf_gradients, dx = passes.backward(leaves, x, draw, saved["jax.kept"], self._traffic.bring(dy))
        library().block_until_ready((leaf_gradients, dx))
        for name, gradient in zip(self._leaves.names, leaf_gradients, strict=True):
            view, add = gradients.into(name)
            self._traffic.take(gradient, view, add=add)
        if dx is None:
            return None
        result = dy if dy.shape == dx.shape else saved.scratch("jax.dx", dx.shape, self._computes)
        self._traffic.take(dx, result)
        return result

    def _bring(self, parameters: Parameters) -> list[Any]:
        return [self._traffic.bring(parameters[name]) for name in self._leaves.names]

    def _draw(self, saved: Saved) -> tuple[np.uint32, ...] | None:
        if saved.draw is None or not self.chain.keyed:
            return None
        return tuple(map(np.uint32, _words(saved.draw, self.layer)))

    def _arguments(self, samples: int, *, drawn: bool) -> tuple[list[Any], Any, Any]:
        struct = library().ShapeDtypeStruct
        leaves = [struct(shape, self._computes) for shape in self._leaves.shapes]
        draw = tuple(struct((), np.uint32) for _ in range(KEY_WORDS)) if drawn else None
        return leaves, struct((samples, *self._sample), self._dtype), draw

    def _checked(self, samples: int) -> tuple[int, ...]:
        with self._noted(samples):
            output = library().eval_shape(self.chain, *self._arguments(samples, drawn=self.chain.keyed))
        if not hasattr(output, "dtype"):
            raise UsageError(f"{self} returns a {type(output).__name__}; a stage must return one array (samples, ...)")
        if output.dtype != self._computes:
            raise UsageError(
                f"{self} returns {output.dtype}, but its parameters have the dtype {self._computes}; end the stage "
                f"with .astype({self._computes.name!r}), because stages exchange arrays of the parameters' dtype"
            )
        shape = tuple(output.shape)
        if not shape or shape[0] != samples:
            raise UsageError(f"{self} returns shape {shape} for {samples} samples; return one row per sample")
        return shape

    @contextlib.contextmanager
    def _noted(self, samples: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"while JAX traced {self} on {samples} samples of shape {self._sample}")
            raise


def _words(draw: Draw, layer: int) -> Iterator[int]:
    return (word & 0xFFFFFFFF for word in (draw.seed, draw.seed >> 32, draw.step, layer, draw.first_sample))
