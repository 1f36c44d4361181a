"""`hpcdist energy watch` as a command, on the stub driver: watts, exit codes and signals."""

import json
import re
import signal
import subprocess
import sys
import time

import h5py
import pytest

from harness import jobs
from harness.jobs import LIMIT_S

GPUS = """GPU-00-aaaa 00000000:10:00.0 H200 0 power:400000:20 instant=390000 use=50:5 memory=1:4
GPU-01-bbbb 00000000:11:00.0 H200 0 power:100000:20 instant=90000 use=100:5 memory=3:4
"""
EXIT = [sys.executable, "-c", "import sys, time; print('mine'); time.sleep(0.4); sys.exit(int(sys.argv[1]))"]


@pytest.fixture
def start(nvml_environment, tmp_path):
    """``start(*arguments, **environment)`` returns a watch process. The fixture ends every process."""
    (tmp_path / "gpus").write_text(GPUS)
    started = []

    def begin(*arguments, **changes):
        nowhere = ["--powercap", str(tmp_path / "none"), "--pm-counters", str(tmp_path / "none")]
        line = jobs.command("energy", "watch", *nowhere, *arguments)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(line, text=True, env=nvml_environment | changes, **pipes)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end(process):
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


@pytest.mark.full
def test_watch_prints_watts_every_second_and_joules_at_end(start):
    code, out, _ = end(start("--seconds", 3.3))
    assert code == 0
    lines = [line for line in out.splitlines() if " W | " in line]
    assert 1 <= len(lines) <= 3 and "GPU-00-aaaa" in lines[0] and "GPU-01-bbbb" in lines[0]
    assert "gpu 75%" in out and "gpu   GPU-00-aaaa (H200)" in out and "cpu   not measured: " in out
    messages = re.findall(r"(GPU-[^\s:]+|total):? ([\d,.]+) J", out)
    joules = {name: float(value.replace(",", "")) for name, value in messages}
    assert joules["total"] == pytest.approx(joules["GPU-00-aaaa"] + joules["GPU-01-bbbb"], abs=0.2)
    assert joules["GPU-00-aaaa"] == pytest.approx(4 * joules["GPU-01-bbbb"], rel=0.1)
    assert "of a core" in out


def test_watched_command_keeps_output_and_exit_code(start):
    code, out, err = end(start("--json", "--", *EXIT, 7))
    assert (code, out) == (7, "mine\n")
    document = json.loads(err.splitlines()[-1])
    assert document["exit_code"] == 7 and document["reason"] is None
    assert document["energy_j"] == pytest.approx(500 * document["seconds"], rel=0.25)
    assert list(document["by_kind"]) == ["gpu"] and document["seconds"] >= 0.4


def test_only_visible_gpus_are_watched(start):
    _, _, err = end(start("--json", "--", *EXIT, 0, CUDA_VISIBLE_DEVICES="1"))
    assert [row["name"] for row in json.loads(err.splitlines()[-1])["sources"]] == ["GPU-01-bbbb"]


@pytest.mark.full
def test_samples_of_each_session_are_appended(start, tmp_path):
    path = tmp_path / "samples.h5"
    for _ in range(2):
        code, _, err = end(start("--output", path, "--json", "--", *EXIT, 0))
        assert code == 0, err
    with h5py.File(path) as file:
        assert file.attrs["schema"] == "hpcdist.energy"
        group = file["energy"]
        assert group["sources/session"][...].tolist() == [0, 0, 1, 1]
        assert set(group["samples/session"][...].tolist()) == {0, 1}
        assert set(group["powers/power_mw"][...].tolist()) == {390_000, 90_000}
        assert group["windows/phase"][...].tolist() == [b"watched"] * 4
        assert group["sampler/busy_s"][...].min() > 0


def test_unwritable_output_is_rejected_before_command_runs(start, tmp_path):
    mark = tmp_path / "ran"
    code, _, err = end(start("--output", tmp_path / "no" / "a.h5", "--", "touch", mark))
    assert code == 74 and "cannot be written" in err and not mark.exists()
    (tmp_path / "text.h5").write_text("a letter")
    code, _, err = end(start("--output", tmp_path / "text.h5", "--", "touch", mark))
    assert code == 74 and "Error: " in err and "Traceback" not in err and not mark.exists()


def test_machine_without_source_reports_reason(start, tmp_path):
    mark = tmp_path / "ran"
    code, _, err = end(start("--", "touch", mark, NVML_STUB="/nowhere"))
    assert code == 69 and not mark.exists()
    assert (
        "no energy source of this machine is readable" in err and "Driver Not Loaded" in err and "does not exist" in err
    )


def test_missing_command_exits_with_127(start):
    code, _, err = end(start("--", "hpcdist-no-such-command"))
    assert code == 127 and "command not found" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.full
def test_signal_ends_watch_with_total(start, number):
    process = start()
    line = process.stdout.readline()
    while " W" not in line:  # the first line of power
        line = process.stdout.readline()
    process.send_signal(number)
    code, out, err = end(process)
    assert code == 0 and "total " in out and "Traceback" not in err, err


def test_signal_is_forwarded_to_the_command(start, tmp_path):
    mark = tmp_path / "ready"
    program = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
pathlib.Path({str(mark)!r}).touch()
time.sleep(100)"""
    process = start("--", sys.executable, "-c", program)
    limit = time.monotonic() + LIMIT_S
    while not mark.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert code == 5 and "total " in err


@pytest.mark.full
def test_killed_or_timed_out_command_sets_exit_code(start):
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert end(start("--", sys.executable, "-c", killed))[0] == 128 + signal.SIGKILL
    code, _, err = end(start("--seconds", 0.5, "--", "sleep", 100))
    assert code == 128 + signal.SIGTERM and "total " in err
