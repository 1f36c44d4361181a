"""Invalid configurations are rejected with the reason; the roles of servers and workers."""

import math
from dataclasses import replace

import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.training.recipe.recipe import Recipe


@cases(
    "keys, says",
    ({"servers": -1}, "servers = -1"),
    ({"placement": "beside"}, "choose one of dedicated, colocated"),
    ({"consistency": "eventual"}, "choose one of bsp, ssp, asp"),
    ({"consistency": "ssp", "staleness": -1}, "staleness = -1.*at least 0"),
    ({"staleness": 3}, "staleness = 3 has no effect .* 'bsp'"),
    ({"consistency": "asp", "staleness": 3}, "staleness = 3 has no effect .* 'asp'"),
    ({"staleness_aware": True}, "staleness_aware = true has no effect"),
    ({"consistency": "ssp", "staleness_aware": True}, "staleness_aware = true has no effect"),
    ({"backup_workers": -1}, "backup_workers = -1"),
    (
        {"consistency": "asp", "backup_workers": 1},
        "backup_workers = 1 .* 'asp'.*or parameter_server.consistency = 'bsp'",
    ),
    ({"consistency": "ssp", "backup_workers": 1}, "backup_workers = 1 .* 'ssp'"),
    ({"transport": "pigeon"}, "messages, shared, rma"),
    ({"transport": "shared", "consistency": "asp"}, "set parameter_server.transport = 'messages'"),
    ({"mirrored": True}, "mirrored = true: servers have no mirrors.* --survive"),
)
def test_invalid_configurations_are_rejected(keys, says):
    with pytest.raises(ConfigurationError, match=says):
        ParameterServerConfig(**keys)


@cases(
    "keys, lock_step, bound, described",
    ({}, True, 0, "bsp"),
    ({"consistency": "ssp"}, True, 0, "ssp of 0"),
    ({"consistency": "ssp", "staleness": 3}, False, 3, "ssp of 3"),
    ({"consistency": "asp", "staleness_aware": True}, False, math.inf, "asp, rate by staleness"),
    ({"backup_workers": 2}, False, 0, "bsp, 2 backup workers"),
)
def test_bound_and_lock_step_of_each_consistency(keys, lock_step, bound, described):
    config = ParameterServerConfig(**keys)
    assert (config.lock_step, config.bound, config.described) == (lock_step, bound, described)


@pytest.mark.parametrize(("placement", "world"), [("colocated", 2), ("dedicated", 3)])
def test_as_many_backups_as_workers_are_rejected(placement, world):
    with pytest.raises(ConfigurationError, match=r"backup_workers = 2, but there are only 2 workers.*at most 1"):
        Roles.of(ParameterServerConfig(placement=placement, backup_workers=2), world)
    assert len(Roles.of(ParameterServerConfig(placement=placement, backup_workers=1), world).workers) == 2


@cases(
    "keys, output",
    ({}, "placement = 'dedicated'.*set it to 'colocated'"),
    ({"placement": "colocated", "consistency": "asp"}, "consistency = 'asp'.*set it to 'bsp'"),
    ({"placement": "colocated", "transport": "shared"}, "transport = 'shared'.*set it to 'messages'"),
)
def test_unsupported_products_with_servers_are_rejected(keys, output):
    config = ParameterServerConfig(**keys)
    alone = ParallelConfig(strategy="parameter_server")
    Recipe(parallel=alone, parameter_server=config)
    for degrees in ({"pipeline": 2, "tensor": 1}, {"pipeline": 1, "tensor": 2}):
        with pytest.raises(ConfigurationError, match=output):
            Recipe(parallel=replace(alone, **degrees), parameter_server=config)
    assert not ParallelConfig(strategy="parameter_server", pipeline=2).has_roles


@cases(
    "placement, servers, world, workers, serving",
    ("dedicated", 0, 2, range(1), range(1, 2)),
    ("dedicated", 0, 4, range(3), range(3, 4)),
    ("dedicated", 3, 4, range(1), range(1, 4)),
    ("colocated", 0, 1, range(1), range(1)),
    ("colocated", 0, 3, range(3), range(3)),
    ("colocated", 2, 3, range(3), range(2)),
)
def test_roles_of_servers_and_workers(placement, servers, world, workers, serving):
    roles = Roles.of(ParameterServerConfig(placement=placement, servers=servers), world)
    assert (roles.workers, roles.servers) == (workers, serving)


def test_configuration_without_workers_is_rejected():
    with pytest.raises(
        ConfigurationError, match=r"2 dedicated parameter servers in a world of 2 ranks leave no worker"
    ):
        Roles.of(ParameterServerConfig(servers=2), 2)
    with pytest.raises(
        ConfigurationError, match=r"1 dedicated parameter servers in a world of 1 rank leave no worker.*colocated"
    ):
        Roles.of(ParameterServerConfig(), 1)
    with pytest.raises(ConfigurationError, match=r"servers = 4 with .*'colocated'.*3 ranks"):
        Roles.of(ParameterServerConfig(placement="colocated", servers=4), 3)
