"""A steady step allocates nothing: after the first steps memory is flat, and no array of a model is reallocated.


Reallocated activations, weights or gradients of a layer would exceed the allowance. A model four times as large must
not need more memory, which shows that smaller arrays are not reallocated either.
"""

import pytest

from harness.models.steady import measure_steady_steps, unseen_messages
from harness.trainings import recipe_keys
from hpcdist.models.config import ModelConfig
from hpcdist.models.counts import counts

ALLOWED = 160 << 10  # bytes, of all ranks together: numpy's buffers of 32 KiB, views, lists and floats
MORE = 16 << 10  # what a larger model of as many tensors may take beyond a smaller one

COMMON = recipe_keys(
    "layers=2 hidden=128 heads=2 data.context=128 steps=20 global_batch=8 validation_samples=2 "
    "optimizer.warmup_steps=2 optimizer.clip_norm=0.5 algorithm=ring"
)
LARGER = {"model.hidden": 256, "data.context": 256}
TWO = {"parallel.microbatches": 2}
PIPELINE = {"parallel.pipeline": 2, "parallel.microbatches": 4}
ALONE = {
    "sequential": {},
    "two micro-batches": TWO,
    "recompute": {"parallel.recompute": "true"},
    "gpipe, recompute": {"parallel.schedule": "gpipe", "parallel.recompute": "true", **TWO},
    "rotary, rms, swiglu, grouped": recipe_keys("positions=rotary norm=rms activation=swiglu kv_heads=1 bias=false"),
    "tied": {"model.tied": "true"},
    "dropout": {"model.dropout": 0.1},
    "sgd": recipe_keys("optimizer.name=sgd optimizer.momentum=0.0"),
    "nesterov": recipe_keys("optimizer.name=sgd optimizer.nesterov=true"),
    "lars": {"optimizer.name": "lars"},
    "lamb": {"optimizer.name": "lamb"},
    "bfloat16": {"precision.mode": "bfloat16"},
    "float16, lamb": recipe_keys("precision.mode=float16 optimizer.name=lamb"),
    "logical shards": recipe_keys("logical_shards=2 algorithm=auto"),
}
TOGETHER = {
    "allreduce": {"parallel.strategy": "allreduce"},
    "zero1": {"parallel.strategy": "zero1", **TWO},
    "zero2": {"parallel.strategy": "zero2", **TWO},
    "zero3": {"parallel.strategy": "zero3", **TWO},
    "allreduce, recompute": {"parallel.strategy": "allreduce", "parallel.recompute": "true"},
    "zero3, recompute": {"parallel.strategy": "zero3", "parallel.recompute": "true", **TWO},
    "zero3, bfloat16": {"parallel.strategy": "zero3", "precision.mode": "bfloat16", **TWO},
    "zero3, lamb": {"parallel.strategy": "zero3", "optimizer.name": "lamb"},
    "1f1b": {"parallel.schedule": "1f1b", **PIPELINE},
    "1f1b, recompute": {"parallel.schedule": "1f1b", "parallel.recompute": "true", **PIPELINE},
    "zero-bubble": {"parallel.schedule": "zb-h1", **PIPELINE},
}


def check(result):
    assert result.after == result.before, "the ledger is a flat line: nothing that it counts came or went"
    assert result.largest > ALLOWED, "a copy of a matrix would show"
    assert result.transient <= ALLOWED
    assert result.left <= MORE, "what the steps leave behind"


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.full
@pytest.mark.matrix_except("float16, lamb", "logical shards")
def test_steady_step_of_one_rank_allocates_nothing(case):
    check(measure_steady_steps(COMMON | ALONE[case]))


@pytest.mark.parametrize("case", TOGETHER)
@pytest.mark.full
@pytest.mark.matrix_except("zero3, bfloat16")
def test_steady_step_of_two_ranks_allocates_nothing(case, monkeypatch):
    unseen_messages(monkeypatch)
    check(measure_steady_steps(COMMON | TOGETHER[case], ranks=2))


@pytest.mark.parametrize("case", ["sequential", "recompute", "lamb", "bfloat16"])
@pytest.mark.matrix
def test_larger_model_allocates_no_more(case):
    small, large = measure_steady_steps(COMMON | ALONE[case]), measure_steady_steps(COMMON | ALONE[case] | LARGER)
    assert large.largest >= 4 * small.largest
    assert large.transient <= small.transient + MORE


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("strategy", "ranks"), [("allreduce", 1), ("zero3", 2)])
@pytest.mark.full
@pytest.mark.matrix_except("allreduce-1-True")
def test_activation_memory_matches_the_closed_form(strategy, ranks, recompute, monkeypatch):
    """The bound is 10 %, independent of the memory of gradients and parameters."""
    unseen_messages(monkeypatch)
    keys = {"parallel.strategy": strategy, "parallel.recompute": str(recompute).lower()}
    result = measure_steady_steps(COMMON | keys | {"model.layers": 4, "run.global_batch": 8 * ranks}, ranks)
    form = counts(ModelConfig(layers=4, hidden=128, heads=2), context=128)
    expected = form.activation_bytes(8, recompute=recompute)
    assert result.after[1]["activations"] == pytest.approx(expected, rel=0.1)


def test_planted_allocations_are_detected():
    """The planted step reallocates one array of activations in each step, and keeps another."""
    kept = []

    def spoil(trainer):
        healthy = trainer.model.loss.backward

        def backward(scale, operations, saved):
            d = healthy(scale, operations, saved)
            kept.append(bytearray(MORE))
            return d.copy()

        trainer.model.loss.backward = backward

    result = measure_steady_steps(COMMON, change=spoil)
    assert result.transient > ALLOWED and result.left > MORE
