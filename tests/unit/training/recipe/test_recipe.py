"""The recipe: precedence and origins of values, TOML round trips, and errors with remedies."""

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import jobs
from harness.marks import cases
from hpcdist import errors
from hpcdist.errors import ConfigurationError, StorageError, UsageError
from hpcdist.reporting.schema import toml_value
from hpcdist.strategies.config import ParallelConfig
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.config import DataConfig, RunConfig
from hpcdist.training.recipe.recipe import Recipe


@pytest.fixture
def home(tmp_path):
    """An environment without user or site files."""
    return {"HOME": str(tmp_path / "home")}


def test_recipe_without_sources_is_the_default(home):
    resolved = recipes.load(environment=home)
    assert resolved.recipe == Recipe()
    assert set(resolved.origin.values()) == {"default"}
    assert list(resolved.origin) == list(recipes.flat(Recipe()))


def test_sources_have_their_precedence_and_origin(home, tmp_path):
    site, recipe = tmp_path / "site.toml", tmp_path / "recipe.toml"
    user = Path(home["HOME"]) / ".config" / "hpcdist" / "config.toml"
    user.parent.mkdir(parents=True)
    texts = [(site, 5), (user, 4), (recipe, 3)]
    names = ["steps", "seed", "global_batch", "validation_samples", "sentinel_every_steps"]
    for path, count in texts:
        table = "[recipe.run]" if path == site else "[run]"
        path.write_text(f"{table}\n" + "".join(f"{name} = {100 + count}\n" for name in names[:count]))
    environment = home | {"HPCDIST_SITE": str(site), "HPCDIST_SET__RUN__SEED": "102", "HPCDIST_SET__RUN__STEPS": "102"}
    resolved = recipes.load(recipe, ["run.steps=7", "run.steps = 101"], environment)
    run = resolved.recipe.run
    assert [getattr(run, name) for name in names] == [101, 102, 103, 104, 105]
    assert [resolved.origin[f"run.{name}"] for name in names] == [
        "--set",
        "environment variable HPCDIST_SET__RUN__SEED",
        f"recipe {recipe}",
        f"user file {user}",
        f"site profile {site}",
    ]
    assert resolved.origin["run.device"] == "default"


def test_xdg_config_home_names_the_user_file(tmp_path):
    (tmp_path / "hpcdist").mkdir()
    (tmp_path / "hpcdist" / "config.toml").write_text("run.seed = 9")
    assert recipes.load(environment={"XDG_CONFIG_HOME": str(tmp_path)}).recipe.run.seed == 9


def test_unreadable_user_file_raises(tmp_path):
    (tmp_path / "hpcdist" / "config.toml").mkdir(parents=True)
    with pytest.raises(StorageError, match="user file .* cannot be read"):
        recipes.load(environment={"XDG_CONFIG_HOME": str(tmp_path)})


def test_stored_recipe_ignores_other_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_SET__RUN__SEED", "5")
    recipe = recipes.load(None, ["data.path=text.txt", "run.steps=3"]).recipe
    assert recipe.run.seed == 5
    (tmp_path / "recipe.toml").write_text(recipes.dump(recipe))
    monkeypatch.setenv("HPCDIST_SET__RUN__SEED", "6")
    monkeypatch.chdir(tmp_path)
    assert recipes.load_stored("recipe.toml") == recipe


def test_relative_path_is_resolved_from_its_file(home, tmp_path, monkeypatch):
    states = 'zero.offload_optimizer = "file"\nzero.offload_directory = "states"\nparallel.strategy = "zero1"'
    (tmp_path / "recipe.toml").write_text(f'data.path = "text.txt"\n{states}')
    monkeypatch.chdir("/")
    result = recipes.load(tmp_path / "recipe.toml", environment=home).recipe
    assert result.data.path == str(tmp_path / "text.txt")
    assert result.zero.offload_directory == str(tmp_path / "states")
    assert recipes.load(None, ["data.path=etc/../text.txt"], home).recipe.data.path == "/text.txt"
    assert recipes.load(None, ["data.path="], home).recipe.data.path == ""


@cases(
    "text, key, value",
    ("optimizer.name=lamb", "optimizer.name", "lamb"),
    ('optimizer.name="lamb"', "optimizer.name", "lamb"),
    ("optimizer.learning_rate=.01", "optimizer.learning_rate", 0.01),
    ("optimizer.learning_rate=1e-2", "optimizer.learning_rate", 0.01),
    ("communication.deadline_s=60", "communication.deadline_s", 60.0),
    ("run.steps=1_000_000", "run.steps", 1_000_000),
    ("model.tied=true", "model.tied", True),
    ("data.path=/a=b c", "data.path", "/a=b c"),
)
def test_overrides_are_parsed_by_the_type_of_their_key(home, text, key, value):
    got = recipes.flat(recipes.load(None, [text], home).recipe)[key]
    assert got == value
    assert type(got) is type(value)


def test_integer_in_toml_is_accepted_as_float(home, tmp_path):
    (tmp_path / "recipe.toml").write_text("[optimizer]\nlearning_rate = 1\n")
    rate = recipes.load(tmp_path / "recipe.toml", environment=home).recipe.optimizer.learning_rate
    assert rate == 1.0
    assert isinstance(rate, float)


@cases(
    "text, key, nearest",
    ("[run]\nstepz = 3", "run.stepz", "'run.steps'"),
    ("stepz = 3", "stepz", "'run.steps'"),
    ("[optimizer]\nlr = 3", "optimizer.lr", "'optimizer.learning_rate'"),
    ("[optim]\nlearning_rate = 3", "optim.learning_rate", "'optimizer.learning_rate'"),
    ("[modle]\nlayers = 3", "modle.layers", "'model.layers'"),
    ("[modle]", "modle", "'model'"),
    ("[model.attention]\nheads = 3", "model.attention.heads", "'model.heads'"),
    ("[parallel]\nexperts = 2", "parallel.experts", "'parallel.expert'"),
    ("[model]\nexpert = 8", "model.expert", "'model.experts'"),
    ("[data]\nexperts = 8", "data.experts", "'model.experts'"),
    ("[run]\nbatch_size = 8", "run.batch_size", "'run.global_batch'"),
    ("[run]\nxyzzy = 3", "run.xyzzy", "keys of [run] are: steps,"),
    ("[xyzzy]\nfoo = 3", "xyzzy.foo", "sections are: model, data,"),
)
def test_unknown_keys_are_rejected_with_path_and_nearest_key(home, tmp_path, text, key, nearest):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        recipes.load(path, environment=home)
    assert f"unknown key {key!r} in recipe {path}" in str(refused.value)
    assert nearest in str(refused.value)


@cases(
    "text, cure",
    ("parallel.strategy=fsdp", "the nearest is 'zero3'"),
    ("parallel.strategy=ddp", "the nearest is 'allreduce'"),
    ("parallel.context_method=ulysses", "the nearest is 'all_to_all'"),
    ("parallel.strategy=xyzzy", "choose one of allreduce, [^;]*$"),
)
def test_unknown_values_are_rejected_with_the_choices(home, text, cure):
    with pytest.raises(ConfigurationError, match=cure):
        recipes.load(None, [text, "parallel.context=2"], home)


def test_unknown_keys_of_the_environment_name_their_variable(home):
    with pytest.raises(ConfigurationError, match=r"'run\.stepz' in environment variable HPCDIST_SET__RUN__STEPZ"):
        recipes.load(environment=home | {"HPCDIST_SET__RUN__STEPZ": "3"})


@cases(
    "text, message",
    ('[run]\nsteps = "many"', r"run\.steps = 'many' .*expected a whole number, such as 1000"),
    ("[run]\nsteps = 1.5", r"run\.steps = 1\.5 .*whole number"),
    ("[run]\nsteps = true", r"run\.steps = True .*whole number"),
    ("[run.steps]\nvalue = 3", r"run\.steps = \{'value': 3\} .*whole number"),
    ("[model]\ntied = 1", r"model\.tied = 1 .*true or false"),
    ("[data]\npath = 3", r"data\.path = 3 .*a text"),
    ("[data]\npath = ['a']", r"data\.path = \['a'\] .*a text"),
    ("[optimizer]\nlearning_rate = 'fast'", r"optimizer\.learning_rate = 'fast' .*a number"),
    ("run = 3", r"run = 3 in .*\[run\] is a section"),
    ("[[run]]\nsteps = 3", r"\[run\] is a section"),
    ("[run\nsteps = 3", r"recipe\.toml is not valid TOML: .*line 1"),
)
def test_wrong_types_name_the_key(home, tmp_path, text, message):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        recipes.load(tmp_path / "recipe.toml", environment=home)


@pytest.mark.parametrize(
    "text", ["run.steps=1.5", "run.steps=", "run.steps=0x", "model.tied=1", "data.context=2\nrun.steps=3"]
)
def test_overrides_of_a_wrong_type_are_rejected(home, text):
    with pytest.raises(ConfigurationError, match=r"in --set has the wrong type: .*, such as ['0-9a-z]"):
        recipes.load(None, [text], home)


def test_override_without_a_value_is_a_usage_error(home):
    with pytest.raises(UsageError, match=r"--set run\.steps: expected KEY=VALUE"):
        recipes.load(None, ["run.steps"], home)


@pytest.mark.parametrize("texts", [["parallel.context=2", "parallel.strategy=gossip"]])
def test_unsupported_recipes_are_rejected(home, texts):
    with pytest.raises(ConfigurationError, match="not built in this version") as refused:
        recipes.load(None, texts, home)
    assert refused.value.exit_code == errors.CONFIGURATION == 78
    assert all(text.partition("=")[0] in str(refused.value) for text in texts)
    assert "--set" in str(refused.value)


@cases(
    "text",
    "model.heads=3",
    "model.layers=0",
    "model.dropout=1",
    "model.dropout=nan",
    "data.context=0",
    "data.validation_fraction=0.6",
    "data.validation_fraction=nan",
    "run.steps=0",
    "run.global_batch=0",
    f"run.global_batch={10**18}",
    "run.seed=-1",
    "run.device=tpu",
    "run.log_every_s=-1",
    "precision.mode=float8",
    "parallel.data=-1",
    "parallel.microbatches=0",
    "parallel.strategy=magic",
    "communication.algorithm=magic",
    "communication.bucket_bytes=0",
    "communication.deadline_s=0",
    "communication.deadline_s=inf",
    "communication.ranks_per_node=-1",
    "checkpoint.every_steps=-1",
    "checkpoint.keep=0",
    "optimizer.learning_rate=-1",
)
def test_impossible_values_name_key_and_origin(home, text):
    key = text.partition("=")[0]
    with pytest.raises(ConfigurationError, match=key.replace(".", r"\.")) as refused:
        recipes.load(None, [text], home)
    assert f"{key} is from --set" in str(refused.value)


def test_fewer_samples_than_data_ranks_are_rejected(home):
    with pytest.raises(ConfigurationError, match=r"run\.global_batch = 3 with 4 data ranks: each needs"):
        recipes.load(None, ["run.global_batch=3", "parallel.data=4"], home)
    recipe = Recipe(run=RunConfig(global_batch=3))
    recipe.check_world(3)
    with pytest.raises(ConfigurationError, match="4 data ranks"):
        recipe.check_world(4)
    with pytest.raises(ConfigurationError, match="4 data ranks"):
        Recipe(run=RunConfig(global_batch=3), parallel=ParallelConfig(data=4))


def test_unreadable_recipe_files_are_rejected(home, tmp_path):
    with pytest.raises(StorageError, match="there is no such file"):
        recipes.load(tmp_path / "none.toml", environment=home)
    with pytest.raises(StorageError, match="site profile .*there is no such file"):
        recipes.load(environment=home | {"HPCDIST_SITE": str(tmp_path / "none.toml")})
    with pytest.raises(StorageError, match="cannot be read"):
        recipes.load(tmp_path, environment=home)
    (tmp_path / "latin.toml").write_bytes(b'data.path = "\xe9"')
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        recipes.load(tmp_path / "latin.toml", environment=home)


@settings(max_examples=30)
@given(
    path=st.text(st.characters(exclude_categories=["Cs"])),
    seed=st.integers(0, 2**63 - 1),
    fraction=st.floats(0, 0.5),
    every=st.floats(0, allow_infinity=False),
)
def test_dumped_recipe_is_read_back_unchanged(path, seed, fraction, every):
    run = RunConfig(seed=seed, log_every_s=every)
    recipe = Recipe(data=DataConfig(path=path, validation_fraction=fraction), run=run)
    tree = tomllib.loads(recipes.dump(recipe))
    assert {
        f"{section}.{name}": tuple(value) if isinstance(value, list) else value
        for section, keys in tree.items()
        for name, value in keys.items()
    } == recipes.flat(recipe)
    assert recipes.digest(recipe) == recipes.digest(Recipe(data=recipe.data, run=run))


@given(st.one_of(st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=["Cs"]))))
def test_toml_round_trip_of_any_value(value):
    got = tomllib.loads(f"value = {toml_value(value)}")["value"]
    assert type(got) is type(value)
    assert got == value or (math.isnan(got) and math.isnan(value))


def test_invalid_unicode_is_rejected():
    with pytest.raises(ConfigurationError, match="not valid Unicode"):
        recipes.dump(Recipe(data=DataConfig(path="/\udce9")))


def test_every_value_changes_the_digest():
    assert recipes.digest(Recipe()) != recipes.digest(Recipe(run=RunConfig(seed=1)))


def test_recipe_module_imports_no_heavy_modules():
    program = (
        "import sys; from hpcdist.training.recipe import recipe; recipe.load();"
        "print([name for name in ('numpy', 'mpi4py', 'numba', 'h5py', 'cupy', 'matplotlib') if name in sys.modules])"
    )
    assert jobs.python(program, check=True).stdout.strip() == "[]"


@cases(
    "texts, message",
    (["parallel.pipeline=2", "parallel.schedule=sequential"], "only one pipeline rank computes at a time"),
    (
        ["parallel.pipeline=2", "parallel.strategy=gossip"],
        "set parallel.strategy to one of allreduce, zero1, zero2, zero3",
    ),
    (["parallel.pipeline=2", "parallel.schedule=1F1B"], "choose one of auto, sequential, gpipe, 1f1b, inter"),
    (["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.microbatches=4"], "needs at least 2 chunks"),
    (
        ["parallel.pipeline=4", "parallel.schedule=interleaved", "parallel.microbatches=2", "parallel.chunks=2"],
        "set parallel.microbatches to at least 4",
    ),
    (
        ["parallel.pipeline=2", "parallel.chunks=2"],
        "parallel.chunks = 2 cannot be used with parallel.schedule = '1f1b'",
    ),
    (["parallel.pipeline=2", "parallel.schedule=file"], "name the schedule file"),
    (["parallel.pipeline=2", "parallel.schedule_file=a.txt"], "only the schedule 'file' reads it"),
    (
        ["parallel.pipeline=2", "parallel.schedule=zb-h1", "parallel.microbatches=4", "parallel.recompute=true"],
        "stays in memory until it is computed",
    ),
    (["zero.keep_gradients=true", "parallel.strategy=zero1"], "gradients are not sharded"),
    (["zero.keep_parameters=true", "parallel.strategy=zero2"], "parameters are not sharded"),
    (
        ["parallel.pipeline=2", "zero.shared_parameters=true", "parallel.strategy=zero1"],
        "shared_parameters = true with parallel.pipeline",
    ),
    (
        ["parallel.pipeline=2", "parallel.microbatches=3"],
        "run.global_batch = 16 with parallel.microbatches = 3 and parallel.pipeline = 2",
    ),
    (["parallel.pipeline=0"], "must be at least 1"),
)
def test_impossible_layouts_are_rejected(home, texts, message):
    with pytest.raises(ConfigurationError, match=message):
        recipes.load(None, texts, home)


def test_default_schedule_follows_the_pipeline(home):
    assert recipes.load(None, [], home).recipe.parallel.order == "sequential"
    assert recipes.load(None, ["parallel.pipeline=2"], home).recipe.parallel.order == "1f1b"
    assert recipes.load(None, ["parallel.pipeline=2", "parallel.schedule=gpipe"], home).recipe.parallel.order == "gpipe"


def test_shifted_steps_without_lock_step_are_rejected():
    servers = ["parallel.strategy=parameter_server", "parameter_server.consistency=asp"]
    with pytest.raises(ConfigurationError, match=r"energy\.shift = true with parameter_server\.consistency = 'asp'"):
        recipes.load(None, ["energy.shift=true", *servers], {})


def test_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.toml").write_text("run.steps = 3", encoding="utf-8-sig")
    assert recipes.load(tmp_path / "a.toml", []).recipe.run.steps == 3
