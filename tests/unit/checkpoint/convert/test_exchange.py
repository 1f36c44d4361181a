"""Checkpoints to and from safetensors and PyTorch: every bit is kept, and malicious files do no harm."""

import json
import os
import pickle
import sys
import tracemalloc
import zipfile
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest

from harness.inputs import newest_intact_checkpoint
from harness.jobs import call_command
from harness.trainings import recipe_of
from hpcdist import models
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import split
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.convert import safetensors
from hpcdist.checkpoint.convert.importing import ForeignFile, import_checkpoint
from hpcdist.checkpoint.restoring.restore import restore
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import MissingCapabilityError, StorageError, UsageError
from hpcdist.training import data, inference
from hpcdist.training.recipe import recipe as recipes

SHAPES = {"0.table": (7, 5), "1.weight": (33, 19), "1.bias": (5,), "2.scale": ()}
DTYPES = {"parameters": "float32", "optimizer.m": "float64", "optimizer.half": "bfloat16", "counts": "int64"}
SCALARS = {"steps": 12, "seed": 2**70, "data": "x", "optimizer": {"count": 12}}


def invoke(capsys, *arguments):
    return call_command(capsys, "checkpoint", *arguments)


@pytest.fixture
def state(rng):
    return {
        (kind, name): (100 * rng.standard_normal(shape)).astype(dtype_of(dtype))
        for kind, dtype in DTYPES.items()
        for name, shape in SHAPES.items()
    }


@pytest.fixture
def run(tmp_path, state):
    """A run saved by three ranks, with tensors split at uneven offsets."""

    def body(comm):
        pieces = []
        for (kind, name), array in state.items():
            part = split(array.size, comm.size, array.itemsize, array.itemsize)[comm.rank]
            local_slice = array.reshape(-1)[part.slice].copy()
            pieces.append(Piece(kind, name, array.shape, whole_box(array.shape), part, local_slice))
        save(tmp_path / "run/checkpoints", 12, pieces, SCALARS, comm)

    run_threads(3, body)
    return tmp_path / "run"


def restore_arrays(run_dir, state):
    path = newest_intact_checkpoint(run_dir)
    pieces = [Piece.whole(kind, name, np.zeros_like(array)) for (kind, name), array in state.items()]
    scalars = restore(path, pieces)
    return {(piece.kind, piece.tensor): piece.array for piece in pieces}, scalars


@pytest.mark.parametrize("out", ("all.safetensors", "all.pt"))
@pytest.mark.full_except("all.pt")
def test_export_and_import_keep_every_bit_and_scalar(out, run, state, tmp_path, capsys):
    if out.endswith(".pt"):
        pytest.importorskip("torch")
    assert invoke(capsys, "export", run, tmp_path / out, "--optimizer")[0] == 0
    code, output, _ = invoke(capsys, "import", tmp_path / out, tmp_path / "again", "--json")
    document = json.loads(output)
    assert code == 0 and document["step"] == 12 and document["resumable"] and document["tensors"] == len(state)
    arrays, scalars = restore_arrays(tmp_path / "again", state)
    assert all(arrays[key].tobytes() == array.tobytes() for key, array in state.items())
    assert scalars == SCALARS | {"imported": out}


def test_export_writes_only_parameters_by_default(run, state, tmp_path, capsys):
    code, output, _ = invoke(capsys, "export", run, tmp_path / "out", "--json")
    assert code == 0 and json.loads(output)["files"] == [str(tmp_path / "out/model.safetensors")]
    result = import_checkpoint(tmp_path / "out", tmp_path / "again")
    assert {one.name for one in result.tensors} == set(SHAPES) and not result.resumable
    assert {one.kind for one in result.tensors} == {"parameters"}
    with pytest.raises(StorageError, match=r"has no tensor optimizer.m"):
        restore_arrays(tmp_path / "again", state)
    with pytest.raises(UsageError, match="checkpoints already"):
        import_checkpoint(tmp_path / "out", tmp_path / "again")
    assert invoke(capsys, "export", run, tmp_path / "out")[0] == 74, "an existing file must not be overwritten"


def test_exported_file_is_read_by_safetensors(run, state, tmp_path, capsys):
    pytest.importorskip("safetensors", reason="pip install 'hpcdist[safetensors]'")
    torch = pytest.importorskip("torch")  # safetensors supports bfloat16 only through torch
    from safetensors import safe_open

    assert invoke(capsys, "export", run, tmp_path / "all.safetensors", "--optimizer")[0] == 0
    with safe_open(tmp_path / "all.safetensors", "pt") as file:
        assert set(file.keys()) == {name if kind == "parameters" else f"{kind}/{name}" for kind, name in state}
        for (kind, name), array in state.items():
            result = file.get_tensor(name if kind == "parameters" else f"{kind}/{name}")
            assert result.shape == array.shape
            bits = result.view(torch.int16).numpy() if result.dtype == torch.bfloat16 else result.numpy()
            assert bits.tobytes() == array.tobytes()


def test_file_written_by_safetensors_is_imported(rng, tmp_path):
    library = pytest.importorskip("safetensors.numpy", reason="pip install 'hpcdist[safetensors]'")
    given = {f"layer.{k}.w": rng.standard_normal((k, 3)).astype(("f4", "f8", "f2")[k % 3]) for k in range(1, 7)}
    library.save_file(given, tmp_path / "theirs.safetensors", {"format": "np"})
    result = import_checkpoint(tmp_path / "theirs.safetensors", tmp_path / "run", step=3)
    assert result.step == 3 and not result.resumable and not result.left_out
    arrays, _ = restore_arrays(tmp_path / "run", {("parameters", name): array for name, array in given.items()})
    assert all(arrays["parameters", name].tobytes() == array.tobytes() for name, array in given.items())


def test_large_models_are_exported_as_shards_with_an_index(run, state, tmp_path, capsys):
    arguments = ("export", run, tmp_path / "out", "--shard-bytes", "1K", "--json")
    files = [Path(file) for file in json.loads(invoke(capsys, *arguments)[1])["files"]]
    assert [file.name for file in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(file.name for file in files)
    index = json.loads(files[-1].read_text())
    parameters = {name: array for (kind, name), array in state.items() if kind == "parameters"}
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in parameters.values())}
    assert set(index["weight_map"]) == set(parameters)
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    arrays, _ = restore_arrays(tmp_path / "again", {("parameters", name): array for name, array in parameters.items()})
    assert all(arrays["parameters", name].tobytes() == array.tobytes() for name, array in parameters.items())
    files[1].unlink()
    with pytest.raises(StorageError, match="FileNotFoundError"):
        import_checkpoint(tmp_path / "out", tmp_path / "third")


def test_damaged_checkpoint_is_not_exported(run, tmp_path, capsys):
    entry = next(one for one in manifest.load(newest_intact_checkpoint(run)).pieces if one.kind == "parameters")
    data = bytearray((newest_intact_checkpoint(run) / entry.file).read_bytes())
    data[entry.offset] ^= 1
    (run / "checkpoints/step-12" / entry.file).write_bytes(data)
    code, _, err = invoke(capsys, "export", run, tmp_path / "out/model.safetensors")
    assert code == 74 and "digest does not match" in err and os.listdir(tmp_path / "out") == []


def test_export_and_import_need_less_memory_than_the_model(tmp_path):
    big = np.arange(1 << 24, dtype="f4")  # 64 MiB in four blocks
    run_threads(
        1, lambda comm: save(tmp_path / "run/checkpoints", 1, [Piece.whole("parameters", "0.w", big)], {}, comm)
    )
    checkpoint = newest_intact_checkpoint(tmp_path / "run")
    loaded = manifest.load(checkpoint)
    from hpcdist.checkpoint.convert import exporting

    tracemalloc.start()
    safetensors.write(checkpoint, loaded, exporting.tensors_to_export(loaded, False), tmp_path / "m.safetensors")
    import_checkpoint(tmp_path / "m.safetensors", tmp_path / "again")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.8 * big.nbytes, f"{peak} bytes at once"
    into = Piece.whole("parameters", "0.w", np.zeros_like(big))
    restore(newest_intact_checkpoint(tmp_path / "again"), [into])
    assert (into.array == big).all()


class Harm:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.full
def test_import_does_not_execute_a_pickle(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(3), "x": Harm()}, tmp_path / "evil.pt")
    with pytest.raises(StorageError, match="cannot be read as torch"):
        import_checkpoint(tmp_path / "evil.pt", tmp_path / "run")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(StorageError, match="cannot be read as torch"):
        import_checkpoint(tmp_path / "plain.pt", tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == ["evil.pt", "plain.pt"] and not Path("/harmed").exists()


def test_compressed_archive_is_rejected(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(1 << 16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for record in plain.infolist():
            bomb.writestr(record.filename, plain.read(record), zipfile.ZIP_DEFLATED)
    with pytest.raises(StorageError, match="cannot be read as torch.*compressed records"):
        import_checkpoint(tmp_path / "bomb.pt", tmp_path / "run")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "plain.pt").read_bytes()[:1000])
    with pytest.raises(StorageError, match="cannot be read as torch.*not from torch.save"):
        import_checkpoint(tmp_path / "cut.pt", tmp_path / "run")
    monkeypatch.setattr("hpcdist.checkpoint.convert.torch_state.MAX_PICKLE_BYTES", 10)
    with pytest.raises(StorageError, match="at most 10; save only a state dict"):
        import_checkpoint(tmp_path / "plain.pt", tmp_path / "run")
    assert newest_intact_checkpoint(tmp_path / "run") is None


@pytest.mark.parametrize("shape", [(1 << 20,), (1 << 13, 1 << 13)])
def test_tensor_larger_than_its_file_is_rejected(shape, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(1).expand(shape)}, tmp_path / "wide.pt")  # one stored element, strides of 0
    with pytest.raises(StorageError, match="w of shape .* is more than a file of"):
        import_checkpoint(tmp_path / "wide.pt", tmp_path / "run")
    assert newest_intact_checkpoint(tmp_path / "run") is None


def test_state_dict_without_pytorch_is_missing_capability(tmp_path, monkeypatch):
    (tmp_path / "m.pt").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MissingCapabilityError, match=r"m\.pt cannot be read: PyTorch cannot be imported.*pip install"
    ) as result:
        import_checkpoint(tmp_path / "m.pt", tmp_path / "run")
    assert result.value.exit_code == 69


@pytest.mark.full
def test_foreign_state_dicts_are_imported(rng, tmp_path):
    torch = pytest.importorskip("torch")
    weight = torch.from_numpy(rng.standard_normal((4, 6)).astype("f4"))
    state = {"a.w": weight.T, "b.w": weight[1:3], "half": weight.bfloat16(), "mask": torch.ones(3, dtype=torch.bool)}
    torch.save({"model": state, "epoch": 3}, tmp_path / "theirs.pt")
    assert import_checkpoint(tmp_path / "theirs.pt", tmp_path / "run").left_out == ("epoch", "parameters/mask")
    half = np.zeros((4, 6), ml_dtypes.bfloat16)
    expected = {"a.w": np.zeros((6, 4), "f4"), "b.w": np.zeros((2, 6), "f4"), "half": half}
    arrays, _ = restore_arrays(tmp_path / "run", {("parameters", name): array for name, array in expected.items()})
    assert (arrays["parameters", "a.w"].reshape(6, 4) == weight.T.numpy()).all()
    assert (arrays["parameters", "b.w"].reshape(2, 6) == weight[1:3].numpy()).all()
    assert (arrays["parameters", "half"].view("i2") == weight.bfloat16().view(torch.int16).numpy().reshape(-1)).all()
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(StorageError, match="the keys of the dict are epoch"):
        import_checkpoint(tmp_path / "none.pt", tmp_path / "other")


def forged_file(header, body=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def one_tensor(**changes):
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


FORGED = {
    "the header of": (1 << 62).to_bytes(8, "little") + b"{}",
    "for a file of": b"",
    "not a JSON object": forged_file([]),
    "JSONDecodeError": forged_file(b"{"),
    "2 keys, but only 1 different keys": forged_file(b'{"w":{},"w":{}}'),
    "expected dtype": forged_file({"w": 3}),
    "is not supported": forged_file(one_tensor(dtype="F4")),
    "needs 16": forged_file(one_tensor(shape=[4])),
    "hole or an overlap": forged_file(one_tensor(data_offsets=[4, 12]), b"\0" * 12),
    "tensors end at byte": forged_file(one_tensor(), b"\0" * 9),
    "cannot be a name": forged_file({"../../w": one_tensor()["w"]}),
    r"shape \(-2,\)": forged_file(one_tensor(shape=[-2])),
    "must map names to strings": forged_file({"__metadata__": {"a": 1}}),
    "names 300000 tensors": forged_file(b"{" + b",".join(b'"%d":0' % k for k in range(300_000)) + b"}"),
    "names have 17920000 letters": forged_file(
        {f"{k:0512}": one_tensor(shape=[0], data_offsets=[0, 0])["w"] for k in range(35_000)}, b""
    ),
    "a/a/a.* cannot be a name": forged_file({"a/" * 20 + "w": one_tensor()["w"]}),
    "RecursionError": forged_file(b"[" * 100_000 + b"]" * 100_000),
}


@pytest.mark.parametrize("reason", FORGED)
@pytest.mark.full_except("needs 16")
def test_forged_headers_are_rejected(reason, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(FORGED[reason])
    with pytest.raises((StorageError), match=reason):
        import_checkpoint(tmp_path / "m.safetensors", tmp_path / "run")
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_index_with_a_path_outside_its_folder_is_rejected(tmp_path):
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../m.safetensors"}}))
    with pytest.raises(StorageError, match="expected names of files in its directory"):
        import_checkpoint(tmp_path, tmp_path / "run")


def test_file_truncated_during_import_is_an_error(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(forged_file(one_tensor()))
    with ForeignFile(tmp_path / "m.safetensors") as file:
        os.truncate(tmp_path / "m.safetensors", os.path.getsize(tmp_path / "m.safetensors") - 4)
        with pytest.raises(StorageError, match="8 bytes of tensor w were requested, but the file ends after 4"):
            save_into(tmp_path / "run", file)
    assert newest_intact_checkpoint(tmp_path / "run") is None


def save_into(run_dir, file):
    run_threads(1, lambda comm: save(run_dir / "checkpoints", 1, file.pieces(), {}, comm))


@pytest.mark.parametrize(("name", "code"), [("nothing.safetensors", 74), ("x.onnx", 2)])
def test_missing_or_unknown_files_are_rejected(name, code, tmp_path, capsys):
    if code == 2:
        (tmp_path / name).write_text("")
    assert invoke(capsys, "import", tmp_path / name, tmp_path / "run")[0] == code


def write_foreign_file(path, tensors):
    """Write a safetensors file as another program would."""
    header, data = {}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(("kind", "shape"), [("mlp", (40, 6)), ("convnet", (40, 8, 8))])
@pytest.mark.full_except("convnet-shape1")
def test_models_sized_by_data_are_imported_with_their_recipe(kind, shape, tmp_path, rng, capsys):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = rng.standard_normal(shape).astype("f4"), np.arange(40) % 3
    keys = {"model.kind": kind, "data.path": tmp_path / "data.h5", "run.global_batch": 8, "run.steps": 2}
    recipe = recipe_of(keys)
    inputs = data.open_source(recipe.data, recipe.model, solo()).inputs
    segments = models.build(recipe.model, **inputs).layout.segments
    tensors = {one.key: rng.standard_normal(one.spec.shape).astype("f4") for one in segments}
    write_foreign_file(tmp_path / "theirs.safetensors", tensors)
    (tmp_path / "recipe.toml").write_text(recipes.dump(recipe))
    line = ("import", tmp_path / "theirs.safetensors", tmp_path / "run", "--recipe", tmp_path / "recipe.toml")
    code, _, err = invoke(capsys, *line)
    assert code == 0, err
    trained = inference.load(solo(), tmp_path / "run", recipe)
    assert trained.scalars["model_inputs"] == inputs
    assert all(trained.parameters.range(one.range).tobytes() == tensors[one.key].tobytes() for one in segments)
    tensors[segments[0].key] = np.zeros((1, 2), "f4")
    write_foreign_file(tmp_path / "theirs.safetensors", tensors)
    code, _, err = invoke(capsys, *line[:2], tmp_path / "other", *line[3:])
    assert code == 78 and f"{segments[0].key} has the shape [1, 2]" in err
