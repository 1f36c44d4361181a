"""What schedulers say of jobs, in one vocabulary; Slurm is played by scripts that print what a real one has printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.marks import cases
from hpcdist.batch.schedulers import dispatch, local, pbs
from hpcdist.batch.schedulers.base import FINAL_STATES, WAITING_STATES, JobState, SchedulerState
from hpcdist.batch.schedulers.slurm import energy, queue
from hpcdist.errors import MissingCapabilityError
from stubs import slurm_double


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of a played Slurm: what it knows, and what it was asked."""
    for name, value in slurm_double.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    # what a user may have set changes nothing
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SACCT_FORMAT", "JobID")
    return tmp_path


def of(job):
    (found,) = dispatch.states_of_parts([job])[job]
    return found


def test_a_job_that_runs(slurm):
    assert of("30") == JobState(
        id="30",
        name="e|v;il\x1b[31m",
        state=SchedulerState.RUNNING,
        restarts=0,
        elapsed_s=70.0,
        time_left_s=((2 * 24 + 1) * 60 + 0) * 60 + 50.0,
        nodes=2,
        energy_reason=energy.NOT_YET,
        begun_utc="2026-11-22T04:24:59+00:00",
    )
    assert of("31").time_left_s is None


def test_jobs_that_wait(slurm):
    found = of("16")
    assert (found.state, found.reason, found.restarts, found.begun_utc) == ("PENDING", "BeginTime", 1, "")
    assert found.is_waiting and not found.is_over
    assert (of("41").name, of("42").reason) == ("COMPLETED", "JobHeldUser")  # another's name was first, and only a name
    assert of("41").state == "PENDING"


@cases(
    "job, state, code",
    ("27", "COMPLETED", 0),
    ("28", "FAILED", 75),
    ("29", "FAILED", 137),
    ("5", "TIMEOUT", 143),
    ("46", "CANCELLED", None),
)
def test_jobs_that_have_just_ended(slurm, job, state, code):
    found = of(job)
    assert (found.state, found.exit_code, found.time_left_s, found.is_over) == (state, code, None, True)
    assert found.ended_utc.startswith("2026-11-22T04:")


@pytest.mark.parametrize(
    ("job", "state", "code"),
    [("1", "COMPLETED", 0), ("2", "FAILED", 75), ("3", "FAILED", 137), ("4", "CANCELLED", None)],
)
def test_jobs_that_only_the_accounts_have(slurm, job, state, code):
    found = of(job)
    assert (found.state, found.exit_code, found.is_over) == (state, code, True)


def test_the_starts_of_a_job_in_the_accounts(slurm):
    assert (of("116").state, of("116").restarts, of("116").elapsed_s) == ("CANCELLED", 1, 2)
    rows, why = dispatch.accounts(["116"])
    assert [(row.state, row.elapsed_s) for row in rows] == [("REQUEUED", 4), ("CANCELLED", 2)]
    assert why == ""


@cases(
    "job, joules, reason",
    ("1", 5400.0, ""),
    ("2", None, energy.NOT_MEASURED),  # nothing
    ("14", None, energy.NOT_MEASURED),  # 0
    ("6_0", None, energy.NOT_MEASURED),  # no value, as a number
    ("30", None, energy.NOT_YET),
)
def test_joules_that_were_not_measured_are_none(slurm, job, joules, reason):
    rows, _ = dispatch.accounts([job])
    assert (rows[-1].energy_j, rows[-1].energy_reason) == (joules, reason)


def test_tasks_of_arrays_and_components(slurm):
    found = dispatch.states_of_parts(["35", "35_0", "35_3", "35_12", "39", "39+1", "32"])
    assert {job: [state.id for state in states] for job, states in found.items()} == {
        "35": ["35_[1-9%1]", "35_0"],
        "35_0": ["35_0"],
        "35_3": ["35_[1-9%1]"],
        "35_12": ["35_12"],
        "39": ["39+0", "39+1"],
        "39+1": ["39+1"],
        "32": ["32_1", "32_0"],
    }
    assert found["35_12"][0].state == SchedulerState.GONE
    whole = dispatch.states(["35", "32", "39", "27"])
    assert {job: (state.id, state.state, state.nodes) for job, state in whole.items()} == {
        "35": ("35", "RUNNING", 1),
        "32": ("32", "FAILED", 1),
        "39": ("39", "RUNNING", 3),
        "27": ("27", "COMPLETED", 1),
    }


def test_one_number_is_not_the_beginning_of_another(slurm):
    found = dispatch.states(["3", "4", "2"])
    assert [found[job].elapsed_s for job in ("3", "4", "2")] == [0, 21, 0]


def test_without_accounts(slurm):
    (slurm / "accounts").unlink()
    found = of("1")
    assert found.state == SchedulerState.GONE and found.is_over and "accounting storage is disabled" in found.reason
    assert dispatch.accounts(["1"]) == ([], f"sacct has no accounts: {slurm_double.OFF}")
    assert of("30").state == "RUNNING"


def test_a_slurm_that_does_not_answer_or_is_not_there(slurm, monkeypatch):
    (slurm / "down").touch()
    found = of("30")
    assert (found.state, found.is_over) == (SchedulerState.UNKNOWN, False) and "Unable to contact" in found.reason
    assert queue.job_names() == {} and queue.log_of("30") == ""
    monkeypatch.setenv("PATH", str(slurm))
    assert of("30").state == SchedulerState.UNKNOWN and "no squeue on PATH" in of("30").reason
    assert queue.job_names() == {} and queue.log_of("30") == ""
    assert "no scontrol" in queue.forbid_requeue("30")


def test_words_that_are_not_known_stay(slurm):
    (slurm / "queue").write_text("1|EXPEDITING|0|0:10|5:00|1|0|1795321501|1795321801|None|\n")
    (slurm / "accounts").write_text(
        "2|RECONFIG_FAIL|5|1|1:0|1795320456|1795320461||n1|||||Some_Reason\n"
        "3|LAUNCHING|5|1|0:0|1795320456|Unknown||n1|||||None\n"
    )
    found = dispatch.states(["1", "2", "3"])
    assert [(state.state, state.is_over) for state in found.values()] == [
        ("EXPEDITING", False),
        ("RECONFIG_FAIL", True),
        ("LAUNCHING", False),
    ]


def test_the_vocabulary_is_consistent():
    assert not FINAL_STATES & WAITING_STATES
    assert {*FINAL_STATES, *WAITING_STATES} < set(SchedulerState)
    assert SchedulerState.UNKNOWN not in FINAL_STATES


@given(text=st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_no_answer_is_too_strange(text):
    """Whatever a line has, it is a state or left out."""
    row = text.split("|", 13)
    for read, width in ((queue._queued, 10), (lambda row: queue._accounted(row, 0, [row]), 14)):
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
def test_clocks(text, seconds):
    assert queue._seconds(text) == seconds


def test_cancelling(slurm, monkeypatch):
    dispatch.cancel(["30", "35_3"])
    assert queue.forbid_requeue("30") == ""
    assert (slurm / "calls").read_text() == "scancel 30 35_3\nscontrol update JobId=30 Requeue=0\n"
    monkeypatch.setenv("REFUSE", "scancel: error: Kill job error on job id 30: Access/permission denied")
    with pytest.raises(MissingCapabilityError, match="permission denied"):
        dispatch.cancel(["30"])
    assert "permission denied" in queue.forbid_requeue("30")
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
def test_whose_number(job, scheduler):
    assert dispatch.is_id(job) and dispatch.scheduler_of(job) == scheduler


@pytest.mark.parametrize("text", ["", "run", "-1", "12;x", "1,2", "12_", "./12", "local-1", "\uff112", "12\n"])
def test_what_is_no_number(text):
    assert not dispatch.is_id(text)


def test_each_scheduler_is_asked_for_its_own(slurm, monkeypatch):
    asked = []
    monkeypatch.setattr(pbs, "states", lambda jobs: {"7.srv": JobState(id="7.srv", state="RUNNING")} if jobs else {})
    monkeypatch.setattr(local, "state", lambda job: JobState(id=job, state="PENDING"))
    for module in (pbs, local):
        monkeypatch.setattr(module, "cancel", asked.append)
    found = dispatch.states(["30", "7.srv", "8.srv", "local-1-2"])
    assert [state.state for state in found.values()] == ["RUNNING", "RUNNING", "GONE", "PENDING"]
    dispatch.cancel(["7.srv", "local-1-2"])
    assert asked == ["7.srv", "local-1-2"] and "scancel" not in (slurm / "calls").read_text()
    assert dispatch.accounts(["7.srv"])[0] == [] and "7.srv was not its job" in dispatch.accounts(["7.srv"])[1]

    def fails(jobs):
        raise MissingCapabilityError("there is no qstat")

    monkeypatch.setattr(pbs, "states", fails)
    assert dispatch.states(["7.srv"])["7.srv"] == JobState(id="7.srv", state="UNKNOWN", reason="there is no qstat")
