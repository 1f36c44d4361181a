"""The report: sums over nodes, and NaN with a reason that names the node wherever something is missing."""

import json
import math

import pytest

from hpcdist.energy.report import NodeContribution, SourceResult, merge, state

NO_RAPL = {"cpu": "/sys/class/powercap does not exist", "dram": "/sys/class/powercap does not exist"}
NO_GPU = {"gpu": "no NVIDIA driver answers"}


def node(index, *, phases=None, sources=(("a", "gpu"),), missing=NO_RAPL, needed=("gpu",), seconds=10.0, **source):
    """A node on which each source took 1 J per second in `phases` (name -> seconds)."""
    phases = {"training": seconds} if phases is None else phases
    shown = {
        name: {"seconds": s, "windows": 1, "shortest_s": s, "mj": [1e3 * s] * len(sources)}
        for name, s in phases.items()
    }
    found = [SourceResult(name, kind, **{"update_s": 0.1, **source}) for name, kind in sources]
    totals = [1e3 * sum(phases.values())] * len(sources)
    return NodeContribution(index, found, shown, totals, missing, frozenset(needed))


def test_sums_over_nodes_sources_and_phases():
    two = [("a", "gpu"), ("package-0", "cpu")]
    nodes = [
        node(0, sources=two, phases={"training": 10.0, "checkpoint": 1.0}, missing={"dram": "no dram zone"}),
        node(1, sources=two, phases={"training": 12.0, "checkpoint": 2.0}, missing={"dram": "no dram zone"}),
    ]
    found = merge(nodes)
    assert found["energy_j"] == 50 and found["reason"] is None
    assert found["by_kind"] == {"gpu": 25, "cpu": 25}
    assert [found["phases"][name]["joules"] for name in ("training", "checkpoint")] == [44, 6]
    assert [found["phases"][name]["seconds"] for name in ("training", "checkpoint")] == [12, 2]
    assert found["not_included"] == ["dram (node 0, 1): no dram zone"]
    assert [(row["node"], row["name"], row["joules"]) for row in found["sources"]] == [
        (0, "a", 11),
        (0, "package-0", 11),
        (1, "a", 14),
        (1, "package-0", 14),
    ]


def test_nothing_measured_is_nan_with_every_reason():
    found = merge([node(0, sources=(), missing=NO_GPU | NO_RAPL, needed=())])
    assert math.isnan(found["energy_j"]) and math.isnan(found["phases"]["training"]["joules"])
    assert all(word in found["reason"] for word in ("gpu", "no NVIDIA driver", "cpu", "powercap does not exist"))
    assert found["phases"]["training"]["seconds"] == 10


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_node_that_cannot_measure_is_named(kind):
    nodes = [node(0, sources=[("a", kind)]), node(1, sources=(), missing=NO_GPU | NO_RAPL, needed=())]
    found = merge(nodes)
    assert math.isnan(found["energy_j"]) and f"node 1 has no {kind}: {(NO_GPU | NO_RAPL)[kind]}" in found["reason"]
    assert math.isnan(found["phases"]["training"]["joules"])


def test_a_node_whose_ranks_use_no_gpu_lacks_none():
    unused = NodeContribution(1, (), {}, (), NO_GPU | NO_RAPL, unused=frozenset({"gpu"}))
    found = merge([node(0), unused])
    assert found["energy_j"] == 10 and found["reason"] is None


def test_a_gpu_job_is_not_measured_without_its_gpus():
    found = merge([node(0, sources=[("package-0", "cpu")], missing={"gpu": "MIG", "dram": "none"})])
    assert math.isnan(found["energy_j"]) and "node 0 has no gpu: MIG" in found["reason"]
    assert found["by_kind"]["cpu"] == 10, "what is known is said"


def test_too_short_a_window_has_no_joules_but_the_total_has():
    found = merge([node(3, phases={"training": 10.0, "checkpoint": 0.19})])
    assert found["energy_j"] == pytest.approx(10.19) and found["phases"]["training"]["joules"] == 10
    checkpoint = found["phases"]["checkpoint"]
    assert math.isnan(checkpoint["joules"])
    assert checkpoint["reason"] == "node 3, a: a window of checkpoint is 0.19 s, shorter than 2 updates of 0.1 s"


def test_too_short_a_job_has_no_total():
    found = merge([node(0, seconds=0.1)])
    assert math.isnan(found["energy_j"]) and "all of the time" in found["reason"]


def test_a_counter_that_does_not_move_is_not_zero():
    found = merge([node(0, update_s=math.nan)])
    assert math.isnan(found["energy_j"]) and "did not move" in found["reason"]


def test_failed_reads_are_counted_and_named():
    failing = node(0, failed_reads=3, trouble="a: 3 failed reads, the last: GPU is lost")
    failing.phases["training"]["mj"][0] = math.nan
    found = merge([NodeContribution(0, failing.sources, failing.phases, [math.nan], NO_RAPL, frozenset({"gpu"}))])
    assert math.isnan(found["energy_j"]) and "node 0, a: 3 failed reads, the last: GPU is lost" in found["reason"]
    assert found["sources"][0]["failed_reads"] == 3


def test_a_thousand_reasons_are_not_all_told():
    nodes = [node(index, sources=(), missing=NO_GPU) for index in range(1000)]
    assert merge(nodes)["reason"].endswith("and 996 more reasons")


def test_starts_of_a_run_add_up_through_json():
    first = json.loads(json.dumps(state(merge([node(0)]))))
    second = json.loads(json.dumps(state(merge([node(0, phases={"training": 5.0, "validation": 1.0})], first))))
    found = merge([node(0, seconds=2.0), node(1, seconds=3.0)], second)  # another number of nodes
    assert found["energy_j"] == 10 + 6 + 5 and found["reason"] is None
    assert found["phases"]["training"]["joules"] == 20 and found["phases"]["validation"]["joules"] == 1
    assert found["phases"]["training"]["seconds"] == 10 + 5 + 3


def test_a_start_that_could_not_measure_is_not_forgotten():
    blind = json.loads(json.dumps(state(merge([node(0, sources=(), missing=NO_GPU | NO_RAPL, needed=())]))))
    assert blind["phases"]["training"]["joules"] is None
    for _ in range(3):
        found = merge([node(0)], blind)
        assert math.isnan(found["energy_j"]) and math.isnan(found["phases"]["training"]["joules"])
        assert found["reason"].startswith("an earlier start of this run: no source can be read")
        assert found["reason"].count("an earlier start") == 1
        blind = json.loads(json.dumps(state(found)))


def test_what_is_kept_does_not_grow_with_the_starts():
    reasons, earlier = [], None
    for missing in (NO_GPU, NO_GPU, NO_GPU | NO_RAPL, NO_GPU, NO_GPU | NO_RAPL, NO_GPU):
        earlier = state(merge([node(0, sources=(), missing=missing)], earlier))
        reasons.append(earlier["reason"])
    assert reasons[1] == reasons[0] and not reasons[0].startswith("an earlier")
    assert reasons[5] == reasons[4] == reasons[3]


def test_sums_of_different_things_are_refused():
    first = state(merge([node(0, sources=[("a", "gpu"), ("package-0", "cpu")])]))
    found = merge([node(0)], first)
    assert math.isnan(found["energy_j"]) and "measured cpu, gpu, and this one gpu" in found["reason"]
