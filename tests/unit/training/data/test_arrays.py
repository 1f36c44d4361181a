"""Arrays in files: tokens in .npy and HDF5, tables in HDF5, read directly from the file if possible."""

import os

import h5py
import numpy as np
import pytest

from harness.marks import cases
from hpcdist.errors import DataError, StorageError
from hpcdist.hdf5 import files
from hpcdist.hdf5.overlay import encode_journal, journal_of
from hpcdist.training.data import files as data_files
from hpcdist.training.data import samples
from hpcdist.training.data.samples import FileArray, TokenWindows

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@pytest.fixture
def tokens(rng):
    return rng.integers(0, 250, 5000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_tokens_keep_their_dtype(tmp_path, tokens, dtype):
    np.save(tmp_path / "a.npy", tokens.astype(dtype))
    got = data_files.npy_tokens(tmp_path / "a.npy")
    assert got.dtype == dtype
    assert np.array_equal(got[:], tokens)
    assert got[-1] == tokens[-1]


@pytest.mark.parametrize("dtype", [">u2", ">u4", ">i8"])
def test_npy_tokens_with_foreign_byte_order_are_converted(tmp_path, tokens, dtype):
    np.save(tmp_path / "a.npy", tokens.astype(dtype))
    got = data_files.npy_tokens(tmp_path / "a.npy")
    assert got.dtype.isnative
    assert np.array_equal(got[:], tokens)
    assert np.array_equal(got.gather(np.array([3, 70]), 5), [tokens[3:8], tokens[70:75]])


@pytest.mark.parametrize("value", [-1, 2**32])
def test_signed_tokens_out_of_range_are_rejected(tmp_path, tokens, value, monkeypatch):
    monkeypatch.setattr(data_files, "BLOCK_ROWS", 1000)
    tokens[4321] = value
    np.save(tmp_path / "a.npy", tokens)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"] = tokens
    for read, name in ((data_files.npy_tokens, "a.npy"), (data_files.hdf5_tokens, "a.h5")):
        with pytest.raises(DataError, match=f"holds the token {value}; expected tokens from 0"):
            read(tmp_path / name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, True), ({"chunks": (1000,)}, False), ({"compression": "gzip"}, False), ({"maxshape": (None,)}, False)],
)
def test_hdf5_tokens_in_any_layout(tmp_path, tokens, dtype, options, plain):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("other", data=np.arange(3))
        file.create_dataset("tokens", data=tokens.astype(dtype), **options)
    got = data_files.hdf5_tokens(tmp_path / "a.h5")
    assert isinstance(got, FileArray) is plain
    assert got.dtype == dtype
    assert len(got) == len(tokens)
    assert np.array_equal(got[17:3000], tokens[17:3000])


def test_hdf5_tokens_after_a_user_block_with_foreign_byte_order(tmp_path, tokens):
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file["tokens"] = tokens.astype(">u2")
    got = data_files.hdf5_tokens(tmp_path / "a.h5")
    assert got.dtype == np.uint16
    assert np.array_equal(got[:], tokens)


STORAGE = ("link", "chain", "soft", "virtual", "nested", "external")


def _store(folder, storage, tokens):
    """Write a file whose dataset ``tokens`` has its elements in another file, at an offset with other data here."""
    whole, part = folder / "whole.h5", folder / "part.h5"
    with h5py.File(part, "w") as file:
        file["data"] = tokens
    with h5py.File(folder / "middle.h5", "w") as file:
        file["a"] = h5py.ExternalLink("part.h5", "/data")
        layout = h5py.VirtualLayout(tokens.shape, tokens.dtype)
        layout[:] = h5py.VirtualSource("part.h5", "data", tokens.shape)
        file.create_virtual_dataset("v", layout)
    with h5py.File(whole, "w") as file:
        file["filling"] = np.full(20_000, 65, np.uint8)
        if storage == "external":
            raw = [(str(folder / "raw"), 100, tokens.nbytes // 2), (str(folder / "rest"), 0, h5py.h5f.UNLIMITED)]
            file.create_dataset("tokens", tokens.shape, tokens.dtype, external=raw)[:] = tokens
        elif storage in ("virtual", "nested"):
            layout = h5py.VirtualLayout(tokens.shape, tokens.dtype)
            source = ("part.h5", "data") if storage == "virtual" else ("middle.h5", "v")
            layout[:] = h5py.VirtualSource(*source, tokens.shape)
            file.create_virtual_dataset("tokens", layout)
        else:
            file["other"] = h5py.ExternalLink("part.h5", "/data")
            links = {"link": h5py.ExternalLink("part.h5", "/data"), "chain": h5py.ExternalLink("middle.h5", "/a")}
            file["tokens"] = links.get(storage, h5py.SoftLink("/other"))
    return whole


@pytest.mark.parametrize("storage", STORAGE)
def test_elements_in_another_file_are_read(tmp_path, tokens, storage):
    tokens = tokens.astype(np.uint8)
    got = data_files.hdf5_tokens(_store(tmp_path, storage, tokens))
    assert np.array_equal(got[:], tokens)
    assert np.array_equal(TokenWindows(got, 16, shifting=False).take(np.array([7]), 0)[0][0], tokens[112:128])


@pytest.mark.parametrize("storage", STORAGE)
def test_missing_external_file_is_named(tmp_path, tokens, storage):
    """HDF5 itself returns zeros for missing virtual storage."""
    path = _store(tmp_path, storage, tokens.astype(np.uint8))
    (tmp_path / ("rest" if storage == "external" else "part.h5")).unlink()
    with pytest.raises(DataError, match=r"whole\.h5.*(a link to a missing file or object|rest|part\.h5)"):
        data_files.hdf5_tokens(path)


@pytest.mark.parametrize("kind", ["npy", "link", "virtual", "external", "foreign", "chunked"])
def test_file_truncated_while_reading_raises(tmp_path, tokens, kind):
    """There must be neither a signal nor zeros."""
    path = cut = tmp_path / "whole.h5"
    if kind == "npy":
        cut = tmp_path / "a.npy"
        np.save(cut, tokens.astype(np.uint8))
    elif kind in STORAGE:
        _store(tmp_path, kind, tokens.astype(np.uint8))
        cut = tmp_path / ("rest" if kind == "external" else "part.h5")
    else:
        with h5py.File(path, "w") as file:
            data = tokens.astype(">u2" if kind == "foreign" else np.uint8)
            file.create_dataset("tokens", data=data, chunks=(1000,) if kind == "chunked" else None)
    got = data_files.npy_tokens(cut) if kind == "npy" else data_files.hdf5_tokens(path)
    windows = TokenWindows(got, 16, shifting=False)
    assert np.array_equal(windows.take(np.array([300]), 0)[0][0], tokens[4800:4816])
    os.truncate(cut, 1500)
    for read in (lambda: windows.take(np.array([2, 290]), 0), lambda: got[4640:4650]):
        with pytest.raises(StorageError, match=f"{cut}.* 1,500 .*bytes.*it was truncated"):
            read()


def test_journal_of_a_file_is_applied(tmp_path, tokens):
    """A direct read of the file would return the old values."""
    path = tmp_path / "a.h5"
    with files.edit(path, "test", 1) as file:
        file["tokens"] = tokens.astype(np.uint8)
    before = path.read_bytes()
    with h5py.File(path, "r+") as file:
        file["tokens"][:] = 7
    after = path.read_bytes()
    pages = {number: after[4096 * number :][:4096] for number in range(-(-len(after) // 4096))}
    path.write_bytes(before)
    olds = {number: before[4096 * number :][:4096] for number in pages}
    journal_of(path).write_bytes(encode_journal(len(after), pages, olds))
    assert (data_files.hdf5_tokens(path)[:] == 7).all()


def test_names_without_elements_are_rejected(tmp_path):
    def assert_rejected(message, target):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["tokens"] = target
            for name in ("x", "y", "other"):
                file[name] = h5py.SoftLink("/tokens")
        assert data_files.holds_tokens(tmp_path / "a.h5")
        for read in (data_files.hdf5_tokens, data_files.hdf5_table):
            with pytest.raises(DataError, match=message):
                read(tmp_path / "a.h5")

    assert_rejected("cannot be opened: .*too many links", h5py.SoftLink("/other"))
    assert_rejected("is a link to a missing file or object", h5py.SoftLink("/nothing"))
    assert_rejected("dtype uint8 and has no shape", h5py.Empty(np.uint8))
    assert_rejected("no dataset (tokens|x); the file holds", np.dtype(np.uint8))
    assert_rejected("is a single value; expected an array with", np.uint8(3))
    assert_rejected("expected", np.array([b"a", b"b"]))
    assert_rejected("expected", np.zeros(3, [("a", np.uint8)]))


def test_pipes_and_circular_references_are_rejected(tmp_path):
    """HDF5 would wait forever, or overflow its stack."""
    os.mkfifo(tmp_path / "pipe")

    def assert_rejected(message, fill):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            fill(file)
        with pytest.raises(DataError, match=message):
            data_files.hdf5_tokens(tmp_path / "a.h5")

    def virtual(source):
        layout = h5py.VirtualLayout((2000,), np.uint8)
        layout[:] = h5py.VirtualSource(source, "tokens", (2000,))
        return lambda file: file.create_virtual_dataset("tokens", layout)

    assert_rejected(
        "pipe: there is no such file", lambda file: file.__setitem__("tokens", h5py.ExternalLink("pipe", "/a"))
    )
    assert_rejected("pipe: there is no such file", virtual("pipe"))
    raw = [(str(tmp_path / "pipe"), 0, 2000)]
    assert_rejected(
        "pipe.*has 0 of 2,000 bytes", lambda file: file.create_dataset("tokens", (2000,), np.uint8, external=raw)
    )
    assert_rejected("is a part of itself", virtual("a.h5"))


@pytest.mark.parametrize("extent", [2**20, 2**40])
def test_rows_that_exceed_the_memory_raise_storage_error(tmp_path, extent):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4, extent, extent), np.uint8, chunks=(1, 8, 8))
    got = data_files.Hdf5Dataset(tmp_path / "a.h5", h5py.File(tmp_path / "a.h5")["x"])
    for read in (lambda: got[:1], lambda: got.gather(np.array([1]), 1)):
        with pytest.raises(StorageError, match="cannot be read|do not fit into memory"):
            read()


def test_class_count_of_many_rows_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "BLOCK_ROWS", 7)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.zeros((40, 2)), np.arange(40) % 23
    monkeypatch.setattr(FileArray, "__getitem__", lambda self, index: _short(self, index))
    assert data_files.hdf5_table(tmp_path / "a.h5")[2] == 23


def _short(array, index):
    assert index.stop - index.start <= 7, "all rows at once may not fit into memory"
    return array.gather(np.array([index.start]), min(index.stop, len(array)) - index.start)[0]


@pytest.mark.parametrize(
    "array", [np.arange(9, dtype=np.int16), np.zeros((3, 3), np.uint8), np.zeros(3, np.float32), np.zeros(0, np.uint8)]
)
def test_arrays_that_are_no_tokens_are_rejected(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["tokens"] = array
    expected = "expected a 1-D array of uint8, uint16, uint32" if array.size else "is empty"
    for read, name in ((data_files.npy_tokens, "a.npy"), (data_files.hdf5_tokens, "a.h5")):
        with pytest.raises(DataError, match=expected):
            read(tmp_path / name)


def test_broken_files_are_rejected(tmp_path, tokens):
    np.save(tmp_path / "a.npy", tokens.astype(np.uint8))
    whole = (tmp_path / "a.npy").read_bytes()
    for content in (whole[:-100], whole[:20], b"no array"):
        (tmp_path / "a.npy").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npy cannot be read as \.npy"):
            data_files.npy_tokens(tmp_path / "a.npy")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        data_files.npy_tokens(tmp_path / "object.npy")
    np.save(tmp_path / "single.npy", np.uint8(3))
    with pytest.raises(DataError, match=r"uint8, shape \(\); expected a 1-D array"):
        data_files.npy_tokens(tmp_path / "single.npy")
    np.savez(tmp_path / "archive.npy", tokens)
    (tmp_path / "archive.npy.npz").rename(tmp_path / "archive.npy")
    with pytest.raises(DataError, match="an .npz archive of several arrays"):
        data_files.npy_tokens(tmp_path / "archive.npy")
    for extent in (2**62, 2**63, 2**70, -3):
        (tmp_path / "a.npy").write_bytes(whole.replace(b"(5000,), ", f"({extent},), ".encode()))
        with pytest.raises(DataError, match="cannot be read"):
            data_files.npy_tokens(tmp_path / "a.npy")
    (tmp_path / "a.h5").write_bytes(b"no file of HDF5")
    with pytest.raises(DataError, match=r"a\.h5.* cannot be read as HDF5"):
        data_files.hdf5_tokens(tmp_path / "a.h5")


def test_missing_datasets_are_named(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("x")
        file["y"] = np.arange(3)
    with pytest.raises(DataError, match="no dataset tokens; the file holds x, y"):
        data_files.hdf5_tokens(tmp_path / "a.h5")
    with pytest.raises(DataError, match="no dataset x; the file holds x, y"):
        data_files.hdf5_table(tmp_path / "a.h5")


def test_damaged_chunk_raises_when_it_is_read(tmp_path, tokens):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("tokens", data=tokens.astype(np.uint8), chunks=(1000,), fletcher32=True)
        offset = data.id.get_chunk_info(2).byte_offset
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[offset + 5] ^= 1
    (tmp_path / "a.h5").write_bytes(content)
    got = data_files.hdf5_tokens(tmp_path / "a.h5")
    assert np.array_equal(got[:1000], tokens[:1000])
    with pytest.raises(StorageError, match="dataset /tokens: cannot be read"):
        got[2000:2010]


@pytest.mark.parametrize("options", [{}, {"chunks": True}])
def test_tables_are_read(tmp_path, rng, options):
    x, y = rng.random((20, 3, 4), np.float32), rng.permutation(np.arange(20) % 7)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, **options)
        file.create_dataset("y", data=y, **options)
    got_x, got_y, classes = data_files.hdf5_table(tmp_path / "a.h5")
    assert classes == 7
    assert np.array_equal(got_x[:], x)
    assert np.array_equal(got_y[:], y)
    assert np.array_equal(got_x[3], x[3])


@cases(
    "x, y, message",
    (np.zeros((3, 2)), np.zeros(4, int), "x has 3 rows, but y has 4"),
    (np.zeros(3), np.zeros(3, int), "expected real numbers"),
    (np.zeros((3, 2), complex), np.zeros(3, int), "expected real numbers"),
    (np.zeros((3, 2)), np.zeros(3), "expected integer classes"),
    (np.zeros((3, 2)), np.array([0, -1, 0]), "y holds class -1"),
    (np.zeros((3, 2)), np.array([0, 300_000_000, 0]), "y holds class 300000000, so the model would need 300,000,001"),
    (np.zeros((0, 2)), np.zeros(0, int), "expected at least one row"),
)
def test_invalid_tables_are_rejected(tmp_path, x, y, message):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = x, y
    with pytest.raises(DataError, match=message):
        data_files.hdf5_table(tmp_path / "a.h5")


def test_interrupted_read_is_repeated(tmp_path, tokens, monkeypatch):
    """A call that a signal ends is no failure. The following rows are read normally."""
    np.save(tmp_path / "a.npy", tokens.astype(np.uint8))
    got, read, calls = data_files.npy_tokens(tmp_path / "a.npy"), samples._read_blocks, []

    def read_interrupted(descriptor, offsets, blocks):
        calls.append(len(offsets))
        return 0 if len(calls) in (1, 3) else min(1, len(offsets)) and read(descriptor, offsets[:1], blocks[:1])

    monkeypatch.setattr(samples, "_read_blocks", read_interrupted)
    starts = np.array([3, 100, 700, 42])
    assert np.array_equal(got.gather(starts, 5), np.stack([tokens[start : start + 5] for start in starts]))
    assert len(calls) >= 3
    for outside in (np.array([3, -1]), np.array([3, len(tokens) - 4])):
        with pytest.raises(AssertionError):
            got.gather(outside, 5)


def test_sizes_of_many_files_are_checked_rarely(tmp_path, monkeypatch):
    layout = h5py.VirtualLayout((120,), np.uint8)
    for part in range(12):
        with h5py.File(tmp_path / f"{part}.h5", "w") as file:
            file["tokens"] = np.full(10, part, np.uint8)
        layout[10 * part : 10 * part + 10] = h5py.VirtualSource(str(tmp_path / f"{part}.h5"), "tokens", (10,))
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        file.create_virtual_dataset("tokens", layout)
    got, looks, now = data_files.hdf5_tokens(tmp_path / "whole.h5"), [], [5.0]
    check = files.check_size
    monkeypatch.setattr(files, "check_size", lambda *given: (looks.append(given), check(*given)))
    monkeypatch.setattr(data_files.time, "monotonic", lambda: now[0])
    for start in range(100):
        assert got[start] == start // 10
    assert 12 <= len(looks) <= 13
    os.truncate(tmp_path / "11.h5", 100)
    now[0] += data_files.CHECK_S
    with pytest.raises(StorageError, match="it was truncated"):
        got[5]
