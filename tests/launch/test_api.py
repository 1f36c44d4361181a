"""Programs with a custom loop: the public API under a launcher, stopped by a signal and resumed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from harness import jobs
from harness.jobs import LIMIT_S
from hpcdist.comm.launch import mpirun
from hpcdist.comm.launch.environment import process_fields

PROGRAM = """
import sys, time
import numpy as np
import hpcdist

with hpcdist.session() as world:
    field, start = np.zeros((6 // world.size, 4)), 0
    shard = hpcdist.checkpoint.Sharded(field)
    if saved := hpcdist.checkpoint.load("out", {"field": shard}):
        start = saved["steps"]
    for step in range(start, int(sys.argv[1])):
        with hpcdist.energy.window("sweep"):
            field += step
        time.sleep(0.02)
        if code := hpcdist.should_stop(margin_s=0.5):
            hpcdist.checkpoint.save("out", {"field": shard, "steps": step + 1})
            world.exit(code)
        if world.rank == 0 and step == start + 5:
            open("begun", "w").close()
    hpcdist.checkpoint.save("out", {"field": shard, "steps": int(sys.argv[1])})
    total = hpcdist.allreduce(field.sum(keepdims=True))
    phases = hpcdist.energy.usage()["phases"]
    if world.rank == 0:
        print("total", total.item(), "from", start, "phases", *phases)
"""


def total_of(steps):
    return 24.0 * steps * (steps - 1) / 2


def test_stopped_program_resumes_on_another_number_of_ranks(mpiexec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.Popen(
        [sys.executable, "-m", "hpcdist", "run", "-n", "2", "--", sys.executable, str(program), "100000"], text=True
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "begun").exists():
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        assert run.wait(LIMIT_S) == 75
    finally:
        run.kill()
        run.wait()
    steps = hpcdist.checkpoint.load("out")["steps"]
    done = mpiexec(3, [str(program), str(steps + 3)], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"total {total_of(steps + 3)} from {steps} phases sweep" in done.stdout


def test_program_stops_and_saves_before_the_job_ends(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(Path(hpcdist.__file__).parents[1])  # the one under test
    ends = str(int(time.time()) + 3)
    done = jobs.run(
        [sys.executable, str(program), "100000"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root, "SLURM_JOB_END_TIME": ends},
    )
    assert done.returncode == 75, done.stdout
    assert np.allclose(hpcdist.checkpoint.load(tmp_path / "out")["field"][0, 0] % 1, 0)


def test_stop_file_requests_one_stop(tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM)
    out.mkdir()
    (out / "stop").touch()
    root = str(Path(hpcdist.__file__).parents[1])  # the one under test
    environment = os.environ | {"PYTHONPATH": root, "HPCDIST_RUN_DIR": str(out)}
    done = jobs.run([sys.executable, str(program), "3"], cwd=tmp_path, env=environment)
    assert done.returncode == 75 and not (out / "stop").exists(), done.stdout
    done = jobs.run([sys.executable, str(program), "3"], cwd=tmp_path, env=environment)
    assert done.returncode == 0 and f"total {total_of(3)} from 1" in done.stdout, done.stdout


@pytest.mark.parametrize("begin", ["fail_alike()", "hpcdist.init()"])
@pytest.mark.usefixtures("mpi")
def test_error_of_all_ranks_of_a_script_is_shown_once(begin, tmp_path):
    """Before the start of MPI, only rank 0 reports it. After the start, the ranks agree on one report."""
    program = tmp_path / "program.py"
    imports = "import hpcdist\nfrom hpcdist.comm.start import fail_alike\nfrom hpcdist.errors import UsageError\n"
    program.write_text(f"{imports}{begin}\nraise UsageError('--bad is unknown')\n")
    done = jobs.hpcdist("run", "-n", "2", "--", "python", program)
    assert done.returncode == 2, done.stderr
    assert (done.stdout + done.stderr).count("--bad is unknown") == 1, done.stderr


SKIPS = """
import time
import numpy as np
import hpcdist
with hpcdist.session() as world:
    hpcdist.allreduce(1.0)
    if world.rank == 0:
        hpcdist.allreduce(np.ones(3))
        time.sleep(600)
"""


@pytest.mark.usefixtures("mpi")
def test_skipped_collective_is_named_and_ends_at_its_deadline(tmp_path):
    (tmp_path / "program.py").write_text(SKIPS)
    environment = os.environ | {"HPCDIST_DEADLINE_S": "3"}
    done = jobs.hpcdist("run", "-n", "2", "--out", "run", "--", "python", "program.py", cwd=tmp_path, env=environment)
    assert done.returncode != 0
    assert "waited past its deadline" in done.stdout + done.stderr
    hang = jobs.hpcdist("hang", tmp_path / "run").stdout
    assert re.search(r"allreduce.*program\.py:8", hang) and re.search(r"barrier.*program\.py:5", hang), hang


GROUPS = """
import sys, time
from mpi4py import MPI
import hpcdist

world, case = hpcdist.init(), sys.argv[1]
everyone = MPI.COMM_WORLD


def group(*ranks):
    return everyone.Split(0 if world.rank in ranks else MPI.UNDEFINED)


first, second = group(0, 1), group(0, 2) if case == "crossed" else group(2, 3)
for comm in (first, second):
    if case != "unused" and comm:
        hpcdist.allreduce(1.0, comm=comm)
if world.rank == world.size - 1 and case != "elsewhere":
    time.sleep(600)
if case == "crossed":
    hpcdist.allreduce(2.0, comm=first if world.rank == 1 else second)
elif world.rank != 3:
    hpcdist.allreduce(3.0, comm=first or second)
world.barrier()
"""
ABSENT = r"ABSENT: rank {} did not reach .*\n    at: {}, .*program\.py:\d+ .*\n    mpi4py\[{}\] has ranks {}\n"
GROUP_HANGS = {
    "used": (4, ABSENT.format(3, "all_gather #3 on mpi4py\\[2-3\\]", "2-3", "2, 3")),
    "unused": (4, ABSENT.format(3, "dup #1 on mpi4py\\[2-3\\]", "2-3", "2, 3")),
    # Rank 1 waits for rank 0, which waits in another group for rank 2.
    "crossed": (3, ABSENT.format(2, "all_gather #3 on mpi4py\\[0,2\\]", "0,2", "0, 2")),
    # Rank 3 leaves the operation of its group out, and waits for all ranks.
    "elsewhere": (
        4,
        r"DEADLOCK: ranks 2, 3 .*: rank 2 waits in all_gather #3 .*\(ranks 2, 3\); rank 3 waits in barrier",
    ),
}


@pytest.mark.parametrize("case", GROUP_HANGS)
@pytest.mark.full_except("crossed")
@pytest.mark.usefixtures("mpi")
def test_missing_member_of_a_group_is_named(case, tmp_path):
    ranks, expected = GROUP_HANGS[case]
    (tmp_path / "program.py").write_text(GROUPS)
    environment = os.environ | {"HPCDIST_DEADLINE_S": "3"}
    line = ["run", "-n", str(ranks), "--out", "run", "--", "python", "program.py", case]
    done = jobs.hpcdist(*line, cwd=tmp_path, env=environment)
    assert done.returncode != 0 and "waited past its deadline" in done.stdout + done.stderr
    hang = jobs.hpcdist("hang", tmp_path / "run").stdout
    assert re.match(expected, hang), hang
    assert "also:" not in hang, hang


@pytest.mark.usefixtures("mpi")
def test_error_for_different_buffer_sizes_names_the_check(tmp_path):
    program = "import numpy as np, hpcdist\nw = hpcdist.init()\nhpcdist.allreduce(np.ones(1000 + w.rank), comm=w)\n"
    (tmp_path / "program.py").write_text(program)
    done = jobs.hpcdist("run", "-n", "2", "--", "python", "program.py", cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    by_mpi = "Message truncated" in output  # MPICH ends the job itself
    assert by_mpi or "differ in size: HPCDIST_CHECK_COLLECTIVES=1 names" in output or "different calls" in output, (
        output
    )


def test_import_loads_no_heavy_modules():
    code = "import sys, hpcdist; dir(hpcdist); print(sorted({'numpy', 'mpi4py', 'click', 'h5py'} & set(sys.modules)))"
    assert jobs.python(code).stdout.strip() == "[]"


def test_type_checkers_see_the_public_names():
    stub = (Path(hpcdist.__file__).parent / "__init__.pyi").read_text()
    names = set(re.findall(r"^from .* import \w+ as (\w+)$", stub, re.MULTILINE))
    assert names == set(hpcdist.__all__)
    for name in hpcdist.__all__:
        assert getattr(hpcdist, name) is not None


WAITS = """
import os, time
import hpcdist
with hpcdist.session() as world:
    with open("new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("new", "pid")
    time.sleep(600)
"""


def test_rank_ends_when_mpirun_is_killed(mpi, tmp_path):
    """A shell starts the rank, as job scripts do, so the launcher is not its parent."""
    (tmp_path / "program.py").write_text(WAITS)
    environment = jobs.clean_environment()
    added = mpirun.settings(mpi, environment)
    program = ["sh", "-c", f"{sys.executable} program.py; exit $?"]
    line = mpirun.command(mpi, 1, program, added, environment=environment)
    with jobs.session(mpi) as place, (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(line, env=environment | added | place, cwd=tmp_path, stdout=log, stderr=log)
        pid = 0
        try:
            jobs.until((tmp_path / "pid").exists, "start", process, tmp_path / "log")
            pid = int((tmp_path / "pid").read_text())
            process.kill()
            process.wait(LIMIT_S)
            jobs.until(lambda: not is_alive(pid), "end of the rank", log=tmp_path / "log", limit_s=20)
        finally:
            process.kill()
            if pid and is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    try:
        return process_fields(pid)[0] != "Z"
    except OSError:
        return False
