"""The data of page charts for counters, utilisation, and one step: known answers."""

import json

import numpy as np
import pytest

from hpcdist.comm.record.spans import Spans
from hpcdist.errors import StorageError
from hpcdist.hdf5 import datasets, files
from hpcdist.telemetry.metrics.step_metrics import SCHEMA, VERSION, MetricsWriter
from hpcdist.telemetry.page import energy_data

S, MS = 10**9, 10**6


def counters(rows):
    """Return samples of counters at constant power: rows of (session, node, source, watts, begin_s, end_s)."""
    results = {name: [] for name in energy_data.ENERGY_COLUMNS}
    for session, node, source, watts, begin, end in rows:
        seconds = np.linspace(begin, end, 50)
        results["t_mono_ns"] += (seconds * S).astype(np.int64).tolist()
        results["energy_mj"] += (12345 + watts * (seconds - begin) * 1e3).astype(np.int64).tolist()
        for name, value in (("session", session), ("node", node), ("source", source)):
            results[name] += [value] * 50
    return {name: np.array(values) for name, values in results.items()}


def sources(*rows):
    results = {name: np.array([row[at] for row in rows]) for at, name in enumerate(("session", "node", "source"))}
    return results | {"kind": np.array([row[3].encode() for row in rows], "S8")}


def test_power_and_joules_are_summed_over_nodes_and_starts(rng):
    samples = counters(
        [(0, 0, 0, 100, 1000, 1100), (0, 1, 0, 50, 9000, 9100), (0, 0, 1, 10, 1000, 1100), (1, 0, 0, 200, 50, 150)]
    )
    order = rng.permutation(len(samples["session"]))  # as nodes bring them, in any order
    samples = {name: values[order] for name, values in samples.items()}
    kinds = sources((0, 0, 0, "gpu"), (0, 1, 0, "gpu"), (0, 0, 1, "dram"), (1, 0, 0, "gpu"))
    result = energy_data.energy_curves(samples, kinds)
    assert set(result) == {"gpu", "dram"}
    gpu = result["gpu"]
    first, second = gpu.hours < 100 / 3600 - 1e-9, gpu.hours > 100 / 3600 + 1e-9
    assert np.allclose(gpu.watts[first][:-1], 150, rtol=0.01) and np.nanmax(gpu.watts[first]) < 155
    assert np.allclose(gpu.watts[second][1:-1], 200, rtol=0.01)
    assert gpu.joules[-1] == pytest.approx(35_000, rel=1e-3) and gpu.hours[-1] == pytest.approx(200 / 3600)
    assert np.nanmax(result["dram"].joules) == pytest.approx(1000, rel=1e-3)
    assert np.isnan(result["dram"].joules[second]).all(), "what was not measured in the second start is a gap"


def test_lost_source_is_a_gap_and_not_zero():
    samples = counters([(0, 0, 0, 100, 0, 100), (0, 0, 1, 100, 0, 50)])
    result = energy_data.energy_curves(samples, sources((0, 0, 0, "gpu"), (0, 0, 1, "gpu")))["gpu"]
    late = result.hours > 60 / 3600
    assert np.isnan(result.watts[late]).all() and np.isnan(result.joules[late]).all()
    assert np.allclose(result.watts[result.hours < 45 / 3600], 200, rtol=0.01)


def test_node_counter_includes_the_other_sources():
    assert energy_data.total_joules({"node": 100.0, "cpu": 30.0, "gpu": 60.0}) == 100.0
    assert energy_data.total_joules({"cpu": 30.0, "gpu": 60.0}) == 90.0


@pytest.mark.parametrize("kept", (b"", b"[]", b'{"joules": 5}', b'{"joules": {"by_kind": {"gpu": null}}}', b"\xff{"))
def test_energy_record_without_values_is_none(tmp_path, kept):
    (tmp_path / "usage.json").write_bytes(kept)
    result = energy_data.read_energy(tmp_path, {"energy_j": float("nan"), "energy_reason": "no driver"})
    assert result.joules is None and result.reason == "no driver"
    (tmp_path / "usage.json").unlink()
    assert energy_data.read_energy(tmp_path, {}).reason == energy_data.NOT_KEPT


def test_running_job_has_the_joules_of_its_record(tmp_path):
    kept = {"by_kind": {"gpu": 5.0, "cpu": 2.0}, "phases": {}, "reason": None}
    (tmp_path / "usage.json").write_text(json.dumps({"joules": kept}))
    assert energy_data.read_energy(tmp_path, {}).joules == 7.0


def test_resumed_run_does_not_repeat_joules_of_the_earlier_start(tmp_path):
    ended = {"energy_j": 100.0, "j_per_step": 9.0}
    kept = {"by_kind": {"cpu": 400.0}, "phases": {"training": {"joules": 360.0, "seconds": 9.0}}, "reason": None}
    (tmp_path / "usage.json").write_text(json.dumps({"since_step": 2, "joules": kept}))
    result = energy_data.read_energy(tmp_path, ended, 32)
    assert (result.joules, result.j_per_step, result.renewed) == (400.0, 12.0, True)
    assert energy_data.read_energy(tmp_path, {}, 32).j_per_step == 12.0, "the first start is under way"
    assert energy_data.read_energy(tmp_path, {}, 2).j_per_step is None
    output = energy_data.read_energy(tmp_path, {"energy_j": 400.0, "j_per_step": 9.0}, 32)
    assert (output.joules, output.j_per_step, output.renewed) == (400.0, 9.0, False), "as the run said when it ended"


def test_utilisation_is_the_mean_over_the_nodes():
    seconds = np.arange(100)
    rows = {
        "session": np.repeat([0, 0, 1], 100),
        "node": np.repeat([0, 1, 0], 100),
        "t_mono_ns": np.concatenate([seconds, seconds + 7777, seconds + 5]) * S,
        "cpu": np.repeat([1.0, 0.5, 0.25], 100),
        "gpu": np.full(300, np.nan),
    }
    result = energy_data.mean_over_nodes(rows)
    assert list(result.shares) == ["cpu"], "what nobody knows is left out"
    first = result.hours < 98 / 3600
    assert np.allclose(result.shares["cpu"][first], 0.75)
    assert np.allclose(result.shares["cpu"][result.hours > 100 / 3600], 0.25)
    assert result.hours[-1] == pytest.approx(198 / 3600, rel=0.02)


def test_damaged_tables_are_reported(tmp_path):
    path = tmp_path / "metrics.h5"
    with MetricsWriter(path, 1):
        pass
    assert energy_data.read_utilisation(path) is None and energy_data.read_curves(path).by_kind == {}
    with files.edit(path, SCHEMA, VERSION) as file:
        datasets.create(file, "energy/utilisation", [datasets.Column("t_mono_ns", "i8", "ns", "x")])
        datasets.create(file, "energy/samples", [datasets.Column("energy_mj", "i8", "mJ", "x")])
        for name in ("utilisation/t_mono_ns", "samples/energy_mj"):
            file[f"energy/{name}"].resize((3,))
        file["energy/utilisation/session"] = 5
    for look in (lambda: energy_data.read_utilisation(path), lambda: energy_data.read_curves(path)):
        with pytest.raises(StorageError, match="damaged"):
            look()


# --- one step ---------------------------------------------------------------------------------------------------------


def lanes(folder, world, lengths, capacity=64, at=0):
    (folder / "recorder").mkdir(exist_ok=True)
    for rank in range(world):
        output = Spans(folder / f"recorder/rank-{rank:05d}.spans", rank, world, capacity)
        begin = at
        for step, length in enumerate(lengths, 1):
            output.add("compute", "FORWARD", step, begin + rank * MS, begin + (length - 2) * MS, 0)
            output.add("step", "step", step, begin + rank * MS, begin + length * MS)
            begin += length * MS
        output.close()


def test_timeline_shows_the_step_of_median_length(tmp_path):
    lanes(tmp_path, 3, [900, 50, 40, 60, 45])
    result = energy_data.read(tmp_path)
    assert result.step == 2 and [lane.rank for lane in result.lanes] == [0, 1, 2] and result.clocks == ""
    assert result.lanes[2].begin_s == pytest.approx(0.002) and result.seconds == pytest.approx(0.050)
    assert result.totals() == pytest.approx({"compute": 0.047})


def test_step_with_an_overwritten_start_is_not_chosen(tmp_path):
    lanes(tmp_path, 2, [50, 40, 60, 45, 70], capacity=5)
    result = energy_data.read(tmp_path)
    assert result.step in (4, 5) and all(lane.spans for lane in result.lanes)


def test_missing_or_foreign_span_files_give_a_reason(tmp_path):
    assert energy_data.read(tmp_path).reason == energy_data.NO_FILES
    lanes(tmp_path, 2, [])
    assert energy_data.read(tmp_path).reason == energy_data.NO_STEP
    (tmp_path / "recorder/rank-00000.spans").write_bytes(b"x" * 30)
    (tmp_path / "recorder/rank-00001.spans").write_bytes(b"")
    assert "not a file of spans" in energy_data.read(tmp_path).reason
    lanes(tmp_path, 2, [50])
    (tmp_path / "recorder/rank-x.spans").write_bytes(b"")
    assert energy_data.read(tmp_path).step == 1


def test_ranks_that_left_are_not_shown(tmp_path):
    lanes(tmp_path, 4, [50])
    lanes(tmp_path, 2, [60])
    result = energy_data.read(tmp_path)
    assert [lane.rank for lane in result.lanes] == [0, 1] and result.world == 2


@pytest.mark.parametrize("slowest", (None, 0, 501, 999))
def test_many_ranks_are_sampled_evenly(slowest):
    result = energy_data.select_evenly(range(1000), slowest)
    assert len(result) == energy_data.MAX_RANKS and result == sorted(set(result))
    assert result[0] == 0 and result[-1] == 999 and (slowest is None or slowest in result)
    assert max(np.diff(result)) < 70
    assert energy_data.select_evenly(range(5), 3) == [0, 1, 2, 3, 4]


def test_nodes_without_compared_clocks_use_wall_clocks(tmp_path):
    lanes(tmp_path, 1, [50])
    result = energy_data.spans.parse((tmp_path / "recorder/rank-00000.spans").read_bytes(), tmp_path)
    one = energy_data.replace(result, boot_id="a", world=2, wall_ns=1000 * S, monotonic_ns=10 * S)
    late = one.spans[-1]
    elsewhere = {"boot_id": "b", "wall_ns": 1000 * S + 3 * MS, "monotonic_ns": 510 * S}
    offsets, worth = energy_data._offsets([one, energy_data.replace(one, rank=1, **elsewhere)], late.step, None)
    assert "wall clocks" in worth
    assert offsets[1] - offsets[0] == -500 * S + 3 * MS
