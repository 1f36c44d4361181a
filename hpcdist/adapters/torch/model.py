"""PyTorch modules as hpcdist models: `wrap` creates a model, `load` copies trained values to the modules.

    model = wrap(nn.Sequential(embed, *blocks, head), loss=cross_entropy, example=x)

The modules' parameters and gradients are in the memory of the training run.
"""

import glob
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hpcdist.adapters.torch.arrays import as_computable, keep_freed_memory, library
from hpcdist.adapters.torch.cut import UncutError, cut_module
from hpcdist.adapters.torch.loss import TorchLoss
from hpcdist.adapters.torch.modules import (
    ParameterBinding,
    StageModules,
    check_modules,
    modules_of,
    plain_name,
    stages_of,
)
from hpcdist.adapters.torch.stage import TorchStage
from hpcdist.arrays import backend
from hpcdist.comm.start import fail_alike
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.model import Model

if TYPE_CHECKING:
    import torch

DEFAULTS: Final = "defaults"  # recipe key of a function that maps a model to default keys; explicit keys override them
KINDS: Final = ("AdamW", "Adam", "SGD", "RMSprop")
# Options without counterpart in a recipe, with the only accepted value.
REFUSED: Final = {"amsgrad": False, "maximize": False, "dampening": 0, "centered": False}
SAME_NAME: Final = ("betas", "eps", "momentum", "nesterov", "alpha")  # options that must be equal in all groups
Setting = tuple[float | None, float]  # (weight decay, or None for the default; factor of the learning rate)


class OptimizerKeys:
    """Recipe keys that reproduce a PyTorch ``optimizer``, and the current factor of its learning rates. Local."""

    def __init__(
        self, optimizer: "torch.optim.Optimizer", scheduler: "torch.optim.lr_scheduler.LRScheduler | None"
    ) -> None:
        self._optimizer, self._scheduler, self._kind = optimizer, scheduler, type(optimizer).__name__
        self._base: list[dict[str, Any]] = []  # options of each group in the recipe

    def __call__(self, model: Model) -> dict[str, Any]:
        """Return the recipe keys for ``model``. Raises ConfigurationError if tensors are missing or unknown."""
        # A scheduler may have changed ``lr`` already, for example at the start of a warm-up.
        groups = [group | {"lr": float(group.get("initial_lr", group["lr"]))} for group in self._optimizer.param_groups]
        self._base = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        return _keys(self._kind, groups, model)

    def advance(self, steps: int = 1) -> None:
        """Call the ``step`` method of the scheduler, if there is one, ``steps`` times."""
        self._note_step()
        if self._scheduler is not None:
            for _ in range(steps):
                self._scheduler.step()

    def rate_factor(self) -> float:
        """Return the factor by which a scheduler has changed the learning rates. Raises UsageError for other changes.

        All groups must have the same factor, because the recipe has one learning rate.
        """
        factors = set()
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            changed = [name for name in (*SAME_NAME, "weight_decay") if group.get(name) != base.get(name)]
            if changed:
                before, now = base.get(changed[0]), group.get(changed[0])
                raise UsageError(
                    f"{changed[0]} of the optimizer changed from {before} to {now}, but only lr may change during a "
                    "training; pass cycle_momentum=False to OneCycleLR and CyclicLR"
                )
            rate = float(group["lr"])
            if not 0 <= rate < math.inf or (rate and not base["lr"]):
                raise UsageError(
                    f"the optimizer has a group with lr = {rate}, which began with lr = {base['lr']}; a rate must be "
                    "finite and at least 0, and a rate of 0 cannot change"
                )
            factors |= {rate / base["lr"]} if base["lr"] else set()
        least, most = min(factors, default=1.0), max(factors, default=1.0)
        if not math.isclose(least, most, rel_tol=1e-9):
            raise UsageError(
                f"the learning rates of the optimizer's groups have changed by different factors, {least:g} to "
                f"{most:g}; use a scheduler that scales all groups alike"
            )
        return least

    def _note_step(self) -> None:
        # Schedulers warn if the step of the optimizer, which `Training.step` replaces, was not called before theirs.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]


def recipe_of(
    optimizer: "torch.optim.Optimizer", scheduler: "torch.optim.lr_scheduler.LRScheduler | None" = None
) -> dict[str, Any]:
    """Return a dict of recipe settings that reproduce the updates of the PyTorch ``optimizer``. Local.

    `Training.step` uses the current learning rates of the optimizer. After a step it calls ``scheduler.step()``, and
    after a resume once for each completed step. Raises ConfigurationError for unsupported optimizers or options.
    """
    # Adam and RMSprop must have no weight decay, and RMSprop no momentum. Groups may differ in rate and decay.
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if kind not in KINDS:
        raise ConfigurationError(
            f"hpcdist has no optimizer like {kind}; use AdamW or SGD, or set optimizer.name in the recipe to 'adamw', "
            "'sgd', 'lars', 'lamb' or 'muon'"
        )
    for group in groups:
        _check_group(kind, group, groups[0])
    if scheduler is not None and (
        scheduler.optimizer is not optimizer or isinstance(scheduler, library().optim.lr_scheduler.ReduceLROnPlateau)
    ):
        raise ConfigurationError(
            f"the {type(scheduler).__name__} given to recipe_of is a scheduler of another optimizer, or needs a loss; "
            "leave it out, and call its `step` in the script: `Training.step` uses the learning rates of the optimizer"
        )
    return {DEFAULTS: OptimizerKeys(optimizer, scheduler)}


def _check_group(kind: str, group: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    for name, only in REFUSED.items():
        if group.get(name, only) != only:
            raise ConfigurationError(f"{kind} with {name} = {group[name]} is not supported; use {name} = {only}")
    for name in SAME_NAME:
        if group.get(name) != first.get(name):
            raise ConfigurationError(
                f"{kind} has groups with {name} = {first[name]} and {group[name]}; a recipe has one {name} for all "
                "tensors: groups may differ only in lr and weight_decay"
            )
    if kind in ("Adam", "RMSprop") and group["weight_decay"]:
        raise ConfigurationError(
            f"{kind} with weight_decay = {group['weight_decay']} adds the decay to the gradient, which hpcdist does "
            "not support; use AdamW, or weight_decay = 0"
        )
    if kind == "RMSprop" and group["momentum"]:
        raise ConfigurationError(f"RMSprop with momentum = {group['momentum']} is not supported; use momentum = 0")


def _keys(kind: str, groups: Sequence[Mapping[str, Any]], model: Model) -> dict[str, Any]:
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
    settings: dict[str, Setting] = {}
    for key, group in group_of.items():
        usual = decay if adapted[key] else 0.0
        other = None if group["weight_decay"] == usual else float(group["weight_decay"])
        settings[key] = other, (float(group["lr"]) / rate if rate else 1.0)
    keys |= {"warmup_steps": 0, "decay": "constant", "clip_norm": 0.0, "groups": _written(settings)}
    return {f"optimizer.{name}": value for name, value in keys.items()}


def _assigned(groups: Sequence[Mapping[str, Any]], model: Model) -> dict[str, Mapping[str, Any]]:
    keys: dict[int, str] = {}
    for stage in model.stages:
        if not isinstance(stage, TorchStage):
            raise ConfigurationError(
                f"recipe_of is for modules wrapped by hpcdist.adapters.torch, but stage {stage.layer} is a "
                f"{type(stage).__name__}; set optimizer.name and the other optimizer keys in the recipe"
            )
        keys |= {id(parameter): f"{stage.layer}.{name}" for name, parameter in stage.modules.owned.items()}
    group_of: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        for parameter in filter(lambda one: one.requires_grad, group["params"]):
            if id(parameter) not in keys:
                raise ConfigurationError(
                    f"the optimizer has a tensor of shape {tuple(parameter.shape)} that is not a parameter of the "
                    "wrapped modules; create the optimizer from their parameters"
                )
            group_of[keys[id(parameter)]] = group
    missing = [key for key in keys.values() if key not in group_of]
    if missing:
        raise ConfigurationError(
            f"the optimizer lacks {len(missing)} of the {len(keys)} tensors of the model, such as "
            f"{', '.join(missing[:4])}, and hpcdist trains all of them; add these tensors to the optimizer, in a group "
            "with lr = 0 if they must not change"
        )
    return {segment.key: group_of[segment.key] for segment in model.layout.segments}


def _written(settings: Mapping[str, Setting]) -> list[str]:
    # Text of the recipe key ``optimizer.groups``. A setting is (weight decay, factor of the learning rate).
    by_end: dict[str, set[Setting]] = {}
    for key, setting in settings.items():
        by_end.setdefault(key.rpartition(".")[2], set()).add(setting)
    patterns: dict[Setting, dict[str, None]] = {}
    for key, setting in settings.items():
        end = key.rpartition(".")[2]
        # *.bias if all tensors with this last name have equal settings
        pattern = glob.escape(key) if len(by_end[end]) > 1 else "*." + glob.escape(end)
        patterns.setdefault(setting, {})[re.sub(r"\s", "?", pattern)] = None  # spaces separate names
    texts = []
    for (decay, factor), names in patterns.items():
        options = [] if decay is None else [f"weight_decay={decay!r}"]
        options += [] if factor == 1.0 else [f"rate_factor={factor!r}"]
        if options:
            texts.append(f"{' '.join(names)}: {' '.join(options)}")
    return texts


def load(module_or_stages: Any, parameters: Mapping[str, np.ndarray]) -> None:
    """Copy trained values into the PyTorch modules that were passed to `wrap`. Local.

    ``parameters``: {"LAYER.NAME": array}. Raises UsageError for missing or unknown tensors, or wrong shapes.
    """
    torch = library()
    reason = "the parameters belong to other modules"
    cure = "pass the module, or list of stages, that was passed to wrap"
    named = {
        plain_name(name): parameter
        for prefix, module in modules_of(module_or_stages)
        for name, parameter in module.named_parameters(prefix, remove_duplicate=False)
        if parameter.requires_grad
    }
    missing = {id(parameter): name for name, parameter in reversed(named.items())}
    for key, values in parameters.items():
        parameter = named.get(key.partition(".")[2])
        if parameter is None or missing.pop(id(parameter), None) is None:
            raise UsageError(f"the parameters contain the tensor {key}, which no module has; {cure}")
        if parameter.numel() and tuple(parameter.shape) != values.shape:
            raise UsageError(
                f"tensor {key} has shape {values.shape}, but the module expects {tuple(parameter.shape)}: {reason}; "
                f"{cure}"
            )
        parameter.data = torch.tensor(values, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = None
    if missing:
        raise UsageError(f"the parameters lack the tensor {next(iter(missing.values()))}: {reason}; {cure}")


Adapted = Callable[[str, "torch.nn.Parameter"], bool]


def wrap(
    module_or_stages: Any,
    loss: Callable[..., Any],
    *,
    # Input, or tuple (input, targets). Pipelines need it for the shapes between stages.
    example: Any = None,
    reduction: str = "mean",
    tokens_per_sample: int = 1,
    adapted: Adapted | None = None,  # has weight decay, layer-wise rates; None: with at least two dims
    cut: bool = False,
) -> Model:
    """Wrap PyTorch modules in a model that hpcdist can train, and return the model. Local.

    ``module_or_stages``: one module, which becomes one stage, or an ``nn.Sequential`` or list with a child per stage.
    ``loss(outputs, targets)``: returns (summed loss, number of counted targets), or a single number. ``reduction``:
    "mean" or "sum", the meaning of the single number. ``cut``: True to trace one module with ``example``, and to cut
    it at its children. Raises UsageError or ConfigurationError for unsupported modules.
    """
    # A stage passes a tensor, or tuples and dicts of tensors, in the parameters' dtype to the next stage. A tuple or
    # dict of inputs becomes the arguments of the first module. Tensors are named LAYER.NAME. Integer data becomes
    # int64. A step keeps the modules' modes, or uses training mode if no module is in training mode.
    fail_alike(launched=True)
    if tokens_per_sample < 1:
        raise UsageError(f"tokens_per_sample is {tokens_per_sample}; it must be at least 1")
    x, targets = example if isinstance(example, tuple) and len(example) == 2 else (example, None)
    inputs = None if example is None else _arrays(x)
    cuts, uncut = _cut(module_or_stages, inputs) if cut else (stages_of(module_or_stages), "")
    check_modules(cuts)
    binding = ParameterBinding(cuts)
    decide = _adapted if adapted is None else adapted
    stages: list[TorchStage] = []
    for layer, modules in enumerate(cuts):
        stages.append(TorchStage(layer, modules, binding, decide, stages[-1].leaving if stages else None))
    if binding.device.type == "cpu":
        keep_freed_memory()
    stages[0].uncut = uncut
    judge = TorchLoss(loss, reduction, tokens_per_sample, stages[-1].leaving)
    if inputs is not None:
        _trace(stages, inputs, binding)
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


def _cut(root: Any, inputs: Any) -> tuple[list[StageModules], str]:
    # Returns the stages of the module, and the reason why it is one stage, or "".
    if inputs is None or not isinstance(root, library().nn.Module):
        raise UsageError("cut=True needs one module, and example=x, the input with which the module is traced")
    whole = stages_of(root)
    check_modules(whole)
    first = next(iter(whole[0].owned.values()))
    try:
        pieces = cut_module(root, _computable(inputs, first.dtype, first.device))
    except UncutError as reason:
        return whole, f"wrap could not cut the module: {reason}"
    return stages_of(root, pieces), ""


def _computable(example: Any, dtype: "torch.dtype", device: "torch.device") -> Any:
    x = as_computable(example, dtype)
    return x.map(lambda one: one.to(device)) if isinstance(x, backend.ArrayGroup) else x.to(device)


def _adapted(name: str, parameter: "torch.nn.Parameter") -> bool:
    return parameter.dim() > 1


def _arrays(example: Any) -> Any:
    if isinstance(example, tuple | Mapping) and len(example):
        values = example.values() if isinstance(example, Mapping) else example
        arrays = dict(zip(example, map(_array, values), strict=True)) if isinstance(example, Mapping) else None
        return backend.as_array(arrays or tuple(map(_array, values)))
    return _array(example)


def _array(example: Any) -> np.ndarray:
    if isinstance(example, library().Tensor):
        example = example.detach().cpu().numpy()
    if not isinstance(example, np.ndarray) or example.ndim < 1 or not len(example):
        raise UsageError("the example must be a tensor or array of shape (samples, ...) with at least one sample")
    return example


def _trace(stages: list[TorchStage], example: Any, binding: ParameterBinding) -> None:
    modes = [{module: module.training for module in stage.modules.all_modules()} for stage in stages]

    def run(example: Any) -> None:
        x = _computable(example, binding.dtype, binding.device)
        for stage in stages:
            x = stage.trace(x)

    try:
        for stage in stages:
            stage.leaving.learns = True
        run(example)
        if any(stage.leaving.several for stage in stages):
            run(stages[0].example_input(len(example) + 1))  # shows which tensors all samples share
    finally:
        for stage, previous in zip(stages, modes, strict=True):
            stage.leaving.learns = False
            stage.modules.set_modes(previous)
