"""Text: files, directories and the standard library as bytes."""

import hashlib
import os
import threading

import numpy as np
import pytest

from hpcdist.errors import DataError, StorageError
from hpcdist.training.data import files as data_files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HPCDIST_CACHE", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path, rng):
    root = tmp_path / "text"
    for name in ("a.txt", "b/c.txt", "b/d/e.md", ".hidden", "b/.git/f.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.integers(32, 127, rng.integers(1, 20_000)).astype(np.uint8).tobytes())
    (root / "picture.bin").write_bytes(b"P\0" + bytes(100))
    (root / "gone").symlink_to("nowhere")
    return root


def test_file_is_read_unchanged(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xc3\xa9\0\xff")
    assert bytes(data_files.bytes_of_file(tmp_path / "a.txt")[:]) == b"caf\xc3\xa9\0\xff"


def test_directory_joins_its_text_files_by_hash_of_their_names(folder):
    tokens, ends, _ = data_files.text_of_directory(folder)
    names = sorted(["a.txt", "b/c.txt", "b/d/e.md"], key=lambda name: hashlib.blake2b(name.encode()).digest())
    assert bytes(tokens[:]) == b"".join((folder / name).read_bytes() for name in names)
    assert ends.tolist() == np.cumsum([(folder / name).stat().st_size for name in names]).tolist()


def test_directory_is_joined_again_only_if_it_changes(folder, cache):
    first, *_ = data_files.text_of_directory(folder)
    files = {path: path.stat().st_mtime_ns for path in cache.glob("*.bytes")}
    assert len(files) == 1
    data_files.text_of_directory(folder)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.bytes")} == files
    (folder / "a.txt").write_text("changed")
    os.utime(folder / "a.txt", ns=(1, 1))
    second, *_ = data_files.text_of_directory(folder)
    assert b"changed" in bytes(second)
    assert bytes(first) != bytes(second)
    assert not list(cache.glob("*.unfinished"))


def test_leftovers_of_a_killed_process_are_removed(folder, cache):
    data_files.text_of_directory(folder)
    (target,) = cache.glob("*.bytes")
    target.unlink()
    left, other, old = (
        cache / f".{name}.{'0' * 16}.new" for name in (target.name, "text-other.bytes", "text-old.bytes")
    )
    for path in (left, other, old):
        path.write_bytes(b"a part")
    os.utime(old, (1, 1))
    data_files.text_of_directory(folder)
    assert target.exists() and not left.exists() and not old.exists()
    assert other.exists()  # another process may be writing it


@pytest.mark.full
def test_processes_of_a_node_join_a_directory_once(folder, monkeypatch):
    written, write = [], data_files._write_concatenation

    def write_and_count(target, ends, files):
        written.append(target)
        write(target, ends, files)

    monkeypatch.setattr(data_files, "_write_concatenation", write_and_count)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(bytes(data_files.text_of_directory(folder)[0])))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(results)) == 1
    assert len(written) == 1


def test_standard_library_text_is_reproducible():
    tokens, _, description = data_files.text_of_standard_library()
    assert len(tokens) > 1_000_000
    assert b"class OrderedDict" in bytes(tokens[:])
    assert "standard library" in description
    again, *_ = data_files.text_of_standard_library()
    assert np.array_equal(tokens[:], again[:])


def test_directories_without_text_are_rejected(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no files in the directory"):
        data_files.text_of_directory(tmp_path / "none")
    (tmp_path / "none" / "binary").write_bytes(b"\0\1")
    with pytest.raises(DataError, match="hold no text"):
        data_files.text_of_directory(tmp_path / "none")


def test_empty_files_are_rejected(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt: the file is empty"):
        data_files.bytes_of_file(tmp_path / "empty.txt")


def test_unwritable_cache_raises_storage_error(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HPCDIST_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match="set HPCDIST_CACHE"):
        data_files.text_of_directory(folder)

    def raise_disk_full(target, ends, files):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("HPCDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data_files, "_write_concatenation", raise_disk_full)
    with pytest.raises(StorageError, match="No space left on device; set HPCDIST_CACHE"):
        data_files.text_of_directory(folder)


def test_user_cache_must_be_private(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCDIST_CACHE")
    monkeypatch.setattr(data_files.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = data_files.cache_directory()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="only this user can write"):
        data_files.cache_directory()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        *((f"a{suffix}", b"text", f"{suffix} is") for suffix in (".parquet", ".jsonl", ".csv", ".gz", ".zst", ".bin")),
        ("a.txt", b"a\0b", "NUL bytes"),
        ("a.txt", "text".encode("utf-16"), "UTF-16"),
        ("a", bytes(range(1, 256)), "control characters"),
    ],
)
def test_files_that_are_not_text_are_rejected_with_the_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"is not text: .*{reason}"):
        data_files.kind_of(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "shift-jis", "koi8-r"])
def test_text_in_any_encoding_of_bytes_is_accepted(tmp_path, encoding):
    texts = {"latin-1": "caf\u00e9", "shift-jis": "\u65e5\u672c", "koi8-r": "\u043c\u0438\u0440"}
    (tmp_path / "a.py").write_bytes((texts.get(encoding, "caf\u00e9") + "\t\r\n").encode(encoding) * 100)
    assert data_files.kind_of(tmp_path / "a.py") == "text"


def test_skipped_files_of_a_directory_are_listed(folder, cache, capsys):
    for number in range(8):
        (folder / f"{number}.jsonl").write_text("{}")
    assert data_files.text_of_directory(folder)[2].endswith("(9 skipped)")
    shown = capsys.readouterr().err
    assert "9 files are not text and are skipped" in shown and shown.count(".jsonl is records") <= 5
    (listing,) = cache.glob("*.skipped")
    lines = listing.read_text().splitlines()
    assert len(lines) == 9 and f"{folder}/picture.bin (.bin is binary)" in lines
