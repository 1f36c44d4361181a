"""Models that are pure functions of JAX, trained by every strategy.

    from hpcdist.adapters.jax import model as adapter

    def block(params, x):  # (samples, hidden) -> (samples, hidden)
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    def head(params, x):  # (samples, hidden) -> (samples, classes)
        return x @ params["out"]

    def loss(y, classes):  # -> (samples,)
        return -jnp.take_along_axis(jax.nn.log_softmax(y), classes[:, None], axis=1)[:, 0]

    params = [{"up": up1, "down": down1}, {"up": up2, "down": down2}, {"out": out}]
    model = adapter.wrap([block, block, head], params, loss, example=(x[:1], classes[:1]))
    with Training(model, {"run.steps": 100, "run.global_batch": 64}) as training:  # hpcdist.training.script
        for _ in training.steps:
            training.step(x[training.share], classes[training.share])
    params = model.trees(training.parameters())

A stage is what a pipeline cuts off and what ZeRO-3 gathers and frees. Its passes are compiled apart, and parameters are
read from the run's memory in each of both: `hpcdist.adapters.jax.stage` tells what is kept between them. Gradients,
outputs and the gradients of inputs are copied out once; see `hpcdist.adapters.jax.parameters` and
`WrappedModel.traffic`.

Passes are compiled in the first step that has so many samples, and stay: shares by measured speed, or batches that grow
in many steps, cost a compilation each.

Random numbers: a stage ``(params, x, keys) -> y`` gets a key for each sample, which follows from (seed, step, layer,
place of the sample in the batch), so that any cut of the work drops the same; None where nothing is to be dropped.
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
    """The losses ``call(y, targets)``, summed: (sum, weight), losses (samples, ...), or a mean as a number.

    ``output`` is shape and type of a sample of y, ``example`` has targets. Raises UsageError for other losses, and for
    a mean whose divisor depends on the data: the mean of such means would depend on how a batch is cut.
    """

    def __init__(
        self,
        call: Callable[[Any, Any], Any],
        traffic: JaxTraffic,
        *,
        output: tuple[tuple[int, ...], np.dtype],
        example: np.ndarray,
    ) -> None:
        self._call, self._traffic, self._example = call, traffic, example
        target = example.shape[1:], jax_dtype(example.dtype)
        self.weighs = False
        shape1, shape2 = (self._shape(samples, output, target) for samples in (1, 2))
        self.is_mean = shape1 == shape2 == () and not self.weighs
        if not self.is_mean and not self.weighs and (shape1[:1] != (1,) or shape2 != (2, *shape1[1:])):
            raise UsageError(
                f"the loss has shape {shape1} for 1 sample and {shape2} for 2; return losses (samples, ...), "
                "their mean as a number, or (sum, weight)"
            )
        if self.is_mean:
            self._check_mean(output)
            self._check_divisor(output, target)
        self.per_sample = int(np.prod(shape1))  # losses a sample, which the mean divides by
        jax = library()
        self._losses = jax.jit(call)
        self._gradient = jax.jit(lambda y, targets, scale: jax.vjp(lambda y: self._sum(y, targets), y)[1](scale)[0])

    def example_targets(self, samples: int) -> np.ndarray:
        """Return targets of so many samples, those of the example."""
        return repeat_samples(self._example, samples)

    def forward(self, logits: Array, targets: Array, operations: Operations, saved: Saved) -> float:
        """Return the sum in float64; ``logits`` (samples, ...) are what the last stage gave, and stay as they are."""
        y, inside = self._traffic.bring(logits), self._traffic.bring(targets)
        losses, *weight = self._losses(y, inside) if self.weighs else (self._losses(y, inside),)
        total = float(np.asarray(losses).astype(np.float64).sum())
        saved.keep("jax.loss", (logits, y, inside))
        if weight:
            saved.keep(LOSS_WEIGHT, float(np.float32(weight[0])))
        return total * len(logits) if self.is_mean else total

    def backward(self, scale: float, operations: Operations, saved: Saved) -> Array:
        """Return the gradient of ``scale`` times the sum, over the output of the last stage."""
        logits, y, targets = saved["jax.loss"]
        gradient = library().block_until_ready(self._gradient(y, targets, logits.dtype.type(scale)))
        self._traffic.take(gradient, logits)
        result: Array = logits
        return result

    def _check_mean(self, output: tuple[tuple[int, ...], np.dtype]) -> None:
        """Compare the loss of two samples with the losses of each. Raises UsageError unless it is their mean."""
        shape, dtype = output
        y = np.random.default_rng(0).random((2, *shape)).astype(dtype)
        target = np.repeat(self._example[:1].astype(jax_dtype(self._example.dtype)), 2, axis=0)
        both, first, second = (float(self._call(y[rows], target[rows])) for rows in (np.s_[:], np.s_[:1], np.s_[1:]))
        if abs(both - (first + second) / 2) > 1e-3 * max(map(abs, (both, first, second))):
            kind = "a sum" if abs(both - first - second) <= 1e-3 * abs(both) else "no mean over samples"
            raise UsageError(
                f"the loss is {kind}, {first:.6g} and {second:.6g} for two samples and {both:.6g} for both; return "
                "losses (samples, ...), their mean as a number, or (sum, weight)"
            )

    def _check_divisor(self, output: Sample, target: Sample) -> None:
        """Raise UsageError unless the mean divides a sum by a number that the shapes alone decide."""
        structs = [library().ShapeDtypeStruct((2, *shape), dtype) for shape, dtype in (output, target)]
        jaxpr = library().make_jaxpr(self._call)(*structs).jaxpr
        if not is_plain_mean(jaxpr, set(jaxpr.invars)):
            raise UsageError(
                "the loss is one number, and its computation does not show that every sample counts alike in it; "
                "return (sum, weight), as in: return (losses * mask).sum(), mask.sum(); or losses (samples, ...)"
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
                raise UsageError(f"the loss is a pair of shapes {losses.shape} and {weight.shape}; return two numbers")
        if not hasattr(losses, "dtype") or not np.issubdtype(losses.dtype, np.floating):
            raise UsageError(f"the loss is {losses}; return losses (samples, ...), their mean, or (sum, weight)")
        return tuple(losses.shape)


_KEEP: Final = ("neg", "convert_element_type", "reshape", "squeeze", "copy")  # primitives that keep weights


def is_plain_mean(jaxpr: Any, data: set[Any], *, divided: bool = False) -> bool:
    """Return True if the one output of ``jaxpr`` divides a sum by a number that does not depend on ``data``.

    ``data`` are the input variables that hold outputs and targets. Sums and constant multiples of such means are plain.
    ``divided``: the caller divides the output.
    """
    made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    depends = set(data)
    for equation in jaxpr.eqns:
        if any(_is_in(var, depends) for var in equation.invars):
            depends.update(equation.outvars)

    def is_mean(var: Any, *, divided: bool) -> bool:
        equation = made.get(var) if not hasattr(var, "val") else None
        if equation is None:
            return False
        name, inputs = equation.primitive.name, [each for each in equation.invars if _is_in(each, depends)]
        if name == "reduce_sum":
            return divided
        if name in ("add", "sub"):
            return all(is_mean(each, divided=divided) for each in inputs)
        if name in _KEEP or (name == "mul" and len(inputs) == 1):
            return is_mean(inputs[0], divided=divided or name == "mul")
        if name == "div":
            return inputs == [equation.invars[0]] and is_mean(inputs[0], divided=True)
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is None or len(equation.outvars) != 1:
            return False
        inner = getattr(inner, "jaxpr", inner)
        taken = {own for own, each in zip(inner.invars, equation.invars, strict=True) if _is_in(each, depends)}
        return is_plain_mean(inner, taken, divided=divided)

    return is_mean(jaxpr.outvars[0], divided=divided)


def _is_in(var: Any, variables: set[Any]) -> bool:
    return not hasattr(var, "val") and var in variables  # a literal has no hash


EXAMPLE_SAMPLES: Final = 8  # samples of an example that a model keeps, to measure its stages


class WrappedModel(Model):
    """A model whose stages compute with JAX."""

    traffic: JaxTraffic
    given: Sequence[tuple[int, ParameterLeaves]]  # of each function: its stage, and the leaves of its params

    def trees(self, values: Mapping[str, Array]) -> list[Any]:
        """Return the params, in the structure they were wrapped in, from arrays by name ``LAYER.NAME`` (local).

        Arrays are those of the host, not copies.
        """
        tied = {f"{stage.layer}.{name}": key for stage in self.stages for name, key in stage.tied.items()}
        keys = [[f"{layer}.{name}" for name in leaves.names] for layer, leaves in self.given]
        arrays = [[to_host(values[tied.get(key, key)]) for key in own] for own in keys]
        unflatten = library().tree_util.tree_unflatten
        return [unflatten(leaves.tree, own) for (_, leaves), own in zip(self.given, arrays, strict=True)]


def wrap(
    stages: Sequence[Callable[..., Any]],
    params: Sequence[Any],
    loss: Callable[[Any, Any], Any],
    *,
    example: tuple[Any, Any],
    tied: Mapping[str, str] | None = None,
    keep: str = "products",
    adapted: Adapted | None = None,
) -> WrappedModel:
    """Return a model of ``stages``, each a pure function (params, x) -> y of whole micro-batches.

    ``params`` has a pytree for each stage, or a function without arguments that makes it; its leaves are float32 or
    float64 arrays, and what the model is trained from. A stage without params goes with the one before (the first ones
    with the one behind). ``adapted(name, leaf)`` says of the leaf LAYER.NAME whether weight decay and layer-wise rates
    apply; by default to all of two dims and more. ``example`` is a batch (inputs, targets), arrays or
    `jax.ShapeDtypeStruct`, of any number of samples: the shapes and types of a sample count. ``loss(y, targets)``
    returns losses (samples, ...), whose mean over all is trained; a number, the mean over the samples it got, each of
    which counts alike; or (sum, weight), two numbers whose sums over the whole batch are divided.

    ``tied`` says which tensors are those of an earlier stage: {"3.head": "0.table"}, by ``LAYER.NAME``, the name being
    the path in the pytree with dots. ``keep`` is what lies in memory between forward and backward:
    "products" of matrices and convolutions, "everything" or "nothing".

    Raises UsageError and ConfigurationError for what cannot be trained, with the name of the tensor or the stage.
    """
    fail_alike(launched=True)
    if keep not in KEEPS:
        raise UsageError(f"keep = {keep!r}; choose one of {', '.join(KEEPS)}")
    if not stages or len(stages) != len(params):
        raise UsageError(f"got {len(stages)} stages and {len(params)} params; give a pytree for each stage")
    leaves = [ParameterLeaves.of(own, f"params of stage {number}") for number, own in enumerate(params)]
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
    model.traffic, model.given = shared.traffic, [(layer_of[number], own) for number, own in enumerate(leaves)]
    return model


def _stages(
    functions: Sequence[Callable[..., Any]],
    leaves: Sequence[ParameterLeaves],
    groups: Sequence[Sequence[int]],
    ties: Sequence[dict[str, str]],
    shared: SharedContext,
) -> list[JaxStage]:
    """Return a stage for each of ``groups``."""
    jax_stages: list[JaxStage] = []
    x: Sample = shared.example.shape[1:], jax_dtype(shared.example.dtype)
    for layer, group in enumerate(groups):
        own = _stage_leaves(leaves, group)
        chain = FunctionChain(
            tuple(StageFunction.of(functions[number], leaves[number].tree, f"stage {number}") for number in group)
        )
        jax_stages.append(JaxStage(layer, chain, own, ties[layer], x, shared))
        x = jax_stages[-1].output_shape(1)[1:], shared.computes
    return jax_stages


def _adapted(name: str, leaf: Any) -> bool:
    return len(leaf.shape) > 1


def _stage_leaves(leaves: Sequence[ParameterLeaves], group: Sequence[int]) -> ParameterLeaves:
    """Return the leaves of a stage: of its functions one has some."""
    return next(leaves[number] for number in group if leaves[number].names)


def _refuse_unused(stage: JaxStage, samples: int) -> None:
    unused = stage.unused(samples)
    if unused:
        raise ConfigurationError(
            f"tensor {stage.layer}.{unused[0]} has no gradient: what {stage} returns does not depend on it, or not "
            "differentiably; leave it out of the params, or let the function have it as a constant"
        )


def _example(given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a few inputs and targets of an example; zeros, where it has shapes and types alone."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise UsageError(f"the example is a {type(given).__name__}; give a pair (inputs, targets)")
    arrays: list[np.ndarray] = []
    for values, what in zip(given, ("inputs", "targets"), strict=True):
        is_shape = isinstance(values, library().ShapeDtypeStruct)
        array = np.zeros(values.shape, values.dtype) if is_shape else np.asarray(values)
        if not array.shape or not array.shape[0]:
            raise UsageError(f"the {what} of the example have shape {array.shape}; give one sample or more")
        arrays.append(array)
    inputs, targets = arrays
    if len(inputs) != len(targets):
        raise UsageError(f"the example has {len(inputs)} inputs and {len(targets)} targets; give as many of both")
    return inputs[:EXAMPLE_SAMPLES].copy(), targets[:EXAMPLE_SAMPLES].copy()
