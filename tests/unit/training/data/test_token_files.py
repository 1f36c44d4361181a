"""Token files of other programs, and arrays over many files."""

import struct

import h5py
import numpy as np
import pytest

from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError, StorageError
from hpcdist.models.config import ModelConfig
from hpcdist.training.data import open_source, token_files
from hpcdist.training.data.token_files import Shard, ShardedArray
from hpcdist.training.recipe.config import DataConfig, DataSource

CODES = {1: np.uint8, 4: np.int32, 8: np.uint16}


def write_megatron(prefix, documents, code):
    """Write ``documents``, lists of token arrays (one array per sequence), as Megatron .bin and .idx files."""
    sequences = [sequence.astype(CODES[code]) for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    pointers = [sum(lengths[:n]) * np.dtype(CODES[code]).itemsize for n in range(len(lengths))]
    borders = np.cumsum([0, *map(len, documents)])
    prefix.with_suffix(".bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(borders))
    assert len(head) == 34
    arrays = np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(borders, "<i8")
    prefix.with_suffix(".idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))


@pytest.fixture
def documents(rng):
    """Documents of one to three sequences."""
    return [[rng.integers(0, 200, rng.integers(1, 30)) for _ in range(rng.integers(1, 4))] for _ in range(40)]


def flatten(documents):
    return [np.concatenate(document) for document in documents]


def test_array_over_many_files_reads_as_one_array(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(token_files, "MOST_OPEN_FILES", 2)
    sizes = [5, 1, 0, 30, 7]
    parts = [rng.integers(0, 1 << 16, size).astype("<u2") for size in sizes]
    for number, part in enumerate(parts):
        (tmp_path / f"{number}").write_bytes(b"head" + part.tobytes())
    array = ShardedArray([Shard(tmp_path / f"{n}", 4, size) for n, size in enumerate(sizes)], "<u2")
    whole = np.concatenate(parts)
    for length in (1, 4, 20, 43):
        starts = rng.integers(0, len(whole) - length + 1, 30)
        assert np.array_equal(array.gather(starts, length), [whole[start : start + length] for start in starts])
    assert np.array_equal(array[3:40:3], whole[3:40:3]) and array[-1] == whole[-1]
    (tmp_path / "3").write_bytes(b"short")
    with pytest.raises(StorageError, match="3 has 5 bytes"):
        array.files()
    (tmp_path / "3").unlink()
    with pytest.raises(StorageError, match="3 cannot be read"):
        array.files()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["data", "data.bin", "data.idx"])
def test_megatron_documents_are_read_and_the_last_documents_are_held_out(tmp_path, documents, code, name):
    write_megatron(tmp_path / "data", documents, code)
    config = DataConfig(path=str(tmp_path / name), context=8, validation_fraction=0.2)
    source = open_source(config, ModelConfig(), solo())
    whole, ends = np.concatenate(flatten(documents)), np.cumsum(list(map(len, flatten(documents))))
    training = len(source.tokens)
    assert np.array_equal(source.tokens[:], whole[:training])
    assert training == max(end for end in ends if end <= len(whole) - round(0.2 * len(whole)))
    x, _ = source.validation.take(np.array([0]), 0)
    assert np.array_equal(x[0], whole[training : training + 8])


def test_megatron_documents_are_packed(tmp_path, documents):
    write_megatron(tmp_path / "data", documents, 8)
    packed = open_source(DataConfig(path=str(tmp_path / "data"), context=96, packed=True), ModelConfig(), solo())
    sizes = np.array(list(map(len, flatten(documents))))
    filled = packed.training.filled(np.arange(packed.training.count)).sum()
    filled += packed.validation.filled(np.arange(packed.validation.count)).sum()
    assert filled == (sizes - 1).sum()


def test_pattern_names_many_files_in_order(tmp_path, documents):
    for number, first in enumerate(range(0, 40, 10)):
        write_megatron(tmp_path / f"part-{number}", documents[first : first + 10], 8)
    one = open_source(DataConfig(path=str(tmp_path / "part-*.bin"), context=8), ModelConfig(), solo())
    flat = open_source(DataConfig(path=str(tmp_path / "part-*.bin"), context=8, dtype="uint16"), ModelConfig(), solo())
    whole = np.concatenate(flatten(documents))
    for source in (one, flat):
        assert np.array_equal(source.tokens[:], whole[: len(source.tokens)])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("head", [b"", struct.pack("<256i", 20240520, *range(255))])
def test_flat_files_need_only_their_type(tmp_path, rng, dtype, head):
    tokens = rng.integers(0, 256, 500).astype(dtype)
    (tmp_path / "a.npy").write_bytes(head + tokens.tobytes())
    source = open_source(DataConfig(path=str(tmp_path / "a.npy"), context=8, dtype=dtype), ModelConfig(), solo())
    assert np.array_equal(source.tokens[:], tokens[:475])


def index(code=8, magic=b"MMIDIDX\0\0", version=1, lengths=(4,), pointers=(0,), borders=(0, 1)):
    head = magic + struct.pack("<QBQQ", version, code, len(lengths), len(borders))
    return head + np.array(lengths, "<i4").tobytes() + np.array([*pointers, *borders], "<i8").tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (index(magic=b"TNTIDX\0\0\0"), "fairseq"),
        (index(magic=b"something"), "does not begin with MMIDIDX"),
        (index(version=2), "version 2"),
        (index(code=7), "element type 7"),
        (index(pointers=(2,)), "one after the other"),
        (index(borders=(0, 2)), "one after the other"),
        (index()[:-3], "not a valid Megatron index"),
        (index(lengths=(), pointers=(), borders=(0,)), "no tokens"),
        (index(lengths=(9,)), "a.bin has 8 bytes"),
        (None, r"provide the .idx files"),
    ],
    ids=["fairseq", "magic", "version", "code", "gap", "borders", "truncated", "empty", "short", "absent"],
)
def test_invalid_megatron_files_are_rejected(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(bytes(8))
    if content is not None:
        (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises((DataError, StorageError), match=message):
        open_source(DataConfig(path=str(tmp_path / "a.bin"), context=2, validation_fraction=0), ModelConfig(), solo())


def write_tokens(folder, kind, tokens):
    """Write ``tokens`` in a format, and return the keys of the data."""
    if kind == "megatron":
        write_megatron(folder / "a", [[tokens[:8000]], [tokens[8000:]]], 8)
    elif kind == "flat":
        tokens.astype("<u2").tofile(folder / "a.bin")
        return {"path": str(folder / "a.bin"), "dtype": "uint16"}
    elif kind == "hdf5":
        with h5py.File(folder / "a.h5", "w") as file:
            file["tokens"] = tokens
    else:
        np.save(folder / "a.npy", tokens.astype(np.uint16))
    return {"path": str(folder / {"megatron": "a.bin", "hdf5": "a.h5", "npy": "a.npy"}[kind])}


@pytest.mark.parametrize("kind", ["megatron", "flat", "hdf5", "npy"])
def test_tokens_outside_the_vocabulary_are_rejected_before_the_first_step(tmp_path, rng, kind):
    tokens = rng.integers(0, 256, 9000)
    np.save(tmp_path / "good.npy", tokens.astype(np.uint16))
    tokens[rng.integers(9000)] = 300
    source = DataSource(**write_tokens(tmp_path, kind, tokens))
    single = DataConfig(path=source.path, dtype=source.dtype, context=16)
    mixture = DataConfig(source=(DataSource(path=str(tmp_path / "good.npy")), source), context=16)

    def assert_rejected(comm):
        for config in (single, single, mixture):  # the second start has the cached digest
            with pytest.raises(DataError) as caught:
                open_source(config, ModelConfig(vocabulary=300), comm)
            assert str(caught.value).startswith(str(tmp_path / "a.")), caught.value
            assert "the token 300 is not in the vocabulary" in str(caught.value)
            assert "set model.vocabulary = 300 to at least 301" in str(caught.value)
            assert open_source(config, ModelConfig(vocabulary=301), comm).digest

    run_threads(2, assert_rejected)


def test_mixture_with_a_source_without_documents_is_rejected(tmp_path, rng):
    np.save(tmp_path / "good.npy", rng.integers(0, 256, 900).astype(np.uint16))
    write_megatron(tmp_path / "empty", [], 8)
    sources = DataSource(path=str(tmp_path / "good.npy")), DataSource(path=str(tmp_path / "empty.bin"))
    with pytest.raises(
        DataError, match=r"empty.bin: the Megatron files have no tokens; expected at least one document"
    ):
        open_source(DataConfig(source=sources, context=16), ModelConfig(), solo())


def test_flat_file_of_another_type_is_rejected(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(7))
    with pytest.raises(DataError, match="7 bytes are not a flat file of uint16"):
        open_source(DataConfig(path=str(tmp_path / "a.bin"), dtype="uint16"), ModelConfig(), solo())
