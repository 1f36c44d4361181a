"""What an optimizer of PyTorch says, as keys of a recipe."""

from typing import TYPE_CHECKING, Any, Final

from hpcdist.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

# Options that have no counterpart, and the one value that leaves them out.
REFUSED: Final = {"amsgrad": False, "maximize": False, "dampening": 0}


def recipe_of(optimizer: "torch.optim.Optimizer") -> dict[str, Any]:
    """Return the ``optimizer.*`` keys under which hpcdist makes the same updates (local).

    Known are AdamW, Adam without weight decay, and SGD. The rate is constant and the gradient is not clipped: add
    ``optimizer.decay``, ``optimizer.warmup_steps`` or ``optimizer.clip_norm`` to the keys where it should be otherwise.
    hpcdist decays tensors of two or more dims only, and trains all parameters of what is wrapped, whichever of them the
    optimizer holds. Raises ConfigurationError for another optimizer, an option that has
    no counterpart, groups with different options, or weight decay of a tensor of one dim.
    """
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if kind not in ("AdamW", "Adam", "SGD"):
        raise ConfigurationError(
            f"{kind} has no counterpart; use AdamW or SGD, or name one in the recipe: optimizer.name is 'adamw', "
            "'sgd', 'lars' or 'lamb'"
        )
    decays = {float(group["weight_decay"]) for group in groups if any(p.dim() > 1 for p in group["params"])}
    for group in groups:
        _check_group(kind, group, groups[0])
    if len(decays) > 1:
        raise ConfigurationError(
            f"weight decays {sorted(decays)} for tensors of two or more dims; a recipe has one, optimizer.weight_decay"
        )
    first, decay = groups[0], decays.pop() if decays else 0.0
    if kind == "Adam" and decay:
        raise ConfigurationError(f"Adam with weight_decay = {decay} adds it to the gradient; use AdamW, or no decay")
    keys: dict[str, Any] = {"learning_rate": float(first["lr"]), "weight_decay": decay}
    if kind == "SGD":
        keys |= {"name": "sgd", "momentum": float(first["momentum"]), "nesterov": bool(first["nesterov"])}
    else:
        beta1, beta2 = (float(beta) for beta in first["betas"])
        keys |= {"name": "adamw", "beta1": beta1, "beta2": beta2, "epsilon": float(first["eps"])}
    keys |= {"warmup_steps": 0, "decay": "constant", "clip_norm": 0.0}
    return {f"optimizer.{name}": value for name, value in keys.items()}


def _check_group(kind: str, group: dict[str, Any], first: dict[str, Any]) -> None:
    for name, only in REFUSED.items():
        if group.get(name, only) != only:
            raise ConfigurationError(f"{kind} with {name} = {group[name]} has no counterpart; use {name} = {only}")
    for name in ("lr", "betas", "eps", "momentum", "nesterov"):
        if group.get(name) != first.get(name):
            raise ConfigurationError(
                f"{kind} has groups with {name} = {first[name]} and {group[name]}; a recipe has one for all tensors"
            )
    short = sum(p.dim() < 2 for p in group["params"])
    if group["weight_decay"] and short:
        raise ConfigurationError(
            f"{kind} decays {short} tensors of one dim (biases, norm scales) by {group['weight_decay']}; hpcdist "
            "decays those of two or more dims only: put the others into a group with weight_decay = 0"
        )
