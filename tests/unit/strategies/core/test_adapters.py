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
from hpcdist.comm.threads.communicator import run_threads
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
