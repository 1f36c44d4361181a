"""Joules by part: devices in each phase, hosts, network, cooling, and parts without known power."""

import dataclasses

import pytest

from hpcdist.planner import plan
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import ClusterSite
from hpcdist.planner.estimate import TimeEstimate
from hpcdist.planner.layout import ParallelLayout

H100 = toml_file.read("h100-hgx")


def timing(**terms):
    return TimeEstimate(terms=terms, hidden_s=0.0, bubble=0.0, bytes={}, algorithms={})


def test_energy_terms_match_the_formula():
    took = timing(forward=1.0, backward=2.0, tensor=0.5, bubble=0.3, data=0.2, update=0.1)
    result = plan.energy(took, ParallelLayout(data=2, tensor=8), H100, peak_share=0.4)
    computing = 115 + 585 * (plan.COMPUTE_FLOOR + (1 - plan.COMPUTE_FLOOR) * 0.4)
    device_j = 3 * computing
    device_j += 0.7 * (115 + 585 * plan.MESSAGE_UTILISATION)
    device_j += 0.3 * (115 + 585 * plan.WAITING_UTILISATION)
    device_j += 0.1 * (115 + 585 * plan.MEMORY_UTILISATION)
    assert result.terms["devices"] == pytest.approx(16 * device_j)
    assert result.device_w == pytest.approx(device_j / 4.1)
    assert result.terms["hosts"] == pytest.approx(2 * 2800 * 4.1)
    assert result.terms["network"] == pytest.approx(2 * 930 * 4.1)
    in_the_room = result.terms["devices"] + result.terms["hosts"] + result.terms["network"]
    assert result.terms["cooling"] == pytest.approx(0.1 * in_the_room)
    assert result.joules == pytest.approx(1.1 * in_the_room)


def test_power_of_a_training_node_matches_a_measurement():
    """The computing part of an H100 node without its switches draws 76 % of 10.2 kW (arXiv:2506.14551)."""
    result = plan.energy(timing(forward=1.0, backward=2.0), ParallelLayout(tensor=8), H100, peak_share=0.45)
    assert (result.terms["devices"] + result.terms["hosts"]) / 3.0 == pytest.approx(0.76 * 10_200, rel=0.02)


@pytest.mark.parametrize("cluster", toml_file.names())
@pytest.mark.parametrize("term", ["forward", "recompute", "update", "tensor", "data", "pipeline", "bubble", "input"])
def test_power_is_between_idle_and_peak(cluster, term):
    device = toml_file.read(cluster).device
    for share in (0.0, 0.5, 1.0, 1.5):
        assert device.idle_w <= plan.power_w(device, plan.utilisation(term, share)) <= device.peak_w


def test_computing_draws_the_most_power_and_waiting_the_least():
    busy = [plan.utilisation(term, 0.0) for term in ("forward", "update", "data", "bubble")]
    assert busy == sorted(busy, reverse=True) and len(set(busy)) == 4
    assert plan.utilisation("backward", 1.0) == 1.0


def test_every_term_of_a_step_has_a_phase():
    documented = (
        "forward",
        "backward",
        "recompute",
        "tensor",
        "context",
        "expert",
        "pipeline",
        "bubble",
        "data",
        "rows",
    )
    waiting = [
        term for term in (*documented, "update", "input") if plan.utilisation(term, 0.5) == plan.WAITING_UTILISATION
    ]
    assert waiting == ["bubble", "input"]


def test_unused_devices_of_a_node_draw_idle_power():
    took = timing(forward=1.0)
    three, eight = (plan.energy(took, ParallelLayout(data=data), H100, 0.5) for data in (3, 8))
    assert three.terms["hosts"] == eight.terms["hosts"]
    assert eight.terms["devices"] - three.terms["devices"] == pytest.approx(5 * (three.device_w - 115))


def test_layout_larger_than_the_cluster_counts_its_devices():
    workstation = toml_file.read("workstation")
    result = plan.energy(timing(forward=1.0), ParallelLayout(data=3), workstation, 1.0)
    assert result.terms["devices"] == pytest.approx(3 * 20)
    assert result.terms["hosts"] == 2 * 40


def test_servers_draw_power_in_exchange_and_update_only():
    took = timing(forward=2.0, data=1.0, update=0.5)
    all_serve = plan.energy(took, ParallelLayout(data=8, strategy="parameter_server"), H100, 0.5)
    result = plan.energy(took, ParallelLayout(data=8, servers=8, strategy="parameter_server"), H100, 0.5)
    server_j = 115 * 3.5 + 585 * (
        plan.MESSAGE_UTILISATION * 1 + plan.MEMORY_UTILISATION * 0.5 + plan.WAITING_UTILISATION * 2
    )
    worker_j = all_serve.terms["devices"] / 8 - 585 * (plan.MEMORY_UTILISATION - plan.WAITING_UTILISATION) * 0.5
    assert result.terms["devices"] == pytest.approx(8 * server_j + 8 * worker_j), "workers wait for the update"
    assert result.device_w == pytest.approx(worker_j / 3.5)
    assert result.terms["hosts"] == 2 * all_serve.terms["hosts"]


def test_unknown_power_is_omitted_and_flagged():
    bare = dataclasses.replace(
        H100,
        device=dataclasses.replace(H100.device, idle_w=0.0, peak_w=0.0),
        node=dataclasses.replace(H100.node, host_w=0.0, network_w=0.0),
        site=ClusterSite(),
    )
    result = plan.energy(timing(forward=1.0), ParallelLayout(data=8), bare, 0.5)
    assert result.terms == {} and result.joules == 0.0
    output = plan.unknown_terms(bare)
    assert [flag.split(":")[0] for flag in output] == [
        "the power of a device is unknown",
        "the power of a host is unknown",
        "the power of the network is unknown",
        "the PUE is unknown",
    ]
    assert plan.waiting_w(ParallelLayout(data=8), bare) == 0.0
    assert plan.unknown_terms(H100) == (plan.ASSUMED,)
    without_pue = dataclasses.replace(H100, site=ClusterSite())
    assert "cooling" not in plan.energy(timing(forward=1.0), ParallelLayout(data=8), without_pue, 0.5).terms


def test_waiting_power_includes_all_nodes_and_cooling():
    idle = 8 * (115 + 585 * plan.WAITING_UTILISATION)
    assert plan.waiting_w(ParallelLayout(data=9), H100) == pytest.approx(1.1 * 2 * (idle + 2800 + 930))
