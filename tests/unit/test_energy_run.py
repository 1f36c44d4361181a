"""The energy of a run: what the summary says, whose GPU is asked for, and from which step joules count."""

import json
import math

import numpy as np
import pytest

from hpcdist.arrays import device
from hpcdist.checkpoint.save import save
from hpcdist.comm.solo import solo
from hpcdist.telemetry.metrics import PER_RANK, MetricsWriter
from hpcdist.telemetry.report import report as run_report
from hpcdist.telemetry.report import text
from hpcdist.training import energy
from hpcdist.training.energy import Energy, described, energy_attributes, summary
from hpcdist.training.recipe import load


def report(**changes):
    phases = {
        "training": {"joules": 90.0, "seconds": 9.0, "windows": 1, "reason": None},
        "checkpoint": {"joules": math.nan, "seconds": 0.1, "windows": 1, "reason": "too short"},
    }
    source = {"node": 0, "name": "a", "kind": "gpu", "joules": 91.0, "update_s": 0.1, "failed_reads": 0}
    full = {"energy_j": 91.0, "reason": None, "by_kind": {"gpu": 91.0}, "phases": phases, "not_included": ["cpu: no"]}
    return full | {"sources": [source]} | changes


def test_figures_are_json_and_nothing_is_zero_that_was_not_measured():
    figures = summary(report(), 30)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["energy_j"] == 91 and figures["j_per_step"] == 3 and figures["energy_not_included"] == ["cpu: no"]
    assert figures["energy_j_by_phase"] == {"training": 90.0, "checkpoint": None}
    assert figures["energy_reason_by_phase"] == {"checkpoint": "too short"}
    assert described(figures) == "energy 91.0 J of gpu (training 90.0, checkpoint unknown); 3 J a step"
    assert energy_attributes(figures) == {"energy_j": 91.0, "j_per_step": 3.0, "energy_reason": ""}


def test_an_unmeasured_run_says_why():
    figures = summary(report(energy_j=math.nan, reason="nobody may read", by_kind={}, phases={}, sources=[]), 30)
    assert figures["energy_j"] is None and figures["j_per_step"] is None
    assert described(figures) == "energy not measured: nobody may read"
    found = energy_attributes(figures)
    assert math.isnan(found["energy_j"]) and found["energy_reason"] == "nobody may read"


def test_no_step_has_no_joules_a_step():
    assert summary(report(), 0)["j_per_step"] is None


def test_a_job_on_gpus_asks_for_the_one_it_computes_on_and_waits_for_it(monkeypatch):
    asked = {}
    monkeypatch.setattr(device, "bus_id", lambda: "0000:1b:00.0")
    monkeypatch.setattr(energy, "Monitor", lambda comm, config, **options: asked.update(options))
    Energy(solo(), load(overrides=["run.device=gpu"], environment={}).recipe, None)
    assert asked == {"bus_id": "0000:1b:00.0", "synchronise": device.synchronise}
    asked.clear()
    Energy(solo(), load(environment={}).recipe, None)
    assert asked == {}


@pytest.mark.parametrize("version", ["with", "without"])
def test_joules_count_from_where_the_checkpoint_says(tmp_path, version):
    used = {"since_step": 3, "joules": {"by_kind": {"cpu": 5.0}, "phases": {}, "reason": None}}
    kept = {"energy": used} if version == "with" else {}
    path = save(tmp_path, 8, [], {"steps": 8, **kept}, solo())
    recipe = load(overrides=["energy.sources=none"], environment={}).recipe
    state = Energy(solo(), recipe, path).state()
    assert state["since_step"] == (3 if version == "with" else 8)
    assert ("an earlier start of this run: measured cpu" in state["joules"]["reason"]) is (version == "with")


@pytest.mark.parametrize("record", ["newer", "damaged", "foreign"])
def test_what_a_killed_start_used_after_its_checkpoint_counts(tmp_path, record, capfd):
    used = {"since_step": 3, "joules": {"by_kind": {"cpu": 5.0}, "phases": {}, "reason": None}}
    path = save(tmp_path / "checkpoints", 8, [], {"steps": 8, "energy": used | {"since_step": 4}}, solo())
    noted = {"newer": json.dumps(used), "damaged": json.dumps(used)[:20], "foreign": '{"since_step": "3"}'}[record]
    (tmp_path / "usage.json").write_text(noted)
    recipe = load(overrides=["energy.sources=none"], environment={}).recipe
    found = Energy(solo(), recipe, path, tmp_path)
    assert found.state()["since_step"] == (3 if record == "newer" else 4)
    assert ("usage.json cannot be read" in capfd.readouterr().err) is (record != "newer")
    found.note()
    assert Energy(solo(), recipe, None, tmp_path).state()["since_step"] == found.state()["since_step"]


@pytest.mark.parametrize(
    ("attributes", "line"),
    [
        ({"energy_j": 1234.5, "j_per_step": 2.0, "energy_reason": ""}, "energy     1,234.5 J, training 2 J a step"),
        ({"energy_j": 9.0, "j_per_step": math.nan, "energy_reason": ""}, "energy     9.0 J, training unknown"),
        ({"energy_j": math.nan, "j_per_step": math.nan, "energy_reason": "no"}, "energy     unknown (no)"),
    ],
)
def test_the_report_of_a_run_says_it_too(tmp_path, attributes, line):
    row = dict.fromkeys(PER_RANK, np.ones(1))
    with MetricsWriter(tmp_path / "metrics.h5", 1, attributes=attributes) as writer:
        writer.append(step=1, loss=1.0, learning_rate=0.1, tokens=1, **row)
    assert line in text(run_report(tmp_path)).splitlines()
