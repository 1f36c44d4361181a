"""The ``[optimizer]`` section of a recipe. Imports only the errors and `reporting`."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Final, Literal, get_args

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import no_effect, rule
from hpcdist.reporting.schema import check_section, key

Name = Literal["adamw", "sgd", "lars", "lamb", "muon"]
Decay = Literal["cosine", "polynomial", "1-sqrt", "inverse_sqrt", "constant"]
Scaling = Literal["none", "linear", "sqrt"]
TRUST_RATIO: Final = ("trust_ratio_min", "trust_ratio_max")
# Options that only some optimizers read.
READ_BY: Final[dict[str, tuple[Name, ...]]] = {
    "bias_correction": ("adamw", "lamb", "muon"),
    "momentum_correction": ("lars",),
    **dict.fromkeys(TRUST_RATIO, ("lamb",)),
}


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Options for the tensors whose name ``LAYER.NAME`` matches one of ``patterns``."""

    patterns: tuple[str, ...]
    weight_decay: float | None = None  # replaces ``optimizer.weight_decay``, also for biases and norm scales
    rate_factor: float = 1.0  # multiplies the learning rate
    frozen: bool | None = None  # not trained; None: as by default
    muon: bool | None = None  # the optimizer muon orthogonalises the updates of these matrices; None: as by default

    @classmethod
    def of(cls, text: str) -> "ParameterGroup":
        """Parse a group such as "*.bias: weight_decay=0.0". Raises ConfigurationError if ``text`` is invalid."""
        names, _, options = text.rpartition(":")
        values: dict[str, float] = {}
        try:
            for option in options.split():
                name, _, value = option.partition("=")
                if name not in ("weight_decay", "rate_factor", "frozen", "muon") or name in values:
                    raise ValueError(name)
                values[name] = bool(("0", "1").index(value)) if name in ("frozen", "muon") else float(value)
        except ValueError:
            values = {}
        if not names.split() or not values or not all(math.isfinite(value) and value >= 0 for value in values.values()):
            raise ConfigurationError(
                f"optimizer.groups has the invalid group {text!r}; write patterns of tensor names, a colon and options "
                "that are at least 0, as in '*.bias *.norm.weight: weight_decay=0.0 rate_factor=2.0', or frozen=1 "
                "(muon=0 or muon=1 only with optimizer.name = 'muon')"
            )
        return cls(patterns=tuple(names.split()), **values)  # type: ignore[arg-type]

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
    """Recipe section ``[optimizer]``: name and constants of the optimizer, and learning rate schedule.

    For a global batch of k * ``base_batch`` samples, ``scaling`` "linear" multiplies the peak rate by k, and "sqrt"
    multiplies it by sqrt(k). `ParameterGroup.of` parses each text in ``groups``.
    """

    name: Name = key("adamw", "Optimizer.", choices=get_args(Name))
    learning_rate: float = key(3e-3, "Peak learning rate, for a batch of base_batch samples if scaling is used.", gt=0)
    momentum: float = key(0.9, "Momentum of sgd, lars and muon. For muon, 0.95 is usual.", ge=0, lt=1)
    nesterov: bool = key(False, "Use Nesterov momentum in sgd. muon always uses it.")
    beta1: float = key(0.9, "Decay rate of the mean gradient in adamw, lamb and muon.", ge=0, lt=1)
    beta2: float = key(0.95, "Decay rate of the mean squared gradient in adamw, lamb and muon.", ge=0, lt=1)
    epsilon: float = key(1e-8, "Constant added to the denominator of an update in adamw, lars, lamb and muon.", gt=0)
    bias_correction: bool = key(True, "Correct the bias of the moments, which start at zero.")
    weight_decay: float = key(0.1, "Weight decay of matrices. Biases and norm scales have none.", ge=0)
    trust_coefficient: float = key(0.001, "Trust coefficient of lars.", gt=0)
    trust_ratio_min: float = key(0.0, "Lower bound of the trust ratio. 0: no bound.", ge=0)
    trust_ratio_max: float = key(0.0, "Upper bound of the trust ratio. 0: no bound.", ge=0)
    momentum_correction: bool = key(True, "Rescale the velocity when the learning rate changes. false: as published.")
    normalize_gradient: bool = key(False, "Divide the gradient by its norm before the update (NVLAMB).")
    clip_norm: float = key(1.0, "Limit to which the gradient norm is clipped. 0: no clipping.", ge=0)
    base_batch: int = key(0, "Samples per step for which learning_rate was tuned. 0: the rate is not scaled.", ge=0)
    scaling: Scaling = key(
        "none",
        "Scaling of the rate from base_batch to run.global_batch. linear: sgd, lars; sqrt: adamw, lamb, muon.",
        choices=get_args(Scaling),
    )
    # An integer in a recipe; it is fractional if it is derived from warmup_samples.
    warmup_steps: float = key(50, "Number of updates in which the learning rate rises linearly.", ge=0)
    warmup_samples: int = key(0, "Length of the warm-up in samples; replaces warmup_steps. 0: not used.", ge=0)
    decay: Decay = key("cosine", "Shape of the learning rate decay after the warm-up.", choices=get_args(Decay))
    decay_steps: int = key(
        0, "Length of the decay, at the end of the run. Before it, the rate is constant. 0: all steps.", ge=0
    )
    final_fraction: float = key(0.1, "Learning rate at the last step, as a fraction of the peak.", ge=0, le=1)
    power: float = key(1.0, "Exponent of the polynomial decay.", gt=0)
    ema_decay: float = key(
        0.0, "Decay rate of the moving average of the parameters over the updates. 0: no average is kept.", ge=0, lt=1
    )
    groups: tuple[str, ...] = key(
        (), 'Options for some tensors, as ["*.bias: weight_decay=0.0", "0.*: frozen=1"]. The first match counts.'
    )

    def __post_init__(self) -> None:
        check_section(RULES, "optimizer", self)
        if self.name != "muon" and any(group.muon is not None for group in self.parsed_groups):
            raise ConfigurationError(
                f"optimizer.groups has the option muon, but optimizer.name = {self.name!r}; remove the option, or set "
                "optimizer.name = 'muon'"
            )

    @property
    def parsed_groups(self) -> tuple[ParameterGroup, ...]:
        """Parameter groups that the texts in ``groups`` describe, in the same order."""
        return tuple(map(ParameterGroup.of, self.groups))

    def freezes(self, name: str, default: bool) -> bool:
        """Return True if the tensor ``name`` is frozen. ``default``: the answer if no group says so."""
        group = next((group for group in self.parsed_groups if group.has(name)), None)
        return default if group is None or group.frozen is None else group.frozen


_BOTH: Final = "set both (scaling 'linear' for sgd and lars, 'sqrt' for adamw, lamb and muon), or 'none' and 0"
RULES: Final = (
    rule(
        "optimizer.nesterov with optimizer.name!=sgd",
        "Nesterov momentum is an option of sgd only (muon always uses it)",
    ),
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
    no_effect("optimizer.decay_steps", 0, "optimizer.decay", ("cosine", "polynomial", "1-sqrt")),
    rule("optimizer.scaling with optimizer.base_batch=0", "scaling needs the batch size of the learning rate", _BOTH),
    rule("optimizer.base_batch with optimizer.scaling=none", "base_batch is used for scaling only", _BOTH),
    rule(
        f"optimizer.warmup_samples with optimizer.warmup_steps!=0|{OptimizerConfig.warmup_steps}",
        "only one option may set the length of the warm-up",
        "remove one of them",
    ),
)
