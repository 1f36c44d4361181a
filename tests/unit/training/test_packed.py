"""Training on packed documents: it matches each document alone and any layout; resumes; rejected options."""

import numpy as np
import pytest

from harness.models.documents import spans
from harness.trainings import (
    TOLERANCE,
    assert_rejected,
    check_training,
    difference,
    losses,
    recipe_keys,
    recipe_of,
    run_single_process,
    trainer_of,
)
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.models.arena import Arena
from hpcdist.models.attention import kernels
from hpcdist.models.counts import counts
from hpcdist.models.stage import IGNORED
from hpcdist.planner.model.stage_split import stages
from hpcdist.training.build.pipeline import plan_without_mpi
from hpcdist.training.observe.figures import utilisation_figures
from hpcdist.training.run.saving import CheckpointSaver
from hpcdist.training.use_cases.plan import subject_of_recipe

STEPS = 20
KEYS = recipe_keys(
    f"layers=1 hidden=16 heads=4 vocabulary=257 data.context=26 steps={STEPS} global_batch=5 validation_samples=11 "
    "optimizer.warmup_steps=3 optimizer.clip_norm=0.7 precision.mode=float64 document_end=10 data.packed=true"
)
CASES = {  # ranks, keys
    "data of 3": (3, "microbatches=2"),
    "ring of 2, rotary": (2, "parallel.context=2 context_method=ring positions=rotary kv_heads=2 dropout=0.2"),
    "heads for tokens, encoder": (2, "parallel.context=2 context_method=all_to_all kind=encoder"),
    "tensor by rows x zero3": (4, "tensor=2 sequence_parallel=true strategy=zero3"),
    "pipeline of 3, recomputing": (3, "pipeline=3 microbatches=5 recompute=true layers=2 tied=true"),
    "in float32": (2, "strategy=zero3 precision.mode=float32"),
    "experts, encoder": (2, "expert=2 experts=4 expert_hidden=12 capacity_factor=0.8 balance_loss=0.1 kind=encoder"),
    # of the full tier
    "ring of 4": (4, "parallel.context=4"),
    "heads for tokens x tensor": (4, "parallel.context=2 tensor=2 context_method=all_to_all dropout=0.1"),
    "ring x tensor by rows": (4, "parallel.context=2 tensor=2 sequence_parallel=true"),
    "ring x pipeline": (4, "parallel.context=2 pipeline=2 microbatches=5 positions=rotary"),
    "zb-h1": (2, "pipeline=2 schedule=zb-h1 microbatches=5"),
    "zero2 of 4, encoder": (4, "strategy=zero2 microbatches=2 kind=encoder positions=rotary"),
    "a server": (2, "strategy=parameter_server"),
    "measured shares": (2, "shares=measured"),
    "logical shards": (2, "logical_shards=5"),
    "bfloat16": (2, "strategy=zero1 precision.mode=bfloat16"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(b"%d plus %d is %d\n" % (i % 7, i**3 % 1001, i % 7 + i**3 % 1001) for i in range(300)))
    return path


@pytest.mark.full_except(*list(CASES)[:7])
@pytest.mark.parametrize("case", CASES)
def test_packed_training_matches_one_rank(case, text):
    ranks, changed = CASES[case]
    keys = {**KEYS, "data.path": text, **recipe_keys(changed)}
    expected, wide = run_single_process(keys, STEPS), TOLERANCE.get(str(keys["precision.mode"]), 0.02)

    def body(comm):
        together = trainer_of(comm, keys)
        check_training(together, expected, STEPS, wide)
        together.close()

    run_threads(ranks, body)


@pytest.mark.parametrize(
    "changed",
    [
        "",
        "kind=encoder positions=rotary kv_heads=2",
        "experts=4 expert_hidden=12 balance_loss=0 z_loss=0.1",  # a sum over tokens alone
    ],
)
def test_packed_step_matches_each_document_alone(changed, text):
    trainer = trainer_of(solo(), {**KEYS, "data.path": text, **recipe_keys(changed)})
    model, layout = trainer.model, trainer.model.layout
    with trainer.batches(1) as batches:
        (tokens, targets) = next(iter(batches))
    given, places, _ = tokens.arrays
    store = FlatStore(layout, model.dtype)
    model.initialise(store, 3)

    def gradient(parts, count):
        """Return the summed loss of batches, and the gradient of its mean over ``count`` targets."""
        into, arena, total = FlatStore(layout, model.dtype), Arena(), 0.0
        bound = model.bind_gradients(into)
        for stage in bound:
            stage.begin_step()
        for x, y in parts:
            logits = model.forward(model.bind(store), x, arena)
            total += model.loss.forward(logits, y, model.operations, arena.saved(model.stages[-1].layer))
            model.backward(model.bind(store), bound, 1 / count, arena)
        for stage in bound:
            stage.finish()
        return total, into.array

    count = int((targets != IGNORED).sum())
    assert count == trainer.targets(1)
    loss, whole = gradient([(tokens, targets)], count)
    parts = [(given[n : n + 1, local_data], targets[n : n + 1, local_data]) for n, local_data in spans(places)]
    expected, apart = gradient([(x, y) for x, y in parts if (y != IGNORED).any()], count)
    assert len(parts) > len(given)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    assert np.linalg.norm(whole - apart) <= 1e-12 * np.linalg.norm(apart)


@pytest.mark.parametrize("changed", ["", "window=5", "kind=encoder"])
def test_operation_counts_match_the_attention_kernels(changed, text, monkeypatch):
    """The pairs visited by the kernels in an epoch, counted by tiles, match the pairs in the summary."""
    looked, advance = [], kernels.softmax_advance

    def advance_and_count(tile, where, *rest):
        (pairs, rows, columns), (_, _, first, stop, _) = tile.shape, where
        seen = [min(stop + row, columns) - max(first + row, 0) for row in range(rows)]
        looked.append(pairs * sum(max(0, number) for number in seen))
        advance(tile, where, *rest)

    monkeypatch.setattr(kernels, "softmax_advance", advance_and_count)
    keys = {**KEYS, "data.path": text, **recipe_keys(changed)}
    trainer = trainer_of(solo(), keys)
    source, config = trainer.source, trainer.recipe.model
    trainer = trainer_of(solo(), keys | {"run.global_batch": source.training.count})
    looked.clear()
    losses(trainer, 1)
    samples, blocks = source.training.count, config.layers
    assert sum(looked) == pytest.approx(samples * blocks * config.heads * source.documents.seen, rel=1e-12)
    output = utilisation_figures(solo(), trainer, float("nan"), "no speed")["flops_per_sample"]
    whole = counts(config, context=26)
    attention = 3 * 4 * config.hidden * sum(looked) / (samples * config.heads)
    linear = whole.flops - 3 * sum(unit.attention for unit in whole.units)
    assert output == pytest.approx(linear + attention, rel=1e-6) and output < whole.flops


def test_stage_split_uses_the_pairs_within_documents(tmp_path):
    """In a long context of short documents the head costs as much as more blocks, in runs and in plans."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"%063d\n" % number for number in range(200)))
    keys = recipe_keys("layers=8 hidden=16 heads=4 vocabulary=2000 data.context=640 global_batch=2 pipeline=2 steps=1")
    keys |= {"data.path": path}
    cut = {}
    for name, packed in (("whole", ""), ("packed", "document_end=10 data.packed=true")):
        local_data = keys | recipe_keys(packed)
        recipe, subject = recipe_of(local_data), subject_of_recipe(recipe_of(local_data), name)
        cut[name] = plan_without_mpi(recipe).stage_units
        assert (
            run_threads(2, lambda comm, local_data=local_data: trainer_of(comm, local_data).plan.stage_units)
            == [cut[name]] * 2
        )
        assert cut[name] == tuple(sum(of.times for of in rank) for rank in stages(subject.description, subject.layout))
    assert sum(cut["whole"]) == sum(cut["packed"]) == 10
    assert cut["packed"][0] > cut["whole"][0]


def test_packed_run_resumes_on_other_ranks(text, tmp_path):
    keys = {**KEYS, "data.path": text, "parallel.strategy": "zero1"}
    expected = run_single_process(keys, STEPS)

    def first(comm):
        trainer = trainer_of(comm, keys)
        losses(trainer, 7)
        saver = CheckpointSaver(trainer, tmp_path / "checkpoints")
        saver.save(7)
        trainer.close()

    run_threads(3, first)

    def second(comm):
        trainer = trainer_of(comm, keys, next((tmp_path / "checkpoints").glob("step*")))
        np.testing.assert_allclose(losses(trainer, STEPS), expected.losses[7:], rtol=1e-12)
        assert difference(trainer, expected.state) <= 1e-11
        trainer.close()

    run_threads(2, second)


def test_options_incompatible_with_packing_are_rejected():
    assert_rejected(["data.packed=true", "model.kind=mlp"], "data.packed = true .*train a gpt or an encoder")
    assert_rejected(["data.packed=true", "parallel.strategy=gossip"], "a step averages over the tokens of all replicas")
    assert_rejected(
        ["data.packed=true", "run.noise_scale_every_steps=5", "parallel.microbatches=2"], "different token counts"
    )
    assert_rejected(["data.document_end=10"], "data.document_end = 10 has no effect")
    assert_rejected(["data.cut_documents=true"], "data.cut_documents = true has no effect")
