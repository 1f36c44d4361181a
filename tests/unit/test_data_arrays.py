"""Arrays in files: tokens in .npy and HDF5, tables in HDF5, mapped where they can be."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcdist.errors import DataError, StorageError
from hpcdist.training.data import arrays

DTYPES = ("uint8", "uint16", "uint32")


@pytest.fixture
def tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 250, 5000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_tokens_are_mapped(tmp_path: Path, tokens: np.ndarray, dtype: str) -> None:
    np.save(tmp_path / "a.npy", tokens.astype(dtype))
    got = arrays.npy_tokens(tmp_path / "a.npy")
    assert got.dtype == dtype
    assert np.array_equal(got, tokens)
    assert not got.flags.writeable  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "mapped"),
    [({}, True), ({"chunks": (1000,)}, False), ({"compression": "gzip"}, False), ({"maxshape": (None,)}, False)],
)
def test_hdf5_tokens_in_any_layout(tmp_path: Path, tokens: np.ndarray, dtype: str, options: dict, mapped: bool) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("other", data=np.arange(3))
        file.create_dataset("tokens", data=tokens.astype(dtype), **options)
    got = arrays.hdf5_tokens(tmp_path / "a.h5")
    assert isinstance(got, np.ndarray) is mapped
    assert got.dtype == dtype
    assert len(got) == len(tokens)
    assert np.array_equal(got[17:3000], tokens[17:3000])


def test_hdf5_tokens_behind_a_user_block_and_in_foreign_byte_order(tmp_path: Path, tokens: np.ndarray) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file["tokens"] = tokens.astype(">u2")
    got = arrays.hdf5_tokens(tmp_path / "a.h5")
    assert got.dtype == np.uint16
    assert np.array_equal(got[:], tokens)


@pytest.mark.parametrize(
    "array", [np.arange(9), np.zeros((3, 3), np.uint8), np.zeros(3, np.float32), np.zeros(0, np.uint8)]
)
def test_what_is_no_tokens_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"] = array
    expected = "expected one dimension of uint8, uint16, uint32" if array.size else "is empty"
    for read, name in ((arrays.npy_tokens, "a.npy"), (arrays.hdf5_tokens, "a.h5")):
        with pytest.raises(DataError, match=expected):
            read(tmp_path / name)


def test_broken_files_are_refused(tmp_path: Path, tokens: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", tokens.astype(np.uint8))
    whole = (tmp_path / "a.npy").read_bytes()
    for content in (whole[:-100], whole[:20], b"no array"):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npy cannot be read as \.npy"):
            arrays.npy_tokens(tmp_path / "a.npy")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        arrays.npy_tokens(tmp_path / "object.npy")
    (tmp_path / "a.h5").write_bytes(b"no file of HDF5")
    with pytest.raises(DataError, match=r"a\.h5.* cannot be read as HDF5"):
        arrays.hdf5_tokens(tmp_path / "a.h5")


def test_datasets_that_are_missing_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("x")
        file["y"] = np.arange(3)
    with pytest.raises(DataError, match="no dataset tokens; the file holds x, y"):
        arrays.hdf5_tokens(tmp_path / "a.h5")
    with pytest.raises(DataError, match="no dataset x; the file holds x, y"):
        arrays.hdf5_table(tmp_path / "a.h5")


def test_a_damaged_chunk_is_an_error_when_it_is_read(tmp_path: Path, tokens: np.ndarray) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("tokens", data=tokens.astype(np.uint8), chunks=(1000,), fletcher32=True)
        offset = data.id.get_chunk_info(2).byte_offset
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[offset + 5] ^= 1
    (tmp_path / "a.h5").write_bytes(content)
    got = arrays.hdf5_tokens(tmp_path / "a.h5")
    assert np.array_equal(got[:1000], tokens[:1000])
    with pytest.raises(StorageError, match="dataset /tokens: cannot be read"):
        got[2000:2010]


@pytest.mark.parametrize("options", [{}, {"chunks": True}])
def test_tables(tmp_path: Path, rng: np.random.Generator, options: dict) -> None:
    x, y = rng.random((20, 3, 4), np.float32), rng.permutation(np.arange(20) % 7)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, **options)
        file.create_dataset("y", data=y, **options)
    got_x, got_y, classes = arrays.hdf5_table(tmp_path / "a.h5")
    assert classes == 7
    assert np.array_equal(got_x[:], x)
    assert np.array_equal(got_y[:], y)
    assert np.array_equal(got_x[3], x[3])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2)), np.zeros(4, int), "x has 3 rows and y has 4"),
        (np.zeros(3), np.zeros(3, int), "expected real numbers"),
        (np.zeros((3, 2), complex), np.zeros(3, int), "expected real numbers"),
        (np.zeros((3, 2)), np.zeros(3), "expected the class"),
        (np.zeros((3, 2)), np.array([0, -1, 0]), "y holds -1"),
        (np.zeros((3, 2)), np.array([0, 300_000_000, 0]), "y holds 300000000, and a model has"),
        (np.zeros((0, 2)), np.zeros(0, int), "nothing to train on"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, x: np.ndarray, y: np.ndarray, message: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = x, y
    with pytest.raises(DataError, match=message):
        arrays.hdf5_table(tmp_path / "a.h5")
