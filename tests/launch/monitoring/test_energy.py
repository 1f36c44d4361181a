"""Energy of whole jobs: joules under a stand-in for the NVIDIA driver, summed over resumes, None without a source."""

import math
import os
import re
import shutil
import sys

import h5py
import numpy as np
import pytest

from harness import jobs
from harness.trainings import recipe_keys
from hpcdist.checkpoint import manifest
from hpcdist.reporting.units import format_joules

WATTS = {"GPU-00": 100.0, "GPU-01": 50.0, "GPU-02": 7.0}  # each steps every 10 ms
SMALL = recipe_keys(
    "layers=1 hidden=32 heads=2 data.context=16 global_batch=6 steps=60 checkpoint.every_steps=20 "
    "energy.interval_s=0.01"
)


@pytest.fixture
def driver(tmp_path, nvml_stub):
    """An environment with three GPUs, of which the job holds the first two, listed in reverse order."""
    gpus = tmp_path / "gpus"
    rows = [f"{uuid} 0:{n}:0 H200 0 power:{round(watts * 1e3)}:10\n" for n, (uuid, watts) in enumerate(WATTS.items())]
    gpus.write_text("".join(rows))
    path = os.pathsep.join(filter(None, [str(nvml_stub), os.environ.get("LD_LIBRARY_PATH", "")]))
    return {"LD_LIBRARY_PATH": path, "NVML_STUB": str(gpus), "CUDA_VISIBLE_DEVICES": "1,0"}


def train(text, out, environment, *arguments, **settings):
    chosen = {**SMALL, "data.path": text} | {name.replace("__", "."): value for name, value in settings.items()}
    command = [sys.executable, "-m", "hpcdist", "run", "-n", "2", "train", "--out", str(out), "--json", *arguments]
    for name, value in chosen.items():
        command += ["--set", f"{name}={value}"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return jobs.figures(jobs.run(command, env=kept | environment))


def test_joules_are_in_the_summary_and_in_the_file(text, tmp_path, driver):
    out = tmp_path / "run"
    result = train(text, out, driver, energy__powercap=tmp_path / "nowhere")
    assert [source["name"] for source in result["energy_sources"]] == ["GPU-00", "GPU-01"]
    watts = WATTS["GPU-00"] + WATTS["GPU-01"]
    assert result["energy_reason"] is None and result["energy_j_by_kind"] == {"gpu": result["energy_j"]}
    assert any("cpu" in line and "does not exist" in line for line in result["energy_not_included"])
    training = result["energy_j_by_phase"]["training"]
    assert 0 < training <= result["energy_j"] and result["j_per_step"] == pytest.approx(training / 60)
    with h5py.File(out / "metrics.h5") as file:
        energy = {name: {c: t[c][...] for c in t.attrs["columns"]} for name, t in file["energy"].items()}
        assert file["energy/samples/energy_mj"].attrs["units"] == "mJ"
    samples, windows = energy["samples"], energy["windows"]
    assert samples["energy_mj"].dtype == np.int64 and energy["sources"]["name"].tolist() == [b"GPU-00", b"GPU-01"]
    assert sorted(set(windows["phase"])) == [b"checkpoint", b"training", b"validation"]
    assert np.count_nonzero(windows["phase"] == b"checkpoint") == 2 * 3
    assert windows["energy_j"].sum() == pytest.approx(result["energy_j"]), "each joule belongs to one window"
    assert windows["energy_j"].sum() == pytest.approx(watts / 2 * windows["own_s"].sum(), rel=0.25)
    figures = jobs.hpcdist("report", str(out), check=True)
    joules = re.escape(format_joules(result["energy_j"]))
    assert re.search(rf"^energy +{joules}  \(gpu ", figures.stdout, re.MULTILINE)
    assert energy["about"]["ranks"].tolist() == [2, 2] and energy["about"]["model"].tolist() == [b"H200"] * 2
    assert energy["sampler"]["busy_s"][-1] < energy["sampler"]["lasted_s"][-1]
    for source in range(2):
        series = samples["energy_mj"][samples["source"] == source]
        assert len(series) > 20 and (np.diff(series) >= 0).all()


@pytest.mark.full
def test_energy_of_resumed_starts_adds_up(text, tmp_path, driver):
    out, nowhere = tmp_path / "run", tmp_path / "nowhere"
    first = train(text, out, driver, energy__powercap=nowhere)
    shutil.rmtree(out / "checkpoints" / "step-60")  # as if it had been killed on the way from step 40
    kept = manifest.load(out / "checkpoints" / "step-40").scalars["energy"]
    assert kept["since_step"] == 0 and 0 < kept["joules"]["by_kind"]["gpu"] < first["energy_j"]
    second = train(text, out, driver, "--resume", "auto", energy__powercap=nowhere)
    local_data = sum(source["joules"] for source in second["energy_sources"])
    assert second["energy_j"] == pytest.approx(first["energy_j"] + local_data, rel=0.05) and local_data > 0
    assert second["energy_j"] > kept["joules"]["by_kind"]["gpu"] + local_data, "what was done again has been used"
    before, now = first["seconds_by_phase"]["training"], second["seconds_by_phase"]["training"]
    assert now > before > 0
    assert second["j_per_step"] == pytest.approx(second["energy_j_by_phase"]["training"] / 60)
    with h5py.File(out / "metrics.h5") as file:
        assert set(file["energy/samples/session"][...]) == {0, 1}


@pytest.mark.full
def test_summary_without_energy_source_has_a_reason(text, tmp_path):
    out = tmp_path / "run"
    result = train(text, out, {}, energy__powercap=tmp_path / "nowhere")
    assert result["energy_j"] is None and result["j_per_step"] is None and result["energy_sources"] == []
    assert "no source can be read" in result["energy_reason"] and "nowhere does not exist" in result["energy_reason"]
    assert result["energy_j_by_phase"] == {"training": None, "checkpoint": None, "validation": None}
    with h5py.File(out / "metrics.h5") as file:
        assert set(file["energy"]) <= {"utilisation", "sampler"}, "how busy nodes were needs no source"
        assert len(file["energy/sampler/busy_s"]) > 0
    assert not math.isnan(result["train_loss"])
