"""Low-rank adapters and frozen tensors over ranks: every layout matches one process."""

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import (
    SMALL,
    Trained,
    assert_rejected,
    check_same,
    difference,
    losses,
    recipe_keys,
    run_single_process,
    state,
    trainer_of,
)
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 6
KEYS = SMALL | recipe_keys(
    f"layers=2 hidden=24 heads=4 vocabulary=257 data.context=12 steps={STEPS} precision.mode=float64 "
    "lora.rank=3 lora.alpha=6 optimizer.learning_rate=0.03 optimizer.clip_norm=0.7"
)
LLAMA = recipe_keys("positions=rotary norm=rms activation=swiglu kv_heads=2 bias=false tied=true")
DROPPING = {"lora.dropout": 0.3}
CASES = {
    "allreduce": (2, "microbatches=2", LLAMA | DROPPING),
    "zero1": (2, "strategy=zero1 algorithm=ring", LLAMA),
    "zero2": (3, "strategy=zero2 algorithm=hierarchical microbatches=2", {}),
    "zero3": (2, "strategy=zero3 microbatches=2", LLAMA),
    "tensor": (3, "tensor=3 heads=6", DROPPING),
    "tensor by rows": (2, "tensor=2 sequence_parallel=true microbatches=2", LLAMA | DROPPING),
    "tensor x zero3": (4, "tensor=2 strategy=zero3 sequence_parallel=true", LLAMA),
    "pipeline x zero1": (4, "pipeline=2 strategy=zero1 microbatches=3", LLAMA),
    "zero bubbles": (2, "pipeline=2 schedule=zb-v microbatches=3 global_batch=6", LLAMA | DROPPING),
    "zero bubbles x tensor": (4, "pipeline=2 schedule=zb-v microbatches=3 tensor=2 sequence_parallel=true", DROPPING),
    "recomputing": (2, "pipeline=2 microbatches=3 recompute=true", LLAMA | DROPPING),
    "context": (2, "parallel.context=2", LLAMA | DROPPING),
    "context x tensor": (4, "parallel.context=2 tensor=2 sequence_parallel=true", DROPPING),
    "parameter server": (3, "strategy=parameter_server", {}),
    "frozen by pattern": (2, "strategy=zero1", LLAMA | {"lora.rank": 0, "lora.alpha": 16.0}),
}
FROZEN = {"optimizer.groups": "['0.* *.norm* 1.*: frozen=1']"}


@pytest.mark.parametrize("case", CASES)
def test_adapters_over_ranks_match_one_process(case, shared_text):
    ranks, layout, model = CASES[case]
    keys = KEYS | {"data.path": shared_text} | model | recipe_keys(layout)
    keys |= {} if keys["lora.rank"] else FROZEN
    expected = run_single_process(keys, STEPS)
    first = run_single_process(keys | {"run.steps": STEPS}, 1).state

    def body(comm):
        trainer = trainer_of(comm, keys)
        np.testing.assert_allclose(losses(trainer, STEPS), expected.losses, rtol=1e-12)
        assert difference(trainer, expected.state) <= 1e-12

    run_threads(ranks, body)
    assert expected.losses[-1] < expected.losses[0]
    trained = {name for kind, name in expected.state if kind == "optimizer.m"}
    for kind, name in first:
        if kind == "parameters":
            assert (first[kind, name] == expected.state[kind, name]).all() == (name not in trained), name
    if keys["lora.rank"]:
        assert all(name.endswith(("lora_a", "lora_b")) for name in trained)


@pytest.mark.parametrize("layout", ["strategy=zero2", "tensor=2 strategy=zero1 sequence_parallel=true"])
def test_adapters_over_ranks_on_a_gpu_match_the_cpu(gpu, layout, words):
    keys = {**words, **recipe_keys(f"lora.rank=2 lora.dropout=0.2 algorithm=ring precision.mode=float64 {layout}")}
    host, device = (
        run_threads(4, lambda comm, on=on: Trained(comm, keys | {"run.device": on})) for on in ("cpu", "gpu")
    )
    check_same(host, device, 1e-12)


@pytest.mark.full
def test_checkpoints_with_adapters_move_between_layouts(shared_text, tmp_path):
    keys = KEYS | LLAMA | {"data.path": shared_text}
    expected, path, result = run_single_process(keys | {"run.steps": 8}, 8), None, []
    layouts = ((1, {}), (2, {"parallel.tensor": 2}), (3, {"parallel.strategy": "zero3"}), (2, {"parallel.pipeline": 2}))

    def body(comm, changed, path, last):
        trainer = trainer_of(comm, keys | {"run.steps": 8} | changed, path)
        more = losses(trainer, last)
        return more, difference(trainer, expected.state), CheckpointSaver(trainer, tmp_path).save(last)

    for number, (ranks, changed) in enumerate(layouts, 1):
        (more, apart, path), *_ = run_threads(ranks, lambda comm, c=changed, p=path, n=2 * number: body(comm, c, p, n))
        result += more
    np.testing.assert_allclose(result, expected.losses, rtol=1e-12)
    assert apart <= 1e-12


def test_adapters_in_mixed_precision_keep_their_base(shared_text):
    keys = KEYS | LLAMA | {"data.path": shared_text, "precision.mode": "bfloat16", "precision.activations": "float32"}

    def body(comm):
        trainer = trainer_of(comm, keys | {"parallel.strategy": "zero1"})
        before = state(trainer)
        return losses(trainer, STEPS), before, state(trainer)

    results, before, after = run_threads(2, body)[0]
    assert results[-1] < results[0]
    base = [key for key in before if key[0] == "parameters" and "lora" not in key[1]]
    assert all(before[key].tobytes() == after[key].tobytes() for key in base)
    assert all((before[key].view(np.uint32) & 0xFFFF == 0).all() for key in base), "not rounded to bfloat16"


@cases(
    "keys, message",
    ("lora.rank=2 model.kind=mlp", "only the blocks of transformers have adapters"),
    ("lora.alpha=3", "lora.alpha = 3.0 has no effect with lora.rank = 0"),
    ("lora.rank=2 lora.targets=['c_attn']", "lora.targets has 'c_attn', which matches no linear layer"),
)
def test_adapters_that_cannot_work_are_rejected(keys, message):
    assert message in assert_rejected(keys.split())


@cases(
    "keys, message",
    ({"lora.rank": 2, "lora.targets": "['gate']"}, "lora.targets has gate, but the blocks of the model have no such"),
    ({"lora.rank": 2, "model.experts": 4, "lora.targets": "['up']"}, "lora.targets has up, but the blocks"),
    ({"lora.rank": 0, "lora.alpha": 16.0, "optimizer.groups": "['*: frozen=1']"}, "freezes all tensors"),
    ({"lora.rank": 2, "optimizer.groups": "['1.typo.*: frozen=1']"}, "frozen=1' in optimizer.groups freezes no tensor"),
)
def test_adapters_that_the_model_lacks_are_rejected(keys, message, shared_text):
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(solo(), KEYS | {"data.path": shared_text} | keys)


def test_memory_is_that_of_the_frozen_tensors_and_16_bytes_per_trained_parameter(shared_text):
    keys = SMALL | LLAMA | recipe_keys("layers=2 hidden=256 heads=4 vocabulary=512 run.steps=2 lora.rank=4")
    trainer = trainer_of(solo(), keys | {"data.path": shared_text})
    losses(trainer, 2)
    trained = sum(segment.spec.size for segment in trainer.model.layout.segments)
    frozen = sum(segment.spec.size for segment in trainer.model.whole_layout.segments) - trained
    states = sum(trainer.ledger.peak[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert frozen > 10 * trained and states <= 1.05 * (4 * frozen + 16 * trained)
