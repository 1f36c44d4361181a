"""One version, wherever it stands, and files of the version before it."""

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
GOLDEN = Path(__file__).parents[2] / "golden"
# Trainings of four steps, and their data: by 0.1.0, and by 0.2.0 (zero1 on 2 ranks, and a sweep) before modules moved.
OLD = ("0.1.0", "0.2.0")


def places():
    """Return the versions of hpcdist in each place that names one."""
    texts = {
        "changelog": (PACKAGE / "CHANGELOG.md", r"^## (\S+) \(\d{4}-\d\d-\d\d\)$"),
        "Spack": (SITE / "spack_repo/hpcdist/packages/py_hpcdist/package.py", r'version\("(\d[^"]*)"'),
        "README of sites": (SITE / "README.md", r"hpcdist-(\d+\.\d+\.\d+)|@(\d+\.\d+\.\d+)"),
        "README of modules": (MODULES / "README.md", r"(?:hpcdist/|`)(\d+\.\d+\.\d+)(?= |-openmpi|-mpich)"),
        **{path.name: (path, r"version = '(.*?)'|hpcdist-(\d+\.\d+\.\d+)") for path in SITE.glob("*.eb")},
    }
    if (CLONE / "setup.cfg").exists():
        texts["README"] = (CLONE / "README.md", r"/hpcdist/(\d+\.\d+\.\d+)")
    found = {
        name: ["".join(match.groups(default="")) for match in re.finditer(pattern, path.read_text(), re.MULTILINE)]
        for name, (path, pattern) in texts.items()
    }
    found["changelog"] = found["changelog"][:1]  # the newest
    found["modulefiles"] = [path.name.removesuffix(".lua") for path in (MODULES / "hpcdist").iterdir()]
    found["easyconfigs"] = [path.name.split("-")[1] for path in SITE.glob("*.eb")]
    return found


def test_every_place_names_this_version():
    found = places()
    assert {name: set(versions) for name, versions in found.items()} == {name: {VERSION} for name in found}


def test_packages_take_the_version_from_the_module():
    if not (CLONE / "setup.cfg").exists():
        pytest.skip("hpcdist is installed, there is no setup.cfg beside it")
    assert "\nversion = attr: hpcdist.__version__\n" in (CLONE / "setup.cfg").read_text()


def test_the_changelog_is_in_order():
    text = (PACKAGE / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (\d+)\.(\d+)\.(\d+) \((\S+)\)$", text, re.MULTILINE)
    order = [(tuple(map(int, numbers)), date) for *numbers, date in headings]
    others = text.count("\n## ") - text.count("\n## Unreleased\n")
    assert order == sorted(order, reverse=True) and len(order) == others >= 2


@pytest.fixture(params=OLD)
def old(request, tmp_path):
    with tarfile.open(GOLDEN / "runs" / f"run-{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / f"run-{request.param}"


def hpcdist_says(*arguments):
    done = jobs.run([sys.executable, "-P", "-m", "hpcdist", *map(str, arguments)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.full
def test_a_run_of_the_version_before_goes_on(old):
    before = step_metrics.read(old / step_metrics.METRICS_FILE)
    assert before.attributes["hpcdist_version"] == old.name.removeprefix("run-")
    whole = shutil.copytree(old, old.parent / "whole")
    for run in (old, whole):
        keys = ("--set=run.steps=7", f"--set=data.staged={old.parent}/data.h5")
        said = hpcdist_says("train", run / "recipe.toml", "--out", run, "--resume", "auto", *keys)
        assert "resumed from" in said and "after 4 steps" in said
    after = [step_metrics.read(run / step_metrics.METRICS_FILE) for run in (old, whole)]
    assert np.array_equal(after[0].steps["loss"], after[1].steps["loss"]), "a resume decides nothing by chance"
    assert np.array_equal(after[0].steps["step"], range(1, 8))
    assert np.array_equal(after[0].steps["loss"][:4], before.steps["loss"])
    assert after[0].attributes["hpcdist_version"] == VERSION


def test_files_of_the_version_before_are_read(old):
    said = hpcdist_says("checkpoint", "verify", old)
    assert "step-4: complete" in said
    assert ("an earlier version of hpcdist saved no digest" in said) == (old.name == "run-0.1.0")
    hpcdist_says("checkpoint", "export", old, old.parent / "model.safetensors")
    assert (old.parent / "model.safetensors").stat().st_size
    assert re.search(r"^ +4 +\S+", hpcdist_says("report", old), re.MULTILINE), "its last step"


@pytest.mark.parametrize("old", ["0.2.0"], indirect=True)
def test_a_sweep_of_the_version_before_is_read(old):
    said = hpcdist_says("report", old.parent / "sweep.h5")
    assert re.search(r"^ring +2 .* 0\.8959 .* 1 ok$", said, re.MULTILINE)
    assert re.search(r"^zero1 +2 .* 0\.8959 .* 1 ok$", said, re.MULTILINE)
