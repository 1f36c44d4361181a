"""Digests of whole data: they depend on every byte, but not on the format, the ranks or the cache."""

import os
from dataclasses import fields
from unittest import mock

import h5py
import numpy as np
import pytest

from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, DataError, StorageError
from hpcdist.models.config import ModelConfig
from hpcdist.reporting import user_cache
from hpcdist.training.build import state
from hpcdist.training.build.trainer import Trainer
from hpcdist.training.data import digests as module
from hpcdist.training.data import files, open_source
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.config import DataConfig
from hpcdist.training.use_cases import import_checkpoint

SIZE = 130_846
UNSEEN = 1500  # between the first two of 64 probes of 1,024 bytes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_memory_cache", {})
    monkeypatch.setattr(module, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(module, "READ_BYTES", 3_000)
    return tmp_path / "cache" / "hpcdist" / module.KIND


@pytest.fixture
def data(tmp_path, rng):
    path = tmp_path / "data.txt"
    path.write_bytes(rng.integers(32, 127, SIZE).astype(np.uint8).tobytes())
    return path


@pytest.fixture
def blocks(monkeypatch):
    """The start offsets of the blocks that are read."""
    read = []
    block = module._block
    monkeypatch.setattr(module, "_block", lambda column, start: read.append(start) or block(column, start))
    return read


def open_data(path, comm=None, **keys):
    return open_source(DataConfig(path=str(path), context=16, **keys), ModelConfig(), comm or solo())


def change(path, place):
    """Change a byte without a change of the file's size and time."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte % 255 + 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_change_between_the_probes_is_detected(data):
    before = open_data(data)
    scalars = {"data": before.fingerprint, "data_digest": before.digest}
    assert open_data(data).matches(scalars)
    change(data, UNSEEN)
    after = open_data(data)
    assert after.fingerprint == before.fingerprint, "the byte lies between the probes"
    assert after.digest != before.digest
    assert not after.matches(scalars)


def test_checkpoints_without_a_digest_are_compared_by_probes(data):
    before = open_data(data)
    change(data, UNSEEN)
    assert open_data(data).matches({"data": before.fingerprint})
    change(data, 5)
    assert not open_data(data).matches({"data": before.fingerprint})


def test_probes_option_makes_no_digest(data, blocks):
    before = open_data(data)
    scalars = {"data": before.fingerprint, "data_digest": before.digest}
    change(data, UNSEEN)
    blocks.clear()
    after = open_data(data, digest="probes")
    assert after.digest == ""
    assert blocks == []
    assert after.matches(scalars)
    assert not open_data(data).matches(scalars)
    with pytest.raises(ConfigurationError, match="data.digest = 'some'; choose one of whole, probes"):
        DataConfig(digest="some")


def test_every_byte_changes_the_digest(data, rng):
    digests = {open_data(data).digest}
    for place in (0, 9_999, 10_000, SIZE - 1, *rng.integers(0, SIZE, 5).tolist()):
        change(data, place)
        digests.add(open_data(data).digest)
    assert len(digests) == 10


def test_digest_does_not_depend_on_format_or_ranks(data, tmp_path):
    tokens = np.frombuffer(data.read_bytes(), np.uint8)
    np.save(tmp_path / "a.npy", tokens)
    for name, chunks in (("a.h5", None), ("chunked.h5", (4_000,))):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("tokens", data=tokens, chunks=chunks)
    names = ("data.txt", "a.npy", "a.h5", "chunked.h5")
    expected = open_data(data).digest
    assert [open_data(tmp_path / name).digest for name in names] == [expected] * 4
    for ranks in (2, 3, 16):
        assert {result.digest for result in run_threads(ranks, lambda comm: open_data(data, comm))} == {expected}


def test_each_rank_reads_a_part(data, blocks):
    run_threads(3, lambda comm: open_data(data, comm))
    assert sorted(blocks) == list(range(0, SIZE, 10_000))


def test_local_copies_are_read_by_their_ranks(data, tmp_path, blocks):
    """Nodes with local disks work like this. One of them has another copy."""
    (tmp_path / "copy.txt").write_bytes(data.read_bytes())
    paths = [data, tmp_path / "copy.txt", data]
    assert len({result.digest for result in run_threads(3, lambda comm: open_data(paths[comm.rank], comm))}) == 1
    assert sorted(blocks) == sorted(2 * list(range(0, SIZE, 10_000)))
    change(tmp_path / "copy.txt", UNSEEN)

    def assert_rejected(comm):
        with pytest.raises(DataError, match="rank 1 and 0 other ranks see other data than rank 0"):
            open_data(paths[comm.rank], comm)

    run_threads(3, assert_rejected)


def test_digest_is_cached(data, cache, blocks, monkeypatch):
    def reads(between):
        between()
        blocks.clear()
        results.append(open_data(data).digest)
        return bool(blocks)

    def forge(write):
        module._memory_cache.clear()
        for path in cache.iterdir():
            write(path)

    results = []
    assert reads(lambda: None)
    assert reads(lambda: None), "it could change again without another time"
    monkeypatch.setattr(module, "SETTLED_NS", -1)
    assert reads(lambda: None)
    assert not reads(lambda: None)
    assert not reads(module._memory_cache.clear), "as in a later start"
    assert len(set(results)) == 1
    assert not reads(lambda: forge(lambda path: path.write_text(path.read_text().replace(results[0], "0" * 32))))
    assert results.pop() == "0" * 32, "it is the file that is asked"
    assert reads(lambda: forge(lambda path: path.chmod(0o666)))
    for text_of_it in ("", "[1]", '{"key": "other", "digest": "1"}', '{"digest": []}'):
        assert reads(lambda content=text_of_it: forge(lambda path: path.write_text(content)))
    assert len(set(results)) == 1
    assert reads(lambda: change(data, UNSEEN)), "its size and time are those of before"
    assert len(set(results)) == 2


def test_digest_works_without_a_cache_directory(data, monkeypatch):
    def raise_storage_error(kind):
        raise StorageError("HOME is not set")

    monkeypatch.setattr(user_cache, "directory", raise_storage_error)
    monkeypatch.setattr(module, "SETTLED_NS", -1)
    assert open_data(data).digest == open_data(data).digest != ""


def test_all_files_with_elements_are_checked(tmp_path, blocks, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", -1)
    with h5py.File(tmp_path / "part.h5", "w") as file:
        file["data"] = np.arange(SIZE).astype(np.uint8)
    layout = h5py.VirtualLayout((SIZE,), np.uint8)
    layout[:] = h5py.VirtualSource("part.h5", "data", (SIZE,))
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        file.create_virtual_dataset("tokens", layout)

    def digest():
        return module.digest([files.hdf5_tokens(tmp_path / "whole.h5")], "it", solo())

    first = digest()
    blocks.clear()
    assert digest() == first
    assert blocks == []
    change(tmp_path / "part.h5", 2048 + UNSEEN)
    assert digest() != first
    blocks.clear()
    monkeypatch.setattr(files.Hdf5Dataset, "files", lambda self: None)  # as with a pattern of names
    assert digest() == digest()
    assert len(blocks) == 2 * 14


def test_file_truncated_during_the_digest_fails_on_all_ranks(data):
    tokens = files.bytes_of_file(data)
    os.truncate(data, 50_000)

    def assert_rejected(comm):
        with pytest.raises(StorageError, match="it was truncated"):
            module.digest([tokens], "it", comm)

    run_threads(2, assert_rejected)


def test_long_digest_is_announced(data, capsys, monkeypatch):
    open_data(data)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "ANNOUNCED_ROUNDS", 5)
    run_threads(2, lambda comm: open_data(data, comm))
    assert capsys.readouterr().err.count("are read once to verify the data in a resume; data.digest = 'probes'") == 1


def test_digest_that_cannot_be_cached_is_reported_if_slow(data, cache, capsys, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    cache.parents[1].write_text("")  # a file: no directory can be made there
    open_data(data)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "ANNOUNCED_ROUNDS", 5)
    monkeypatch.setattr(module, "_memory_cache", {})
    run_threads(2, lambda comm: open_data(data, comm))
    output = "its digest cannot be cached (Not a directory; set XDG_CACHE_HOME to a directory)"
    assert capsys.readouterr().err.count(output) == 1


def test_inspection_makes_no_digest(data, blocks, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    source = open_source(DataConfig(path=str(data), context=16), ModelConfig(), solo(), kept_only=True)
    assert source.digest == ""
    assert blocks == []
    made = open_data(data)
    assert made.digest
    assert made.matches({"data": source.fingerprint, "data_digest": ""})
    assert (
        open_source(DataConfig(path=str(data), context=16), ModelConfig(), solo(), kept_only=True).digest == made.digest
    )


def test_digest_survives_a_resume_by_probes(data):
    made, probed = open_data(data), open_data(data, digest="probes")
    scalars = {"data": made.fingerprint, "data_digest": made.digest, "optimizer": {"count": 3}, "steps": 3}
    parts = {field.name: mock.MagicMock() for field in fields(Trainer)} | {"source": probed, "shares": None}
    trainer = Trainer(**parts | {"noise": None})
    trainer.exchange.prepare_restore.return_value = ()
    trainer = state.restore_state(trainer, mock.MagicMock(scalars=scalars))
    assert trainer.source.digest == made.digest
    assert open_data(data).matches({"data": probed.fingerprint, "data_digest": trainer.source.digest})


def test_import_makes_no_digest(data, blocks):
    recipe = recipes.Recipe(data=DataConfig(path=str(data), context=16), model=ModelConfig(kind="mlp"))
    assert import_checkpoint._model_inputs(recipe, {})
    assert blocks == []
