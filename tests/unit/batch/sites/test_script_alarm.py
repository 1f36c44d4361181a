"""Scripts for PBS and for machines without a scheduler: golden files, rejected values, runs with played commands."""

import dataclasses
import re
import shlex
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness import job_scripts, jobs
from harness.job_scripts import (
    EVIL,
    PLAIN,
    RECIPE,
    check_by_bash,
    check_golden,
    recorded_arguments,
    signal_when_ready,
    start_script,
    stub_python,
    write_stub_commands,
)
from hpcdist.batch import site_search, submission
from hpcdist.errors import UsageError

POLARIS = site_search.load("polaris")
PBS, ALONE = site_search.load("pbs"), site_search.load("workstation")
STAGED = dataclasses.replace(
    PLAIN,
    environment=Path("/scratch/me/env.tar"),
    data=Path("/scratch/text"),
    local=Path("/tmp/hpcdist-1000-1a2b3c4d"),
    warmup=True,
    walltime=None,
)
MINUTE = {"walltime": "00:01:00", "signal_s": 55}  # the signal comes after five seconds, when the training has started
JOBS = {
    "pbs": (dataclasses.replace(PLAIN, gpus_per_node=4), PBS),
    "pbs-polaris": (dataclasses.replace(PLAIN, gpus_per_node=4, nodes=10), POLARIS),
    "pbs-staged": (STAGED, PBS),
    "pbs-chain": (dataclasses.replace(PLAIN, link=2, links=3), PBS),
    "pbs-full": (
        dataclasses.replace(
            PLAIN,
            name="GPT-3.b_1",
            walltime="2-03:00:00",
            signal_s=600,
            partition="gpu@pbs01",
            mem="200G",
            recipe="[data]\npath = \"/scratch/me/a 'new' $text\"\n",
            mpi_args="--line-buffer",
            restarts=2,
            begin=datetime(2026, 11, 23, 4, 5, 6, tzinfo=UTC),
        ),
        dataclasses.replace(
            PBS, scheduler=dataclasses.replace(PBS.scheduler, options=("-l filesystems=home:eagle", "-m  n"))
        ),
    ),
    "alone": (dataclasses.replace(PLAIN, account=None, walltime=None), ALONE),
    "alone-staged": (dataclasses.replace(STAGED, walltime="90"), ALONE),
}


@pytest.mark.parametrize("name", JOBS)
def test_scripts_match_golden_files(name, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        folder = name.partition("-")[0]
        check_golden(submission.render(*JOBS[name]), f"{folder}/train-{name}.{'pbs' if folder == 'pbs' else 'sh'}")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.full
def test_scripts_pass_bash_and_shellcheck(tmp_path):
    for name, (job, site) in JOBS.items():
        (tmp_path / f"{name}.sh").write_text(submission.render(job, site))
    check_by_bash(*tmp_path.iterdir())


def test_directives_come_before_the_first_command():
    """qsub stops reading at the first command. Directives have no comment, quote or escape: versions differ there."""
    for job, site in (result for result in JOBS.values() if result[1].scheduler.kind == "pbs"):
        text = submission.render(job, site)
        first = next(index for index, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
        lines = [index for index, line in enumerate(text.splitlines()) if line.startswith("#PBS")]
        assert len(lines) >= 6 and max(lines) < first
        assert all(re.fullmatch(r"#PBS -\w( [\w.,:@%+=/-]+)+", text.splitlines()[index], re.ASCII) for index in lines)


@pytest.mark.parametrize("value", ["a b", EVIL, "a\nb", "a#b", "a;b", "é", "$HOME", "a\\", ""])
def test_invalid_pbs_directive_values_are_rejected(value):
    with pytest.raises(UsageError, match="a #PBS line may only contain letters, digits"):
        submission.pbs(value)


@pytest.mark.parametrize("field", ["name", "partition", "account"])
def test_invalid_job_fields_are_rejected_in_pbs_scripts(field):
    with pytest.raises(UsageError, match="'a b'"):
        submission.render(dataclasses.replace(PLAIN, **{field: "a b"}), PBS)


def test_invalid_site_options_are_rejected_in_pbs_scripts():
    scheduler = dataclasses.replace(PBS.scheduler, options=("-v A=`touch x`",))
    with pytest.raises(UsageError, match="`touch"):
        submission.render(PLAIN, dataclasses.replace(PBS, scheduler=scheduler))


PYTHON = stub_python(
    """
  *" jobs begin "*) printf '%s\\0' "$@" >>began; echo go; exit ;;
  *" jobs end "*) printf '%s\\0' "$@" >>ended; [[ ${END:-stop} == again && ! -e trained ]] || { echo stop; exit; }
    touch trained; echo again; exit ;;
  *" jobs report "* | *" doctor "* | *" warmup "*) exit ;;
"""
)
QSTAT = """#!/bin/bash
printf '%s\\n' "Job Id: $2" '    run_count = 3' '    Resource_List.select = 2' '    Resource_List.walltime = 02:00:09'
"""
QSUB = """#!/bin/bash
printf '%s\\n' "$@" >submitted
[[ -z ${REFUSE:-} ]] || exit 1
echo 8.pbs
"""
TMRSH = """#!/bin/bash
# One node after the other: here they share the folder that each should have for itself.
echo "$1" >>nodes
shift
exec flock "$0" "$@"
"""


@pytest.fixture
def start_job(tmp_path):
    """A function that starts a job in a folder with played commands."""
    write_stub_commands(tmp_path, python=PYTHON, qstat=QSTAT, qsub=QSUB, pbs_tmrsh=TMRSH)
    (tmp_path / "nodefile").write_text("n1\nn1\nn2\nn2\n")
    pbs = {"PBS_JOBID": "7.pbs", "PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodefile")}

    def start(site, job=PLAIN, **environment):
        given, cwd = (environment, None) if site is ALONE else (pbs | environment, "/")
        site = dataclasses.replace(site, environment=dataclasses.replace(site.environment, modules=()))
        return start_script(tmp_path, job, site, given, cwd)

    return start


def wait_for_end(process, folder):
    """Return the exit code, and the output including the PBS log."""
    code, errors = job_scripts.wait_for_end(process)
    log = folder / "hpcdist-7.pbs.out"
    return code, errors + (log.read_text() if log.exists() else "")


@pytest.mark.parametrize("site", [PBS, ALONE])
def test_shell_metacharacters_are_passed_unchanged(start_job, tmp_path, site):
    recipe = f"data.path = {EVIL}\nEOF\n#PBS -l nodes=7\n%s %d \\n {{{{ job }}}}\n"
    job = dataclasses.replace(PLAIN, recipe=recipe, run_dir=tmp_path / EVIL, mpi_args=EVIL, python_of_ranks=(EVIL, "b"))
    code, output = wait_for_end(start_job(site, job, CODE="0", HPCDIST_JOB_ID="7.pbs"), tmp_path)
    assert code == 0, output
    result = recorded_arguments(tmp_path / "arguments")
    assert result[result.index("--python") : result.index("train")] == [
        "--python",
        shlex.join((EVIL, "b")),
        "--mpi-args",
        EVIL,
    ]
    train = ["train", str(job.input_file), "--out", str(tmp_path / EVIL), "--resume", "auto"]
    assert result[result.index("train") : -1] == train
    assert re.fullmatch(r"--time-limit=(24:00:00|23:59:5\d)", result[-1])
    assert job.input_file.read_text() == recipe
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


@pytest.mark.parametrize("site", [PBS, ALONE])
@pytest.mark.parametrize("code", ["0", "1", "78"])
def test_other_codes_are_passed_on(start_job, tmp_path, site, code):
    assert wait_for_end(start_job(site, CODE=code), tmp_path)[0] == int(code)
    assert recorded_arguments(tmp_path / "ended")[-1] == code
    assert not (tmp_path / "submitted").exists() and recorded_arguments(tmp_path / "arguments").count("train") == 1


@pytest.mark.parametrize("site", [PBS, ALONE])
@pytest.mark.full
def test_script_signals_before_the_walltime(start_job, tmp_path, site):
    code, output = wait_for_end(start_job(site, dataclasses.replace(PLAIN, **MINUTE)), tmp_path)
    assert (code, (tmp_path / "told").read_text()) == (75, "USR1\n"), output
    assert recorded_arguments(tmp_path / "arguments")[-1] == "--time-limit=0:01:00", (
        "expected the walltime of the script"
    )


@pytest.mark.parametrize("site", [PBS, ALONE])
def test_sigterm_saves_and_ends_the_job(start_job, tmp_path, site):
    process = start_job(site, END="again")
    signal_when_ready(process, tmp_path, signal.SIGTERM)
    code, output = wait_for_end(process, tmp_path)
    assert (code, (tmp_path / "told").read_text()) == (75, "TERM\n") and "not started again after SIGTERM" in output
    assert not (tmp_path / "submitted").exists()


def test_start_count_and_walltime_come_from_pbs(start_job, tmp_path):
    """PBS reports the number of starts, and the walltime of the queue if the job has none."""
    job = dataclasses.replace(PLAIN, walltime=None)
    assert wait_for_end(start_job(PBS, job, CODE="0"), tmp_path)[0] == 0
    assert recorded_arguments(tmp_path / "began")[6:10] == ["--job", "7.pbs", "--restart", "2"]
    assert re.fullmatch(r"--time-limit=2:00:0\d|--time-limit=1:59:5\d", recorded_arguments(tmp_path / "arguments")[-1])
    (tmp_path / "qstat").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "arguments").unlink()
    assert wait_for_end(start_job(PBS, job, CODE="0"), tmp_path)[0] == 0, "a failed qstat must not end the job"
    begun = recorded_arguments(tmp_path / "began")
    assert [begun[index + 1] for index, word in enumerate(begun) if word == "--restart"] == ["2", "0"]
    assert recorded_arguments(tmp_path / "arguments")[-1] == "auto"


def test_unfinished_run_submits_another_job(start_job, tmp_path):
    code, output = wait_for_end(start_job(PBS, CODE="75", END="again"), tmp_path)
    assert (code, (tmp_path / "submitted").read_text()) == (0, f"{tmp_path}/run/job.pbs\n"), output
    assert "goes on in job 8.pbs" in output
    assert (tmp_path / "run" / "job.pbs").read_text() == (tmp_path / "job.sh").read_text()


def test_existing_kept_script_is_not_changed(start_job, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.pbs").write_text("kept\n")
    code, output = wait_for_end(start_job(PBS, CODE="75", END="again", REFUSE="1"), tmp_path)
    assert code == 75 and f"submit {tmp_path}/run/job.pbs from a login node" in output
    assert (tmp_path / "run" / "job.pbs").read_text() == "kept\n"


@pytest.mark.parametrize(("link", "code", "output"), [(1, 0, "the next one goes on"), (3, 75, "was the last one")])
def test_chain_link_leaves_the_rest_to_the_next_link(start_job, tmp_path, link, code, output):
    result, words_said = wait_for_end(
        start_job(PBS, dataclasses.replace(PLAIN, link=link, links=3), CODE="75", END="again"), tmp_path
    )
    assert result == code and output in words_said and not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("site", [PBS, ALONE])
def test_each_node_has_separate_copies(start_job, tmp_path, site):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "text").write_text("data")
    job = dataclasses.replace(PLAIN, data=tmp_path / "source", local=tmp_path / "own")
    process = start_job(site, job, END="again")
    jobs.until((tmp_path / "ready").exists, "the training")
    assert (tmp_path / "own" / "data" / "source" / "text").read_text() == "data"
    process.send_signal(signal.SIGTERM)
    wait_for_end(process, tmp_path)
    assert not (tmp_path / "own").exists(), "the job must remove its copies"
    if site is PBS:
        assert sorted(set((tmp_path / "nodes").read_text().split())) == ["n1", "n2"]


def test_local_script_restarts_the_training(start_job, tmp_path):
    job = dataclasses.replace(PLAIN, walltime=None)
    code, output = wait_for_end(start_job(ALONE, job, CODE="75", END="again", HPCDIST_JOB_ID="local-1-2"), tmp_path)
    assert code == 75 and "again" in output
    begun, result = recorded_arguments(tmp_path / "began"), recorded_arguments(tmp_path / "arguments")
    assert [begun[index + 1] for index, word in enumerate(begun) if word == "--restart"] == ["0", "1"]
    assert begun.count("local-1-2") == 2 and result.count("train") == 2 and result[-1] == "auto"
    assert dataclasses.replace(job, run_dir=tmp_path / "run").input_file.read_text() == RECIPE


def test_local_script_started_by_hand_gets_a_job_id(start_job, tmp_path):
    process = start_job(ALONE, CODE="75", END="again", HPCDIST_JOB_ID="")
    code, output = wait_for_end(process, tmp_path)
    assert code == 75 and "its time is over" in output, "the job must end with its walltime"
    assert re.fullmatch(rf"local-{process.pid}-\d+", recorded_arguments(tmp_path / "began")[7])
