"""HDF5 files: the data on the disk after complete, failed and interrupted writes."""

import errno
import itertools
import json
import os
import sys
import textwrap
import threading

import h5py
import ml_dtypes
import numpy as np
import pytest

from harness import jobs
from hpcdist.errors import StorageError
from hpcdist.hdf5 import datasets, files
from hpcdist.hdf5.datasets import Column
from hpcdist.hdf5.overlay import PAGE_BYTES, Overlay, encode_journal, journal_of, read_journal


def test_overlay_behaves_like_a_file(tmp_path, rng):
    """Random reads, writes and truncations act as on a plain file. The file changes only at the commit."""
    for number in range(20):
        path, plain = tmp_path / f"{number}", tmp_path / f"{number}.plain"
        content = rng.bytes(int(rng.integers(0, 3 * PAGE_BYTES)))
        path.write_bytes(content)
        plain.write_bytes(content)
        with Overlay(path) as overlay, plain.open("r+b") as other:
            for _ in range(60):
                position = int(rng.integers(0, 5 * PAGE_BYTES))
                count = int(rng.integers(0, 2 * PAGE_BYTES))
                overlay.seek(position)
                other.seek(position)
                kind = rng.integers(4)
                if kind == 0:
                    data = rng.bytes(count)
                    overlay.write(data)
                    other.write(data)
                elif kind == 1:
                    overlay.truncate(position)
                    other.truncate(position)
                else:
                    assert overlay.read(count) == other.read(count)
            assert path.read_bytes() == content
            if number % 2:
                overlay.commit()
        assert path.read_bytes() == (plain.read_bytes() if number % 2 else content)


def test_truncated_and_extended_file_reads_zeros(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with Overlay(path) as overlay:
        overlay.truncate(10)
        overlay.seek(50)
        overlay.write(b"y")
        overlay.seek(0)
        assert overlay.read(100) == b"x" * 10 + b"\0" * 40 + b"y"
        overlay.commit()
    assert path.read_bytes() == b"x" * 10 + b"\0" * 40 + b"y"


def make(path, count=10):
    with files.edit(path, "test", 1) as file:
        file["x"] = np.arange(count)


def test_edit_is_all_or_nothing(tmp_path):
    path = tmp_path / "f.h5"
    with pytest.raises(ZeroDivisionError), files.edit(path, "test", 1) as file:
        file["x"] = 1 / 0
    assert not os.listdir(tmp_path)
    make(path)
    before = path.read_bytes()
    assert before[8] == 0, "expected superblock version 0, which the oldest tools can open"
    with pytest.raises(ZeroDivisionError), files.edit(path, "test", 1) as file:  # noqa: PT012
        file["x"][...] = 0
        file["y"] = 1 / 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("existing", (True, False))
def test_full_disk_changes_nothing(tmp_path, monkeypatch, existing):
    path = tmp_path / "f.h5"
    if existing:
        make(path)
    before = path.read_bytes() if existing else None
    true = os.pwrite
    for failing in (1, 2, 5):
        seen = itertools.count(1)

        def raise_when_full(fd, data, offset, seen=seen, failing=failing):
            if next(seen) >= failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return true(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", raise_when_full)
        output = pytest.raises(StorageError, match=r"f\.h5: cannot be written: No space")
        with output as caught, files.edit(path, "test", 1) as file:
            file["big"] = np.ones(10_000)
        assert caught.value.exit_code == 74
        monkeypatch.undo()
        assert os.listdir(tmp_path) == (["f.h5"] if existing else [])
        assert before is None or path.read_bytes() == before


KILLED = """
    import json, os, signal, sys
    from pathlib import Path
    import h5py
    import numpy as np
    from hpcdist.hdf5 import files

    path = Path(sys.argv[1])
    whole, seen = path.read_bytes(), []

    def append_until(call):
        left = iter(range(call, -1, -1))

        def count_calls(function):
            def wrapped(*arguments, **options):
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)
            return wrapped

        for name in ("pwrite", "fsync", "ftruncate", "open", "unlink"):
            setattr(os, name, count_calls(getattr(os, name)))
        with files.edit(path, "test", 1) as file:
            rows = len(file["x"])
            for name in ("x", "y"):
                file[name].resize(2 * rows, axis=0)
                file[name][rows:] = np.arange(rows, 2 * rows).reshape(-1, *[1] * (file[name].ndim - 1))
            file.attrs["rows"] = 2 * rows

    def state(file):
        x, y, rows = file["x"][:], file["y"][:], int(file.attrs["rows"])
        good = (x == np.arange(len(x))).all() and (y == np.arange(len(y))[:, None]).all()
        return rows if good and len(x) == len(y) == rows else "torn"

    for call in range(1000):
        path.write_bytes(whole)
        child = os.fork()
        if child == 0:
            append_until(call)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with files.open_read(path, "test", 1) as file:
            read = state(file)
        with files.edit(path, "test", 1) as file:
            edited = state(file)
        with h5py.File(path, "r") as file:
            plain = state(file)
        seen.append([status, read, edited, plain, sorted(os.listdir(path.parent))])
        if status != -signal.SIGKILL:
            break
    print(json.dumps(seen))
"""


@pytest.mark.full
def test_kill_at_any_point_leaves_old_or_new_content(tmp_path):
    path = tmp_path / "f.h5"
    with files.edit(path, "test", 1) as file:
        for name, width in (("x", ()), ("y", (3,))):
            rows = np.arange(3000).reshape(-1, *[1] * len(width)) * np.ones(width, np.int64)
            file.create_dataset(name, data=rows, maxshape=(None, *width), chunks=(1024, *width))
        file.attrs["rows"] = 3000
    done = jobs.run([sys.executable, "-c", textwrap.dedent(KILLED), str(path)])
    assert done.returncode == 0, done.stderr
    *killed, last = json.loads(done.stdout)
    assert last == [0, 6000, 6000, 6000, ["f.h5"]]
    assert all(code == -9 and read == edited == plain for code, read, edited, plain, _ in killed)
    counts = [entry[1] for entry in killed]
    assert counts == sorted(counts) and set(counts) == {3000, 6000}, (
        "the new data must show once the journal is complete"
    )
    assert counts.count(6000) >= 3, "expected changes in place"
    assert all(entry[4] == ["f.h5"] for entry in killed), "the next writer must remove the journal"


def test_journal_is_used_only_if_complete_and_matching(tmp_path):
    path = tmp_path / "f.h5"
    make(path)
    size, zeros = path.stat().st_size, {0: bytes(PAGE_BYTES)}
    content = {0: path.read_bytes()[:PAGE_BYTES]}
    whole = encode_journal(size, zeros, content)
    journal_of(path).write_bytes(whole)
    assert read_journal(path) == (size, zeros)
    other_content, longer = encode_journal(size, zeros, zeros), encode_journal(size + 1, zeros, content)
    for damaged in (b"", whole[:-1], whole[:20] + b"x" + whole[21:], b"x" * 100, other_content, longer):
        journal_of(path).write_bytes(damaged)
        assert read_journal(path) is None
        with files.open_read(path, "test", 1) as file:
            assert len(file["x"]) == 10
    with files.edit(path, "test", 1) as file:
        assert len(file["x"]) == 10
    assert os.listdir(tmp_path) == ["f.h5"]


def test_unreadable_foreign_and_newer_files_are_rejected(tmp_path):
    path = tmp_path / "f.h5"
    with pytest.raises(StorageError, match="no such file"):
        files.open_read(path)
    path.write_bytes(b"text")
    with pytest.raises(StorageError, match="cannot be read as HDF5"):
        files.open_read(path)
    path.unlink()
    make(path)
    with pytest.raises(StorageError, match="schema is 'test', expected 'other'"):
        files.open_read(path, "other", 1)
    with pytest.raises(StorageError, match="newer than version 0"), files.edit(path, "test", 0):
        pass
    files.open_read(path).close()
    with pytest.raises(StorageError, match="cannot be written"), files.edit(tmp_path / "no/f.h5", "test", 1):
        pass


def test_truncated_file_is_unreadable(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RETRY_S", 0.1)
    make(tmp_path / "f.h5", 10_000)
    os.truncate(tmp_path / "f.h5", 3000)
    with pytest.raises(StorageError, match="truncated"):
        files.open_read(tmp_path / "f.h5")


@pytest.mark.parametrize("dtype", ("f2", "f4", "f8", "i8", "u2", ml_dtypes.bfloat16))
@pytest.mark.parametrize("shape", ((), (0,), (3, 0), (1,), (7,), (5, 3, 2), (300, 1000)))
def test_contiguous_datasets_are_at_their_offsets(tmp_path, rng, dtype, shape):
    data = {"a/b.c": (100 * rng.standard_normal(shape)).astype(dtype), "z": np.arange(3)}
    path = tmp_path / "f.h5"
    offsets = files.write_contiguous(path, data, {"step": 4}, {"z": {"units": "s"}}, schema="test", version=1)
    raw = path.read_bytes()
    for name, array in data.items():
        if array.size:
            assert raw[offsets[name] : offsets[name] + array.nbytes] == array.tobytes()
    with h5py.File(path) as file:
        result = file["a/b.c"]
        assert result.shape == shape and file["z"].attrs["units"] == "s" and file.attrs["step"] == 4
        assert result.attrs["dtype"] == ("bfloat16" if dtype is ml_dtypes.bfloat16 else np.dtype(dtype).name)
        assert np.asarray(result[()]).tobytes() == data["a/b.c"].tobytes()
    with pytest.raises(StorageError, match="exists already"):
        files.write_contiguous(path, data, {}, schema="test", version=1)
    assert path.read_bytes() == raw


def test_strided_array_is_written_contiguously(tmp_path, rng):
    array = rng.standard_normal((6, 8))[::2, ::3]
    files.write_contiguous(tmp_path / "f.h5", {"x": array}, {}, schema="test", version=1)
    with files.open_read(tmp_path / "f.h5", "test", 1) as file:
        assert (file["x"][...] == array).all()


def test_tables_can_grow_widen_and_shrink(tmp_path, rng):
    path = tmp_path / "t.h5"
    columns = [Column("step", "i8", "1", "number"), Column("time", "f8", "s", "per rank", wide=True)]
    expected = np.zeros((0, 2))
    for width in (2, 1, 5, 3):
        with files.edit(path, "test", 1) as file:
            if "t" not in file:
                datasets.create(file, "t", columns, second="rank", width=2)
            rows = rng.random((700, width))
            datasets.extend(file, "t", {"step": np.arange(700), "time": rows})
        most = max(expected.shape[1], width)
        same = [np.pad(a, ((0, 0), (0, most - a.shape[1])), constant_values=np.nan) for a in (expected, rows)]
        expected = np.vstack(same)
    with files.edit(path, "test", 1) as file:
        datasets.shorten(file, "t", 1000)
    with files.open_read(path, "test", 1) as file:
        result = datasets.read(file, "t")
        assert file["t/rank"][...].tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(result["time"], expected[:1000], equal_nan=True)


def test_edit_works_while_another_thread_reads(tmp_path):
    path, other = tmp_path / "f.h5", tmp_path / "g.h5"
    make(other, 100_000)
    stop = threading.Event()
    sums = []

    def read():
        with files.open_read(other) as file:
            while not stop.is_set():
                sums.append(int(file["x"][...].sum()))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for step in range(30):
            with files.edit(path, "test", 1) as file:
                file[f"x{step}"] = np.ones(1000)
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive() and set(sums) == {sum(range(100_000))}


def test_unwritable_path_is_rejected_and_unchanged(tmp_path):
    path = tmp_path / "new.h5"
    files.check_place(path)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"mine")
    with pytest.raises(StorageError, match="exists already"):
        files.check_place(path)
    assert path.read_bytes() == b"mine"
    with pytest.raises(StorageError, match="cannot be written"):
        files.check_place(tmp_path / "missing" / "new.h5")
