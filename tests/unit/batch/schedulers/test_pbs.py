"""qsub, qdel and qstat, played by small scripts: the calls that hpcdist makes, and how it reads the answers."""

import json
import time

import pytest

from harness.job_scripts import put_stubs_on_path
from harness.marks import cases
from hpcdist.batch.schedulers import pbs
from hpcdist.batch.schedulers.base import SchedulerState
from hpcdist.errors import ConfigurationError, MissingCapabilityError

# Records its arguments and its input, and prints the answer that the test has set.
PLAYED = """#!/bin/bash
printf '%s\\n' "${0##*/} $*" >>"$FOLDER/calls"
cat >"$FOLDER/script"
[[ -z ${SAYS:-} ]] || printf '%s' "$SAYS"
[[ -n ${COMPLAINS:-} && " $* " == *"${ONLY_WITH:-}"* ]] || exit 0
echo "$COMPLAINS" >&2
exit 170
"""


@pytest.fixture
def played_commands(tmp_path, monkeypatch):
    """The folder in which the played commands record their calls."""
    return put_stubs_on_path(tmp_path, monkeypatch, qsub=PLAYED, qdel=PLAYED, qstat=PLAYED)


def recorded_calls(folder):
    return (folder / "calls").read_text().splitlines()


def test_submit_passes_script_to_qsub(played_commands, monkeypatch):
    monkeypatch.setenv("SAYS", "4711.pbs01\n")
    script = "#!/bin/bash\n#PBS -N a\necho 'é' $\n"
    assert pbs.submit(script) == "4711.pbs01"
    assert (played_commands / "script").read_text() == script
    assert pbs.submit(script, "4711.pbs01") == "4711.pbs01"
    assert recorded_calls(played_commands) == ["qsub ", "qsub -W depend=afterany:4711.pbs01"]


def test_qsub_error_is_passed_on(played_commands, monkeypatch):
    monkeypatch.setenv("COMPLAINS", "qsub: Unknown queue")
    with pytest.raises(ConfigurationError, match=r"exit code 170\): qsub: Unknown queue; .*qstat -Q"):
        pbs.submit("#!/bin/bash\n")


@pytest.mark.parametrize("ask", [lambda: pbs.submit("x"), lambda: pbs.cancel("1.s"), lambda: pbs.states(["1.s"])])
def test_missing_pbs_raises_missing_capability(played_commands, monkeypatch, ask):
    monkeypatch.setenv("COMPLAINS", "qsub: cannot connect to server pbs01 (errno=15010)")
    with pytest.raises(MissingCapabilityError, match=r"does not answer.*errno=15010.*qstat -B"):
        ask()
    monkeypatch.setenv("PATH", str(played_commands))
    with pytest.raises(MissingCapabilityError, match=r"q\w+ is not on PATH.*login node"):
        ask()
    (played_commands / "bin" / "qsub").write_text("")
    monkeypatch.setenv("PATH", str(played_commands / "bin"))
    (played_commands / "bin" / "qsub").chmod(0o755)
    with pytest.raises(MissingCapabilityError, match="did not run"):
        pbs.submit("x")


def test_cancel_accepts_finished_jobs(played_commands, monkeypatch):
    pbs.cancel("4711.pbs01")
    assert recorded_calls(played_commands) == ["qdel 4711.pbs01"]
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


def set_answer(monkeypatch, **jobs):
    monkeypatch.setenv(
        "SAYS", json.dumps({"timestamp": 1, "Jobs": {f"{name[1:]}.s": job for name, job in jobs.items()}})
    )


def test_running_job_state_is_parsed(played_commands, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        set_answer(monkeypatch, j1=RUNNING)
        result = pbs.states(["1.s", "2.s"])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert list(result) == ["1.s"], "qstat does not know the other job"
    job = result["1.s"]
    assert (job.id, job.state, job.name, job.nodes, job.restarts) == ("1.s", SchedulerState.RUNNING, "GPT", 2, 1)
    assert (job.elapsed_s, job.time_left_s) == (3605, 82795)
    assert (job.begun_utc, job.ended_utc, job.exit_code) == ("2026-11-22T12:00:00+00:00", "", None)
    assert job.energy_j is None and job.energy_reason
    assert recorded_calls(played_commands) == ["qstat -x -f -F json 1.s 2.s"]


@cases(
    "letter, state",
    ("Q", SchedulerState.PENDING),
    ("H", SchedulerState.PENDING),
    ("W", SchedulerState.PENDING),
    ("S", SchedulerState.SUSPENDED),
    ("E", SchedulerState.COMPLETING),
)
def test_queue_letters_map_to_states(played_commands, monkeypatch, letter, state):
    set_answer(monkeypatch, j1={"job_state": letter})
    result = pbs.states(["1.s"])["1.s"]
    assert result.state == state and not result.is_over and result.elapsed_s is None and result.nodes is None


@cases(
    "values, state, code, reason",
    ({"Exit_status": 0}, SchedulerState.COMPLETED, 0, ""),
    ({"Exit_status": 75}, SchedulerState.FAILED, 75, ""),
    ({"Exit_status": 265}, SchedulerState.FAILED, 137, ""),
    ({"Exit_status": 271, "substate": 91}, SchedulerState.CANCELLED, 143, ""),
    ({"substate": 91}, SchedulerState.CANCELLED, None, ""),
    ({"Exit_status": -29, "substate": 93}, SchedulerState.TIMEOUT, None, "walltime"),
    ({"Exit_status": -27}, SchedulerState.OUT_OF_MEMORY, None, "memory"),
    ({"Exit_status": -3}, SchedulerState.FAILED, None, "PBS exit status -3"),
)
def test_finished_job_state_and_reason(played_commands, monkeypatch, values, state, code, reason):
    set_answer(monkeypatch, j1=RUNNING | {"job_state": "F", "comment": ""} | values)
    result = pbs.states(["1.s"])["1.s"]
    assert (result.state, result.exit_code) == (state, code) and reason in result.reason
    assert result.is_over and result.ended_utc and result.time_left_s is None


def test_log_path_is_known_for_hpcdist_scripts_only(played_commands, monkeypatch):
    """A job that continues a run was submitted by the job before, so no ledger has its log."""
    where = {"Variable_List": {"PBS_O_WORKDIR": str(played_commands), "PBS_O_HOME": "/home/me"}}
    set_answer(
        monkeypatch, j1=RUNNING | where, j2=RUNNING | where, j3=RUNNING | {"Variable_List": "PBS_O_HOME=/home/me"}
    )
    (played_commands / "hpcdist-1.s.out").touch()
    result = pbs.states(["1.s", "2.s", "3.s"])
    assert [result[job].log for job in ("1.s", "2.s", "3.s")] == [str(played_commands / "hpcdist-1.s.out"), "", ""]


def test_unknown_state_letter_is_kept(played_commands, monkeypatch):
    set_answer(monkeypatch, j1={"job_state": "M"})
    assert pbs.states(["1.s"])["1.s"].state == "M"


def test_server_without_history_is_queried_again(played_commands, monkeypatch):
    set_answer(monkeypatch, j1=RUNNING)
    monkeypatch.setenv("COMPLAINS", "qstat: PBS is not configured to maintain job history")
    monkeypatch.setenv("ONLY_WITH", "-x")
    assert pbs.states(["1.s"])["1.s"].state == SchedulerState.RUNNING
    assert recorded_calls(played_commands) == ["qstat -x -f -F json 1.s", "qstat -f -F json 1.s"]


def test_unknown_jobs_have_no_state(played_commands, monkeypatch):
    monkeypatch.setenv("COMPLAINS", "qstat: Unknown Job Id 1.s")
    assert pbs.states(["1.s"]) == {}
    set_answer(monkeypatch, j2=RUNNING)
    assert list(pbs.states(["1.s", "2.s"])) == ["2.s"], "answers about the other jobs count"


@pytest.mark.parametrize("output", ["Job id  Name\n", "[]", '{"Jobs": {"1.s": 3}}'])
def test_invalid_qstat_output_is_rejected(played_commands, monkeypatch, output):
    monkeypatch.setenv("SAYS", output)
    with pytest.raises(MissingCapabilityError, match="unexpected output of qstat"):
        pbs.states(["1.s"])
    monkeypatch.setenv("SAYS", "")
    monkeypatch.setenv("COMPLAINS", "qstat: illegal option")
    with pytest.raises(MissingCapabilityError, match="illegal option"):
        pbs.states(["1.s"])
