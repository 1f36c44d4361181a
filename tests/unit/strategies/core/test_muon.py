"""Muon over ranks: every layout matches one process, sends the bytes of AdamW, and moves its checkpoints."""

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
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 6
KEYS = SMALL | recipe_keys(
    f"layers=2 hidden=24 heads=4 data.context=12 steps={STEPS} precision.mode=float64 "
    "optimizer.name=muon optimizer.momentum=0.95"
)
LLAMA = recipe_keys("positions=rotary norm=rms activation=swiglu kv_heads=2 bias=false")
CASES = {
    "zero1": (2, "strategy=zero1 algorithm=ring", LLAMA),
    "zero2, hierarchical": (3, "strategy=zero2 algorithm=hierarchical microbatches=2", {}),
    "zero3": (4, "strategy=zero3 microbatches=2", LLAMA),
    "zero3 in nested groups": (4, "strategy=zero3 zero.parameters=2", {}),
    "zero1 in shared memory": (2, "strategy=zero1 zero.shared_parameters=true", {}),
    "zero3, prefetching": (2, "strategy=zero3 communication.overlap=poll algorithm=ring zero.prefetch=1", {}),
    "zero2, logical shards": (2, "strategy=zero2 run.logical_shards=4", {}),
    "tensor": (3, "tensor=3 heads=6", {}),
    "tensor x zero3": (4, "tensor=2 strategy=zero3 sequence_parallel=true", LLAMA),
    "pipeline x zero1": (4, "pipeline=2 strategy=zero1 microbatches=3", {}),
    "context": (2, "parallel.context=2", {}),
    "expert x zero1": (4, "model.experts=4 expert=2 strategy=zero1", {}),
    "tensor x expert": (4, "model.experts=4 expert=2 tensor=2", LLAMA),
    "allreduce, averages": (2, "ema_decay=0.9", {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.full_except("zero3", "tensor x zero3")
def test_muon_over_ranks_matches_one_process(case, shared_text):
    ranks, layout, model = CASES[case]
    keys = KEYS | {"data.path": shared_text} | model | recipe_keys(layout)
    expected = run_single_process(keys, STEPS)

    def body(comm):
        trainer = trainer_of(comm, keys)
        np.testing.assert_allclose(losses(trainer, STEPS), expected.losses, rtol=1e-12)
        assert difference(trainer, expected.state) <= 1e-12

    run_threads(ranks, body)
    assert expected.losses[-1] < expected.losses[0]


@pytest.mark.parametrize("layout", ["strategy=zero2", "tensor=2 strategy=zero1"])
def test_muon_over_ranks_on_a_gpu_matches_the_cpu(gpu, layout, words):
    keys = {**words, **recipe_keys(f"optimizer.name=muon algorithm=ring precision.mode=float64 {layout}")}
    host, device = (
        run_threads(4, lambda comm, on=on: Trained(comm, keys | {"run.device": on})) for on in ("cpu", "gpu")
    )
    check_same(host, device, 1e-12)


def test_muon_sends_the_bytes_of_adamw_under_zero1(shared_text):
    keys = KEYS | {"data.path": shared_text} | recipe_keys("strategy=zero1 algorithm=ring")

    def body(comm, name):
        trainer = trainer_of(comm, keys | {"optimizer.name": name})
        with count_traffic(comm) as traffic:
            losses(trainer, STEPS)
        return traffic.sent_bytes

    muon, adamw = (run_threads(3, lambda comm, name=name: body(comm, name)) for name in ("muon", "adamw"))
    assert sum(muon) == sum(adamw)


@pytest.mark.full
def test_muon_checkpoints_move_between_layouts(shared_text, tmp_path):
    keys = KEYS | {"data.path": shared_text}
    expected, path, result = run_single_process(keys, 8), None, []
    layouts = ((1, {}), (2, {"parallel.tensor": 2}), (3, {"parallel.strategy": "zero3"}), (2, {}))

    def body(comm, changed, path, last):
        trainer = trainer_of(comm, keys | changed, path)
        more = losses(trainer, last)
        kept = state(trainer)
        assert ("optimizer.m", "1.up.weight") in kept and ("optimizer.v", "1.up.weight") not in kept
        assert ("optimizer.v", "0.tokens.weight") in kept
        return more, difference(trainer, expected.state), CheckpointSaver(trainer, tmp_path).save(last)

    for number, (ranks, changed) in enumerate(layouts, 1):
        (more, apart, path), *_ = run_threads(ranks, lambda comm, c=changed, p=path, n=2 * number: body(comm, c, p, n))
        result += more
    np.testing.assert_allclose(result, expected.losses, rtol=1e-12)
    assert apart <= 1e-12


@cases(
    "layout, message",
    ("strategy=parameter_server", "servers own parts of matrices, but muon updates whole matrices"),
    ("strategy=gossip", "set decentralised.order = 'adapt_first'"),
    ("strategy=zero1 offload_optimizer=file offload_directory=/tmp", "offloaded state is updated in blocks"),
    ("communication.compression=dgc", "it replaces the momentum of sgd"),
)
def test_layouts_that_cannot_keep_matrices_whole_are_rejected(layout, message):
    assert message in assert_rejected(KEYS | recipe_keys(layout))


@pytest.mark.parametrize("layout", ["strategy=local_sgd", "strategy=gossip order=adapt_first"])
@pytest.mark.full
def test_replicas_that_differ_train_with_muon(layout, shared_text):
    keys = KEYS | {"data.path": shared_text, "run.steps": 12} | recipe_keys(layout)
    first, *_, last = run_threads(2, lambda comm: losses(trainer_of(comm, keys), 12))[0]
    assert last < first
