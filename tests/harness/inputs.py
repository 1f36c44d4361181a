"""Input files of small trainings, recipes of all model kinds, states of made-up layouts, and wheels."""

import errno
import itertools
import os
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from harness.trainings import recipe_keys
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.restoring.restore import from_newest_intact, newest_complete
from hpcdist.checkpoint.shard import BlockReader
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.models.config import ModelConfig

SIZES = ("context", "height", "width", "channels", "features", "classes")  # of inputs
STEPS = 6
KEYS: dict[str, object] = recipe_keys(
    f"layers=2 hidden=16 heads=4 steps={STEPS} global_batch=8 validation_samples=12 "
    "optimizer.warmup_steps=2 optimizer.clip_norm=0.7 precision.mode=float64"
)
LLAMA: dict[str, object] = recipe_keys(
    "positions=rotary norm=rms activation=swiglu kv_heads=2 bias=false vocabulary=257 data.context=12"
)
ENCODER: dict[str, object] = {"model.kind": "encoder", "model.vocabulary": 257, "data.context": 12}
CONVNET: dict[str, object] = {"model.kind": "convnet", "model.layers": 3, "model.hidden": 6}
KINDS: dict[str, dict[str, object]] = {
    "gpt with the options of Llama": LLAMA,
    "gpt of grouped heads with biases, dropping": recipe_keys(
        "kv_heads=2 dropout=0.1 tied=true vocabulary=257 data.context=12"
    ),
    "encoder": ENCODER,
    "encoder with the options of Llama": LLAMA | ENCODER,
    "convnet": CONVNET,
    "convnet with lars, dropping": CONVNET | recipe_keys("optimizer.name=lars dropout=0.1 norm=rms"),
}


def write_text(path: Path, rng: np.random.Generator, words: int = 1000) -> Path:
    """Write a text of repeated words, which a model learns to some degree in a few steps."""
    reference = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(30)]
    path.write_text(" ".join(rng.choice(reference, words)))
    return path


def write_data(folder: Path) -> None:
    """Write the data of the recipes: a text of sums, and pictures labelled with the quadrant of a bright spot."""
    text = b"".join(b"%d plus %d is %d. " % (i % 7, i % 5, i % 7 + i % 5) for i in range(900))
    (folder / "text.txt").write_bytes(text)
    draw = np.random.default_rng(5)
    pictures = draw.integers(0, 100, (240, 7, 6, 3)).astype(np.uint8)
    classes = draw.integers(0, 4, 240)
    for picture, quadrant in zip(pictures, classes, strict=True):
        picture[quadrant // 2 * 4 : quadrant // 2 * 4 + 3, quadrant % 2 * 3 : quadrant % 2 * 3 + 3] += 150
    with h5py.File(folder / "pictures.h5", "w") as file:
        file["x"], file["y"] = pictures, classes


def keys_of(kind: str, folder: Path) -> dict[str, object]:
    """Return the recipe keys of ``kind`` on the data in ``folder``."""
    data = "pictures.h5" if kind.startswith("convnet") else "text.txt"
    return KEYS | {"data.path": folder / data} | KINDS[kind]


# States of layouts with which no model computes.
FLOAT = np.dtype("float32")
LAYOUT = Layout.of([TensorSpec(0, "table", (11, 7)), TensorSpec(1, "weight", (33, 19)), TensorSpec(1, "scale", ())])
LARGE = Layout.of([TensorSpec(0, "table", (301, 17)), TensorSpec(1, "weight", (64, 33)), TensorSpec(1, "bias", (5,))])


def pieces_of(store: FlatStore, part: Range, kind: str = "parameters") -> list[Piece]:
    """Return the pieces that the rank with ``part`` saves or restores."""
    return [Piece.of(kind, segment, touched, store.range(touched)) for segment, touched in store.layout.within(part)]


def random_store(layout: Layout, rng: np.random.Generator, dtype: object = "float32") -> FlatStore:
    """Return a store of random values with zeros in the padding."""
    store = FlatStore(layout, dtype_of(str(dtype)))
    for segment in layout.segments:
        store.range(segment.range)[...] = rng.standard_normal(segment.range.size).astype(store.dtype)
    return store


def model_case(**keys: Any) -> tuple[ModelConfig, dict[str, int]]:
    """Return the config of a model with ``keys`` except the sizes of its inputs, and these sizes."""
    sizes = {key: keys.pop(key) for key in SIZES if key in keys}
    return ModelConfig(**keys), sizes


def newest_intact_checkpoint(run_dir, comm=None):
    """Return the newest checkpoint whose blocks are all intact, or None if there is no such checkpoint."""
    comm = comm or solo()

    def verified(path):
        entries = () if path is None else manifest.load(path).pieces
        with BlockReader(path) as reader:
            for entry in entries:
                for block in range(len(entry.digests)):
                    reader.read(entry, block)
        return path

    return from_newest_intact(run_dir, comm, newest_complete(run_dir, comm), verified)


def save_on(ranks, directory, step, stores, **options):
    """Save ``stores``, by kind, on several ranks as the checkpoint of ``step`` of a run, and return it."""

    def body(comm):
        kept = [(kind, store, split(store.layout.size, comm.size, 4)[comm.rank]) for kind, store in stores.items()]
        pieces = [piece for kind, store, part in kept for piece in pieces_of(store, part, kind)]
        return save(directory / "checkpoints", step, pieces, {"step": step, "seed": 2**70}, comm, **options)

    return run_threads(ranks, body)[0]


def flip_bit(path, position):
    """Flip a bit of a byte of the file ``path``."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def fail_write(monkeypatch, number):
    """Make the ``number``-th write fail with a full disk."""
    true, seen = os.pwrite, itertools.count(1)

    def full(fd, data, offset):
        if next(seen) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)


def make_wheel(folder, name, version, *metadata, tag="py3-none-any", module="", entry=""):
    """Write a wheel of one ``module`` with the given metadata lines, and return its path."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": module or f"version = {version!r}\n",
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata, ""]),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    files |= {f"{info}/entry_points.txt": entry} if entry else {}
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path
