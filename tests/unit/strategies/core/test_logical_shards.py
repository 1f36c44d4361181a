"""Logical shards: any split of the model and its gradients over ranks ends with the same bits."""

from functools import partial

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import assert_rejected, small_trainer, state_bits
from harness.trainings import losses_and_norms as train
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import ThreadCommunicator, run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.core.operations import Kind
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 3
SAMPLES = 12
SHARDS = 6  # two on some of 4 ranks, one on the others; one node of the tree for all of a rank, or two

ALLREDUCE = {"parallel.strategy": "allreduce"}
ZERO3 = {"parallel.strategy": "zero3"}
SHARED = {"parallel.strategy": "zero2", "zero.shared_parameters": "true"}
WAYS = [
    ALLREDUCE,
    {"parallel.strategy": "zero1"},
    {"parallel.strategy": "zero2"},
    ZERO3,
    SHARED,
    ZERO3 | {"zero.persistent_below": 300},
    ZERO3 | {"zero.keep_parameters": "true", "zero.keep_gradients": "true"},
]


trainer_of = partial(
    small_trainer, **{"run.global_batch": SAMPLES, "run.logical_shards": SHARDS, "optimizer.clip_norm": 0.1}
)


def whole_run(comm, path, keys):
    trainer = trainer_of(comm, path, keys)
    assert trainer.proof is not None
    return train(trainer, STEPS), state_bits(trainer), mean_validation_loss(trainer)


@cases(
    "keys",
    {"optimizer.name": "adamw", "model.dropout": 0.2},
    {"optimizer.name": "lamb", "model.tied": "true"},
    {"optimizer.name": "lars", "precision.mode": "float64"},
    ids=lambda keys: keys["optimizer.name"],
)
@pytest.mark.full
def test_all_exchanges_have_the_same_bits_on_any_number_of_ranks(text, keys):
    expected = run_threads(1, lambda comm: whole_run(comm, text, keys))[0]
    assert all(norm > 0.1 for _, norm in expected[0]), "clipping takes part"
    for way in WAYS:
        for size in (1, 2, 4) if keys["optimizer.name"] == "lamb" else (3,):
            for result in run_threads(size, lambda comm, way=way: whole_run(comm, text, keys | way)):
                assert result == expected, f"{way} on {size} ranks"


@pytest.mark.parametrize("degrees", [(2, 2, 2), (2, 4, 4), (1, 2, 4), (1, 1, 2), (1, 1, 1)])
@pytest.mark.full_except("degrees2")
def test_degrees_do_not_change_the_bits(text, degrees):
    keys = {"optimizer.name": "lamb"}
    expected = run_threads(1, lambda comm: whole_run(comm, text, keys))[0]
    way = dict(zip(("zero.parameters", "zero.gradients", "zero.optimizer"), degrees, strict=True))
    for result in run_threads(4, lambda comm: whole_run(comm, text, keys | ZERO3 | way)):
        assert result == expected


@pytest.mark.parametrize(("degrees", "made"), [((2, 2, 2), 2), ((2, 4, 4), 2), ((4, 4, 4), 0), ((1, 2, 2), 2)])
def test_communicators_of_the_levels_are_freed(text, monkeypatch, degrees, made):
    """These are the communicators of level 0, between its groups, between owners of a part, and the data axis."""
    way = dict(zip(("zero.parameters", "zero.gradients", "zero.optimizer"), degrees, strict=True))
    freed = []
    monkeypatch.setattr(ThreadCommunicator, "free", lambda comm: freed.append(comm.name))

    def body(comm):
        trainer = trainer_of(comm, text, ZERO3 | way)
        train(trainer, 1)
        comm.barrier()
        assert not freed
        comm.barrier()
        trainer.close()

    run_threads(4, body)
    joining = ["data of" in name for name in freed]
    assert sum(joining) == 4 * made and sum(name.startswith("world/data") for name in freed) == 4 * (made + 1)


def test_states_in_a_file_do_not_change_the_bits(text, tmp_path):
    keys = {"optimizer.name": "lars"}
    expected = run_threads(1, lambda comm: whole_run(comm, text, keys))[0]
    way = {"zero.offload_optimizer": "file", "zero.offload_parameters": "file", "zero.offload_directory": tmp_path}
    for result in run_threads(3, lambda comm: whole_run(comm, text, keys | ZERO3 | way)):
        assert result == expected


@pytest.mark.full
def test_resume_with_another_exchange_has_the_same_bits(text, tmp_path):
    keys = {"optimizer.name": "lamb"}

    def train_on(comm, way, last, resume):
        trainer = trainer_of(comm, text, keys | way, resume)
        kept = trainer.exchange.state()
        assert kept["arithmetic"] and kept["count"] == trainer.first_step
        return train(trainer, last), CheckpointSaver(trainer, tmp_path / "checkpoints").save(last), state_bits(trainer)

    losses, saved = [], None
    legs = [(ALLREDUCE, 2, 1), (ZERO3, 4, 2), (SHARED, 3, 3), (ZERO3, 1, 4), ({"parallel.strategy": "zero1"}, 4, 5)]
    for way, size, last in legs:
        done = run_threads(size, lambda comm, way=way, last=last, saved=saved: train_on(comm, way, last, saved))
        result, saved, final = done[0]
        losses += result
    whole, _, expected = run_threads(1, lambda comm: train_on(comm, ALLREDUCE, 5, None))[0]
    assert (losses, final) == (whole, expected)


@pytest.mark.parametrize("way", WAYS[1:], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_step_is_proven_with_one_meeting_per_layer(text, way, size):
    trainers = run_threads(size, lambda comm: trainer_of(comm, text, way))
    layers, microbatches = len(trainers[0].context.ranges), -(-SHARDS // size)
    for trainer in trainers:
        kinds = [op.kind for op in trainer.operations]
        assert trainer.proof is not None and not trainer.exchange.traits.accumulates
        assert kinds.count(Kind.REDUCE) == layers and kinds.count(Kind.COMBINE) == 0
        assert kinds.count(Kind.ADD) == layers * (microbatches - 1)


@cases(
    "keys, times",
    ({"parallel.strategy": "zero1"}, lambda p: 2 * (p - 1) / p),
    ({"parallel.strategy": "zero1", "run.logical_shards": 12}, lambda p: 3 * (p - 1) / p),  # k = 2
    ({"parallel.strategy": "zero3", "zero.parameters": 1, "zero.gradients": 1}, lambda p: 2 * (p - 1) / p),
    ({"parallel.strategy": "zero1", "zero.optimizer": 2}, lambda p: (p - 1) / 2 + 1 / 2),
)
def test_step_sends_the_documented_bytes(text, keys, times):
    settings = {"model.hidden": 64, "run.logical_shards": 4} | keys

    def body(comm):
        trainer = trainer_of(comm, text, settings)
        with count_traffic(comm) as traffic:
            train(trainer, 1)
        assert not traffic.unknown
        psi = trainer.model.layout.parameters * 4
        assert abs(traffic.sent_bytes - times(comm.size) * psi) < 0.01 * psi + 2 * 8 * 100  # losses, digits of the norm

    for size in (2, 4):
        run_threads(size, body)


def test_only_partial_sums_of_whole_layers_are_kept(text):
    def body(comm):
        trainer = trainer_of(comm, text, {"model.hidden": 64, "parallel.strategy": "zero2", "run.logical_shards": 4})
        train(trainer, 2)
        return trainer.ledger.peak, trainer.model.layout.size * 4

    for size, partial_sums in ((1, 2), (2, 1), (4, 0)):  # log2(4/p)
        peak, psi = run_threads(size, body)[0]
        largest = 0.6 * psi  # one layer, whole
        assert psi / size <= peak["gradients"] <= psi / size + largest
        assert partial_sums * psi <= peak.get("communication", 0) <= partial_sums * psi + largest


@pytest.mark.parametrize("way", [ALLREDUCE, ZERO3], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradient_is_detected_on_all_ranks(text, way, bad):
    def body(comm):
        trainer = trainer_of(comm, text, way)
        before = trainer.exchange.parameters.array.tobytes()
        exact = trainer.exchange.norm_squared

        def spoil_gradients():
            if comm.rank == comm.size - 1:
                (part, *_) = trainer.exchange.update.parts
                trainer.exchange.update.gradients.range(part)[0] = bad
            return exact()

        trainer.exchange.norm_squared = spoil_gradients
        with pytest.raises(NonFiniteError):
            train(trainer, 1)
        assert before == trainer.exchange.parameters.array.tobytes()

    run_threads(1 if way is ALLREDUCE else 3, body)  # replicas of allreduce all have the bad value, or none


@cases(
    "override, match",
    ("parallel.strategy=gossip", r"parallel\.strategy = 'gossip' .*to one of allreduce, zero1, zero2, zero3"),
    ("communication.overlap=thread", r"communication\.overlap"),
    ("precision.mode=bfloat16", r"run\.logical_shards"),
)
def test_incompatible_keys_with_zero_are_rejected(override, match):
    overrides = ["run.logical_shards=4", "run.global_batch=16", "parallel.strategy=zero3", override]
    assert_rejected(overrides, match)
