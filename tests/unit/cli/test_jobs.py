"""`hpcdist jobs begin` and `end`: the decisions before and after a job's training."""

import json
import os

import pytest

from harness.jobs import call_command
from hpcdist.batch import ledger
from hpcdist.cli.jobs import begin
from hpcdist.comm.record.run_journal import StartRecord
from hpcdist.constants import FINISHED
from hpcdist.errors import CONFIGURATION, OK, REQUEUE, STORAGE, USAGE
from hpcdist.training import run_directory
from hpcdist.training.recipe import recipe as recipes

STEPS = 20


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of a run of STEPS steps."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("HPCDIST_S")]:
        monkeypatch.delenv(name)
    (tmp_path / "run").mkdir()
    write_recipe(tmp_path / "run" / "recipe.toml")
    return tmp_path / "run"


def write_recipe(path, *overrides):
    path.write_text(recipes.dump(recipes.load(None, [f"run.steps={STEPS}", *overrides], {}).recipe))
    return path


def save(run, step, ns=None):
    """Make a fake checkpoint: a directory with a manifest file and its time."""
    manifest = run / "checkpoints" / f"step-{step}" / "manifest.json"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.touch()
    if ns is not None:
        os.utime(manifest, ns=(ns, ns))


@pytest.fixture
def jobs(capsys):
    """``jobs(*arguments)`` returns the exit code, stdout and stderr of `hpcdist jobs`."""

    return lambda *arguments: call_command(capsys, "jobs", *arguments)


def printed_word(jobs, *arguments):
    """Return the word that the command prints on stdout."""
    code, out, err = jobs(*arguments)
    assert code == OK and out.endswith("\n"), err
    return out.removesuffix("\n")


def test_run_of_three_starts_ends_as_done(run, jobs):
    assert printed_word(jobs, "begin", run, "--job=7") == "go"
    save(run, 8)
    assert printed_word(jobs, "end", run, "--job=7", "--code=75") == "again"
    assert printed_word(jobs, "begin", run, "--job=7", "--restart=1") == "go"
    save(run, 16)
    assert printed_word(jobs, "end", run, "--job=7", "--restart=1", "--code=75") == "again"
    assert printed_word(jobs, "begin", run, "--job=8") == "go"
    save(run, STEPS)
    assert printed_word(jobs, "end", run, "--job=8", "--code=0") == "stop"
    assert printed_word(jobs, "begin", run, "--job=9") == "done"
    results = [(entry.event, entry.job, entry.number("restart"), entry.text("from")) for entry in ledger.read(run)]
    assert results == [
        ("began", "7", 0, ""),
        ("ended", "7", 0, ""),
        ("began", "7", 1, "step-8"),
        ("ended", "7", 1, ""),
        ("began", "8", 0, "step-16"),
        ("ended", "8", 0, ""),
        ("ended", "9", 0, ""),
    ]
    assert [entry.text("newest") for entry in ledger.read(run) if entry.event == "ended"] == [
        "step-8",
        "step-16",
        "step-20",
        "step-20",
    ]
    # the first job asked to be requeued, and the scheduler has not ended it
    assert [job.id for job in ledger.jobs(ledger.read(run)).values() if not job.is_ended] == ["7"]
    assert ledger.registered_runs() == [run]


def test_start_in_an_empty_directory_goes(run, jobs):
    (run / "recipe.toml").unlink()
    assert printed_word(jobs, "begin", run, "--job=7") == "go"
    assert printed_word(jobs, "begin", run.parent / "new", "--job=7") == "go"


def test_stop_file_that_cannot_be_removed_is_reported(run, jobs):
    (run / "stop").mkdir()
    code, out, err = jobs("begin", run, "--job=7")
    assert (code, out) == (OK, "go\n") and "stop cannot be read or removed (Is a directory)" in err


@pytest.mark.parametrize("ends", ["never", 1, 75])
def test_fruitless_starts_are_limited(run, jobs, ends):
    """Starts count as fruitless whether they fail, stop or are killed, and whatever the job ids are."""
    save(run, 4, ns=10**18)
    for number in range(3):
        assert printed_word(jobs, "begin", run, f"--job={number}") == "go"
        if ends != "never":  # a start that was stopped before its first save is repeated once
            word = "again" if ends == 75 and number == 0 else "stop"
            assert printed_word(jobs, "end", run, f"--job={number}", f"--code={ends}") == word
    code, out, err = jobs("begin", run, "--job=9")
    assert (code, out) == (CONFIGURATION, "")
    assert "the last 3 starts" in err and "(job 0, 1, 2)" in err and "step-4" in err and "--most-fruitless 0" in err
    assert jobs("begin", run, "--job=9")[0] == CONFIGURATION
    assert jobs("begin", run, "--job=9", "--most-fruitless=4")[0] == OK
    assert jobs("begin", run, "--job=9", "--most-fruitless=4")[0] == CONFIGURATION
    assert printed_word(jobs, "begin", run, "--job=9", "--most-fruitless=0") == "go"


def test_cancelled_starts_do_not_count_as_fruitless(run, jobs):
    for number in range(4):
        assert printed_word(jobs, "begin", run, f"--job={number}", "--most-fruitless=1") == "go"
        ledger.record(run, "cancelled", job=str(number), how="now")
    assert printed_word(jobs, "begin", run, "--job=9", "--most-fruitless=1") == "go"
    assert jobs("begin", run, "--job=10", "--most-fruitless=1")[0] == CONFIGURATION


@pytest.mark.parametrize("before", [0, 4])
def test_start_stopped_before_a_save_is_repeated_once(run, jobs, before):
    if before:
        save(run, before, ns=10**18)
    jobs("begin", run, "--job=0")  # killed, so it does not count as stopped before a save
    words = []
    for restart in range(2):
        jobs("begin", run, "--job=1", f"--restart={restart}")
        words.append(jobs("end", run, "--job=1", f"--restart={restart}", f"--code={REQUEUE}")[1:])
    assert [word for word, _ in words] == ["again\n", "stop\n"]
    assert f"resumes from {'step-4' if before else 'step 0'}" in words[0][1]
    assert "not started again: 2 consecutive starts made no new checkpoint" in words[1][1]


def test_program_starts_unless_its_starts_were_fruitless(run, jobs):
    program = ("--program=python train.py", "--most-fruitless=2")
    for number in range(3):  # each start ends with 0, like a program that saves no checkpoints
        assert printed_word(jobs, "begin", run, f"--job={number}", *program) == "go"
        printed_word(jobs, "end", run, f"--job={number}", "--code=0")
    assert printed_word(jobs, "begin", run, "--job=7", *program) == "go"
    assert printed_word(jobs, "begin", run, "--job=8", *program) == "go"
    assert jobs("begin", run, "--job=9", *program)[0] == CONFIGURATION
    assert printed_word(jobs, "begin", run, "--job=9", "--program=python other.py", "--most-fruitless=2") == "go"


def test_progress_or_another_recipe_resets_the_fruitless_count(run, jobs):
    def codes_of_three_starts():
        return [jobs("begin", run, "--job=1", "--most-fruitless=2", *recipe)[0] for _ in range(3)]

    recipe, full = (), [OK, OK, CONFIGURATION]
    assert codes_of_three_starts() == full
    save(run, 4, ns=10**18)
    assert codes_of_three_starts() == full
    save(run, 4, ns=10**18 + 1)  # the same step, saved again
    assert codes_of_three_starts() == full
    recipe = ("--recipe", write_recipe(run.parent / "other.toml", "optimizer.learning_rate=0.5"))
    assert codes_of_three_starts() == full
    recipe = ()  # with this recipe, the run has made progress before
    assert codes_of_three_starts() == full


def test_recipe_with_more_steps_is_not_done(run, jobs):
    save(run, STEPS)
    for code in ("--code=0", "--code=0"):
        jobs("begin", run, "--job=1")
        jobs("end", run, "--job=1", code)
    assert printed_word(jobs, "begin", run, "--job=2") == "done"
    longer = write_recipe(run.parent / "longer.toml", "run.steps=30")
    assert printed_word(jobs, "begin", run, "--job=2", "--recipe", longer) == "go"


def test_complete_run_does_not_end_another_recipe(run, jobs):
    """The training of the other run rejects the directory with an explanation."""
    assert printed_word(jobs, "begin", run, "--job=7") == "go"
    save(run, STEPS)
    assert printed_word(jobs, "end", run, "--job=7", "--code=0") == "stop"
    other = run.parent / "other.toml"
    write_recipe(other, "run.seed=99")
    assert printed_word(jobs, "begin", run, "--job=8", "--recipe", run / "recipe.toml") == "done"
    assert printed_word(jobs, "begin", run, "--job=9", "--recipe", other) == "go"


def test_start_killed_in_its_last_evaluation_is_repeated(run, jobs):
    jobs("begin", run, "--job=1")
    save(run, STEPS)
    assert printed_word(jobs, "begin", run, "--job=2") == "go"
    assert printed_word(jobs, "end", run, "--job=2", "--code=0") == "stop"
    assert printed_word(jobs, "begin", run, "--job=3") == "done"


def test_run_finished_without_jobs_is_done(run, jobs):
    save(run, STEPS)
    StartRecord(run)
    assert printed_word(jobs, "begin", run, "--job=1") == "go"
    (run / "journal.jsonl").unlink()
    starts = StartRecord(run)
    starts.ended(FINISHED)
    assert printed_word(jobs, "begin", run, "--job=1") == "done"


@pytest.mark.parametrize(
    ("code", "says"), [(1, "exit code 1, and only exit code 75"), (0, "is complete"), (78, "exit code 78")]
)
def test_codes_that_end_a_job_for_good(run, jobs, code, says):
    jobs("begin", run, "--job=1")
    save(run, 4)
    _, out, err = jobs("end", run, "--job=1", f"--code={code}")
    assert out == "stop\n" and says in err


def test_cancelled_job_is_not_requeued(run, jobs):
    jobs("begin", run, "--job=1")
    save(run, 4)
    ledger.record(run, "cancelled", job="1", how="save")
    _, out, err = jobs("end", run, "--job=1", f"--code={REQUEUE}")
    assert out == "cancelled\n" and "the job was cancelled" in err
    jobs("begin", run, "--job=2")
    save(run, 5)
    assert printed_word(jobs, "end", run, "--job=2", "--code=75") == "again"


@pytest.mark.parametrize(
    ("code", "lost", "word"),
    [
        (1, ["n2"], "again"),
        (78, ["n2"], "again"),
        (78, [], "stop"),
        (137, ["n1", "n2"], "again"),
        (1, [], "stop"),
        (75, [], "again"),
    ]
    + [(code, ["n2"], "stop") for code in (0, 2, 69, 130)],
)
def test_start_that_lost_a_node_is_repeated(run, jobs, monkeypatch, code, lost, word):
    monkeypatch.setattr(begin.slurm_allocation, "lost_nodes", lambda: (lost, ["n3"] if lost else []))
    jobs("begin", run, "--job=1")
    save(run, 4)
    _, out, err = jobs("end", run, "--job=1", f"--code={code}")
    assert out == f"{word}\n" and (word == "stop" or not lost or f"{', '.join(lost)} of this job" in err)
    assert ledger.read(run)[-1].texts("lost") == (lost if word == "again" else [])


def test_start_after_a_node_crash_is_repeated_once(run, jobs, monkeypatch):
    """Slurm may have ended the steps of this start together with the steps of the crashed start."""
    for restart, (lost, word) in enumerate(((["n2"], "again"), ([], "again"), ([], "stop"))):
        monkeypatch.setattr(begin.slurm_allocation, "lost_nodes", lambda lost=lost: (lost, ["n1"] if lost else []))
        jobs("begin", run, "--job=1", f"--restart={restart}")
        assert printed_word(jobs, "end", run, "--job=1", f"--restart={restart}", "--code=1") == word


def test_start_after_a_killed_start_is_repeated_once(run, jobs):
    """The first node of the job crashed, together with the job script."""
    jobs("begin", run, "--job=1")
    jobs("begin", run, "--job=1", "--restart=1")
    assert printed_word(jobs, "end", run, "--job=1", "--restart=1", "--code=14") == "again"
    jobs("begin", run, "--job=1", "--restart=2")
    assert printed_word(jobs, "end", run, "--job=1", "--restart=2", "--code=14") == "stop"


@pytest.mark.parametrize(("code", "word"), [(1, "again"), (REQUEUE, "again"), (OK, "stop"), (69, "stop")])
def test_preempted_start_is_repeated(run, jobs, code, word):
    for restart in range(3):
        jobs("begin", run, "--job=1", f"--restart={restart}")
        assert (
            printed_word(jobs, "end", run, "--job=1", f"--restart={restart}", f"--code={code}", "--preempted") == word
        )
    ledger.record(run, "cancelled", job="1", how="now")
    assert printed_word(jobs, "end", run, "--job=1", f"--code={code}", "--preempted") == "stop"


def test_begin_limits_crashes_without_a_checkpoint(run, jobs, monkeypatch):
    monkeypatch.setattr(begin.slurm_allocation, "lost_nodes", lambda: (["n2"], ["n1"]))
    for restart in range(3):
        assert printed_word(jobs, "begin", run, "--job=1", f"--restart={restart}") == "go"
        assert (
            printed_word(jobs, "end", run, "--job=1", f"--restart={restart}", f"--code={(1, 75, 75)[restart]}")
            == "again"
        )
    assert jobs("begin", run, "--job=1", "--restart=3")[0] == CONFIGURATION


def test_cancelled_job_that_lost_a_node_is_not_requeued(run, jobs, monkeypatch):
    monkeypatch.setattr(begin.slurm_allocation, "lost_nodes", lambda: (["n2"], ["n1"]))
    jobs("begin", run, "--job=1")
    ledger.record(run, "cancelled", job="1", how="save")
    assert printed_word(jobs, "end", run, "--job=1", "--code=1") == "stop"


@pytest.mark.parametrize(
    ("text", "stays"), [("", True), ("\n", True), ("7\n", True), ("6\n", False), ("6 7", False), ("\xff", False)]
)
def test_stop_file_of_another_job_is_removed(run, jobs, text, stays):
    (run / "stop").write_text(text, encoding="latin1")
    assert printed_word(jobs, "begin", run, "--job=7") == "go"
    assert (run / "stop").exists() == stays


def test_decision_is_made_without_a_ledger(run, jobs):
    save(run, 4)
    (run / "journal.jsonl").mkdir()
    code, out, err = jobs("end", run, "--job=1", "--code=75")
    assert (code, out) == (OK, "again\n") and "warning" in err
    code, out, err = jobs("begin", run, "--job=1")
    assert (code, out) == (OK, "go\n") and "journal.jsonl.damaged-1" in err and (run / "journal.jsonl").is_file()


@pytest.mark.parametrize(
    "arguments",
    [["begin", "{run}"], ["begin", "--job=1"], ["begin", "{run}", "--job=1", "--restart=-1"], ["end", "{run}", "-j"]],
)
def test_invalid_calls_are_rejected(run, jobs, arguments):
    assert jobs(*[argument.format(run=run) for argument in arguments])[0] == USAGE
    assert not (run / "journal.jsonl").exists()


def test_unreadable_recipe_is_rejected(run, jobs):
    (run.parent / "bad.toml").write_text("[run]\nstep = 3\n")
    code, _, err = jobs("begin", run, "--job=1", "--recipe", run.parent / "bad.toml")
    assert code == CONFIGURATION and "run.steps" in err
    assert jobs("begin", run, "--job=1", "--recipe", run.parent / "missing.toml")[0] == STORAGE


def test_job_files_may_exist_before_the_training(run):
    (run / "recipe.toml").unlink()
    ledger.record(run, "submitted", job="1", chain=["1"])
    (run / "stop").touch()
    assert run_directory._has_only_start_files(run)
    assert json.loads((run / "journal.jsonl").read_text())["chain"] == ["1"]
    (run / "stopwords.txt").touch()
    assert not run_directory._has_only_start_files(run)
