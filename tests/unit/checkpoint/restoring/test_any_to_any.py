"""Any layout resumes from any other, bit for bit, and reads only needed blocks: all ordered pairs of some layouts.

HPCDIST_TEST_RESUMES=all takes the pairs of all layouts, which needs minutes.
"""

import json
import math
import os
import sys
import threading
from collections import Counter

import numpy as np
import pytest

from harness.trainings import recipe_keys, trainer_of
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.filestore import FileSlice
from hpcdist.arrays.piece import Piece, runs, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.listing import stored_tensors
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.shard import BlockReader
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError
from hpcdist.training.build.state import restore_state
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.run.saving import CheckpointSaver

EVERYTHING = os.environ.get("HPCDIST_TEST_RESUMES") == "all"
BLOCK = 1024  # bytes: small, so that larger pieces start and end within a block
COUNT = 5  # optimizer updates before the checkpoint
SMALL = recipe_keys("optimizer.name=sgd optimizer.momentum=0.9 layers=2 hidden=8 heads=2 data.context=4 global_batch=8")
DOUBLE = {"precision.mode": "float64"}
SERVED = {"parallel.strategy": "parameter_server"}
COLOCATED = SERVED | {"parameter_server.placement": "colocated"}

# name -> (ranks, keys). float64 layouts are paired only with each other, because no bit may be lost.
LAYOUTS = {
    "one process": (1, {}),
    "allreduce": (3, {}),
    "allreduce, bfloat16": (2, {"precision.mode": "bfloat16"}),
    "zero1": (4, {"parallel.strategy": "zero1"}),
    "zero1, float16": (2, recipe_keys("strategy=zero1 precision.mode=float16")),
    "zero2, degrees": (4, recipe_keys("strategy=zero2 zero.gradients=2")),
    "zero3": (3, {"parallel.strategy": "zero3"}),
    "zero3, bfloat16": (3, recipe_keys("strategy=zero3 precision.mode=bfloat16")),
    "zero3, degrees": (4, recipe_keys("strategy=zero3 zero.parameters=2 zero.persistent_below=80")),
    "zero3, states in files": (2, recipe_keys("strategy=zero3 zero.offload_optimizer=file")),
    "pipeline": (4, recipe_keys("pipeline=4 microbatches=2")),
    "pipeline, chunks": (2, recipe_keys("pipeline=2 schedule=interleaved chunks=2 microbatches=2")),
    "pipeline, folded, zero2": (
        4,
        recipe_keys("pipeline=2 schedule=zb-v microbatches=4 zero.keep_gradients=true strategy=zero2"),
    ),
    "tensor": (2, {"parallel.tensor": 2}),
    "tensor, zero1": (4, recipe_keys("tensor=2 sequence_parallel=true strategy=zero1")),
    "tensor, pipeline": (4, recipe_keys("tensor=2 pipeline=2 microbatches=2")),
    "dedicated servers": (4, SERVED | {"parameter_server.servers": 2}),
    "colocated servers": (3, COLOCATED),
    "asynchronous servers": (3, SERVED | {"parameter_server.consistency": "asp"}),
    "gossip": (3, {"parallel.strategy": "gossip"}),
    "local sgd": (2, {"parallel.strategy": "local_sgd"}),
    "float64": (1, DOUBLE),
    "float64, zero3": (4, DOUBLE | {"parallel.strategy": "zero3"}),
    "float64, tensor, pipeline": (4, DOUBLE | recipe_keys("tensor=2 pipeline=2")),
}
DRAWN = {False: 7, True: 2}  # number of layouts of single and double precision if not all are taken
PAIRS = [(one, other) for one in LAYOUTS for other in LAYOUTS if one != other and ("64" in one) == ("64" in other)]

Whole = dict[tuple[str, str], np.ndarray]  # (kind, tensor) -> flat array of its elements


READ_BYTES = Counter()  # per thread, and thus per rank


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use small blocks in all readers, and count the bytes that they read."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hpcdist.checkpoint.") and hasattr(module, "BLOCK_BYTES"):
            monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    read = BlockReader.read

    def count_read_bytes(reader, entry, block, *rest):
        READ_BYTES[threading.get_ident()] += min(BLOCK, entry.nbytes - block * BLOCK)
        return read(reader, entry, block, *rest)

    monkeypatch.setattr(BlockReader, "read", count_read_bytes)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no crash in this test
    monkeypatch.setattr("hpcdist.checkpoint.shard.write_index", lambda *_: None)  # not needed here


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    return {**SMALL, "data.path": tmp_path / "text.txt", "zero.offload_directory": ""}


def settings_of(name, keys):
    results = {**keys, **LAYOUTS[name][1]}
    return results | ({"zero.offload_directory": keys["data.path"].parent} if "files" in name else {})


def overwrite_with_nan(piece):
    """Overwrite a piece with NaN, so that a restore cannot leave old values."""
    if isinstance(piece.array, FileSlice):
        piece.array.write(Range(0, piece.flat.size), np.full(piece.flat.size, np.nan, piece.array.dtype))
    else:
        piece.array[...] = np.nan


def element_indices(piece):
    """Return the indices of a piece's elements within the tensor, in the order of the piece."""
    shape, flat = (piece.global_shape, piece.flat) if isinstance(piece, Piece) else (piece.shape, Range(*piece.flat))
    result = runs(shape, piece.box, flat)
    order = np.argsort(result.local)
    return np.concatenate(
        [np.zeros(0, int), *(np.arange(result.start[k], result.start[k] + result.size[k]) for k in order)]
    )


class Places:
    """The stored block of each element."""

    def __init__(self, stored):
        self.block = {}
        self.nbytes = [0]  # of each block; block 0 does not exist
        for entry in stored.pieces:
            blocks = self.block.setdefault((entry.kind, entry.tensor), np.zeros(math.prod(entry.shape), int))
            local_data = element_indices(entry)
            assert not blocks[local_data].any(), f"{entry.name} is saved twice"
            blocks[local_data] = len(self.nbytes) + np.arange(local_data.size) * dtype_of(entry.dtype).itemsize // BLOCK
            self.nbytes += [min(BLOCK, entry.nbytes - start) for start in range(0, entry.nbytes, BLOCK)]

    def needed_bytes(self, expected):
        """Return the bytes of all blocks that contain elements of the pieces. Pieces in a file are filled in parts."""
        result = 0
        for piece in expected:
            blocks = self.block[piece.kind, piece.tensor][element_indices(piece)]
            step = BLOCK // piece.array.dtype.itemsize if isinstance(piece.array, FileSlice) else blocks.size
            for start in range(0, blocks.size, step):
                result += sum(self.nbytes[block] for block in np.unique(blocks[start : start + step]))
        return result


def read(path):
    """Return all tensors of a checkpoint."""
    stored = manifest.load(path)
    pieces = [
        Piece(one.kind, one.name, one.shape, whole_box(one.shape), Range(0, one.size), np.empty(one.size, one.dtype))
        for one in stored_tensors(stored)
    ]
    restore(path, pieces)
    return {(piece.kind, piece.tensor): piece.array for piece in pieces}


def draw_layouts(rng, double):
    """Draw some layouts of one precision."""
    results = [name for name in LAYOUTS if ("64" in name) == double]
    return [results[number] for number in rng.permutation(len(results))[: DRAWN[double]]]


def first_checkpoint(directory, keys, rng):
    """Save a state on one process in which no two elements are equal."""

    def body(comm):
        trainer = trainer_of(comm, keys)
        for piece in trainer.exchange.wanted():
            piece.array[...] = rng.standard_normal(piece.flat.size)
        trainer.exchange.restore({"count": COUNT})
        return CheckpointSaver(trainer, directory).save(COUNT)

    return run_threads(1, body)[0]


def check_restore(trainer, path, right, places):
    """Restore the state in ``path``. Check all bits, and that only the needed blocks are read."""
    for piece in trainer.exchange.wanted():
        overwrite_with_nan(piece)
    READ_BYTES[threading.get_ident()] = 0
    trainer = restore_state(trainer, CheckpointSource(path))
    expected = [piece for piece in trainer.exchange.wanted() if piece.flat]
    assert READ_BYTES[threading.get_ident()] == places.needed_bytes(expected)
    for piece in expected:
        assert piece.array.copy().tobytes() == right[piece.kind, piece.tensor][element_indices(piece)].tobytes(), (
            piece.name
        )
    assert trainer.first_step == COUNT and trainer.exchange.state()["count"] == COUNT


@pytest.mark.timeout(7200)
@pytest.mark.full
def test_every_pair_of_layouts_restores_every_bit(keys, tmp_path, rng):
    """Saved by one layout, restored and saved by the other, restored by the first: no bit changes."""
    layouts = list(LAYOUTS)
    if not EVERYTHING:
        layouts = [name for double in DRAWN for name in draw_layouts(rng, double)]
    pairs = [(one, other) for one, other in PAIRS if one in layouts and other in layouts]
    assert len(LAYOUTS) >= 12 and len(pairs) >= 40
    begun = {
        double: first_checkpoint(tmp_path / f"first{double}", keys | (DOUBLE if double else {}), rng)
        for double in (False, True)
    }
    right = {double: read(path) for double, path in begun.items()}
    assert {kind for kind, _ in right[False]} == {"parameters", "optimizer.momentum"}
    saved = {}

    def restore_and_save(layout, sources, *, saves):
        """Let ``layout`` restore each of ``sources``, and save it again if ``saves``."""
        ranks, double = LAYOUTS[layout][0], "64" in layout
        places = {name: Places(manifest.load(path)) for name, path in sources.items()}

        def body(comm):
            trainer, made = trainer_of(comm, settings_of(layout, keys)), []
            for name, path in sources.items():
                check_restore(trainer, path, right[double], places[name])
                if saves:
                    made.append(CheckpointSaver(trainer, tmp_path / "-".join([*name, layout])).save(COUNT))
            trainer.close()
            return made

        for name, path in zip(sources, run_threads(ranks, body)[0], strict=saves):
            result = read(path)
            assert result.keys() == right[double].keys()
            assert all(result[key].tobytes() == array.tobytes() for key, array in right[double].items()), (name, layout)
            saved[*name, layout] = path

    for layout in layouts:
        restore_and_save(layout, {(): begun["64" in layout]}, saves=True)
    for layout in layouts:
        restore_and_save(layout, {(one,): saved[one,] for one, other in pairs if other == layout}, saves=True)
    for layout in layouts:
        restore_and_save(layout, {pair: saved[pair] for pair in pairs if pair[0] == layout}, saves=False)
    assert len(saved) == len(layouts) + len(pairs)
    print(f"{len(pairs)} ordered pairs of {len(layouts)} layouts")


def test_restore_with_another_precision_is_rejected(keys, tmp_path, rng):
    path = first_checkpoint(tmp_path / "first", keys, rng)
    for name in "float64", "float64, zero3":
        expected = r"parameters/0\.\S+ is float32\[.*\], expected float64\[.*\]"
        with pytest.raises(StorageError, match=expected) as caught:
            run_threads(LAYOUTS[name][0], lambda comm: trainer_of(comm, keys | LAYOUTS[name][1], path))  # noqa: B023
        assert caught.value.exit_code == 74
    assert json.loads((path / manifest.FILE_NAME).read_text())["scalars"]["steps"] == COUNT
