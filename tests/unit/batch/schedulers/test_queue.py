"""Job states of all schedulers in one vocabulary. Scripts play Slurm and print the recorded output of a real Slurm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist.batch.schedulers import dispatch, local, pbs, slurm_energy
from hpcdist.batch.schedulers import slurm as commands
from hpcdist.batch.schedulers.base import FINAL_STATES, WAITING_STATES, JobState, SchedulerState
from hpcdist.errors import MissingCapabilityError
from stubs import slurm_double


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of a played Slurm, with its data and its recorded calls."""
    for name, value in slurm_double.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    # variables that a user may have set must change nothing
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SACCT_FORMAT", "JobID")
    return tmp_path


def state_of(job):
    (result,) = dispatch.states_of_parts([job])[job]
    return result


def test_running_job_state_is_parsed(slurm):
    assert state_of("30") == JobState(
        id="30",
        name="e|v;il\x1b[31m",
        state=SchedulerState.RUNNING,
        restarts=0,
        elapsed_s=70.0,
        time_left_s=((2 * 24 + 1) * 60 + 0) * 60 + 50.0,
        nodes=2,
        energy_reason=slurm_energy.NOT_YET,
        begun_utc="2026-11-22T04:24:59+00:00",
    )
    assert state_of("31").time_left_s is None


def test_pending_job_states_are_parsed(slurm):
    result = state_of("16")
    assert (result.state, result.reason, result.restarts, result.begun_utc) == ("PENDING", "BeginTime", 1, "")
    assert result.is_waiting and not result.is_over
    assert (state_of("41").name, state_of("42").reason) == ("COMPLETED", "JobHeldUser")  # not the job name
    assert state_of("41").state == "PENDING"


@cases(
    "job, state, code",
    ("27", "COMPLETED", 0),
    ("28", "FAILED", 75),
    ("29", "FAILED", 137),
    ("5", "TIMEOUT", 143),
    ("46", "CANCELLED", None),
)
def test_recently_ended_jobs_are_parsed(slurm, job, state, code):
    result = state_of(job)
    assert (result.state, result.exit_code, result.time_left_s, result.is_over) == (state, code, None, True)
    assert result.ended_utc.startswith("2026-11-22T04:")


@pytest.mark.parametrize(
    ("job", "state", "code"),
    [("1", "COMPLETED", 0), ("2", "FAILED", 75), ("3", "FAILED", 137), ("4", "CANCELLED", None)],
)
def test_jobs_only_in_accounting_are_parsed(slurm, job, state, code):
    result = state_of(job)
    assert (result.state, result.exit_code, result.is_over) == (state, code, True)


def test_accounting_lists_every_start_of_a_job(slurm):
    assert (state_of("116").state, state_of("116").restarts, state_of("116").elapsed_s) == ("CANCELLED", 1, 2)
    rows, why = dispatch.accounts(["116"])
    assert [(row.state, row.elapsed_s) for row in rows] == [("REQUEUED", 4), ("CANCELLED", 2)]
    assert why == ""


@cases(
    "job, joules, reason",
    ("1", 5400.0, ""),
    ("2", None, slurm_energy.NOT_MEASURED),  # empty
    ("14", None, slurm_energy.NOT_MEASURED),  # 0
    ("6_0", None, slurm_energy.NOT_MEASURED),  # Slurm's number for "no value"
    ("30", None, slurm_energy.NOT_YET),
)
def test_unmeasured_energy_is_none_with_reason(slurm, job, joules, reason):
    rows, _ = dispatch.accounts([job])
    assert (rows[-1].energy_j, rows[-1].energy_reason) == (joules, reason)


def test_states_of_array_tasks_and_het_components(slurm):
    result = dispatch.states_of_parts(["35", "35_0", "35_3", "35_12", "39", "39+1", "32"])
    assert {job: [state.id for state in states] for job, states in result.items()} == {
        "35": ["35_[1-9%1]", "35_0"],
        "35_0": ["35_0"],
        "35_3": ["35_[1-9%1]"],
        "35_12": ["35_12"],
        "39": ["39+0", "39+1"],
        "39+1": ["39+1"],
        "32": ["32_1", "32_0"],
    }
    assert result["35_12"][0].state == SchedulerState.GONE
    whole = dispatch.states(["35", "32", "39", "27"])
    assert {job: (state.id, state.state, state.nodes) for job, state in whole.items()} == {
        "35": ("35", "RUNNING", 1),
        "32": ("32", "FAILED", 1),
        "39": ("39", "RUNNING", 3),
        "27": ("27", "COMPLETED", 1),
    }


def test_job_number_does_not_match_longer_numbers(slurm):
    result = dispatch.states(["3", "4", "2"])
    assert [result[job].elapsed_s for job in ("3", "4", "2")] == [0, 21, 0]


def test_jobs_without_accounting_are_gone(slurm):
    (slurm / "accounts").unlink()
    result = state_of("1")
    assert result.state == SchedulerState.GONE and result.is_over and "accounting storage is disabled" in result.reason
    assert dispatch.accounts(["1"]) == ([], f"sacct has no accounting data: {slurm_double.OFF}")
    assert state_of("30").state == "RUNNING"


def test_job_state_is_unknown_without_slurm(slurm, monkeypatch):
    (slurm / "down").touch()
    result = state_of("30")
    assert (result.state, result.is_over) == (SchedulerState.UNKNOWN, False) and "Unable to contact" in result.reason
    assert commands.job_names() == {} and commands.log_of("30") == ""
    monkeypatch.setenv("PATH", str(slurm))
    assert state_of("30").state == SchedulerState.UNKNOWN and "squeue is not on PATH" in state_of("30").reason
    assert commands.job_names() == {} and commands.log_of("30") == ""
    assert "scontrol is not on PATH" in commands.forbid_requeue("30")


def test_unknown_state_words_are_kept(slurm):
    (slurm / "queue").write_text("1|EXPEDITING|0|0:10|5:00|1|0|1795321501|1795321801|None|\n")
    (slurm / "accounts").write_text(
        "2|RECONFIG_FAIL|5|1|1:0|1795320456|1795320461||n1|||||Some_Reason\n"
        "3|LAUNCHING|5|1|0:0|1795320456|Unknown||n1|||||None\n"
    )
    result = dispatch.states(["1", "2", "3"])
    assert [(state.state, state.is_over) for state in result.values()] == [
        ("EXPEDITING", False),
        ("RECONFIG_FAIL", True),
        ("LAUNCHING", False),
    ]


def test_state_sets_are_consistent():
    assert not FINAL_STATES & WAITING_STATES
    assert {*FINAL_STATES, *WAITING_STATES} < set(SchedulerState)
    assert SchedulerState.UNKNOWN not in FINAL_STATES


@given(text=st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_any_output_line_is_parsed_or_skipped(text):
    """Any line becomes a state or is left out."""
    row = text.split("|", 13)
    for read, width in ((commands._queued, 10), (lambda row: commands._accounted(row, 0, [row]), 14)):
        assert isinstance(read([*row, *["1:0"] * width][:width]), JobState)


@cases(
    "text, seconds",
    ("0:07", 7),
    ("59:54", 3594),
    ("1:02:03", 3723),
    ("2-00:00:01", 172801),
    ("UNLIMITED", None),
    ("", None),
    ("7", None),
)
def test_slurm_durations_are_parsed(text, seconds):
    assert commands._seconds(text) == seconds


def test_cancel_and_forbid_requeue_call_slurm(slurm, monkeypatch):
    dispatch.cancel(["30", "35_3"])
    assert commands.forbid_requeue("30") == ""
    assert (slurm / "calls").read_text() == "scancel 30 35_3\nscontrol update JobId=30 Requeue=0\n"
    monkeypatch.setenv("REFUSE", "scancel: error: Kill job error on job id 30: Access/permission denied")
    with pytest.raises(MissingCapabilityError, match="permission denied"):
        dispatch.cancel(["30"])
    assert "permission denied" in commands.forbid_requeue("30")
    monkeypatch.setenv(
        "REFUSE", "scancel: error: Kill job error on job id 30: Job/step already completing or completed"
    )
    dispatch.cancel(["30"])


@cases(
    "job, scheduler",
    ("123", "slurm"),
    ("123_4", "slurm"),
    ("123+1", "slurm"),
    ("12.pbs-1", "pbs"),
    ("12[3].srv", "pbs"),
    ("local-1-2", "local"),
)
def test_job_id_selects_its_scheduler(job, scheduler):
    assert dispatch.is_id(job) and dispatch.scheduler_of(job) == scheduler


@pytest.mark.parametrize("text", ["", "run", "-1", "12;x", "1,2", "12_", "./12", "local-1", "\uff112", "12\n"])
def test_invalid_job_ids_are_rejected(text):
    assert not dispatch.is_id(text)


def test_each_scheduler_is_asked_only_for_its_jobs(slurm, monkeypatch):
    asked = []
    monkeypatch.setattr(pbs, "states", lambda jobs: {"7.srv": JobState(id="7.srv", state="RUNNING")} if jobs else {})
    monkeypatch.setattr(local, "state", lambda job: JobState(id=job, state="PENDING"))
    for module in (pbs, local):
        monkeypatch.setattr(module, "cancel", asked.append)
    result = dispatch.states(["30", "7.srv", "8.srv", "local-1-2"])
    assert [state.state for state in result.values()] == ["RUNNING", "RUNNING", "GONE", "PENDING"]
    dispatch.cancel(["7.srv", "local-1-2"])
    assert asked == ["7.srv", "local-1-2"] and "scancel" not in (slurm / "calls").read_text()
    assert dispatch.accounts(["7.srv"])[0] == [] and "7.srv is not a Slurm job" in dispatch.accounts(["7.srv"])[1]

    def raise_missing_qstat(jobs):
        raise MissingCapabilityError("there is no qstat")

    monkeypatch.setattr(pbs, "states", raise_missing_qstat)
    assert dispatch.states(["7.srv"])["7.srv"] == JobState(id="7.srv", state="UNKNOWN", reason="there is no qstat")
