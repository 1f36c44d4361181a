"""What is kept of a measurement, and every reason not to believe a file."""

import json
import os
import pwd
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from harness.marks import cases
from hpcdist.collectives.tuning import cache
from hpcdist.collectives.tuning.cache import Tuning, TuningRow, load, path_of, read, save
from hpcdist.collectives.tuning.cost_model import LinkParameters, MachineCosts
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


def changed(**content):
    """Write the file of KEY with other ``content``."""
    path = path_of(KEY)
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | content))


def refusal():
    found, reason = read(KEY, 0.0)
    assert found is None
    assert "\n" not in reason
    return reason


def test_what_is_kept_comes_back(folder):
    assert save(TUNED, KEY) == TUNED
    found, reason = read(KEY, 0.0)
    assert reason == ""
    assert found is not None and found.source == "cache"
    assert (found.text, found.rows, found.machine, found.seconds) == (TUNED.text, TUNED.rows, TUNED.machine, 0.5)
    assert [path.suffix for path in folder.iterdir()] == [".json"], "nothing unfinished is left"
    assert stat.S_IMODE(path_of(KEY).stat().st_mode) & 0o077 == 0


def test_nothing_kept_is_no_complaint():
    assert read(KEY, 0.0) == (None, "")


@pytest.mark.parametrize("name", [name for name in KEY if name not in ("software", "max_bytes")])
def test_each_part_of_the_key_has_a_file_of_its_own(name):
    save(TUNED, KEY)
    assert read(KEY | {name: "other"}, 0.0) == (None, "")


def test_a_table_is_for_all_sizes_up_to_its_greatest():
    save(TUNED, KEY)
    assert read(KEY | {"max_bytes": 64}, 0.0)[0] is not None
    found, reason = read(KEY | {"max_bytes": 4097}, 0.0)
    assert found is None and "reaches 4096 bytes, and this job has buffers of 4097" in reason
    changed(key=KEY | {"max_bytes": "far"})
    assert "reaches far bytes" in refusal()


@pytest.mark.parametrize(("then", "now", "is_used"), [(0.6, 0.2, False), (0.6, 0.3, True), (0.4, 0.0, True)])
def test_what_a_busy_machine_chose_is_chosen_again_on_an_idle_one(then, now, is_used):
    save(replace(TUNED, load=then), KEY)
    found, reason = read(KEY, now)
    assert (found is not None, "beside other work" in reason) == (is_used, not is_used)


def test_shards_are_for_one_size():
    save(TUNED, KEY | {"kind": "sharded"})
    assert read(KEY | {"kind": "sharded"}, 0.0)[0] is not None
    assert read(KEY | {"kind": "sharded", "max_bytes": 64}, 0.0) == (None, "")


def test_other_software_is_stale_and_replaced():
    save(TUNED, KEY)
    newer = KEY | {"software": {"hpcdist": "2"}}
    found, reason = read(newer, 0.0)
    assert found is None and "measured with" in reason
    save(TUNED, newer)
    assert read(newer, 0.0)[0] is not None
    assert read(KEY, 0.0)[0] is None


def test_a_copied_file_is_foreign():
    save(TUNED, KEY)
    other = KEY | {"hosts": ["another processor"]}
    path_of(KEY).rename(path_of(other))
    found, reason = read(other, 0.0)
    assert found is None and "for other hosts" in reason


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "1", '"text"', "{}", "\x00", '{"format": 2}', "[" * 100_000, "é", '{"format": 1e999}'],
)
def test_a_damaged_file_is_not_used(text):
    save(TUNED, KEY)
    path_of(KEY).write_bytes(text.encode("latin-1"))
    assert "is not used" in refusal()


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
def test_a_file_with_other_content_is_not_used(content):
    save(TUNED, KEY)
    changed(**content)
    assert "is not used" in refusal()


@pytest.mark.parametrize("mode", [0o622, 0o606, 0o620])
def test_a_file_that_others_can_write_is_not_used(mode):
    save(TUNED, KEY)
    path_of(KEY).chmod(mode)
    assert "somebody else" in refusal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_used():
    save(TUNED, KEY)
    os.chown(path_of(KEY), 12345, 12345)
    assert "somebody else" in refusal()


def test_what_is_no_file_is_not_read(tmp_path):
    save(TUNED, KEY)
    path = path_of(KEY)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert "is not used" in refusal()
    path.unlink()
    path.mkdir()
    assert "is not used" in refusal()
    path.rmdir()
    os.mkfifo(path)  # whoever opened it to read would wait for a writer
    assert "no regular file" in refusal()


def test_an_oversized_file_is_not_read():
    save(TUNED, KEY)
    path_of(KEY).write_text(" " * (user_cache.LARGEST_BYTES + 1))
    assert "more than" in refusal()


def test_a_directory_that_cannot_be_made_is_said_and_no_more(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = save(TUNED, KEY)
    assert found.text == TUNED.text
    assert "not kept" in found.note


def test_clear_removes_everything(folder):
    save(TUNED, KEY)
    save(TUNED, KEY | {"ranks": 5})
    assert cache.clear() == 2
    assert list(folder.iterdir()) == []
    assert read(KEY, 0.0) == (None, "")


def test_the_directory_follows_the_environment():
    assert cache.directory({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/hpcdist/tuning")
    for ignored in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache.directory(ignored) == Path.home() / ".cache/hpcdist/tuning"


def test_a_user_without_a_home_keeps_nothing_and_is_told(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # no entry either, as in a container of another user
    assert read(KEY, 0.0) == (None, "")
    found = save(TUNED, KEY)
    assert found.text == TUNED.text
    assert "not kept" in found.note and "set HOME" in found.note
    with pytest.raises(StorageError, match="set HOME"):
        cache.clear()


def test_the_key_has_what_changes_a_message_and_not_what_differs_from_job_to_job(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_coll_tuned_priority", "90")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("OMPI_MCA_initial_wdir", "/somewhere")
    monkeypatch.setenv("OMPI_MCA_num_procs", "2")
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", "/dev/shm/of-this-job")  # by `hpcdist run`
    keys = run_threads(2, lambda comm: cache.key(comm, (2,), "an MPI", "allreduce", "float32", "host", 64), None)
    assert keys[0] == keys[1]
    assert set(keys[0]) == set(KEY)
    assert {"OMPI_MCA_coll_tuned_priority", "UCX_TLS"} <= set(keys[0]["settings"])
    of_job = {"OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "OMPI_MCA_btl_sm_backing_directory"}
    assert not of_job & set(keys[0]["settings"])
    assert set(keys[0]["software"]) == {"hpcdist", "mpi4py", "numpy"}
    path = path_of(keys[0])
    found = save(TUNED, keys[0])
    assert load(path)[1].text == found.text
