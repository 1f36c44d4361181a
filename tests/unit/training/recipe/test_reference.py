"""The reference of keys: each has a meaning and its requirements from the rules; the committed page is current."""

from pathlib import Path

import pytest

import hpcdist
from harness.marks import cases
from hpcdist.errors import UsageError
from hpcdist.reporting.nearest import SYNONYMS
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe import reference

FOLDER = Path(hpcdist.__file__).parent


def test_every_key_has_one_short_meaning():
    meanings = {name: field.key.meaning for name, field in recipes.known_keys().items()}
    assert list(meanings) == list(recipes.defaults())
    assert [key for key, text in meanings.items() if not text.endswith(".") or len(text) > 110 or "|" in text] == []


def test_committed_page_matches_the_code():
    page = (FOLDER / "docs" / "recipe.md").read_text()
    assert page == reference.page(), "python -m hpcdist.training.recipe.reference > hpcdist/docs/recipe.md"
    assert [key for key in recipes.defaults() if f"\n| {key.partition('.')[2]} |" not in page] == []


def test_example_of_the_page_is_a_valid_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(reference.page().split("```toml\n")[1].split("```")[0])
    resolved = recipes.load(path, environment={"HOME": str(tmp_path)})
    assert sum(place == f"recipe {path}" for place in resolved.origin.values()) == 13


@cases(
    "key, values, only_with",
    ("parallel.pipeline", "integer >= 1", ""),
    ("parallel.tensor", "integer >= 1", '> 1: model.kind = "gpt" or "encoder"'),
    ("parallel.sequence_parallel", "false, true", "parallel.tensor > 1"),
    ("optimizer.nesterov", "false, true", 'optimizer.name = "sgd"'),
    ("compression.bits", "2, 4, 8", 'communication.compression = "qsgd" (or a candidate of auto)'),
    ("compression.error_feedback", "false, true", 'communication.compression other than "none", "dgc" or "onebit"'),
    ("data.staged", "path", "data.path set"),
    (
        "zero.prefetch",
        "integer >= 0",
        (
            'parallel.strategy = "zero1", "zero2" or "zero3"; parallel.strategy = "zero3", or zero.parameters > 1; '
            'communication.overlap = "thread" or "poll"'
        ),
    ),
    (
        "zero.offload_optimizer",
        "none, host, file",
        (
            'parallel.strategy = "zero1", "zero2" or "zero3"; "file": zero.offload_directory set; '
            '"host": run.device = "gpu"'
        ),
    ),
    (
        "communication.overlap",
        "none, thread, poll",
        (
            'parallel.strategy other than "parameter_server", "gossip" or "local_sgd"; run.device = "cpu"; '
            '"poll": communication.algorithm = "ring"'
        ),
    ),
    (
        "energy.shift",
        "false, true",
        'energy.sources = "auto" or "nvml", or energy.sensor_window_s > 0',
    ),
    ("checkpoint.writers", "rank, node, or a number of ranks of at least 1", ""),
    ("checkpoint.mtbf_s", "number >= 0 or observed", ""),
    ("run.suspicious_factor", "number > 1, or 0", 'run.device = "cpu"'),
)
def test_entries_match_the_rules(key, values, only_with):
    entry = reference.entry(key)
    assert (entry.values, entry.only_with) == (values, only_with)


@cases(
    "key, line",
    ("compression.bits", '< 8 only with compression.error_feedback = false, where communication.compression = "qsgd"'),
    ("run.logical_shards", "not with parallel.pipeline > 1"),
    ("run.device", '"gpu" not with zero.shared_parameters = true'),
    ("run.device", '"gpu" only with --spares N, where hpcdist run --survive replace'),
    ("communication.compression", "not with hpcdist run --survive"),
)
def test_lookup_lists_excluded_keys(key, line):
    assert f"\n  {line}" in reference.lookup(key)


def test_lookup_returns_a_key_or_a_section():
    assert reference.lookup("parallel.pipeline").splitlines()[:4] == [
        "parallel.pipeline",
        "  Pipeline ranks, each of which holds a part of the model.",
        "  values: integer >= 1",
        "  default: 1",
    ]
    head, only_with, *keys = reference.lookup("zero").splitlines()
    assert head == "[zero] Sharding degrees, prefetch and offload."
    assert only_with == '  only with parallel.strategy = "zero1", "zero2" or "zero3"'
    assert [line.split()[0] for line in keys] == [key for key in recipes.defaults() if key.startswith("zero.")]


@pytest.mark.parametrize("here", SYNONYMS.values())
def test_terms_of_other_tools_map_to_existing_keys(here):
    assert reference.key_of(here) in recipes.defaults()


@cases(
    "word, message",
    ("parallel.pipelin", "the nearest known is 'parallel.pipeline'"),
    ("pipeline", "the nearest known is 'parallel.pipeline'"),
    ("zeros", "the nearest known is 'zero'"),
    ("optimizer.lr", "the nearest known is 'optimizer.learning_rate'"),
    ("xyzzy", "sections are: model, data"),
)
def test_lookup_rejects_unknown_words_with_suggestions(word, message):
    with pytest.raises(UsageError, match=message):
        reference.lookup(word)
