"""Layouts that are possible, but that this version of hpcdist cannot run.

The rules of a recipe are asked: what becomes possible there becomes possible here.
"""

from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

from hpcdist.optim.config import OptimizerConfig
from hpcdist.planner.layout import ParallelLayout
from hpcdist.reporting.rules import Rule, section_values
from hpcdist.strategies import rules
from hpcdist.strategies.compressed.config import MOMENTUM_OPTIMIZERS
from hpcdist.strategies.config import RULES as PARALLEL_RULES

_KEYS: Final = {  # of a recipe, by the field of a layout that says the same
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
    "recompute = 'selective' is not built in this version: attention is computed in tiles, and its scores again in any "
    "case; choose 'none' or 'full'"
)


def _may_refuse(rule: Rule) -> bool:
    """Whether the values of some layout may be refused: a search asks for thousands."""
    constant = {key: value for key, value in _DEFAULTS.items() if key not in (*_KEYS.values(), *_FOLLOWING)}
    known = rules.derived({**_DEFAULTS, **dict.fromkeys(_KEYS.values(), "")})
    conditions = {**rule.conditions, **rule.given}
    return conditions.keys() <= known.keys() and all(
        condition.matches(constant[key]) for key, condition in conditions.items() if key in constant
    )


_RULES: Final = tuple(filter(_may_refuse, (*PARALLEL_RULES, *rules.RULES)))


def unsupported(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the reasons why this version cannot run a layout planned for hpcdist; () for another implementation."""
    return () if layout.implementation == "megatron" else refusals(layout)


def refusals(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the reasons why this version of hpcdist cannot run ``layout``, whichever kernels it is planned with."""
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
