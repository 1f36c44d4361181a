"""Models that are pure functions of JAX, trained by every strategy. The page your-model has an example.

Each new number of samples in a micro-batch costs a compilation. A stage ``(params, x, keys) -> y`` also gets a random
key for each sample, or None in an evaluation. The key depends on (seed, step, layer, index of the sample in the batch),
but not on the partition of the work.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hpcdist.adapters.jax.parameters import (
    JaxTraffic,
    ParameterLeaves,
    check_ties,
    common_dtype,
    group_by_stage,
    jax_dtype,
    library,
    platform_of,
    repeat_samples,
)
from hpcdist.adapters.jax.stage import KEEPS, Adapted, FunctionChain, JaxStage, Sample, SharedContext, StageFunction
from hpcdist.arrays.backend import Array, to_host
from hpcdist.comm.start import fail_alike
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import LOSS_WEIGHT, Loss, Model
from hpcdist.models.stage import Operations, Saved


class JaxLoss(Loss):
    """Loss computed by the user's JAX function from the outputs of the last stage and the targets."""

    def __init__(
        self,
        call: Callable[[Any, Any], Any],  # (y, targets) -> mean, losses (samples, ...), or (sum, weight)
        traffic: JaxTraffic,
        *,
        output: tuple[tuple[int, ...], np.dtype],  # shape and dtype of y for one sample
        example: np.ndarray,  # targets to test ``call`` with
    ) -> None:
        self._call, self._traffic, self._example = call, traffic, example
        target = example.shape[1:], jax_dtype(example.dtype)
        self.weighs = False
        shape1, shape2 = (self._shape(samples, output, target) for samples in (1, 2))
        self.is_mean = shape1 == shape2 == () and not self.weighs
        if not self.is_mean and not self.weighs and (shape1[:1] != (1,) or shape2 != (2, *shape1[1:])):
            raise UsageError(
                f"the loss has shape {shape1} for 1 sample and {shape2} for 2 samples; return losses of shape "
                "(samples, ...), the mean loss as a number, or the pair (sum, weight)"
            )
        if self.is_mean:
            self._check_mean(output)
            self._check_divisor(output, target)
        self.per_sample = int(np.prod(shape1))  # losses per sample, the divisor of the mean
        jax = library()
        self._losses = jax.jit(call)
        self._gradient = jax.jit(lambda y, targets, scale: jax.vjp(lambda y: self._sum(y, targets), y)[1](scale)[0])

    def example_targets(self, samples: int) -> np.ndarray:
        """Return an array of ``samples`` targets: the example targets, repeated as often as needed."""
        return repeat_samples(self._example, samples)

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> float:
        y, inside = self._traffic.bring(logits), self._traffic.bring(targets)
        losses, *weight = self._losses(y, inside) if self.weighs else (self._losses(y, inside),)
        total = float(np.asarray(losses).astype(np.float64).sum())
        saved.keep("jax.loss", (logits, y, inside))
        if weight:
            saved.keep(LOSS_WEIGHT, float(np.float32(weight[0])))
        return total * len(logits) if self.is_mean else total

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        logits, y, targets = saved["jax.loss"]
        gradient = library().block_until_ready(self._gradient(y, targets, logits.dtype.type(scale)))
        self._traffic.take(gradient, logits)
        result: Array = logits
        return result

    def _check_mean(self, output: tuple[tuple[int, ...], np.dtype]) -> None:
        shape, dtype = output
        y = np.random.default_rng(0).random((2, *shape)).astype(dtype)
        target = np.repeat(self._example[:1].astype(jax_dtype(self._example.dtype)), 2, axis=0)
        both, first, second = (float(self._call(y[rows], target[rows])) for rows in (np.s_[:], np.s_[:1], np.s_[1:]))
        if abs(both - (first + second) / 2) > 1e-3 * max(map(abs, (both, first, second))):
            kind = "a sum" if abs(both - first - second) <= 1e-3 * abs(both) else "no mean over samples"
            raise UsageError(
                f"the loss is {kind}: two single samples have losses {first:.6g} and {second:.6g}, and both samples "
                f"together have loss {both:.6g}, which is not the mean; return losses of shape (samples, ...), the "
                "mean loss as a number, or the pair (sum, weight)"
            )

    def _check_divisor(self, output: Sample, target: Sample) -> None:
        structs = [library().ShapeDtypeStruct((2, *shape), dtype) for shape, dtype in (output, target)]
        jaxpr = library().make_jaxpr(self._call)(*structs).jaxpr
        if not is_plain_mean(jaxpr, set(jaxpr.invars)):
            raise UsageError(
                "the loss is one number, and its computation does not show that every sample has the same weight; "
                "return (sum, weight), for example (losses * mask).sum(), mask.sum(), or losses of shape (samples, ...)"
            )

    def _sum(self, y: Any, targets: Any) -> Any:
        if self.weighs:
            return self._call(y, targets)[0].astype(y.dtype)
        losses = self._call(y, targets)
        return (losses * y.shape[0] if self.is_mean else losses.sum()).astype(y.dtype)

    def _shape(
        self, samples: int, output: tuple[tuple[int, ...], np.dtype], target: tuple[tuple[int, ...], np.dtype]
    ) -> tuple[int, ...]:
        struct = library().ShapeDtypeStruct
        losses = library().eval_shape(
            self._call, *(struct((samples, *shape), dtype) for shape, dtype in (output, target))
        )
        if isinstance(losses, tuple) and len(losses) == 2:
            self.weighs = True
            losses, weight = losses
            if losses.shape != () or weight.shape != ():
                raise UsageError(
                    f"the loss is a pair (sum, weight) with the shapes {losses.shape} and {weight.shape}; return two "
                    "scalars, with shape ()"
                )
        if not hasattr(losses, "dtype") or not np.issubdtype(losses.dtype, np.floating):
            raise UsageError(
                f"the loss function returned {losses}; return losses (samples, ...), their mean, or (sum, weight), "
                "as floats"
            )
        return tuple(losses.shape)


_KEEP: Final = ("neg", "convert_element_type", "reshape", "squeeze", "copy")  # primitives that keep a mean a mean


def is_plain_mean(jaxpr: Any, data: set[Any], *, divided: bool = False) -> bool:
    """Return True if the JAX program ``jaxpr`` returns a sum over the variables ``data``, divided by a constant."""
    # Sums, differences and constant multiples of plain means are also plain means. If `divided`, the caller divides the
    # result by a constant.
    made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    depends = set(data)
    for equation in jaxpr.eqns:
        if any(_is_in(var, depends) for var in equation.invars):
            depends.update(equation.outvars)

    def is_mean(var: Any, *, divided: bool) -> bool:
        equation = made.get(var) if not hasattr(var, "val") else None
        if equation is None:
            return False
        name, inputs = equation.primitive.name, [outer for outer in equation.invars if _is_in(outer, depends)]
        if name == "reduce_sum":
            return divided
        if name in ("add", "sub"):
            return all(is_mean(outer, divided=divided) for outer in inputs)
        if name in _KEEP or (name == "mul" and len(inputs) == 1):
            return is_mean(inputs[0], divided=divided or name == "mul")
        if name == "div":
            return inputs == [equation.invars[0]] and is_mean(inputs[0], divided=True)
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is None or len(equation.outvars) != 1:
            return False
        inner = getattr(inner, "jaxpr", inner)
        used = {arg for arg, outer in zip(inner.invars, equation.invars, strict=True) if _is_in(outer, depends)}
        return is_plain_mean(inner, used, divided=divided)

    return is_mean(jaxpr.outvars[0], divided=divided)


def _is_in(var: Any, variables: set[Any]) -> bool:
    return not hasattr(var, "val") and var in variables  # a literal is not hashable


EXAMPLE_SAMPLES: Final = 8  # samples of the example that a model keeps, to measure its stages


class WrappedModel(Model):
    """Model whose stages compute with JAX."""

    traffic: JaxTraffic  # counts of bytes copied to JAX and back
    given: Sequence[tuple[int, ParameterLeaves]]  # for each function: its stage, and its parameter leaves

    def trees(self, values: Mapping[str, Array]) -> list[Any]:
        """Return a list with one params pytree per function passed to `wrap`. ``values``: {"LAYER.NAME": array}."""
        tied = {f"{stage.layer}.{name}": key for stage in self.stages for name, key in stage.tied.items()}
        keys = [[f"{layer}.{name}" for name in leaves.names] for layer, leaves in self.given]
        arrays = [[to_host(values[tied.get(key, key)]) for key in row] for row in keys]
        unflatten = library().tree_util.tree_unflatten
        return [unflatten(leaves.tree, row) for (_, leaves), row in zip(self.given, arrays, strict=True)]


def wrap(
    stages: Sequence[Callable[..., Any]],
    params: Sequence[Any],
    loss: Callable[[Any, Any], Any],
    *,
    example: tuple[Any, Any],  # (inputs, targets): arrays or `jax.ShapeDtypeStruct`
    # Shared tensors, such as {"3.head": "0.table"}: stage number (not function number) and pytree path with dots.
    tied: Mapping[str, str] | None = None,
    keep: str = "products",  # activations to store: "products" of matrices, "everything", "nothing"
    adapted: Adapted | None = None,  # leaves with weight decay, layer-wise rates; None: with >= 2 dims
) -> WrappedModel:
    """Return a model that trains the pure functions ``stages``: (params, x) -> y, where ``x`` is a micro-batch.

    ``params``: for each function, a pytree of float arrays, or a function that creates the pytree. ``loss(y, targets)``
    returns the mean loss, losses of shape (samples, ...), or (summed loss, weight). ``example``: (inputs, targets).
    """
    fail_alike(launched=True)
    if keep not in KEEPS:
        raise UsageError(f"keep = {keep!r}; choose one of {', '.join(KEEPS)}")
    if not stages or len(stages) != len(params):
        raise UsageError(f"got {len(stages)} stages and {len(params)} params; give one pytree of params per stage")
    leaves = [ParameterLeaves.of(tree, f"params of stage {number}") for number, tree in enumerate(params)]
    groups, computes = group_by_stage(leaves), common_dtype(leaves)
    inputs, targets = _example(example)
    shared = SharedContext(computes, keep, JaxTraffic(), {}, adapted or _adapted, inputs)
    jax_stages = _stages(
        stages, leaves, groups, check_ties(tied or {}, [_stage_leaves(leaves, group) for group in groups]), shared
    )
    for stage in jax_stages:
        _refuse_unused(stage, len(inputs))
    lossy = JaxLoss(loss, shared.traffic, output=(jax_stages[-1].output_shape(1)[1:], computes), example=targets)
    count, on = lossy.per_sample, platform_of(leaves)
    model = WrappedModel(jax_stages, computes.name, tokens_per_sample=count, loss=lossy, seeded=False, on=on)
    layer_of = {number: layer for layer, group in enumerate(groups) for number in group}
    model.traffic, model.given = shared.traffic, [(layer_of[number], tree) for number, tree in enumerate(leaves)]
    return model


def _stages(
    functions: Sequence[Callable[..., Any]],
    leaves: Sequence[ParameterLeaves],
    groups: Sequence[Sequence[int]],
    ties: Sequence[dict[str, str]],
    shared: SharedContext,
) -> list[JaxStage]:
    jax_stages: list[JaxStage] = []
    x: Sample = shared.example.shape[1:], jax_dtype(shared.example.dtype)
    for layer, group in enumerate(groups):
        stage_leaves = _stage_leaves(leaves, group)
        chain = FunctionChain(
            tuple(StageFunction.of(functions[number], leaves[number].tree, f"stage {number}") for number in group)
        )
        jax_stages.append(JaxStage(layer, chain, stage_leaves, ties[layer], x, shared))
        x = jax_stages[-1].output_shape(1)[1:], shared.computes
    return jax_stages


def _adapted(name: str, leaf: Any) -> bool:
    return len(leaf.shape) > 1


def _stage_leaves(leaves: Sequence[ParameterLeaves], group: Sequence[int]) -> ParameterLeaves:
    return next(leaves[number] for number in group if leaves[number].names)


def _refuse_unused(stage: JaxStage, samples: int) -> None:
    unused = stage.unused(samples)
    if unused:
        raise ConfigurationError(
            f"tensor {stage.layer}.{unused[0]} has no gradient: the output of {stage} is not a differentiable function "
            "of the tensor; remove the tensor from the params, or make it a constant of the function"
        )


def _example(example: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(example, tuple) or len(example) != 2:
        raise UsageError(f"the example is a {type(example).__name__}; give a pair (inputs, targets)")
    arrays: list[np.ndarray] = []
    for values, what in zip(example, ("inputs", "targets"), strict=True):
        is_shape = isinstance(values, library().ShapeDtypeStruct)
        array = np.zeros(values.shape, values.dtype) if is_shape else np.asarray(values)
        if not array.shape or not array.shape[0]:
            raise UsageError(f"the {what} of the example have shape {array.shape}; give at least one sample")
        arrays.append(array)
    inputs, targets = arrays
    if len(inputs) != len(targets):
        raise UsageError(f"the example has {len(inputs)} inputs and {len(targets)} targets; give equal numbers of both")
    return inputs[:EXAMPLE_SAMPLES].copy(), targets[:EXAMPLE_SAMPLES].copy()
