"""Models that a recipe imports: built by the user's function, and clear errors for a bad function."""

import importlib
import sys

import pytest

from harness.marks import cases
from hpcdist import models
from hpcdist.errors import ConfigurationError
from hpcdist.models import factory
from hpcdist.models.config import ModelConfig
from hpcdist.training.recipe import recipe as recipes

SOURCE = """
from hpcdist import models
from hpcdist.models.config import ModelConfig

calls = []

def build(context=0, features=0, classes=0):
    calls.append((context, features, classes))
    return models.build(ModelConfig(kind="mlp", layers=1, hidden=4), features=features, classes=classes)

def wide(**inputs):
    return models.build(ModelConfig(kind="mlp", layers=1, hidden=4), "float64", features=2, classes=2)

def other(**inputs):
    return "a model"

def broken(**inputs):
    raise KeyError("of the user")

def alone():
    return None

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(SOURCE)
    return path


def build(factory, **inputs):
    return models.build(ModelConfig(kind="import", factory=factory), "float32", **inputs)


def test_function_gets_the_sizes_of_the_data(file, monkeypatch):
    model = build(f"{file}:build", features=3, classes=5)
    assert [segment.spec.shape for segment in model.layout.segments] == [(4, 3), (4,), (5, 4), (5,)]
    monkeypatch.syspath_prepend(file.parent)
    assert build("my_model:build", features=3, classes=5).layout == model.layout
    import my_model

    assert my_model.calls == [(0, 3, 5)]


@cases(
    "factory, output",
    ("nowhere.py:build", "the file nowhere.py does not exist"),
    ("no_such_module:build", "there is no module no_such_module"),
    ("no_such.module:build", "there is no module no_such.module"),
    ("hpcdist.models:nothing", "has no function nothing"),
    ("{file}:number", "has no function number"),
    ("{file}:other", "returned a str"),
    ("{file}:alone", "cannot be called with the keywords features=2: .*unexpected keyword"),
    ("{file}:wide", "returned a model of float64, but precision.mode requires float32"),
    ("{file}", "write 'file.py:function'"),
    (":build", "write 'file.py:function'"),
)
def test_invalid_factories_are_rejected(factory, output, file):
    with pytest.raises(ConfigurationError, match=output):
        build(factory.format(file=file), features=2)


def test_file_can_import_modules_of_its_folder(tmp_path, monkeypatch):
    """It can import neighbours at its top, in its function, and later in a forward.

    Its folder is first on sys.path only during the import.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("beside_top", "beside_inside", "beside_later"):
        (tmp_path / f"{name}.py").write_text(f"HIDDEN = {len(name)}\n")
    (tmp_path / "my_model.py").write_text(
        "import beside_top\n"
        "def build(features):\n"
        "    import beside_inside\n"
        "    from hpcdist import models\n"
        "    from hpcdist.models.config import ModelConfig\n"
        "    hidden = beside_top.HIDDEN + beside_inside.HIDDEN\n"
        "    return models.build(ModelConfig(kind='mlp', hidden=hidden, layers=1), features=features, classes=3)\n"
    )
    before = sys.path[0]
    made = build(f"{tmp_path}/my_model.py:build", features=2)
    assert made.layout.segments[0].spec.shape == (len("beside_top") + len("beside_inside"), 2)
    assert (sys.path[0], sys.path[-1]) == (before, str(tmp_path))
    assert len("beside_later") == importlib.import_module("beside_later").HIDDEN
    for name in ("beside_top", "beside_inside", "beside_later"):
        del sys.modules[name]


def test_exceptions_of_the_function_are_not_wrapped(file):
    with pytest.raises(KeyError, match="of the user"):
        build(f"{file}:broken")


def test_incompatible_factory_keys_are_rejected():
    for keys, output in (
        ({"kind": "import"}, "model.kind = 'import' with model.factory = ''"),
        ({"kind": "gpt", "factory": "a:b"}, "model.factory = 'a:b' has no effect with model.kind = 'gpt'"),
        ({"kind": "import", "factory": "a:b", "hidden": 64}, "model.hidden = 64 has no effect"),
    ):
        with pytest.raises(ConfigurationError, match=output):
            ModelConfig(**keys)
    with pytest.raises(ConfigurationError, match="'given' is only for a model that a script passes"):
        models.build(ModelConfig(kind="given"))


def test_relative_file_is_resolved_from_its_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('[model]\nkind = "import"\nfactory = "my_model.py:build"\n')
    assert recipes.load(path, environment={}).recipe.model.factory == f"{tmp_path}/my_model.py:build"
    path.write_text('[model]\nkind = "import"\nfactory = "package.my_model:build"\n')
    assert recipes.load(path, environment={}).recipe.model.factory == "package.my_model:build"


def test_seal_depends_on_path_content_and_user(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    reference = factory.seal(f"{file}:build")
    assert len(reference) == 32 and factory.is_sealed(f"{file}:build", reference)
    assert factory.is_sealed(f"{file}:other", reference)  # of the same file
    elsewhere = tmp_path / "elsewhere" / file.name
    elsewhere.parent.mkdir()
    elsewhere.write_text(SOURCE)
    assert not factory.is_sealed(f"{elsewhere}:build", reference)
    for forged in ("", None, 3, "0" * 32, "é"):
        assert not factory.is_sealed(f"{file}:build", forged)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert not factory.is_sealed(f"{file}:build", reference)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    file.write_text(SOURCE + "\n")
    assert not factory.is_sealed(f"{file}:build", reference)
    assert not list((tmp_path / "mine" / "hpcdist").glob("*.key.*"))


def test_key_readable_by_others_seals_nothing(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert factory.seal(f"{file}:build") and factory.seal(f"{tmp_path}/nowhere.py:build") == ""
    (tmp_path / "hpcdist" / factory.KEY_FILE).chmod(0o644)
    assert factory.seal(f"{file}:build") == ""


def test_module_is_sealed_without_being_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    package = tmp_path / "sealed_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('executed')\n")
    (package / "model.py").write_text("raise RuntimeError('executed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert factory.seal("sealed_package.model:build") == factory.seal(f"{package}/model.py:build") != ""
    for nowhere in ("sealed_package.other:build", "no_such.module:build", "sys:exit", ":build", "build"):
        assert factory.seal(nowhere) == ""
