"""The epilog of a site, on folders made for it: what the job left goes, what anybody else has stays."""

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness.jobs import LIMIT_S, run
from harness.marks import cases
from hpcdist.batch import job as batch_job
from hpcdist.checkpoint.lock import RunLock
from hpcdist.comm.launch.exit_file import is_segment

EPILOG = batch_job.folder(batch_job.INSTALL) / "epilog.sh"
IS_ROOT = os.geteuid() == 0
USER, OTHER = (54321, 54322) if IS_ROOT else (os.getuid(), os.getuid())
HOLDS = "import mmap, os, sys; file = open(sys.argv[1], 'r+b'); {hold}; print('ready', flush=True); sys.stdin.read()"
MAPPED = HOLDS.format(hold="held = mmap.mmap(file.fileno(), 0); file.close()")
OPEN = HOLDS.format(hold="pass")


@pytest.fixture
def node():
    """The folders of a node, which its users can reach: pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-test-"))
    folder.chmod(0o755)
    for name in ("tmp", "local", "local/ada", "shm", "textfile"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    if IS_ROOT:
        (folder / "textfile").chmod(0o3770)  # for a group alone
    yield folder
    shutil.rmtree(folder)


def of(uid, path):
    if IS_ROOT:
        for each in (path, *path.rglob("*")):
            os.chown(each, uid, uid, follow_symlinks=False)
    return path


def start(folder, name, job, uid=USER):
    """A folder of `hpcdist run`, as it writes it."""
    made = folder / f"hpcdist-run-{name}"
    made.mkdir()
    (made / "owner.json").write_text(json.dumps(RunLock({"SLURM_JOB_ID": job}).identity))
    return of(uid, made)


def copies(folder, name, *jobs, uid=USER):
    """A folder of copies, as a job script makes it."""
    made = folder / f"hpcdist-{uid}-{name}"
    (made / "environment" / "bin").mkdir(parents=True)
    (made / "environment" / "bin" / "python").write_text("x")
    if jobs:
        (made / "job").write_text("".join(f"{job}\n" for job in jobs))
    return of(uid, made)


def segment(node, name, uid=USER):
    made = node / "shm" / name
    made.write_bytes(bytes(mmap.PAGESIZE))
    made.chmod(0o666)
    return of(uid, made)


def begin(node, **changed):
    """Start the epilog of job 7 with what slurmd gives it, and the folders."""
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": str(USER),
        "SLURM_JOB_GID": str(USER),
        "SLURM_JOB_USER": "ada",
        "HPCDIST_EPILOG_FOLDERS": f"{node}/tmp:{node}/local/$USER:{node}/absent",
        "HPCDIST_EPILOG_SHARED_MEMORY": f"{node}/shm",
        "HPCDIST_EPILOG_TEXT_FILES": f"{node}/textfile",
    } | changed
    given = {name: value for name, value in environment.items() if value is not None}
    return subprocess.Popen([EPILOG], env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def epilog(node, **changed):
    with begin(node, **changed) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (0, "")


def gone(*paths):
    """Whether all are away, and what was renamed to be removed is, too: that may take a moment."""
    limit = time.monotonic() + LIMIT_S
    while [each for path in paths for each in path.parent.glob(".hpcdist-gone-*")]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return not [path for path in paths if os.path.lexists(path)]


def test_what_the_job_left_is_removed(node):
    left = [
        start(node / "tmp", "abcd", "7"),
        copies(node / "tmp", "0a0b0c0d", "7"),
        copies(node / "local" / "ada", "0a0b0c0d", "6", "7"),  # of a heterogeneous job
        *(
            segment(node, name)
            for name in (
                "sm_segment.of-this-test.0.24d90001.0",
                "vader_segment.of-this-test.0.1",
                "mpich_shm_of-this-test",
            )
        ),
        *(segment(node, name) for name in ("osc_sm.of-this-test.24d90001.0.3", "open_mpi.of-this-test")),
        node / "textfile" / "hpcdist_7.prom",
    ]
    left[-1].touch()
    of(USER, left[-1])
    epilog(node)
    assert gone(*left)


def test_every_name_of_shared_memory_is_known():
    """What `hpcdist run` removes after a start, the epilog finds, too."""
    pattern = EPILOG.read_text().split("segments='")[1].split("'")[0]
    for name in ("sm_segment.of-this-test.0.24d90001.0", "vader_segment.of-this-test.0.1", "mpich_shm_of-this-test"):
        assert is_segment(Path("/dev/shm") / name)
        assert subprocess.run(["grep", "-qxE", pattern], input=name, text=True, check=False).returncode == 0


def test_what_is_of_other_jobs_stays(node):
    (node / "tmp" / "hpcdist-run-broken").mkdir()
    (node / "tmp" / "hpcdist-run-broken" / "owner.json").write_text('{"job": 7')
    kept = [
        of(USER, node / "tmp" / "hpcdist-run-broken"),
        start(node / "tmp", "8", "8"),
        start(node / "tmp", "77", "77"),
        start(node / "tmp", "none", ""),
        copies(node / "tmp", "00000008", "8"),
        copies(node / "tmp", "00000077", "77"),
        copies(node / "tmp", "unmarked"),
        segment(node, "something.else"),
        node / "textfile" / "hpcdist_8.prom",
        *(node / "tmp" / f"hpcdist-{name}-{USER}" for name in ("numba", "data")),  # caches
    ]
    for path in kept[-2:]:
        path.mkdir()
        (path / "job").write_text("7\n")
        of(USER, path)
    kept[-3].touch()
    removed = start(node / "tmp", "7", "7")
    epilog(node)
    assert gone(removed)
    assert [path for path in kept if not path.exists()] == []


@pytest.mark.parametrize("program", [MAPPED, OPEN], ids=["mapped", "open"])
@pytest.mark.full_except("open")
def test_shared_memory_that_a_process_uses_stays(node, program):
    kept, removed = segment(node, "sm_segment.of-this-test.0.1.0"), segment(node, "sm_segment.of-this-test.0.1.1")
    line = [sys.executable, "-c", program, str(kept)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        epilog(node)
        assert kept.exists() and not removed.exists()
        holder.communicate()
    epilog(node)
    assert not kept.exists()


@pytest.mark.skipif(not IS_ROOT, reason="needs root, to have files of other users")
def test_what_is_of_other_users_stays(node):
    kept = [
        start(node / "tmp", "other", "7", OTHER),
        copies(node / "tmp", "0a0b0c0d", "7", uid=OTHER),
        segment(node, "sm_segment.of-this-test.0.1.0", OTHER),
        segment(node, "sm_segment.of-this-test.0.1.1", 0),
        node / "textfile" / "hpcdist_7.prom",
    ]
    kept[-1].touch()
    of(OTHER, kept[-1])
    named = node / "tmp" / f"hpcdist-{USER}-00000000"  # somebody else's, by the name of the user
    copies(node / "tmp", "00000000", "7", uid=OTHER).rename(named)
    epilog(node)
    assert [path for path in (*kept, named) if not path.exists()] == []


def test_links_are_not_followed(node):
    """What is behind a link may be anything; also inside what is removed."""
    treasure = copies(node / "local", "treasure", "7")
    elsewhere = segment(node, "precious")
    link = node / "tmp" / f"hpcdist-{USER}-00000001"
    link.symlink_to(treasure)
    memory = node / "shm" / "sm_segment.of-this-test.0.1.0"
    memory.symlink_to(elsewhere)
    removed = copies(node / "tmp", "00000002", "7")
    (removed / "inside").symlink_to(treasure)
    for path in (link, memory, removed):
        of(USER, path)
    epilog(node)
    assert gone(removed)
    assert link.is_symlink() and memory.is_symlink()
    assert (treasure / "environment" / "bin" / "python").exists() and elsewhere.exists()


@cases(
    "changed",
    {"SLURM_JOB_ID": None},
    {"SLURM_JOB_ID": ""},
    {"SLURM_JOB_ID": "7; touch pwned"},
    {"SLURM_JOB_ID": ".*"},
    {"SLURM_JOB_UID": None},
    {"SLURM_JOB_UID": "a[$(touch pwned)]"},
    {"HPCDIST_EPILOG_FOLDERS": "/absent", "HPCDIST_EPILOG_SHARED_MEMORY": "/absent"},
)
def test_without_what_it_needs_nothing_is_removed(node, changed, monkeypatch):
    monkeypatch.chdir(node)
    kept = start(node / "tmp", "7", "7")
    epilog(node, **changed)
    assert kept.exists() and not (node / "pwned").exists()


def test_a_file_that_never_answers_ends_it_with_success_all_the_same(node):
    """A pipe in the place of the mark is passed over; one that is read all the same would hold it for ten seconds."""
    trap = copies(node / "tmp", "00000003")
    os.mkfifo(trap / "job")
    of(USER, trap / "job")
    removed = copies(node / "tmp", "00000004", "7")
    epilog(node)
    assert trap.exists() and gone(removed)


def test_a_step_that_hangs_ends_it_with_success_all_the_same(node, tmp_path):
    """As find and rm do where a file system does not answer."""
    text = EPILOG.read_text().replace("tenths < 100", "tenths < 5")
    hung = tmp_path / "epilog.sh"
    hung.write_text(text.replace("clean() {\n", f"clean() {{\n  echo $BASHPID >{tmp_path}/pid; exec sleep 600\n"))
    hung.chmod(0o755)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(USER)}
    try:
        done = subprocess.run([hung], env=environment, timeout=LIMIT_S, capture_output=True, check=False)
        assert done.returncode == 0
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


def test_it_is_clean_shell():
    found = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if found is None:
        pytest.skip("shellcheck is not installed")
    done = run([found, str(EPILOG)])
    assert done.returncode == 0, done.stdout
    assert os.access(EPILOG, os.X_OK)
