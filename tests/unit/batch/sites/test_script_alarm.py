"""Scripts of PBS and of a machine without a scheduler: golden, refused, and run by bash with all else played."""

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
    play,
    played_python,
    signal_when_ready,
    start_script,
    words,
)
from hpcdist.batch import submission
from hpcdist.batch.sites import search
from hpcdist.errors import UsageError

POLARIS = search.load("polaris")
PBS, ALONE = search.load("pbs"), search.load("workstation")
STAGED = dataclasses.replace(
    PLAIN,
    environment=Path("/scratch/me/env.tar"),
    data=Path("/scratch/text"),
    local=Path("/tmp/hpcdist-1000-1a2b3c4d"),
    warmup=True,
    walltime=None,
)
MINUTE = {"walltime": "00:01:00", "signal_s": 55}  # signalled after five seconds, when the training can be told
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
def test_golden(name, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        folder = name.partition("-")[0]
        check_golden(submission.render(*JOBS[name]), f"{folder}/train-{name}.{'pbs' if folder == 'pbs' else 'sh'}")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.full
def test_bash_and_shellcheck_find_no_fault(tmp_path):
    for name, (job, site) in JOBS.items():
        (tmp_path / f"{name}.sh").write_text(submission.render(job, site))
    check_by_bash(*tmp_path.iterdir())


def test_directives_come_before_the_first_command():
    """Where qsub stops to look for them; and none has a comment, a quote or an escape, which versions read apart."""
    for job, site in (found for found in JOBS.values() if found[1].scheduler.kind == "pbs"):
        text = submission.render(job, site)
        first = next(index for index, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
        lines = [index for index, line in enumerate(text.splitlines()) if line.startswith("#PBS")]
        assert len(lines) >= 6 and max(lines) < first
        assert all(re.fullmatch(r"#PBS -\w( [\w.,:@%+=/-]+)+", text.splitlines()[index], re.ASCII) for index in lines)


@pytest.mark.parametrize("value", ["a b", EVIL, "a\nb", "a#b", "a;b", "é", "$HOME", "a\\", ""])
def test_what_a_directive_cannot_hold_is_refused(value):
    with pytest.raises(UsageError, match="a #PBS line holds letters, digits"):
        submission.pbs(value)


@pytest.mark.parametrize("field", ["name", "partition", "account"])
def test_it_is_refused_wherever_it_comes_from(field):
    with pytest.raises(UsageError, match="'a b'"):
        submission.render(dataclasses.replace(PLAIN, **{field: "a b"}), PBS)


def test_options_of_a_site_are_refused_too():
    scheduler = dataclasses.replace(PBS.scheduler, options=("-v A=`touch x`",))
    with pytest.raises(UsageError, match="`touch"):
        submission.render(PLAIN, dataclasses.replace(PBS, scheduler=scheduler))


PYTHON = played_python(
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
def stage(tmp_path):
    """A folder with played commands, and a function that starts a job in it."""
    play(tmp_path, python=PYTHON, qstat=QSTAT, qsub=QSUB, pbs_tmrsh=TMRSH)
    (tmp_path / "nodefile").write_text("n1\nn1\nn2\nn2\n")
    pbs = {"PBS_JOBID": "7.pbs", "PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodefile")}

    def start(site, job=PLAIN, **environment):
        given, cwd = (environment, None) if site is ALONE else (pbs | environment, "/")
        site = dataclasses.replace(site, environment=dataclasses.replace(site.environment, modules=()))
        return start_script(tmp_path, job, site, given, cwd)

    return start


def ended(process, folder):
    """Return the exit code, and what was said, in the log of PBS, too."""
    code, errors = job_scripts.ended(process)
    log = folder / "hpcdist-7.pbs.out"
    return code, errors + (log.read_text() if log.exists() else "")


@pytest.mark.parametrize("site", [PBS, ALONE])
def test_shell_metacharacters_arrive_as_they_are(stage, tmp_path, site):
    recipe = f"data.path = {EVIL}\nEOF\n#PBS -l nodes=7\n%s %d \\n {{{{ job }}}}\n"
    job = dataclasses.replace(PLAIN, recipe=recipe, run_dir=tmp_path / EVIL, mpi_args=EVIL, python_of_ranks=(EVIL, "b"))
    code, said = ended(stage(site, job, CODE="0", HPCDIST_JOB_ID="7.pbs"), tmp_path)
    assert code == 0, said
    found = words(tmp_path / "arguments")
    assert found[found.index("--python") : found.index("train")] == [
        "--python",
        shlex.join((EVIL, "b")),
        "--mpi-args",
        EVIL,
    ]
    train = ["train", str(job.input_file), "--out", str(tmp_path / EVIL), "--resume", "auto"]
    assert found[found.index("train") : -1] == train
    assert re.fullmatch(r"--time-limit=(24:00:00|23:59:5\d)", found[-1])
    assert job.input_file.read_text() == recipe
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


@pytest.mark.parametrize("site", [PBS, ALONE])
@pytest.mark.parametrize("code", ["0", "1", "78"])
def test_other_codes_are_passed_on(stage, tmp_path, site, code):
    assert ended(stage(site, CODE=code), tmp_path)[0] == int(code)
    assert words(tmp_path / "ended")[-1] == code
    assert not (tmp_path / "submitted").exists() and words(tmp_path / "arguments").count("train") == 1


@pytest.mark.parametrize("site", [PBS, ALONE])
@pytest.mark.full
def test_nobody_else_signals_so_the_script_does(stage, tmp_path, site):
    code, said = ended(stage(site, dataclasses.replace(PLAIN, **MINUTE)), tmp_path)
    assert (code, (tmp_path / "told").read_text()) == (75, "USR1\n"), said
    assert words(tmp_path / "arguments")[-1] == "--time-limit=0:01:00", "or as much as can be said"


@pytest.mark.parametrize("site", [PBS, ALONE])
def test_sigterm_saves_and_ends(stage, tmp_path, site):
    process = stage(site, END="again")
    signal_when_ready(process, tmp_path, signal.SIGTERM)
    code, said = ended(process, tmp_path)
    assert (code, (tmp_path / "told").read_text()) == (75, "TERM\n") and "not started again after SIGTERM" in said
    assert not (tmp_path / "submitted").exists()


def test_what_pbs_knows_of_its_job_is_asked(stage, tmp_path):
    """How often it has run, and the walltime of a queue where the job names none."""
    job = dataclasses.replace(PLAIN, walltime=None)
    assert ended(stage(PBS, job, CODE="0"), tmp_path)[0] == 0
    assert words(tmp_path / "began")[6:10] == ["--job", "7.pbs", "--restart", "2"]
    assert re.fullmatch(r"--time-limit=2:00:0\d|--time-limit=1:59:5\d", words(tmp_path / "arguments")[-1])
    (tmp_path / "qstat").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "arguments").unlink()
    assert ended(stage(PBS, job, CODE="0"), tmp_path)[0] == 0, "a qstat that does not answer is no reason to fail"
    begun = words(tmp_path / "began")
    assert [begun[index + 1] for index, word in enumerate(begun) if word == "--restart"] == ["2", "0"]
    assert words(tmp_path / "arguments")[-1] == "auto"


def test_a_run_goes_on_in_another_job_of_the_same_script(stage, tmp_path):
    code, said = ended(stage(PBS, CODE="75", END="again"), tmp_path)
    assert (code, (tmp_path / "submitted").read_text()) == (0, f"{tmp_path}/run/job.pbs\n"), said
    assert "goes on in job 8.pbs" in said
    assert (tmp_path / "run" / "job.pbs").read_text() == (tmp_path / "job.sh").read_text()


def test_a_script_that_is_kept_is_left_as_it_is(stage, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.pbs").write_text("kept\n")
    code, said = ended(stage(PBS, CODE="75", END="again", REFUSE="1"), tmp_path)
    assert code == 75 and f"submit {tmp_path}/run/job.pbs from a login node" in said
    assert (tmp_path / "run" / "job.pbs").read_text() == "kept\n"


@pytest.mark.parametrize(("link", "code", "said"), [(1, 0, "the next one goes on"), (3, 75, "was the last one")])
def test_a_link_leaves_the_rest_to_the_next_one(stage, tmp_path, link, code, said):
    found, words_said = ended(
        stage(PBS, dataclasses.replace(PLAIN, link=link, links=3), CODE="75", END="again"), tmp_path
    )
    assert found == code and said in words_said and not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("site", [PBS, ALONE])
def test_each_node_has_copies_of_its_own(stage, tmp_path, site):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "text").write_text("data")
    job = dataclasses.replace(PLAIN, data=tmp_path / "source", local=tmp_path / "own")
    process = stage(site, job, END="again")
    jobs.until((tmp_path / "ready").exists, "the training")
    assert (tmp_path / "own" / "data" / "source" / "text").read_text() == "data"
    process.send_signal(signal.SIGTERM)
    ended(process, tmp_path)
    assert not (tmp_path / "own").exists(), "and takes them away"
    if site is PBS:
        assert sorted(set((tmp_path / "nodes").read_text().split())) == ["n1", "n2"]


def test_a_machine_without_a_scheduler_starts_again_by_itself(stage, tmp_path):
    job = dataclasses.replace(PLAIN, walltime=None)
    code, said = ended(stage(ALONE, job, CODE="75", END="again", HPCDIST_JOB_ID="local-1-2"), tmp_path)
    assert code == 75 and "again" in said
    begun, found = words(tmp_path / "began"), words(tmp_path / "arguments")
    assert [begun[index + 1] for index, word in enumerate(begun) if word == "--restart"] == ["0", "1"]
    assert begun.count("local-1-2") == 2 and found.count("train") == 2 and found[-1] == "auto"
    assert dataclasses.replace(job, run_dir=tmp_path / "run").input_file.read_text() == RECIPE


def test_by_hand_it_has_the_id_that_it_would_have_got(stage, tmp_path):
    process = stage(ALONE, CODE="75", END="again", HPCDIST_JOB_ID="")
    code, said = ended(process, tmp_path)
    assert code == 75 and "its time is over" in said, "a walltime is the end of it"
    assert re.fullmatch(rf"local-{process.pid}-\d+", words(tmp_path / "began")[7])
