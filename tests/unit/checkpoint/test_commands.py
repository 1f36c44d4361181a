"""`hpcdist checkpoint`: the view of people and scripts on the checkpoints of a run."""

import json
import os
from contextlib import suppress
from dataclasses import replace

import h5py
import numpy as np
import pytest

from harness.inputs import flip_bit
from harness.jobs import call_command
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.directory import VAL_LOSS
from hpcdist.checkpoint.listing import verify
from hpcdist.checkpoint.restoring.restore import newest_complete
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads


def invoke(capsys, *arguments):
    """Run a checkpoint command. Return its exit code, stdout and stderr."""
    return call_command(capsys, "checkpoint", *arguments)


def invoke_json(capsys, *arguments):
    code, out, err = invoke(capsys, *arguments, "--json")
    return code, json.loads(out), err


@pytest.fixture
def run(tmp_path, rng):
    """A run of two ranks with checkpoints of steps 10, 20 and 30."""
    weight = rng.standard_normal((6, 4)).astype("f4")

    def body(comm):
        for step, loss in ((10, 1.0), (20, 3.0), (30, 2.0)):
            flat = Range(12 * comm.rank, 12 * comm.rank + 12)
            pieces = [
                Piece(kind, "3.w", (6, 4), whole_box((6, 4)), flat, weight.reshape(-1)[flat.slice].copy())
                for kind in ("parameters", "optimizer.m")
            ]
            save(tmp_path / "run/checkpoints", step, pieces, {"steps": step, VAL_LOSS: loss}, comm, 9)

    run_threads(2, body)
    return tmp_path / "run"


def damage(path):
    entry = manifest.load(path).pieces[0]
    flip_bit(path / entry.file, entry.offset)
    return entry


def test_ls_lists_complete_and_incomplete_checkpoints(run, capsys):
    (run / "checkpoints/step-40.tmp").mkdir()
    os.truncate(run / "checkpoints/step-20/shard-00001.h5", 100)
    flip_bit(run / "checkpoints/step-10/manifest.json", 50)
    code, result, _ = invoke_json(capsys, "ls", run)
    states = {one["step"]: (one["state"], one["reason"]) for one in result["checkpoints"]}
    assert code == 0 and list(states) == [40, 30, 20, 10], "expected the newest first"
    assert states[30] == ("complete", "") and result["checkpoints"][1]["ranks"] == 2
    assert states[40][0] == "unfinished" and states[10][0] == states[20][0] == "damaged"
    assert "shard-00001.h5 has 100 bytes" in states[20][1] and "manifest.json" in states[10][1]
    code, shown, _ = invoke(capsys, "ls", run)
    assert code == 0 and shown.splitlines()[0].startswith("step-40.tmp") and "2 ranks" in shown.splitlines()[1]


def test_show_of_a_run_shows_its_newest_checkpoint(run, capsys):
    code, result, _ = invoke_json(capsys, "show", run, "--tensors")
    assert code == 0 and result["step"] == 30 and result["scalars"]["steps"] == 30
    assert result["kinds"]["parameters"] == {"tensors": 1, "elements": 24, "bytes": 96}
    one = {"kind": "parameters", "name": "3.w", "dtype": "float32", "shape": [6, 4], "bytes": 96}
    assert result["tensors"][0] == one
    shown = invoke(capsys, "show", run / "checkpoints/step-10", "--tensors")[1]
    assert "after 10 steps" in shown and "3.w" in shown and "[6, 4]" in shown


def test_verify_names_all_damage(run, capsys):
    assert invoke(capsys, "verify", run)[0] == 0
    path = run / "checkpoints/step-20"
    entries = [entry for entry in manifest.load(path).pieces if entry.kind == "parameters"]
    for entry in entries:
        flip_bit(path / entry.file, entry.offset)
    code, result, _ = invoke_json(capsys, "verify", run)
    by_step = {one["path"].rpartition("-")[2]: one for one in result["checkpoints"]}
    assert code == 1 and result["damaged"] and by_step["10"]["damage"] == by_step["30"]["damage"] == []
    assert len(by_step["20"]["damage"]) == 2
    for entry, line in zip(entries, sorted(by_step["20"]["damage"]), strict=True):
        assert entry.file in line and "parameters/3.w" in line
    whole = sum(file.stat().st_size for file in (run / "checkpoints/step-30").glob("*.h5"))
    assert by_step["30"]["read_bytes"] == whole and not by_step["30"]["not_covered"]
    (path / entries[0].file).unlink()
    code, result, _ = invoke_json(capsys, "verify", path)
    assert code == 1 and any("cannot be read" in line for line in result["checkpoints"][0]["damage"])


def test_verify_covers_the_index_file(run, capsys):
    flip_bit(run / "checkpoints/step-30/index.h5", 1000)
    code, result, _ = invoke_json(capsys, "verify", run / "checkpoints/step-30")
    assert code == 1 and ["index.h5 is damaged" in line for line in result["checkpoints"][0]["damage"]] == [True]
    (run / "checkpoints/step-30/index.h5").unlink()
    os.mkfifo(run / "checkpoints/step-30/index.h5")  # a pipe without a writer
    code, result, _ = invoke_json(capsys, "verify", run / "checkpoints/step-30")
    assert code == 1 and ["not a regular file" in line for line in result["checkpoints"][0]["damage"]] == [True]


def test_verify_detects_any_flipped_bit(run, rng):
    path = run / "checkpoints/step-30"
    assert not verify(path).damage
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        places = [place for place in rng.integers(0, len(data), 150).tolist() if data[place]]
        for place in [0, len(data) - 1, *places, *rng.integers(0, len(data), 30).tolist()]:
            flip_bit(file, place)
            assert any(file.name in line for line in verify(path).damage), f"byte {place} of {file.name}"
            file.write_bytes(data)


def test_index_does_not_read_damaged_dataset_addresses(run):
    """Without checksums of its metadata, HDF5 would read other bytes if the address of a dataset is damaged."""
    path, places = run / "checkpoints/step-30", 0
    for entry in manifest.load(path).pieces:
        file = path / entry.file
        data, address = file.read_bytes(), entry.offset.to_bytes(8, "little")
        start = data.find(address)
        while start >= 0:
            flip_bit(file, start)
            with suppress(OSError, KeyError), h5py.File(path / "index.h5") as index:
                assert np.isnan(index[entry.name][...]).any(), "wrong data was read"
            file.write_bytes(data)
            places, start = places + 1, data.find(address, start + 1)
    assert places >= len(manifest.load(path).pieces)


def test_verify_of_earlier_versions_lists_parts_without_digest(run, capsys):
    path = run / "checkpoints/step-30"
    loaded = manifest.load(path)
    body = json.loads(manifest.encode(loaded))
    body = {name: body[name] for name in body if name not in ("outside", "unused", "digest")}
    (path / manifest.FILE_NAME).write_text(manifest.seal(body))
    assert manifest.load(path) == replace(loaded, outside={})
    code, result, _ = invoke_json(capsys, "verify", path)
    output = result["checkpoints"][0]
    assert code == 0 and not output["damage"] and output["not_covered"] == ["HDF5's own bytes in 2 shards"]
    del body["about"], body["index"]  # version 1 had another order and no index
    body["version"] = 1
    digest = manifest.digest_of(body)
    (path / manifest.FILE_NAME).write_text(json.dumps({"world": 2, **body, "digest": digest}) + "\n")
    assert manifest.load(path) == replace(loaded, outside={}, index=None, version=1)
    assert invoke_json(capsys, "verify", path)[1]["checkpoints"][0]["not_covered"][1] == "index.h5"
    (path / manifest.FILE_NAME).write_text(json.dumps(body | {"digest": digest, "step": 31}))
    assert "its digest does not match" in invoke(capsys, "verify", path)[1]


@pytest.mark.parametrize("swapped", ["", "manifest.json"])
def test_swapped_files_of_two_steps_are_detected(swapped, run, tmp_path, capsys):
    one, other = run / "checkpoints/step-30" / swapped, run / "checkpoints/step-10" / swapped
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    code, result, _ = invoke_json(capsys, "ls", run)
    states = {one["path"].rpartition("-")[2]: (one["state"], one["reason"]) for one in result["checkpoints"]}
    reason = "its manifest is of step "
    assert states == {"30": ("damaged", f"{reason}10"), "20": ("complete", ""), "10": ("damaged", f"{reason}30")}
    code, out, _ = invoke(capsys, "verify", run)
    assert code == 1 and f"{reason}10" in out and f"{reason}30" in out
    code, _, err = invoke(capsys, "export", run / "checkpoints/step-30", tmp_path / "out.safetensors")
    assert code == 74 and f"step-30 is damaged: {reason}10" in err and not (tmp_path / "out.safetensors").exists()
    assert newest_complete(run) == run / "checkpoints/step-20"


def test_unfinished_checkpoint_is_not_damaged(run, capsys):
    (run / "checkpoints/step-40.tmp").mkdir()
    assert invoke(capsys, "verify", run)[0] == 0
    (run / "checkpoints/step-30/manifest.json").unlink()
    assert invoke(capsys, "verify", run)[0] == 1


@pytest.mark.parametrize("name", ("ls", "show", "verify", "prune"))
def test_commands_without_checkpoints_are_rejected(name, tmp_path, capsys):
    code, out, err = invoke(capsys, name, tmp_path / "nowhere")
    assert code == 74 and not out and "has no checkpoints" in err


def remaining_steps(run):
    return sorted(name for name in os.listdir(run / "checkpoints") if name.startswith("step"))


def test_prune_keeps_checkpoints_by_its_options(run, capsys):
    code, result, _ = invoke_json(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert code == 0 and [path.rpartition("/")[2] for path in result["removed"]] == ["step-20", "step-10"]
    assert remaining_steps(run) == ["step-10", "step-20", "step-30"]
    assert invoke(capsys, "prune", run, "--keep", 1, "--keep-best", 1)[0] == 0
    assert remaining_steps(run) == ["step-10", "step-30"]


def test_prune_does_not_count_damaged_checkpoints(run, capsys):
    damage(run / "checkpoints/step-30")  # the file sizes stay correct: only a read detects the damage
    (run / "checkpoints/step-40.tmp").mkdir()
    assert invoke(capsys, "prune", run, "--keep", 1)[0] == 0
    assert remaining_steps(run) == ["step-20", "step-30", "step-40.tmp"]
    assert invoke(capsys, "prune", run, "--keep", 1, "--damaged")[0] == 0
    assert remaining_steps(run) == ["step-20", "step-40.tmp"]
    damage(run / "checkpoints/step-20")
    code, _, err = invoke(capsys, "prune", run, "--keep", 1, "--damaged")
    assert code == 74 and "nothing is removed" in err and "step-20" in remaining_steps(run)


def test_usage_errors_exit_with_2(run, capsys):
    assert invoke(capsys, "prune", run, "--keep", 0)[0] == 2
    assert invoke(capsys, "ls")[0] == 2
    assert invoke(capsys, "no-such-command")[0] == 2


def test_directory_without_manifest_is_rejected(tmp_path, capsys):
    (tmp_path / "step-1").mkdir()
    assert invoke(capsys, "show", tmp_path / "step-1")[0] == 74
    assert "manifest.json is missing" in invoke(capsys, "show", tmp_path / "step-1")[2]
    (tmp_path / "file").write_text("")
    assert invoke(capsys, "ls", tmp_path / "file")[0] == 74
    assert os.listdir(tmp_path / "step-1") == []
