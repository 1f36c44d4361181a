"""Unwritable output: a training loses it and continues; a command whose product it is fails."""

import os
import subprocess
import sys

import pytest

from harness import jobs

RECIPE = "[run]\nsteps = 2\nglobal_batch = 2\n[model]\nlayers = 1\nhidden = 16\nheads = 1\n[data]\ncontext = 8\n"
CLOSED = ">&- 2>&-"
FULL = ">/dev/full 2>/dev/full"
# A launcher, of a kind that ends when it cannot write, under the supervisor of `hpcdist run`.
SUPERVISED = """
import os, sys
from pathlib import Path
from hpcdist.comm.launch import supervisor
with supervisor.signals_held() as mask:
    line = ["bash", "-c", "set -e; for i in {1..2000}; do echo line $i; echo error $i >&2; done"]
    outcome = supervisor.Supervision(line, dict(os.environ), Path(sys.argv[1]), 5.0, mask).run()
sys.exit(outcome.code)
"""


def shell(command, *arguments):
    """Run ``command`` in bash, where $0 is this Python and $1 and the following are the ``arguments``."""
    return jobs.run(["bash", "-c", command, sys.executable, *arguments], env={**os.environ, "HPCDIST_TUNING": "off"})


@pytest.mark.parametrize("ends", [FULL, CLOSED], ids=["full", "closed"])
@pytest.mark.full
def test_training_continues_without_its_output(ends, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    done = shell(f'"$0" -m hpcdist train "$1/recipe.toml" --out "$1/run" {ends}', str(tmp_path))
    assert done.returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json").exists()


@pytest.mark.parametrize(
    "ends", [FULL, CLOSED, "2>&1 | head -1; exit ${PIPESTATUS[0]}"], ids=["full", "closed", "gone"]
)
def test_launcher_continues_without_its_output(ends, tmp_path):
    assert shell(f'"$0" -c "$1" "$2" {ends}', SUPERVISED, str(tmp_path)).returncode == 0


def test_launcher_output_arrives_complete_and_in_order(tmp_path):
    done = shell('"$0" -c "$1" "$2" 2>&1', SUPERVISED, str(tmp_path))
    assert done.stdout.splitlines() == [f"{word} {number}" for number in range(1, 2001) for word in ("line", "error")]
    apart = shell('"$0" -c "$1" "$2"', SUPERVISED, str(tmp_path))
    assert apart.stderr.splitlines() == [f"error {number}" for number in range(1, 2001)]


def test_launcher_writes_no_nul_bytes_into_a_log(tmp_path):
    program = SUPERVISED.replace("set -e; ", r"printf '\\0one\\0\\n' >&2; printf 'two\\0\\n'; exit; ")
    log, out, errors = tmp_path / "log", tmp_path / "out", tmp_path / "errors"
    assert shell('"$0" -c "$1" "$2" >"$3" 2>&1', program, str(tmp_path), str(log)).returncode == 0
    assert log.read_bytes() == b"one\ntwo\n"
    assert shell('"$0" -c "$1" "$2" >"$3" 2>"$4"', program, *map(str, (tmp_path, out, errors))).returncode == 0
    assert errors.read_bytes() == b"one\n"
    assert out.read_bytes() == b"two\0\n", "what a program writes there may be no text"


@pytest.mark.parametrize("end", [">/dev/full", ">&-"])
@pytest.mark.parametrize("command", ["plan clusters", "--help"])
def test_command_with_unwritable_product_fails(command, end):
    done = shell(f'"$0" -m hpcdist {command} {end}')
    assert done.returncode == 74
    assert done.stderr.startswith("Error: standard output cannot be written: ")
    assert len(done.stderr.splitlines()) == 1


def test_files_do_not_reuse_closed_standard_descriptors(tmp_path):
    program = "import sys\nfrom hpcdist.comm.launch import standard_streams\nstandard_streams.tolerate()\n"
    program += (
        "file = open(sys.argv[1], 'w')\nprint('lost')\nprint('lost', file=sys.stderr)\nsys.exit(file.fileno() < 3)"
    )
    done = shell('"$0" -c "$1" "$2" <&- >&- 2>&-', program, str(tmp_path / "file"))
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_file_name_with_invalid_utf8_is_printed_as_its_bytes():
    program = "from hpcdist.comm.launch import standard_streams\nstandard_streams.protect()\nprint('run \\udcff')\n"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=jobs.LIMIT_S)
    assert (done.returncode, done.stdout) == (0, b"run \xff\n"), done.stderr
