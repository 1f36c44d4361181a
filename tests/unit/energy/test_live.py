"""Current power and utilisation of a job: sums over nodes, means over time, and NaN for unknown values."""

import math

import numpy as np
import pytest

from hpcdist.energy.node_rows import LiveFigures, MeanPower, NodeRows
from hpcdist.energy.sampler import DrainedSamples
from hpcdist.energy.sources.utilisation import COLUMNS, SHARES

S = 1_000_000_000


def drained_samples(samples=(), gaps=(), looks=()):
    return DrainedSamples(
        np.array(samples, np.int64).reshape(-1, 3),
        np.empty((0, 3), np.int64),
        np.array(gaps, np.int64).reshape(-1, 2),
        np.arange(len(looks)),
        np.array(looks) if looks else np.empty((0, 0)),
    )


def look(**reference):
    return [reference.get(name, math.nan) for name in COLUMNS]


def node(number, watts=None, lacking=(), looks=()):
    return NodeRows(number, [], drained_samples(looks=looks), [], watts=watts or {}, lacking=frozenset(lacking))


def test_mean_power_continues_between_calls():
    power = MeanPower()
    assert power.by_source(2, drained_samples([(S, 0, 1000), (2 * S, 0, 6000)]))[0] == pytest.approx(5)
    result = power.by_source(2, drained_samples([(4 * S, 0, 8000), (4 * S, 1, 10)]))
    assert result[0] == pytest.approx(1) and math.isnan(result[1]), "one sample is no difference"
    assert all(math.isnan(one) for one in power.by_source(2, drained_samples()))
    assert power.by_source(2, drained_samples([(5 * S, 1, 3010)]))[1] == pytest.approx(3)
    assert math.isnan(power.by_source(2, drained_samples([(6 * S, 1, 3010)], [(6 * S, 1)]))[1]), "unknown after a gap"


def test_power_is_summed_and_unreadable_node_makes_its_kind_nan():
    present = LiveFigures()
    assert present.power() == present.utilisation() == present.network() == {}
    present.see([node(0, {"gpu": 100.0, "cpu": 10.0}), node(1, {"gpu": 50.0}, ["cpu"]), node(2, {"cpu": 1.0})])
    result = present.power()
    assert result["gpu"] == 150 and math.isnan(result["cpu"]), "node 2 has no GPU in the job, node 1 cannot be read"


def test_node_power_is_omitted_unless_all_nodes_report_it():
    present = LiveFigures()
    present.see([node(0, {"node": 300.0, "cpu": 10.0}), node(1, {"node": 200.0, "cpu": 20.0})])
    assert present.power() == {"node": 500, "cpu": 30}
    present.see([node(0, {"node": 300.0, "cpu": 10.0}), node(1, {"cpu": 20.0})])
    assert present.power() == {"cpu": 30}


def test_utilisation_is_mean_over_time_and_nodes():
    present = LiveFigures()
    one = [look(cpu=0.2, gpu=0.5), look(cpu=0.4)]
    present.see([node(0, looks=one), node(1, looks=[look(cpu=0.9, sent_bytes=5.0, received_bytes=6.0)]), node(2)])
    assert present.utilisation() == {"cpu": pytest.approx(0.6), "gpu": pytest.approx(0.5)}
    assert set(present.utilisation()) <= set(SHARES)


def test_network_bytes_use_last_value_of_each_node():
    present = LiveFigures()
    present.see([node(0, looks=[look(sent_bytes=5.0, received_bytes=6.0)]), node(1)])
    present.see([node(0), node(1, looks=[look(sent_bytes=1.0, received_bytes=2.0)])])
    assert present.network() == {"sent": 6, "received": 8}
    present.see([node(0, looks=[look()]), node(1)])
    assert math.isnan(present.network()["sent"])
