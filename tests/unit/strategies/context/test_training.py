"""Training over data x context: the steps of one rank for every gradient exchange; rejections, and the proof."""

from dataclasses import replace

import numpy as np
import pytest

from harness.trainings import (
    TOLERANCE,
    assert_rejected,
    blamed_ranks,
    check_training,
    difference,
    losses,
    recipe_keys,
    run_single_process,
    trainer_of,
)
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ScheduleError
from hpcdist.strategies.context import operations
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 20
KEYS = {"optimizer.groups": "['*bias*: weight_decay=0.3 rate_factor=0.5', '2.*: rate_factor=2.0']"} | recipe_keys(
    f"layers=1 hidden=16 heads=4 vocabulary=257 data.context=26 steps={STEPS} global_batch=5 validation_samples=11 "
    "optimizer.warmup_steps=3 optimizer.clip_norm=0.7 precision.mode=float64"
)
CASES = {  # ranks, keys
    "ring of 2": (2, "parallel.context=2 context_method=ring"),
    "heads for tokens": (2, "parallel.context=2 context_method=all_to_all dropout=0.2 kv_heads=2"),
    "ring of 3, rotary, grouped, dropping": (3, "parallel.context=3 positions=rotary kv_heads=2 dropout=0.2 norm=rms"),
    "encoder": (2, "parallel.context=2 kind=encoder dropout=0.1"),
    "zero3 x data": (4, "parallel.context=2 strategy=zero3 microbatches=2"),
    "in float32": (2, "parallel.context=2 precision.mode=float32"),
    "all axes": (
        8,
        "parallel.context=2 tensor=2 pipeline=2 microbatches=5 sequence_parallel=true dropout=0.2 tied=true layers=2",
    ),
    # of the full tier
    "heads for tokens x tensor x zero3": (
        8,
        "parallel.context=2 tensor=2 context_method=all_to_all strategy=zero3 kv_heads=2 positions=rotary dropout=0.1",
    ),
    "heads for tokens, one shared, zb-h1": (
        4,
        "parallel.context=2 context_method=all_to_all pipeline=2 schedule=zb-h1 microbatches=5 kv_heads=1 layers=2",
    ),
    "ring of 4": (4, "parallel.context=4 data.context=37"),
    "ring of 8": (8, "parallel.context=8 data.context=64 strategy=zero2"),
    "zero1 x data": (4, "parallel.context=2 strategy=zero1 overlap=thread"),
    "zero2 x data": (6, "parallel.context=2 strategy=zero2 optimizer.name=lamb"),
    "zero3, recomputing": (2, "parallel.context=2 strategy=zero3 recompute=true layers=2 dropout=0.1"),
    "tensor": (4, "parallel.context=2 tensor=2 positions=rotary kv_heads=2"),
    "tensor by rows": (
        6,
        "parallel.context=2 tensor=3 sequence_parallel=true heads=3 hidden=24 dropout=0.2 data.context=29",
    ),
    "pipeline": (4, "parallel.context=2 pipeline=2 microbatches=5 recompute=true dropout=0.1"),
    "interleaved": (
        4,
        "parallel.context=2 pipeline=2 schedule=interleaved chunks=2 microbatches=2 layers=2 global_batch=4",
    ),
    "zb-h1": (4, "parallel.context=2 pipeline=2 schedule=zb-h1 microbatches=5 kv_heads=1 layers=2"),
    "zb-v": (4, "parallel.context=2 pipeline=2 schedule=zb-v microbatches=5 layers=2 dropout=0.1"),
    "overlapping, polled": (4, "parallel.context=2 overlap=poll algorithm=ring bucket_bytes=4096"),
    "node shared": (4, "parallel.context=2 algorithm=node_shared strategy=zero2"),
    "bfloat16": (2, "parallel.context=2 precision.mode=bfloat16 strategy=zero1"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(b"".join(b"%d plus %d is %d. " % (i % 7, i % 5, i % 7 + i % 5) for i in range(900)))
    return path


@pytest.mark.full_except(*list(CASES)[:7])
@pytest.mark.parametrize("case", CASES)
def test_context_training_matches_one_rank(case, text):
    ranks, changed = CASES[case]
    keys = {**KEYS, "data.path": text, **recipe_keys(changed)}
    expected, wide = run_single_process(keys, STEPS), TOLERANCE.get(str(keys["precision.mode"]), 0.02)

    def body(comm):
        together = trainer_of(comm, keys)
        assert together.proof is not None
        check_training(together, expected, STEPS, wide)
        together.close()

    run_threads(ranks, body)


@pytest.mark.full
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize(
    "model", ["", "kv_heads=2 positions=rotary norm=rms", "kind=encoder dropout=0.2", "tied=true dropout=0.1"]
)
@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    "axes",
    [
        "",
        "tensor=2",
        "tensor=2 sequence_parallel=true",
        "pipeline=2 microbatches=5 recompute=true",
        "pipeline=2 schedule=zb-h1 microbatches=5",
    ],
)
def test_products_with_context_match_one_rank(axes, strategy, model, method, data, text):
    """Each case has 20 steps in float64. The whole product is a matrix of 320 cells."""
    keys = {
        **KEYS,
        "data.path": text,
        **recipe_keys(f"parallel.context=2 parallel.data={data} context_method={method}"),
    }
    keys |= recipe_keys(f"strategy={strategy} {axes} {model}")
    if strategy in ("zero2", "zero3") and "pipeline" in axes:
        keys["zero.keep_gradients"] = "true"
    expected = run_single_process(keys, STEPS)

    def body(comm):
        together = trainer_of(comm, keys)
        np.testing.assert_allclose(losses(together, STEPS), expected.losses, rtol=1e-12)
        assert difference(together, expected.state) <= 1e-11
        together.close()

    run_threads(2 * data * (2 if axes else 1), body)


def test_checkpoints_move_between_context_degrees(text, tmp_path):
    keys = {**KEYS, "data.path": text, "model.dropout": 0.1}
    layouts = (1, ""), (4, "parallel.context=2 strategy=zero1"), (3, "parallel.context=3 strategy=zero3")
    expected, path, made = run_single_process(keys, 8).losses, None, []

    def body(comm, changed, path, last):
        trainer = trainer_of(comm, keys | recipe_keys(changed), path)
        assert trainer.first_step == last - 2
        return losses(trainer, last), CheckpointSaver(trainer, tmp_path).save(last)

    for number, (ranks, changed) in enumerate((*layouts, layouts[0]), 1):
        (more, path), *_ = run_threads(ranks, lambda comm, c=changed, p=path, n=2 * number: body(comm, c, p, n))
        made += more
    np.testing.assert_allclose(made, expected, rtol=1e-12)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_rank_with_bad_tokens_is_named(method, text):
    """Bad values are sent in messages. Ranks that received them are not named."""
    keys = {**KEYS, "data.path": text, **recipe_keys(f"parallel.context=2 context_method={method}")}

    def body(comm):
        trainer = trainer_of(comm, keys)
        if comm.rank == 1:
            trainer.exchange.parameters.view("1.norm1.scale")[3] = np.nan
        return blamed_ranks(trainer)

    assert run_threads(2, body) == [[1]] * 2


def test_context_ranks_must_compute_in_the_same_order(text):
    keys = {**KEYS, "data.path": text, **recipe_keys("parallel.context=2 microbatches=2")}

    def body(comm):
        trainer = trainer_of(comm, keys)
        return trainer.operations, dict(enumerate(trainer.model.layout.units.values()))

    (steps, units), (other, _) = run_threads(2, body)
    grid = ProcessGrid(context=2)
    verify([steps, other], grid=grid, units=units, microbatches=2)
    swapped = [
        replace(op, microbatch=1 - op.microbatch) if op.kind in (Kind.FORWARD, Kind.BACKWARD) else op for op in other
    ]
    with pytest.raises(ScheduleError, match="same order"):
        verify([steps, swapped], grid=grid, units=units, microbatches=2)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_attention_messages_are_proven_before_the_run(method, text, monkeypatch):
    make = operations.MESSAGES[method]

    def without_the_last(placed, window, rank, back):
        messages = make(placed, window, rank, back)
        return messages[:-1] if rank == 1 and back else messages

    monkeypatch.setitem(operations.MESSAGES, method, without_the_last)
    keys = {**KEYS, "data.path": text, **recipe_keys(f"parallel.context=2 context_method={method}")}

    def body(comm):
        with pytest.raises(ScheduleError, match="rank 1"):
            trainer_of(comm, keys)

    run_threads(2, body)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ("kind=mlp", "not built.*train a gpt or an encoder"),
        ("data.context=4", "use at most 1 context rank,"),
        (
            "context_method=all_to_all heads=3 hidden=24",
            "3 query heads: each rank must get the same number.*set parallel.context_method = 'ring', which",
        ),
        ("context_method=all_to_all heads=12 hidden=24 kv_heads=3 parallel.context=2", "3 shared heads.*'ring'"),
        ("strategy=gossip", "not built"),
        ("strategy=parameter_server", "not built"),
        ("communication.compression=int8", "not built"),
        ("logical_shards=4", "not built"),
        ("noise_scale_every_steps=2", "not built"),
        ("data.shares=measured", "not built"),
    ],
)
def test_unsupported_context_recipes_are_rejected(changed, match):
    assert "parallel.context = 2" in assert_rejected(
        {**recipe_keys("parallel.context=2"), **recipe_keys(changed)}, match
    )
