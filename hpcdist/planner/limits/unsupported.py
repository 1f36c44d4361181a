"""Possible layouts that this version of hpcdist cannot run, by the rules of recipes."""

from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

from hpcdist.optim.config import OptimizerConfig
from hpcdist.planner.layout import ParallelLayout
from hpcdist.reporting.rules import Rule, section_values
from hpcdist.strategies import rules
from hpcdist.strategies.compressed.config import MOMENTUM_OPTIMIZERS
from hpcdist.strategies.config import RULES as PARALLEL_RULES

_KEYS: Final = {  # field of a layout -> recipe key with the same meaning
    **{name: f"parallel.{name}" for name in ("context", "expert", "pipeline", "tensor", "strategy", "chunks")},
    **{name: f"parallel.{name}" for name in ("schedule", "sequence_parallel", "recompute")},
    "compression": "communication.compression",
    "precision": "precision.mode",
}
_relevant: Final = attrgetter(*_KEYS)
_FOLLOWING: Final = (
    "communication.overlap",
    "parameter_server.placement",
    "optimizer.name",
    "compression.warmup_steps",
)
_DEFAULTS: Final = {**rules.DEFAULTS, **section_values("optimizer", OptimizerConfig())}
_SELECTIVE: Final = (
    "recompute = 'selective' is not built in this version: tiled attention always recomputes its scores; choose 'none' "
    "or 'full'"
)


def _may_refuse(rule: Rule) -> bool:
    # True if the recipe rule can reject a layout of the planner, so that the rule must be checked.
    constant = {key: value for key, value in _DEFAULTS.items() if key not in (*_KEYS.values(), *_FOLLOWING)}
    derived_values = rules.derived({**_DEFAULTS, **dict.fromkeys(_KEYS.values(), "")})
    conditions = {**rule.conditions, **rule.given}
    return conditions.keys() <= derived_values.keys() and all(
        condition.matches(constant[key]) for key, condition in conditions.items() if key in constant
    )


_RULES: Final = tuple(filter(_may_refuse, (*PARALLEL_RULES, *rules.RULES)))


def unsupported(layout: ParallelLayout) -> tuple[str, ...]:
    """Return texts with the reasons why hpcdist cannot run ``layout``, or () for a Megatron-LM layout."""
    return () if layout.implementation == "megatron" else refusals(layout)


def refusals(layout: ParallelLayout) -> tuple[str, ...]:
    """Return texts with the reasons why this version of hpcdist cannot run ``layout``."""
    return _refusals(*_relevant(layout), overlaps=layout.overlap > 0 and layout.data > 1, dedicated=layout.servers > 0)


@lru_cache(maxsize=1 << 14)
def _refusals(*fields: Any, overlaps: bool, dedicated: bool) -> tuple[str, ...]:
    values = {**_DEFAULTS, **dict(zip(_KEYS.values(), fields, strict=True))}
    recompute, compression = values["parallel.recompute"], values["communication.compression"]
    values["parallel.recompute"] = recompute == "full"
    if values["parallel.pipeline"] == 1:
        values["parallel.schedule"] = "auto"
    if overlaps:
        values["communication.overlap"] = "thread"
    if values["parallel.strategy"] == "parameter_server" and not dedicated:
        values["parameter_server.placement"] = "colocated"
    if compression in MOMENTUM_OPTIMIZERS:
        values |= {"optimizer.name": MOMENTUM_OPTIMIZERS[compression], "compression.warmup_steps": 1}
    values = rules.derived(values)
    reasons = tuple(filter(None, (rule.refusal(values) for rule in _RULES)))
    return (*reasons, _SELECTIVE) if recompute == "selective" else reasons
