"""Joules by part: what devices draw in each phase, hosts, network, cooling; and what is not known."""

import dataclasses

import pytest

from hpcdist.planner import energy
from hpcdist.planner.cluster import toml_file
from hpcdist.planner.cluster.hardware import ClusterSite
from hpcdist.planner.estimate import TimeEstimate
from hpcdist.planner.layout import ParallelLayout

H100 = toml_file.read("h100-hgx")


def timing(**terms):
    return TimeEstimate(terms=terms, hidden_s=0.0, bubble=0.0, bytes={}, algorithms={})


def test_the_terms_are_those_of_the_formula():
    took = timing(forward=1.0, backward=2.0, tensor=0.5, bubble=0.3, data=0.2, update=0.1)
    found = energy.energy(took, ParallelLayout(data=2, tensor=8), H100, peak_share=0.4)
    computing = 115 + 585 * (energy.COMPUTE_FLOOR + (1 - energy.COMPUTE_FLOOR) * 0.4)
    device_j = 3 * computing
    device_j += 0.7 * (115 + 585 * energy.MESSAGE_UTILISATION)
    device_j += 0.3 * (115 + 585 * energy.WAITING_UTILISATION)
    device_j += 0.1 * (115 + 585 * energy.MEMORY_UTILISATION)
    assert found.terms["devices"] == pytest.approx(16 * device_j)
    assert found.device_w == pytest.approx(device_j / 4.1)
    assert found.terms["hosts"] == pytest.approx(2 * 2800 * 4.1)
    assert found.terms["network"] == pytest.approx(2 * 930 * 4.1)
    in_the_room = found.terms["devices"] + found.terms["hosts"] + found.terms["network"]
    assert found.terms["cooling"] == pytest.approx(0.1 * in_the_room)
    assert found.joules == pytest.approx(1.1 * in_the_room)


def test_a_node_that_trains_draws_what_was_measured():
    """Computation of a node of H100 without its switches: 76 % of 10.2 kW (arXiv:2506.14551)."""
    found = energy.energy(timing(forward=1.0, backward=2.0), ParallelLayout(tensor=8), H100, peak_share=0.45)
    assert (found.terms["devices"] + found.terms["hosts"]) / 3.0 == pytest.approx(0.76 * 10_200, rel=0.02)


@pytest.mark.parametrize("cluster", toml_file.names())
@pytest.mark.parametrize("term", ["forward", "recompute", "update", "tensor", "data", "pipeline", "bubble", "input"])
def test_power_lies_between_idle_and_peak(cluster, term):
    device = toml_file.read(cluster).device
    for share in (0.0, 0.5, 1.0, 1.5):
        assert device.idle_w <= energy.power_w(device, energy.utilisation(term, share)) <= device.peak_w


def test_computing_draws_most_and_waiting_least():
    busy = [energy.utilisation(term, 0.0) for term in ("forward", "update", "data", "bubble")]
    assert busy == sorted(busy, reverse=True) and len(set(busy)) == 4
    assert energy.utilisation("backward", 1.0) == 1.0


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
        term for term in (*documented, "update", "input") if energy.utilisation(term, 0.5) == energy.WAITING_UTILISATION
    ]
    assert waiting == ["bubble", "input"]


def test_devices_of_a_node_that_are_left_out_idle():
    took = timing(forward=1.0)
    three, eight = (energy.energy(took, ParallelLayout(data=data), H100, 0.5) for data in (3, 8))
    assert three.terms["hosts"] == eight.terms["hosts"]
    assert eight.terms["devices"] - three.terms["devices"] == pytest.approx(5 * (three.device_w - 115))


def test_a_layout_that_is_larger_than_the_cluster_counts_its_devices():
    workstation = toml_file.read("workstation")
    found = energy.energy(timing(forward=1.0), ParallelLayout(data=3), workstation, 1.0)
    assert found.terms["devices"] == pytest.approx(3 * 20)
    assert found.terms["hosts"] == 2 * 40


def test_servers_send_in_the_exchange_update_and_wait_else():
    took = timing(forward=2.0, data=1.0, update=0.5)
    all_serve = energy.energy(took, ParallelLayout(data=8, strategy="parameter_server"), H100, 0.5)
    found = energy.energy(took, ParallelLayout(data=8, servers=8, strategy="parameter_server"), H100, 0.5)
    server_j = 115 * 3.5 + 585 * (
        energy.MESSAGE_UTILISATION * 1 + energy.MEMORY_UTILISATION * 0.5 + energy.WAITING_UTILISATION * 2
    )
    worker_j = all_serve.terms["devices"] / 8 - 585 * (energy.MEMORY_UTILISATION - energy.WAITING_UTILISATION) * 0.5
    assert found.terms["devices"] == pytest.approx(8 * server_j + 8 * worker_j), "workers wait for the update"
    assert found.device_w == pytest.approx(worker_j / 3.5)
    assert found.terms["hosts"] == 2 * all_serve.terms["hosts"]


def test_what_is_not_known_is_left_out_and_said():
    bare = dataclasses.replace(
        H100,
        device=dataclasses.replace(H100.device, idle_w=0.0, peak_w=0.0),
        node=dataclasses.replace(H100.node, host_w=0.0, network_w=0.0),
        site=ClusterSite(),
    )
    found = energy.energy(timing(forward=1.0), ParallelLayout(data=8), bare, 0.5)
    assert found.terms == {} and found.joules == 0.0
    told = energy.unknown_terms(bare)
    assert [flag.split(":")[0] for flag in told] == [
        "the power of a device is not known",
        "the power of a host is not known",
        "the power of the network is not known",
        "no PUE is known",
    ]
    assert energy.waiting_w(ParallelLayout(data=8), bare) == 0.0
    assert energy.unknown_terms(H100) == (energy.ASSUMED,)
    without_pue = dataclasses.replace(H100, site=ClusterSite())
    assert "cooling" not in energy.energy(timing(forward=1.0), ParallelLayout(data=8), without_pue, 0.5).terms


def test_waiting_takes_the_power_of_all_nodes_with_cooling():
    idle = 8 * (115 + 585 * energy.WAITING_UTILISATION)
    assert energy.waiting_w(ParallelLayout(data=9), H100) == pytest.approx(1.1 * 2 * (idle + 2800 + 930))
