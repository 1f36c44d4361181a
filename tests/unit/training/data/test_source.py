"""Sources: every kind of data for every kind of model, agreed on by all ranks; and unusable data."""

import socket

import h5py
import numpy as np
import pytest

from hpcdist import errors
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import DataError
from hpcdist.models.config import ModelConfig
from hpcdist.training.data import open_source
from hpcdist.training.recipe.config import DataConfig, RunConfig
from hpcdist.training.recipe.recipe import Recipe

GPT, MLP = ModelConfig(), ModelConfig(kind="mlp")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCDIST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokens(rng):
    return rng.integers(32, 127, 2000).astype(np.uint8)


def _store(folder, kind, tokens):
    path = (
        folder
        / {"text": "a.txt", "npy": "a.npy", "hdf5": "a.h5", "chunked": "a.h5", "nameless": "a", "folder": "f"}[kind]
    )
    if kind in ("text", "nameless"):
        path.write_bytes(tokens.tobytes())
    elif kind == "npy":
        np.save(path, tokens)
    elif kind == "folder":
        path.mkdir()
        (path / "a.txt").write_bytes(tokens.tobytes())
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("tokens", data=tokens, chunks=(256,) if kind == "chunked" else None)
    return str(path)


@pytest.mark.parametrize("kind", ["text", "npy", "hdf5", "chunked", "nameless", "folder"])
def test_samples_do_not_depend_on_the_file_format(tmp_path, tokens, kind):
    config = DataConfig(path=_store(tmp_path, kind, tokens), context=16, validation_fraction=0.1)
    source = open_source(config, GPT, solo())
    assert source.inputs == {"context": 16}
    assert np.array_equal(source.tokens[:], tokens[:1800])
    x, y = source.training.take(np.array([3]), 5)
    assert np.array_equal(x[0], tokens[53:69])
    assert np.array_equal(y[0], tokens[54:70])
    (x, y), *_ = source.validation_batches(Recipe(data=config), 1, 0)
    assert np.array_equal(x[0], tokens[1800:1816])
    assert source.description.endswith("2,000 bytes")


def test_mlp_predicts_the_next_byte(tmp_path, tokens):
    source = open_source(DataConfig(path=_store(tmp_path, "text", tokens), context=16), MLP, solo())
    assert source.inputs == {"features": 16, "classes": 256}
    assert source.training.count == 1900 - 16
    x, y = source.training.take(np.array([7]), 0)
    assert np.array_equal(x[0], tokens[7:23])
    assert y.tolist() == [tokens[23]]


def test_mlp_reads_a_table(tmp_path, rng):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = rng.random((40, 2, 5), np.float32), np.arange(40) % 3
    source = open_source(DataConfig(path=str(tmp_path / "a.h5")), MLP, solo())
    assert source.inputs == {"features": 10, "classes": 3}
    assert source.training.count == 38
    assert source.validation is not None
    assert source.validation.count == 2
    assert source.tokens is None


ENCODER, CONVNET = ModelConfig(kind="encoder"), ModelConfig(kind="convnet")


def test_encoder_reads_masked_windows(tmp_path, tokens):
    tokens[tokens == 255] = 7
    config = DataConfig(path=_store(tmp_path, "text", tokens), context=16, validation_fraction=0.1)
    source = open_source(config, ENCODER, solo())
    assert source.inputs == {"context": 16}
    assert source.tokens is None  # what follows a token is not what it says
    x, y = source.training.take(np.array([3, 9]), 5)
    assert ((y >= 0).sum(axis=1) == 2).all()  # round(0.15 * 16)
    assert np.array_equal(np.where(y >= 0, y, x), [tokens[53:69], tokens[149:165]])
    recipe = Recipe(data=config, model=ENCODER)
    looks = [np.concatenate([x for x, _ in source.validation_batches(recipe, 1, 0)]) for _ in range(2)]
    assert np.array_equal(*looks)
    assert (looks[0] == 255).any()
    assert np.array_equal(source.place((x, y), recipe)[1], y)


@pytest.mark.parametrize(("shape", "inputs"), [((5, 7, 3), (5, 7, 3)), ((6, 4), (6, 4, 1))])
def test_convnet_reads_pictures(tmp_path, rng, shape, inputs):
    pictures = rng.integers(0, 256, (40, *shape)).astype(np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = pictures, np.arange(40) % 3
    source = open_source(DataConfig(path=str(tmp_path / "a.h5")), CONVNET, solo())
    height, width, channels = inputs
    assert source.inputs == {"height": height, "width": width, "channels": channels, "classes": 3}
    assert f"40 pictures of {height} x {width} x {channels} in 3 classes" in source.description
    x, y = source.training.take(np.array([2, 0]), 0)
    assert np.array_equal(x, pictures[[2, 0]].reshape(2, -1))
    assert y.tolist() == [2, 0]


def test_data_without_pictures_is_rejected_for_a_convnet(tmp_path, tokens, rng):
    with pytest.raises(DataError, match="a convnet takes pictures; set data.path to an HDF5 file"):
        open_source(DataConfig(path=_store(tmp_path, "text", tokens)), CONVNET, solo())
    with pytest.raises(DataError, match="data.path = '': a convnet takes pictures"):
        open_source(DataConfig(), CONVNET, solo())
    for shape in ((9, 4), (9, 2, 2, 2, 2)):
        path = tmp_path / f"{len(shape)}.h5"
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = rng.random(shape), np.arange(9) % 2
        with pytest.raises(DataError, match=r"takes pictures \(rows, height, width\)"):
            open_source(DataConfig(path=str(path)), CONVNET, solo())


def test_source_without_validation(tmp_path, tokens):
    config = DataConfig(path=_store(tmp_path, "text", tokens), context=1999, validation_fraction=0.0)
    source = open_source(config, GPT, solo())
    assert source.training.count == source.training.shifts == 1
    assert list(source.validation_batches(Recipe(data=config), 1, 0)) == []


def test_validation_samples_are_shared_exactly(tmp_path, tokens):
    config = DataConfig(path=_store(tmp_path, "text", tokens), context=4, validation_fraction=0.5)
    recipe = Recipe(data=config, run=RunConfig(validation_samples=101, global_batch=7))

    def shares(comm):
        return [x for x, _ in open_source(config, GPT, comm).validation_batches(recipe, comm.size, comm.rank)]

    alone = np.concatenate(shares(solo()))
    assert alone.shape == (101, 4)
    for size in (2, 3):
        parts = run_threads(size, shares)
        assert max(len(x) for part in parts for x in part) <= -(-7 // size)
        assert np.array_equal(np.concatenate([x for part in parts for x in part]), alone)


@pytest.mark.parametrize("length", [0, 1, 16, 33])
@pytest.mark.parametrize("kind", ["text", "npy", "hdf5", "folder"])
@pytest.mark.parametrize("model", [GPT, MLP], ids=["gpt", "mlp"])
def test_empty_or_short_data_is_rejected(tmp_path, tokens, kind, length, model):
    config = DataConfig(path=_store(tmp_path, kind, tokens[:length]), context=16)
    expected = "too short for one sample to train and one to validate" if length else "is empty|hold no text|x and y"
    if kind == "hdf5" and model is MLP:
        expected = "no dataset x and y; the file holds tokens"
    with pytest.raises(DataError, match=expected) as refused:
        open_source(config, model, solo())
    assert refused.value.exit_code == errors.CONFIGURATION


def test_minimum_data_is_accepted(tmp_path, tokens):
    source = open_source(DataConfig(path=_store(tmp_path, "text", tokens[:34]), context=16), GPT, solo())
    assert source.training.count == 1
    assert source.validation is not None
    assert source.validation.count == 1


def test_missing_or_unreadable_data_is_rejected(tmp_path):
    with pytest.raises(DataError, match=r"data\.path = /no/such: there is no such file or directory"):
        open_source(DataConfig(path="/no/such"), GPT, solo())
    (tmp_path / "a.h5").write_text("not HDF5, whatever its name says")
    for model in (GPT, MLP):
        with pytest.raises(DataError, match="cannot be read as HDF5"):
            open_source(DataConfig(path=str(tmp_path / "a.h5")), model, solo())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(DataError, match="neither a file nor a directory"):
            open_source(DataConfig(path=str(tmp_path / "s")), GPT, solo())


def test_wide_tokens_are_rejected_for_an_mlp(tmp_path, tokens):
    path = _store(tmp_path, "npy", tokens.astype(np.uint16))
    with pytest.raises(DataError, match="an mlp needs a file of bytes"):
        open_source(DataConfig(path=path, context=16), MLP, solo())


def test_all_ranks_fail_together(tmp_path, tokens):
    good = _store(tmp_path, "text", tokens)
    (tmp_path / "other.txt").write_bytes(tokens[::-1].tobytes())

    def error(paths):
        def attempt(comm):
            with pytest.raises(DataError) as refused:
                open_source(DataConfig(path=paths[comm.rank], context=16), GPT, comm)
            return str(refused.value)

        return run_threads(3, attempt)

    assert all("/no/such" in message for message in error([good, good, "/no/such"]))
    assert all(
        "and 0 other ranks see other data" in message for message in error([good, str(tmp_path / "other.txt"), good])
    )


def test_default_data_is_the_standard_library():
    source = open_source(DataConfig(), GPT, solo())
    assert "standard library" in source.description
    assert source.training.count > 10_000
    assert source.fingerprint == open_source(DataConfig(), MLP, solo()).fingerprint
