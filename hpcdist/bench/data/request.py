"""Request of a comparison of exchanges: contenders and scenarios, and the trials that they become.

A contender is a set of recipe keys, one for every way in which replicas turn gradients into parameters; it is measured
in a calm scenario and with stragglers. A contender that this version, or the number of ranks, refuses is left out, and
the table says why. One contender in one scenario is one configuration of a sweep (`hpcdist.bench.sweep.definition`),
whose name is the two. Light: no array, no file, so that `hpcdist bench data --list` loads none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hpcdist.bench.sweep.definition import RecipeResolver, SweepTrial, resolved
from hpcdist.errors import HpcdistError

_SERVED: Final = {"parallel.strategy": "parameter_server"}
_COLOCATED: Final = {**_SERVED, "parameter_server.placement": "colocated"}
_BEHIND: Final = {"communication.overlap": "thread"}


def _of(strategy: str, **zero: Any) -> dict[str, Any]:
    """Return the keys of a strategy, with keys of the section zero."""
    return {"parallel.strategy": strategy, **{f"zero.{key}": value for key, value in zero.items()}}


CONTENDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "allreduce": _of("allreduce"),
    "allreduce, overlapped": {**_of("allreduce"), **_BEHIND},
    "allreduce, delayed": {**_of("allreduce"), **_BEHIND, "communication.delayed": True},
    "allreduce, shared memory": {**_of("allreduce"), "communication.algorithm": "node_shared"},
    "zero1": _of("zero1"),
    "zero1, overlapped": {**_of("zero1"), **_BEHIND},
    "zero2": _of("zero2"),
    "zero3": _of("zero3"),
    "zero3, prefetching": {**_of("zero3", prefetch=1), **_BEHIND},
    "shared parameters": {**_of("zero1", shared_parameters=True), "communication.algorithm": "node_shared"},
    "servers, bsp": _SERVED,
    "servers, bsp, 1 backup worker": {**_SERVED, "parameter_server.backup_workers": 1},
    "servers, ssp of 3": {**_SERVED, "parameter_server.consistency": "ssp", "parameter_server.staleness": 3},
    "servers, asp": {**_SERVED, "parameter_server.consistency": "asp"},
    "colocated servers, bsp": _COLOCATED,
    "colocated servers, bsp, shared memory": {**_COLOCATED, "parameter_server.transport": "shared"},
    "colocated servers, bsp, one-sided": {**_COLOCATED, "parameter_server.transport": "rma"},
    "colocated servers, ssp of 3": {
        **_COLOCATED,
        "parameter_server.consistency": "ssp",
        "parameter_server.staleness": 3,
    },
    "colocated servers, asp": {**_COLOCATED, "parameter_server.consistency": "asp"},
    "gossip on a ring": {**_of("gossip"), "decentralised.graph": "ring"},
    "gossip, exponential": {**_of("gossip"), "decentralised.graph": "exponential"},
    "local SGD of 8": {**_of("local_sgd"), "decentralised.period": 8},
}
CALM: Final = "calm"
STRAGGLERS: Final = "stragglers"
_BETWEEN: Final = " | "


@dataclass(frozen=True)
class ExchangeRequest:
    """Request: ``contenders`` by name on ``ranks``, with keys ``common`` to all; ``scenarios`` set the rest."""

    ranks: int
    common: Mapping[str, Any]
    contenders: Mapping[str, Mapping[str, Any]]
    scenarios: Mapping[str, Mapping[str, Any]]


def expand(wanted: ExchangeRequest, recipes: RecipeResolver) -> tuple[list[SweepTrial], dict[str, str]]:
    """Return the trials, contender by contender, and why others are left out, by name (local)."""
    trials: list[SweepTrial] = []
    left_out: dict[str, str] = {}
    for contender, own in wanted.contenders.items():
        scenario_trials = []
        try:
            for scenario, chaos in wanted.scenarios.items():
                settings = {**wanted.common, **own, **chaos}
                scenario_trials.append(resolved(contender + _BETWEEN + scenario, wanted.ranks, settings, recipes))
        except HpcdistError as error:
            left_out[contender] = str(error)
        else:
            trials += scenario_trials
    return trials, left_out


def parts_of(name: str) -> tuple[str, str]:
    """Return contender and scenario of a trial of this name (local)."""
    contender, _, scenario = name.partition(_BETWEEN)
    return contender, scenario


def stragglers(ranks: Sequence[int], factor: float, probability: float) -> dict[str, Any]:
    """Return the settings of the scenario with ``ranks`` that are slow (local)."""
    chaos = {"slow_ranks": list(ranks), "slow_factor": factor, "slow_probability": probability}
    return {f"chaos.{key}": value for key, value in chaos.items()}
