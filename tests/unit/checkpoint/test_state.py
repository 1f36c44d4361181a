"""Checkpoints of any program: saved and loaded on different ranks and cuts, with errors that name the array."""

import os
import sys

import numpy as np
import pytest

from harness import jobs
from harness.marks import cases, on_threads
from hpcdist.checkpoint import Sharded, load, manifest, save
from hpcdist.errors import StorageError, UsageError


def cut_rows(array, rank, size):
    return np.array_split(array, size)[rank]


@pytest.fixture
def global_arrays(rng):
    return {"field": rng.standard_normal((11, 6)), "mask": rng.integers(0, 9, (5,)).astype(np.uint8)}


@cases("savers, loaders", (1, 3), (3, 1), (2, 4), (4, 2))
def test_rows_are_loaded_on_another_number_of_ranks(global_arrays, tmp_path, savers, loaders):
    @on_threads(savers)
    def save_on_each_rank(comm):
        field = cut_rows(global_arrays["field"], comm.rank, savers)
        save(tmp_path, {"field": Sharded(field), "mask": global_arrays["mask"], "step": 7}, comm=comm)

    @on_threads(loaders)
    def load_on_each_rank(comm):
        field = np.zeros_like(cut_rows(global_arrays["field"], comm.rank, loaders))
        mask = np.zeros(5, np.uint8)
        state = load(tmp_path, {"field": Sharded(field), "mask": mask}, comm=comm)
        assert state["step"] == 7 and state["mask"] is mask and state["field"] is field
        assert np.array_equal(field, cut_rows(global_arrays["field"], comm.rank, loaders))
        assert np.array_equal(mask, global_arrays["mask"])

    save_on_each_rank()
    load_on_each_rank()


def test_grid_blocks_are_loaded_into_whole_and_strided_arrays(global_arrays, tmp_path):
    field = global_arrays["field"]

    @on_threads(4)
    def save_on_each_rank(comm):
        row, column = divmod(comm.rank, 2)
        top, left = (0, 5)[row], (0, 2)[column]
        block = field[top : (5, 11)[row], left : (2, 6)[column]]  # a strided view of the whole array
        save(tmp_path, {"field": Sharded(block, (top, left), field.shape)}, step=3, comm=comm)

    save_on_each_rank()
    state = load(tmp_path)
    assert np.array_equal(state["field"], field)
    wide = np.zeros((11, 12))
    load(tmp_path, {"field": wide[:, ::2]})
    assert np.array_equal(wide[:, ::2], field) and not wide[:, 1::2].any()


def test_saves_count_steps_and_keep_the_newest(tmp_path):
    assert load(tmp_path) is None
    for value in range(4):
        path = save(tmp_path, {"x": np.full(3, value), "value": value}, keep=2)
    assert path == tmp_path / "checkpoints" / "step-4"
    assert sorted(item.name for item in path.parent.glob("step-*")) == ["step-3", "step-4"]
    assert load(tmp_path)["value"] == 3


def test_load_of_a_damaged_checkpoint_uses_the_one_before(tmp_path, capsys):
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
    "expected, error, output",
    ({"y": np.zeros(3)}, StorageError, "has no array named 'y'"),
    ({"x": np.zeros(4)}, StorageError, r"x is float64\[3\], but the array to fill is float64\[4\]"),
    ({"x": np.zeros(3, np.float32)}, StorageError, "but the array to fill is float32"),
)
def test_load_error_names_the_missing_array(tmp_path, expected, error, output):
    save(tmp_path, {"x": np.ones(3)})
    with pytest.raises(error, match=output):
        load(tmp_path, expected)


@cases(
    "state, keep, output",
    ({"x": np.zeros(3, complex)}, 1, r"'x' cannot be used: dtype complex128 .* pass array\.view\(np\.float64\)"),
    ({"x": np.zeros(3, ">f8")}, 1, r"'x' cannot be used: dtype >f8 .*array\.dtype\.newbyteorder"),
    ({"x": Sharded(np.ma.masked_array(np.ones(3), [0, 1, 0]))}, 1, r"x is a masked array.*array\.filled"),
    ({"x": {1, 2}}, 1, "x is a set"),
    ({"x": 1}, 0, "keep = 0"),
)
def test_save_rejects_unsupported_state(tmp_path, state, keep, output):
    with pytest.raises(UsageError, match=output):
        save(tmp_path, state, keep=keep)
    assert load(tmp_path) is None


@cases(
    "start, shape, output",
    ((0,), None, "both start and shape"),
    ((2,), (4,), "not inside"),
    ((0, 0), (4, 4), "not inside"),
    ((-1,), (4,), "not inside"),
)
def test_sharded_part_outside_the_whole_array_is_rejected(start, shape, output):
    with pytest.raises(UsageError, match=output):
        Sharded(np.zeros(3), start, shape)


def test_save_from_another_job_is_rejected(tmp_path):
    save(tmp_path, {"x": np.zeros(3)})
    program = "import sys, numpy, hpcdist; hpcdist.checkpoint.save(sys.argv[1], {'x': numpy.ones(3)})"
    done = jobs.python(program, tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 74 and "is being written by process" in done.stderr
    assert load(tmp_path)["x"].sum() == 0


def test_sharded_accepts_numpy_integers(global_arrays, tmp_path):
    offsets = np.cumsum([0, 6])

    @on_threads(2)
    def save_on_each_rank(comm):
        part = np.split(global_arrays["field"], [6])[comm.rank]
        sharded = Sharded(part, (offsets[comm.rank], np.int32(0)), np.array([11, 6]))
        assert sharded.start == (6 * comm.rank, 0) and all(type(value) is int for value in sharded.start)
        save(tmp_path, {"field": sharded}, step=np.int64(3), keep=np.int64(1), comm=comm)

    save_on_each_rank()
    assert np.array_equal(load(tmp_path)["field"], global_arrays["field"])


@pytest.mark.parametrize(("start", "message"), [((0.0, 0), r"start\[0\] = 0.0"), (3, "start = 3; .*dimension")])
def test_sharded_rejects_a_fractional_start(start, message):
    with pytest.raises(UsageError, match=message):
        Sharded(np.zeros((2, 2)), start, (4, 2))


@pytest.mark.parametrize("options", [{"keep": 1.5}, {"step": 2.0}])
def test_save_rejects_fractional_numbers(tmp_path, options):
    with pytest.raises(UsageError, match="expected a whole number"):
        save(tmp_path, {}, **options)


@cases("savers, loaders", (1, 3), (3, 2))
def test_tensors_are_restored_in_place_on_another_number_of_ranks(rng, tmp_path, savers, loaders):
    torch = pytest.importorskip("torch")
    whole = torch.from_numpy(rng.standard_normal((11, 6)))
    replicated = {
        "weight": torch.nn.Parameter(whole.float() * 2),
        "half": (whole * 3).bfloat16(),
        "strided": whole.t()[1:, ::2],
        "count": torch.tensor(17),
        "empty": torch.zeros(0, 3),
        "large": torch.from_numpy(rng.integers(-9, 9, 40_000)),
    }

    @on_threads(savers)
    def save_on_each_rank(comm):
        part = torch.tensor_split(whole, savers)[comm.rank]
        save(tmp_path, replicated | {"rows": Sharded(part), "array": whole.numpy(), "step": 7}, comm=comm)

    @on_threads(loaders)
    def load_on_each_rank(comm):
        rows = torch.zeros_like(torch.tensor_split(whole, loaders)[comm.rank])
        background = torch.full((12, 14), -1.0, dtype=torch.float64)
        targets = {name: torch.zeros_like(value) for name, value in replicated.items()}
        targets["strided"] = background[2:7, 1:13:2]
        state = load(tmp_path, targets | {"rows": Sharded(rows)}, comm=comm)
        assert state["rows"] is rows and torch.equal(rows, torch.tensor_split(whole, loaders)[comm.rank])
        for name, value in replicated.items():
            assert state[name] is targets[name] and torch.equal(targets[name], value), name
        assert (background == -1).sum() == background.numel() - 30, "only the view was filled"
        with pytest.raises(StorageError, match="count is int64"):
            load(tmp_path, {"count": torch.zeros((), dtype=torch.int32)}, comm=comm)

    save_on_each_rank()
    load_on_each_rank()
    loaded = load(tmp_path)
    assert np.array_equal(loaded["weight"], replicated["weight"].detach().numpy())
    assert np.array_equal(loaded["array"], whole.numpy()) and loaded["step"] == 7


def test_unsupported_tensors_are_rejected(tmp_path):
    torch = pytest.importorskip("torch")
    for tensor, message in (
        (torch.ones(2, dtype=torch.bool), r"of torch.bool.*view\(torch.uint8\)"),
        (torch.ones(2, dtype=torch.complex64), "view_as_real"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.ones(2, device="meta"), "device meta"),
    ):
        with pytest.raises(UsageError, match=message):
            save(tmp_path, {"x": tensor})


def test_replicated_arrays_are_divided_by_bytes_and_few_are_cut(rng, tmp_path):
    arrays = {f"{n}": rng.standard_normal(n) for n in (5, 40, 3, 17, 100, 2)}

    @on_threads(3)
    def save_on_each_rank(comm):
        names = sorted(arrays) if comm.rank else [*arrays]  # an order per rank
        save(tmp_path, {name: arrays[name] for name in names}, comm=comm)

    save_on_each_rank()
    pieces = manifest.load(tmp_path / "checkpoints/step-1").pieces
    assert len(pieces) <= len(arrays) + 2
    by_file = {name: sum(p.nbytes for p in pieces if p.file == name) for name in {p.file for p in pieces}}
    assert sum(by_file.values()) == 8 * 167 and max(by_file.values()) <= 8 * 167 / 3 + 64
    assert all(np.array_equal(value, arrays[name]) for name, value in load(tmp_path).items())
