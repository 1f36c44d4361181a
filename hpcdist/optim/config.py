"""The ``[optimizer]`` section of a recipe.

Light: imports nothing but the errors, so that a login node can read recipes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Final, Literal, get_args

from hpcdist.errors import ConfigurationError

Name = Literal["adamw", "sgd", "lars", "lamb"]
Decay = Literal["cosine", "polynomial", "constant"]
Scaling = Literal["none", "linear", "sqrt"]
TRUST_RATIO: Final = ("trust_ratio_min", "trust_ratio_max")
# Options of single optimizers, and the optimizers that read them.
OF: Final[dict[str, tuple[Name, ...]]] = {
    "bias_correction": ("adamw", "lamb"),
    "momentum_correction": ("lars",),
    **dict.fromkeys(TRUST_RATIO, ("lamb",)),
}


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Tensors with options of their own: those whose names ``LAYER.NAME`` match one of ``patterns``.

    ``weight_decay`` takes the place of that of the section, for biases and norm scales too; None: as without a group.
    ``rate_factor`` multiplies the learning rate.
    """

    patterns: tuple[str, ...]
    weight_decay: float | None = None
    rate_factor: float = 1.0

    @classmethod
    def of(cls, text: str) -> "ParameterGroup":
        """Return the group that ``text`` describes: patterns, a colon, and options ``name=value``."""
        names, _, options = text.rpartition(":")
        values: dict[str, float] = {}
        try:
            for option in options.split():
                name, _, value = option.partition("=")
                if name not in ("weight_decay", "rate_factor") or name in values:
                    raise ValueError(name)
                values[name] = float(value)
        except ValueError:
            values = {}
        if not names.split() or not values or not all(math.isfinite(value) and value >= 0 for value in values.values()):
            raise ConfigurationError(
                f"optimizer.groups has {text!r}; write patterns of names LAYER.NAME, a colon, and weight_decay=NUMBER, "
                "rate_factor=NUMBER or both, of at least 0, such as '*.bias *.norm.weight: weight_decay=0.0'"
            )
        return cls(patterns=tuple(names.split()), **values)

    def has(self, name: str) -> bool:
        """Whether the tensor ``name`` belongs to it."""
        return name in self._names or any(fnmatchcase(name, pattern) for pattern in self._wildcards)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.patterns)

    @cached_property
    def _wildcards(self) -> tuple[str, ...]:
        return tuple(pattern for pattern in self.patterns if set(pattern) & set("*?["))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Section ``[optimizer]``: the optimizer, its constants, and the schedule of its learning rate.

    ``momentum`` belongs to sgd and lars, ``nesterov`` to sgd, ``momentum_correction`` and ``trust_coefficient`` to
    lars; ``beta1``, ``beta2`` and ``bias_correction`` to adamw and lamb; ``trust_ratio_min`` and ``trust_ratio_max``
    (0: no bound) to lamb; ``epsilon`` to all but sgd. ``weight_decay`` touches matrices only, never biases and norm
    scales. ``groups`` give tensors options of their own: each is a text of patterns of names ``LAYER.NAME``, a colon,
    and ``weight_decay=``, which then touches all that match, ``rate_factor=``, or both; the first that matches a tensor
    counts. The gradient is first divided by its norm, with ``normalize_gradient``; ``clip_norm`` bounds the norm that
    it has then (0 is off).

    The rate rises linearly over ``warmup_steps`` updates, or over the updates that take ``warmup_samples`` samples, to
    its peak, then falls to ``final_fraction`` of it at the last step of the run; ``power`` shapes the polynomial. The
    peak is ``learning_rate``; where ``scaling`` is linear or sqrt, ``learning_rate`` is that of a global batch of
    ``base_batch`` samples, and one of k times as many has the peak k or sqrt(k) times as high (see
    `hpcdist.optim.rates`). An update takes one global batch of the recipe, so the schedule is the same for every
    world size.
    """

    name: Name = "adamw"
    learning_rate: float = 3e-3
    momentum: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    bias_correction: bool = True
    weight_decay: float = 0.1
    trust_coefficient: float = 0.001
    trust_ratio_min: float = 0.0
    trust_ratio_max: float = 0.0
    momentum_correction: bool = True
    normalize_gradient: bool = False
    clip_norm: float = 1.0
    base_batch: int = 0
    scaling: Scaling = "none"
    warmup_steps: float = 50  # a whole number in a recipe; that of so many samples need not be one
    warmup_samples: int = 0
    decay: Decay = "cosine"
    final_fraction: float = 0.1
    power: float = 1.0
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("name", self.name, get_args(Name))
        _one_of("decay", self.decay, get_args(Decay))
        _one_of("scaling", self.scaling, get_args(Scaling))
        for key in ("learning_rate", "epsilon", "trust_coefficient", "power"):
            _check(key, getattr(self, key), lambda value: value > 0, "above 0")
        for key in ("momentum", "beta1", "beta2"):
            _check(key, getattr(self, key), lambda value: 0 <= value < 1, "at least 0 and below 1")
        for key in ("weight_decay", "clip_norm", "warmup_steps", "warmup_samples", "base_batch", *TRUST_RATIO):
            _check(key, getattr(self, key), lambda value: value >= 0, "at least 0")
        _check("final_fraction", self.final_fraction, lambda value: 0 <= value <= 1, "between 0 and 1")
        if self.nesterov and (self.name != "sgd" or self.momentum == 0):
            raise ConfigurationError(
                f"optimizer.nesterov = true with optimizer.name = {self.name!r} and momentum {self.momentum}: "
                "it is defined for sgd with a momentum above 0; set nesterov = false or change the others"
            )
        for key, names in OF.items():
            default = getattr(type(self), key)
            if (given := getattr(self, key)) != default and self.name not in names:
                raise ConfigurationError(
                    f"optimizer.{key} = {_written(given)} has no effect with optimizer.name = {self.name!r}; set it to "
                    f"{_written(default)}, or choose {' or '.join(names)}"
                )
        if 0 < self.trust_ratio_max <= self.trust_ratio_min:
            raise ConfigurationError(
                f"optimizer.trust_ratio_max = {self.trust_ratio_max} is not above optimizer.trust_ratio_min = "
                f"{self.trust_ratio_min}; lower the second, or set the first to 0 for no upper bound"
            )
        _ = self.parsed_groups  # or it raises
        self._check_batch()

    @property
    def parsed_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups, in their order."""
        return tuple(map(ParameterGroup.of, self.groups))

    def _check_batch(self) -> None:
        if (self.scaling == "none") != (self.base_batch == 0):
            raise ConfigurationError(
                f"optimizer.scaling = {self.scaling!r} with optimizer.base_batch = {self.base_batch}: a rate is scaled "
                "from a batch, by a rule; give both (sgd and lars: 'linear'; adamw and lamb: 'sqrt'), or 'none' and 0"
            )
        if self.warmup_samples and self.warmup_steps not in (0, type(self).warmup_steps):
            raise ConfigurationError(
                f"optimizer.warmup_samples = {self.warmup_samples} with optimizer.warmup_steps = {self.warmup_steps}: "
                "there is one warm-up; remove one of them"
            )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _one_of(key: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise ConfigurationError(f"optimizer.{key} = {got!r}; choose one of {', '.join(choices)}")


def _check(key: str, value: float, holds: Callable[[float], bool], expected: str) -> None:
    if not (math.isfinite(value) and holds(value)):
        raise ConfigurationError(f"optimizer.{key} = {value}; it must be finite and {expected}")
