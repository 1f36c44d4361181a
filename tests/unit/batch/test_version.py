"""The version is equal in every file that contains it, and files of earlier versions can be read."""

import re
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from harness import jobs
from hpcdist.batch import job
from hpcdist.telemetry.metrics import step_metrics

PACKAGE = Path(hpcdist.__file__).resolve().parent
CLONE = PACKAGE.parent
VERSION = hpcdist.__version__
MODULES = job.folder(job.MODULEFILES)
SITE = job.folder(job.INSTALL)
GOLDEN = Path(__file__).parents[1] / "golden"
# Trainings of four steps with their data: by 0.1.0, and by 0.2.0 (zero1 on 2 ranks, and a sweep) before modules moved.
OLD = ("0.1.0", "0.2.0")


def versions_by_file():
    """Return the hpcdist versions that each file contains."""
    texts = {
        "changelog": (PACKAGE / "CHANGELOG.md", r"^## (\S+) \(\d{4}-\d\d-\d\d\)$"),
        "Spack": (SITE / "spack_repo/hpcdist/packages/py_hpcdist/package.py", r'version\("(\d[^"]*)"'),
        "README of sites": (SITE / "README.md", r"hpcdist-(\d+\.\d+\.\d+)|@(\d+\.\d+\.\d+)"),
        "README of modules": (MODULES / "README.md", r"(?:hpcdist/|`)(\d+\.\d+\.\d+)(?= |-openmpi|-mpich)"),
        **{path.name: (path, r"version = '(.*?)'|hpcdist-(\d+\.\d+\.\d+)") for path in SITE.glob("*.eb")},
    }
    if (CLONE / "setup.cfg").exists():
        texts["README"] = (CLONE / "README.md", r"/hpcdist/(\d+\.\d+\.\d+)")
    results = {
        name: ["".join(match.groups(default="")) for match in re.finditer(pattern, path.read_text(), re.MULTILINE)]
        for name, (path, pattern) in texts.items()
    }
    results["changelog"] = results["changelog"][:1]  # the newest
    results["modulefiles"] = [path.name.removesuffix(".lua") for path in (MODULES / "hpcdist").iterdir()]
    results["easyconfigs"] = [path.name.split("-")[1] for path in SITE.glob("*.eb")]
    return results


def test_every_file_has_the_current_version():
    result = versions_by_file()
    assert {name: set(versions) for name, versions in result.items()} == {name: {VERSION} for name in result}


def test_setup_cfg_reads_the_version_from_the_module():
    if not (CLONE / "setup.cfg").exists():
        pytest.skip("hpcdist is installed, setup.cfg is only in a clone")
    assert "\nversion = attr: hpcdist.__version__\n" in (CLONE / "setup.cfg").read_text()


def test_changelog_entries_are_sorted():
    text = (PACKAGE / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (\d+)\.(\d+)\.(\d+) \((\S+)\)$", text, re.MULTILINE)
    order = [(tuple(map(int, numbers)), date) for *numbers, date in headings]
    others = text.count("\n## ") - text.count("\n## Unreleased\n")
    assert order == sorted(order, reverse=True) and len(order) == others >= 2


@pytest.fixture(params=OLD)
def old_run(request, tmp_path):
    with tarfile.open(GOLDEN / "runs" / f"run-{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / f"run-{request.param}"


def run_hpcdist(*arguments):
    done = jobs.run([sys.executable, "-P", "-m", "hpcdist", *map(str, arguments)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.full
def test_run_of_an_earlier_version_can_be_resumed(old_run):
    before = step_metrics.read(old_run / "metrics.h5")
    assert before.attributes["hpcdist_version"] == old_run.name.removeprefix("run-")
    whole = shutil.copytree(old_run, old_run.parent / "whole")
    for run in (old_run, whole):
        keys = ("--set=run.steps=7", f"--set=data.staged={old_run.parent}/data.h5")
        output = run_hpcdist("train", run / "recipe.toml", "--out", run, "--resume", "auto", *keys)
        assert "resumed from" in output and "after 4 steps" in output
    after = [step_metrics.read(run / "metrics.h5") for run in (old_run, whole)]
    assert np.array_equal(after[0].steps["loss"], after[1].steps["loss"]), "a resume must be deterministic"
    assert np.array_equal(after[0].steps["step"], range(1, 8))
    assert np.array_equal(after[0].steps["loss"][:4], before.steps["loss"])
    assert after[0].attributes["hpcdist_version"] == VERSION


def test_files_of_an_earlier_version_can_be_read(old_run):
    output = run_hpcdist("checkpoint", "verify", old_run)
    assert "step-4: complete" in output
    assert ("an older version of hpcdist saved it without a digest" in output) == (old_run.name == "run-0.1.0")
    run_hpcdist("checkpoint", "export", old_run, old_run.parent / "model.safetensors")
    assert (old_run.parent / "model.safetensors").stat().st_size
    assert re.search(r"^ +4 +\S+", run_hpcdist("report", old_run), re.MULTILINE), "the last step is missing"


@pytest.mark.parametrize("old_run", ["0.2.0"], indirect=True)
def test_sweep_of_an_earlier_version_can_be_read(old_run):
    output = run_hpcdist("report", old_run.parent / "sweep.h5")
    assert re.search(r"^ring +2 .* 0\.8959 .* 1 ok$", output, re.MULTILINE)
    assert re.search(r"^zero1 +2 .* 0\.8959 .* 1 ok$", output, re.MULTILINE)
