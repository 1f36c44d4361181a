"""Comparison of results: equal pairs give 0 and slower ones 1 in spite of noise, and the exit codes for CI."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.bench import compare
from hpcdist.bench.collectives import results as collectives_results
from hpcdist.bench.collectives.results import CollectivesConfiguration, ConfigurationKey
from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome, TrialSample
from hpcdist.cli.bench.group import compare as results_compare
from hpcdist.errors import FAILURE, StorageError, UsageError

ITERATIONS = 400
RULE = compare.CompareRule()


def key(algorithm="ring", nbytes=4096, library="Open MPI v5.0.11", implementation="hpcdist"):
    return ConfigurationKey(
        "allreduce", "float32", nbytes, 2, 1, algorithm, "ordinary", "cold", implementation, library
    )


def noisy_times(rng, median_s=1e-3, count=ITERATIONS):
    """Return times like measured times: skewed, with a tail of preemptions."""
    times = median_s * rng.lognormal(0.0, 0.1, count)
    return np.where(rng.random(count) < 0.03, 20 * times, times)


def compare_side(times_s, sessions=1):
    return compare.CompareSide(np.asarray(times_s), np.arange(len(times_s)) % sessions)


def write_results(path, rng, medians, sessions=1):
    """Write a collectives file of ``medians``: {key: median in s, or None for a wrong result}."""
    for one, median_s in medians.items():
        for _ in range(sessions):
            slowest = noisy_times(rng, median_s or 1e-3)
            times = np.stack([0.7 * slowest, slowest], axis=1)
            zeros = np.zeros(len(times))
            made = CollectivesConfiguration(
                one, one.algorithm == "memcpy", 3, 0, "" if median_s else "rank 0: no", times, 0 * times, zeros
            )
            collectives_results.append(path, [made], {})
    return path


def run_compare(*arguments):
    """Run the command and return its exit code and stdout."""
    done = CliRunner().invoke(results_compare, [str(argument) for argument in arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value, done.stdout


def test_exit_code_is_0_for_equal_and_1_for_slower_results(tmp_path, rng):
    before = write_results(tmp_path / "a.h5", rng, {key(): 1e-3, key("native"): 2e-3})
    equal = write_results(tmp_path / "b.h5", rng, {key(): 1e-3, key("native"): 2e-3})
    slower = write_results(tmp_path / "c.h5", rng, {key(): 1.2e-3, key("native"): 2e-3})
    assert run_compare(before, equal)[0] == 0
    code, shown = run_compare(before, slower)
    assert code == FAILURE
    first, second = shown.splitlines()[1:3]
    assert "ring" in first and first.endswith("slower") and second.endswith("same"), "largest slowdown must come first"
    assert run_compare(slower, before)[0] == 0, "a speedup is not a regression"
    assert run_compare(before, slower, "--threshold", "30%")[0] == 0
    assert run_compare(before, slower, "--threshold", "0.1")[0] == FAILURE


def test_regression_needs_the_whole_interval_beyond_the_threshold(rng):
    noise = np.linspace(0.5, 1.5, 9)  # too much noise to know the median to 5 %
    wide = compare.change("x", compare_side(1e-3 * noise), compare_side(1.1e-3 * noise), RULE)
    assert wide.ratio == pytest.approx(1.1) and wide.low < 1.05 < wide.high
    assert wide.verdict == compare.UNDECIDED
    reference = noisy_times(rng, 1e-3, 2000)
    assert (
        compare.change("x", compare_side(reference), compare_side(1.1 * reference), RULE).verdict == compare.REGRESSION
    )


def test_intervals_have_their_stated_coverage(rng):
    rule = replace(RULE, confidence=0.9, resamples=300)
    changes = [
        compare.change(
            str(trial), compare_side(noisy_times(rng, 1e-3, 60)), compare_side(noisy_times(rng, 1.1e-3, 60)), rule
        )
        for trial in range(120)
    ]
    held = sum(one.low <= 1.1 <= one.high for one in changes)
    assert 0.8 * len(changes) <= held <= 0.99 * len(changes)  # 0.9 within 3.6 standard deviations
    tighter = [
        compare.change(
            "x", compare_side(noisy_times(rng, 1e-3, 6000)), compare_side(noisy_times(rng, 1e-3, 6000)), rule
        )
        for _ in range(2)
    ]
    wide, narrow = (np.median([one.high - one.low for one in each]) for each in (changes, tighter))
    assert narrow < wide / 5, "a hundred times the samples should give a tenth of the width"


def test_differences_between_processes_widen_the_interval(rng):
    """Four processes per side, each with a different speed: intervals from iterations alone would be too narrow."""
    speeds = np.array([1.0, 1.05, 0.95, 1.02])
    times = 1e-3 * (speeds[np.arange(ITERATIONS) % 4]) * rng.lognormal(0.0, 0.05, ITERATIONS)
    together = compare.change("x", compare_side(times), compare_side(times), RULE)
    apart = compare.change("x", compare_side(times, 4), compare_side(times, 4), RULE)
    assert apart.high - apart.low > 2 * (together.high - together.low)
    assert (apart.sessions, together.sessions) == ((4, 4), (1, 1))


def test_same_seed_gives_the_same_intervals(tmp_path, rng):
    before = write_results(tmp_path / "a.h5", rng, {key(): 1e-3, key("native"): 2e-3})
    after = write_results(tmp_path / "b.h5", rng, {key(): 1e-3, key("native"): 2e-3})
    only = tmp_path / "only.h5"
    collectives_results.append(only, collectives_results.read(after).configurations[-1:], {})
    whole = json.loads(run_compare(before, after, "--json")[1])["changes"]
    again = json.loads(run_compare(before, after, "--json")[1])["changes"]
    part = json.loads(run_compare(before, only, "--json")[1])["changes"]
    other = json.loads(run_compare(before, after, "--json", "--seed", "7")[1])["changes"]
    assert whole == again and part[0] in whole
    assert [one["low"] for one in other] != [one["low"] for one in whole]
    assert [one["ratio"] for one in other] == [one["ratio"] for one in whole]


def test_configurations_in_one_file_only_are_listed(tmp_path, rng):
    before = write_results(tmp_path / "a.h5", rng, {key(): 1e-3, key("native"): 1e-3, key("circulant"): 1e-3})
    after = write_results(tmp_path / "b.h5", rng, {key(): 1e-3, key(nbytes=8192): 1e-3})
    code, shown = run_compare(before, after)
    assert code == 0
    assert "only in the first: allreduce float32 4096 B, 2 ranks on 1, Open MPI, circulant, native" in shown
    assert "only in the second: allreduce float32 8192 B, 2 ranks on 1, Open MPI, ring" in shown
    assert "" not in shown.splitlines()
    assert "\n\nonly in the first: " in run_compare(before, after, "--markdown")[1], (
        "the line must not be a row of the table"
    )
    document = json.loads(run_compare(before, after, "--json")[1])
    assert (len(document["only_before"]), len(document["only_after"]), len(document["changes"])) == (2, 1, 1)


def test_wrong_result_in_the_second_file_is_a_regression(tmp_path, rng):
    good = write_results(tmp_path / "a.h5", rng, {key(): 1e-3, key("native"): 1e-3})
    bad = write_results(tmp_path / "b.h5", rng, {key(): None, key("native"): 1e-3})
    code, shown = run_compare(good, bad)
    assert code == FAILURE
    first, second = shown.splitlines()[1:3]
    assert "ring" in first and first.endswith("wrong in the second") and second.endswith("same")
    document = json.loads(run_compare(good, bad, "--json")[1])
    assert document["changes"][0]["ratio"] is None and len(document["regressions"]) == 1
    assert run_compare(bad, bad)[0] == FAILURE, "a result that stays wrong is wrong"
    code, shown = run_compare(bad, good)
    assert code == 0
    assert "wrong in the first, and not compared: allreduce float32 4096 B, 2 ranks on 1, Open MPI, ring" in shown


def test_comparison_without_any_verdict_is_rejected(tmp_path, rng, monkeypatch):
    path = write_results(tmp_path / "a.h5", rng, {key(): 1e-3, key("memcpy"): 1e-3})
    monkeypatch.setattr(compare, "LEAST", ITERATIONS)
    assert run_compare(path, path)[0] == 0
    monkeypatch.setattr(compare, "LEAST", ITERATIONS + 1)
    with pytest.raises(UsageError, match="none of 1 common configurations"):
        run_compare(path, path)


def test_last_line_counts_configurations_without_verdict(tmp_path, rng):
    before, after = (
        write_results(tmp_path / name, rng, {key(): 1e-3, key("native"): 1e-3}) for name in ("a.h5", "b.h5")
    )
    short = tmp_path / "short.h5"
    whole = collectives_results.read(before).configurations
    few = replace(whole[0], time_s=whole[0].time_s[:4], start_s=whole[0].start_s[:4], session=whole[0].session[:4])
    collectives_results.append(short, [few, whole[1]], {})
    done = CliRunner().invoke(results_compare, [str(short), str(after)], standalone_mode=False)
    assert done.return_value == 0
    assert done.stderr.splitlines()[-1] == (
        "0 of 2 slower by more than 5 %, 0 wrong in the second, 1 without a verdict"
    )


def test_mpi_versions_may_differ_but_not_vendors(tmp_path, rng):
    before = write_results(tmp_path / "a.h5", rng, {key(): 1e-3})
    newer = write_results(tmp_path / "b.h5", rng, {key(library="Open MPI v6.1.0, package: x"): 1e-3})
    other = write_results(tmp_path / "c.h5", rng, {key(library="MPICH Version:      5.0.2"): 1e-3})
    assert run_compare(before, newer)[0] == 0
    with pytest.raises(UsageError, match="no configuration in common"):
        run_compare(before, other)


def test_changed_reference_is_noted_but_no_regression(tmp_path, rng):
    before = write_results(tmp_path / "a.h5", rng, {key(): 1e-3, key("memcpy"): 1e-3})
    code, shown = run_compare(before, write_results(tmp_path / "b.h5", rng, {key(): 1e-3, key("memcpy"): 2e-3}))
    assert code == 0
    assert "files were measured on different machines, or under different load" in shown


def test_few_iterations_have_no_verdict():
    assert compare.change("x", compare_side([1e-3] * 4), compare_side([9e-3] * 400), RULE).verdict == compare.FEW
    assert compare.change("x", compare_side([1e-3] * 5), compare_side([9e-3] * 5), RULE).verdict == compare.REGRESSION


def test_markdown_is_a_table(tmp_path, rng):
    path = write_results(tmp_path / "a.h5", rng, {key(): 1e-3})
    lines = run_compare(path, path, "--markdown")[1].splitlines()
    assert lines[0].startswith("| configuration |") and lines[1].startswith("| --- | ---: |")
    assert lines[2].count("|") == lines[0].count("|") and "| 1.000 |" in lines[2]
    with pytest.raises(UsageError, match="choose one"):
        run_compare(path, path, "--markdown", "--json")


@pytest.mark.parametrize("threshold", ["much", "-5%", "5%%", ""])
def test_invalid_threshold_is_a_usage_error(tmp_path, rng, threshold):
    path = write_results(tmp_path / "a.h5", rng, {key(): 1e-3})
    done = CliRunner().invoke(results_compare, [str(path), str(path), "--threshold", threshold])
    assert done.exit_code == 2 and "expected a percentage or a fraction" in done.output


def test_unreadable_or_mixed_files_are_rejected(tmp_path, rng):
    path = write_results(tmp_path / "a.h5", rng, {key(): 1e-3})
    sweep = tmp_path / "sweep.h5"
    results.prepare(sweep, {})
    (tmp_path / "text.h5").write_text("no HDF5")
    for other in (tmp_path / "missing.h5", tmp_path / "text.h5"):
        with pytest.raises(StorageError):
            run_compare(path, other)
    with pytest.raises(UsageError, match="give two files of one benchmark"):
        run_compare(path, sweep)


def write_sweep(path, rng, step_s, ranks=2):
    results.prepare(path, {})
    trial = SweepTrial("id", "ring", ranks, {}, "")
    for repeat in range(3):
        times = np.stack([0.5 * (slowest := noisy_times(rng, step_s, 60)), slowest], axis=1)
        times[0] = 100.0  # compiles
        samples = {
            "step_s": TrialSample(times, "s", ""),
            "sent_bytes": TrialSample(0 * times, "By", ""),
            "iteration": TrialSample(np.arange(60), "1", ""),
        }
        results.append(path, trial, 0, repeat, TrialOutcome(OK, "", 1.0, 0, samples=samples), "c1")
    results.append(path, trial, 0, 3, TrialOutcome(FAILED, "", 1.0, 1, "boom"), "c1")
    return path


def test_sweeps_are_compared_by_step_time(tmp_path, rng):
    before, equal, slower = (
        write_sweep(tmp_path / name, rng, step_s) for name, step_s in (("a.h5", 0.1), ("b.h5", 0.1), ("c.h5", 0.13))
    )
    assert run_compare(before, equal)[0] == 0
    code, shown = run_compare(before, slower, "--json")
    assert code == FAILURE
    (one,) = json.loads(shown)["changes"]
    assert one["name"] == "ring on 2 ranks" and one["sessions"] == [3, 3] and one["iterations"] == [177, 177]
    assert one["low"] < 1.3 < one["high"]
