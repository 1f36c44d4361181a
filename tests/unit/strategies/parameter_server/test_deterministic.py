"""Logical shards on a parameter server: the bits of allreduce, on any number of workers and servers."""

from functools import partial

import numpy as np
import pytest

from harness.marks import cases, on_threads
from harness.trainings import assert_rejected, blamed_ranks, recipe_keys, small_trainer, state_bits
from harness.trainings import losses_and_norms as train
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.operations import Kind
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 3
SAMPLES = 24
trainer_of = partial(small_trainer, **{"run.global_batch": SAMPLES, "run.logical_shards": 6})
KEYS = {
    "adamw": {"optimizer.clip_norm": 0.1, "model.tied": "true"},
    "lamb": {"optimizer.name": "lamb", "optimizer.clip_norm": 0.1},
    "lars": {"optimizer.name": "lars", "precision.mode": "float64"},
}


def server_keys(servers, placement, transport="messages", **keys):
    named = {"servers": servers, "placement": placement, "transport": transport, **keys}
    return {"parallel.strategy": "parameter_server"} | {f"parameter_server.{name}": of for name, of in named.items()}


def whole_run(comm, path, keys):
    trainer = trainer_of(comm, path, keys)
    assert trainer.proof is not None
    try:
        kept = train(trainer, STEPS), state_bits(trainer), mean_validation_loss(trainer)
        local_parameters = trainer.exchange.parameters
        return *kept, {
            part.start: local_parameters.range(part).tobytes()
            for part in local_parameters.parts
            if trainer.context.computes
        }
    finally:
        trainer.close()


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("transport", ["messages", "shared", "rma"])
@pytest.mark.full_except("shared-lamb")
def test_servers_with_logical_shards_have_the_bits_of_allreduce(text, transport, name):
    expected = run_threads(1, lambda comm: whole_run(comm, text, KEYS[name]))[0]
    assert all(np.isfinite(number) for step in expected[0] for number in step)
    places = [(1, 1, "colocated"), (2, 1, "dedicated"), (4, 0, "colocated"), (4, 1, "colocated"), (5, 2, "dedicated")]
    for size, servers, placement in places[:: 1 if name == "adamw" else 2]:
        keys = KEYS[name] | server_keys(servers, placement, transport)
        for rank, result in enumerate(run_threads(size, lambda comm, keys=keys: whole_run(comm, text, keys), 2)):
            assert result[:3] == expected[:3], f"{size} ranks, {servers} {placement}"
            works = placement == "colocated" or rank < size - servers
            assert result[3] == (expected[3] if works else {}), "every worker has them"


def test_run_moves_to_allreduce_and_back_with_the_same_bits(text, tmp_path):
    def part(comm, last, keys, resume):
        trainer = trainer_of(comm, text, keys, resume)
        result = train(trainer, last)
        saved = CheckpointSaver(trainer, tmp_path / f"{comm.size}").save(last)
        comm.barrier()
        trainer.close()
        return result, saved, state_bits(trainer)

    whole, _, expected = run_threads(2, lambda comm: part(comm, 6, {}, None))[0]
    # ssp of 0 is bsp
    keys = server_keys(2, "dedicated", consistency="ssp")
    first, saved, _ = run_threads(3, lambda comm: part(comm, 2, keys, None))[0]
    second, saved, _ = run_threads(1, lambda comm: part(comm, 4, {}, saved))[0]
    for third, _, result in run_threads(4, lambda comm: part(comm, 6, server_keys(0, "colocated", "shared"), saved)):
        assert (first + second + third, result) == (whole, expected)


@pytest.mark.parametrize(("shards", "pushed"), [(8, 1), (6, 2), (4, 1)])
@on_threads(3)
def test_worker_pushes_the_necessary_partial_sums(comm, text, shards, pushed):
    """Two workers: 4 + 4 shards are two tree nodes, 3 + 3 are four nodes, 2 + 2 are two nodes."""
    trainer = trainer_of(comm, text, {"model.hidden": 64, "run.logical_shards": shards} | server_keys(1, "dedicated"))
    train(trainer, 1)
    with count_traffic(comm) as traffic:
        train(trainer, 2, first=1)
    psi = 4 * trainer.model.layout.size
    agreed = 3 * 8 * (shards + 4)
    assert not traffic.unknown
    sends = pushed * psi if trainer.exchange.topology.works else 2 * psi
    assert sends <= traffic.sent_bytes <= sends + agreed
    if trainer.exchange.topology.works:
        assert trainer.ledger.peak["communication"] <= {8: 2, 6: 2, 4: 1}[shards] * psi + agreed


@pytest.mark.parametrize("transport", ["messages", "rma"])
def test_worker_with_a_bad_value_is_blamed_and_the_step_undone(text, transport):
    def body(comm):
        trainer = trainer_of(comm, text, server_keys(1, "dedicated", transport))
        train(trainer, 1)
        parameters, kept = trainer.exchange.parameters, trainer.exchange.parameters.array.copy()
        if comm.rank == 1:
            parameters.view(trainer.model.layout.segments[2].key)[...] = np.nan
        assert blamed_ranks(trainer, step=2) == [1]
        parameters.array[...] = kept
        rest = train(trainer, 3, first=1)
        trainer.close()
        return rest

    expected = run_threads(1, lambda comm: train(trainer_of(comm, text, {}), 3)[1:])[0]
    assert run_threads(4, body) == [expected] * 4


def test_worker_sums_layers_and_pushes_them_once(text):
    keys = server_keys(2, "dedicated")
    steps = run_threads(4, lambda comm: trainer_of(comm, text, keys).operations)[0]
    layers = [op.range for op in steps if op.kind is Kind.PUSH]
    assert len(set(layers)) == len(layers) == 3
    assert [op.range for op in steps if op.kind is Kind.ADD] == 2 * layers, "of the first two of three shards"
    assert [op.microbatch for op in steps if op.kind is Kind.PUSH] == [2] * 3


@cases(
    "keys, match",
    ({"parameter_server.consistency": "asp"}, r"parameter_server.consistency = 'asp' with run.logical_shards = 6"),
    (
        recipe_keys("parameter_server.consistency=ssp parameter_server.staleness=2"),
        r"set parameter_server.consistency = 'bsp', or run.logical_shards = 0",
    ),
    ({"parameter_server.backup_workers": 1}, r"parameter_server.backup_workers = 1 with run.logical_shards = 6"),
    ({"communication.algorithm": "hierarchical"}, r"communication.algorithm = 'hierarchical' with run.logical_"),
)
def test_options_that_sum_in_rank_order_are_rejected(keys, match):
    settings = {"parallel.strategy": "parameter_server", "run.global_batch": 24, "run.logical_shards": 6, **keys}
    assert_rejected(settings, match)


def test_fewer_shards_than_workers_are_rejected(text):
    with pytest.raises(ConfigurationError, match=r"run\.logical_shards = 2 with 3 data ranks: each needs"):
        run_threads(4, lambda comm: trainer_of(comm, text, {"run.logical_shards": 2} | server_keys(1, "dedicated")))
