"""The writers of a checkpoint: groups of ranks, hashed directories, and the index with whole tensors."""

import os
import shutil

import h5py
import ml_dtypes
import numpy as np
import pytest

from harness import jobs
from harness.inputs import fail_write, newest_intact_checkpoint, pieces_of, random_store, save_on
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.piece import Piece
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import manifest, shard
from hpcdist.checkpoint.config import CheckpointConfig
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, StorageError
from hpcdist.hdf5.virtual import rectangles
from hpcdist.training.recipe.recipe import load

LAYOUT = Layout.of(
    [
        TensorSpec(0, "table", (11, 7, 3)),
        TensorSpec(1, "weight", (33, 19)),
        TensorSpec(1, "bias", (5,)),
        TensorSpec(2, "scale", ()),
    ]
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in ("manifest", "shard", "restoring.restore"):
        monkeypatch.setattr(f"hpcdist.checkpoint.{module}.BLOCK_BYTES", 256)
    monkeypatch.setattr(shard, "PART_BYTES", 128)


def assert_restores(path, stores):
    for kind, store in stores.items():
        into = FlatStore(LAYOUT, store.dtype)
        restore(path, pieces_of(into, Range(0, LAYOUT.size), kind))
        assert into.array.tobytes() == store.array.tobytes()


@pytest.mark.parametrize(
    ("ranks", "writers", "files"),
    [(1, "node", 1), (4, "node", 1), (5, "1", 1), (5, "2", 2), (5, "3", 3), (3, "9", 3), (4, "rank", 4)],
)
def test_any_number_of_writers_saves_every_bit(tmp_path, rng, ranks, writers, files):
    stores = {
        "parameters": random_store(LAYOUT, rng),
        "optimizer.m": random_store(LAYOUT, rng, "float64"),
        "half": random_store(LAYOUT, rng, "bfloat16"),
    }
    path = save_on(ranks, tmp_path, 7, stores, writers=writers, about={"recipe": {"run.steps": 3}})
    loaded = manifest.load(path)
    assert sorted(loaded.files) == [f"shard-{index:05d}.h5" for index in range(files)]
    assert (loaded.world, loaded.about) == (ranks, {"recipe": {"run.steps": 3}})
    assert newest_intact_checkpoint(tmp_path) == path
    assert_restores(path, stores)


def test_replicated_pieces_of_a_group_are_written_once(tmp_path, rng):
    store = random_store(LAYOUT, rng)
    whole = Range(0, LAYOUT.size)

    def body(comm):
        return save(tmp_path / "checkpoints", 1, pieces_of(store, whole), {}, comm, writers="2")

    path = run_threads(4, body)[0]
    assert len(manifest.load(path).pieces) == 2 * len(LAYOUT.segments)
    assert_restores(path, {"parameters": store})


def test_shards_are_spread_over_directories(tmp_path, rng, monkeypatch):
    assert shard.directories(1000) == [] and len(shard.directories(1001)) == 2 and len(shard.directories(5000)) == 8
    names = [shard.file_name(writer, 5000) for writer in range(5000)]
    assert len(set(names)) == 5000 and max(sum(n.startswith(d) for n in names) for d in shard.directories(5000)) <= 1000
    monkeypatch.setattr(shard, "PER_DIRECTORY", 2)
    stores = {"parameters": random_store(LAYOUT, rng)}
    path = save_on(5, tmp_path, 7, stores)
    assert sorted(manifest.load(path).files) == [
        *("00/shard-00000.h5", "00/shard-00004.h5", "01/shard-00001.h5", "02/shard-00002.h5", "03/shard-00003.h5")
    ]
    assert newest_intact_checkpoint(tmp_path) == path
    assert_restores(path, stores)
    with h5py.File(path / "index.h5") as file:
        assert (file["parameters/1.weight"][...] == stores["parameters"].view("1.weight")).all()


def test_rectangles_match_index_arrays(rng):
    for _ in range(300):
        extent = tuple(int(n) for n in rng.integers(1, 5, rng.integers(0, 4)))
        whole = np.arange(np.prod(extent, dtype=int)).reshape(extent)
        start, stop = sorted(int(v) for v in rng.integers(0, whole.size + 1, 2))
        results = list(rectangles(extent, start, stop))
        spelled = [v for box in results for v in whole[tuple(slice(*ends) for ends in box)].reshape(-1).tolist()]
        assert spelled == list(range(start, stop)) and len(results) <= 2 * max(1, len(extent)) - 1


@pytest.mark.parametrize(("ranks", "writers"), [(1, "rank"), (4, "rank"), (5, "2")])
def test_index_file_has_whole_tensors(tmp_path, rng, ranks, writers):
    stores = {"parameters": random_store(LAYOUT, rng), "half": random_store(LAYOUT, rng, "bfloat16")}
    path = save_on(ranks, tmp_path, 7, stores, writers=writers)
    index = manifest.load(path).index
    assert (index.file, index.nbytes) == ("index.h5", (path / "index.h5").stat().st_size)
    with h5py.File(path / "index.h5") as file:
        assert file.attrs["schema"] == "hpcdist.index" and file.attrs["step"] == 7
        for segment in LAYOUT.segments:
            assert (file[f"parameters/{segment.key}"][...] == stores["parameters"].view(segment.key)).all()
            half = file[f"half/{segment.key}"]
            assert half.attrs["dtype"] == "bfloat16"
            assert (half[...].view(ml_dtypes.bfloat16) == stores["half"].view(segment.key)).all()
    if shutil.which("h5ls"):
        listed = jobs.run(["h5ls", "-r", "-v", path / "index.h5"])
        assert listed.returncode == 0 and "1.weight" in listed.stdout
    (path / "index.h5").unlink()
    assert newest_intact_checkpoint(tmp_path) == path, "a restore must not need the index"
    assert_restores(path, stores)


def test_index_file_places_columns_correctly(tmp_path, rng):
    whole = rng.standard_normal((12, 9))

    def body(comm):
        local_data = split(9, comm.size, 8, align_bytes=8)[comm.rank]
        array = np.ascontiguousarray(whole[:, local_data.slice]).reshape(-1)
        half = array.size // 2 - 1  # some ranks save two flat parts, rank 0 saves one
        cuts = [Range(0, half), Range(half, array.size)] if comm.rank else [Range(0, array.size)]
        box = ((0, 12), (local_data.start, local_data.stop))
        pieces = [Piece("w", "0.w", (12, 9), box, cut, array[cut.slice]) for cut in cuts]
        return save(tmp_path, 1, pieces, {}, comm, writers="1")

    with h5py.File(run_threads(3, body)[0] / "index.h5") as file:
        assert (file["w/0.w"][...] == whole).all()


def test_writer_with_a_full_disk_blocks_no_rank(tmp_path, rng, monkeypatch):
    stores = {"parameters": random_store(LAYOUT, rng), "optimizer.m": random_store(LAYOUT, rng)}
    before = save_on(4, tmp_path, 1, stores, writers="2")
    fail_write(monkeypatch, 9)

    def body(comm):
        pieces = pieces_of(stores["parameters"], split(LAYOUT.size, comm.size, 4)[comm.rank])
        with pytest.raises(StorageError, match=r"rank [02]: .*No space left"):
            save(tmp_path / "checkpoints", 2, pieces, {}, comm, writers="2")

    run_threads(4, body)
    assert newest_intact_checkpoint(tmp_path) == before and sorted(os.listdir(tmp_path / "checkpoints")) == [
        "latest",
        "step-1",
    ]


def test_invalid_writers_are_rejected():
    for good in ("rank", "node", "1", "16"):
        assert CheckpointConfig(writers=good).writers == good
    for bad in ("0", "-1", "ranks", "", "1.5", "٣"):
        with pytest.raises(ConfigurationError, match="checkpoint.writers"):
            CheckpointConfig(writers=bad)


def test_number_of_writers_needs_no_quotes(tmp_path):
    (tmp_path / "recipe.toml").write_text("[checkpoint]\nwriters = 4\n")
    assert load(tmp_path / "recipe.toml").recipe.checkpoint.writers == "4"
    assert load(None, ["checkpoint.writers=3"]).recipe.checkpoint.writers == "3"
