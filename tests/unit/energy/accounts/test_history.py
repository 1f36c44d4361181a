"""`hpcdist energy report` and what it reads: runs of several starts, under way, unmeasured, cut off, foreign."""

import json
import math

import click.testing
import numpy as np
import pytest

from hpcdist.batch.schedulers import dispatch
from hpcdist.batch.schedulers.base import JobState
from hpcdist.cli.energy import report as energy_report
from hpcdist.energy.accounts import energy_metrics
from hpcdist.energy.monitor import tables
from hpcdist.energy.monitor.sampler import DrainedSamples
from hpcdist.energy.monitor.tables import NodeRows
from hpcdist.energy.sources.counters import SourceInfo
from hpcdist.energy.sources.utilisation import COLUMNS
from hpcdist.errors import HpcdistError, StorageError, UsageError
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.training.use_cases import energy_figures

WATTS = {"cpu": 100.0, "gpu": 300.0}
SOURCES = (("cpu", "package-0"), ("gpu", "GPU-1"))
STEP_S = 0.5


def node_rows(index, sources, seconds, abouts=None, gaps=()):
    """The samples of a node whose sources draw steady watts, ten a second."""
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


def run(path, starts=((1, 20),), nodes=1, sources=SOURCES, loss=lambda step: 4.0 - step / 10, **more):
    """Write the metrics of a run: for each start the first and last step that are kept, and its samples."""
    path.mkdir(exist_ok=True)
    row = dict.fromkeys(PER_RANK, np.full(2, STEP_S))
    for index, (first, last) in enumerate(starts):
        with MetricsWriter(path / "metrics.h5", 2, None if index == 0 else first - 1) as writer:
            for step in range(first, last + 1):
                writer.append(step=step, loss=loss(step), learning_rate=0.1, tokens=64, **row)
            seconds = STEP_S * (last - first + 1)
            rows = [node_rows(node, sources, seconds, **more) for node in range(nodes)]
            writer.include(lambda file, session, rows=rows: tables.append(file, session, rows))
    return path


def usage(path, **changes):
    phases = {
        "training": {"joules": 3600.0, "seconds": 9.0, "windows": 1},
        "checkpoint": {"joules": 400.0, "seconds": 1.0, "windows": 2},
    }
    told = {
        "compute": {"joules": 3000.0, "error_j": 20.0, "seconds": 7.0},
        "idle": {"joules": None, "error_j": None, "seconds": 2.0},
    }
    joules = {"by_kind": {"cpu": 1000.0, "gpu": 3000.0}, "phases": phases, "reason": None, "label": ""} | changes
    (path / "usage.json").write_text(json.dumps({"since_step": 0, "joules": joules, "activities": told}))


def report(*arguments):
    result = click.testing.CliRunner().invoke(energy_report.command, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def figures(*arguments):
    return json.loads(report(*arguments, "--json"))


def test_starts_and_sources_of_several_nodes(tmp_path):
    path = run(tmp_path / "run", ((1, 20), (11, 30)), nodes=2)  # the second goes on after step 10
    starts = energy_metrics.read(path / "metrics.h5")
    assert [start.seconds for start in starts] == [10, 10]
    assert [start.joules for start in starts] == [pytest.approx(2 * 400 * 10)] * 2
    joules = energy_metrics.joules_at(starts, np.array([0, 0, 1, 1, 5]), np.array([1.0, 99.0, 0.0, 2.5, 1.0]))
    assert joules[:4] == pytest.approx([800, 8000, 8000, 10000]) and math.isnan(joules[4])
    found = figures(path)
    assert [row["steps"] for row in found["starts"]] == [10, 20], "steps that were made again are of the second"
    assert {(row["node"], row["name"]): row["joules"] for row in found["sources"]} == {
        (node, name): pytest.approx(20 * WATTS[kind]) for node in range(2) for kind, name in SOURCES
    }


def test_figures_of_a_run(tmp_path):
    path = run(tmp_path / "run")
    usage(path)
    found = figures(
        path, "--pue", 1.5, "--carbon-intensity", 360, "--carbon-source", "operator", "--price", 0.5, "--currency", "E"
    )
    assert found["energy_j"] == 4000 and found["energy_delay_product_js"] == 40_000 and found["average_w"] == 400
    assert (found["j_per_step"], found["j_per_token"]) == (180.0, pytest.approx(180 / 64))
    assert found["j_per_sample"] is None, "without the recipe nobody knows how many there were"
    assert found["facility_kwh"] == pytest.approx(4000 / 3.6e6 * 1.5)
    assert found["emissions_g"] == pytest.approx(360 * 4000 / 3.6e6 * 1.5)
    assert found["cost"] == pytest.approx(0.5 * 4000 / 3.6e6 * 1.5)
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


def test_joules_to_a_target_go_over_all_starts(tmp_path):
    """Start 0 made 20 steps, of which 10 are kept; the loss is 4 - step / 10, smoothed over five."""
    path = run(tmp_path / "run", ((1, 20), (11, 40)))
    found = figures(path, "--target-loss", 1.5)["target"]
    assert found["step"] == pytest.approx(27, abs=0.01)
    assert found["joules"] == pytest.approx(20 * STEP_S * 400 + 17 * STEP_S * 400, rel=1e-3), "lost work is paid too"
    assert found["seconds"] == pytest.approx(27 * STEP_S)
    never = figures(path, "--target-loss", -5)["target"]
    assert never["joules"] is None and "never came down to -5" in never["reason"]
    assert "to target   loss -5: not known: the loss never" in report(path, "--target-loss", -5)


def test_a_forecast_is_looked_up_when_the_run_was_made(tmp_path):
    path = run(tmp_path / "run")
    usage(path)
    csv = tmp_path / "forecast.csv"
    csv.write_text("time,gCO2/kWh\n2026-01-01T00:00:00Z,100\n2026-01-01T00:00:05Z,300\n")
    began = 1767225600.0  # the first of January 2026, UTC
    missing = figures(path, "--carbon", csv)
    assert missing["emissions_g"] is None and "nobody wrote down when" in missing["emissions_reason"]
    (path / "starts.json").write_text(json.dumps([{"began": began, "seen": began + 10}]))
    found = figures(path, "--carbon", csv)
    assert found["carbon_g_per_kwh"] == pytest.approx(200) and found["carbon_source"] == str(csv)
    assert found["emissions_spread_g"] == [pytest.approx(100 * 4000 / 3.6e6), pytest.approx(300 * 4000 / 3.6e6)]
    assert "(between" in report(path, "--carbon", csv)
    (path / "starts.json").write_text(json.dumps([{"began": began + 100, "seen": began + 110}]))
    outside = figures(path, "--carbon", csv)
    assert outside["emissions_g"] is None and "covers 2026-01-01T00:00:00+00:00" in outside["emissions_reason"]


def test_a_counter_of_the_whole_node_has_its_parts_in_it(tmp_path):
    sources = (*SOURCES, ("node", "node"))
    path = run(
        tmp_path / "run",
        sources=sources,
        abouts=[SourceInfo(note="shared by 2 ranks"), SourceInfo(), SourceInfo(declared=True)],
    )
    assert energy_metrics.read(path / "metrics.h5")[0].joules == pytest.approx(500 * 10)
    shown = report(path)
    assert "shared by 2 ranks; part of the node's, not added" in shown and "declared model, not measured" in shown


def test_what_is_not_known_is_not_zero(tmp_path):
    path = run(tmp_path / "run", gaps=[(7 * 10**12 + 10**9, 1)])
    assert figures(path)["starts"][0]["joules"] is None
    usage(path, reason="node 1 has no gpu: MIG", by_kind={"cpu": 10.0})
    found = figures(path)
    assert found["energy_j"] is None and found["energy_reason"] == "node 1 has no gpu: MIG"
    assert "energy      not measured: node 1 has no gpu: MIG; see `hpcdist energy sources`" in report(path)


def test_a_run_without_energy_says_why(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    with MetricsWriter(path / "metrics.h5", 1, attributes={"energy_j": math.nan, "energy_reason": "no driver"}):
        pass
    assert energy_metrics.read(path / "metrics.h5") == []
    assert "not measured: no driver" in report(path)
    usage(path, reason="no driver", by_kind={})
    kept = json.loads((path / "usage.json").read_text())
    for row in kept["activities"].values():
        row |= {"joules": None, "error_j": None, "reason": "no driver"}
    (path / "usage.json").write_text(json.dumps(kept))
    assert report(path).count("no driver") == 1, "once, not for each part"
    (path / "usage.json").write_text(json.dumps(kept | {"activities": {}}))
    assert "new values" not in report(path) and figures(path)["activities_reason"] == "no driver"
    path = run(tmp_path / "under way")
    assert "keeps no usage.json" in figures(path)["energy_reason"] and figures(path)["starts"]


@pytest.mark.parametrize("damage", ["nothing", "cut", "foreign", "cut usage", "foreign usage"])
@pytest.mark.full_except("cut usage")
def test_damaged_and_foreign_files_are_clean_errors(tmp_path, damage):
    path = run(tmp_path / "run")
    usage(path)
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


def test_options_that_do_not_fit_are_refused(tmp_path):
    for options in (("--carbon-intensity", 1, "--carbon", "x.csv"), ("--carbon-source", "operator")):
        with pytest.raises(UsageError):
            report(tmp_path, *options)
    with pytest.raises(HpcdistError, match=r"x\.csv"):
        report(run(tmp_path / "run"), "--carbon", "x.csv")


def test_slurms_own_figure_is_a_cross_check(tmp_path, monkeypatch):
    path = run(tmp_path / "run")
    usage(path)
    assert figures(path, "--slurm")["slurm"]["reason"].endswith("has no ledger of jobs")
    monkeypatch.setattr(energy_figures.ledger, "jobs", lambda entries: {"17": None})
    known = [
        JobState(id="17", state="COMPLETED", energy_j=3000.0),
        JobState(id="17", state="COMPLETED", energy_j=2000.0),
    ]
    monkeypatch.setattr(dispatch, "accounts", lambda jobs: (known, ""))
    found = figures(path, "--slurm")["slurm"]
    assert (found["energy_j"], found["ratio"], found["jobs"]) == (5000, 1.25, ["17"])
    assert "Slurm       5,000.0 J of 17, 1.25 times what the run measured" in report(path, "--slurm")
    blind = [JobState(id="17", state="COMPLETED", energy_reason="Slurm measured none", elapsed_s=3.0)]
    monkeypatch.setattr(dispatch, "accounts", lambda jobs: (blind, ""))
    assert figures(path, "--slurm")["slurm"]["reason"] == "Slurm measured none"
    monkeypatch.setattr(dispatch, "accounts", lambda jobs: ([], "sacct has no accounts"))
    assert "Slurm       no figure: sacct has no accounts" in report(path, "--slurm")


@pytest.mark.parametrize("options", [("--price", 0.5), ("--currency", "E")])
def test_a_price_is_in_a_currency(tmp_path, options):
    path = run(tmp_path / "run")
    usage(path)
    with pytest.raises(UsageError, match="--currency"):
        figures(path, *options)
