"""The source of a run's algorithm: recipe, checkpoint, cache or measurement."""

from types import SimpleNamespace

import pytest

from harness.marks import cases
from harness.trainings import assert_rejected, recipe_of, session_of
from hpcdist import models
from hpcdist.collectives.dispatch import parse_algorithm
from hpcdist.comm.config import CommunicationConfig
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, MissingCapabilityError, UsageError
from hpcdist.training.build import selection, state_source
from hpcdist.training.build.assemble import assemble
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

SMALL = {"model.layers": 1, "model.hidden": 16, "model.heads": 1, "data.context": 8, "run.global_batch": 8}


@pytest.fixture(autouse=True)
def measuring(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    monkeypatch.setenv("HPCDIST_TUNING", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(selection.autotune, "BUDGET_S", 0.05)


def run(folder, ranks, resume=None, ranks_per_node=None, **keys):
    """Assemble a run and save its state. Return the selected algorithm and the checkpoint."""
    settings = {**SMALL, "data.path": folder / "text.txt", **{k.replace("__", "."): v for k, v in keys.items()}}
    recipe = recipe_of(settings)

    def body(comm):
        trainer = assemble(session_of(comm), recipe, resume)
        assert trainer.context.algorithm == trainer.selection.algorithm
        return trainer.selection, CheckpointSaver(trainer, folder / "saved").save(trainer.first_step + 1)

    results = run_threads(ranks, body, ranks_per_node)
    assert all(one == results[0] for one in results)
    return results[0]


def test_algorithm_comes_from_measurement_cache_and_checkpoint(tmp_path):
    first, saved = run(tmp_path, 2)
    second, _ = run(tmp_path, 2)
    third, _ = run(tmp_path, 2, saved)
    assert [one.source for one in (first, second, third)] == ["measured", "cache", "checkpoint"]
    assert first.algorithm == second.algorithm == third.algorithm
    assert first.seconds > 0 and second.seconds == third.seconds == 0
    assert f"{first.algorithm}, measured in" in first.described()


def test_algorithm_table_is_restored_from_a_checkpoint(tmp_path):
    table = "recursive_doubling<=4096,ring"
    given, saved = run(tmp_path, 2, communication__algorithm=table)
    kept, _ = run(tmp_path, 2, saved)
    assert (given.algorithm, given.source, given.described()) == (table, "recipe", "")
    assert (kept.algorithm, kept.source) == (table, "checkpoint")


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(3, None), (2, 1)])
def test_other_topology_selects_again_with_a_note(tmp_path, ranks, ranks_per_node):
    _, saved = run(tmp_path, 2, communication__algorithm="node_shared")
    result, _ = run(tmp_path, ranks, saved, ranks_per_node)
    assert result.source == "measured"
    assert "node_shared of the checkpoint was for nodes of 2 ranks" in result.note
    assert result.note in result.described() and "\n" not in result.described()


def test_checkpoint_without_node_information_is_accepted(tmp_path, monkeypatch):
    """Of its topology only the number of ranks is known."""
    before = SimpleNamespace(scalars={"world": 2, "algorithm": "ring"})
    monkeypatch.setattr(state_source.manifest, "load", lambda path: before)
    kept = _resolved(2, tmp_path)
    assert (kept.algorithm, kept.source) == ("ring", "checkpoint")
    anew = _resolved(3, tmp_path)
    assert anew.source == "measured" and "was for 2 ranks" in anew.note


def _resolved(ranks, saved):
    def body(comm):
        recipe = recipe_of(SMALL)
        model = models.build(recipe.model, recipe.precision.mode, context=8)
        session = session_of(comm)
        return selection.resolve_algorithm(session, recipe, model, comm, state_source.CheckpointSource(saved))

    return run_threads(ranks, body)[0]


def test_strategy_with_halves_does_not_keep_a_table(tmp_path):
    _, saved = run(tmp_path, 2, communication__algorithm="recursive_doubling<=4096,ring")
    result, _ = run(tmp_path, 2, saved, parallel__strategy="zero1")
    assert result.source == "measured"
    assert "not usable in this run" in result.note


def test_algorithm_is_native_if_measuring_is_disabled(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_TUNING", "off")
    result, _ = run(tmp_path, 2)
    assert (result.algorithm, result.source) == ("native", "default")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("HPCDIST_TUNING", "perhaps")
    with pytest.raises(ConfigurationError, match="HPCDIST_TUNING"):
        run(tmp_path, 2)


@pytest.mark.parametrize("keys", [{"parallel__strategy": "parameter_server"}, {"parallel__pipeline": 2}])
def test_no_measurement_without_reductions(tmp_path, keys):
    result, _ = run(tmp_path, 2, **keys)
    assert (result.algorithm, result.source, result.seconds) == ("native", "default", 0.0)


def test_agreements_use_the_algorithm_for_small_buffers(tmp_path):
    def agree(ranks, **keys):
        settings = {**SMALL, "data.path": tmp_path / "text.txt"} | {k.replace("__", "."): v for k, v in keys.items()}
        recipe = recipe_of(settings)

        return run_threads(ranks, lambda comm: assemble(session_of(comm), recipe).context.agree_algorithm)[0]

    assert agree(2, communication__algorithm="native<=4096,ring") == "native"
    assert agree(2, communication__algorithm="node_shared<=4096,ring") == "node_shared"
    assert agree(4, communication__algorithm="node_shared<=4096,ring", parallel__pipeline=2) == "recursive_doubling"
    assert agree(2, communication__algorithm="ring<=4096,native") == "recursive_doubling"
    assert agree(2, communication__algorithm="ring") == "recursive_doubling"


@pytest.mark.parametrize("table", ["nccl", "native<=4096,nccl", "nccl<=4096,native"])
def test_gpu_algorithms_are_rejected_on_cpus(tmp_path, table):
    with pytest.raises(ConfigurationError, match="needs GPUs, but run.device = cpu"):
        run(tmp_path, 2, communication__algorithm=table)


def test_table_with_nccl_requires_nccl(monkeypatch):
    monkeypatch.setattr(selection.nccl, "refusal", lambda comm: "no NCCL here")

    def body(comm):
        with pytest.raises(MissingCapabilityError, match="no NCCL here"):
            selection._refuse_on_cpu("native<=4096,nccl", "gpu", comm)
        selection._refuse_on_cpu("native<=4096,ring", "gpu", comm)

    run_threads(2, body)


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    [("node_shared", "allreduce"), ("node_shared<=4096,ring", "allreduce"), ("node_shared", "zero1")],
)
def test_shared_memory_across_nodes_is_rejected(tmp_path, algorithm, strategy):
    keys = {"communication__algorithm": algorithm, "parallel__strategy": strategy}
    with pytest.raises(ConfigurationError, match=r"communication\.algorithm = node_shared.* are on 2 nodes; set"):
        run(tmp_path, 4, ranks_per_node=2, **keys)
    with pytest.raises(ConfigurationError, match=r"set communication\.ranks_per_node = 0"):
        run(tmp_path, 4, ranks_per_node=2, communication__ranks_per_node=2, **keys)
    inside, _ = run(tmp_path, 2, **keys)
    assert inside.algorithm == algorithm


@cases(
    "text, output",
    ("nativ<=4096,ring", "row 'nativ<=4096' is unknown, did you mean native;"),
    ("native<=4K,ring", "row 'native<=4K': sizes are plain bytes: 4096, not 4K;"),
    ("native<=8,ring<=4,ring", "row 'ring<=4': sizes must ascend, but the previous row has 8;"),
    ("native<=8,ring<=16", "row 'ring<=16': the last row must have no size;"),
    ("native,ring", "row 'native': every row but the last needs a size;"),
    ("rong", "'rong' is unknown, did you mean ring;"),
    ("", "'' is unknown;"),
)
def test_invalid_row_of_a_table_is_named(text, output):
    with pytest.raises(ConfigurationError) as caught:
        CommunicationConfig(algorithm=text)
    assert f"communication.algorithm is invalid: {output}" in str(caught.value) and "(" not in str(caught.value)
    with pytest.raises(UsageError) as used:
        parse_algorithm(text)
    assert output in str(used.value) and ", nccl," in str(used.value)


@cases(
    "text",
    *("ring<=4096", "auto<=4096,ring", "ring,native", "nothing<=1,ring", "ring<=x,native", "ring<=1,nothing"),
    *("ring<=007,native", "ring<=8,native<=4,ring", "ring<=8,native<=8,ring"),
)
def test_recipes_reject_invalid_tables(text):
    assert_rejected([f"communication.algorithm={text}"], r"communication\.algorithm")


@pytest.mark.parametrize("text", ["ring<=0,native", "ring<=8,native<=70,ring", "native<=999999999999999999,ring"])
def test_recipes_accept_all_valid_algorithms(text):
    algorithm = recipes.load(None, [f"communication.algorithm={text}"]).recipe.communication.algorithm
    assert str(parse_algorithm(algorithm)) == algorithm == text
