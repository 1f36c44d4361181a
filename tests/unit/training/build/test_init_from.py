"""New runs that begin with the parameters of another run: any layout and type; mismatches are named."""

import shutil
from typing import Any

import numpy as np
import pytest

from harness.marks import cases
from harness.trainings import assert_rejected, trainer_of
from hpcdist.arrays import backend
from hpcdist.arrays.piece import Piece, runs
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.convert import safetensors
from hpcdist.checkpoint.convert.importing import import_checkpoint
from hpcdist.checkpoint.listing import PARAMETERS, stored_tensors
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import StorageError
from hpcdist.training.run.saving import CheckpointSaver

Keys = dict[str, Any]

SMALL = {"model.layers": 2, "model.hidden": 8, "model.heads": 2, "data.context": 4, "run.global_batch": 8}
SERVED = {"parallel.strategy": "parameter_server"}
LAYOUTS = {
    "one process": (1, {}),
    "bfloat16": (2, {"precision.mode": "bfloat16"}),
    "float64": (2, {"precision.mode": "float64"}),
    "zero3": (3, {"parallel.strategy": "zero3"}),
    "zero3 in files": (2, {"parallel.strategy": "zero3", "zero.offload_optimizer": "file"}),
    "pipeline, tensor": (4, {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.microbatches": 2}),
    "servers": (3, SERVED),
    "asynchronous servers": (3, SERVED | {"parameter_server.consistency": "asp"}),
    "DiLoCo": (2, {"parallel.strategy": "local_sgd", "decentralised.outer_momentum": 0.9}),
}


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    return {**SMALL, "data.path": tmp_path / "text.txt"}


@pytest.fixture
def old_checkpoint(keys, tmp_path, rng):
    """The checkpoint of a run on other data, by two ranks."""
    (tmp_path / "other.txt").write_text("another text of other words " * 40)
    drawn = rng.standard_normal(1 << 16).astype(np.float32)

    def body(comm):
        trainer = trainer_of(comm, {**keys, "data.path": tmp_path / "other.txt"})
        for piece in trainer.exchange.wanted():
            piece.array[...] = drawn[: piece.flat.size]
        trainer.exchange.restore({"count": 7})
        return CheckpointSaver(trainer, tmp_path / "old" / "checkpoints").save(7)

    return run_threads(2, body)[0]


def parameters(path):
    pieces = [
        Piece.whole(one.kind, one.name, np.empty(one.shape, one.dtype))
        for one in stored_tensors(manifest.load(path), {PARAMETERS})
    ]
    restore(path, pieces)
    return {piece.tensor: piece.array for piece in pieces}


def check_new_run(trainer, right):
    """Check that the parameters are ``right``, and that nothing else of the old run is used."""
    for piece in trainer.exchange.wanted():
        result, where = backend.to_host(piece.array.copy()), runs(piece.global_shape, piece.box, piece.flat)
        if piece.kind != PARAMETERS:
            assert not result.any(), piece.name
            continue
        for start, local, size in zip(where.start, where.local, where.size, strict=True):
            expected = right[piece.tensor][start : start + size].astype(result.dtype)
            assert result[local : local + size].tobytes() == expected.tobytes(), piece.name
    assert trainer.first_step == 0 and trainer.exchange.state()["count"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_can_begin_with_saved_parameters(layout, keys, old_checkpoint, tmp_path):
    ranks, local_data = LAYOUTS[layout]
    settings = {**keys, **local_data, "run.init_from": old_checkpoint}
    if "files" in layout:
        settings["zero.offload_directory"] = tmp_path
    right = parameters(old_checkpoint)

    def body(comm):
        trainer = trainer_of(comm, settings)
        check_new_run(trainer, right)
        exchange = trainer.exchange
        if layout == "bfloat16":
            assert (exchange.parameters.array == exchange.weights.array.astype(exchange.parameters.dtype)).all()
        if layout == "DiLoCo":
            assert (exchange._outer._start.array == exchange.parameters.array).all()
        trainer.close()

    run_threads(ranks, body)


@pytest.mark.parametrize("mode", ["float32", "float64"])
def test_gpu_run_can_begin_with_saved_parameters(mode, keys, old_checkpoint, gpu):
    settings = {**keys, "run.device": "gpu", "precision.mode": mode, "run.init_from": old_checkpoint}
    check_new_run(trainer_of(solo(), settings), parameters(old_checkpoint))


def test_init_from_accepts_a_run_directory_or_an_import(keys, old_checkpoint, tmp_path):
    check_new_run(trainer_of(solo(), {**keys, "run.init_from": tmp_path / "old"}), parameters(old_checkpoint))
    stored = manifest.load(old_checkpoint)
    files = safetensors.write(
        old_checkpoint, stored, stored_tensors(stored, {PARAMETERS}), tmp_path / "m.safetensors", 1 << 30
    )
    import_checkpoint(files[0], tmp_path / "imported")
    check_new_run(trainer_of(solo(), {**keys, "run.init_from": tmp_path / "imported"}), parameters(old_checkpoint))


@cases(
    "changed, output",
    ({"model.layers": 3}, r"\d\.\S+ (is missing|has the shape)"),
    ({"model.layers": 1}, r"\d\.\S+ (is missing|has the shape)"),
    ({"data.context": 6}, r"0\.positions\.weight has the shape \[4, 8\], but \[6, 8\] in the recipe's model"),
)
@pytest.mark.parametrize("layout", ["one process", "zero3", "pipeline, tensor"])
def test_mismatched_tensors_are_named_and_drawn_if_allowed(changed, output, layout, keys, old_checkpoint, capfd):
    ranks, local_data = LAYOUTS[layout]
    settings = {**keys, **local_data, **changed}
    with pytest.raises(StorageError, match=output + ".*--allow-partial") as caught:
        run_threads(ranks, lambda comm: trainer_of(comm, {**settings, "run.init_from": old_checkpoint}))
    assert caught.value.exit_code == 74
    right = parameters(old_checkpoint)

    def body(comm):
        drawn = {piece.name: piece.array.copy() for piece in trainer_of(comm, settings).exchange.wanted()}
        trainer = trainer_of(comm, {**settings, "run.init_from": old_checkpoint, "run.allow_partial": "true"})
        fresh = set()
        for piece in trainer.exchange.wanted():
            if piece.kind == PARAMETERS and right.get(piece.tensor, np.zeros(0)).size == np.prod(piece.global_shape):
                where = runs(piece.global_shape, piece.box, piece.flat)
                for start, local, size in zip(where.start, where.local, where.size, strict=True):
                    assert (piece.array[local : local + size] == right[piece.tensor][start : start + size]).all()
            elif piece.kind == PARAMETERS:
                assert (piece.array == drawn[piece.name]).all()
                fresh.add(piece.tensor)
        return fresh

    fresh = set().union(*run_threads(ranks, body))
    stderr = capfd.readouterr().err
    assert all(f"hpcdist: {name} " in stderr for name in fresh) and "tensors start with the parameters of" in stderr


def test_damaged_parameters_are_drawn_if_allowed(keys, old_checkpoint, capfd):
    bad = next(
        entry for entry in manifest.load(old_checkpoint).pieces if entry.kind == PARAMETERS and len(entry.shape) == 2
    )
    right = parameters(old_checkpoint)
    data = bytearray((old_checkpoint / bad.file).read_bytes())
    data[bad.offset + 5] ^= 1
    (old_checkpoint / bad.file).write_bytes(data)
    with pytest.raises(StorageError, match=f"{bad.tensor} are damaged.*add --allow-partial"):
        run_threads(2, lambda comm: trainer_of(comm, {**keys, "run.init_from": old_checkpoint}))

    def body(comm):
        fresh = trainer_of(comm, keys).exchange.wanted()
        drawn = {piece.tensor: piece.array.copy() for piece in fresh if piece.kind == PARAMETERS}
        trainer = trainer_of(comm, {**keys, "run.init_from": old_checkpoint, "run.allow_partial": "true"})
        for piece in trainer.exchange.wanted():
            if piece.kind == PARAMETERS:
                expected = (drawn if piece.tensor == bad.tensor else right)[piece.tensor]
                assert (piece.array == expected.reshape(-1)).all(), piece.name

    run_threads(2, body)
    assert "are damaged: the digest does not match: drawn" in capfd.readouterr().err


def test_invalid_init_from_sources_are_rejected(keys, old_checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(old_checkpoint, tmp_path / "older" / "step-7")
    (tmp_path / "older" / "step-7" / "manifest.json").write_text('{"schema": "other"}')
    for source, output in (
        (tmp_path / "missing", "has no checkpoints; give the directory of a run"),
        (tmp_path / "empty", "has no checkpoints; give the directory of a run"),
        (tmp_path / "older" / "step-7", "is not a manifest"),
    ):
        with pytest.raises(StorageError, match=output):
            run_threads(2, lambda comm: trainer_of(comm, {**keys, "run.init_from": source}))  # noqa: B023
    assert_rejected(["run.allow_partial=true"], "allow_partial = true has no effect")
