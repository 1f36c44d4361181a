"""Any layout goes on from any other, bit for bit, and each rank reads what it needs: all ordered pairs of some layouts.

HPCDIST_TEST_RESUMES=all takes those of all layouts, in minutes.
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
from hpcdist.checkpoint.format import manifest
from hpcdist.checkpoint.format.shard import BlockReader
from hpcdist.checkpoint.listing import stored_tensors
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError
from hpcdist.training.build.state import restore_state
from hpcdist.training.build.state_source import CheckpointSource
from hpcdist.training.run.saving import CheckpointSaver

EVERYTHING = os.environ.get("HPCDIST_TEST_RESUMES") == "all"
BLOCK = 1024  # bytes: small, so that larger pieces begin and end inside one
COUNT = 5  # updates of the optimizer so far
SMALL = recipe_keys("optimizer.name=sgd optimizer.momentum=0.9 layers=2 hidden=8 heads=2 data.context=4 global_batch=8")
DOUBLE = {"precision.mode": "float64"}
SERVED = {"parallel.strategy": "parameter_server"}
COLOCATED = SERVED | {"parameter_server.placement": "colocated"}

# name -> (ranks, keys); those in float64 only among themselves: no bit of a value may be lost
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
DRAWN = {False: 7, True: 2}  # layouts of single and double precision, where not all of them are taken
PAIRS = [(one, other) for one in LAYOUTS for other in LAYOUTS if one != other and ("64" in one) == ("64" in other)]

Whole = dict[tuple[str, str], np.ndarray]  # (kind, tensor) -> its elements, flat


READ_BYTES = Counter()  # by thread, and so by rank


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Whoever reads blocks has small ones, and is counted."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hpcdist.checkpoint.") and hasattr(module, "BLOCK_BYTES"):
            monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    read = BlockReader.read

    def counting(reader, entry, block, *rest):
        READ_BYTES[threading.get_ident()] += min(BLOCK, entry.nbytes - block * BLOCK)
        return read(reader, entry, block, *rest)

    monkeypatch.setattr(BlockReader, "read", counting)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # nothing crashes here
    monkeypatch.setattr("hpcdist.checkpoint.format.shard.write_index", lambda *_: None)  # for other tools


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    return {**SMALL, "data.path": tmp_path / "text.txt", "zero.offload_directory": ""}


def settings_of(name, keys):
    found = {**keys, **LAYOUTS[name][1]}
    return found | ({"zero.offload_directory": keys["data.path"].parent} if "files" in name else {})


def spoil(piece):
    """What is restored must not be what was there."""
    if isinstance(piece.array, FileSlice):
        piece.array.write(Range(0, piece.flat.size), np.full(piece.flat.size, np.nan, piece.array.dtype))
    else:
        piece.array[...] = np.nan


def elements(piece):
    """Which elements of the tensor a piece has, in its order."""
    shape, flat = (piece.global_shape, piece.flat) if isinstance(piece, Piece) else (piece.shape, Range(*piece.flat))
    found = runs(shape, piece.box, flat)
    order = np.argsort(found.local)
    return np.concatenate(
        [np.zeros(0, int), *(np.arange(found.start[k], found.start[k] + found.size[k]) for k in order)]
    )


class Places:
    """In which stored block each element lies."""

    def __init__(self, stored):
        self.block = {}
        self.nbytes = [0]  # of each block; 0 is none
        for entry in stored.pieces:
            blocks = self.block.setdefault((entry.kind, entry.tensor), np.zeros(math.prod(entry.shape), int))
            own = elements(entry)
            assert not blocks[own].any(), f"{entry.name} is saved twice"
            blocks[own] = len(self.nbytes) + np.arange(own.size) * dtype_of(entry.dtype).itemsize // BLOCK
            self.nbytes += [min(BLOCK, entry.nbytes - start) for start in range(0, entry.nbytes, BLOCK)]

    def needed_bytes(self, wanted):
        """Whole blocks that have an element of a wanted piece, for each piece; those in a file are filled in parts."""
        found = 0
        for piece in wanted:
            blocks = self.block[piece.kind, piece.tensor][elements(piece)]
            step = BLOCK // piece.array.dtype.itemsize if isinstance(piece.array, FileSlice) else blocks.size
            for start in range(0, blocks.size, step):
                found += sum(self.nbytes[block] for block in np.unique(blocks[start : start + step]))
        return found


def read(path):
    """All tensors of a checkpoint."""
    stored = manifest.load(path)
    pieces = [
        Piece(one.kind, one.name, one.shape, whole_box(one.shape), Range(0, one.size), np.empty(one.size, one.dtype))
        for one in stored_tensors(stored)
    ]
    restore(path, pieces)
    return {(piece.kind, piece.tensor): piece.array for piece in pieces}


def drawn(rng, double):
    """Some of the layouts of one precision."""
    found = [name for name in LAYOUTS if ("64" in name) == double]
    return [found[number] for number in rng.permutation(len(found))[: DRAWN[double]]]


def first_checkpoint(directory, keys, rng):
    """A state of one process in which no two elements are the same."""

    def body(comm):
        trainer = trainer_of(comm, keys)
        for piece in trainer.exchange.wanted():
            piece.array[...] = rng.standard_normal(piece.flat.size)
        trainer.exchange.restore({"count": COUNT})
        return CheckpointSaver(trainer, directory).save(COUNT)

    return run_threads(1, body)[0]


def restored(trainer, path, right, places):
    """Take back the state in ``path``; it has the right bits, and no byte was read that is not needed."""
    for piece in trainer.exchange.wanted():
        spoil(piece)
    READ_BYTES[threading.get_ident()] = 0
    trainer = restore_state(trainer, CheckpointSource(path))
    wanted = [piece for piece in trainer.exchange.wanted() if piece.flat]
    assert READ_BYTES[threading.get_ident()] == places.needed_bytes(wanted)
    for piece in wanted:
        assert piece.array.copy().tobytes() == right[piece.kind, piece.tensor][elements(piece)].tobytes(), piece.name
    assert trainer.first_step == COUNT and trainer.exchange.state()["count"] == COUNT


@pytest.mark.timeout(7200)
@pytest.mark.full
def test_every_pair_of_layouts_keeps_every_bit(keys, tmp_path, rng):
    """Saved by one layout, restored and saved by the other, restored by the first: the same, all the way."""
    layouts = list(LAYOUTS)
    if not EVERYTHING:
        layouts = [name for double in DRAWN for name in drawn(rng, double)]
    pairs = [(one, other) for one, other in PAIRS if one in layouts and other in layouts]
    assert len(LAYOUTS) >= 12 and len(pairs) >= 40
    begun = {
        double: first_checkpoint(tmp_path / f"first{double}", keys | (DOUBLE if double else {}), rng)
        for double in (False, True)
    }
    right = {double: read(path) for double, path in begun.items()}
    assert {kind for kind, _ in right[False]} == {"parameters", "optimizer.momentum"}
    saved = {}

    def through(layout, sources, *, saves):
        """Let ``layout`` restore each of ``sources``, and save what it has then."""
        ranks, double = LAYOUTS[layout][0], "64" in layout
        places = {name: Places(manifest.load(path)) for name, path in sources.items()}

        def body(comm):
            trainer, made = trainer_of(comm, settings_of(layout, keys)), []
            for name, path in sources.items():
                restored(trainer, path, right[double], places[name])
                if saves:
                    made.append(CheckpointSaver(trainer, tmp_path / "-".join([*name, layout])).save(COUNT))
            trainer.close()
            return made

        for name, path in zip(sources, run_threads(ranks, body)[0], strict=saves):
            found = read(path)
            assert found.keys() == right[double].keys()
            assert all(found[key].tobytes() == array.tobytes() for key, array in right[double].items()), (name, layout)
            saved[*name, layout] = path

    for layout in layouts:
        through(layout, {(): begun["64" in layout]}, saves=True)
    for layout in layouts:
        through(layout, {(one,): saved[one,] for one, other in pairs if other == layout}, saves=True)
    for layout in layouts:
        through(layout, {pair: saved[pair] for pair in pairs if pair[0] == layout}, saves=False)
    assert len(saved) == len(layouts) + len(pairs)
    print(f"{len(pairs)} ordered pairs of {len(layouts)} layouts")


def test_a_state_is_never_rounded_on_the_way(keys, tmp_path, rng):
    path = first_checkpoint(tmp_path / "first", keys, rng)
    for layout in "float64", "float64, zero3":
        expected = r"parameters/0\.\S+ is float32\[.*\], expected float64\[.*\]"
        with pytest.raises(StorageError, match=expected) as caught:
            run_threads(LAYOUTS[layout][0], lambda comm: trainer_of(comm, keys | LAYOUTS[layout][1], path))  # noqa: B023
        assert caught.value.exit_code == 74
    assert json.loads((path / manifest.FILE_NAME).read_text())["scalars"]["steps"] == COUNT
