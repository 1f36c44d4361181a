"""Gossip and local SGD over MPI: the matrix recursion, one model in checkpoints, the bytes, and the blamed rank."""

from functools import partial

import numpy as np
import pytest

from harness.rank_run import seat
from harness.trainings import blamed_ranks, losses, recipe_keys, small_trainer
from hpcdist import models
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import DECENTRALISED_EXCHANGES
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.decentralised.gossip import build as build_graph
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 6
STRATEGIES = {
    "ring": {"parallel.strategy": "gossip"},
    "one_peer, adapt first": recipe_keys(
        "strategy=gossip decentralised.graph=one_peer decentralised.order=adapt_first"
    ),
    "complete": recipe_keys("strategy=gossip decentralised.graph=complete"),
    "local_sgd": recipe_keys("strategy=local_sgd decentralised.period=3"),
    "local_sgd, outer": recipe_keys(
        "strategy=local_sgd decentralised.period=3 decentralised.outer_learning_rate=0.7 "
        "decentralised.outer_momentum=0.9"
    ),
}


@pytest.mark.parametrize("order", ["combine_first", "adapt_first"])
@pytest.mark.parametrize("graph", ["ring", "torus", "exponential", "one_peer", "complete"])
def test_rank_gossip_follows_the_recursion_of_its_matrices(comm, rng, graph, order):
    model = models.build(ModelConfig(layers=1, hidden=32, heads=2), "float64", context=4)
    rate, momentum = 0.3, 0.5
    optimizer = OptimizerConfig(
        name="sgd",
        learning_rate=rate,
        momentum=momentum,
        decay="constant",
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=0.0,
    )
    context = seat(comm, model, optimizer, total_steps=STEPS, bucket_bytes=20_000)
    exchange = DECENTRALISED_EXCHANGES["gossip"](context, DecentralisedConfig(graph=graph, order=order, report_every=0))
    x, goals = rng.standard_normal((2, comm.size, model.layout.size))  # the same draws on every rank
    mask = np.zeros(model.layout.size)
    for segment in model.layout.segments:
        mask[segment.range.slice] = 1
    x, goals, v = x * mask, goals * mask, np.zeros_like(x)
    exchange.parameters.array[...] = x[comm.rank]
    result = build_graph(graph, comm.size)
    for step in range(STEPS):
        exchange.count_samples(1, comm.size)
        exchange.gradients.array[...] = (exchange.parameters.array - goals[comm.rank]) / comm.size
        for op in exchange.plan():
            if op.kind is Kind.AGREE:
                exchange.begin_update(1.0)
            else:
                exchange.handlers[op.kind](op)
        mix = result.matrix(step % max(1, len(result.rounds)))
        v = momentum * v + x - goals
        x = mix @ x - rate * v if order == "combine_first" else mix @ (x - rate * v)
        np.testing.assert_allclose(exchange.parameters.array, x[comm.rank], rtol=0, atol=1e-12)


_trainer = partial(
    small_trainer,
    **{"run.steps": 2 * STEPS}
    | recipe_keys("layers=2 hidden=32 data.context=16 global_batch=9 validation_samples=20 algorithm=ring"),
)


@pytest.mark.parametrize("name", STRATEGIES)
def test_rank_checkpoint_of_replicas_is_one_model_to_resume(comm, folder, name):
    keys = STRATEGIES[name]
    whole = _trainer(comm, folder, keys)
    first = losses(whole, 5)
    apart = comm.allgather_object(whole.exchange.parameters.array.tobytes())
    assert (len(set(apart)) == 1) == (comm.size == 1), "replicas differ until they are saved"
    saved = CheckpointSaver(whole, folder / "checkpoints").save(5)
    model = comm.allgather_object(whole.exchange.parameters.array.tobytes())
    assert len(set(model)) == 1
    validation = mean_validation_loss(whole)
    alone = _trainer(solo(), folder, {}, saved)  # another strategy, on one rank
    assert alone.exchange.parameters.array.tobytes() == model[0]
    assert mean_validation_loss(alone) == pytest.approx(validation, rel=1e-5)
    resumed = _trainer(comm, folder, keys, saved)
    assert losses(resumed, 10, 5) == losses(whole, 10, 5)
    assert resumed.exchange.parameters.array.tobytes() == whole.exchange.parameters.array.tobytes()
    assert first[-1] < first[0]


@pytest.mark.parametrize(("name", "volume"), [("ring", 2.0), ("one_peer, adapt first", 1.0), ("complete", None)])
def test_rank_sent_bytes_match_the_number_of_neighbours(comm, folder, name, volume):
    trainer = _trainer(comm, folder, STRATEGIES[name] | {"model.hidden": 64})
    losses(trainer, 1)
    with count_traffic(comm) as traffic:
        losses(trainer, 2, 1)
    psi = trainer.model.layout.parameters * trainer.model.dtype.itemsize
    neighbours = min(volume, comm.size - 1) if volume else 2 * (comm.size - 1) / comm.size
    assert not traffic.unknown
    assert traffic.sent_bytes == pytest.approx(neighbours * psi, rel=0.01, abs=1024)


@pytest.mark.parametrize("name", STRATEGIES)
def test_rank_only_the_owner_of_a_nan_is_blamed(comm, folder, name):
    culprit = comm.size - 1
    trainer = _trainer(comm, folder, STRATEGIES[name])
    if comm.rank == culprit:
        *_, (_, touched) = trainer.exchange.parameters.tensors()
        trainer.exchange.parameters.range(touched)[...] = np.nan
    before = trainer.exchange.parameters.array.copy()
    assert blamed_ranks(trainer) == [culprit]
    np.testing.assert_array_equal(trainer.exchange.parameters.array, before)
