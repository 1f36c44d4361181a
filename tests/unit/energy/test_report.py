"""The energy report: sums over nodes, and NaN with a reason that names the node if a value is missing."""

import json
import math

import pytest

from hpcdist.energy.report import NodeContribution, SourceResult, merge, state

NO_RAPL = {"cpu": "/sys/class/powercap does not exist", "dram": "/sys/class/powercap does not exist"}
NO_GPU = {"gpu": "no NVIDIA driver answers"}


def node(index, *, phases=None, sources=(("a", "gpu"),), missing=NO_RAPL, needed=("gpu",), seconds=10.0, **source):
    """Return a node whose sources each used 1 J per second in `phases` (name -> seconds)."""
    phases = {"training": seconds} if phases is None else phases
    shown = {
        name: {"seconds": s, "windows": 1, "shortest_s": s, "mj": [1e3 * s] * len(sources)}
        for name, s in phases.items()
    }
    results = [SourceResult(name, kind, **{"update_s": 0.1, **source}) for name, kind in sources]
    totals = [1e3 * sum(phases.values())] * len(sources)
    return NodeContribution(index, results, shown, totals, missing, frozenset(needed))


def test_report_sums_over_nodes_sources_and_phases():
    two = [("a", "gpu"), ("package-0", "cpu")]
    nodes = [
        node(0, sources=two, phases={"training": 10.0, "checkpoint": 1.0}, missing={"dram": "no dram zone"}),
        node(1, sources=two, phases={"training": 12.0, "checkpoint": 2.0}, missing={"dram": "no dram zone"}),
    ]
    result = merge(nodes)
    assert result["energy_j"] == 50 and result["reason"] is None
    assert result["by_kind"] == {"gpu": 25, "cpu": 25}
    assert [result["phases"][name]["joules"] for name in ("training", "checkpoint")] == [44, 6]
    assert [result["phases"][name]["seconds"] for name in ("training", "checkpoint")] == [12, 2]
    assert result["not_included"] == ["dram (node 0, 1): no dram zone"]
    assert [(row["node"], row["name"], row["joules"]) for row in result["sources"]] == [
        (0, "a", 11),
        (0, "package-0", 11),
        (1, "a", 14),
        (1, "package-0", 14),
    ]


def test_report_without_sources_is_nan_with_all_reasons():
    result = merge([node(0, sources=(), missing=NO_GPU | NO_RAPL, needed=())])
    assert math.isnan(result["energy_j"]) and math.isnan(result["phases"]["training"]["joules"])
    assert all(word in result["reason"] for word in ("gpu", "no NVIDIA driver", "cpu", "powercap does not exist"))
    assert result["phases"]["training"]["seconds"] == 10


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_node_without_sources_is_named_in_reason(kind):
    nodes = [node(0, sources=[("a", kind)]), node(1, sources=(), missing=NO_GPU | NO_RAPL, needed=())]
    result = merge(nodes)
    assert math.isnan(result["energy_j"]) and f"node 1 has no {kind}: {(NO_GPU | NO_RAPL)[kind]}" in result["reason"]
    assert math.isnan(result["phases"]["training"]["joules"])


def test_unused_gpus_of_a_node_are_not_missing():
    unused = NodeContribution(1, (), {}, (), NO_GPU | NO_RAPL, unused=frozenset({"gpu"}))
    result = merge([node(0), unused])
    assert result["energy_j"] == 10 and result["reason"] is None


def test_gpu_job_without_gpu_source_has_no_total():
    result = merge([node(0, sources=[("package-0", "cpu")], missing={"gpu": "MIG", "dram": "none"})])
    assert math.isnan(result["energy_j"]) and "node 0 has no gpu: MIG" in result["reason"]
    assert result["by_kind"]["cpu"] == 10, "known values are reported"


def test_too_short_window_has_no_joules_but_total_is_valid():
    result = merge([node(3, phases={"training": 10.0, "checkpoint": 0.19})])
    assert result["energy_j"] == pytest.approx(10.19) and result["phases"]["training"]["joules"] == 10
    checkpoint = result["phases"]["checkpoint"]
    assert math.isnan(checkpoint["joules"])
    assert checkpoint["reason"] == "node 3, a: a window of checkpoint is 0.19 s, shorter than 2 updates of 0.1 s"


def test_too_short_job_has_no_total():
    result = merge([node(0, seconds=0.1)])
    assert math.isnan(result["energy_j"]) and "the whole measurement is 0.1 s" in result["reason"]


def test_counter_that_does_not_move_is_nan():
    result = merge([node(0, update_s=math.nan)])
    assert math.isnan(result["energy_j"]) and "did not move" in result["reason"]


def test_failed_reads_are_counted_and_reported():
    failing = node(0, failed_reads=3, trouble="a: 3 failed reads, the last: GPU is lost")
    failing.phases["training"]["mj"][0] = math.nan
    result = merge([NodeContribution(0, failing.sources, failing.phases, [math.nan], NO_RAPL, frozenset({"gpu"}))])
    assert math.isnan(result["energy_j"]) and "node 0, a: 3 failed reads, the last: GPU is lost" in result["reason"]
    assert result["sources"][0]["failed_reads"] == 3


def test_long_list_of_reasons_is_shortened():
    nodes = [node(index, sources=(), missing=NO_GPU) for index in range(1000)]
    assert merge(nodes)["reason"].endswith("and 996 more reasons")


def test_starts_of_a_run_are_summed_through_json():
    first = json.loads(json.dumps(state(merge([node(0)]))))
    second = json.loads(json.dumps(state(merge([node(0, phases={"training": 5.0, "validation": 1.0})], first))))
    result = merge([node(0, seconds=2.0), node(1, seconds=3.0)], second)  # another number of nodes
    assert result["energy_j"] == 10 + 6 + 5 and result["reason"] is None
    assert result["phases"]["training"]["joules"] == 20 and result["phases"]["validation"]["joules"] == 1
    assert result["phases"]["training"]["seconds"] == 10 + 5 + 3


def test_unmeasured_start_keeps_total_unknown():
    blind = json.loads(json.dumps(state(merge([node(0, sources=(), missing=NO_GPU | NO_RAPL, needed=())]))))
    assert blind["phases"]["training"]["joules"] is None
    for _ in range(3):
        result = merge([node(0)], blind)
        assert math.isnan(result["energy_j"]) and math.isnan(result["phases"]["training"]["joules"])
        assert result["reason"].startswith("an earlier start of this run: no source can be read")
        assert result["reason"].count("an earlier start") == 1
        blind = json.loads(json.dumps(state(result)))


def test_saved_reason_does_not_grow_with_starts():
    reasons, earlier = [], None
    for missing in (NO_GPU, NO_GPU, NO_GPU | NO_RAPL, NO_GPU, NO_GPU | NO_RAPL, NO_GPU):
        earlier = state(merge([node(0, sources=(), missing=missing)], earlier))
        reasons.append(earlier["reason"])
    assert reasons[1] == reasons[0] and not reasons[0].startswith("an earlier")
    assert reasons[5] == reasons[4] == reasons[3]


def test_starts_with_different_sources_have_no_total():
    first = state(merge([node(0, sources=[("a", "gpu"), ("package-0", "cpu")])]))
    result = merge([node(0)], first)
    assert math.isnan(result["energy_j"]) and "measured cpu, gpu, and this one gpu" in result["reason"]
