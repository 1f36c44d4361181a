"""What cannot be run is refused with the reason; who serves and who computes."""

import pytest

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.roles import Roles


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"servers": -1}, "servers = -1"),
        ({"placement": "beside"}, "choose one of dedicated, colocated"),
        ({"consistency": "ssp"}, "known, but not built"),
        ({"consistency": "eventual"}, "choose one of bsp, asp"),
        ({"staleness": 3}, "staleness = 3.*set it to 0"),
    ],
)
def test_refused(keys: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ParameterServerConfig(**keys)


def test_layer_wise_rates_need_lock_step() -> None:
    bsp, asp = ParameterServerConfig(), ParameterServerConfig(consistency="asp")
    for name in ("lars", "lamb"):
        bsp.check_beside(name)
        with pytest.raises(ConfigurationError, match=f"{name}.*norms of whole tensors"):
            asp.check_beside(name)
    asp.check_beside("adamw")


def test_a_pipeline_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="parameter_server.*parallel.pipeline = 2"):
        ParallelConfig(strategy="parameter_server", pipeline=2)


@pytest.mark.parametrize(
    ("placement", "servers", "world", "workers", "serving"),
    [
        ("dedicated", 0, 2, range(1), range(1, 2)),
        ("dedicated", 0, 4, range(3), range(3, 4)),
        ("dedicated", 3, 4, range(1), range(1, 4)),
        ("colocated", 0, 1, range(1), range(1)),
        ("colocated", 0, 3, range(3), range(3)),
        ("colocated", 2, 3, range(3), range(2)),
    ],
)
def test_roles(placement: str, servers: int, world: int, workers: range, serving: range) -> None:
    roles = Roles.of(ParameterServerConfig(placement=placement, servers=servers), world)
    assert (roles.workers, roles.servers) == (workers, serving)


def test_no_worker_is_refused_with_the_equation() -> None:
    with pytest.raises(ConfigurationError, match=r"world 2 - parameter_server.servers 2 = 0 workers"):
        Roles.of(ParameterServerConfig(servers=2), 2)
    with pytest.raises(ConfigurationError, match=r"world 1 - parameter_server.servers 1 = 0 workers.*colocated"):
        Roles.of(ParameterServerConfig(), 1)
    with pytest.raises(ConfigurationError, match=r"servers = 4 colocated.*3 ranks"):
        Roles.of(ParameterServerConfig(placement="colocated", servers=4), 3)
