"""The ``[optimizer]`` section of a recipe.

Light: imports nothing but the errors and `reporting`, so that a login node can read recipes.
"""

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
# Options of single optimizers, and the optimizers that read them.
READ_BY: Final[dict[str, tuple[Name, ...]]] = {
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
        check_section(RULES, "optimizer", self)
        _ = self.parsed_groups  # or it raises

    @property
    def parsed_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups, in their order."""
        return tuple(map(ParameterGroup.of, self.groups))


_PEAKS: Final = ("learning_rate", "epsilon", "trust_coefficient", "power")
_SHARES: Final = ("momentum", "beta1", "beta2")
_NOT_NEGATIVE: Final = ("weight_decay", "clip_norm", "warmup_steps", "warmup_samples", "base_batch", *TRUST_RATIO)
_BOTH: Final = "give both (sgd and lars: 'linear'; adamw and lamb: 'sqrt'), or 'none' and 0"
RULES: Final = (
    one_of("optimizer.name", get_args(Name)),
    one_of("optimizer.decay", get_args(Decay)),
    one_of("optimizer.scaling", get_args(Scaling)),
    *(finite(f"optimizer.{name}", lambda value: value > 0, "above 0") for name in _PEAKS),
    *(finite(f"optimizer.{name}", lambda value: 0 <= value < 1, "at least 0 and below 1") for name in _SHARES),
    *(finite(f"optimizer.{name}", lambda value: value >= 0, "at least 0") for name in _NOT_NEGATIVE),
    finite("optimizer.final_fraction", lambda value: 0 <= value <= 1, "between 0 and 1"),
    rule("optimizer.nesterov with optimizer.name!=sgd", "it is defined for sgd"),
    rule("optimizer.nesterov with optimizer.momentum=0", "it is defined for a momentum above 0"),
    *(
        no_effect(f"optimizer.{name}", getattr(OptimizerConfig, name), "optimizer.name", names)
        for name, names in READ_BY.items()
    ),
    rule(
        "optimizer.trust_ratio_max with optimizer.trust_ratio_min?",
        "it is not above that",
        "lower the second, or set the first to 0 for no upper bound",
        relation=lambda most, least: most <= least,
    ),
    rule("optimizer.scaling with optimizer.base_batch=0", "a rate is scaled from a batch, by a rule", _BOTH),
    rule("optimizer.base_batch with optimizer.scaling=none", "a rate is scaled from a batch, by a rule", _BOTH),
    rule(
        f"optimizer.warmup_samples with optimizer.warmup_steps!=0|{OptimizerConfig.warmup_steps}",
        "there is one warm-up",
        "remove one of them",
    ),
)
