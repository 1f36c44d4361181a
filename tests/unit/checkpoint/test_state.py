"""Checkpoints of any program: saved on some ranks, loaded on others, in other cuts; refusals that name the array."""

import os
import sys

import numpy as np
import pytest

from harness import jobs
from harness.marks import cases, on_threads
from hpcdist.checkpoint import Sharded, load, save
from hpcdist.errors import StorageError, UsageError


def cut_rows(array, rank, size):
    return np.array_split(array, size)[rank]


@pytest.fixture
def whole(rng):
    return {"field": rng.standard_normal((11, 6)), "mask": rng.integers(0, 9, (5,)).astype(np.uint8)}


@cases("savers, loaders", (1, 3), (3, 1), (2, 4), (4, 2))
def test_rows_on_another_number_of_ranks(whole, tmp_path, savers, loaders):
    @on_threads(savers)
    def saves(comm):
        field = cut_rows(whole["field"], comm.rank, savers)
        save(tmp_path, {"field": Sharded(field), "mask": whole["mask"], "step": 7}, comm=comm)

    @on_threads(loaders)
    def loads(comm):
        field = np.zeros_like(cut_rows(whole["field"], comm.rank, loaders))
        mask = np.zeros(5, np.uint8)
        state = load(tmp_path, {"field": Sharded(field), "mask": mask}, comm=comm)
        assert state["step"] == 7 and state["mask"] is mask and state["field"] is field
        assert np.array_equal(field, cut_rows(whole["field"], comm.rank, loaders))
        assert np.array_equal(mask, whole["mask"])

    saves()
    loads()


def test_blocks_of_a_grid_come_back_whole_and_strided(whole, tmp_path):
    field = whole["field"]

    @on_threads(4)
    def saves(comm):
        row, column = divmod(comm.rank, 2)
        top, left = (0, 5)[row], (0, 2)[column]
        block = field[top : (5, 11)[row], left : (2, 6)[column]]  # strided in the memory of the whole
        save(tmp_path, {"field": Sharded(block, (top, left), field.shape)}, step=3, comm=comm)

    saves()
    state = load(tmp_path)
    assert np.array_equal(state["field"], field)
    wide = np.zeros((11, 12))
    load(tmp_path, {"field": wide[:, ::2]})
    assert np.array_equal(wide[:, ::2], field) and not wide[:, 1::2].any()


def test_steps_count_up_and_the_newest_stay(tmp_path):
    assert load(tmp_path) is None
    for value in range(4):
        path = save(tmp_path, {"x": np.full(3, value), "value": value}, keep=2)
    assert path == tmp_path / "checkpoints" / "step-4"
    assert sorted(item.name for item in path.parent.glob("step-*")) == ["step-3", "step-4"]
    assert load(tmp_path)["value"] == 3


def test_damage_falls_back_to_the_checkpoint_before(tmp_path, capsys):
    save(tmp_path, {"x": np.arange(100.0)})
    newest = save(tmp_path, {"x": np.arange(100.0) + 1})
    shard = next(newest.rglob("shard-*.h5"))
    data = bytearray(shard.read_bytes())
    at = data.find(np.arange(100.0)[50:60].tobytes())
    data[at] ^= 1
    shard.write_bytes(data)
    assert load(tmp_path)["x"][0] == 0.0
    assert "is skipped" in capsys.readouterr().err


@cases(
    "wanted, error, said",
    ({"y": np.zeros(3)}, StorageError, "has no array 'y'"),
    ({"x": np.zeros(4)}, StorageError, r"x is float64\[3\], and the program has float64\[4\]"),
    ({"x": np.zeros(3, np.float32)}, StorageError, "and the program has float32"),
)
def test_what_is_not_there_is_named(tmp_path, wanted, error, said):
    save(tmp_path, {"x": np.ones(3)})
    with pytest.raises(error, match=said):
        load(tmp_path, wanted)


@cases(
    "state, keep, said",
    ({"x": np.zeros(3, complex)}, 1, r"x: dtype complex128 .* pass array\.view\(np\.float64\)"),
    ({"x": np.zeros(3, ">f8")}, 1, r"x: dtype >f8 .*array\.dtype\.newbyteorder"),
    ({"x": Sharded(np.ma.masked_array(np.ones(3), [0, 1, 0]))}, 1, r"x is a masked array.*array\.filled"),
    ({"x": {1, 2}}, 1, "x is a set"),
    ({"x": 1}, 0, "keep = 0"),
)
def test_what_cannot_be_saved_is_refused(tmp_path, state, keep, said):
    with pytest.raises(UsageError, match=said):
        save(tmp_path, state, keep=keep)
    assert load(tmp_path) is None


@cases(
    "start, shape, said",
    ((0,), None, "both start and shape"),
    ((2,), (4,), "not inside"),
    ((0, 0), (4, 4), "not inside"),
    ((-1,), (4,), "not inside"),
)
def test_parts_outside_of_the_whole_are_refused(start, shape, said):
    with pytest.raises(UsageError, match=said):
        Sharded(np.zeros(3), start, shape)


def test_no_other_job_saves_there_meanwhile(tmp_path):
    save(tmp_path, {"x": np.zeros(3)})
    program = "import sys, numpy, hpcdist; hpcdist.checkpoint.save(sys.argv[1], {'x': numpy.ones(3)})"
    done = jobs.python(program, tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 74 and "is being written by process" in done.stderr
    assert load(tmp_path)["x"].sum() == 0


def test_sharded_accepts_integers_of_numpy(whole, tmp_path):
    offsets = np.cumsum([0, 6])

    @on_threads(2)
    def saves(comm):
        part = np.split(whole["field"], [6])[comm.rank]
        sharded = Sharded(part, (offsets[comm.rank], np.int32(0)), np.array([11, 6]))
        assert sharded.start == (6 * comm.rank, 0) and all(type(value) is int for value in sharded.start)
        save(tmp_path, {"field": sharded}, step=np.int64(3), keep=np.int64(1), comm=comm)

    saves()
    assert np.array_equal(load(tmp_path)["field"], whole["field"])


@pytest.mark.parametrize(("start", "message"), [((0.0, 0), r"start\[0\] = 0.0"), (3, "start = 3; .*dimension")])
def test_sharded_start_that_is_no_whole_number_is_rejected(start, message):
    with pytest.raises(UsageError, match=message):
        Sharded(np.zeros((2, 2)), start, (4, 2))


@pytest.mark.parametrize("options", [{"keep": 1.5}, {"step": 2.0}])
def test_save_rejects_numbers_that_are_not_whole(tmp_path, options):
    with pytest.raises(UsageError, match="expected a whole number"):
        save(tmp_path, {}, **options)
