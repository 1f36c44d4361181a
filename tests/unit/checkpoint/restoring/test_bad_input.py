"""`hpcdist train` and `hpcdist checkpoint` on invalid and damaged directories."""

import json
import os
import re
import shutil
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import xxhash

from harness.inputs import flip_bit, newest_intact_checkpoint
from harness.jobs import call_command
from harness.marks import cases
from harness.trainings import recipe_of, trainer_of
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint import listing, manifest
from hpcdist.checkpoint.directory import LATEST
from hpcdist.checkpoint.lock import RunLock
from hpcdist.checkpoint.restoring.restore import newest_complete, on_first_rank
from hpcdist.checkpoint.two_phase import save
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, HpcdistError, MissingCapabilityError, StorageError
from hpcdist.training import inference, run_directory
from hpcdist.training.build.state_source import CheckpointSource, from_intact_source
from hpcdist.training.run.saving import CheckpointSaver

Keys = dict[str, Any]

SMALL = {"model.layers": 1, "model.hidden": 8, "model.heads": 2, "data.context": 4, "run.global_batch": 8}


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    return {**SMALL, "data.path": tmp_path / "text.txt"}


@pytest.fixture
def run(tmp_path, keys):
    """A run with two checkpoints."""
    result = run_directory.prepare_run_directory(solo(), recipe_of(keys), tmp_path / "run", "auto").path
    trainer = trainer_of(solo(), keys)
    for step in (3, 4):
        CheckpointSaver(trainer, result / "checkpoints").save(step)
    return result


def resume(run, keys, lock=None):
    """Return the checkpoint that a start resumes from: the newest complete one with intact bytes."""
    result = run_directory.prepare_run_directory(solo(), recipe_of(keys), run, "auto", lock).resume_from
    if result is None:
        return None
    origin = from_intact_source(solo(), run, CheckpointSource(result), lambda one: trainer_of(solo(), keys, one.path))[
        1
    ]
    return origin.path


def write_newer_schema(path):
    body = json.loads((path / manifest.FILE_NAME).read_text())
    (path / manifest.FILE_NAME).write_text(json.dumps(body | {"version": manifest.VERSION + 1}))


def truncate_shard(path):
    shard = next(path.glob("shard-*.h5"))
    shard.write_bytes(shard.read_bytes()[:-100])


def flip_data_byte(path):
    entry = manifest.load(path).pieces[0]
    flip_bit(path / entry.file, entry.offset)


DAMAGE = {
    "no manifest": (lambda path: (path / manifest.FILE_NAME).unlink(), "manifest.json is missing"),
    "truncated manifest": (lambda path: (path / manifest.FILE_NAME).write_text("{"), "manifest.json cannot be read"),
    "truncated shard": (truncate_shard, r"bytes, the manifest says \d+"),
    "no shard": (lambda path: next(path.glob("shard-*.h5")).unlink(), "No such file"),
    "a flipped bit": (flip_data_byte, "are damaged: the digest does not match"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.full_except("truncated manifest")
def test_resume_from_a_damaged_checkpoint_uses_the_one_before(damage, run, keys, capfd):
    spoil, output = DAMAGE[damage]
    spoil(run / "checkpoints" / "step-4")
    assert resume(run, keys) == run / "checkpoints" / "step-3"
    stderr = capfd.readouterr().err
    assert "step-4 is skipped: " in stderr and re.search(output, stderr)
    spoil(run / "checkpoints" / "step-3")
    with pytest.raises(
        StorageError, match=r"none of them can be used.*--init-from \S+step-4 --allow-partial"
    ) as caught:
        resume(run, keys)
    assert caught.value.exit_code == 74
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / "step-4.tmp").mkdir(parents=True)
    assert resume(run, keys) is None, "a run without any complete checkpoint starts from the beginning"


def test_checkpoint_of_a_newer_version_is_rejected_and_kept(run, keys, capsys):
    write_newer_schema(run / "checkpoints" / "step-4")
    output = f"step-4.* has version {manifest.VERSION + 1}, expected 1 to .*update hpcdist"
    with pytest.raises(StorageError, match=output) as caught:
        resume(run, keys)
    assert caught.value.exit_code == 74

    def body(comm):
        with pytest.raises(StorageError, match=output):
            newest_complete(run, comm)

    run_threads(3, body)
    assert call_command(capsys, "checkpoint", "prune", run, "--damaged", "--keep", "1")[0] == 0
    assert (run / "checkpoints" / "step-4").is_dir()
    assert re.search(r"step-4 .* newer: .*update hpcdist", call_command(capsys, "checkpoint", "ls", run)[1])


NESTED = "[" + "[]," * 300_000 + "[]]"


@pytest.mark.parametrize("place", ["scalars", "about", "another", "pieces", "not sealed", "many bytes"])
@pytest.mark.full_except("many bytes")
def test_oversized_manifest_is_rejected_with_little_memory(place, run, monkeypatch, capsys):
    """Nested JSON needs 25 bytes of memory per byte. The test scales the limits of 16 and 4 MiB down."""
    monkeypatch.setattr(manifest, "MIN_LIMIT_BYTES", 1 << 19)
    monkeypatch.setattr(manifest, "MAX_FREE_FORM_BYTES", 1 << 16)
    path = run / "checkpoints" / "step-4"
    file, shard = path / manifest.FILE_NAME, next(path.glob("shard-*.h5"))
    body = json.loads(file.read_text())
    body.pop("digest")
    if place != "many bytes":
        os.truncate(shard, 1 << 21)  # a sparse file, so that a manifest of this size would be plausible
    if place in ("scalars", "about"):
        body[place]["x"] = "nested"
    elif place == "pieces":
        body[place][0]["x"] = "nested"
    else:
        body["zzz"] = "nested"
    text = json.dumps(body) if place == "not sealed" else manifest.seal(body)[:-46] + "}"
    text = text.replace('"nested"', NESTED)
    if place != "not sealed":
        text = f'{text[:-1]},"digest":"{xxhash.xxh3_128_hexdigest(text.encode())}"}}\n'
    file.write_text(text)
    tracemalloc.start()
    result = listing.inspect(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * len(text), "more memory than the text, one copy, and the parsed fields"
    if place in ("another", "pieces"):
        assert "bytes, the manifest says" in result.reason, "an unknown field must be skipped"
    else:
        output = r"(expected|not a JSON value of) at most \d+( bytes)?"
        assert result.manifest is None and re.search(output, result.reason)
    assert call_command(capsys, "checkpoint", "show", path)[0] == (0 if place in ("another", "pieces") else 74)


def test_manifest_of_many_small_pieces_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "MIN_LIMIT_BYTES", 1 << 10)
    pieces = [Piece.whole("parameters", f"{n}.{'x' * (n % 200)}", np.zeros(n % 2)) for n in range(400)]
    path = save(tmp_path / "checkpoints", 1, pieces, {}, solo())
    assert len(manifest.load(path).pieces) == 400
    assert (path / manifest.FILE_NAME).stat().st_size > 100 << 10


def test_oversized_scalars_are_rejected_at_save(tmp_path):
    scalars = {"x": "y" * manifest.MAX_FREE_FORM_BYTES}
    with pytest.raises(StorageError, match="was not saved: scalars takes .* bytes; a checkpoint allows at most"):
        save(tmp_path / "checkpoints", 1, [Piece.whole("parameters", "w", np.zeros(3))], scalars, solo())


def test_only_one_rank_reads_the_manifest(run, keys, monkeypatch):
    readers, read = [], manifest._read
    monkeypatch.setattr(manifest, "_read", lambda path: (readers.append(threading.current_thread()), read(path))[1])
    path = run / "checkpoints" / "step-4"
    run_threads(3, lambda comm: trainer_of(comm, keys | {"run.global_batch": 9}, path))
    assert len(set(readers)) == 1 and len(readers) == 2, "expected reads for the scalars and for the tensors only"
    readers.clear()
    recipe = recipe_of(keys)
    run_threads(3, lambda comm: inference.load(comm, run, recipe))
    assert len(set(readers)) == 1

    def raise_gone(_):
        raise OSError("gone")

    monkeypatch.setattr(manifest, "_read", raise_gone)

    def body(comm):
        with pytest.raises(StorageError, match="gone"):
            trainer_of(comm, keys | {"run.global_batch": 9}, path)

    run_threads(3, body)


def test_invalid_latest_file_is_ignored(run, keys):
    """The file is only for people and scripts. The next checkpoint writes it again."""
    (run / "checkpoints" / LATEST).write_text("")
    assert resume(run, keys) == run / "checkpoints" / "step-4"
    CheckpointSaver(trainer_of(solo(), keys, run / "checkpoints" / "step-4"), run / "checkpoints").save(5)
    assert (run / "checkpoints" / LATEST).read_text() == "step-5\n" and newest_intact_checkpoint(
        run
    ) == run / "checkpoints" / "step-5"
    (run / "checkpoints" / LATEST).write_text("../../../etc\n")
    assert resume(run, keys) == run / "checkpoints" / "step-5"


def test_checkpoint_of_another_model_size_is_rejected(run, keys):
    wider = keys | {"model.hidden": 16}
    with pytest.raises(ConfigurationError, match=r"holds another run: model.hidden = 8 there, 16 now") as refused:
        resume(run, wider)
    assert refused.value.exit_code == 78
    path = run / "checkpoints" / "step-4"
    shapes = r"parameters/0\.\w+\.weight is float32\[\d+, 8\], expected float32\[\d+, 16\]"
    for ranks in (1, 2):
        with pytest.raises(StorageError, match=shapes) as caught:
            run_threads(ranks, lambda comm: trainer_of(comm, wider, path))
        assert caught.value.exit_code == 74


@cases(
    "make, code",
    (lambda path: path.write_text("a file"), 74),
    (lambda path: (path.mkdir(), (path / "mine.txt").write_text("thesis")), 78),
    ids=["a file", "somebody's directory"],
)
def test_directory_without_a_run_is_rejected_and_kept(make, code, tmp_path, keys):
    place = tmp_path / "place"
    make(place)
    with pytest.raises(HpcdistError) as caught:
        resume(place, keys)
    assert caught.value.exit_code == code and "--out" in str(caught.value)
    assert place.is_file() or [path.name for path in place.iterdir()] == ["mine.txt"]


def test_second_job_in_one_directory_is_rejected(run, keys):
    first, second = RunLock(), RunLock()
    resume(run, keys, first)
    with pytest.raises(StorageError, match="is being written by process") as caught:
        resume(run, keys, second)
    assert caught.value.exit_code == 74
    first.release()


def test_other_names_next_to_checkpoints_are_ignored(run, keys):
    for name in ("step-", "step-x", "step-5.old", "step--1", "STEP-9", "step-9"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "step-8").write_text("a file")
    assert resume(run, keys) == run / "checkpoints" / "step-4", "step-9 is empty"


@pytest.mark.parametrize("command", ["show", "verify", "ls", "prune"])
@pytest.mark.parametrize("place", ["missing", "empty", "foreign"])
def test_commands_on_a_directory_without_a_run(command, place, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign" / "checkpoints").mkdir(parents=True)
    (tmp_path / "foreign" / "checkpoints" / "model.pt").write_bytes(b"PK")
    code, _, err = call_command(capsys, "checkpoint", command, tmp_path / place)
    listed = command in ("ls", "verify") and place == "foreign"  # commands that list may find no checkpoints
    assert code == (0 if listed else 74), err
    assert [path.name for path in (tmp_path / "foreign" / "checkpoints").iterdir()] == ["model.pt"]


def test_save_into_a_file_path_is_rejected(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        save(tmp_path / "checkpoints", 1, [Piece.whole("parameters", "w", np.zeros(3))], {}, solo())


@pytest.mark.parametrize("kind", [ConfigurationError, MissingCapabilityError, StorageError])
def test_error_on_the_first_rank_is_raised_on_all_ranks(kind):
    def raise_error():
        raise kind("no")

    def body(comm):
        with pytest.raises(kind, match="no"):
            on_first_rank(comm, raise_error)

    run_threads(2, body, deadline_s=30)
