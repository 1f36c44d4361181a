"""The deterministic mode: one recipe has one sequence of bits on any number of ranks, and its list is proven."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import assert_rejected, blamed_ranks, digest, small_trainer
from harness.trainings import losses_and_norms as train
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.strategies.core import logical_shards
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.operations import Kind
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 4
SAMPLES = 24
trainer_of = partial(small_trainer, **{"run.global_batch": SAMPLES, "run.logical_shards": 8})


def whole_run(comm, path, keys):
    trainer = trainer_of(comm, path, keys)
    assert trainer.proof is not None
    return train(trainer, STEPS), digest(trainer), mean_validation_loss(trainer)


@cases(
    "shards, keys",
    (4, {"optimizer.name": "adamw", "optimizer.clip_norm": 0.1}),
    (8, {"optimizer.name": "lamb", "model.tied": "true", "optimizer.clip_norm": 0.1}),
    (6, {"optimizer.name": "lars", "communication.bucket_bytes": 1000}),
    (6, {"optimizer.name": "sgd", "precision.mode": "float64", "model.kind": "mlp"}),
)
@pytest.mark.full_except("6-keys3")
def test_run_has_the_same_bits_on_any_number_of_ranks(text, shards, keys):
    keys = keys | {"run.logical_shards": shards}
    expected = run_threads(1, lambda comm: whole_run(comm, text, keys))[0]
    assert all(math.isfinite(number) for step in expected[0] for number in step)
    for size in (2, 3, shards):
        for result in run_threads(size, lambda comm: whole_run(comm, text, keys)):
            assert result == expected, f"{size} ranks"


def test_deterministic_run_matches_the_plain_run_up_to_rounding(text):
    plain = run_threads(1, lambda comm: whole_run(comm, text, {"run.logical_shards": 0, "precision.mode": "float64"}))
    sharded = run_threads(3, lambda comm: whole_run(comm, text, {"precision.mode": "float64"}))
    np.testing.assert_allclose(sharded[0][0], plain[0][0], rtol=1e-11)
    assert sharded[0][2] == pytest.approx(plain[0][2], rel=1e-12)


@pytest.mark.parametrize("sizes", [(4, 1), (2, 3), (1, 5)])
@pytest.mark.full
def test_resume_on_another_number_of_ranks_has_the_same_bits(text, tmp_path, sizes):
    def first(comm):
        trainer = trainer_of(comm, text, {})
        return train(trainer, 3), CheckpointSaver(trainer, tmp_path / "checkpoints").save(3)

    def second(comm):
        trainer = trainer_of(comm, text, {}, resume=saved)
        return train(trainer, 6), digest(trainer)

    def run_whole(comm):
        trainer = trainer_of(comm, text, {})
        return train(trainer, 6), digest(trainer)

    losses, saved = run_threads(sizes[0], first)[0]
    expected, weights = run_threads(2, run_whole)[0]
    for rest, result in run_threads(sizes[1], second):
        assert (losses + rest, result) == (expected, weights)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_step_is_proven_with_one_meeting_per_range(text, size):
    trainers = run_threads(size, lambda comm: trainer_of(comm, text, {"communication.bucket_bytes": 2000}))
    lists = [trainer.operations for trainer in trainers]
    reduces = [op for op in lists[0] if op.kind is Kind.REDUCE]
    adds = [op for op in lists[0] if op.kind is Kind.ADD]
    assert len(reduces) > 2 and len(adds) == len(reduces) * (-(-8 // size) - 1)
    assert all(trainer.proof is not None and trainer.proof.meetings == len(reduces) + 1 for trainer in trainers)


@cases(
    "changes, match",
    ({Kind.ADD: None}, "never exchanged"),
    ({Kind.ADD: Kind.REDUCE}, "needs operations REDUCE or PUSH that cover every part"),
    ({Kind.REDUCE: Kind.ADD}, "needs operations REDUCE or PUSH that cover every part"),
    ({Kind.REDUCE: None}, "never exchanged"),
    ({Kind.ADD: Kind.REDUCE, Kind.REDUCE: Kind.ADD}, r"REDUCE\(0, .* comes before ADD\(1, "),
)
def test_broken_step_is_rejected(text, changes, match):
    trainer = run_threads(1, lambda comm: trainer_of(comm, text, {}))[0]
    steps = list(trainer.operations)
    for old, new in changes.items():  # of the first of its kind
        at = next(index for index, op in enumerate(trainer.operations) if op.kind is old)
        steps[at : at + 1] = [] if new is None else [replace(steps[at], kind=new)]
    grid = ProcessGrid(data=2)  # a step of one rank alone needs no exchange
    units = dict(trainer.context.ranges)
    verify([trainer.operations] * 2, grid=grid, units=units, microbatches=8, accumulates=False)
    with pytest.raises(ScheduleError, match=match):
        verify([steps] * 2, grid=grid, units=units, microbatches=8, accumulates=False)


def test_step_sends_the_bytes_of_the_ring(text):
    def body(comm):
        trainer = trainer_of(comm, text, {"model.hidden": 64})
        with count_traffic(comm) as traffic:
            train(trainer, 1)
        assert not traffic.unknown
        psi = trainer.model.layout.parameters * 4
        agreed = 8 * (8 + 3) * 2  # losses, norm and two wishes, doubled at most twice
        assert abs(traffic.sent_bytes - 2 * psi * (comm.size - 1) / comm.size) < 0.005 * psi + agreed

    for size in (2, 4):
        run_threads(size, body)


def test_partial_sums_take_the_documented_memory(text):
    trainer = run_threads(1, lambda comm: _train(comm, text))[0]
    psi = trainer.model.layout.size * 4
    assert trainer.ledger.peak["gradients"] == psi
    assert trainer.ledger.peak["communication"] <= 3.1 * psi  # log2(8 shards)


def _train(comm, text):
    trainer = trainer_of(comm, text, {"model.hidden": 64})
    train(trainer, 2)
    return trainer


def test_only_the_rank_with_a_bad_value_is_blamed(text):
    def body(comm):
        trainer = trainer_of(comm, text, {})
        if comm.rank == 1:
            trainer.exchange.parameters.array[...] = np.nan
        return blamed_ranks(trainer)

    assert run_threads(3, body) == [[1]] * 3


def test_resume_with_other_arithmetic_is_rejected(text, tmp_path, monkeypatch):
    def start(comm, resume=None, **keys):
        return trainer_of(comm, text, {key.replace("__", "."): value for key, value in keys.items()}, resume)

    saved = run_threads(2, lambda comm: CheckpointSaver(start(comm), tmp_path / "checkpoints").save(1))[0]
    monkeypatch.setattr(logical_shards, "fp_fingerprint", lambda dtype: "0123abcd")
    with pytest.raises(ConfigurationError, match="but the ranks now have the fingerprint 0123abcd.*OMP_NUM_THREADS"):
        run_threads(2, lambda comm: start(comm, saved))
    resumed = run_threads(2, lambda comm: start(comm, saved, run__logical_shards=0))[0]
    assert resumed.first_step == 1 and resumed.exchange.traits.algorithm != logical_shards.ALGORITHM

    def two(comm):
        names = ["0123abcd", "4567cdef"]
        monkeypatch.setattr(logical_shards, "fp_fingerprint", lambda dtype: names.pop())
        comm.barrier()
        start(comm)

    with pytest.raises(ConfigurationError, match="compute different bits than rank 0"):
        run_threads(2, two)


@cases(
    "override, key",
    ("parallel.strategy=gossip", "parallel.strategy"),
    ("parallel.pipeline=2", "parallel.pipeline"),
    ("parallel.microbatches=2", "parallel.microbatches"),
    ("parallel.schedule=gpipe", "parallel.schedule"),
    ("communication.algorithm=ring", "communication.algorithm"),
    ("communication.overlap=thread", "communication.overlap"),
    ("run.device=gpu", "run.device"),
    ("run.global_batch=18", "run.global_batch = 18 with run.logical_shards = 4"),
    ("parallel.data=5", "run.logical_shards = 4 with 5 data ranks"),
    ("run.logical_shards=-1", "run.logical_shards"),
)
def test_incompatible_keys_are_rejected_by_name(override, key):
    assert key in assert_rejected(["run.logical_shards=4", "run.global_batch=16", override])


def test_more_ranks_than_shards_are_rejected(text):
    with pytest.raises(ConfigurationError, match=r"run\.logical_shards = 2 with 3 data ranks: each needs"):
        run_threads(3, lambda comm: trainer_of(comm, text, {"run.logical_shards": 2}))
