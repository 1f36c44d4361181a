"""PyTorch modules under every strategy: `wrap` makes a model of them, `load` brings trained values back.

    model = wrap(nn.Sequential(embed, *blocks, head), loss=cross_entropy, example=x)

What is wrapped is a `hpcdist.models.model.Model`. Its parameters are the modules' own `torch.nn.Parameter` objects, in
the memory of the run: no value is copied on the way into a forward or out of it, and optimizer, exchange and
checkpoints work on the same bytes. A gradient is written to its place in one pass, once PyTorch has computed it, and
``parameter.grad`` is that place afterwards, whatever ``zero_grad(set_to_none=True)`` did before.
At the end of a training, `load` writes the parameters back into the user's modules.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcdist.adapters.torch.arrays import as_computable, keep_freed_memory, library
from hpcdist.adapters.torch.modules import ParameterBinding, check_modules, stages_of
from hpcdist.adapters.torch.stage import TorchLoss, TorchStage
from hpcdist.arrays import backend
from hpcdist.errors import UsageError
from hpcdist.models.model import Model

if TYPE_CHECKING:
    import torch


def load(module_or_stages: Any, parameters: Mapping[str, np.ndarray]) -> None:
    """Write ``parameters``, by the names LAYER.NAME that `wrap` gave them, into the modules that were wrapped (local).

    The modules get memory of their own, so that they outlive the run: `state_dict` and forwards work as before it.
    Raises UsageError where a tensor is missing, left over or of another shape.
    """
    torch, left = library(), dict(parameters)
    for layer, cut in enumerate(stages_of(module_or_stages)):
        for name, parameter in cut.own.items():
            values = left.pop(f"{layer}.{name}", None)
            if values is None:
                raise UsageError(
                    f"there is no tensor {layer}.{name}: these are parameters of other modules; give the same module, "
                    "or list of stages, that wrap was given"
                )
            if parameter.numel() and tuple(parameter.shape) != values.shape:
                raise UsageError(
                    f"{layer}.{name} has the shape {values.shape}, the module's {tuple(parameter.shape)}: these are "
                    "parameters of other modules"
                )
            parameter.data = torch.tensor(values, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None
    if left:
        raise UsageError(
            f"no module has {next(iter(left))}: these are parameters of other modules; give the same module, or list "
            "of stages, that wrap was given"
        )


Adapted = Callable[[str, "torch.nn.Parameter"], bool]


def wrap(
    module_or_stages: Any,
    loss: Callable[..., Any],
    *,
    example: Any = None,
    reduction: str = "mean",
    tokens_per_sample: int = 1,
    adapted: Adapted | None = None,
) -> Model:
    """Return ``module_or_stages`` as a model that any strategy trains. Local.

    - The children of an ``nn.Sequential``, or the modules of a list, are the stages: each takes one tensor (samples,
      ...) and returns one of the parameters' type, and the pipeline cuts, and ZeRO-3 gathers, between them. Another
      module is one stage. A module without a parameter of its own belongs to the stage before. The same
      `torch.nn.Parameter` may be in several stages.
    - ``loss(outputs, targets)`` gives one number: their ``reduction`` over the samples that it is given, "mean" or
      "sum", with ``tokens_per_sample`` predictions a sample. A step reports, and follows the gradient of, the mean over
      the predictions of its whole batch.
    - ``example``, an input (samples, ...) as tensor or array, tells the shapes between stages, which a pipeline has to
      know. As a tuple of two, input and targets, it also lets ``parallel.partition = "measured"`` run the loss; without
      those it gives the loss zeros, integers in the shape of the last output but for its last dim.
    - A tuple or dict of inputs, as tokens and their mask, are arguments of the first module (as an example of two:
      ``((tokens, mask), None)``), and part of what it returns where later stages need them; the loss gets all targets.
    - ``adapted(name, parameter)`` says whether weight decay and layer-wise rates apply; by default to all of two dims
      and more.

    Initial values are those of the modules. Tensors are named LAYER.NAME, with the name that the module gives it; that
    of a list, as of an `nn.ModuleList`, begins with the module's place in it. Integer inputs and targets become int64,
    real ones the type of the parameters. Buffers are constants: a forward that changes one is refused, and so are norms
    with running statistics. In a step each module, nested ones included, is in the mode that it had when it was wrapped
    (all are in training mode where none was), in an evaluation none trains; what they draw from PyTorch's generators in
    a step follows from the run's seed, the step, the layer and the first sample of the micro-batch. On the host the
    process keeps memory that a step has given back, see `hpcdist.adapters.torch.arrays.keep_freed_memory`.

    Raises UsageError and ConfigurationError with the name of the module or parameter that cannot be trained, and
    MissingCapabilityError without PyTorch.
    """
    if tokens_per_sample < 1:
        raise UsageError(f"tokens_per_sample is {tokens_per_sample}; a sample has at least 1 prediction")
    found = stages_of(module_or_stages)
    check_modules(found)
    binding = ParameterBinding(found)
    decide = _adapted if adapted is None else adapted
    stages = [TorchStage(layer, cut, binding, decide) for layer, cut in enumerate(found)]
    if binding.device.type == "cpu":
        keep_freed_memory()
    judge = TorchLoss(loss, reduction, tokens_per_sample)
    if example is not None:
        x, targets = example if isinstance(example, tuple) and len(example) == 2 else (example, None)
        _trace(stages, _arrays(x), binding)
        if targets is not None:
            judge.take_example(_arrays(targets))
    return Model(
        stages,
        str(binding.dtype).removeprefix("torch."),
        tokens_per_sample=tokens_per_sample,
        loss=judge,
        seeded=False,
        on="gpu" if binding.device.type == "cuda" else "cpu",
    )


def _adapted(name: str, parameter: "torch.nn.Parameter") -> bool:
    return parameter.dim() > 1


def _arrays(example: Any) -> Any:
    """Return an array, or the several of a tuple or a dict."""
    if isinstance(example, tuple | Mapping) and len(example):
        values = example.values() if isinstance(example, Mapping) else example
        arrays = dict(zip(example, map(_array, values), strict=True)) if isinstance(example, Mapping) else None
        return backend.as_array(arrays or tuple(map(_array, values)))
    return _array(example)


def _array(example: Any) -> np.ndarray:
    if isinstance(example, library().Tensor):
        example = example.detach().cpu().numpy()
    if not isinstance(example, np.ndarray) or example.ndim < 1 or not len(example):
        raise UsageError("the example is not a tensor or array of at least one sample (samples, ...)")
    return example


def _trace(stages: list[TorchStage], example: Any, binding: ParameterBinding) -> None:
    """Run all stages on ``example``, without a graph, and leave the modules in the mode that they were in."""
    modes = [{module: module.training for module in stage.cut.every()} for stage in stages]
    x = as_computable(example, binding.dtype)
    x = x.map(lambda one: one.to(binding.device)) if isinstance(x, backend.ArrayGroup) else x.to(binding.device)
    try:
        for stage in stages:
            x = stage.trace(x)
    finally:
        for stage, own in zip(stages, modes, strict=True):
            stage.cut.set_modes(own)
