"""`hpcdist checkpoint`: what people and scripts see of the checkpoints of a run."""

import json
import os
from contextlib import suppress
from dataclasses import replace

import h5py
import numpy as np
import pytest

from harness.inputs import flip
from harness.jobs import called
from hpcdist.arrays.piece import Piece, whole_box
from hpcdist.arrays.ranges import Range
from hpcdist.checkpoint.directory import VAL_LOSS
from hpcdist.checkpoint.format import manifest
from hpcdist.checkpoint.restoring.restore import newest_complete
from hpcdist.checkpoint.saving.two_phase import save
from hpcdist.checkpoint.verify import verify
from hpcdist.comm.threads.communicator import run_threads


def hpcdist(capsys, *arguments):
    """Run a command; return its exit code, what it printed, and what it said beside."""
    return called(capsys, "checkpoint", *arguments)


def figures(capsys, *arguments):
    code, out, err = hpcdist(capsys, *arguments, "--json")
    return code, json.loads(out), err


@pytest.fixture
def run(tmp_path, rng):
    """A run with the checkpoints of steps 10, 20 and 30, of two ranks."""
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
    flip(path / entry.file, entry.offset)
    return entry


def test_ls_tells_what_is_complete_and_what_is_not(run, capsys):
    (run / "checkpoints/step-40.tmp").mkdir()
    os.truncate(run / "checkpoints/step-20/shard-00001.h5", 100)
    flip(run / "checkpoints/step-10/manifest.json", 50)
    code, found, _ = figures(capsys, "ls", run)
    states = {one["step"]: (one["state"], one["reason"]) for one in found["checkpoints"]}
    assert code == 0 and list(states) == [40, 30, 20, 10], "the newest first"
    assert states[30] == ("complete", "") and found["checkpoints"][1]["ranks"] == 2
    assert states[40][0] == "unfinished" and states[10][0] == states[20][0] == "damaged"
    assert "shard-00001.h5 has 100 bytes" in states[20][1] and "manifest.json" in states[10][1]
    code, shown, _ = hpcdist(capsys, "ls", run)
    assert code == 0 and shown.splitlines()[0].startswith("step-40.tmp") and "2 ranks" in shown.splitlines()[1]


def test_show_of_a_run_is_its_newest(run, capsys):
    code, found, _ = figures(capsys, "show", run, "--tensors")
    assert code == 0 and found["step"] == 30 and found["scalars"]["steps"] == 30
    assert found["kinds"]["parameters"] == {"tensors": 1, "elements": 24, "bytes": 96}
    one = {"kind": "parameters", "name": "3.w", "dtype": "float32", "shape": [6, 4], "bytes": 96}
    assert found["tensors"][0] == one
    shown = hpcdist(capsys, "show", run / "checkpoints/step-10", "--tensors")[1]
    assert "after 10 steps" in shown and "3.w" in shown and "[6, 4]" in shown


def test_verify_names_all_damage(run, capsys):
    assert hpcdist(capsys, "verify", run)[0] == 0
    path = run / "checkpoints/step-20"
    entries = [entry for entry in manifest.load(path).pieces if entry.kind == "parameters"]
    for entry in entries:
        flip(path / entry.file, entry.offset)
    code, found, _ = figures(capsys, "verify", run)
    by_step = {one["path"].rpartition("-")[2]: one for one in found["checkpoints"]}
    assert code == 1 and found["damaged"] and by_step["10"]["damage"] == by_step["30"]["damage"] == []
    assert len(by_step["20"]["damage"]) == 2
    for entry, line in zip(entries, sorted(by_step["20"]["damage"]), strict=True):
        assert entry.file in line and "parameters/3.w" in line
    whole = sum(file.stat().st_size for file in (run / "checkpoints/step-30").glob("*.h5"))
    assert by_step["30"]["read_bytes"] == whole and not by_step["30"]["not_covered"]
    (path / entries[0].file).unlink()
    code, found, _ = figures(capsys, "verify", path)
    assert code == 1 and any("cannot be read" in line for line in found["checkpoints"][0]["damage"])


def test_the_index_for_other_tools_is_verified_too(run, capsys):
    flip(run / "checkpoints/step-30/index.h5", 1000)
    code, found, _ = figures(capsys, "verify", run / "checkpoints/step-30")
    assert code == 1 and ["index.h5 is damaged" in line for line in found["checkpoints"][0]["damage"]] == [True]
    (run / "checkpoints/step-30/index.h5").unlink()
    os.mkfifo(run / "checkpoints/step-30/index.h5")  # which nobody writes to
    code, found, _ = figures(capsys, "verify", run / "checkpoints/step-30")
    assert code == 1 and ["not a regular file" in line for line in found["checkpoints"][0]["damage"]] == [True]


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(run, rng):
    path = run / "checkpoints/step-30"
    assert not verify(path).damage
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        places = [place for place in rng.integers(0, len(data), 150).tolist() if data[place]]
        for place in [0, len(data) - 1, *places, *rng.integers(0, len(data), 30).tolist()]:
            flip(file, place)
            assert any(file.name in line for line in verify(path).damage), f"byte {place} of {file.name}"
            file.write_bytes(data)


def test_damaged_places_of_tensors_are_not_read_through_the_index(run):
    """HDF5 would read other bytes where the address of a dataset is damaged, were it not for checksums of metadata."""
    path, places = run / "checkpoints/step-30", 0
    for entry in manifest.load(path).pieces:
        file = path / entry.file
        data, address = file.read_bytes(), entry.offset.to_bytes(8, "little")
        start = data.find(address)
        while start >= 0:
            flip(file, start)
            with suppress(OSError, KeyError), h5py.File(path / "index.h5") as index:
                assert np.isnan(index[entry.name][...]).any(), "read, and not what was saved"
            file.write_bytes(data)
            places, start = places + 1, data.find(address, start + 1)
    assert places >= len(manifest.load(path).pieces)


def test_what_earlier_versions_saved_is_complete_and_says_what_has_no_digest(run, capsys):
    path = run / "checkpoints/step-30"
    loaded = manifest.load(path)
    body = json.loads(manifest.encode(loaded))
    body = {name: body[name] for name in body if name not in ("outside", "unused", "digest")}
    (path / manifest.FILE_NAME).write_text(manifest.seal(body))
    assert manifest.load(path) == replace(loaded, outside={})
    code, found, _ = figures(capsys, "verify", path)
    told = found["checkpoints"][0]
    assert code == 0 and not told["damage"] and told["not_covered"] == ["HDF5's own bytes in 2 shards"]
    del body["about"], body["index"]  # as version 1 did, which had another order, and no index
    body["version"] = 1
    digest = manifest.digest_of(body)
    (path / manifest.FILE_NAME).write_text(json.dumps({"world": 2, **body, "digest": digest}) + "\n")
    assert manifest.load(path) == replace(loaded, outside={}, index=None, version=1)
    assert figures(capsys, "verify", path)[1]["checkpoints"][0]["not_covered"][1] == "index.h5"
    (path / manifest.FILE_NAME).write_text(json.dumps(body | {"digest": digest, "step": 31}))
    assert "its digest does not match" in hpcdist(capsys, "verify", path)[1]


@pytest.mark.parametrize("swapped", ["", "manifest.json"])
def test_steps_that_were_swapped_are_refused_as_a_restore_does(swapped, run, tmp_path, capsys):
    one, other = run / "checkpoints/step-30" / swapped, run / "checkpoints/step-10" / swapped
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    code, found, _ = figures(capsys, "ls", run)
    states = {one["path"].rpartition("-")[2]: (one["state"], one["reason"]) for one in found["checkpoints"]}
    reason = "its manifest is of step "
    assert states == {"30": ("damaged", f"{reason}10"), "20": ("complete", ""), "10": ("damaged", f"{reason}30")}
    code, out, _ = hpcdist(capsys, "verify", run)
    assert code == 1 and f"{reason}10" in out and f"{reason}30" in out
    code, _, err = hpcdist(capsys, "export", run / "checkpoints/step-30", tmp_path / "out.safetensors")
    assert code == 74 and f"step-30 is damaged: {reason}10" in err and not (tmp_path / "out.safetensors").exists()
    assert newest_complete(run) == run / "checkpoints/step-20"


def test_what_is_unfinished_is_no_damage(run, capsys):
    (run / "checkpoints/step-40.tmp").mkdir()
    assert hpcdist(capsys, "verify", run)[0] == 0
    (run / "checkpoints/step-30/manifest.json").unlink()
    assert hpcdist(capsys, "verify", run)[0] == 1


@pytest.mark.parametrize("name", ("ls", "show", "verify", "prune"))
def test_nothing_there(name, tmp_path, capsys):
    code, out, err = hpcdist(capsys, name, tmp_path / "nowhere")
    assert code == 74 and not out and "has no checkpoints" in err


def left(run):
    return sorted(name for name in os.listdir(run / "checkpoints") if name.startswith("step"))


def test_prune_keeps_what_the_options_say(run, capsys):
    code, found, _ = figures(capsys, "prune", run, "--keep", 1, "--dry-run")
    assert code == 0 and [path.rpartition("/")[2] for path in found["removed"]] == ["step-20", "step-10"]
    assert left(run) == ["step-10", "step-20", "step-30"]
    assert hpcdist(capsys, "prune", run, "--keep", 1, "--keep-best", 1)[0] == 0
    assert left(run) == ["step-10", "step-30"]


def test_prune_never_counts_what_cannot_be_restored(run, capsys):
    damage(run / "checkpoints/step-30")  # the sizes are right: only reading tells
    (run / "checkpoints/step-40.tmp").mkdir()
    assert hpcdist(capsys, "prune", run, "--keep", 1)[0] == 0
    assert left(run) == ["step-20", "step-30", "step-40.tmp"]
    assert hpcdist(capsys, "prune", run, "--keep", 1, "--damaged")[0] == 0
    assert left(run) == ["step-20", "step-40.tmp"]
    damage(run / "checkpoints/step-20")
    code, _, err = hpcdist(capsys, "prune", run, "--keep", 1, "--damaged")
    assert code == 74 and "nothing is removed" in err and "step-20" in left(run)


def test_usage(run, capsys):
    assert hpcdist(capsys, "prune", run, "--keep", 0)[0] == 2
    assert hpcdist(capsys, "ls")[0] == 2
    assert hpcdist(capsys, "no-such-command")[0] == 2


def test_not_a_checkpoint(tmp_path, capsys):
    (tmp_path / "step-1").mkdir()
    assert hpcdist(capsys, "show", tmp_path / "step-1")[0] == 74
    assert "manifest.json is missing" in hpcdist(capsys, "show", tmp_path / "step-1")[2]
    (tmp_path / "file").write_text("")
    assert hpcdist(capsys, "ls", tmp_path / "file")[0] == 74
    assert os.listdir(tmp_path / "step-1") == []
