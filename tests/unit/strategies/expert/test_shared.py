"""Experts of a node: their assignment to ranks, and the same bits for messages and shared memory."""

import numpy as np
import pytest

from harness.trainings import SMALL, losses_and_norms, recipe_keys, state, trainer_of
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.expert import shared
from hpcdist.strategies.expert.shared import SharedRows, divide
from hpcdist.training.build import assemble

STEPS = 3
KEYS = {**SMALL, "run.steps": STEPS, "optimizer.clip_norm": 0.3} | recipe_keys(
    "layers=2 hidden=12 experts=8 expert_hidden=10 dropout=0.1 balance_loss=0.1 z_loss=0.01 global_batch=10"
)
LAYOUTS = {
    "two": (2, "expert=2 shared_experts=1"),
    "one expert a rank": (4, "expert=4 experts=4 activation=swiglu microbatches=3"),  # ranks without samples
    "replicas, without biases": (4, "expert=2 strategy=zero1 bias=false microbatches=2 capacity_factor=1.5"),
    "tensor by rows": (4, "expert=2 tensor=2 sequence_parallel=true microbatches=2"),
    "recomputed": (2, "expert=2 strategy=zero3 recompute=true"),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_lending_minimises_the_load_of_the_busiest_rank(rng, ranks):
    """All single loans and swaps between the busiest and the idlest rank are tried, for random loads."""
    for worth in (0, 40):
        loads = rng.integers(0, 200, 4 * ranks) * rng.integers(0, 2, 4 * ranks)
        at = divide(loads, ranks, worth)
        owner = np.arange(4 * ranks) // 4
        before, rows = (np.bincount(of, loads, ranks) for of in (owner, at))
        # With more than two ranks another one may be about as busy as the one that lends.
        assert rows.max() <= before.max() - (worth if ranks == 2 else 1) * (at != owner).any()
        busy, idle = rows.argmax(), rows.argmin()
        for given in np.flatnonzero(at == busy):
            for taken in (None, *np.flatnonzero(at == idle)):
                moved = loads[given] - (0 if taken is None else loads[taken])
                most = max(rows[busy] - moved, rows[idle] + moved)
                assert most >= rows[busy] - worth * (1 if taken is None else 2)


def test_even_loads_and_small_gaps_lend_nothing():
    for loads in (np.full(8, 100), np.array([130, 100, 100, 100, 100, 100, 100, 100]), np.zeros(8, np.int64)):
        np.testing.assert_array_equal(divide(loads, 2, 20), np.arange(8) // 4)
    np.testing.assert_array_equal(divide(np.array([90, 10, 20, 0]), 4, 0), np.arange(4))  # no expert is cut


def train(comm, keys):
    trainer = trainer_of(comm, keys)
    lent = []
    travel = trainer.model.operations.experts.travel
    if isinstance(travel, SharedRows):
        send_buffer = travel.send_buffer

        def counted_memory(starts, like, parameters, saved):
            memory = send_buffer(starts, like, parameters, saved)
            lent.append(sum(map(len, saved["experts.division"].lent)))
            return memory

        travel.send_buffer = counted_memory
    result = losses_and_norms(trainer, STEPS), state(trainer), sum(lent), type(travel)
    trainer.close()
    return result


@pytest.mark.parametrize("mode", ["float32", "float64"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except("two-float32", "one expert a rank-float64", "replicas, without biases-float32")
def test_lent_experts_have_the_bits_of_messages(text, monkeypatch, name, mode):
    ranks, layout = LAYOUTS[name]
    keys = KEYS | {"data.path": text, "precision.mode": mode} | recipe_keys(f"algorithm=ring {layout}")
    runs = {}
    for how, worth in (("lending", 0), ("shared", 1 << 40), ("messages", 0)):
        algorithm = "pairwise" if how == "messages" else "node_shared"
        monkeypatch.setattr(shared, "WORTH_ROWS", worth)
        monkeypatch.setattr(assemble, "algorithm_for", lambda *_, algorithm=algorithm, **__: algorithm)
        runs[how] = run_threads(ranks, lambda comm: train(comm, keys))
    assert runs["shared"][0][2] == 0 and runs["messages"][0][3] is not SharedRows
    assert (runs["lending"][0][2] > 0) == (name != "one expert a rank")
    for how in ("shared", "messages"):
        for local_data, other in zip(runs["lending"], runs[how], strict=True):
            assert local_data[0] == other[0]
            for key, values in local_data[1].items():
                np.testing.assert_array_equal(values, other[1][key], err_msg=f"{how} {key}")
