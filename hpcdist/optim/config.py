"""The optimizer section of a recipe. Light: imports nothing but the errors, so that a login node can read recipes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from hpcdist.errors import ConfigurationError

Name = Literal["adamw", "sgd", "lars", "lamb"]
Decay = Literal["cosine", "polynomial", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, its constants, and the schedule of its learning rate.

    ``momentum`` belongs to sgd and lars, ``nesterov`` to sgd; ``beta1``, ``beta2`` to adamw and lamb;
    ``trust_coefficient`` to lars; ``epsilon`` to all but sgd. ``weight_decay`` touches matrices only, never biases and
    norm scales. ``clip_norm`` bounds the norm of the whole gradient (0 is off).

    The rate rises linearly over ``warmup_steps`` updates to ``learning_rate``, then falls to ``final_fraction`` of it
    at the last step of the run; ``power`` shapes the polynomial. An update takes one global batch of the recipe, so the
    schedule is the same for every world size. When the global batch grows by k, a usual first guess is a rate k times
    as large for sgd and lars, sqrt(k) times for adamw and lamb.
    """

    name: Name = "adamw"
    learning_rate: float = 3e-3
    momentum: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    trust_coefficient: float = 0.001
    clip_norm: float = 1.0
    warmup_steps: int = 50
    decay: Decay = "cosine"
    final_fraction: float = 0.1
    power: float = 1.0

    def __post_init__(self) -> None:
        _one_of("name", self.name, get_args(Name))
        _one_of("decay", self.decay, get_args(Decay))
        for key in ("learning_rate", "epsilon", "trust_coefficient", "power"):
            _check(key, getattr(self, key), lambda value: value > 0, "above 0")
        for key in ("momentum", "beta1", "beta2"):
            _check(key, getattr(self, key), lambda value: 0 <= value < 1, "at least 0 and below 1")
        for key in ("weight_decay", "clip_norm", "warmup_steps"):
            _check(key, getattr(self, key), lambda value: value >= 0, "at least 0")
        _check("final_fraction", self.final_fraction, lambda value: 0 <= value <= 1, "between 0 and 1")
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise ConfigurationError(
                f"optimizer.nesterov = true with optimizer.name = {self.name!r} and momentum {self.momentum}: "
                "it is defined for sgd with a momentum above 0; set nesterov = false or change the others"
            )


def _one_of(key: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise ConfigurationError(f"optimizer.{key} = {got!r}; choose one of {', '.join(choices)}")


def _check(key: str, value: float, holds: Callable[[float], bool], expected: str) -> None:
    if not (math.isfinite(value) and holds(value)):
        raise ConfigurationError(f"optimizer.{key} = {value}; it must be finite and {expected}")
