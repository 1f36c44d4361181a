"""qsub, qdel and qstat, played by small scripts: what is asked of them, and how their answers are read."""

import json
import time

import pytest

from harness.job_scripts import played_on_path
from harness.marks import cases
from hpcdist.batch.schedulers import pbs
from hpcdist.batch.schedulers.base import SchedulerState
from hpcdist.errors import ConfigurationError, MissingCapabilityError

# Keeps how it was called and what it read; says what the test wants.
PLAYED = """#!/bin/bash
printf '%s\\n' "${0##*/} $*" >>"$FOLDER/calls"
cat >"$FOLDER/script"
[[ -z ${SAYS:-} ]] || printf '%s' "$SAYS"
[[ -n ${COMPLAINS:-} && " $* " == *"${ONLY_WITH:-}"* ]] || exit 0
echo "$COMPLAINS" >&2
exit 170
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """The folder in which played commands leave what they were asked."""
    return played_on_path(tmp_path, monkeypatch, qsub=PLAYED, qdel=PLAYED, qstat=PLAYED)


def calls(folder):
    return (folder / "calls").read_text().splitlines()


def test_the_script_goes_to_qsub(played, monkeypatch):
    monkeypatch.setenv("SAYS", "4711.pbs01\n")
    script = "#!/bin/bash\n#PBS -N a\necho 'é' $\n"
    assert pbs.submit(script) == "4711.pbs01"
    assert (played / "script").read_text() == script
    assert pbs.submit(script, "4711.pbs01") == "4711.pbs01"
    assert calls(played) == ["qsub ", "qsub -W depend=afterany:4711.pbs01"]


def test_what_qsub_refuses_is_passed_on(played, monkeypatch):
    monkeypatch.setenv("COMPLAINS", "qsub: Unknown queue")
    with pytest.raises(ConfigurationError, match=r"exit code 170\): qsub: Unknown queue; .*qstat -Q"):
        pbs.submit("#!/bin/bash\n")


@pytest.mark.parametrize("ask", [lambda: pbs.submit("x"), lambda: pbs.cancel("1.s"), lambda: pbs.states(["1.s"])])
def test_no_pbs_is_a_missing_capability(played, monkeypatch, ask):
    monkeypatch.setenv("COMPLAINS", "qsub: cannot connect to server pbs01 (errno=15010)")
    with pytest.raises(MissingCapabilityError, match=r"does not answer.*errno=15010.*qstat -B"):
        ask()
    monkeypatch.setenv("PATH", str(played))
    with pytest.raises(MissingCapabilityError, match=r"no q\w+ on PATH.*login node"):
        ask()
    (played / "bin" / "qsub").write_text("")
    monkeypatch.setenv("PATH", str(played / "bin"))
    (played / "bin" / "qsub").chmod(0o755)
    with pytest.raises(MissingCapabilityError, match="did not run"):
        pbs.submit("x")


def test_a_job_is_cancelled_once(played, monkeypatch):
    pbs.cancel("4711.pbs01")
    assert calls(played) == ["qdel 4711.pbs01"]
    monkeypatch.setenv("COMPLAINS", "qdel: Job has finished 4711.pbs01")
    pbs.cancel("4711.pbs01")
    monkeypatch.setenv("COMPLAINS", "qdel: Unauthorized Request 4711.pbs01")
    with pytest.raises(MissingCapabilityError, match="Unauthorized Request"):
        pbs.cancel("4711.pbs01")


RUNNING = {
    "Job_Name": "GPT",
    "job_state": "R",
    "Resource_List": {"nodect": 2, "walltime": "24:00:00"},
    "resources_used": {"walltime": "01:00:05"},
    "run_count": 2,
    "stime": "Sun Nov 22 13:00:00 2026",
    "mtime": "Sun Nov 22 13:00:01 2026",
    "comment": "Job run at Sun Nov 22 at 13:00",
}


def answer(monkeypatch, **jobs):
    monkeypatch.setenv(
        "SAYS", json.dumps({"timestamp": 1, "Jobs": {f"{name[1:]}.s": job for name, job in jobs.items()}})
    )


def test_a_running_job_is_read(played, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        answer(monkeypatch, j1=RUNNING)
        found = pbs.states(["1.s", "2.s"])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert list(found) == ["1.s"], "the other one is not known"
    job = found["1.s"]
    assert (job.id, job.state, job.name, job.nodes, job.restarts) == ("1.s", SchedulerState.RUNNING, "GPT", 2, 1)
    assert (job.elapsed_s, job.time_left_s) == (3605, 82795)
    assert (job.begun_utc, job.ended_utc, job.exit_code) == ("2026-11-22T12:00:00+00:00", "", None)
    assert job.energy_j is None and job.energy_reason
    assert calls(played) == ["qstat -x -f -F json 1.s 2.s"]


@cases(
    "letter, state",
    ("Q", SchedulerState.PENDING),
    ("H", SchedulerState.PENDING),
    ("W", SchedulerState.PENDING),
    ("S", SchedulerState.SUSPENDED),
    ("E", SchedulerState.COMPLETING),
)
def test_states_of_the_queue(played, monkeypatch, letter, state):
    answer(monkeypatch, j1={"job_state": letter})
    found = pbs.states(["1.s"])["1.s"]
    assert found.state == state and not found.is_over and found.elapsed_s is None and found.nodes is None


@cases(
    "values, state, code, reason",
    ({"Exit_status": 0}, SchedulerState.COMPLETED, 0, ""),
    ({"Exit_status": 75}, SchedulerState.FAILED, 75, ""),
    ({"Exit_status": 265}, SchedulerState.FAILED, 137, ""),
    ({"Exit_status": 271, "substate": 91}, SchedulerState.CANCELLED, 143, ""),
    ({"substate": 91}, SchedulerState.CANCELLED, None, ""),
    ({"Exit_status": -29, "substate": 93}, SchedulerState.TIMEOUT, None, "walltime"),
    ({"Exit_status": -27}, SchedulerState.OUT_OF_MEMORY, None, "memory"),
    ({"Exit_status": -3}, SchedulerState.FAILED, None, "PBS says -3"),
)
def test_how_a_job_ended(played, monkeypatch, values, state, code, reason):
    answer(monkeypatch, j1=RUNNING | {"job_state": "F", "comment": ""} | values)
    found = pbs.states(["1.s"])["1.s"]
    assert (found.state, found.exit_code) == (state, code) and reason in found.reason
    assert found.is_over and found.ended_utc and found.time_left_s is None


def test_the_log_is_that_of_our_script_where_it_is_one(played, monkeypatch):
    """The job that goes on with a run was submitted by the one before it, and no ledger knows its log."""
    where = {"Variable_List": {"PBS_O_WORKDIR": str(played), "PBS_O_HOME": "/home/me"}}
    answer(monkeypatch, j1=RUNNING | where, j2=RUNNING | where, j3=RUNNING | {"Variable_List": "PBS_O_HOME=/home/me"})
    (played / "hpcdist-1.s.out").touch()
    found = pbs.states(["1.s", "2.s", "3.s"])
    assert [found[job].log for job in ("1.s", "2.s", "3.s")] == [str(played / "hpcdist-1.s.out"), "", ""]


def test_an_unknown_word_is_kept(played, monkeypatch):
    answer(monkeypatch, j1={"job_state": "M"})
    assert pbs.states(["1.s"])["1.s"].state == "M"


def test_a_server_without_history_is_asked_again(played, monkeypatch):
    answer(monkeypatch, j1=RUNNING)
    monkeypatch.setenv("COMPLAINS", "qstat: PBS is not configured to maintain job history")
    monkeypatch.setenv("ONLY_WITH", "-x")
    assert pbs.states(["1.s"])["1.s"].state == SchedulerState.RUNNING
    assert calls(played) == ["qstat -x -f -F json 1.s", "qstat -f -F json 1.s"]


def test_jobs_that_are_not_known(played, monkeypatch):
    monkeypatch.setenv("COMPLAINS", "qstat: Unknown Job Id 1.s")
    assert pbs.states(["1.s"]) == {}
    answer(monkeypatch, j2=RUNNING)
    assert list(pbs.states(["1.s", "2.s"])) == ["2.s"], "what it says of others counts"


@pytest.mark.parametrize("said", ["Job id  Name\n", "[]", '{"Jobs": {"1.s": 3}}'])
def test_what_is_not_read(played, monkeypatch, said):
    monkeypatch.setenv("SAYS", said)
    with pytest.raises(MissingCapabilityError, match="not what hpcdist reads"):
        pbs.states(["1.s"])
    monkeypatch.setenv("SAYS", "")
    monkeypatch.setenv("COMPLAINS", "qstat: illegal option")
    with pytest.raises(MissingCapabilityError, match="illegal option"):
        pbs.states(["1.s"])
