"""Every architecture and layout is the same run as one process: losses, weights, bytes, checkpoints."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from hpcdist.arrays.piece import Piece
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.placement import locate
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError, NonFiniteError
from hpcdist.strategies.core.replica_check import explain_nonfinite
from hpcdist.training.build.assemble import assemble
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import microbatches
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

STEPS = 50
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
NOISE = "qkv.bias"  # its part for the keys has a true gradient of zero: under Adam it follows the rounding

# name -> (keys, the numbers of ranks that it is for)
LAYOUTS = {
    "allreduce": ({"parallel.strategy": "allreduce"}, (1, 2, 3, 4)),
    "zero1": ({"parallel.strategy": "zero1"}, (1, 2, 3, 4)),
    "zero2": ({"parallel.strategy": "zero2"}, (1, 2, 3, 4)),
    "zero3": ({"parallel.strategy": "zero3"}, (1, 2, 3, 4)),
    "zero2 accumulating": ({"parallel.strategy": "zero2", "parallel.microbatches": 3}, (2, 3)),
    "zero3 accumulating tied": (
        {"parallel.strategy": "zero3", "parallel.microbatches": 2, "model.tied": "true"},
        (1, 3),
    ),
    "allreduce in shared memory": ({"communication.algorithm": "node_shared"}, (2, 4)),
    "zero1 in shared memory": ({"parallel.strategy": "zero1", "communication.algorithm": "node_shared"}, (2, 3)),
    "zero3 in shared memory": (
        {"parallel.strategy": "zero3", "parallel.microbatches": 2, "communication.algorithm": "node_shared"},
        (2, 4),
    ),
    "zero3 inside the nodes": ({"parallel.strategy": "zero3", "zero.parameters": 2}, (4,)),
    "zero of three degrees": ({"parallel.strategy": "zero2", "zero.gradients": 2, "parallel.microbatches": 2}, (4,)),
    "zero3 keeping small units": ({"parallel.strategy": "zero3", "zero.persistent_below": 9000}, (2, 3)),
    "zero1 sharing parameters": ({"parallel.strategy": "zero1", "zero.shared_parameters": "true"}, (2, 3)),
    "gpipe": ({"parallel.pipeline": 2, "parallel.schedule": "gpipe", "parallel.microbatches": 4}, (2, 4)),
    "1f1b": ({"parallel.pipeline": 2, "parallel.microbatches": 4}, (2, 4)),
    "1f1b of 3": ({"parallel.pipeline": 3, "parallel.microbatches": 2}, (3,)),
    "gpipe of 4, recomputing": (
        {
            "parallel.pipeline": 4,
            "parallel.schedule": "gpipe",
            "parallel.microbatches": 4,
            "parallel.recompute": "true",
        },
        (4,),
    ),
    "1f1b tied, recomputing": (
        {"parallel.pipeline": 2, "parallel.microbatches": 3, "model.tied": "true", "parallel.recompute": "true"},
        (2, 4),
    ),
    "1f1b with zero1": (
        {"parallel.pipeline": 2, "parallel.microbatches": 2, "parallel.strategy": "zero1", "model.tied": "true"},
        (2, 4),
    ),
}


def _abort(code: int) -> None:
    raise SystemExit(code)


def _trainer(comm: Communicator, folder: Path, keys: dict[str, object], resume: Path | None = None) -> Trainer:
    settings = {
        "model.layers": 2,
        "model.hidden": 32,
        "model.heads": 2,
        "data.path": folder / "text.txt",
        "data.context": 16,
        "run.steps": STEPS,
        "run.global_batch": 12,
        "run.validation_samples": 50,
        "optimizer.warmup_steps": 5,
        "communication.algorithm": "ring",
        **keys,
    }
    recipe = recipes.load(None, [f"{key}={value}" for key, value in settings.items()], {}).recipe
    return assemble(Session(comm, locate(comm, None), "test", _abort), recipe, resume)


@dataclass(frozen=True)
class Reference:
    """The same run in one process, without any layout."""

    losses: list[float]
    state: dict[tuple[str, str], np.ndarray]
    validation: float


_references: dict[tuple[object, ...], Reference] = {}  # every test trains on the same text, so they may share them


def _alone(folder: Path, keys: dict[str, object], steps: int = STEPS) -> Reference:
    kept = {key: value for key, value in keys.items() if not key.startswith(("parallel.", "communication.", "zero."))}
    name = (steps, *sorted(kept.items()))
    if name not in _references:
        trainer = _trainer(solo(), folder, kept)
        _references[name] = Reference(_losses(trainer, steps), _state(trainer), mean_validation_loss(trainer))
    return _references[name]


def _losses(trainer: Trainer, last: int = STEPS) -> list[float]:
    losses = []
    with trainer.batches(last) as batches:
        for step, batch in enumerate(batches, start=trainer.first_step + 1):
            parts = microbatches(batch, trainer.recipe.parallel.microbatches)
            found = trainer.executor.run(trainer.operations, parts, trainer.recipe.run.global_batch, step, np.zeros(2))
            losses.append(found.loss)
    return losses


def _state(trainer: Trainer) -> dict[tuple[str, str], np.ndarray]:
    """All parameters and optimizer state by (kind, tensor), flat, from what the ranks save. Collective."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for pieces in trainer.comm.allgather_object([*map(_host, trainer.exchange.pieces())]):
        for kind, tensor, shape, flat, values in pieces:
            whole = found.setdefault((kind, tensor), np.full(math.prod(shape), np.nan, values.dtype))
            assert np.isnan(whole[flat.slice]).all(), f"{tensor} is saved twice"
            whole[flat.slice] = values
    assert not any(np.isnan(values).any() for values in found.values()), "something is not saved"
    return found


def _host(piece: Piece) -> tuple[object, ...]:
    return piece.kind, piece.tensor, piece.global_shape, piece.flat, piece.array.copy()


def _difference(trainer: Trainer, theirs: dict[tuple[str, str], np.ndarray]) -> float:
    """Return the norm of the difference of two models over the norm of the second. Collective."""
    mine = _state(trainer)
    weights = [key for key in theirs if key[0] == "parameters" and not key[1].endswith(NOISE)]
    differences = [np.linalg.norm(mine[key].astype(np.float64) - theirs[key]) for key in weights]
    return float(np.linalg.norm(differences) / np.linalg.norm([np.linalg.norm(theirs[key]) for key in weights]))


def _keys(name: str, comm: Communicator) -> dict[str, object]:
    keys, sizes = LAYOUTS[name]
    if comm.size not in sizes:
        pytest.skip(f"{name} is for {sizes} ranks")
    return dict(keys)


@pytest.mark.parametrize("mode", ["float32", "float64"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_layouts_equal_one_process(comm: Communicator, folder: Path, name: str, mode: str) -> None:
    keys = _keys(name, comm) | {"precision.mode": mode}
    alone, together = _alone(folder, keys), _trainer(comm, folder, keys)
    assert alone.losses[-1] < alone.losses[0] - 0.5, "the model learns"
    np.testing.assert_allclose(_losses(together), alone.losses, rtol=TOLERANCE[mode])
    assert _difference(together, alone.state) <= 10 * TOLERANCE[mode]
    np.testing.assert_allclose(mean_validation_loss(together), alone.validation, rtol=TOLERANCE[mode])


@pytest.mark.parametrize(  # all of them on threads: test_equalities
    ("name", "optimizer", "mode"),
    [
        ("allreduce", "lars", "float32"),
        ("zero1", "sgd", "float64"),
        ("zero2 accumulating", "lamb", "float32"),
        ("zero3", "lamb", "float64"),
        ("zero1 sharing parameters", "lars", "float64"),
        ("1f1b with zero1", "lars", "float64"),
    ],
)
def test_rank_layer_wise_rates_and_clipping_are_exact(
    comm: Communicator, folder: Path, name: str, optimizer: str, mode: str
) -> None:
    keys = _keys(name, comm) | {"optimizer.name": optimizer, "optimizer.clip_norm": 0.3, "precision.mode": mode}
    alone, together = _alone(folder, keys), _trainer(comm, folder, keys)
    np.testing.assert_allclose(_losses(together), alone.losses, rtol=10 * TOLERANCE[mode])
    assert _difference(together, alone.state) <= (1e-10 if mode == "float64" else 1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_resume_is_bit_equal_in_every_layout(comm: Communicator, folder: Path, name: str) -> None:
    keys = _keys(name, comm)
    whole = _trainer(comm, folder, keys)
    losses = _losses(whole, 12)
    half = _trainer(comm, folder, keys)
    first = _losses(half, 5)
    saved = CheckpointSaver(half, folder / "checkpoints").save(5)
    resumed = _trainer(comm, folder, keys, resume=saved)
    assert resumed.first_step == 5
    assert first + _losses(resumed, 12) == losses
    expected = _state(whole)
    assert all(values.tobytes() == expected[key].tobytes() for key, values in _state(resumed).items())


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "tied" not in name and name != "1f1b with zero1"])
def test_rank_a_checkpoint_goes_from_any_layout_to_any_other(comm: Communicator, folder: Path, name: str) -> None:
    keys = _keys(name, comm) | {"precision.mode": "float64"}
    together = _trainer(comm, folder, keys)
    first = _losses(together, 6)
    saved = CheckpointSaver(together, folder / "checkpoints").save(6)
    comm.barrier()
    reference = _alone(folder, keys, 15).losses
    alone = _trainer(solo(), folder, {"precision.mode": "float64"}, resume=saved)
    np.testing.assert_allclose(first + _losses(alone, 15), reference, rtol=1e-12)
    for other in ("allreduce", "zero3"):
        resumed = _trainer(comm, folder, LAYOUTS[other][0] | {"precision.mode": "float64"}, resume=saved)
        np.testing.assert_allclose(first + _losses(resumed, 15), reference, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "volumes"), [("allreduce", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3), ("zero2 accumulating", 4)]
)
def test_rank_bytes_are_those_of_the_closed_form(comm: Communicator, folder: Path, name: str, volumes: int) -> None:
    keys = _keys(name, comm) | {"model.hidden": 64, "model.layers": 3}
    trainer = _trainer(comm, folder, keys)
    _losses(trainer, 1)  # communicators are split and scratch memory taken
    with count_traffic(comm) as traffic:
        trainer = replace(trainer, first_step=1)
        _losses(trainer, 2)
    sent = max(comm.allgather_object(traffic.sent_bytes))
    psi = trainer.model.layout.parameters * trainer.model.dtype.itemsize
    last = sum(spec.size for spec in trainer.model.stages[-1].tensors()) * trainer.model.dtype.itemsize
    once = last if name == "zero3" else 0  # its forward and its backward follow each other: one gather
    expected = (volumes * psi - once) * (comm.size - 1) / comm.size
    assert not traffic.unknown
    assert sent == pytest.approx(expected, rel=0.01, abs=1024), f"{sent / max(psi, 1):.4f} Psi"


def test_rank_stage_3_of_a_tied_model_holds_the_table_once(comm: Communicator, folder: Path) -> None:
    keys = {"parallel.strategy": "zero3", "model.tied": "true", "model.vocabulary": 4096, "model.layers": 4}
    trainer = _trainer(comm, folder, keys)
    _losses(trainer, 2)
    table, *others = (part.size * 4 for part in trainer.context.ranges.values())
    share = trainer.model.layout.size * 4 / comm.size + 64 * len(trainer.model.stages)
    assert table > 4 * max(others)
    for kind in ("parameters", "gradients"):
        assert trainer.ledger.peak[kind] <= share + table + max(others), kind


def test_rank_stage_3_holds_a_share_and_no_more_than_it_needs(comm: Communicator, folder: Path) -> None:
    peaks = {}
    for strategy in ("allreduce", "zero1", "zero2", "zero3"):
        trainer = _trainer(comm, folder, {"parallel.strategy": strategy, "model.layers": 6})
        _losses(trainer, 2)
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


def test_rank_hierarchical_serves_every_layout(comm: Communicator, folder: Path) -> None:
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
            np.testing.assert_allclose(_losses(together, 10), expected, rtol=1e-12)


def _blamed(trainer: Trainer) -> list[int]:
    """The ranks that the explanation of a failed first step names."""
    with trainer.batches(1) as batches:
        parts = microbatches(next(iter(batches)), trainer.recipe.parallel.microbatches)
    samples = trainer.recipe.run.global_batch
    with pytest.raises(NonFiniteError) as failed, np.errstate(all="ignore"):
        trainer.executor.run(trainer.operations, parts, samples, 1, np.zeros(2))
    with np.errstate(all="ignore"):
        said = str(explain_nonfinite(trainer.comm, trainer.executor, trainer.operations, parts, failed.value))
    return [rank for rank in range(trainer.comm.size) if f"rank {rank}: " in said]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_rank_only_the_stage_that_overflows_is_blamed(comm: Communicator, folder: Path, schedule: str) -> None:
    if comm.size == 1:
        pytest.skip("a pipeline of one has nobody else to blame")
    keys = {"parallel.pipeline": comm.size, "parallel.schedule": schedule, "parallel.microbatches": 3}
    for culprit in range(comm.size):
        trainer = _trainer(comm, folder, keys | {"model.tied": "true"})
        if comm.rank == culprit:
            trainer.exchange.parameters.array[...] = 3e38  # finite, but no product of two of them is
        assert _blamed(trainer) == [culprit]


@pytest.mark.parametrize("strategy", ["allreduce", "zero2", "zero3"])
def test_rank_only_the_owner_of_a_nan_is_blamed(comm: Communicator, folder: Path, strategy: str) -> None:
    culprit = comm.size - 1
    trainer = _trainer(comm, folder, {"parallel.strategy": strategy})
    if comm.rank == culprit:
        *_, (_, touched) = trainer.exchange.parameters.tensors()  # of the head, which every token meets
        trainer.exchange.parameters.range(touched)[...] = np.nan
    assert _blamed(trainer) == [culprit]


def test_rank_what_cannot_be_laid_out_is_refused(comm: Communicator, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"parallel.data \d+ x parallel.pipeline 5 x .* = .*, but the world"):
        _trainer(comm, folder, {"parallel.pipeline": 5, "parallel.data": 2})
    if comm.size > 2:
        with pytest.raises(ConfigurationError, match="has only 2 stages"):
            _trainer(comm, folder, {"model.kind": "mlp", "model.layers": 1, "parallel.pipeline": comm.size})
