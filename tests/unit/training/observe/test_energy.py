"""The energy of a run: the summary, the selected GPU, and the step from which joules count."""

import json
import math
import threading
import time

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.arrays.gpu import device
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.record.spans import PHASES
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.energy import phase_shares
from hpcdist.energy.config import EnergyConfig
from hpcdist.energy.sources.discovery import GpuClaim
from hpcdist.telemetry.metrics.step_metrics import PER_RANK, MetricsWriter
from hpcdist.telemetry.report import report as run_report
from hpcdist.telemetry.report import text
from hpcdist.training.observe import energy
from hpcdist.training.observe.energy import EnergyRecorder, energy_attributes, energy_figures
from hpcdist.training.recipe.recipe import load


def rows(**joules):
    phases = {name: {"joules": j, "error_j": 0.1 * j, "seconds": 1.0, "reason": None} for name, j in joules.items()}
    return [{"name": "a", "kind": "gpu", "activities": phases}]


def report(**changes):
    phases = {
        "training": {"joules": 90.0, "seconds": 9.0, "windows": 1, "reason": None},
        "checkpoint": {"joules": math.nan, "seconds": 0.1, "windows": 1, "reason": "too short"},
    }
    source = {"node": 0, "name": "a", "kind": "gpu", "joules": 91.0, "update_s": 0.1, "failed_reads": 0}
    full = {"energy_j": 91.0, "reason": None, "by_kind": {"gpu": 91.0}, "phases": phases, "not_included": ["cpu: no"]}
    return full | {"sources": [source], "parts": {}, "label": "", "sampler_share": math.nan} | changes


def test_figures_are_json_and_missing_values_are_none():
    figures = energy_figures(report(), 30)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["energy_j"] == 91 and figures["j_per_step"] == 3 and figures["energy_not_included"] == ["cpu: no"]
    assert figures["energy_j_by_phase"] == {"training": 90.0, "checkpoint": None}
    assert figures["energy_reason_by_phase"] == {"checkpoint": "too short"}
    result = energy_attributes(figures)
    names = ("energy_j", "j_per_step", "energy_reason", "energy_label")
    assert [result[name] for name in names] == [91.0, 3.0, "", ""]


def test_costs_are_reported_with_their_source():
    output = phase_shares.job_activities(rows(compute=3.0, communication=1.0), ["gpu"], 90.0, None)
    config = EnergyConfig(
        pue=1.2, carbon_g_per_kwh=360, carbon_source="operator", carbon_date="2025", price_per_kwh=0.25, currency="EUR"
    )
    figures = energy_figures(report(energy_j=3.6e6), 30, 120, 1200, activities=output, config=config)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert (figures["j_per_sample"], figures["j_per_token"]) == (0.75, 0.075)
    assert (figures["energy_kwh"], figures["facility_kwh"], figures["emissions_g"]) == (1, 1.2, pytest.approx(432))
    assert figures["energy_j_by_activity"] == {"compute": 67.5, "communication": 22.5}
    assert (figures["cost"], figures["currency"]) == (pytest.approx(0.3), "EUR")


def test_run_without_measurement_reports_the_reason():
    figures = energy_figures(report(energy_j=math.nan, reason="nobody may read", by_kind={}, phases={}, sources=[]), 30)
    assert figures["energy_j"] is None and figures["j_per_step"] is None
    result = energy_attributes(figures)
    assert math.isnan(result["energy_j"]) and result["energy_reason"] == "nobody may read"


def test_joules_per_step_without_steps_is_none():
    assert energy_figures(report(), 0)["j_per_step"] is None


def test_gpu_job_measures_and_synchronises_its_gpu(monkeypatch):
    asked = {}
    monkeypatch.setattr(device, "bus_id", lambda: "0000:1b:00.0")
    monkeypatch.setattr(energy, "EnergyMonitor", lambda comm, config, **options: asked.update(options))
    EnergyRecorder(solo(), load(overrides=["run.device=gpu"], environment={}).recipe, None)
    watched = {"host": None, "deadline_s": math.inf}
    assert asked == {"bus_id": "0000:1b:00.0", "synchronise": device.synchronise, **watched}
    asked.clear()
    EnergyRecorder(solo(), load(environment={}).recipe, None)
    assert asked == watched


@pytest.mark.parametrize("version", ["with", "without"])
def test_joules_count_from_the_step_of_the_checkpoint(tmp_path, version):
    used = {"since_step": 3, "joules": {"by_kind": {"cpu": 5.0}, "phases": {}, "reason": None}}
    kept = {"energy": used} if version == "with" else {}
    path = save(tmp_path, 8, [], {"steps": 8, **kept}, solo())
    recipe = load(overrides=["energy.sources=none"], environment={}).recipe
    state = EnergyRecorder(solo(), recipe, path).state()
    assert state["since_step"] == (3 if version == "with" else 8)
    assert ("an earlier start of this run: measured cpu" in state["joules"]["reason"]) is (version == "with")


@pytest.mark.parametrize("record", ["newer", "damaged", "foreign"])
def test_energy_of_a_killed_start_after_its_checkpoint_counts(tmp_path, record, capfd):
    used = {"since_step": 3, "joules": {"by_kind": {"cpu": 5.0}, "phases": {}, "reason": None}}
    path = save(tmp_path / "checkpoints", 8, [], {"steps": 8, "energy": used | {"since_step": 4}}, solo())
    noted = {"newer": json.dumps(used), "damaged": json.dumps(used)[:20], "foreign": '{"since_step": "3"}'}[record]
    (tmp_path / "usage.json").write_text(noted)
    recipe = load(overrides=["energy.sources=none"], environment={}).recipe
    result = EnergyRecorder(solo(), recipe, path, tmp_path)
    assert result.state()["since_step"] == (3 if record == "newer" else 4)
    assert ("usage.json cannot be read" in capfd.readouterr().err) is (record != "newer")
    result.note()
    assert EnergyRecorder(solo(), recipe, None, tmp_path).state()["since_step"] == result.state()["since_step"]


@cases(
    "attributes, line",
    ({"energy_j": 1234.5, "j_per_step": 2.0, "energy_reason": ""}, "energy          1.234 kJ  (all starts together)"),
    ({"energy_j": 9.0, "j_per_step": math.nan, "energy_reason": ""}, "energy         9 J  (all starts together)"),
    ({"energy_j": math.nan, "j_per_step": math.nan, "energy_reason": "no"}, "no energy: no"),
)
def test_report_of_a_run_includes_the_energy(tmp_path, attributes, line):
    row = dict.fromkeys(PER_RANK, np.ones(1))
    with MetricsWriter(tmp_path / "metrics.h5", 1, attributes=attributes) as writer:
        writer.append(step=1, loss=1.0, learning_rate=0.1, tokens=1, **row)
    assert line in text(run_report(tmp_path)).splitlines()


class Package:
    """A processor in a RAPL tree, whose counter is increased by its workers."""

    def __init__(self, root):
        self.zone = root / "intel-rapl:0"
        self.zone.mkdir(parents=True)
        (self.zone / "name").write_text("package-0\n")
        (self.zone / "max_energy_range_uj").write_text(f"{2**40}\n")
        self.joules = 0.0
        self.spend(0.0)

    def spend(self, joules):
        self.joules += joules
        (self.zone / "new").write_text(f"{round(self.joules * 1e6)}\n")
        (self.zone / "new").replace(self.zone / "energy_uj")


def work(package, watts, seconds):
    """Draw ``watts`` for at least ``seconds`` seconds. Return the joules."""
    begun = last = time.monotonic()
    while last - begun < seconds:
        time.sleep(0.002)
        now = time.monotonic()
        package.spend(watts * (now - last))
        last = now
    return watts * (last - begun)


def train(energy, comm, package, spans, rng, seconds):
    """Make steps of a few hundredths of a second. The first rank of a node draws for all of them. Return the joules."""
    joules, until = dict.fromkeys(("compute", "communication"), 0.0), time.monotonic() + seconds
    while time.monotonic() < until:
        for phase, watts in (("compute", 300.0), ("communication", 60.0)):
            begun = time.monotonic_ns()
            joules[phase] += work(package, watts, rng.uniform(0.005, 0.06))
            spans.append((PHASES.index(phase), begun, time.monotonic_ns()))
    return joules


@pytest.fixture
def packages(tmp_path):
    return [Package(tmp_path / str(node)) for node in range(2)]


def measure(packages, directory, seed, resume=None, seconds=2.0):
    """Train on four ranks of two hosts, each with its counter. Return the figures and the joules of the ranks."""

    def body(comm):
        node, rng = comm.rank // 2, np.random.default_rng([seed, comm.rank // 2])
        root = packages[node].zone.parent
        overrides = ["energy.sources=rapl", f"energy.powercap={root}", "energy.interval_s=0.01", "run.global_batch=8"]
        recipe = load(overrides=[*overrides, "energy.utilisation_s=0"], environment={}).recipe
        spans = []

        def drain():
            taken = np.array(spans, np.int64).reshape(-1, 3)
            spans.clear()
            return taken

        result = EnergyRecorder(comm, recipe, resume, directory, drain, host=f"host {node}")
        joules = {}
        with result.monitor, result.monitor.window("training"):
            for _ in range(2):
                if comm.rank % 2 == 0:
                    done = train(result, comm, packages[node], spans, rng, seconds / 2)
                    joules = {name: joules.get(name, 0.0) + used for name, used in done.items()}
                    lines[node] = list(spans)
                comm.barrier()
                if comm.rank % 2:  # in step with the first rank of its node
                    spans[:] = lines[node]
                result.collect()
                result.note()
        return result.figures(10, 4), joules

    lines = {}
    return run_threads(4, body)


def test_each_gpu_is_attributed_to_its_ranks(packages, monkeypatch):
    claims = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}
    root = packages[0].zone.parent
    overrides = ["energy.sources=rapl", f"energy.powercap={root}", "run.device=gpu", "energy.utilisation_s=0"]
    recipe = load(overrides=overrides, environment={}).recipe
    monkeypatch.setattr(device, "bus_id", lambda: threading.current_thread().name)
    monkeypatch.setattr(device, "synchronise", lambda: None)
    names = {}
    monkeypatch.setattr(energy, "claim_gpus", lambda config, bus_id, environment: GpuClaim((claims[names[bus_id]],)))

    def body(comm):
        names[threading.current_thread().name] = comm.rank
        comm.barrier()
        return EnergyRecorder(comm, recipe, None, None, lambda: np.empty((0, 3), np.int64), host="h")._users

    assert run_threads(3, body) == [{"GPU-a": (0, 2), "GPU-b": (1,)}] * 3


@pytest.mark.alone
@pytest.mark.matrix  # needs a quiet machine: its joules come from intervals of 10 ms
def test_energy_of_two_nodes_is_split_by_activity(packages, tmp_path, rng):
    seed = int(rng.integers(2**32))
    ranks = measure(packages, tmp_path, seed)
    figures = ranks[0][0]
    assert all(result == figures for result, _ in ranks) and figures["energy_reason"] is None
    output = json.loads((tmp_path / "usage.json").read_text())["activities"]  # also of what waited until the end
    assert {name: row["joules"] for name, row in output.items()} == figures["energy_j_by_activity"]
    used = {name: sum(joules.get(name, 0) for _, joules in ranks) for name in ("compute", "communication")}
    message = figures["energy_j_by_activity"]
    assert figures["energy_activity_reason"] is None
    assert sum(message.values()) == pytest.approx(figures["energy_j_by_phase"]["training"])
    for name, joules in used.items():
        assert message[name] == pytest.approx(joules, abs=0.15 * figures["energy_j"])
    assert figures["j_per_sample"] == pytest.approx(figures["j_per_step"] / 8)
    assert figures["j_per_token"] == pytest.approx(figures["j_per_step"] / 32)
    again, _ = measure(packages, tmp_path, seed, seconds=1.0)[0]
    for name, joules in used.items():
        assert again["energy_j_by_activity"][name] > 1.1 * joules
    kept = json.loads((tmp_path / "usage.json").read_text())
    del kept["activities"]  # as an earlier version wrote it
    (tmp_path / "usage.json").write_text(json.dumps(kept))
    older, _ = measure(packages, tmp_path, seed, seconds=0.5)[0]
    assert older["energy_j"] > again["energy_j"] and "an earlier start" in older["energy_activity_reason"]


def test_seconds_of_activities_come_from_one_source():
    def row(name, **seconds):
        lines = {"joules": 10.0, "error_j": 1.0, "reason": None}
        return {
            "name": name,
            "kind": "gpu",
            "activities": {phase: lines | {"seconds": s} for phase, s in seconds.items()},
        }

    rows = [row("a", compute=6.0, communication=4.0), row("b", compute=5.0, communication=4.5, idle=0.25)]
    result = phase_shares.job_activities(rows, ["gpu"], 50.0, None)
    assert result["seconds"] == {"compute": 6.0, "communication": 4.0, "idle": 0.0}
    assert result["joules"] == pytest.approx({"compute": 20.0, "communication": 20.0, "idle": 10.0})
