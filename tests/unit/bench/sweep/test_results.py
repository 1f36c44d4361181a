"""Results of a sweep: what reaches the file, what a kill leaves of it, and what is run again."""

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


def good(rng, ranks=2, wall_s=1.0):
    samples = {"step_s": TrialSample(rng.random((4, ranks)), "s", "time of a step")}
    samples |= {
        "loss": TrialSample(rng.random(4), "1", "loss"),
        "iteration": TrialSample(np.arange(1, 5), "1", "steps"),
    }
    return TrialOutcome(
        OK, "2026-01-01T00:00:00+00:00", wall_s, 0, summary=SUMMARY, samples=samples, mpi_library="MPI 1"
    )


def bad(reason="exit code 1", wall_s=1.0):
    return TrialOutcome(FAILED, "2026-01-01T00:00:00+00:00", wall_s, 1, reason, "tail\nof stderr")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "results.h5"
    results.prepare(path, {"git_commit": "abc", "numpy_version": "2"})
    return path


def test_what_is_appended_comes_back(path, rng):
    first, second = good(rng), good(rng, 4)
    results.append(path, trial("b", 4), 0, 0, second, "abc")
    results.append(path, trial("z"), 0, 1, first, "abc")
    results.append(path, trial("z"), 0, 0, bad("no end within 3 s"), "def")
    results.append(path, trial("a"), 1, 0, bad(), "abc")
    found = results.read(path)
    assert found.provenance == {"git_commit": "abc", "numpy_version": "2"}
    assert [(c.name, c.ranks) for c in found.configurations] == [("z", 2), ("a", 2), ("b", 4)]
    assert found.configurations[0].recipe == trial("z").recipe
    failed, well = found.configurations[0].repeats
    assert (failed.number, failed.status, failed.exit_code, failed.reason) == (0, FAILED, 1, "no end within 3 s")
    assert failed.hpcdist_version == well.hpcdist_version == hpcdist.__version__
    assert (failed.git_commit, failed.wall_s, dict(failed.summary), dict(failed.samples)) == ("def", 1.0, {}, {})
    assert well.summary == {
        "tokens_per_s": 10.5, "strategy": "ring", "val_loss": None, "peak_bytes.gradients": 7
    }  # fmt: skip
    for name, sample in first.samples.items():
        assert (well.samples[name] == sample.values).all()
    assert results.statuses(path)[trial("b", 4).id, 0] == OK
    assert not path.with_name("results.h5.next").exists()


def test_other_tools_find_scales_and_units(path, rng):
    results.append(path, trial("a"), 0, 0, good(rng), "abc")
    results.append(path, trial("a"), 0, 1, bad(), "abc")
    with h5py.File(path) as file:
        assert (file.attrs["schema"], file.attrs["schema_version"]) == (results.SCHEMA, results.VERSION)
        group = file["trials/id-a-2/repeat-0"]
        assert group["step_s"].attrs["units"] == "s" and group.attrs["mpi_library"] == "MPI 1"
        assert [dim[0].name.rpartition("/")[2] for dim in group["step_s"].dims] == ["iteration", "rank"]
        assert [dim[0].name.rpartition("/")[2] for dim in group["loss"].dims] == ["iteration"]
        assert group["iteration"][...].tolist() == [1, 2, 3, 4] and group["rank"][...].tolist() == [0, 1]
        assert np.isnan(group["summary"].attrs["val_loss"]), "what was not measured is no number"
        assert file["trials/id-a-2/repeat-1"].attrs["stderr_tail"] == "tail\nof stderr"


def test_a_later_try_replaces_an_earlier_one(path, rng):
    results.append(path, trial("a"), 0, 0, bad(), "abc")
    results.append(path, trial("a"), 0, 0, good(rng), "abc")
    assert results.statuses(path) == {("id-a-2", 0): OK}


def test_foreign_and_damaged_files_are_refused(tmp_path, path, rng):
    with files.edit(tmp_path / "other.h5", "other", 1):
        pass
    with pytest.raises(StorageError, match="schema 'other'"):
        results.prepare(tmp_path / "other.h5", {})
    with pytest.raises(StorageError, match="cannot be written"):
        results.prepare(tmp_path / "missing" / "results.h5", {})
    with pytest.raises(StorageError, match="cannot be written"):
        results.append(tmp_path / "gone.h5", trial("a"), 0, 0, bad(), "abc")
    with files.edit(path, results.SCHEMA, results.VERSION) as file:
        file.create_group("trials/id").attrs["ranks"] = 2
    with pytest.raises(StorageError, match="damaged"):
        results.read(path)


def test_a_full_disk_leaves_the_file_as_it_was(path, rng, monkeypatch):
    results.append(path, trial("a"), 0, 0, good(rng), "abc")
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left"):
        results.append(path, trial("b"), 1, 0, good(rng), "abc")
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


# ---- which trials are run


def run(path, trials, repeats=1, measure=None, limits=UNBOUNDED, retry_failed=False):
    """Return (what was run, the tally, what was said)."""
    ran, said = [], []

    def measured(of, limit_s):
        ran.append(of.name)
        return measure(of, limit_s) if measure else bad() if of.name.startswith("bad") else good(_RNG, of.ranks)

    items = series.plan(trials, repeats, path, retry_failed)
    tally = series.run(items, path, measured, limits, {"git_commit": "abc"}, said.append)
    return ran, tally, said


_RNG = np.random.default_rng(0)


def test_repeats_alternate_and_a_failure_does_not_end_the_sweep(tmp_path):
    ran, tally, said = run(tmp_path / "r.h5", [trial("a"), trial("bad"), trial("c")], 3)
    assert ran == ["a", "bad", "c", "c", "bad", "a", "a", "bad", "c"]
    assert tally == SweepTally(ok=6, failed=3, left=0)
    assert "[2/9] bad on 2 ranks, repeat 1: FAILED after 1.0 s, exit code 1" in said
    assert any("10 tokens/s" in line for line in said)


def test_recorded_trials_are_not_run_again(tmp_path):
    trials = [trial("a"), trial("bad")]
    run(tmp_path / "r.h5", trials, 2)
    assert run(tmp_path / "r.h5", trials, 2)[:2] == ([], SweepTally(2, 2, 0))
    assert run(tmp_path / "r.h5", [*trials, trial("c")], 2)[0] == ["c", "c"]
    assert run(tmp_path / "r.h5", [trial("a")], 3)[0] == ["a"], "one more repeat"
    assert run(tmp_path / "r.h5", [trial("a", 4)])[0] == ["a"], "other ranks"
    ran, tally, _ = run(tmp_path / "r.h5", trials, 2, lambda *_: good(_RNG), retry_failed=True)
    assert (ran, tally) == (["bad", "bad"], SweepTally(4, 0, 0))


def test_a_stop_leaves_the_rest_for_the_next_call(tmp_path):
    def stopped(of, _):
        if of.name == "b":
            raise SweepStopped
        return good(_RNG)

    trials = [trial("a"), trial("b"), trial("c")]
    ran, tally, said = run(tmp_path / "r.h5", trials, measure=stopped)
    assert (ran, tally) == (["a", "b"], SweepTally(1, 0, 2)) and "stopped" in said[-1]
    assert run(tmp_path / "r.h5", trials)[0] == ["b", "c"]


def test_the_budget_starts_nothing_that_cannot_end(tmp_path):
    """Going by what the file knows of a trial; another trial may be as long as the longest."""
    path, trials = tmp_path / "r.h5", [trial("long"), trial("short"), trial("new")]
    results.prepare(path, {})
    results.append(path, trials[0], 0, 0, good(_RNG, wall_s=1000.0), "")
    results.append(path, trials[1], 1, 0, good(_RNG, wall_s=0.001), "")
    ran, tally, said = run(path, trials, 2, limits=SeriesLimits(2000.0, 500.0))
    assert ran == ["short"], "of the second repeat; the new one may take 1000 s too"
    assert tally == SweepTally(ok=3, failed=0, left=3)
    assert sum("left, it would not end within the budget" in line for line in said) == 3
    limits = []
    run(
        path,
        trials[2:],
        measure=lambda _, limit_s: limits.append(limit_s) or good(_RNG),
        limits=SeriesLimits(60.0, 5000.0),
    )
    assert limits == [60.0]


def test_a_trial_that_ran_into_its_limit_is_run_again_under_a_smaller_one(tmp_path):
    path, trials = tmp_path / "r.h5", [trial("late"), trial("new"), trial("known")]
    results.prepare(path, {})
    results.append(path, trials[0], 0, 0, bad("no end within 600 s", wall_s=600.0), "")
    run_, tally, _ = run(path, trials, limits=SeriesLimits(600.0, 500.0), retry_failed=True)
    assert (run_, tally) == (["late", "new", "known"], SweepTally(3, 0, 0)), "how long a failure took tells nothing"
    results.append(path, trials[2], 2, 0, good(_RNG, wall_s=1000.0), "")
    assert run(path, trials, 2, limits=SeriesLimits(30.0, 500.0))[0] == ["known", "new", "late"], "30 s at most, each"


@pytest.mark.full
def test_the_lock_is_one_of_many_processes(tmp_path):
    """A holder removes the file: whoever waits at a file without a name must not believe that it has the lock."""
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


def test_a_trial_that_the_budget_ended_is_not_recorded(tmp_path, monkeypatch):
    now_s = [0.0]

    def slow(_, limit_s):
        assert limit_s == 5.0
        now_s[0] += limit_s
        return bad("no end within 5 s")

    monkeypatch.setattr(series, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    ran, tally, said = run(tmp_path / "r.h5", [trial("a")], measure=slow, limits=SeriesLimits(60.0, 5.0))
    assert (ran, tally) == (["a"], SweepTally(0, 0, 1)) and "ended with the budget" in said[0]
    assert results.statuses(tmp_path / "r.h5") == {}


def test_names_of_hosts_are_left_out():
    outcome = TrialOutcome(FAILED, "", 1.0, 1, "node7 is down", "[node7] gone\n[node8]")
    hidden = series.anonymous(outcome, ["node7"])
    assert (hidden.reason, hidden.stderr_tail) == ("HOST is down", "[HOST] gone\n[node8]")


def test_an_item_knows_what_is_recorded(path, rng):
    results.append(path, trial("a"), 0, 0, bad(), "")
    assert series.plan([trial("a")], 1, path, False) == [SeriesItem(trial("a"), 0, 0, FAILED)]
    assert series.plan([trial("a")], 1, path, True) == [SeriesItem(trial("a"), 0, 0, "")]
