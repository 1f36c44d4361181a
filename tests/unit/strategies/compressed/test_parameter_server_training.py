"""Trainings on a compressed parameter server: products, checkpoints, NaN, and rejected recipes."""

from dataclasses import replace

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases, on_threads
from harness.trainings import PIPELINE, SERVER, Trained, assemble_trainer, assert_rejected
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.core.operations import Kind
from hpcdist.training.run.saving import CheckpointSaver

Settings = dict[str, object]
COLOCATED = {**SERVER, "parameter_server.placement": "colocated"}
INT8 = {"communication.compression": "int8"}
TOPK = {"communication.compression": "topk", "compression.density": 0.1}


def steps(trainer, last):
    """Return the losses up to step ``last``."""
    return trainings.losses(trainer, last)


def state(trainer):
    return {(p.kind, p.tensor, p.flat.start): p.array.tobytes() for p in trainer.exchange.pieces()}


@pytest.mark.parametrize(
    ("axes", "lossless"),
    [(PIPELINE, False), ({"parallel.tensor": 2}, False), ({**PIPELINE, "parallel.tensor": 2}, True)],
)
@pytest.mark.full_except("axes0-False")
def test_each_pipeline_and_tensor_position_has_separate_servers(axes, lossless, words):
    ranks = 2 * int(axes.get("parallel.pipeline", 1)) * int(axes.get("parallel.tensor", 1))
    settings = {**words, **COLOCATED, **axes}
    dense = run_threads(ranks, lambda comm: Trained(comm, settings).losses)[0]
    way = {**TOPK, "compression.density": 1.0} if lossless else INT8
    results = run_threads(ranks, lambda comm: Trained(comm, {**settings, **way}))
    for one in results:
        if lossless:
            assert one.losses == dense
        else:
            np.testing.assert_allclose(one.losses, dense, rtol=1e-3)
    parameters = {}
    for one in results:  # what all ranks of the tensor axis have whole stays the same there too
        store = one.trainer.exchange.parameters
        for segment, where in store.tensors():
            if not segment.spec.whole:
                parameters.setdefault(segment.key, set()).add(np.asarray(store.contents(where)).tobytes())
    assert {len(bits) for bits in parameters.values()} == {1}


@cases(
    "placed, way",
    (SERVER, {**TOPK, "compression.warmup_steps": 3}),
    (COLOCATED, {**INT8, "precision.mode": "float16", "precision.loss_scale": 1024}),
)
@pytest.mark.full_except("placed0-way0")
def test_resumed_run_has_the_same_bits(placed, way, words, tmp_path):
    settings = {**words, **placed, **way}

    def run_through(comm):
        trainer = assemble_trainer(comm, settings)
        steps(trainer, 4)
        return state(trainer)

    def run_stopped(comm):
        trainer = assemble_trainer(comm, settings)
        steps(trainer, 2)
        again = assemble_trainer(comm, settings, CheckpointSaver(trainer, tmp_path).save(2))
        steps(again, 4)
        return state(again)

    whole, again = run_threads(3, run_through), run_threads(3, run_stopped)
    assert whole == again
    workers = 3 if placed is COLOCATED else 2
    kinds = {kind for one in whole for kind, _, _ in one if kind.startswith("residual")}
    assert kinds == {f"residual.{rank}" for rank in range(workers)}


@pytest.mark.parametrize(("now", "after"), [(2, COLOCATED), (4, SERVER), (2, {"parallel.strategy": "allreduce"})])
@pytest.mark.full_except("2-after2")
def test_residuals_are_kept_for_other_workers(now, after, words, tmp_path):
    settings, others = {**words, **COLOCATED, **TOPK}, {**words, **after, **TOPK}

    def residuals_of(trainer):
        result = {}
        for segment, where in trainings.residuals_of(trainer.exchange).tensors():
            result[segment.key] = trainings.residuals_of(trainer.exchange).contents(where).copy()
        return result

    def save_before(comm):
        trainer = assemble_trainer(comm, settings)
        steps(trainer, 2)
        return CheckpointSaver(trainer, tmp_path).save(2), residuals_of(trainer)

    old = run_threads(3, save_before)
    new = run_threads(now, lambda comm: residuals_of(assemble_trainer(comm, others, old[0][0])))
    assert any(result.any() for _, one in old for result in one.values())
    for key in new[0]:
        expected = sum(one[key] for _, one in old)
        result = sum(one[key] for one in new if key in one)  # a rank that only serves owes nothing
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-12)
    # It is paid by whoever serves, and the run goes on.
    assert np.isfinite(run_threads(now, lambda comm: steps(assemble_trainer(comm, others, old[0][0]), 4))).all()


def test_checkpoint_without_residuals_starts_without_residuals(words, tmp_path):
    settings = {**words, **SERVER}

    def save_dense(comm):
        trainer = assemble_trainer(comm, settings)
        steps(trainer, 2)
        return CheckpointSaver(trainer, tmp_path).save(2)

    result = run_threads(3, save_dense)[0]
    after = run_threads(3, lambda comm: steps(assemble_trainer(comm, {**settings, **INT8}, result), 4))
    assert np.isfinite(after).all()


@pytest.mark.parametrize("placed", [SERVER, COLOCATED])
@on_threads(3)
def test_overflowing_gradient_ends_the_run_on_all_ranks(comm, placed, words):
    trainer = assemble_trainer(comm, {**words, **placed, **TOPK})
    steps(trainer, 2)
    trainer = replace(trainer, first_step=2)
    handlers, push = trainer.executor._handlers, trainer.exchange.reducer.push

    def push_overflow(op):
        trainer.exchange.gradients.range(op.range)[:1] = np.inf
        push(op)

    if comm.rank == 1:
        handlers[Kind.PUSH] = push_overflow
    before = trainer.exchange.parameters.array.tobytes()
    with pytest.raises(NonFiniteError, match="gradient norm (nan|inf)"):
        steps(trainer, 4)
    assert trainer.exchange.parameters.array.tobytes() == before


REFUSED = {
    "asp": ({"parameter_server.consistency": "asp"}, "clipped by the norm"),
    "ssp": ({"parameter_server.consistency": "ssp", "parameter_server.staleness": 1}, "clipped by the norm"),
    "backup": ({"parameter_server.backup_workers": 1}, "that it was applied"),
    "shared": ({"parameter_server.transport": "shared"}, "encoding only costs time"),
    "rma": ({"parameter_server.transport": "rma"}, "cannot decode payloads"),
    "powersgd": ({"communication.compression": "powersgd"}, "a second exchange"),
    "auto": ({"communication.compression": "auto"}, "auto"),
    "shards": (
        {"run.logical_shards": 4, "parallel.microbatches": 1, "run.global_batch": 8},
        "the compression errors of each rank",
    ),
    "across": ({"compression.across_nodes": "true"}, "'hierarchical'"),
    "float64": ({"precision.mode": "float64"}, "only float32 values can be encoded"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incompatible_recipes_are_rejected(case):
    settings, why = REFUSED[case]
    assert_rejected({**SERVER, **INT8, **settings}, why)
