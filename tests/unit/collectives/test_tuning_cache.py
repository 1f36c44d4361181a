"""The tuning cache: stored measurements, and every reason to reject a file."""

import json
import os
import pwd
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from harness.marks import cases
from hpcdist.collectives import tuning_cache
from hpcdist.collectives.cost_model import LinkParameters, MachineCosts
from hpcdist.collectives.tuning_cache import Tuning, TuningRow, load, path_of, read, save
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import StorageError
from hpcdist.reporting import user_cache

KEY = {
    "ranks": 4,
    "ranks_per_node": [2, 2],
    "hosts": ["a processor; 2 cores; no InfiniBand device"],
    "mpi_library": "an MPI",
    "settings": {},
    "kind": "allreduce",
    "dtype": "float32",
    "buffer": "host",
    "max_bytes": 4096,
    "software": {"hpcdist": "1"},
}
TUNED = Tuning(
    "recursive_doubling<=4096,ring",
    (TuningRow(64, {"ring": 2e-6}, {"native": 1e-6, "ring": 2e-6}, "native"), TuningRow(4096, {}, {}, "native")),
    MachineCosts({"node": LinkParameters(1e-6, 1e-10)}, 1e-11),
    0.5,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hpcdist" / "tuning"


def overwrite_fields(**content):
    """Overwrite fields in the file of KEY."""
    path = path_of(KEY)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | content))


def rejection_reason():
    result, reason = read(KEY, 0.0)
    assert result is None
    assert "\n" not in reason
    return reason


def test_saved_result_is_read_back(folder):
    assert save(TUNED, KEY) == TUNED
    result, reason = read(KEY, 0.0)
    assert reason == ""
    assert result is not None and result.source == "cache"
    assert (result.text, result.rows, result.machine, result.seconds) == (TUNED.text, TUNED.rows, TUNED.machine, 0.5)
    assert [path.suffix for path in folder.iterdir()] == [".json"], "an unfinished file is left"
    assert stat.S_IMODE(path_of(KEY).stat().st_mode) & 0o077 == 0


def test_missing_file_gives_no_reason():
    assert read(KEY, 0.0) == (None, "")


@pytest.mark.parametrize("name", [name for name in KEY if name not in ("software", "max_bytes")])
def test_each_key_field_selects_another_file(name):
    save(TUNED, KEY)
    assert read(KEY | {name: "other"}, 0.0) == (None, "")


def test_table_is_valid_up_to_its_largest_size():
    save(TUNED, KEY)
    assert read(KEY | {"max_bytes": 64}, 0.0)[0] is not None
    result, reason = read(KEY | {"max_bytes": 4097}, 0.0)
    assert result is None and "reaches 4096 bytes, and this job has buffers of 4097" in reason
    overwrite_fields(key=KEY | {"max_bytes": "far"})
    assert "reaches far bytes" in rejection_reason()


@pytest.mark.parametrize(("then", "now", "is_used"), [(0.6, 0.2, False), (0.6, 0.3, True), (0.4, 0.0, True)])
def test_result_of_a_busy_machine_is_not_used_on_an_idle_one(then, now, is_used):
    save(replace(TUNED, load=then), KEY)
    result, reason = read(KEY, now)
    assert (result is not None, "on a busy machine" in reason) == (is_used, not is_used)


def test_sharded_result_is_valid_for_one_size():
    save(TUNED, KEY | {"kind": "sharded"})
    assert read(KEY | {"kind": "sharded"}, 0.0)[0] is not None
    assert read(KEY | {"kind": "sharded", "max_bytes": 64}, 0.0) == (None, "")


def test_result_of_other_software_is_replaced():
    save(TUNED, KEY)
    newer = KEY | {"software": {"hpcdist": "2"}}
    result, reason = read(newer, 0.0)
    assert result is None and "measured with" in reason
    save(TUNED, newer)
    assert read(newer, 0.0)[0] is not None
    assert read(KEY, 0.0)[0] is None


def test_file_copied_from_other_hosts_is_not_used():
    save(TUNED, KEY)
    other = KEY | {"hosts": ["another processor"]}
    path_of(KEY).rename(path_of(other))
    result, reason = read(other, 0.0)
    assert result is None and "for other hosts" in reason


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "1", '"text"', "{}", "\x00", '{"format": 2}', "[" * 100_000, "é", '{"format": 1e999}'],
)
def test_damaged_file_is_not_used(text):
    save(TUNED, KEY)
    path_of(KEY).write_bytes(text.encode("latin-1"))
    assert "is not used" in rejection_reason()


@cases(
    "content",
    {"text": "nothing"},
    {"text": "ring<=4"},
    {"text": 5},
    {"text": ["ring"]},
    {"rows": 5},
    {"rows": [{"nbytes": "x"}]},
    {"rows": [{"nbytes": float("inf"), "predicted": {}, "measured": {}, "chosen": "ring"}]},
    {"rows": [{"nbytes": 1, "predicted": [], "measured": {}, "chosen": "ring"}]},
    {"machine": {}},
    {"machine": {"links": {"node": [1]}, "reduce_s_per_byte": 1}},
    {"seconds": "soon"},
    {"load": "high"},
    {"format": 1},
    {"key": 5},
    {"key": KEY | {"more": 1}},
)
def test_file_with_invalid_fields_is_not_used(content):
    save(TUNED, KEY)
    overwrite_fields(**content)
    assert "is not used" in rejection_reason()


@pytest.mark.parametrize("mode", [0o622, 0o606, 0o620])
def test_file_writable_by_others_is_not_used(mode):
    save(TUNED, KEY)
    path_of(KEY).chmod(mode)
    assert "another user could have written the cache or state file" in rejection_reason()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_not_used():
    save(TUNED, KEY)
    os.chown(path_of(KEY), 12345, 12345)
    assert "another user could have written the cache or state file" in rejection_reason()


def test_link_directory_and_pipe_are_not_read(tmp_path):
    save(TUNED, KEY)
    path = path_of(KEY)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "is not used" in rejection_reason()
    path.unlink()
    path.mkdir()
    assert "is not used" in rejection_reason()
    path.rmdir()
    os.mkfifo(path)  # opening a pipe to read would wait for a writer
    assert "not a regular file" in rejection_reason()


def test_oversized_file_is_not_read():
    save(TUNED, KEY)
    path_of(KEY).write_text(" " * (user_cache.LARGEST_BYTES + 1))
    assert "expected at most" in rejection_reason()


def test_unwritable_cache_directory_is_only_noted(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = save(TUNED, KEY)
    assert result.text == TUNED.text
    assert "not kept" in result.note


def test_clear_removes_everything(folder):
    save(TUNED, KEY)
    save(TUNED, KEY | {"ranks": 5})
    assert tuning_cache.clear() == 2
    assert list(folder.iterdir()) == []
    assert read(KEY, 0.0) == (None, "")


def test_cache_directory_follows_the_environment():
    assert tuning_cache.directory({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/hpcdist/tuning")
    for ignored in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert tuning_cache.directory(ignored) == Path.home() / ".cache/hpcdist/tuning"


def test_user_without_a_home_directory_gets_a_note(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # the user has no entry, as in some containers
    assert read(KEY, 0.0) == (None, "")
    result = save(TUNED, KEY)
    assert result.text == TUNED.text
    assert "not kept" in result.note and "set HOME" in result.note
    with pytest.raises(StorageError, match="set HOME"):
        tuning_cache.clear()


def test_key_has_message_settings_but_no_job_settings(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_coll_tuned_priority", "90")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("OMPI_MCA_initial_wdir", "/somewhere")
    monkeypatch.setenv("OMPI_MCA_num_procs", "2")
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", "/dev/shm/of-this-job")  # set by `hpcdist run`
    keys = run_threads(2, lambda comm: tuning_cache.key(comm, (2,), "an MPI", "allreduce", "float32", "host", 64), None)
    assert keys[0] == keys[1]
    assert set(keys[0]) == set(KEY)
    assert {"OMPI_MCA_coll_tuned_priority", "UCX_TLS"} <= set(keys[0]["settings"])
    of_job = {"OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "OMPI_MCA_btl_sm_backing_directory"}
    assert not of_job & set(keys[0]["settings"])
    assert set(keys[0]["software"]) == {"hpcdist", "mpi4py", "numpy"}
    path = path_of(keys[0])
    result = save(TUNED, keys[0])
    assert load(path)[1].text == result.text
