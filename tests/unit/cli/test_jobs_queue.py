"""`hpcdist jobs status`, `log`, `cancel` and `report`, with a played Slurm and ledgers of jobs."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from harness.jobs import LIMIT_S, call_command, run_light_commands
from harness.jobs import run as run_program
from harness.marks import cases
from hpcdist.batch import ledger
from hpcdist.batch.schedulers import local
from hpcdist.batch.schedulers.base import JobState
from hpcdist.cli.jobs import lookup
from hpcdist.cli.jobs import show as jobs_log
from hpcdist.comm.record.run_journal import JOURNAL_FILE
from hpcdist.errors import CONFIGURATION, MISSING_CAPABILITY, OK, STORAGE, USAGE
from stubs import slurm_double

NOW = 1795321600  # current time of the played Slurm, in seconds since 1970


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of a played Slurm."""
    for name, value in slurm_double.install(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "slurm"


@pytest.fixture
def jobs(slurm, capsys):

    return lambda *arguments: call_command(capsys, "jobs", *arguments)


@pytest.fixture
def run(tmp_path, slurm):
    """A run of 100 steps with four jobs: 27 has ended, 30 is training, 41 and 42 wait to continue."""
    run = tmp_path / "a run"
    for job in ("27", "30", "41", "42"):
        chain = {} if job == "27" else {"chain": ["30", "41", "42"]}
        ledger.record(run, "submitted", job=job, scheduler="slurm", site="here", log=str(run / f"{job}.out"), **chain)
    write_entries(
        run, ("began", "27", NOW - 300, {"from": ""}), ("ended", "27", NOW - 200, {"code": 75, "word": "stop"})
    )
    write_entries(run, ("began", "30", NOW - 100, {"from": "step-40", "nodes": 2}))
    (run / "recipe.toml").write_text("[run]\nsteps = 100\n")
    save(run, 60, NOW - 30)
    ledger.register_run(run)
    return run


def write_entries(run, *entries):
    """Append ledger entries with given times (seconds since 1970)."""
    run.mkdir(exist_ok=True)
    with (run / JOURNAL_FILE).open("a") as file:
        for event, job, seconds, values in entries:
            stamp = datetime.fromtimestamp(seconds, UTC).isoformat()
            file.write(json.dumps({"time": stamp, "event": event, "job": job, **values}) + "\n")


def save(run, step, seconds):
    manifest = run / "checkpoints" / f"step-{step}" / "manifest.json"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.touch()
    os.utime(manifest, (seconds, seconds))


def write_starts(run, *result):
    keys = ("began", "seen", "end")
    (run / "starts.json").write_text(json.dumps([dict(zip(keys, each, strict=True)) for each in result]))


def scheduler_changes(slurm):
    """Return the recorded Slurm calls that change something."""
    return [line for line in (slurm / "calls").read_text().splitlines() if line.startswith(("scancel", "scontrol"))]


def rows(jobs, *arguments):
    code, out, err = jobs(*(arguments or ["status"]), "--json")
    assert code == OK, err
    return {row["job"]: row for row in json.loads(out)["jobs"]}


def test_status_lists_unfinished_jobs(run, jobs):
    """The list has the jobs of runs from their ledgers, and queued jobs named hpcdist."""
    assert list(rows(jobs)) == ["30", "41", "42", "35_[1-9%1]", "35_0"]
    code, out, _ = jobs()
    head, first, *_ = out.splitlines()
    assert code == OK and head.split() == [
        *("JOB", "NAME", "STATE", "NODES", "ELAPSED", "LEFT", "RESTARTS", "SAVED", "RUN")
    ]
    assert first.split()[:3] == ["30", "e|v;il\\x1b[31m", "RUNNING"] and "\x1b" not in out
    assert "  1:10  " in first and "2-01:00:50" in first and "step-60 of 100" in first and first.endswith(str(run))
    assert jobs("status")[1].splitlines()[0] == head
    assert "27" in rows(jobs, "status", "--all")


def test_status_row_as_json(run, jobs):
    row = rows(jobs, "status", "30")["30"]
    assert row == {
        "job": "30",
        "name": "e|v;il\x1b[31m",
        "scheduler": "slurm",
        "site": "here",
        "state": "RUNNING",
        "reason": None,
        "nodes": 2,
        "elapsed_s": 70.0,
        "time_left_s": 176450.0,
        "restarts": 0,
        "exit_code": None,
        "begun_utc": "2026-11-22T04:24:59+00:00",
        "ended_utc": None,
        "log": str(run / "30.out"),
        "run_dir": str(run),
        "checkpoint": "step-60",
        "checkpoint_step": 60,
        "checkpoint_utc": datetime.fromtimestamp(NOW - 30, UTC).isoformat(),
        "steps": 100,
    }
    explained = jobs("status", "--help")[1]
    assert all(key in explained for key in row)


def test_jobs_are_selected_by_number_or_run(run, jobs):
    assert list(rows(jobs, "status", run)) == ["27", "30", "41", "42"]
    assert list(rows(jobs, "status", "35_3", "39", "30")) == ["35_[1-9%1]", "39+0", "39+1", "30"]
    code, out, err = jobs("status", "4711")
    assert code == OK and "GONE" in out and "squeue no longer knows this job" in err
    assert jobs("status", "nix")[0] == USAGE
    code, _, err = jobs("status", run.parent)
    assert code == CONFIGURATION and "no job was submitted for this directory" in err


def test_ledger_gives_state_of_forgotten_jobs(run, jobs, slurm):
    for name in ("queue", "names", "accounts"):
        (slurm / name).write_text("")
    write_entries(run, ("ended", "30", NOW, {"code": 0, "word": "stop"}))
    result = rows(jobs, "status", run)
    assert {job: (row["state"], row["exit_code"]) for job, row in result.items()} == {
        "27": ("FAILED", 75),
        "30": ("COMPLETED", 0),
        "41": ("GONE", None),
        "42": ("GONE", None),
    }
    assert "the job was killed, or has not begun" in result["41"]["reason"]
    assert rows(jobs) == {}
    code, out, err = jobs()
    assert (code, out) == (OK, "") and "--all" in err


def test_reason_of_a_job_asked_to_save_and_end(run, jobs, slurm):
    (slurm / "queue").write_text("30|FAILED|0|0:09|UNLIMITED|1|19200|1795321499|1795321499|NonZeroExitCode|\n")
    assert rows(jobs, "status", "30")["30"]["reason"] == "stopped before its last step: submit it again to continue"
    ledger.record(run, "cancelled", job="30", how="save")
    assert rows(jobs, "status", "30")["30"]["reason"] == "saved and ended as requested"
    write_entries(run, ("ended", "30", NOW, {"code": 75, "word": "stop"}))
    (slurm / "queue").write_text("30|COMPLETED|0|0:09|UNLIMITED|1|0|1795321499|1795321499|None|\n")
    assert rows(jobs, "status", "30")["30"]["reason"] == "saved and ended as requested"
    for name in ("queue", "names", "accounts"):
        (slurm / name).write_text("")
    result = rows(jobs, "status", "30")["30"]
    assert (result["state"], result["exit_code"], result["reason"]) == (
        "COMPLETED",
        0,
        "saved and ended as requested",
    )


def test_runs_below_the_current_directory_have_relative_paths(run, jobs, monkeypatch):
    assert str(run) in jobs("status", "30")[1]
    monkeypatch.chdir(run.parent)
    assert jobs("status", "30")[1].endswith("  a run\n")


def test_unreadable_ledger_does_not_hide_other_jobs(run, jobs, tmp_path):
    (tmp_path / "bad" / JOURNAL_FILE).mkdir(parents=True)
    ledger.register_run(tmp_path / "bad")
    code, out, err = jobs("status")
    assert code == OK and "\n30 " in out and "warning" in err and "bad" in err


def test_status_without_slurm_reports_it(run, jobs, monkeypatch):
    monkeypatch.setenv("PATH", str(run))
    code, out, err = jobs()
    assert code == OK and "UNKNOWN" in out and "squeue is not on PATH" in err
    assert jobs("cancel", "30")[0] == MISSING_CAPABILITY
    assert jobs("report", "30")[0] == OK


def test_log_prints_the_last_lines(run, slurm):
    (run / "30.out").write_bytes(b"one\n\xff two\nthree")
    line = [sys.executable, "-P", "-m", "hpcdist", "jobs", "log", "30", "-n", "2"]
    done = subprocess.run(line, capture_output=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (OK, b"\xff two\nthree")
    assert str(run / "30.out") in done.stderr.decode()


@cases(
    "text, lines, expected",
    (b"", 3, b""),
    (b"\n", 3, b"\n"),
    (b"a\nb\nc\n", 2, b"b\nc\n"),
    (b"a\nb\nc", 2, b"b\nc"),
    (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
    (b"a\nb\nc\n", 0, b"a\nb\nc\n"),
    (b"\n\n\n", 2, b"\n\n"),
    (b"x" * 200_000 + b"\n" + b"y" * 70_000 + b"\nz\n", 2, b"y" * 70_000 + b"\nz\n"),
    (b"l\n" * 100_000, 60_000, b"l\n" * 60_000),
)
def test_tail_offset_of_last_lines(tmp_path, text, lines, expected):
    (tmp_path / "log").write_bytes(text)
    with (tmp_path / "log").open("rb") as file:
        assert text[jobs_log._tail_offset(file, lines) :] == expected


def test_log_of_a_run_is_its_latest_started_job(run, jobs, tmp_path):
    (run / "30.out").write_text("it trains\n")
    assert jobs("log", run)[:2] == (OK, "it trains\n")
    ledger.record(tmp_path / "new", "submitted", job="41", log=str(tmp_path / "41.out"))
    (tmp_path / "41.out").write_text("not begun\n")
    assert jobs("log", tmp_path / "new")[:2] == (OK, "not begun\n")


def test_missing_log_is_reported(run, jobs, slurm, tmp_path):
    code, _, err = jobs("log", "41")
    assert code == STORAGE and "PENDING (Resources)" in err
    code, _, err = jobs("log", "28")
    assert code == CONFIGURATION and "the log of job 28 is unknown" in err
    (slurm / "stdout").write_text(f"28|{tmp_path / 'elsewhere'}|\n")
    (tmp_path / "elsewhere").write_text("what it said\n")
    assert jobs("log", "28")[1] == "what it said\n"


def test_each_array_task_has_a_log(jobs, tmp_path):
    folder = tmp_path / "the %a of it"
    ledger.record(folder, "submitted", job="35", log=str(folder / "35_%a.out"))
    ledger.register_run(folder)
    (folder / "35_3.out").write_text("of task 3\n")
    assert jobs("log", "35_3")[:2] == (OK, "of task 3\n")
    code, _, err = jobs("log", "35")
    assert code == USAGE and "name one task, e.g. 35_0" in err
    assert rows(jobs, "status", "35")["35_0"]["log"] == str(folder / "35_0.out")


def test_log_may_be_piped_to_a_reader_that_exits(run, slurm):
    (run / "30.out").write_bytes(b"a line\n" * 100_000)
    line = f"{sys.executable} -P -m hpcdist jobs log 30 -n 0 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = run_program(["/bin/bash", "-c", line])
    assert (done.returncode, done.stdout) == (1, "a line\n") and "Error" not in done.stderr


def test_log_is_followed_until_its_job_ends(run, jobs, slurm, monkeypatch):
    log = run / "30.out"

    def append_to_log(text):
        with log.open("a") as file:
            file.write(text)

    def end_job():
        append_to_log("three")
        (slurm / "queue").write_text("30|COMPLETED|0|0:01|UNLIMITED|1|0|1795321499|1795321500|None|\n")

    meanwhile = iter([lambda: None, lambda: append_to_log("one\n"), lambda: append_to_log("two\n"), end_job])
    monkeypatch.setattr(jobs_log, "SCHEDULER_POLL_S", 0)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: next(meanwhile)())
    monkeypatch.setattr(jobs_log, "time", clock)
    assert jobs("log", "30", "--follow")[:2] == (OK, "one\ntwo\nthree")
    meanwhile = iter([])
    assert jobs("log", "30", "--follow", "-n", "1")[:2] == (OK, "three")
    assert jobs("log", "27", "--follow")[0] == STORAGE


def test_cancel_asks_a_running_job_to_save(run, jobs, slurm):
    code, out, err = jobs("cancel", "30")
    assert (code, out) == (OK, "")
    assert scheduler_changes(slurm) == ["scancel 42", "scancel 41", "scontrol update JobId=30 Requeue=0"]
    assert (run / "stop").read_text() == "30\n"
    results = [(entry.job, entry.text("how")) for entry in ledger.read(run) if entry.event == "cancelled"]
    assert results == [("42", "pending"), ("41", "pending"), ("30", "save")]
    assert "job 30 saves after its current step and ends" in err and "job 41 left the queue" in err
    assert rows(jobs)["30"]["reason"] == "asked to save and end"


def test_cancel_now_ends_all_jobs_of_a_run(run, jobs, slurm):
    assert jobs("cancel", run, "--now")[0] == OK
    assert scheduler_changes(slurm) == ["scancel 42", "scancel 41", "scancel 30"]
    assert not (run / "stop").exists()


def test_cancel_of_a_chain_link_cancels_later_links(run, jobs, slurm):
    assert jobs("cancel", "41")[0] == OK
    assert scheduler_changes(slurm) == ["scancel 42", "scancel 41"]


def test_cancel_of_finished_jobs_does_nothing(run, jobs, slurm):
    code, _, err = jobs("cancel", "27", "28")
    assert code == OK and "job 27 is over already (COMPLETED)" in err and scheduler_changes(slurm) == []
    assert "job 99 is over already (GONE: squeue no longer knows this job, nor does sacct" in jobs("cancel", "99")[2]


def test_cancel_without_now_rejects_jobs_that_cannot_save(run, jobs, slurm):
    for words in (["30", "31"], ["35"], ["39"]):
        code, _, err = jobs("cancel", *words)
        assert code == USAGE and "--now" in err and "cannot be asked to save" in err
    assert scheduler_changes(slurm) == [] and not (run / "stop").exists()
    assert jobs("cancel", "35_3", "31", "--now")[0] == OK
    assert scheduler_changes(slurm) == ["scancel 31", "scancel 35_3"]


@pytest.mark.parametrize(("name", "code"), [("hpcdist", USAGE), ("COMPLETED", OK)])
def test_cancel_keeps_a_job_of_the_same_number_on_another_cluster(tmp_path, jobs, slurm, name, code):
    ledger.record(tmp_path / "elsewhere", "submitted", job="41", name=name)
    result, _, err = jobs("cancel", "--now", tmp_path / "elsewhere")
    assert result == code and scheduler_changes(slurm) == ([] if code else ["scancel 41"])
    assert ("'COMPLETED' in Slurm, but 'hpcdist' in" in err) is bool(code)


def test_slurm_error_is_passed_on(run, jobs, monkeypatch):
    monkeypatch.setenv("REFUSE", "Access/permission denied")
    code, _, err = jobs("cancel", "42")
    assert code == MISSING_CAPABILITY and "permission denied" in err
    assert jobs("cancel")[0] == USAGE


def test_failed_requeue_update_is_a_warning(tmp_path, run, jobs, monkeypatch):
    ledger.record(tmp_path / "other", "submitted", job="31")
    ledger.register_run(tmp_path / "other")
    monkeypatch.setenv("REFUSE", "no")
    code, _, err = jobs("cancel", "31")
    assert code == OK and "warning" in err and (tmp_path / "other" / "stop").exists()


def test_cancel_of_local_jobs(tmp_path, jobs, monkeypatch):
    state, ended = JobState(id="local-1-2", state="RUNNING"), []
    monkeypatch.setattr(local, "state", lambda job: state)
    monkeypatch.setattr(local, "cancel", ended.append)
    ledger.record(tmp_path / "run", "submitted", job="local-1-2", scheduler="local")
    assert jobs("cancel", tmp_path / "run")[0] == OK
    assert ended == [] and (tmp_path / "run" / "stop").read_text() == "local-1-2\n"
    assert jobs("cancel", tmp_path / "run", "--now")[0] == OK and ended == ["local-1-2"]


def report(jobs, word):
    code, out, err = jobs("report", word, "--json")
    assert code == OK, err
    return json.loads(out)


def test_report_of_a_job_without_a_run(jobs):
    result = report(jobs, "116")
    assert (result["starts"], result["elapsed_s"], result["elapsed_by"]) == (2, 6, "accounts")
    assert result["node_hours"] == pytest.approx(6 / 3600)
    assert (result["energy_j"], result["run_dir"], result["steps_to"], result["lost_s"]) == (None, None, None, None)
    assert result["jobs"] == [
        {"job": "116", "state": "CANCELLED", "reason": "BeginTime", "exit_code": None, "restarts": 1}
    ]
    assert report(jobs, "1")["energy_j"] == 5400
    assert "energy     5,400 J" in jobs("report", "1")[1]
    two = report(jobs, "7")  # two components that run at the same time
    assert (two["elapsed_s"], two["node_hours"]) == (23, pytest.approx(46 / 3600))
    explained = jobs("report", "--help")[1]
    assert all(key in explained for key in (*result, *result["jobs"][0]))


def test_report_of_a_run(run, jobs, slurm):
    """Without Slurm's accounts, times come from begin and end entries, and the last start from the queue."""
    (slurm / "accounts").unlink()
    result = report(jobs, run)
    assert (result["starts"], result["failed_starts"]) == (2, 0)
    assert (result["elapsed_s"], result["elapsed_by"], result["node_hours"]) == (
        170.0,
        "ledger",
        pytest.approx(240 / 3600),
    )
    assert (result["steps_from"], result["steps_to"], result["steps"]) == (0, 60, 100)
    assert result["energy_j"] is None and slurm_double.OFF in result["energy_reason"]
    output = jobs("report", run)[1]
    assert "steps      60 steps made, from 0 to 60 of 100" in output and "energy     not known" in output


def test_unrecorded_time_is_unknown(run, jobs, slurm):
    """The time of a killed start comes from its last heartbeat, or else the total is unknown."""
    (slurm / "accounts").unlink()
    write_entries(run, ("began", "30", NOW - 50, {"restart": 1}), ("ended", "30", NOW - 40, {"code": 75}))
    result = report(jobs, run)
    assert (result["elapsed_s"], result["node_hours"], result["elapsed_by"]) == (None, None, None)
    assert "time       not known" in jobs("report", run)[1]
    write_starts(run, (NOW - 99, NOW - 60, ""))
    result = report(jobs, run)
    assert (result["elapsed_s"], result["elapsed_by"]) == (100 + 40 + 10, "ledger")


def test_report_counts_lost_work(run, jobs):
    """Starts that ended unexpectedly lose the work after their last checkpoint, or all of it."""
    saved_ns = (NOW - 240) * 10**9
    write_entries(run, ("began", "30", NOW - 90, {"from": "step-40", "saved_ns": saved_ns, "restart": 1}))
    write_starts(
        run,
        (NOW - 299, NOW - 201, ""),  # saved at -240 according to the ledger: 39 s lost
        (NOW - 99, NOW - 95, ""),  # saved nothing: 4 s lost
        (NOW - 89, NOW - 70, "stopped"),
        (NOW - 60, NOW - 25, ""),  # saved at -30: 5 s lost
    )
    result = report(jobs, run)
    assert result["lost_s"] == pytest.approx(39 + 4 + 5)
    assert report(jobs, "27")["lost_s"] == pytest.approx(39)
    assert (result["starts"], result["failed_starts"]) == (3, 1)
    assert "0:48 of work after" in jobs("report", run)[1]


def test_running_start_has_no_lost_work(run, jobs):
    now = time.time()
    write_starts(run, (NOW - 60, now, ""))
    assert report(jobs, run)["lost_s"] == 0
    write_entries(run, ("ended", "30", now, {"code": 1}))
    assert report(jobs, run)["lost_s"] > 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"began": 1e300, "seen": 0}]', '[{"began": NaN, "seen": NaN}]'])
def test_invalid_start_record_makes_lost_work_unknown(run, jobs, text):
    (run / "starts.json").write_text(text)
    result = report(jobs, run)
    assert result["lost_s"] is None and result["lost_reason"]


def test_default_command_is_status(run, jobs):
    for words in (["--json"], ["--all", "--json"]):
        assert rows(jobs, *words) == rows(jobs, "status", *words) != {}
    assert jobs()[0] == OK and jobs()[1].startswith("JOB ")
    assert "Commands:" in jobs("--help")[1] and "Commands:" in jobs("-h")[1]
    assert jobs("--jsom")[0] == USAGE


def test_unknown_command_error_names_the_nearest(jobs):
    code, _, err = jobs("stauts")
    assert code == USAGE and "did you mean 'status'" in err
    assert jobs("xyzzy")[0] == USAGE


def test_report_of_an_unknown_job_is_rejected(jobs):
    code, _, err = jobs("report", "4711")
    assert code == CONFIGURATION and "job 4711 is unknown" in err


def test_job_number_selects_the_newest_job(run, jobs, tmp_path):
    """Clusters that share a home directory may use the same job numbers."""
    write_entries(tmp_path / "old", ("submitted", "30", 1000, {"log": "/old"}))
    ledger.register_run(tmp_path / "old")
    assert lookup.job_named("30").run_dir == run


@cases(
    "text, shown",
    ("plain é 日本", "plain é 日本"),
    ("\x1b]0;x\x07", "\\x1b]0;x\\x07"),
    ("a\u202eb", "a\\u202eb"),
    ("\udcff", "\\udcff"),
)
def test_control_characters_are_escaped(text, shown):
    assert lookup.printable(text) == shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (90061, "1-01:01:01")]
)
def test_duration_format(seconds, text):
    assert lookup.duration(seconds) == text


def test_help_and_status_import_no_heavy_modules(slurm):
    heavy = ("mpi4py", "numba", "h5py", "cupy", "numpy", "msgspec", "jinja2")
    run_light_commands(heavy, ["jobs", "--help"], ["jobs"], ["jobs", "status", "30"], ["jobs", "cancel", "--help"])
