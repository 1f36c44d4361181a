"""Checkpoints are saved on P ranks, restored on any other number, and never lost in a crash."""

import itertools
import json
import os
import sys

import h5py
import ml_dtypes
import numpy as np
import pytest

from harness.inputs import fail_write, flip_bit, newest_intact_checkpoint, pieces_of, random_store, save_on
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.piece import Piece, first_gap, intersect_runs, runs, whole_box
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import StorageError

LAYOUT = Layout.of(
    [
        TensorSpec(0, "table", (11, 7)),
        TensorSpec(1, "weight", (33, 19)),
        TensorSpec(1, "bias", (5,)),
        TensorSpec(2, "scale", ()),
        TensorSpec(2, "empty", (0, 3)),
    ]
)
WHOLE = Range(0, LAYOUT.size)


def test_runs_and_intersections_match_index_arrays(rng):
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(0, 5, rng.integers(0, 4)))
        whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)

        def draw(shape=shape, whole=whole):
            box = tuple(tuple(sorted(int(v) for v in rng.integers(0, n + 1, 2))) for n in shape)
            inside = whole[tuple(slice(*b) for b in box)].reshape(-1)
            flat = Range(*sorted(int(v) for v in rng.integers(0, inside.size + 1, 2)))
            result = runs(shape, box, flat)
            elements = inside[flat.slice]
            spelled = [s + i for s, n in zip(result.start, result.size, strict=True) for i in range(n)]
            assert spelled == elements.tolist(), (shape, box, flat)
            return result, elements

        (one, a), (other, b) = draw(), draw()
        to, at, size = intersect_runs(one, other)
        pairs = [(t + i, u + i) for t, u, n in zip(to, at, size, strict=True) for i in range(n)]
        assert pairs == [(i, j) for i, v in enumerate(a) for j, w in enumerate(b) if v == w]


def test_first_gap_is_the_first_uncovered_element():
    stretch = lambda *pairs: [(np.array([a]), np.array([n])) for a, n in pairs]  # noqa: E731
    assert first_gap([], 0) is None
    assert first_gap([], 3) == 0
    assert first_gap(stretch((2, 3), (0, 2)), 5) is None
    assert first_gap(stretch((0, 4), (1, 1), (5, 1)), 6) == 4
    assert first_gap(stretch((0, 4)), 6) == 4


@pytest.mark.parametrize(("saved", "restored"), list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_restore_on_any_number_of_ranks_is_bit_equal(tmp_path, rng, saved, restored):
    stores = {
        "parameters": random_store(LAYOUT, rng),
        "optimizer.m": random_store(LAYOUT, rng, "float64"),
        "half": random_store(LAYOUT, rng, "bfloat16"),
    }
    path = save_on(saved, tmp_path, 7, stores)
    assert path.name == "step-7"

    def body(comm):
        part = split(LAYOUT.size, comm.size, 4)[comm.rank]
        into = {kind: FlatStore(LAYOUT, store.dtype, part) for kind, store in stores.items()}
        expected = [piece for kind, store in into.items() for piece in pieces_of(store, part, kind)]
        assert newest_intact_checkpoint(tmp_path, comm) == path
        assert restore(path, expected) == {"step": 7, "seed": 2**70}
        for kind, store in into.items():
            assert store.array.tobytes() == stores[kind].array[part.slice].tobytes()

    run_threads(restored, body)


def test_column_shards_are_restored_as_row_shards(tmp_path, rng, monkeypatch):
    for module in ("manifest", "shard", "restoring.restore"):
        monkeypatch.setattr(f"hpcdist.checkpoint.{module}.BLOCK_BYTES", 1024)
    monkeypatch.setattr("hpcdist.checkpoint.shard.READ_BYTES", 192)
    monkeypatch.setattr("hpcdist.checkpoint.shard.PART_BYTES", 320)
    whole = rng.standard_normal((60, 45))

    def body(comm):
        local_data = split(45, comm.size, 8, align_bytes=8)[comm.rank]
        array = np.ascontiguousarray(whole[:, local_data.slice]).reshape(-1)
        box = ((0, 60), (local_data.start, local_data.stop))
        save(tmp_path / "checkpoints", 1, [Piece("w", "0.w", (60, 45), box, Range(0, array.size), array)], {}, comm)

    run_threads(3, body)
    loaded = manifest.load(tmp_path / "checkpoints/step-1")
    assert len(loaded.pieces) == 3 and all(len(entry.digests) > 4 for entry in loaded.pieces)
    for box in (whole_box((60, 45)), ((7, 31), (0, 45)), ((7, 31), (14, 17)), ((3, 3), (0, 45))):
        expected = whole[tuple(slice(*b) for b in box)].reshape(-1)
        flat = Range(expected.size // 5, expected.size - expected.size // 7)
        out = np.zeros(flat.size)
        restore(tmp_path / "checkpoints/step-1", [Piece("w", "0.w", (60, 45), box, flat, out)])
        assert (out == expected[flat.slice]).all()


def test_shards_open_with_plain_h5py(tmp_path, rng):
    stores = {"parameters": random_store(LAYOUT, rng), "half": random_store(LAYOUT, rng, "bfloat16")}
    with h5py.File(save_on(1, tmp_path, 3, stores) / "shard-00000.h5") as file:
        assert file.attrs["schema"] == "hpcdist.shard" and file.attrs["step"] == 3
        for segment in LAYOUT.segments:
            if not segment.range:
                continue  # nothing to save
            dataset = file[f"parameters/{segment.key}"]
            assert dataset.chunks is None
            assert (dataset[...] == stores["parameters"].view(segment.key)).all()
            half = file[f"half/{segment.key}"]
            assert half.dtype == np.uint16 and half.attrs["dtype"] == "bfloat16"
            assert (half[...].view(ml_dtypes.bfloat16) == stores["half"].view(segment.key)).all()


def test_restore_does_not_use_libhdf5(tmp_path, rng, monkeypatch):
    store = random_store(LAYOUT, rng)
    path = save_on(2, tmp_path, 3, {"parameters": store})
    monkeypatch.setattr(h5py, "File", None)
    into = FlatStore(LAYOUT, store.dtype)
    assert newest_intact_checkpoint(tmp_path) == path
    restore(path, pieces_of(into, WHOLE))
    assert (into.array == store.array).all()


def damage_data(path):
    entry = next(e for e in manifest.load(path).pieces if e.file == "shard-00001.h5")
    flip_bit(path / entry.file, entry.offset + entry.nbytes - 1)


DAMAGE = {
    "digest does not match": damage_data,
    "the manifest says": lambda path: os.truncate(path / "shard-00001.h5", 3000),
    "No such file": lambda path: (path / "shard-00000.h5").unlink(),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is damaged": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"step":20', '"step":21')
    ),
    "cannot be read": lambda path: os.truncate(path / "manifest.json", 100),
    "did not finish": lambda path: path.rename(path.with_name("step-20.tmp")),
}


@pytest.mark.parametrize("reason", DAMAGE)
@pytest.mark.parametrize("ranks", (1, 3))
def test_damaged_checkpoint_falls_back_with_a_reason(tmp_path, rng, capfd, reason, ranks):
    old, new = random_store(LAYOUT, rng), random_store(LAYOUT, rng)
    save_on(2, tmp_path, 10, {"parameters": old})
    DAMAGE[reason](save_on(2, tmp_path, 20, {"parameters": new}))
    result = set(run_threads(ranks, lambda comm: newest_intact_checkpoint(tmp_path, comm)))
    assert result == {tmp_path / "checkpoints/step-10"}
    stderr = capfd.readouterr().err
    assert reason in stderr and "step-20" in stderr and stderr.count("skipped") == 1


def test_every_flipped_data_byte_is_detected(tmp_path, rng):
    path = save_on(1, tmp_path, 1, {"parameters": random_store(LAYOUT, rng)})
    into = FlatStore(LAYOUT, np.dtype("float32"))
    for entry in manifest.load(path).pieces:
        position = entry.offset + int(rng.integers(entry.nbytes))
        flip_bit(path / entry.file, position)
        with pytest.raises(StorageError, match=rf"shard-00000.h5.*{entry.tensor}.*damaged"):
            restore(path, pieces_of(into, WHOLE))
        flip_bit(path / entry.file, position)
    restore(path, pieces_of(into, WHOLE))


def test_damaged_manifest_is_rejected(tmp_path, rng):
    path = save_on(2, tmp_path, 1, {"parameters": random_store(LAYOUT, rng)})
    good, text = manifest.load(path), (path / "manifest.json").read_bytes()
    for _ in range(200):
        damaged = bytearray(text)
        damaged[rng.integers(len(text))] ^= 1 << int(rng.integers(8))
        (path / "manifest.json").write_bytes(damaged)
        try:
            assert manifest.load(path) == good
        except StorageError as error:
            if isinstance(error, manifest.NewerVersionError):  # one flipped bit gives a later version number
                continue
            assert newest_intact_checkpoint(tmp_path) is None


def test_newest_without_checkpoints_is_none(tmp_path):
    assert newest_intact_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert newest_intact_checkpoint(tmp_path) is None


def test_wrong_shape_dtype_name_and_missing_elements_are_rejected(tmp_path, rng):
    path = save_on(1, tmp_path, 1, {"parameters": random_store(LAYOUT, rng)})
    for piece, output in (
        (Piece.whole("parameters", "1.weight", np.zeros((33, 19))), "float32.*expected float64"),
        (Piece.whole("parameters", "1.weight", np.zeros((19, 33), "f4")), r"\[33, 19\], expected float32\[19, 33\]"),
        (Piece.whole("parameters", "1.wait", np.zeros(3)), "has no tensor parameters/1.wait"),
    ):
        with pytest.raises(StorageError, match=output):
            restore(path, [piece])
    half = Piece("w", "0.w", (10,), ((0, 10),), Range(0, 5), np.zeros(5))
    with pytest.raises(StorageError, match="no rank saved element 5"):
        save(tmp_path / "checkpoints", 2, [half], {}, solo())
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1"]


def test_optional_pieces_must_be_absent_or_complete(tmp_path, rng):
    kept = {"parameters": random_store(LAYOUT, rng), "velocity": random_store(LAYOUT, rng)}
    path = save_on(1, tmp_path, 1, {"parameters": kept["parameters"]})
    fresh = Piece.whole("velocity", "1.weight", np.full((33, 19), 7, "f4"))
    restore(path, [fresh], optional=("velocity",))
    assert (fresh.array == 7).all()
    with pytest.raises(StorageError, match=r"has no tensor velocity/1.weight"):
        restore(path, [fresh])
    path = save_on(1, tmp_path, 2, kept)
    restore(path, [fresh], optional=("velocity",))
    assert not (fresh.array == 7).any()
    with pytest.raises(StorageError, match=r"has no tensor velocity/1.wait"):
        restore(path, [Piece.whole("velocity", "1.wait", np.zeros(3, "f4"))], optional=("velocity",))


def test_save_keeps_latest_and_renames_abandoned_checkpoints(tmp_path, rng, capfd):
    store = {"parameters": random_store(LAYOUT, rng)}
    for step in (1, 2, 3, 4):
        save_on(1, tmp_path, step, store, keep=2)
    root = tmp_path / "checkpoints"
    assert sorted(os.listdir(root)) == ["latest", "step-3", "step-4"]
    assert (root / "latest").read_text() == "step-4\n"
    (root / "step-9.tmp").mkdir()
    save_on(1, tmp_path, 2, store, keep=1)  # continued from an earlier step
    assert sorted(os.listdir(root)) == ["latest", "step-2", "step-3.abandoned", "step-4.abandoned"]
    assert newest_intact_checkpoint(tmp_path).name == "step-2"
    save_on(1, tmp_path, 2, {"parameters": random_store(LAYOUT, rng)}, keep=1)  # the same step again
    assert sorted(os.listdir(root)) == ["latest", "step-2", "step-3.abandoned", "step-4.abandoned"]


CALLS = ("mkdir", "open", "pwrite", "fsync", "ftruncate", "rename", "replace", "unlink", "rmdir", "write")


def crash_at(count, directory, step, store, keep):
    """Save in a child process that exits at the ``count``-th file operation. Return True if it exited there."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    try:
        seen = itertools.count(1)

        def die_at_count(call):
            def wrapped(*args, **kwargs):
                if next(seen) == count:
                    os._exit(9)
                return call(*args, **kwargs)

            return wrapped

        for name in CALLS:
            setattr(os, name, die_at_count(getattr(os, name)))
        save(directory / "checkpoints", step, pieces_of(store, WHOLE), {"step": step}, solo(), keep)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the child must not return into pytest
        sys.excepthook(*sys.exc_info())
        os._exit(1)


@pytest.mark.parametrize("step", (20, 10))
@pytest.mark.full
def test_crash_at_any_file_operation_loses_no_checkpoint(tmp_path, rng, step):
    old, new = random_store(LAYOUT, rng), random_store(LAYOUT, rng)
    outcomes = []
    for count in itertools.count(1):
        run = tmp_path / str(count)
        save(run / "checkpoints", 10, pieces_of(old, WHOLE), {"step": 10}, solo(), 1)
        crashed = crash_at(count, run, step, new, 1)
        result = newest_intact_checkpoint(run)
        into = FlatStore(LAYOUT, old.dtype)
        assert result is not None, count
        restore(result, pieces_of(into, WHOLE))
        is_new = bool((into.array == new.array).all())
        assert is_new or (into.array == old.array).all()
        outcomes.append(is_new)
        # The next save removes the files that the crash left.
        save(run / "checkpoints", 30, pieces_of(new, WHOLE), {"step": 30}, solo(), 1)
        assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-30"]
        if not crashed:
            break
    assert outcomes == sorted(outcomes), "a new checkpoint must stay once it exists"
    assert outcomes.count(False) > 10 and outcomes.count(True) > 4, outcomes


@pytest.mark.parametrize("failing", range(1, 12))
def test_full_disk_is_reported_on_all_ranks_and_keeps_checkpoints(tmp_path, rng, monkeypatch, failing):
    store = random_store(LAYOUT, rng)
    before = save_on(2, tmp_path, 1, {"parameters": store})
    fail_write(monkeypatch, failing)

    def body(comm):
        part = split(LAYOUT.size, comm.size, 4)[comm.rank]
        with pytest.raises(StorageError, match=r"rank \d: .*No space left") as caught:
            save(tmp_path / "checkpoints", 2, pieces_of(store, part), {}, comm)
        return caught.value.exit_code

    assert run_threads(2, body) == [74, 74]
    assert newest_intact_checkpoint(tmp_path) == before
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-1"]


def test_checkpoint_directory_that_cannot_be_created_is_rejected(tmp_path, rng):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        save_on(2, tmp_path, 1, {"parameters": random_store(LAYOUT, rng)})


def test_scalars_round_trip(tmp_path):
    scalars = {"count": 3, "state": [2**127, 5], "best": float("inf"), "rate": 0.1, "algorithm": "ring", "none": None}
    path = save(tmp_path / "checkpoints", 1, [], scalars, solo())
    assert restore(path, []) == scalars
    assert json.loads((path / "manifest.json").read_text())["world"] == 1


@pytest.mark.parametrize(
    ("saved", "expected", "same"), [((12, 5), (3, 4, 5), True), ((4,), (2, 2), True), ((2, 6), (4, 3), False)]
)
def test_restore_accepts_merged_neighbouring_dims(saved, expected, same, tmp_path, rng):
    values = rng.standard_normal(saved)
    path = save(tmp_path, 1, [Piece.whole("parameters", "w", values)], {}, solo())
    into = np.zeros(expected)
    if not same:
        with pytest.raises(StorageError, match=r"is float64\[2, 6\], expected float64\[4, 3\]"):
            restore(path, [Piece.whole("parameters", "w", into)])
        return
    restore(path, [Piece.whole("parameters", "w", into)])
    assert (into.reshape(-1) == values.reshape(-1)).all()
