"""Results of a sweep: the file, the effect of a kill, and the trials that are run again."""

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

import hpcdist
from harness.jobs import LIMIT_S
from hpcdist.bench.sweep import results, series
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.series import SeriesItem, SeriesLimits, SweepStopped, SweepTally
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome, TrialSample
from hpcdist.errors import StorageError
from hpcdist.hdf5 import files

SUMMARY = {"tokens_per_s": 10.5, "strategy": "ring", "val_loss": None, "peak_bytes": {"gradients": 7}, "run_dir": "/x"}
UNBOUNDED = SeriesLimits(60.0)


def trial(name, ranks=2):
    return SweepTrial(f"id-{name}-{ranks}", name, ranks, {}, "[run]\nsteps = 4\n")


def good_outcome(rng, ranks=2, wall_s=1.0):
    samples = {"step_s": TrialSample(rng.random((4, ranks)), "s", "time of a step")}
    samples |= {
        "loss": TrialSample(rng.random(4), "1", "loss"),
        "iteration": TrialSample(np.arange(1, 5), "1", "steps"),
    }
    return TrialOutcome(
        OK, "2026-01-01T00:00:00+00:00", wall_s, 0, summary=SUMMARY, samples=samples, mpi_library="MPI 1"
    )


def failed_outcome(reason="exit code 1", wall_s=1.0):
    return TrialOutcome(FAILED, "2026-01-01T00:00:00+00:00", wall_s, 1, reason, "tail\nof stderr")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "results.h5"
    results.prepare(path, {"git_commit": "abc", "numpy_version": "2"})
    return path


def test_appended_results_are_read_back(path, rng):
    first, second = good_outcome(rng), good_outcome(rng, 4)
    results.append(path, trial("b", 4), 0, 0, second, "abc")
    results.append(path, trial("z"), 0, 1, first, "abc")
    results.append(path, trial("z"), 0, 0, failed_outcome("timed out after 3 s"), "def")
    results.append(path, trial("a"), 1, 0, failed_outcome(), "abc")
    result = results.read(path)
    assert result.provenance == {"git_commit": "abc", "numpy_version": "2"}
    assert [(c.name, c.ranks) for c in result.configurations] == [("z", 2), ("a", 2), ("b", 4)]
    assert result.configurations[0].recipe == trial("z").recipe
    failed, well = result.configurations[0].repeats
    assert (failed.number, failed.status, failed.exit_code, failed.reason) == (0, FAILED, 1, "timed out after 3 s")
    assert failed.hpcdist_version == well.hpcdist_version == hpcdist.__version__
    assert (failed.git_commit, failed.wall_s, dict(failed.summary), dict(failed.samples)) == ("def", 1.0, {}, {})
    assert well.summary == {
        "tokens_per_s": 10.5, "strategy": "ring", "val_loss": None, "peak_bytes.gradients": 7
    }  # fmt: skip
    for name, sample in first.samples.items():
        assert (well.samples[name] == sample.values).all()
    assert results.statuses(path)[trial("b", 4).id, 0] == OK
    assert not path.with_name("results.h5.next").exists()


def test_results_file_has_scales_and_units(path, rng):
    results.append(path, trial("a"), 0, 0, good_outcome(rng), "abc")
    results.append(path, trial("a"), 0, 1, failed_outcome(), "abc")
    with h5py.File(path) as file:
        assert (file.attrs["schema"], file.attrs["schema_version"]) == (results.SCHEMA, results.VERSION)
        group = file["trials/id-a-2/repeat-0"]
        assert group["step_s"].attrs["units"] == "s" and group.attrs["mpi_library"] == "MPI 1"
        assert [dim[0].name.rpartition("/")[2] for dim in group["step_s"].dims] == ["iteration", "rank"]
        assert [dim[0].name.rpartition("/")[2] for dim in group["loss"].dims] == ["iteration"]
        assert group["iteration"][...].tolist() == [1, 2, 3, 4] and group["rank"][...].tolist() == [0, 1]
        assert np.isnan(group["summary"].attrs["val_loss"]), "a missing measurement must be NaN"
        assert file["trials/id-a-2/repeat-1"].attrs["stderr_tail"] == "tail\nof stderr"


def test_later_result_replaces_an_earlier_one(path, rng):
    results.append(path, trial("a"), 0, 0, failed_outcome(), "abc")
    results.append(path, trial("a"), 0, 0, good_outcome(rng), "abc")
    assert results.statuses(path) == {("id-a-2", 0): OK}


def test_foreign_and_damaged_files_are_rejected(tmp_path, path, rng):
    with files.edit(tmp_path / "other.h5", "other", 1):
        pass
    with pytest.raises(StorageError, match="schema is 'other'"):
        results.prepare(tmp_path / "other.h5", {})
    with pytest.raises(StorageError, match="cannot be written"):
        results.prepare(tmp_path / "missing" / "results.h5", {})
    with pytest.raises(StorageError, match="cannot be written"):
        results.append(tmp_path / "gone.h5", trial("a"), 0, 0, failed_outcome(), "abc")
    with files.edit(path, results.SCHEMA, results.VERSION) as file:
        file.create_group("trials/id").attrs["ranks"] = 2
    with pytest.raises(StorageError, match="damaged"):
        results.read(path)


def test_full_disk_leaves_the_file_unchanged(path, rng, monkeypatch):
    results.append(path, trial("a"), 0, 0, good_outcome(rng), "abc")
    before = path.read_bytes()

    def raise_disk_full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", raise_disk_full)
    with pytest.raises(StorageError, match="No space left"):
        results.append(path, trial("b"), 1, 0, good_outcome(rng), "abc")
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


# ---- the selection of trials to run


def run_sweep(path, trials, repeats=1, measure=None, limits=UNBOUNDED, retry_failed=False):
    """Return the names of the trials that ran, the tally, and the messages."""
    ran, output = [], []

    def measure_trial(of, limit_s):
        ran.append(of.name)
        return (
            measure(of, limit_s)
            if measure
            else failed_outcome()
            if of.name.startswith("bad")
            else good_outcome(_RNG, of.ranks)
        )

    items = series.plan(trials, repeats, path, retry_failed)
    tally = series.run(items, path, measure_trial, limits, {"git_commit": "abc"}, output.append)
    return ran, tally, output


_RNG = np.random.default_rng(0)


def test_repeats_alternate_and_failures_do_not_end_the_sweep(tmp_path):
    ran, tally, output = run_sweep(tmp_path / "r.h5", [trial("a"), trial("bad"), trial("c")], 3)
    assert ran == ["a", "bad", "c", "c", "bad", "a", "a", "bad", "c"]
    assert tally == SweepTally(ok=6, failed=3, left=0)
    assert "[2/9] bad on 2 ranks, repeat 1: FAILED after 1.0 s, exit code 1" in output
    assert any("10 tokens/s" in line for line in output)


def test_recorded_trials_are_not_run_again(tmp_path):
    trials = [trial("a"), trial("bad")]
    run_sweep(tmp_path / "r.h5", trials, 2)
    assert run_sweep(tmp_path / "r.h5", trials, 2)[:2] == ([], SweepTally(2, 2, 0))
    assert run_sweep(tmp_path / "r.h5", [*trials, trial("c")], 2)[0] == ["c", "c"]
    assert run_sweep(tmp_path / "r.h5", [trial("a")], 3)[0] == ["a"], "one more repeat"
    assert run_sweep(tmp_path / "r.h5", [trial("a", 4)])[0] == ["a"], "other ranks"
    ran, tally, _ = run_sweep(tmp_path / "r.h5", trials, 2, lambda *_: good_outcome(_RNG), retry_failed=True)
    assert (ran, tally) == (["bad", "bad"], SweepTally(4, 0, 0))


def test_stopped_sweep_is_continued_by_the_next_call(tmp_path):
    def stop_at_b(of, _):
        if of.name == "b":
            raise SweepStopped
        return good_outcome(_RNG)

    trials = [trial("a"), trial("b"), trial("c")]
    ran, tally, output = run_sweep(tmp_path / "r.h5", trials, measure=stop_at_b)
    assert (ran, tally) == (["a", "b"], SweepTally(1, 0, 2)) and "stopped" in output[-1]
    assert run_sweep(tmp_path / "r.h5", trials)[0] == ["b", "c"]


def test_budget_skips_trials_that_would_not_end(tmp_path):
    """The file gives the duration of a known trial. A new trial may take as long as the longest one."""
    path, trials = tmp_path / "r.h5", [trial("long"), trial("short"), trial("new")]
    results.prepare(path, {})
    results.append(path, trials[0], 0, 0, good_outcome(_RNG, wall_s=1000.0), "")
    results.append(path, trials[1], 1, 0, good_outcome(_RNG, wall_s=0.001), "")
    ran, tally, output = run_sweep(path, trials, 2, limits=SeriesLimits(2000.0, 500.0))
    assert ran == ["short"], "only the second repeat of short; the new trial may take 1000 s"
    assert tally == SweepTally(ok=3, failed=0, left=3)
    assert sum("would not end within the time budget" in line for line in output) == 3
    limits = []
    run_sweep(
        path,
        trials[2:],
        measure=lambda _, limit_s: limits.append(limit_s) or good_outcome(_RNG),
        limits=SeriesLimits(60.0, 5000.0),
    )
    assert limits == [60.0]


def test_timed_out_trial_may_run_again_with_a_smaller_limit(tmp_path):
    path, trials = tmp_path / "r.h5", [trial("late"), trial("new"), trial("known")]
    results.prepare(path, {})
    results.append(path, trials[0], 0, 0, failed_outcome("timed out after 600 s", wall_s=600.0), "")
    run_, tally, _ = run_sweep(path, trials, limits=SeriesLimits(600.0, 500.0), retry_failed=True)
    assert (run_, tally) == (["late", "new", "known"], SweepTally(3, 0, 0)), "the time of a failure must not count"
    results.append(path, trials[2], 2, 0, good_outcome(_RNG, wall_s=1000.0), "")
    assert run_sweep(path, trials, 2, limits=SeriesLimits(30.0, 500.0))[0] == ["known", "new", "late"], (
        "30 s at most, each"
    )


@pytest.mark.full
def test_lock_is_exclusive_among_many_processes(tmp_path):
    """The holder removes the lock file. A waiter on the removed file must not believe that it has the lock."""
    path, count = tmp_path / "r.h5", tmp_path / "count"
    count.write_text("0")
    program = f"""
    import sys
    from pathlib import Path
    from hpcdist.bench.sweep import results
    from hpcdist.errors import StorageError
    path, count, done = Path({str(path)!r}), Path({str(count)!r}), 0
    while done < 200:
        try:
            with results.locked(path):
                count.write_text(str(int(count.read_text()) + 1))
                done += 1
        except StorageError as error:
            assert "another sweep writes" in str(error), error
    """
    started = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) for _ in range(3)]
    assert [process.wait(LIMIT_S) for process in started] == [0, 0, 0]
    assert count.read_text() == "600" and os.listdir(tmp_path) == ["count"]


def test_trial_ended_by_the_budget_is_not_recorded(tmp_path, monkeypatch):
    now_s = [0.0]

    def use_the_whole_limit(_, limit_s):
        assert limit_s == 5.0
        now_s[0] += limit_s
        return failed_outcome("timed out after 5 s")

    monkeypatch.setattr(series, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    ran, tally, output = run_sweep(
        tmp_path / "r.h5", [trial("a")], measure=use_the_whole_limit, limits=SeriesLimits(60.0, 5.0)
    )
    assert (ran, tally) == (["a"], SweepTally(0, 0, 1)) and "time budget ended before the trial" in output[0]
    assert results.statuses(tmp_path / "r.h5") == {}


def test_anonymous_outcome_has_no_host_names():
    outcome = TrialOutcome(FAILED, "", 1.0, 1, "node7 is down", "[node7] gone\n[node8]")
    hidden = series.anonymous(outcome, ["node7"])
    assert (hidden.reason, hidden.stderr_tail) == ("HOST is down", "[HOST] gone\n[node8]")


def test_plan_items_have_their_recorded_status(path, rng):
    results.append(path, trial("a"), 0, 0, failed_outcome(), "")
    assert series.plan([trial("a")], 1, path, False) == [SeriesItem(trial("a"), 0, 0, FAILED)]
    assert series.plan([trial("a")], 1, path, True) == [SeriesItem(trial("a"), 0, 0, "")]
