"""Digests of whole data: every byte counts, whatever the format, the ranks and the cache."""

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
from hpcdist.training.data import files, open_source
from hpcdist.training.data import source as module
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
    """Where the blocks begin that are read."""
    read = []
    block = module._block
    monkeypatch.setattr(module, "_block", lambda column, start: read.append(start) or block(column, start))
    return read


def opened(path, comm=None, **keys):
    return open_source(DataConfig(path=str(path), context=16, **keys), ModelConfig(), comm or solo())


def change(path, place):
    """Change a byte, and let the file look as it was to those who ask for its size and time."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte % 255 + 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_change_between_the_probes_is_seen(data):
    before = opened(data)
    scalars = {"data": before.fingerprint, "data_digest": before.digest}
    assert opened(data).made(scalars)
    change(data, UNSEEN)
    after = opened(data)
    assert after.fingerprint == before.fingerprint, "the byte lies between the probes"
    assert after.digest != before.digest
    assert not after.made(scalars)


def test_checkpoints_without_a_digest_are_known_by_the_probes(data):
    before = opened(data)
    change(data, UNSEEN)
    assert opened(data).made({"data": before.fingerprint})
    change(data, 5)
    assert not opened(data).made({"data": before.fingerprint})


def test_who_asks_for_probes_gets_them(data, blocks):
    before = opened(data)
    scalars = {"data": before.fingerprint, "data_digest": before.digest}
    change(data, UNSEEN)
    blocks.clear()
    after = opened(data, digest="probes")
    assert after.digest == ""
    assert blocks == []
    assert after.made(scalars)
    assert not opened(data).made(scalars)
    with pytest.raises(ConfigurationError, match="data.digest = 'some'; choose one of whole, probes"):
        DataConfig(digest="some")


def test_every_byte_counts(data, rng):
    digests = {opened(data).digest}
    for place in (0, 9_999, 10_000, SIZE - 1, *rng.integers(0, SIZE, 5).tolist()):
        change(data, place)
        digests.add(opened(data).digest)
    assert len(digests) == 10


def test_the_format_and_the_ranks_do_not_count(data, tmp_path):
    tokens = np.frombuffer(data.read_bytes(), np.uint8)
    np.save(tmp_path / "a.npy", tokens)
    for name, chunks in (("a.h5", None), ("chunked.h5", (4_000,))):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("tokens", data=tokens, chunks=chunks)
    names = ("data.txt", "a.npy", "a.h5", "chunked.h5")
    expected = opened(data).digest
    assert [opened(tmp_path / name).digest for name in names] == [expected] * 4
    for ranks in (2, 3, 16):
        assert {found.digest for found in run_threads(ranks, lambda comm: opened(data, comm))} == {expected}


def test_ranks_read_a_part_each(data, blocks):
    run_threads(3, lambda comm: opened(data, comm))
    assert sorted(blocks) == list(range(0, SIZE, 10_000))


def test_copies_are_read_by_their_own_ranks(data, tmp_path, blocks):
    """As nodes with a disk of their own do; one of them has another copy."""
    (tmp_path / "copy.txt").write_bytes(data.read_bytes())
    paths = [data, tmp_path / "copy.txt", data]
    assert len({found.digest for found in run_threads(3, lambda comm: opened(paths[comm.rank], comm))}) == 1
    assert sorted(blocks) == sorted(2 * list(range(0, SIZE, 10_000)))
    change(tmp_path / "copy.txt", UNSEEN)

    def refused(comm):
        with pytest.raises(DataError, match="rank 1 and 0 others see other data than rank 0"):
            opened(paths[comm.rank], comm)

    run_threads(3, refused)


def test_what_was_read_is_not_read_again(data, cache, blocks, monkeypatch):
    def reads(between):
        between()
        blocks.clear()
        found.append(opened(data).digest)
        return bool(blocks)

    def forge(write):
        module._memory_cache.clear()
        for path in cache.iterdir():
            write(path)

    found = []
    assert reads(lambda: None)
    assert reads(lambda: None), "it could change again without another time"
    monkeypatch.setattr(module, "SETTLED_NS", -1)
    assert reads(lambda: None)
    assert not reads(lambda: None)
    assert not reads(module._memory_cache.clear), "as in a later start"
    assert len(set(found)) == 1
    assert not reads(lambda: forge(lambda path: path.write_text(path.read_text().replace(found[0], "0" * 32))))
    assert found.pop() == "0" * 32, "it is the file that is asked"
    assert reads(lambda: forge(lambda path: path.chmod(0o666)))
    for text_of_it in ("", "[1]", '{"key": "other", "digest": "1"}', '{"digest": []}'):
        assert reads(lambda content=text_of_it: forge(lambda path: path.write_text(content)))
    assert len(set(found)) == 1
    assert reads(lambda: change(data, UNSEEN)), "its size and time are those of before"
    assert len(set(found)) == 2


def test_a_user_without_a_cache_directory(data, monkeypatch):
    def refuse(kind):
        raise StorageError("HOME is not set")

    monkeypatch.setattr(user_cache, "directory", refuse)
    monkeypatch.setattr(module, "SETTLED_NS", -1)
    assert opened(data).digest == opened(data).digest != ""


def test_all_files_with_elements_are_looked_at(tmp_path, blocks, monkeypatch):
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


def test_a_file_that_is_cut_meanwhile_fails_on_all_ranks(data):
    tokens = files.bytes_of_file(data)
    os.truncate(data, 50_000)

    def refused(comm):
        with pytest.raises(StorageError, match="it was cut"):
            module.digest([tokens], "it", comm)

    run_threads(2, refused)


def test_a_long_reading_is_told(data, capsys, monkeypatch):
    opened(data)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "ANNOUNCED_ROUNDS", 5)
    run_threads(2, lambda comm: opened(data, comm))
    assert capsys.readouterr().err.count("are read once, so that a resume knows them; data.digest = 'probes'") == 1


def test_a_digest_that_cannot_be_kept_is_told_where_reading_is_long(data, cache, capsys, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    cache.parents[1].write_text("")  # a file: no directory can be made there
    opened(data)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "ANNOUNCED_ROUNDS", 5)
    monkeypatch.setattr(module, "_memory_cache", {})
    run_threads(2, lambda comm: opened(data, comm))
    said = "its digest cannot be kept (Not a directory; set XDG_CACHE_HOME to a directory)"
    assert capsys.readouterr().err.count(said) == 1


def test_a_look_makes_no_digest(data, blocks, monkeypatch):
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))
    source = open_source(DataConfig(path=str(data), context=16), ModelConfig(), solo(), kept_only=True)
    assert source.digest == ""
    assert blocks == []
    made = opened(data)
    assert made.digest
    assert made.made({"data": source.fingerprint, "data_digest": ""})
    assert (
        open_source(DataConfig(path=str(data), context=16), ModelConfig(), solo(), kept_only=True).digest == made.digest
    )


def test_a_digest_outlives_a_resume_by_probes(data):
    made, probed = opened(data), opened(data, digest="probes")
    scalars = {"data": made.fingerprint, "data_digest": made.digest, "optimizer": {"count": 3}, "steps": 3}
    parts = {field.name: mock.MagicMock() for field in fields(Trainer)} | {"source": probed, "shares": None}
    trainer = Trainer(**parts | {"noise": None})
    trainer.exchange.prepare_restore.return_value = ()
    trainer = state.restore_state(trainer, mock.MagicMock(scalars=scalars))
    assert trainer.source.digest == made.digest
    assert opened(data).made({"data": probed.fingerprint, "data_digest": trainer.source.digest})


def test_an_import_makes_no_digest(data, blocks):
    recipe = recipes.Recipe(data=DataConfig(path=str(data), context=16), model=ModelConfig(kind="mlp"))
    assert import_checkpoint._model_inputs(recipe, {})
    assert blocks == []
