"""Files are replaced atomically, links are not followed, and only regular files of a limited size are read."""

import errno
import os
import signal

import pytest

from hpcdist.batch import carbon, ledger, site_search
from hpcdist.bench.sweep import definition
from hpcdist.checkpoint import directory as checkpoints
from hpcdist.checkpoint import manifest
from hpcdist.checkpoint.lock import LOCK_FILE, RunLock
from hpcdist.cli.jobs import begin
from hpcdist.comm.record import flight_recorder, run_journal, spans
from hpcdist.comm.record.run_journal import JOURNAL_FILE, StartRecord
from hpcdist.comm.threads.communicator import solo
from hpcdist.constants import USAGE_FILE
from hpcdist.errors import ConfigurationError, HpcdistError, StorageError
from hpcdist.hdf5 import files
from hpcdist.planner.cluster import toml_file
from hpcdist.reporting import atomic, regular
from hpcdist.telemetry.event_stream import AppendOnlyFile
from hpcdist.training.observe.energy import EnergyRecorder
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.recipe import Recipe


@pytest.fixture(autouse=True)
def no_hang():
    def fail(number, frame):
        raise AssertionError("it waits for the other end of a pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "file"
    atomic.write(path, "one")
    with pytest.raises(TypeError), atomic.replacing(path) as file:
        file.write(b"half" * 100_000 + "of another type")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["file"]
    atomic.write(path, b"two", durable=True, mode=0o600)
    assert path.read_text() == "two" and path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["file"]


def test_existing_link_is_replaced_but_not_created_through(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    path.symlink_to(victim)
    with pytest.raises(FileExistsError):
        atomic.create(path)
    atomic.write(path, "new")
    assert victim.read_text() == "mine" and not path.is_symlink() and path.read_text() == "new"


def test_old_leftovers_of_a_killed_writer_are_removed(tmp_path):
    old, new, other = atomic.temporary_path(tmp_path / "a"), atomic.temporary_path(tmp_path / "a"), tmp_path / ".a.new"
    for path in (old, new, other):
        path.touch()
    os.utime(old, (1, 1))
    os.utime(other, (1, 1))
    atomic.sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([new.name, other.name])
    atomic.sweep(tmp_path, 0.0)
    assert os.listdir(tmp_path) == [other.name]


def test_set_aside_files_have_unique_names(tmp_path):
    for number in (1, 2):
        (tmp_path / "usage.json").write_text(str(number))
        assert atomic.set_aside(tmp_path / "usage.json") == tmp_path / f"usage.json.damaged-{number}"
    assert atomic.set_aside(tmp_path / "usage.json") is None
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["1", "2"]


def record_usage(run):
    EnergyRecorder(solo(), Recipe(), None, run).note()


def edit_metrics(run):
    for _ in range(2):  # made, and then changed by way of a journal
        with files.edit(run / "metrics.h5", "hpcdist.test", 1) as file:
            file.attrs["a"] = "b"


# Writer -> names next to its file, through which it once wrote.
WRITERS = {
    lambda run: checkpoints.replace(run / "latest", "step-1\n"): ("latest.tmp", "latest"),
    lambda run: StartRecord(run).ended("stopped"): ("journal.jsonl",),
    record_usage: ("usage.tmp", "usage.json"),
    edit_metrics: ("metrics.h5.new", "metrics.h5.journal"),
    lambda run: checkpoints.commit(run, 1, "{}", 1): ("step-1.tmp/manifest.json", "latest.tmp"),
}


@pytest.mark.parametrize("write", WRITERS)
def test_no_writer_follows_a_link(write, tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    for name in WRITERS[write]:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(victim)
    write(run)
    assert victim.read_text() == "mine"


def test_link_in_place_of_a_directory_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "recorder").symlink_to(elsewhere)
    atomic.own_directory(tmp_path / "recorder")
    (tmp_path / "recorder" / "file").touch()
    assert os.listdir(elsewhere) == []


def lock(path):
    """Take the lock of a directory whose lock file is a pipe as old as a stale lock."""
    os.utime(path, (1, 1))
    held = RunLock()
    held.take(path.parent)
    held.release()


READERS = {
    "recipe.toml": recipes.load_stored,
    "site.toml": lambda path: site_search.load(str(path)),
    "cluster.toml": lambda path: toml_file.read(str(path)),
    "sweep.toml": definition.read,
    "forecast.csv": carbon.read_forecast,
    JOURNAL_FILE: lambda path: run_journal.read(path.parent),
    USAGE_FILE: lambda path: record_usage(path.parent),
    LOCK_FILE: lock,
    "rank-00000.rec": flight_recorder.read,
    "rank-00000.spans": spans.read,
    "state.json": regular.json_or_none,
    "metrics.jsonl": lambda path: AppendOnlyFile(path, "choose another"),
    "manifest.json": lambda path: manifest.load(path.parent),
}
TOLERANT = {USAGE_FILE, LOCK_FILE, "state.json"}  # what is no file is set aside, or taken for an empty one


@pytest.mark.parametrize("name", READERS)
def test_pipe_in_place_of_a_file_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    if name in TOLERANT:
        READERS[name](tmp_path / name)
        return
    with pytest.raises((HpcdistError, OSError), match=r"regular|No such device|is there"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_temporarily_unreadable_record_is_kept(code, tmp_path, monkeypatch, capfd):
    StartRecord(tmp_path)
    EnergyRecorder(solo(), Recipe(), None, tmp_path).note()
    ledger.record(tmp_path, ledger.SUBMITTED, job="1")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {USAGE_FILE, JOURNAL_FILE}

    def fail(path, most_bytes=0):
        raise OSError(code, os.strerror(code), os.fspath(path))

    with monkeypatch.context() as during:
        during.setattr(regular, "read", fail)
        StartRecord(tmp_path).ended("stopped")
        EnergyRecorder(solo(), Recipe(), None, tmp_path).note()
        assert begin._entries(tmp_path) == []
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(after) == set(before) and after[USAGE_FILE] == before[USAGE_FILE]
    assert after[JOURNAL_FILE].startswith(before[JOURNAL_FILE])
    output = capfd.readouterr().err.splitlines()
    assert len(output) == 3 and all(os.strerror(code) in line and "stays as it is" in line for line in output)


def test_only_bad_file_contents_count_as_damage(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_bytes(b"12345")
    for name in (".", "loop", "large"):
        with pytest.raises(OSError) as caught:
            regular.read(tmp_path / name, 4)
        assert regular.is_damage(caught.value), name
    assert regular.is_damage(ValueError()) and regular.is_damage(OSError("of libhdf5"))
    assert not regular.is_damage(MemoryError()) and not regular.is_damage(OSError(errno.EMFILE, ""))


def test_device_or_sparse_file_is_not_read_to_its_end(tmp_path):
    with pytest.raises(StorageError, match=r"/dev/zero cannot be read: it is not a regular file"):
        toml_file.read("/dev/zero")
    with (tmp_path / "recipe.toml").open("wb") as file:
        file.truncate(1 << 38)
    with pytest.raises(StorageError, match=r"it has 274877906944 bytes, and at most 1048576 are read"):
        recipes.load_stored(tmp_path / "recipe.toml")


def test_kernel_file_of_size_0_is_read():
    assert regular.read("/proc/self/stat").startswith(str(os.getpid()).encode())


def test_deeply_nested_brackets_are_rejected(tmp_path):
    deep = tmp_path / "deep.toml"
    for text in ("a = " + "[" * 100_000, f"[{'.'.join('a' * 3000)}]\nb = 1\n"):
        deep.write_text(text)
        with pytest.raises(ConfigurationError, match="nested too deeply"):
            recipes.load_stored(deep)
        with pytest.raises(ConfigurationError, match="nested too deeply"):
            site_search.load(str(deep))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        regular.json_value(tmp_path / "deep.json")
