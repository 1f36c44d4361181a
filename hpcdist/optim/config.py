"""The ``[optimizer]`` section of a recipe. Imports only the errors and `reporting`."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Final, Literal, get_args

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import check_section, finite, no_effect, one_of, rule

Name = Literal["adamw", "sgd", "lars", "lamb"]
Decay = Literal["cosine", "polynomial", "constant"]
Scaling = Literal["none", "linear", "sqrt"]
TRUST_RATIO: Final = ("trust_ratio_min", "trust_ratio_max")
# Options that only some optimizers read.
READ_BY: Final[dict[str, tuple[Name, ...]]] = {
    "bias_correction": ("adamw", "lamb"),
    "momentum_correction": ("lars",),
    **dict.fromkeys(TRUST_RATIO, ("lamb",)),
}


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Options for the tensors whose names ``LAYER.NAME`` match one of ``patterns``.

    ``weight_decay`` replaces ``optimizer.weight_decay``, also for biases and norm scales; None: no replacement.
    ``rate_factor`` multiplies the learning rate.
    """

    patterns: tuple[str, ...]
    weight_decay: float | None = None
    rate_factor: float = 1.0

    @classmethod
    def of(cls, text: str) -> "ParameterGroup":
        """Parse a parameter group: patterns of tensor names, a colon, and options ``name=value``.

        Raises ConfigurationError if ``text`` is invalid.
        """
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
                f"optimizer.groups has the invalid group {text!r}; write patterns of LAYER.NAME, a colon and options: "
                "'*.bias *.norm.weight: weight_decay=0.0'; weight_decay and rate_factor must be at least 0"
            )
        return cls(patterns=tuple(names.split()), **values)

    def has(self, name: str) -> bool:
        """Return True if the tensor ``name`` matches a pattern of the group."""
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

    Args:
        learning_rate: Peak learning rate. With ``scaling``, the peak for a global batch of ``base_batch`` samples.
        scaling: "linear" multiplies the peak by k for a global batch of k * ``base_batch`` samples, "sqrt" by sqrt(k).
        warmup_steps: Number of updates in which the rate rises linearly to the peak; or set ``warmup_samples``.
        decay: Shape of the decay to ``final_fraction`` of the peak at the last step; ``power`` is for "polynomial".
        momentum: For sgd and lars. ``nesterov`` is for sgd, ``momentum_correction`` and ``trust_coefficient`` for lars.
        beta1: For adamw and lamb, like ``beta2`` and ``bias_correction``.
        weight_decay: For matrices only.
        trust_ratio_min: Lower bound of lamb's trust ratio. ``trust_ratio_max``: upper bound. 0: no bound.
        groups: Name patterns ``LAYER.NAME``, a colon, and ``weight_decay=``, ``rate_factor=`` or both. The first match
            counts.
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
    warmup_steps: float = 50  # integer in a recipe; fractional if derived from warmup_samples
    warmup_samples: int = 0
    decay: Decay = "cosine"
    final_fraction: float = 0.1
    power: float = 1.0
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_section(RULES, "optimizer", self)
        _ = self.parsed_groups  # raises for an invalid group

    @property
    def parsed_groups(self) -> tuple[ParameterGroup, ...]:
        """Parameter groups, parsed from the texts in ``groups``, in the same order."""
        return tuple(map(ParameterGroup.of, self.groups))


_PEAKS: Final = ("learning_rate", "epsilon", "trust_coefficient", "power")
_SHARES: Final = ("momentum", "beta1", "beta2")
_NOT_NEGATIVE: Final = ("weight_decay", "clip_norm", "warmup_steps", "warmup_samples", "base_batch", *TRUST_RATIO)
_BOTH: Final = "set both (scaling 'linear' for sgd and lars, 'sqrt' for adamw and lamb), or 'none' and 0"
RULES: Final = (
    one_of("optimizer.name", get_args(Name)),
    one_of("optimizer.decay", get_args(Decay)),
    one_of("optimizer.scaling", get_args(Scaling)),
    *(finite(f"optimizer.{name}", lambda value: value > 0, "above 0") for name in _PEAKS),
    *(finite(f"optimizer.{name}", lambda value: 0 <= value < 1, "at least 0 and below 1") for name in _SHARES),
    *(finite(f"optimizer.{name}", lambda value: value >= 0, "at least 0") for name in _NOT_NEGATIVE),
    finite("optimizer.final_fraction", lambda value: 0 <= value <= 1, "between 0 and 1"),
    rule("optimizer.nesterov with optimizer.name!=sgd", "Nesterov momentum is defined for sgd only"),
    rule("optimizer.nesterov with optimizer.momentum=0", "Nesterov momentum needs a momentum above 0"),
    *(
        no_effect(f"optimizer.{name}", getattr(OptimizerConfig, name), "optimizer.name", names)
        for name, names in READ_BY.items()
    ),
    rule(
        "optimizer.trust_ratio_max with optimizer.trust_ratio_min?",
        "the upper bound must be above the lower bound",
        "lower trust_ratio_min, or set trust_ratio_max to 0 for no upper bound",
        relation=lambda most, least: most <= least,
    ),
    rule("optimizer.scaling with optimizer.base_batch=0", "scaling needs the batch size of the learning rate", _BOTH),
    rule("optimizer.base_batch with optimizer.scaling=none", "base_batch is used for scaling only", _BOTH),
    rule(
        f"optimizer.warmup_samples with optimizer.warmup_steps!=0|{OptimizerConfig.warmup_steps}",
        "only one option may set the length of the warm-up",
        "remove one of them",
    ),
)
