"""`hpcdist energy report`: runs with several starts, unfinished or unmeasured runs, and damaged or foreign files."""

import json
import math

import click.testing
import numpy as np
import pytest

from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.base import JobState
from hpcdist.cli.runs import energy as energy_report
from hpcdist.energy import energy_metrics
from hpcdist.energy.node_rows import NodeRows, append_rows
from hpcdist.energy.sampler import DrainedSamples
from hpcdist.energy.sources.counters import SourceInfo
from hpcdist.energy.sources.utilisation import COLUMNS
from hpcdist.errors import HpcdistError, StorageError, UsageError
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.use_cases import energy_figures

WATTS = {"cpu": 100.0, "gpu": 300.0}
SOURCES = (("cpu", "package-0"), ("gpu", "GPU-1"))
STEP_S = 0.5


def node_rows(index, sources, seconds, abouts=None, gaps=()):
    """Return ten samples per second of a node whose sources draw constant power."""
    times = np.arange(0, round(seconds * 10) + 1) * 10**8
    rows = [(7 * 10**12 + t, source, 10**9 + round(WATTS.get(kind, 500.0) * t / 1e6))
            for t in times for source, (kind, _) in enumerate(sources)]  # fmt: skip
    samples = np.array(rows, np.int64)
    empty = np.empty((0, 3), np.int64)
    abouts = abouts or [SourceInfo()] * len(sources)
    looks = np.empty(0, np.int64), np.empty((0, len(COLUMNS)))
    drained = DrainedSamples(samples, empty, np.array(gaps, np.int64).reshape(-1, 2), *looks)
    return NodeRows(
        index, [(kind, name, about) for (kind, name), about in zip(sources, abouts, strict=True)], drained, []
    )


def write_run(path, starts=((1, 20),), nodes=1, sources=SOURCES, loss=lambda step: 4.0 - step / 10, **more):
    """Write the metrics of a run. ``starts`` has the first and last kept step of each start."""
    path.mkdir(exist_ok=True)
    row = dict.fromkeys(PER_RANK, np.full(2, STEP_S))
    for index, (first, last) in enumerate(starts):
        with MetricsWriter(path / "metrics.h5", 2, None if index == 0 else first - 1) as writer:
            for step in range(first, last + 1):
                writer.append(step=step, loss=loss(step), learning_rate=0.1, tokens=64, **row)
            seconds = STEP_S * (last - first + 1)
            rows = [node_rows(node, sources, seconds, **more) for node in range(nodes)]
            writer.include(lambda file, session, rows=rows: append_rows(file, session, rows))
    return path


def write_usage(path, **changes):
    phases = {
        "training": {"joules": 3600.0, "seconds": 9.0, "windows": 1},
        "checkpoint": {"joules": 400.0, "seconds": 1.0, "windows": 2},
    }
    lines = {
        "compute": {"joules": 3000.0, "error_j": 20.0, "seconds": 7.0},
        "idle": {"joules": None, "error_j": None, "seconds": 2.0},
    }
    joules = {"by_kind": {"cpu": 1000.0, "gpu": 3000.0}, "phases": phases, "reason": None, "label": ""} | changes
    (path / "usage.json").write_text(json.dumps({"since_step": 0, "joules": joules, "activities": lines}))


def report(*arguments):
    result = click.testing.CliRunner().invoke(energy_report.command, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def figures(*arguments):
    return json.loads(report(*arguments, "--json"))


def test_joules_are_summed_per_start_and_per_source(tmp_path):
    path = write_run(tmp_path / "run", ((1, 20), (11, 30)), nodes=2)  # the second goes on after step 10
    starts = energy_metrics.read(path / "metrics.h5")
    assert [start.seconds for start in starts] == [10, 10]
    assert [start.joules for start in starts] == [pytest.approx(2 * 400 * 10)] * 2
    joules = energy_metrics.joules_at(starts, np.array([0, 0, 1, 1, 5]), np.array([1.0, 99.0, 0.0, 2.5, 1.0]))
    assert joules[:4] == pytest.approx([800, 8000, 8000, 10000]) and math.isnan(joules[4])
    result = figures(path)
    assert [row["steps"] for row in result["starts"]] == [10, 20], "repeated steps belong to the second start"
    assert {(row["node"], row["name"]): row["joules"] for row in result["sources"]} == {
        (node, name): pytest.approx(20 * WATTS[kind]) for node in range(2) for kind, name in SOURCES
    }


def test_report_figures_of_a_run(tmp_path):
    path = write_run(tmp_path / "run")
    write_usage(path)
    result = figures(
        path, "--pue", 1.5, "--carbon-intensity", 360, "--carbon-source", "operator", "--price", 0.5, "--currency", "E"
    )
    assert result["energy_j"] == 4000 and result["energy_delay_product_js"] == 40_000 and result["average_w"] == 400
    assert (result["j_per_step"], result["j_per_token"]) == (180.0, pytest.approx(180 / 64))
    assert result["j_per_sample"] is None, "the number of samples is unknown without the recipe"
    assert result["facility_kwh"] == pytest.approx(4000 / 3.6e6 * 1.5)
    assert result["emissions_g"] == pytest.approx(360 * 4000 / 3.6e6 * 1.5)
    assert result["cost"] == pytest.approx(0.5 * 4000 / 3.6e6 * 1.5)
    shown = report(path, "--carbon-intensity", 360, "--carbon-source", "operator", "--carbon-date", "2025")
    for line in (
        "energy      4,000.0 J of cpu + gpu",
        "training    3,600.0  90.0%      9.0  400.0",
        "  compute   3,000.0  75.0%      7.0  428.6  +- 20.0 J",
        "  idle      unknown             2.0",
        "training    180 J a step",
        "            2.812 J a token",
        "emissions   0.4 g CO2e at 360 g/kWh (operator, 2025)",
        "   0  gpu   GPU-1      3,000.0",
    ):
        assert line in shown.splitlines(), shown


def test_joules_to_target_loss_include_all_starts(tmp_path):
    """Start 0 made 20 steps, of which 10 are kept; the loss is 4 - step / 10, smoothed over five."""
    path = write_run(tmp_path / "run", ((1, 20), (11, 40)))
    result = figures(path, "--target-loss", 1.5)["target"]
    assert result["step"] == pytest.approx(27, abs=0.01)
    assert result["joules"] == pytest.approx(20 * STEP_S * 400 + 17 * STEP_S * 400, rel=1e-3), "lost work is included"
    assert result["seconds"] == pytest.approx(27 * STEP_S)
    never = figures(path, "--target-loss", -5)["target"]
    assert never["joules"] is None and "never reached -5" in never["reason"]
    assert "to target   loss -5: not known: the loss never" in report(path, "--target-loss", -5)


def test_carbon_forecast_is_read_at_the_time_of_the_run(tmp_path):
    path = write_run(tmp_path / "run")
    write_usage(path)
    csv = tmp_path / "forecast.csv"
    csv.write_text("time,gCO2/kWh\n2026-01-01T00:00:00Z,100\n2026-01-01T00:00:05Z,300\n")
    began = 1767225600.0  # the first of January 2026, UTC
    missing = figures(path, "--carbon", csv)
    assert missing["emissions_g"] is None and "the begin of a" in missing["emissions_reason"]
    (path / "starts.json").write_text(json.dumps([{"began": began, "seen": began + 10}]))
    result = figures(path, "--carbon", csv)
    assert result["carbon_g_per_kwh"] == pytest.approx(200) and result["carbon_source"] == str(csv)
    assert result["emissions_spread_g"] == [pytest.approx(100 * 4000 / 3.6e6), pytest.approx(300 * 4000 / 3.6e6)]
    assert "(between" in report(path, "--carbon", csv)
    (path / "starts.json").write_text(json.dumps([{"began": began + 100, "seen": began + 110}]))
    outside = figures(path, "--carbon", csv)
    assert outside["emissions_g"] is None and "covers 2026-01-01T00:00:00+00:00" in outside["emissions_reason"]


def test_node_counter_includes_its_parts(tmp_path):
    sources = (*SOURCES, ("node", "node"))
    path = write_run(
        tmp_path / "run",
        sources=sources,
        abouts=[SourceInfo(note="shared by 2 ranks"), SourceInfo(), SourceInfo(declared=True)],
    )
    assert energy_metrics.read(path / "metrics.h5")[0].joules == pytest.approx(500 * 10)
    shown = report(path)
    assert (
        "shared by 2 ranks; included in the node's value, not added" in shown
        and "declared model, not measured" in shown
    )


def test_unknown_energy_is_none(tmp_path):
    path = write_run(tmp_path / "run", gaps=[(7 * 10**12 + 10**9, 1)])
    assert figures(path)["starts"][0]["joules"] is None
    write_usage(path, reason="node 1 has no gpu: MIG", by_kind={"cpu": 10.0})
    result = figures(path)
    assert result["energy_j"] is None and result["energy_reason"] == "node 1 has no gpu: MIG"
    assert "energy      not measured: node 1 has no gpu: MIG; see `hpcdist energy sources`" in report(path)


def test_run_without_energy_reports_reason(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    with MetricsWriter(path / "metrics.h5", 1, attributes={"energy_j": math.nan, "energy_reason": "no driver"}):
        pass
    assert energy_metrics.read(path / "metrics.h5") == []
    assert "not measured: no driver" in report(path)
    write_usage(path, reason="no driver", by_kind={})
    kept = json.loads((path / "usage.json").read_text())
    for row in kept["activities"].values():
        row |= {"joules": None, "error_j": None, "reason": "no driver"}
    (path / "usage.json").write_text(json.dumps(kept))
    assert report(path).count("no driver") == 1, "once, not for each part"
    (path / "usage.json").write_text(json.dumps(kept | {"activities": {}}))
    assert "new values" not in report(path) and figures(path)["activities_reason"] == "no driver"
    path = write_run(tmp_path / "under way")
    assert "keeps no usage.json" in figures(path)["energy_reason"] and figures(path)["starts"]


@pytest.mark.parametrize("damage", ["nothing", "cut", "foreign", "cut usage", "foreign usage"])
@pytest.mark.full_except("cut usage")
def test_damaged_and_foreign_files_are_rejected(tmp_path, damage):
    path = write_run(tmp_path / "run")
    write_usage(path)
    if damage == "nothing":
        (path / "metrics.h5").unlink()
    elif damage == "cut":
        whole = (path / "metrics.h5").read_bytes()
        (path / "metrics.h5").write_bytes(whole[: len(whole) // 2])
    elif damage == "foreign":
        (path / "metrics.h5").write_text("not HDF5")
    else:
        text = (path / "usage.json").read_text()
        (path / "usage.json").write_text(text[:40] if damage.startswith("cut") else '{"energy": 3}')
    with pytest.raises(StorageError) as caught:
        report(path)
    assert str(path) in str(caught.value)


def test_conflicting_options_are_rejected(tmp_path):
    for options in (("--carbon-intensity", 1, "--carbon", "x.csv"), ("--carbon-source", "operator")):
        with pytest.raises(UsageError):
            report(tmp_path, *options)
    with pytest.raises(HpcdistError, match=r"x\.csv"):
        report(write_run(tmp_path / "run"), "--carbon", "x.csv")


def test_slurm_energy_is_reported_as_cross_check(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run")
    write_usage(path)
    assert figures(path, "--slurm")["slurm"]["reason"].endswith("has no ledger of jobs")
    monkeypatch.setattr(energy_figures.ledger, "jobs", lambda entries: {"17": None})
    reference = [
        JobState(id="17", state="COMPLETED", energy_j=3000.0),
        JobState(id="17", state="COMPLETED", energy_j=2000.0),
    ]
    monkeypatch.setattr(dispatch, "accounts", lambda jobs: (reference, ""))
    result = figures(path, "--slurm")["slurm"]
    assert (result["energy_j"], result["ratio"], result["jobs"]) == (5000, 1.25, ["17"])
    assert "Slurm       5,000.0 J of 17, 1.25 times the energy measured by the run" in report(path, "--slurm")
    blind = [JobState(id="17", state="COMPLETED", energy_reason="Slurm measured no energy", elapsed_s=3.0)]
    monkeypatch.setattr(dispatch, "accounts", lambda jobs: (blind, ""))
    assert figures(path, "--slurm")["slurm"]["reason"] == "Slurm measured no energy"
    monkeypatch.setattr(dispatch, "accounts", lambda jobs: ([], "sacct has no accounts"))
    assert "Slurm       no figure: sacct has no accounts" in report(path, "--slurm")


@pytest.mark.parametrize("options", [("--price", 0.5), ("--currency", "E")])
def test_price_and_currency_need_each_other(tmp_path, options):
    path = write_run(tmp_path / "run")
    write_usage(path)
    with pytest.raises(UsageError, match="--currency"):
        figures(path, *options)
