"""Samples shared by speed: the best shares, the same on all ranks, and the same run for any shares."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import assemble_trainer, assert_rejected, recipe_keys, session_of
from hpcdist.checkpoint import manifest
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.hdf5 import files
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid
from hpcdist.telemetry.metrics.side_tables import SHARES
from hpcdist.training.data import sampler as module
from hpcdist.training.data.prefetch import PREFETCH_DEPTH
from hpcdist.training.data.sampler import (
    BALANCE_EVERY_STEPS,
    READ_AHEAD,
    LoadBalancer,
    SampleShares,
    balanced_shares,
    even_shares,
)
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.observe.instrumentation import ConsoleProgress
from hpcdist.training.run.loop import TrainingLoop
from hpcdist.training.run.stop_requests import StopRequests

SAMPLES, STEPS = 7, 6


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_no_other_shares_are_faster(replicas):
    draw = random.Random(replicas)
    for samples in range(replicas, 10):
        for _ in range(20):
            needs = [draw.choice([1.0, 1.5, 2.0, 3.0, 10.0]) for _ in range(replicas)]
            result = balanced_shares(samples, needs)
            assert sum(result) == samples and min(result) >= 1
            every = (
                sizes for sizes in itertools.product(range(1, samples + 1), repeat=replicas) if sum(sizes) == samples
            )
            best = min(max(n * s for n, s in zip(sizes, needs, strict=True)) for sizes in every)
            assert max(n * s for n, s in zip(result, needs, strict=True)) == best


def test_shares_are_proportional_to_the_speed():
    for samples, replicas in itertools.product(range(8, 40), range(1, 9)):
        assert sorted(balanced_shares(samples, [0.1] * replicas), reverse=True) == list(even_shares(samples, replicas))
    assert balanced_shares(60, [1, 2, 3]) == (33, 16, 11)
    assert balanced_shares(4, [1, 1000, 1]) == (1, 1, 2) or balanced_shares(4, [1, 1000, 1]) == (2, 1, 1), (
        "never without a sample"
    )


def test_shares_apply_from_a_batch_on_and_survive_a_checkpoint():
    shares = SampleShares(10, 3)
    shares.change(5, (6, 2, 2))
    shares.change(9, (8, 1, 1))
    assert [shares.of(batch) for batch in (0, 4, 5, 8, 9, 99)] == [(4, 3, 3)] * 2 + [(6, 2, 2)] * 2 + [(8, 1, 1)] * 2
    for batch in range(12):
        parts = [shares.range_of(batch, replica) for replica in range(3)]
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(10))
    for batch in (3, 5, 7, 9, 20):
        restored = SampleShares(10, 3)
        assert restored.restore(shares.state(batch))
        assert all(restored.of(later) == shares.of(later) for later in range(batch, 30))
    for other in (SampleShares(10, 2), SampleShares(11, 3)):
        before = other.of(7)
        assert not other.restore(shares.state(7)) and other.of(7) == before, "for another number of ranks or samples"
    assert not SampleShares(10, 3).restore([])


def balance_shares(needs, steps, samples=24, pipeline=1):
    """Return the shares of every batch on every rank, where rank r needs ``needs[r]`` seconds per sample."""

    def body(comm):
        axes = GridCommunicators(ProcessGrid(data=comm.size // pipeline, pipeline=pipeline), comm)
        shares = SampleShares(samples, axes.data.size)
        balance = LoadBalancer(axes.data, axes.pipeline, shares)
        for step in range(1, steps + 1):
            balance.after(step, shares.of(step - 1)[axes.data.rank] * needs[comm.rank] * (50 if step == 1 else 1))
        return [shares.of(batch) for batch in range(steps + READ_AHEAD)]

    return run_threads(len(needs), body)


def test_shares_of_past_batches_are_dropped():
    shares = SampleShares(10, 2)
    for first in range(1, 9):
        shares.change(first, (first, 10 - first))
    shares.forget(6)
    assert len(shares._sizes) == 3 and [shares.of(batch) for batch in (6, 7, 8)] == [(6, 4), (7, 3), (8, 2)]


def test_all_ranks_reach_the_same_stable_shares():
    result = balance_shares([1.0, 3.0, 1.0, 1.0], 4 * BALANCE_EVERY_STEPS)
    assert all(one == result[0] for one in result)
    changed = BALANCE_EVERY_STEPS + READ_AHEAD
    assert set(result[0][:changed]) == {even_shares(24, 4)}, "nobody has read the batches from there on"
    assert set(result[0][changed:]) == {balanced_shares(24, [1, 3, 1, 1])}
    assert READ_AHEAD > PREFETCH_DEPTH + 1


def test_replica_is_as_slow_as_its_slowest_stage():
    grid = ProcessGrid(data=2, pipeline=2)
    slow = run_threads(
        4, lambda comm: (GridCommunicators(grid, comm).data.rank, GridCommunicators(grid, comm).pipeline.rank) == (1, 1)
    )
    result = balance_shares([3.0 if one else 1.0 for one in slow], 2 * BALANCE_EVERY_STEPS, pipeline=2)
    assert all(one == result[0] for one in result) and result[0][-1] == (18, 6)


def test_noise_does_not_change_the_shares():
    draw = random.Random(1)

    def body(comm):
        shares = SampleShares(64, comm.size)
        balance = LoadBalancer(comm, solo(), shares)
        for step in range(1, 20 * BALANCE_EVERY_STEPS):
            slow = 3.0 if random.Random((comm.rank << 20) + step).random() < 1 / 8 else 1.0  # some steps, on all ranks
            assert not balance.after(step, 16 * slow * (1 + 0.01 * draw.random()))
        return shares.newest

    assert set(run_threads(4, body)) == {even_shares(64, 4)}


def test_short_start_does_not_change_the_shares():
    balance = LoadBalancer(solo(), solo(), SampleShares(4, 1))
    assert not balance.after(BALANCE_EVERY_STEPS, 1.0)
    assert len(balance._sample_s) == 1


SERVED = {"parallel.strategy": "parameter_server"}
COLOCATED = {**SERVED, "parameter_server.placement": "colocated"}
NODES = {"communication.algorithm": "hierarchical"}
# name -> (keys, ranks, ranks of a node, samples of the replicas by batch); nobody has a sample of 0
LAYOUTS = {
    "allreduce": ({}, 3, None, [(5, 1, 1), (0, 0, 7), (7, 0, 0)]),
    "allreduce beside the backward": ({"communication.overlap": "thread"}, 2, None, [(6, 1), (0, 7)]),
    "allreduce accumulating": ({"parallel.microbatches": 3}, 2, None, [(6, 1), (7, 0)]),
    "zero1": ({"parallel.strategy": "zero1"}, 3, None, [(5, 1, 1), (4, 0, 3)]),
    "zero2": (recipe_keys("strategy=zero2 microbatches=2"), 3, None, [(5, 1, 1), (0, 7, 0)]),
    "zero3": (recipe_keys("strategy=zero3 microbatches=2"), 3, None, [(5, 1, 1), (7, 0, 0)]),
    "dedicated server": (SERVED, 3, None, [(6, 1), (0, 7)]),
    "colocated servers": (COLOCATED, 3, None, [(5, 1, 1), (0, 7, 0)]),
    "pipeline": (recipe_keys("pipeline=2 microbatches=2 global_batch=8"), 4, None, [(5, 3), (1, 7), (8, 0)]),
    "nodes of 2 and 1": (NODES, 3, 2, [(5, 1, 1), (0, 7, 0), (0, 0, 7)]),
    "zero1, nodes of 2 and 1": ({**NODES, "parallel.strategy": "zero1"}, 3, 2, [(5, 1, 1), (0, 0, 7)]),
    "zero3, nodes of 2 and 1": ({**NODES, "parallel.strategy": "zero3"}, 3, 2, [(5, 1, 1), (0, 7, 0)]),
    "servers, nodes of 2 and 1": ({**NODES, **COLOCATED}, 3, 2, [(5, 1, 1), (0, 0, 7)]),
}


@pytest.fixture
def text(text):
    return {"data.path": text, "precision.mode": "float64"}


def train(comm, settings, sizes):
    """Return the losses, and the parameters that this rank would save. ``sizes`` alternate from the second batch on."""
    trainer = assemble_trainer(comm, settings)
    if sizes and trainer.context.computes:
        trainer = replace(trainer, shares=SampleShares(trainer.recipe.run.global_batch, trainer.data_axis.size))
        for batch in range(1, STEPS):
            trainer.shares.change(batch, sizes[batch % len(sizes)])
    losses = []
    with trainer.batches(STEPS) as batches:
        for step, batch in enumerate(batches, start=1):
            if sizes and trainer.context.computes and step > 1:
                assert len(batch[0]) == sizes[(step - 1) % len(sizes)][trainer.data_axis.rank]
            parts, samples = trainer.cut(trainer.place(batch)), trainer.recipe.run.global_batch
            losses.append(trainer.executor.run(trainer.operations, parts, samples, step, np.zeros(2)).loss)
    pieces = [piece for piece in trainer.exchange.pieces() if piece.kind == "parameters"]
    kept = {(piece.tensor, piece.flat.start): piece.array.copy() for piece in pieces}
    trainer.close()
    return losses, kept


def all_parameters(ranks):
    """Return all parameters in one order, without the attention biases, whose true gradient is zero."""
    results = {key: values for kept in ranks for key, values in kept.items() if not key[0].endswith("qkv.bias")}
    return np.concatenate([results[key].reshape(-1) for key in sorted(results)])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except("allreduce")
def test_result_does_not_depend_on_the_shares(name, text):
    keys, ranks, node, sizes = LAYOUTS[name]
    settings = {**text, **keys}
    alone = {key: settings[key] for key in settings if not key.startswith(("parallel.", "communication.", "param"))}
    ((losses, kept),) = run_threads(1, lambda comm: train(comm, alone, []))
    results = run_threads(ranks, lambda comm: train(comm, settings, sizes), node)
    for output, _ in results:
        np.testing.assert_allclose(output, losses, rtol=1e-12)
    expected, got = all_parameters([kept]), all_parameters([one for _, one in results])
    assert np.linalg.norm(got - expected) <= 1e-12 * np.linalg.norm(expected)


def run_loop(comm, settings, out, resume=None):
    trainer = assemble_trainer(comm, settings, resume)
    energy = EnergyRecorder(comm, trainer.recipe, resume)
    session = session_of(comm)
    return TrainingLoop(
        session, trainer, out, ConsoleProgress(1, 0, 1e9, shown=False), {}, StopRequests(), energy
    ).run()


@pytest.mark.full
def test_slow_rank_gets_fewer_samples_also_after_a_resume(text, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BALANCE_EVERY_STEPS", 4)
    monkeypatch.setattr(module, "LEAST_TIMINGS", 3)
    settings = {**text, "energy.sources": "none", "run.steps": 10, "checkpoint.every_steps": 0, "run.global_batch": 16}
    uneven = {**settings, "data.shares": "measured", "chaos.slow_ranks": "[1]", "chaos.step_s": 0.03}
    (alone,) = run_threads(1, lambda comm: run_loop(comm, settings, _writable_path(tmp_path / "alone")))
    first, _ = run_threads(2, lambda comm: run_loop(comm, uneven, _writable_path(tmp_path / "run")))
    assert first.loss == pytest.approx(alone.loss, rel=1e-12)
    with files.open_read(tmp_path / "run" / "metrics.h5") as file:
        table = SHARES.read(file)
    assert table["first_step"][:2].tolist() == [1, 4 + READ_AHEAD + 1]
    assert table["samples"][0].tolist() == [8, 8] and table["samples"][1].sum() == 16
    now = table["samples"][-1].tolist()
    assert now[0] >= 10 > 6 >= now[1], "the other is three times as fast"
    assert first.checkpoint is not None
    (since, local_data), *later = manifest.load(first.checkpoint).scalars["shares"]
    # On a machine with other work, rows change once more: measurements of a later step exist by then.
    assert since == 10 and [local_data, *(samples for _, samples in later)][-1] == now
    more = {**uneven, "run.steps": 11}
    (tmp_path / "run" / "metrics.h5").unlink()
    again, _ = run_threads(2, lambda comm: run_loop(comm, more, tmp_path / "run", first.checkpoint))
    assert again.done == 11
    with files.open_read(tmp_path / "run" / "metrics.h5") as file:
        table = SHARES.read(file)
    assert table["first_step"][0] == 11 and table["samples"][0].tolist() == local_data


def _writable_path(path):
    path.mkdir(exist_ok=True)
    return path


@cases(
    "settings, message",
    (["data.shares=fair"], "choose one of even, measured"),
    (["data.shares=measured", "run.logical_shards=8"], "run.logical_shards = 0"),
    (["data.shares=measured", "parallel.strategy=gossip"], "weighted by samples"),
    (["data.shares=measured", "parallel.strategy=parameter_server", "parameter_server.consistency=asp"], "weighted"),
)
def test_shares_that_would_change_the_result_are_rejected(settings, message):
    assert_rejected(settings, message)
