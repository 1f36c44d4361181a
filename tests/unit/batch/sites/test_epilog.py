"""The epilog of a site, on test folders: it removes the files of the job and keeps the files of other users."""

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
    """The folders of a node, readable by its users (pytest's folders are not)."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-test-"))
    folder.chmod(0o755)
    for name in ("tmp", "local", "local/ada", "shm", "textfile"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    if IS_ROOT:
        (folder / "textfile").chmod(0o3770)  # for a group alone
    yield folder
    shutil.rmtree(folder)


def chown_tree(uid, path):
    if IS_ROOT:
        for each in (path, *path.rglob("*")):
            os.chown(each, uid, uid, follow_symlinks=False)
    return path


def make_run_folder(folder, name, job, uid=USER):
    """Write a folder as `hpcdist run` does."""
    made = folder / f"hpcdist-run-{name}"
    made.mkdir()
    (made / "owner.json").write_text(json.dumps(RunLock({"SLURM_JOB_ID": job}).identity))
    return chown_tree(uid, made)


def make_copies(folder, name, *jobs, uid=USER):
    """Write a folder of copies as a job script does."""
    made = folder / f"hpcdist-{uid}-{name}"
    (made / "environment" / "bin").mkdir(parents=True)
    (made / "environment" / "bin" / "python").write_text("x")
    if jobs:
        (made / "job").write_text("".join(f"{job}\n" for job in jobs))
    return chown_tree(uid, made)


def make_segment(node, name, uid=USER):
    made = node / "shm" / name
    made.write_bytes(bytes(mmap.PAGESIZE))
    made.chmod(0o666)
    return chown_tree(uid, made)


def start_epilog(node, **changed):
    """Start the epilog of job 7 with slurmd's variables and the test folders."""
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


def run_epilog(node, **changed):
    with start_epilog(node, **changed) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output) == (0, "")


def are_removed(*paths):
    """Return True if all paths are removed. Waits until the epilog has removed the renamed folders too."""
    limit = time.monotonic() + LIMIT_S
    while [each for path in paths for each in path.parent.glob(".hpcdist-gone-*")]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return not [path for path in paths if os.path.lexists(path)]


def test_files_of_the_job_are_removed(node):
    left = [
        make_run_folder(node / "tmp", "abcd", "7"),
        make_copies(node / "tmp", "0a0b0c0d", "7"),
        make_copies(node / "local" / "ada", "0a0b0c0d", "6", "7"),  # of a heterogeneous job
        *(
            make_segment(node, name)
            for name in (
                "sm_segment.of-this-test.0.24d90001.0",
                "vader_segment.of-this-test.0.1",
                "mpich_shm_of-this-test",
            )
        ),
        *(make_segment(node, name) for name in ("osc_sm.of-this-test.24d90001.0.3", "open_mpi.of-this-test")),
        node / "textfile" / "hpcdist_7.prom",
    ]
    left[-1].touch()
    chown_tree(USER, left[-1])
    run_epilog(node)
    assert are_removed(*left)


def test_epilog_matches_every_shared_memory_name():
    """The epilog finds every segment that `hpcdist run` removes after a start."""
    pattern = EPILOG.read_text().split("segments='")[1].split("'")[0]
    for name in ("sm_segment.of-this-test.0.24d90001.0", "vader_segment.of-this-test.0.1", "mpich_shm_of-this-test"):
        assert is_segment(Path("/dev/shm") / name)
        assert subprocess.run(["grep", "-qxE", pattern], input=name, text=True, check=False).returncode == 0


def test_files_of_other_jobs_are_kept(node):
    (node / "tmp" / "hpcdist-run-broken").mkdir()
    (node / "tmp" / "hpcdist-run-broken" / "owner.json").write_text('{"job": 7')
    kept = [
        chown_tree(USER, node / "tmp" / "hpcdist-run-broken"),
        make_run_folder(node / "tmp", "8", "8"),
        make_run_folder(node / "tmp", "77", "77"),
        make_run_folder(node / "tmp", "none", ""),
        make_copies(node / "tmp", "00000008", "8"),
        make_copies(node / "tmp", "00000077", "77"),
        make_copies(node / "tmp", "unmarked"),
        make_segment(node, "something.else"),
        node / "textfile" / "hpcdist_8.prom",
        *(node / "tmp" / f"hpcdist-{name}-{USER}" for name in ("numba", "data")),  # caches
    ]
    for path in kept[-2:]:
        path.mkdir()
        (path / "job").write_text("7\n")
        chown_tree(USER, path)
    kept[-3].touch()
    removed = make_run_folder(node / "tmp", "7", "7")
    run_epilog(node)
    assert are_removed(removed)
    assert [path for path in kept if not path.exists()] == []


@pytest.mark.parametrize("program", [MAPPED, OPEN], ids=["mapped", "open"])
@pytest.mark.full_except("open")
def test_shared_memory_in_use_is_kept(node, program):
    kept, removed = (
        make_segment(node, "sm_segment.of-this-test.0.1.0"),
        make_segment(node, "sm_segment.of-this-test.0.1.1"),
    )
    line = [sys.executable, "-c", program, str(kept)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        run_epilog(node)
        assert kept.exists() and not removed.exists()
        holder.communicate()
    run_epilog(node)
    assert not kept.exists()


@pytest.mark.skipif(not IS_ROOT, reason="needs root, to have files of other users")
def test_files_of_other_users_are_kept(node):
    kept = [
        make_run_folder(node / "tmp", "other", "7", OTHER),
        make_copies(node / "tmp", "0a0b0c0d", "7", uid=OTHER),
        make_segment(node, "sm_segment.of-this-test.0.1.0", OTHER),
        make_segment(node, "sm_segment.of-this-test.0.1.1", 0),
        node / "textfile" / "hpcdist_7.prom",
    ]
    kept[-1].touch()
    chown_tree(OTHER, kept[-1])
    named = node / "tmp" / f"hpcdist-{USER}-00000000"  # owned by another user, but with the user's name
    make_copies(node / "tmp", "00000000", "7", uid=OTHER).rename(named)
    run_epilog(node)
    assert [path for path in (*kept, named) if not path.exists()] == []


def test_links_are_not_followed(node):
    """A link may lead anywhere, also a link inside a folder that is removed."""
    treasure = make_copies(node / "local", "treasure", "7")
    elsewhere = make_segment(node, "precious")
    link = node / "tmp" / f"hpcdist-{USER}-00000001"
    link.symlink_to(treasure)
    memory = node / "shm" / "sm_segment.of-this-test.0.1.0"
    memory.symlink_to(elsewhere)
    removed = make_copies(node / "tmp", "00000002", "7")
    (removed / "inside").symlink_to(treasure)
    for path in (link, memory, removed):
        chown_tree(USER, path)
    run_epilog(node)
    assert are_removed(removed)
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
def test_missing_or_invalid_variables_remove_nothing(node, changed, monkeypatch):
    monkeypatch.chdir(node)
    kept = make_run_folder(node / "tmp", "7", "7")
    run_epilog(node, **changed)
    assert kept.exists() and not (node / "pwned").exists()


def test_pipe_in_place_of_a_mark_does_not_block(node):
    """A pipe instead of the mark is skipped. The epilog gives up a read of a pipe after ten seconds."""
    trap = make_copies(node / "tmp", "00000003")
    os.mkfifo(trap / "job")
    chown_tree(USER, trap / "job")
    removed = make_copies(node / "tmp", "00000004", "7")
    run_epilog(node)
    assert trap.exists() and are_removed(removed)


def test_hanging_step_ends_with_success(node, tmp_path):
    """For example find and rm on a file system that does not answer."""
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


def test_epilog_passes_shellcheck():
    result = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if result is None:
        pytest.skip("shellcheck is not installed")
    done = run([result, str(EPILOG)])
    assert done.returncode == 0, done.stdout
    assert os.access(EPILOG, os.X_OK)
