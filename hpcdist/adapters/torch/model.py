"""PyTorch modules under every strategy: `wrap` makes a model of them, `load` brings trained values back.

    model = wrap(nn.Sequential(embed, *blocks, head), loss=cross_entropy, example=x)

What is wrapped is a `hpcdist.models.model.Model`. Its parameters are the modules' own `torch.nn.Parameter` objects, in
the memory of the run: no value is copied on the way into a forward or out of it, and optimizer, exchange and
checkpoints work on the same bytes. A gradient is written to its place in one pass, once PyTorch has computed it, and
``parameter.grad`` is that place afterwards, whatever ``zero_grad(set_to_none=True)`` did before.
At the end of a training, `load` writes the parameters back into the user's modules. `recipe_of` translates an
optimizer of PyTorch to keys of a recipe, and refuses what no recipe can express.
"""

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.adapters.torch.arrays import as_computable, keep_freed_memory, library
from hpcdist.adapters.torch.loss import TorchLoss
from hpcdist.adapters.torch.modules import ParameterBinding, check_modules, stages_of
from hpcdist.adapters.torch.stage import TorchStage
from hpcdist.arrays import backend
from hpcdist.comm.start import fail_alike
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import Model

if TYPE_CHECKING:
    import torch

DEFAULTS: Final = "defaults"  # key of a function of the model that returns keys: those beside it take their place
KINDS: Final = ("AdamW", "Adam", "SGD", "RMSprop")
# Options that have no counterpart, and the one value that leaves them out.
REFUSED: Final = {"amsgrad": False, "maximize": False, "dampening": 0, "centered": False}
SAME_NAME: Final = ("betas", "eps", "momentum", "nesterov", "alpha")  # options that all groups have alike
Setting = tuple[float | None, float]  # weight decay, None for that of the section, and factor of the rate


def recipe_of(optimizer: "torch.optim.Optimizer") -> dict[str, Any]:
    """Return what makes `Training` take the updates of ``optimizer``, among the keys of its recipe (local).

    Known are AdamW, Adam without weight decay, SGD, and RMSprop without momentum and weight decay, which is adamw with
    beta1 = 0 and no bias correction. The rate is constant and the gradient is not clipped. Keys that stand beside it
    take precedence, before it or behind: ``{"optimizer.clip_norm": 1.0, **recipe_of(optimizer)}`` clips. Groups may
    have rates and weight decays of their own, and become ``optimizer.groups``. Raises ConfigurationError for another
    optimizer, and for an option that has no counterpart or differs between groups. `Training` raises it for an
    optimizer that lacks tensors of its model, or has others.
    """
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if kind not in KINDS:
        raise ConfigurationError(
            f"{kind} has no counterpart; use AdamW or SGD, or name one in the recipe: optimizer.name is 'adamw', "
            "'sgd', 'lars' or 'lamb'"
        )
    for group in groups:
        _check_group(kind, group, groups[0])
    return {DEFAULTS: partial(_keys, kind, groups)}


def _check_group(kind: str, group: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    for name, only in REFUSED.items():
        if group.get(name, only) != only:
            raise ConfigurationError(f"{kind} with {name} = {group[name]} has no counterpart; use {name} = {only}")
    for name in SAME_NAME:
        if group.get(name) != first.get(name):
            raise ConfigurationError(
                f"{kind} has groups with {name} = {first[name]} and {group[name]}; a recipe has one for all tensors: "
                "groups may differ in lr and weight_decay"
            )
    if kind in ("Adam", "RMSprop") and group["weight_decay"]:
        raise ConfigurationError(
            f"{kind} with weight_decay = {group['weight_decay']} adds it to the gradient; use AdamW, or no decay"
        )
    if kind == "RMSprop" and group["momentum"]:
        raise ConfigurationError(f"RMSprop with momentum = {group['momentum']} has no counterpart; use momentum = 0")


def _keys(kind: str, groups: Sequence[Mapping[str, Any]], model: Model) -> dict[str, Any]:
    """Return the keys under which ``model`` gets the same updates. Raises ConfigurationError; see `recipe_of`."""
    group_of = _assigned(groups, model)
    adapted = {segment.key: segment.spec.adapted for segment in model.layout.segments}
    first = groups[0]
    rate = next((float(group["lr"]) for group in groups if group["lr"]), 0.0)
    decay = next((float(group_of[key]["weight_decay"]) for key, decays in adapted.items() if decays), 0.0)
    keys: dict[str, Any] = {"learning_rate": rate, "weight_decay": decay}
    if kind == "SGD":
        keys |= {"name": "sgd", "momentum": float(first["momentum"]), "nesterov": bool(first["nesterov"])}
    elif kind == "RMSprop":
        keys |= {"name": "adamw", "beta1": 0.0, "beta2": float(first["alpha"]), "epsilon": float(first["eps"])}
        keys["bias_correction"] = False
    else:
        beta1, beta2 = (float(beta) for beta in first["betas"])
        keys |= {"name": "adamw", "beta1": beta1, "beta2": beta2, "epsilon": float(first["eps"])}
    own: dict[str, Setting] = {}
    for key, group in group_of.items():
        usual = decay if adapted[key] else 0.0
        other = None if group["weight_decay"] == usual else float(group["weight_decay"])
        own[key] = other, (float(group["lr"]) / rate if rate else 1.0)
    keys |= {"warmup_steps": 0, "decay": "constant", "clip_norm": 0.0, "groups": _written(own)}
    return {f"optimizer.{name}": value for name, value in keys.items()}


def _assigned(groups: Sequence[Mapping[str, Any]], model: Model) -> dict[str, Mapping[str, Any]]:
    """Return the group of each tensor of ``model`` by its name ``LAYER.NAME``."""
    keys: dict[int, str] = {}
    for stage in model.stages:
        if not isinstance(stage, TorchStage):
            raise ConfigurationError(
                f"recipe_of is for modules that hpcdist.adapters.torch wraps, and stage {stage.layer} is a "
                f"{type(stage).__name__}; name the optimizer in the recipe, as optimizer.name and its other keys"
            )
        keys |= {id(parameter): f"{stage.layer}.{name}" for name, parameter in stage.cut.own.items()}
    group_of: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in keys:
                raise ConfigurationError(
                    f"the optimizer has a tensor of shape {tuple(parameter.shape)} that is no parameter of the wrapped "
                    "modules; make it of their parameters"
                )
            group_of[keys[id(parameter)]] = group
    missing = [key for key in keys.values() if key not in group_of]
    if missing:
        raise ConfigurationError(
            f"the optimizer lacks {len(missing)} of the {len(keys)} tensors of the model, such as "
            f"{', '.join(missing[:4])}, and hpcdist trains all of them; add them to the optimizer: those of a group "
            "with lr = 0 stay as they are"
        )
    return {segment.key: group_of[segment.key] for segment in model.layout.segments}


def _written(own: Mapping[str, Setting]) -> list[str]:
    """Return ``optimizer.groups`` for tensors with ``own`` settings: ``*.bias`` where all of that name have the same.

    Names may have no spaces in a pattern: ``?`` takes their place.
    """
    by_end: dict[str, set[Setting]] = {}
    for key, setting in own.items():
        by_end.setdefault(key.rpartition(".")[2], set()).add(setting)
    patterns: dict[Setting, dict[str, None]] = {}
    for key, setting in own.items():
        end = key.rpartition(".")[2]
        pattern = glob.escape(key) if len(by_end[end]) > 1 else "*." + glob.escape(end)
        patterns.setdefault(setting, {})[re.sub(r"\s", "?", pattern)] = None
    texts = []
    for (decay, factor), names in patterns.items():
        options = [] if decay is None else [f"weight_decay={decay!r}"]
        options += [] if factor == 1.0 else [f"rate_factor={factor!r}"]
        if options:
            texts.append(f"{' '.join(names)}: {' '.join(options)}")
    return texts


def load(module_or_stages: Any, parameters: Mapping[str, np.ndarray]) -> None:
    """Write ``parameters``, by the names LAYER.NAME that `wrap` gave them, into the modules that were wrapped (local).

    The modules get memory of their own, so that they outlive the run: `state_dict` and forwards work as before it.
    Raises UsageError where a tensor is missing, left over or of another shape.
    """
    torch, left = library(), dict(parameters)
    other = "these are parameters of other modules"
    same = f"{other}; give the same module, or list of stages, that wrap was given"
    for layer, cut in enumerate(stages_of(module_or_stages)):
        for name, parameter in cut.own.items():
            values = left.pop(f"{layer}.{name}", None)
            if values is None:
                raise UsageError(f"there is no tensor {layer}.{name}: {same}")
            if parameter.numel() and tuple(parameter.shape) != values.shape:
                raise UsageError(
                    f"{layer}.{name} has the shape {values.shape}, the module's {tuple(parameter.shape)}: {other}"
                )
            parameter.data = torch.tensor(values, dtype=parameter.dtype, device=parameter.device)
            parameter.grad = None
    if left:
        raise UsageError(f"no module has {next(iter(left))}: {same}")


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
    - ``loss(outputs, targets)`` returns (sum, weight): the summed loss and the number of targets that count. A step
      reports, and follows the gradient of, the sum over the sum of weights of its whole batch. Or it returns one
      number, the ``reduction`` over the samples: "mean", if PyTorch's graph shows its weight, or "sum" (see `loss`).
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

    Raises UsageError or ConfigurationError for a module that cannot be trained, MissingCapabilityError without PyTorch.
    """
    fail_alike(launched=True)
    if tokens_per_sample < 1:
        raise UsageError(f"tokens_per_sample is {tokens_per_sample}; a sample has at least 1 prediction")
    cuts = stages_of(module_or_stages)
    check_modules(cuts)
    binding = ParameterBinding(cuts)
    decide = _adapted if adapted is None else adapted
    stages = [TorchStage(layer, cut, binding, decide) for layer, cut in enumerate(cuts)]
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
