"""Optional packages that a recipe needs, detected without importing them."""

import importlib.util
import sys

import pytest

from hpcdist.cli.doctor import job
from hpcdist.comm.doctor.mpi_library import FAIL, OK
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import requirements

KEYS = {
    "run.device='gpu'": "cupy",
    "telemetry.prometheus='textfile'": "prometheus_client",
    "telemetry.tensorboard=true": "tensorboardX",
    "telemetry.nvtx=true": "nvtx",
}


@pytest.fixture
def no_optional_packages(monkeypatch):
    reference = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in KEYS.values() else reference(name))
    for name in KEYS.values():
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_names_its_package(key, no_optional_packages):
    (line,) = requirements.missing_packages(recipes.load(None, [key]).recipe)
    name, value = key.split("=", 1)
    assert line.startswith(f"{name} = {value} needs the module {KEYS[key]}, which {sys.executable} does not have")
    assert "pip install 'hpcdist[" in line


@pytest.mark.parametrize(
    ("line", "is_warned"),
    [
        ("import hpcdist.torch", True),
        ("from hpcdist.torch import streams", True),
        ("from hpcdist import torch", True),
        ("import torch  # not hpcdist.torch", False),
        ("import hpcdist.torchlike", False),
    ],
)
def test_torch_script_without_cupy_gets_a_warning(line, is_warned, tmp_path, no_optional_packages):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{line}\n")
    lines = requirements.missing_for_gpu_tensors(("python", str(script), "--epochs", "3"))
    assert ["GPU tensors go through host memory" in line for line in lines] == [True] * is_warned
    assert requirements.missing_for_gpu_tensors(("python", "-m", "there_is_no.py")) == []


def test_default_recipe_needs_no_optional_package(no_optional_packages):
    assert requirements.missing_packages(recipes.load(None, []).recipe) == []


def test_model_file_is_parsed_but_not_executed(tmp_path):
    """Its unconditional imports are required, except for modules in its folder."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "model.py").write_text(
        "import os.path, beside, not_there_1\nfrom not_there_2.part import thing\nfrom . import not_there_3\n"
        "try:\n    import not_there_4\nexcept ImportError:\n    pass\n"
        "def model(context):\n    import not_there_5\nraise SystemExit('executed')\n"
    )
    factory = f"{tmp_path / 'model.py'}:model"
    options = ["model.kind='import'", f"model.factory={factory!r}"]
    result = requirements.missing_packages(recipes.load(None, options).recipe)
    assert [line.split("needs the module ")[1].split(",")[0] for line in result] == ["not_there_1", "not_there_2"]
    (tmp_path / "model.py").write_text("import sys\nsys.path.insert(0, '/proj/lib')\nimport not_there_6\n")
    assert requirements.missing_packages(recipes.load(None, options).recipe) == [], (
        "it says itself where its modules are"
    )
    (tmp_path / "model.py").write_text("import (")
    assert requirements.missing_packages(recipes.load(None, options).recipe) == [], (
        "the training says what is wrong with it"
    )
    (line,) = requirements.missing_packages(
        recipes.load(None, [options[0], "model.factory='not_there.models:gpt'"]).recipe
    )
    assert "needs the module not_there," in line


def test_doctor_reports_missing_packages(tmp_path, no_optional_packages):
    path = tmp_path / "job.toml"
    path.write_text(recipes.dump(recipes.load(None, ["telemetry.nvtx=true"]).recipe))
    result = job._packages(path)
    assert result.status == FAIL and "telemetry.nvtx = true needs the module nvtx" in result.found
    path.write_text(recipes.dump(recipes.load(None, []).recipe))
    assert job._packages(path).status == OK
    assert job._packages(tmp_path / "lost.toml").status == FAIL
