"""Every architecture and layout matches one process: losses, weights, bytes, checkpoints."""

from functools import partial

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import (
    SMALL,
    TOLERANCE,
    Quiet,
    abort,
    blamed_ranks,
    difference,
    losses,
    recipe_keys,
    recipe_of,
    run_single_process,
    small_trainer,
    state_bits,
)
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.placement import locate
from hpcdist.comm.record.spans import Spans
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import OK, ConfigurationError
from hpcdist.training import run_directory
from hpcdist.training.run.job import TrainingJob
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver
from hpcdist.training.run.stop_requests import StopRequests

STEPS = 50

# name -> (keys, the numbers of ranks that it is for)
LAYOUTS = {
    "allreduce": ({"parallel.strategy": "allreduce"}, (1, 2, 3, 4)),
    "zero1": ({"parallel.strategy": "zero1"}, (1, 2, 3, 4)),
    "zero2": ({"parallel.strategy": "zero2"}, (1, 2, 3, 4)),
    "zero3": ({"parallel.strategy": "zero3"}, (1, 2, 3, 4)),
    "zero2 accumulating": (recipe_keys("strategy=zero2 microbatches=3"), (2, 3)),
    "zero3 accumulating tied": (recipe_keys("strategy=zero3 microbatches=2 tied=true"), (1, 3)),
    "allreduce in shared memory": ({"communication.algorithm": "node_shared"}, (2,)),
    "zero1 in shared memory": (recipe_keys("strategy=zero1 algorithm=node_shared"), (2, 3)),
    "zero3 in shared memory": (recipe_keys("strategy=zero3 microbatches=2 algorithm=node_shared"), (2, 4)),
    "zero3 inside the nodes": (recipe_keys("strategy=zero3 zero.parameters=2"), (4,)),
    "zero of three degrees": (recipe_keys("strategy=zero2 zero.gradients=2 microbatches=2"), (4,)),
    "zero3 keeping small units": (recipe_keys("strategy=zero3 zero.persistent_below=9000"), (2, 3)),
    "zero1 sharing parameters": (recipe_keys("strategy=zero1 zero.shared_parameters=true"), (2, 3)),
    "gpipe": (recipe_keys("pipeline=2 schedule=gpipe microbatches=4"), (2,)),
    "1f1b": (recipe_keys("pipeline=2 microbatches=4"), (2,)),
    "1f1b of 3": (recipe_keys("pipeline=3 microbatches=2"), (3,)),
    "gpipe of 4, recomputing": (recipe_keys("pipeline=4 schedule=gpipe microbatches=4 recompute=true"), (4,)),
    "1f1b tied, recomputing": (recipe_keys("pipeline=2 microbatches=3 tied=true recompute=true"), (2,)),
    "1f1b with zero1": (recipe_keys("pipeline=2 microbatches=2 strategy=zero1 tied=true"), (2,)),
}


KEYS = recipe_keys(
    f"layers=2 hidden=32 data.context=16 steps={STEPS} validation_samples=50 optimizer.warmup_steps=5 algorithm=ring"
)
_trainer = partial(small_trainer, **KEYS)


def _alone(folder, keys, steps=STEPS):
    return run_single_process({**SMALL, **KEYS, "data.path": folder / "text.txt", **keys}, steps)


def _keys(name, comm):
    keys, sizes = LAYOUTS[name]
    if comm.size not in sizes:
        pytest.skip(f"{name} is for {sizes} ranks")
    return dict(keys)


@pytest.mark.parametrize("mode", ["float32", "float64"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except(
    "allreduce-float32", "zero1-float64", "zero3-float32", "zero2 accumulating-float32", "gpipe-float32", "1f1b-float32"
)
def test_rank_layouts_equal_one_process(comm, folder, name, mode):
    keys = _keys(name, comm) | {"precision.mode": mode}
    single, together = _alone(folder, keys), _trainer(comm, folder, keys)
    assert single.losses[-1] < single.losses[0] - 0.5, "the model learns"
    np.testing.assert_allclose(losses(together, STEPS), single.losses, rtol=TOLERANCE[mode])
    assert difference(together, single.state) <= 10 * TOLERANCE[mode]
    np.testing.assert_allclose(mean_validation_loss(together), single.validation, rtol=TOLERANCE[mode])


@cases(
    "name, optimizer, mode",
    ("allreduce", "lars", "float32"),
    ("zero1", "sgd", "float64"),
    ("zero2 accumulating", "lamb", "float32"),
    ("zero3", "lamb", "float64"),
    ("zero1 sharing parameters", "lars", "float64"),
    ("1f1b with zero1", "lars", "float64"),
)
@pytest.mark.full_except("zero3-lamb-float64", "zero1 sharing parameters-lars-float64")
def test_rank_layer_wise_rates_and_clipping_are_exact(comm, folder, name, optimizer, mode):
    keys = _keys(name, comm) | {"optimizer.name": optimizer, "optimizer.clip_norm": 0.3, "precision.mode": mode}
    single, together = _alone(folder, keys), _trainer(comm, folder, keys)
    np.testing.assert_allclose(losses(together, STEPS), single.losses, rtol=10 * TOLERANCE[mode])
    assert difference(together, single.state) <= (1e-10 if mode == "float64" else 1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.full_except("allreduce", "zero1", "zero2 accumulating", "zero3", "1f1b with zero1")
def test_rank_resume_in_every_layout_is_bit_identical(comm, folder, name):
    keys = _keys(name, comm)
    whole = _trainer(comm, folder, keys)
    expected_losses = losses(whole, 12)
    half = _trainer(comm, folder, keys)
    first = losses(half, 5)
    resumed = _trainer(comm, folder, keys, resume=CheckpointSaver(half, folder / "checkpoints").save(5))
    assert resumed.first_step == 5
    assert first + losses(resumed, 12) == expected_losses
    assert state_bits(resumed) == state_bits(whole)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "tied" not in name and name != "1f1b with zero1"])
@pytest.mark.full_except("allreduce", "zero3", "gpipe")
def test_rank_checkpoint_moves_from_any_layout_to_any_other(comm, folder, name):
    keys = _keys(name, comm) | {"precision.mode": "float64"}
    together = _trainer(comm, folder, keys)
    first = losses(together, 6)
    saved = CheckpointSaver(together, folder / "checkpoints").save(6)
    comm.barrier()
    reference = _alone(folder, keys, 15).losses
    single = _trainer(solo(), folder, {"precision.mode": "float64"}, resume=saved)
    np.testing.assert_allclose(first + losses(single, 15), reference, rtol=1e-12)
    for other in ("allreduce", "zero3"):
        resumed = _trainer(comm, folder, LAYOUTS[other][0] | {"precision.mode": "float64"}, resume=saved)
        np.testing.assert_allclose(first + losses(resumed, 15), reference, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "volumes"), [("allreduce", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("zero2 accumulating", 4)]
)
def test_rank_sent_bytes_match_the_closed_form(comm, folder, name, volumes):
    keys = _keys(name, comm) | {"model.hidden": 64, "model.layers": 3}
    trainer = _trainer(comm, folder, keys)
    losses(trainer, 1)  # communicators are split and scratch memory taken
    with count_traffic(comm) as traffic:
        losses(trainer, 2, first=1)
    sent = max(comm.allgather_object(traffic.sent_bytes))
    psi = trainer.model.layout.parameters * trainer.model.dtype.itemsize
    last = sum(spec.size for spec in trainer.model.stages[-1].tensors()) * trainer.model.dtype.itemsize
    once = last if name == "zero3" else 0  # its forward and its backward follow each other: one gather
    expected = (volumes * psi - once) * (comm.size - 1) / comm.size
    assert not traffic.unknown
    assert sent == pytest.approx(expected, rel=0.01, abs=1024), f"{sent / max(psi, 1):.4f} Psi"


def test_rank_zero3_holds_a_tied_table_once(comm, folder):
    keys = {"parallel.strategy": "zero3", "model.tied": "true", "model.vocabulary": 4096, "model.layers": 4}
    trainer = _trainer(comm, folder, keys)
    losses(trainer, 2)
    table, *others = (part.size * 4 for part in trainer.context.ranges.values())
    share = trainer.model.layout.size * 4 / comm.size + 64 * len(trainer.model.stages)
    assert table > 4 * max(others)
    for kind in ("parameters", "gradients"):
        assert trainer.ledger.peak[kind] <= share + table + max(others), kind


def test_rank_zero3_holds_only_its_share_and_the_current_layers(comm, folder):
    peaks = {}
    for strategy in ("allreduce", "zero1", "zero2", "zero3"):
        trainer = _trainer(comm, folder, {"parallel.strategy": strategy, "model.layers": 6})
        losses(trainer, 2)
        peaks[strategy] = trainer.ledger.peak
        unit = max(part.size for part in trainer.context.ranges.values()) * 4
        psi = trainer.model.layout.size * 4
    share = psi / comm.size
    slack = 64 * 4 * len(trainer.model.stages)
    assert peaks["allreduce"]["optimizer"] == 2 * psi
    for strategy in ("zero1", "zero2", "zero3"):
        assert peaks[strategy]["optimizer"] <= 2 * share + 2 * slack
    assert peaks["zero2"]["gradients"] <= share + unit + slack
    assert peaks["zero3"]["gradients"] <= share + unit + slack
    assert peaks["zero3"]["parameters"] <= share + unit + slack
    assert peaks["zero1"]["parameters"] == peaks["zero2"]["parameters"] == psi


def test_rank_hierarchical_allreduce_works_in_every_layout(comm, folder):
    declared = comm.dup()
    declared.declared_node = comm.rank // 2  # as communication.ranks_per_node = 2 does at the start of a job
    servers = {"parallel.strategy": "parameter_server", "parameter_server.placement": "colocated"}
    layouts = [LAYOUTS[name] for name in ("allreduce", "zero1", "zero3", "1f1b")]
    for keys, sizes in (*layouts, (servers, (1, 2, 3, 4))):
        if comm.size in sizes:
            together = _trainer(
                declared, folder, keys | {"communication.algorithm": "hierarchical", "precision.mode": "float64"}
            )
            assert together.comm.nodes().count == -(-comm.size // 2)
            expected = _alone(folder, {"precision.mode": "float64"}, 10).losses
            np.testing.assert_allclose(losses(together, 10), expected, rtol=1e-12)


# keys of trainings that split communicators of every kind, the numbers of ranks that they are for
SPLIT = {
    "data, hierarchical": ("algorithm=hierarchical", (1, 2, 4)),
    "overlap": ("overlap=thread", (2, 4)),
    "zero1 sharing parameters": ("strategy=zero1 zero.shared_parameters=true", (2, 4)),
    "zero3 inside the nodes": ("strategy=zero3 zero.parameters=2", (4,)),
    "pipeline": ("pipeline=2 microbatches=2 strategy=zero1", (2, 4)),
    "tensor": ("tensor=2", (2, 4)),
    "context": ("parallel.context=2", (2, 4)),
    "expert": ("experts=4 expert=2 strategy=zero1", (2, 4)),
    "gossip": ("strategy=gossip", (2, 3, 4)),
    "servers": ("strategy=parameter_server", (2, 4)),
    "colocated servers": ("strategy=parameter_server placement=colocated", (2, 4)),
    "asynchronous servers": ("strategy=parameter_server consistency=asp algorithm=native", (2, 4)),
}


@pytest.fixture
def alive(comm, monkeypatch):
    """Communicators that were derived from ``comm`` and are not freed, by identity."""
    alive, split, free = {}, type(comm)._split, type(comm).free

    def counted_split(self, *arguments):
        child = split(self, *arguments)
        if child is not None:
            alive[id(child)] = child
        return child

    def counted_free(self):
        alive.pop(id(self), None)
        free(self)

    comm.nodes()  # the communicators of the world remain
    monkeypatch.setattr(type(comm), "_split", counted_split)
    monkeypatch.setattr(type(comm), "free", counted_free)
    return alive


@pytest.mark.parametrize("name", SPLIT)
def test_rank_end_of_a_training_frees_every_communicator(comm, folder, alive, name):
    keys, sizes = SPLIT[name]
    if comm.size not in sizes:
        pytest.skip(f"{name} is for {sizes} ranks")
    trainer = _trainer(comm, folder, recipe_keys(keys))
    assert alive
    if trainer.exchange.traits.lock_step:
        losses(trainer, 1)
    trainer.close()
    assert not [each.name for each in alive.values()]


def test_rank_end_of_a_job_frees_every_communicator(comm, folder, alive, monkeypatch):
    asynchronous = "strategy=parameter_server consistency=asp algorithm=native" if comm.size > 1 else ""
    keys = recipe_keys(f"run.steps=1 energy.sources=declared energy.cpu_tdp_w=100 {asynchronous}")
    recipe, lock = recipe_of({**SMALL, **KEYS, "data.path": folder / "text.txt", **keys}), RunLock({})
    session, seen, finish = Quiet(comm, locate(comm, None), "test", abort), set(), TrainingJob.finish

    def finish_and_look(job, loop, *result):
        seen.update(each.name.rpartition("/")[2].rstrip(".0123456789") for each in alive.values())
        return finish(job, loop, *result)

    monkeypatch.setattr(TrainingJob, "finish", finish_and_look)
    session.spans = Spans(folder / f"rank-{comm.rank}.spans", comm.rank, comm.size)
    run = run_directory.prepare_run_directory(comm, recipe, folder / "run", "never", lock)
    assert TrainingJob(recipe, run, StopRequests(), lock, as_json=True).train(session, recipe, None) == OK
    session.spans.close()
    assert seen >= {"energy of a node"} | ({"energy"} if comm.rank == 0 else set()) | (
        {"rows"} if asynchronous else set()
    )
    assert not [each.name for each in alive.values()]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_rank_only_the_stage_that_overflows_is_blamed(comm, folder, schedule):
    if comm.size == 1:
        pytest.skip("a pipeline of one has nobody else to blame")
    keys = {"parallel.pipeline": comm.size, "parallel.schedule": schedule, "parallel.microbatches": 3}
    for culprit in range(comm.size):
        trainer = _trainer(comm, folder, keys | {"model.tied": "true"})
        if comm.rank == culprit:
            trainer.exchange.parameters.array[...] = 3e38  # finite, but no product of two of them is
        assert blamed_ranks(trainer) == [culprit]


@pytest.mark.parametrize("strategy", ["allreduce", "zero2", "zero3"])
def test_rank_only_the_owner_of_a_nan_is_blamed(comm, folder, strategy):
    culprit = comm.size - 1
    trainer = _trainer(comm, folder, {"parallel.strategy": strategy})
    if comm.rank == culprit:
        *_, (_, touched) = trainer.exchange.parameters.tensors()  # of the head, which every token meets
        trainer.exchange.parameters.range(touched)[...] = np.nan
    assert blamed_ranks(trainer) == [culprit]


def test_rank_impossible_layouts_are_rejected(comm, folder):
    with pytest.raises(ConfigurationError, match=r"parallel.data \d+ x parallel.pipeline 5 x .* = .*, but the world"):
        _trainer(comm, folder, {"parallel.pipeline": 5, "parallel.data": 2})
    if comm.size > 2:
        with pytest.raises(ConfigurationError, match="has only 2 units"):
            _trainer(comm, folder, {"model.kind": "mlp", "model.layers": 1, "parallel.pipeline": comm.size})
