"""Who takes part in `hpcdist bench data`: every way in which replicas turn gradients into parameters. Light.

A contender is what it sets in the recipe. One that this version, or the number of ranks, refuses is left out, and the
table says why.
"""

from collections.abc import Mapping
from typing import Any, Final

_SERVED: Final = {"parallel.strategy": "parameter_server"}
_COLOCATED: Final = {**_SERVED, "parameter_server.placement": "colocated"}
_BEHIND: Final = {"communication.overlap": "thread"}


def _of(strategy: str, **zero: Any) -> dict[str, Any]:
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
