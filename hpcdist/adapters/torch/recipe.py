"""Translation of an optimizer of PyTorch to keys of a recipe; refuses what no recipe can express."""

import glob
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hpcdist.adapters.torch.stage import TorchStage
from hpcdist.errors import ConfigurationError
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
    win, before it or behind: ``{"optimizer.clip_norm": 1.0, **recipe_of(optimizer)}`` clips. Groups may have rates and
    weight decays of their own, and become ``optimizer.groups``. Raises ConfigurationError for another optimizer, and
    for an option that has no counterpart or differs between groups. `Training` raises it for an optimizer that lacks
    tensors of its model, or has others.
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
    found: dict[str, Mapping[str, Any]] = {}
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in keys:
                raise ConfigurationError(
                    f"the optimizer has a tensor of shape {tuple(parameter.shape)} that is no parameter of the wrapped "
                    "modules; make it of their parameters"
                )
            found[keys[id(parameter)]] = group
    missing = [key for key in keys.values() if key not in found]
    if missing:
        raise ConfigurationError(
            f"the optimizer lacks {len(missing)} of the {len(keys)} tensors of the model, such as "
            f"{', '.join(missing[:4])}, and hpcdist trains all of them; add them to the optimizer: those of a group "
            "with lr = 0 stay as they are"
        )
    return {segment.key: found[segment.key] for segment in model.layout.segments}


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
