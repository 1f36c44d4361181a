"""The power study: trials and their order, Pareto front and recommendation against brute force, report, limits."""

import json
import math
import os
import re
import shlex
import signal
import statistics
from pathlib import Path

import numpy as np
import pytest

import hpcdist
from benchmarks import harness
from benchmarks.power import pareto, report, study
from benchmarks.power.devices import Axes, Devices
from benchmarks.power.pareto import BEHIND, FRONT, NEAR, OBJECTIVES, Candidate, Interval
from harness import jobs
from harness.marks import cases
from hpcdist.bench.sweep import results, trial
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.results import SweepConfiguration, SweepResults, TrialRepeat
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome, TrialSample
from hpcdist.errors import StorageError, UsageError

# Candidates: with values from a small set, so that ties are common, or with noise.


def draw_candidates(rng, count, repeats, noise=0.0, values=None):
    actual = []
    for number in range(count):
        at = np.exp(rng.normal(size=2)) if values is None else rng.choice(values, 2)
        rows = at * np.exp(noise * rng.normal(size=(repeats, 2)))
        actual.append(Candidate(f"c{number}", {n: tuple(map(float, row)) for n, row in enumerate(rows)}, number > 0))
    return actual


def geometric_means(candidate):
    """Return the geometric means of (seconds, joules), computed directly."""
    rows = list(candidate.repeats.values())
    return [math.prod(row[n] for row in rows) ** (1 / len(rows)) for n in range(2)]


@pytest.mark.parametrize("trial", range(20))
def test_pareto_front_matches_brute_force(rng, trial):
    result = draw_candidates(rng, int(rng.integers(1, 12)), 1, values=[1.0, 2.0, 4.0, 8.0] if trial % 2 else None)
    points = np.array([geometric_means(one) for one in result])
    expected = []
    for point in points:
        others = (points <= point).all(axis=1) & (points < point).any(axis=1)
        expected.append(BEHIND if others.any() else FRONT)
    assert pareto.verdicts(result) == expected
    assert FRONT in expected


def slow_ratio(one, other, value):
    """Return the mean and the 95 % interval of the paired ratio, computed directly."""
    common = one.repeats.keys() & other.repeats.keys()
    logs = [math.log(value(*one.repeats[n]) / value(*other.repeats[n])) for n in common]
    mean = sum(logs) / len(logs)
    spread = math.sqrt(sum((log - mean) ** 2 for log in logs) / (len(logs) - 1) / len(logs))
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}[len(logs)]
    return math.exp(mean), math.exp(mean - t * spread), math.exp(mean + t * spread)


VALUES = {
    "energy": lambda seconds, joules: joules,
    "edp": lambda seconds, joules: joules * seconds,
    "ed2p": lambda seconds, joules: joules * seconds * seconds,
    "time": lambda seconds, joules: seconds,
}


@pytest.mark.parametrize("trial", range(20))
def test_verdicts_account_for_noise(rng, trial):
    counts = int(rng.integers(2, 9)), int(rng.integers(2, 7))
    result = draw_candidates(rng, *counts, noise=float(rng.choice([0.01, 0.1, 0.5])))
    means = {one.name: geometric_means(one) for one in result}
    for candidate, verdict in zip(result, pareto.verdicts(result), strict=True):
        time, energy = means[candidate.name]
        better = [one for one in result if means[one.name][0] <= time and means[one.name][1] <= energy]
        better.remove(candidate)
        ends = [[slow_ratio(one, candidate, VALUES[name])[2] for name in ("time", "energy")] for one in better]
        is_certain = any(max(pair) <= 1 for pair in ends)
        assert verdict == (BEHIND if is_certain else NEAR if better else FRONT)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("trial", range(10))
def test_recommendation_matches_brute_force(rng, objective, trial):
    repeats = int(rng.integers(1, 6))
    result = draw_candidates(rng, int(rng.integers(2, 9)), repeats, noise=float(rng.choice([0.001, 0.3])))
    slowdown = None if trial % 2 else float(1 + abs(rng.normal()))
    chosen = pareto.recommend(result, objective, slowdown)
    base = result[0]  # the only one without a limit
    allowed = [
        one
        for one in result
        if slowdown is None or one is base or geometric_means(one)[0] <= slowdown * geometric_means(base)[0]
    ]
    best = min(allowed, key=lambda one: VALUES[objective](*geometric_means(one)))
    if best is not base and repeats > 1 and slow_ratio(best, base, VALUES[objective])[2] >= 1:
        best = base  # a gain within the noise does not count
    assert chosen.name == best.name and pareto.reference(result) is base
    if best is not base:
        ratios = [pareto.ratio(best, base, name) for name in ("time", "energy")]
        assert [one.value for one in ratios] == pytest.approx(np.divide(geometric_means(best), geometric_means(base)))
        assert math.isnan(ratios[0].high) == (repeats == 1)


def make_candidate(name, *rows, limited=True):
    return Candidate(name, dict(enumerate(rows)), limited)


def test_recommendation_text():
    base = make_candidate("as found", (1.0, 100.0), (1.0, 102.0), (1.0, 98.0), limited=False)
    low = make_candidate("250 W", (1.04, 82.0), (1.04, 83.64), (1.04, 80.36))
    near = make_candidate("240 W", (1.05, 81.0), (1.05, 83.0), (1.05, 81.0))
    noisy = make_candidate("200 W", (1.2, 70.0), (1.2, 130.0), (1.2, 60.0))

    def reason(*candidates, objective="energy", max_slowdown=None):
        return pareto.recommend(candidates, objective, max_slowdown).reason

    expected = "250 W: 18 % less energy [18, 18], 4 % more time [4, 4], relative to as found"
    assert reason(base, low, max_slowdown=1.1) == expected
    assert ", 14.7 % less energy-delay product [14.7, 14.7], rel" in reason(base, low, objective="edp")
    bound = "as found: no configuration within 1.03x of its time has a lower energy"
    assert reason(base, low, max_slowdown=1.03) == bound
    assert reason(base, low, objective="time").startswith("as found: no configuration has a lower time")
    assert "200 W, has" in reason(base, noisy) and "within the noise of 3 repeats" in reason(base, noisy)
    output = reason(base, low, near)
    assert output.startswith("240 W: 18.3 % less energy") and output.endswith(
        "; the noise is too large to distinguish it from 250 W"
    )
    once = reason(make_candidate("as found", (1.0, 9.0), limited=False), make_candidate("1 W", (1.0, 6.0)))
    assert once.startswith("1 W: 33.3 % less energy, equal time, relative to as found; there is only one repeat")


def test_fastest_candidate_is_reference_if_all_are_limited():
    actual = [make_candidate("a", (2.0, 1.0)), make_candidate("b", (1.0, 2.0))]
    assert pareto.reference(actual).name == "b"
    assert pareto.recommend(actual, "energy", 1.5).name == "b"
    assert pareto.recommend(actual[:1], "energy").name is None
    assert pareto.recommend([], "energy").name is None


def test_ratio_uses_only_common_repeats():
    first = Candidate("a", {0: (1.0, 1.0), 1: (2.0, 2.0), 5: (100.0, 100.0)})
    second = Candidate("b", {0: (2.0, 1.0), 1: (4.0, 2.0), 7: (0.1, 0.1)})
    assert pareto.ratio(first, second, "time") == Interval(0.5, 0.5, 0.5)
    apart = pareto.ratio(Candidate("a", {0: (1.0, 1.0)}), Candidate("b", {1: (4.0, 1.0)}), "time")
    assert apart.value == pytest.approx(0.25) and math.isnan(apart.low)


@pytest.mark.parametrize("count", [2, 3, 5, 30, 31, 40])
@pytest.mark.full_except("5")
def test_intervals_contain_the_true_value_95_percent_of_the_time(rng, count):
    draws = rng.normal(0.3, 0.7, (4000, count))
    held = 0
    for row in draws:
        result = pareto.estimate(list(row))
        held += result.low <= math.exp(0.3) <= result.high
        assert result.value == pytest.approx(math.exp(statistics.fmean(row)))
    assert 0.93 < held / len(draws) < 0.97, "expected within six standard deviations of the count"


# Trials.


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.toml"
    (tmp_path / "text.txt").write_text("abc " * 500)
    path.write_text(f"[data]\npath = 'text.txt'\n[energy]\npowercap = '{tmp_path / 'powercap'}'\n")
    return path


def parse(recipe, *words):
    return harness.parsed(harness.Study.of(study), study, "power", [str(recipe), *words])


def trials_of(chosen):
    return study.trials_of(chosen, study.axes_of(chosen))[0]


def test_trials_are_all_combinations_and_one_without_limits(recipe):
    words = ("--sweep", "ranks=1,2", "--sweep", "threads=1", "--sweep", "run.seed=1,2", "--clocks", "900")
    chosen = parse(recipe, *words, "--limits", "200,300")
    trials = trials_of(chosen)
    assert len(trials) == len({trial.id for trial in trials}) == 2 * 2 * 3
    assert [trial.name for trial in trials[:3]] == [
        "seed=1 threads=1 as found",
        "seed=1 threads=1 200 W 900 MHz",
        "seed=1 threads=1 300 W 900 MHz",
    ]
    limits = [tuple(trial.settings.get(name) for name in (study.LIMIT, study.CLOCK)) for trial in trials[:3]]
    assert limits == [(None, None), (200.0, 900.0), (300.0, 900.0)]
    assert [trial.id for trial in trials_of(chosen)] == [trial.id for trial in trials]
    assert [trial.name for trial in trials_of(parse(recipe, "--limits", "200,200.0"))] == ["as found", "200 W"]


def test_order_is_random_and_reversed_in_every_second_repeat(recipe, tmp_path, rng):
    trials = trials_of(parse(recipe, "--limits", ",".join(map(str, range(100, 900, 100)))))
    seed = int(rng.integers(1 << 32))
    items = study.plan(trials, 6, tmp_path / "none.h5", False, seed)
    orders = [[item.position for item in items if item.repeat == repeat] for repeat in range(6)]
    assert all(sorted(order) == list(range(len(trials))) for order in orders)
    assert orders[1] == orders[0][::-1] and orders[3] == orders[2][::-1] and orders[5] == orders[4][::-1]
    assert items == study.plan(trials, 6, tmp_path / "none.h5", False, seed)
    assert len({tuple(orders[n]) for n in (0, 2, 4)}) > 1


def make_outcome(**changed):
    summary = {
        "seconds_by_phase": {"training": 4.0, "validation": 1.0},
        "energy_j_by_phase": {"training": 200.0, "validation": 50.0},
        "energy_j_by_kind": {"gpu": 230.0, "cpu": 20.0},
        "energy_j": 250.0,
        "energy_reason": None,
        "energy_reason_by_phase": {},
        "energy_not_included": ["dram (node 0): none"],
        "energy_sources": [{"node": 0}],
        "tokens_per_s": 100.0,
    }
    samples = {
        "tokens": TrialSample(np.array([100, 100, 200]), "1", ""),
        "iteration": TrialSample(np.arange(3), "1", ""),
        "step_s": TrialSample(np.array([[9.0, 1.0], [1.0, 2.0], [3.0, 1.0]]), "s", ""),
        "sent_bytes": TrialSample(np.zeros((3, 2)), "By", ""),
    }
    return TrialOutcome(OK, "2026-01-01T00:00:00+00:00", 7.0, 0, summary=summary | changed, samples=samples)


def test_figures_of_a_trial():
    result = report.figures(make_outcome())
    assert result["s_per_token"] == 4.0 / 400 and result["j_per_token"] == 200.0 / 400
    assert (result["mean_w"], result["edp_js"], result["total_j"]) == (50.0, 800.0, 250.0)
    assert (result["gpu_j"], result["cpu_j"], result["kinds"]) == (230.0, 20.0, "cpu + gpu")
    assert (result["energy_reason"], result["not_included"]) == ("", "dram (node 0): none")


@cases(
    "changed",
    {"energy_j_by_phase": {"training": None}, "energy_reason": "no driver", "energy_j": None},
    {"energy_j_by_phase": {"training": math.nan}, "energy_reason_by_phase": {"training": "no driver"}},
    {"energy_j_by_phase": {}, "energy_reason": "no driver"},
)
def test_unknown_energy_is_none_with_a_reason(changed):
    result = report.figures(make_outcome(**changed))
    assert result["j_per_token"] is result["mean_w"] is result["edp_js"] is None
    assert result["energy_reason"] == "no driver" and result["s_per_token"] == 0.01


# Results.


def repeat(number, seconds, joules, *, limit_w=None, kinds="gpu", reason=""):
    """Return a good repeat with these seconds and joules per token. The GPU uses three quarters of the energy."""
    figures = {"s_per_token": seconds, "j_per_token": joules, "limit_w": limit_w, "in_force_w": limit_w or 700.0}
    figures |= {"kinds": kinds, "not_included": "cpu (node 0): none", "energy_reason": reason}
    if joules is not None:
        figures |= {"mean_w": joules / seconds, "edp_js": joules * seconds, "total_j": joules, "gpu_j": joules * 0.75}
    summary = {f"power.{name}": value for name, value in figures.items()} | {"tokens_per_s": 1 / seconds}
    samples = {"step_s": np.array([[9.0, 9.0], [seconds, seconds / 2]]), "sent_bytes": np.zeros((2, 2))}
    return TrialRepeat(number, OK, 0, "", 1.0, "abc", "1", summary, samples)


def configuration(name, *repeats, ranks=2):
    return SweepConfiguration(f"id-{name}-{ranks}", name, ranks, "", tuple(repeats))


def sweep_results(*configurations, **output):
    provenance = {"power_seed": "1", "power_devices": "GPU-00 (H200)", "power_limited": "gpu", "created_utc": "now"}
    return SweepResults(provenance | output, configurations)


def power_configurations(rng, noise=0.002):
    values = {None: (1.00e-4, 0.070), 400.0: (1.04e-4, 0.050), 200.0: (1.60e-4, 0.047), 100.0: (3.00e-4, 0.060)}
    result = []
    for limit_w, pair in values.items():
        repeats = [repeat(n, *pair * np.exp(noise * rng.normal(size=2)), limit_w=limit_w) for n in range(3)]
        result.append(configuration(f"{limit_w:g} W" if limit_w else "as found", *repeats))
    return result


def test_report_of_a_power_study(rng):
    result = report.summarize(sweep_results(*power_configurations(rng)), "edp", 1.1)
    assert [row.verdict for row in result.rows] == [FRONT, FRONT, FRONT, BEHIND]
    assert result.chosen.name == "400 W"
    assert [row.in_force_w for row in result.rows] == [700.0, 400.0, 200.0, 100.0]
    step_s = result.rows[1].sweep.step_s["median"]
    assert step_s == pytest.approx(1.04e-4, rel=0.02), "expected the slowest rank without the first step"
    lines = report.lines(result)
    (row,) = [line for line in lines if line.startswith("400 W")]
    assert re.search(r" mJ \+-\d", row) and row.split()[-3:] == ["front", "3", "ok"]
    longer, less = (float(cell) for cell in re.findall(r"([+-]\d+\.\d) %", row))
    assert longer == pytest.approx(4, abs=1.5) and less == pytest.approx(-100 * 2 / 7, abs=1.5)
    assert any(line.startswith("recommended: 400 W: 2") and "% less energy [" in line for line in lines)
    assert "the energy includes gpu; not included: cpu (node 0): none" in lines


def test_no_recommendation_without_energy(tmp_path):
    rows = [configuration(name, repeat(0, 1e-4, None, reason="no driver answers", kinds="")) for name in ("a", "b")]
    result = report.summarize(sweep_results(*rows), "time")
    text = "\n".join(report.lines(result))
    assert result.chosen.name is None and "no recommendation: energy was not measured" in text
    assert "no energy/token: no driver answers" in text and "front" not in text
    with pytest.raises(UsageError, match="no configuration has both"):
        report.plot(result, tmp_path / "plot.png")


@cases(
    "output, kinds, reason",
    ({}, "cpu + gpu", "the energy includes different devices: cpu + gpu or gpu"),
    ({"power_limited": "cpu"}, "gpu", "the limits apply to cpu, but the energy includes only gpu"),
    ({"power_declared": "declared"}, "gpu", "the declared energy model does not depend on the limits"),
)
def test_incomparable_configurations_are_not_recommended(output, kinds, reason):
    limited = configuration("9 W", repeat(0, 2e-4, 0.01, limit_w=9.0, kinds=kinds))
    result = report.summarize(sweep_results(configuration("a", repeat(0, 1e-4, 0.07)), limited, **output), "energy")
    assert result.chosen.name is None and result.chosen.reason == f"no recommendation: {reason}"


def test_report_notes_an_ineffective_limit():
    limited = configuration("300 W", repeat(0, 1e-4, 0.06, limit_w=300.0))
    rows = [configuration("as found", repeat(0, 1e-4, 0.07)), limited]
    one_device = report.summarize(sweep_results(*rows), "energy").notes
    (line,) = [note for note in one_device if note.startswith("300 W: a device used 450 W on average")]
    assert "too short" in line, "600 W, of which the GPU uses three quarters"
    both = report.summarize(sweep_results(*rows, power_devices="GPU-00 (H200), GPU-01 (H200)"), "energy").notes
    assert not [note for note in both if "on average" in note]


def test_declared_energy_model_is_noted_in_the_report():
    rows = [configuration("x=1", repeat(0, 1e-4, 0.07)), configuration("x=2", repeat(0, 2e-4, 0.01))]
    result = report.summarize(sweep_results(*rows, power_declared="declared", power_limited=""), "energy")
    assert result.chosen.name == "x=2" and "the energy is from a declared model, not measured" in result.notes


def test_report_with_failed_trials_and_several_rank_counts():
    bad = TrialRepeat(1, FAILED, 1, "boom", 1.0, "abc", "1", {}, {})
    rows = [
        configuration("x=1", repeat(0, 1e-4, 0.07), bad),
        configuration("x=1", repeat(0, 2e-4, 0.01), ranks=4),
        configuration("x=2", bad),
    ]
    result = report.summarize(sweep_results(*rows), "energy")
    assert [row.sweep.status for row in result.rows] == ["1 ok, 1 failed", "1 ok", "1 failed"]
    assert result.chosen.name == "x=1 on 4 ranks", "the name must include the ranks"
    assert "x=1 (2), x=2 (2): boom" in report.lines(result)
    with pytest.raises(UsageError, match="another benchmark"):
        report.summarize(SweepResults({}, tuple(rows)), "energy")
    assert report.lines(report.summarize(sweep_results(), "energy")) == ["no trial has ended yet"]


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.full_except("svg")
def test_plot_is_written(rng, tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{ending}"
    report.plot(report.summarize(sweep_results(*power_configurations(rng, 0.01)), "edp"), file)
    assert file.stat().st_size > 5000
    if ending == "svg":
        drawn = file.read_text()
        assert "<!-- 400 W -->" in drawn and "energy of a million tokens" in drawn and " kJ -->" in drawn
    equal = report.summarize(sweep_results(*(configuration(name, repeat(0, 1e-4, 0.07)) for name in "ab")), "edp")
    report.plot(equal, file)
    with pytest.raises(StorageError):
        report.plot(equal, tmp_path / "nowhere" / "plot.png")


def test_report_reads_stored_trials(tmp_path):
    path = tmp_path / "power.h5"
    results.prepare(path, {"power_seed": "5", "power_devices": "", "power_limited": ""})
    for position, (name, joules) in enumerate([("a", 200.0), ("b", 100.0)]):
        outcome = make_outcome(energy_j_by_phase={"training": joules})
        stored = SweepTrial(name, name, 2, {"threads": 2}, "")
        measured = study.under_limits(Devices(), False, lambda of, limit_s, outcome=outcome: outcome)(stored, 1.0)
        results.append(path, stored, position, 0, measured, "abc")
    result = report.summarize(results.read(path), "energy")
    assert [row.median("j_per_token") for row in result.rows] == [pytest.approx(0.5), pytest.approx(0.25)]
    assert result.rows[0].in_force_w is None and result.rows[0].sweep.step_s["median"] == 2.5
    assert result.chosen.name == "b" and result.rows[0].median("threads") == 2


# The command.

OMP = "OMP_NUM_THREADS"


def test_options_become_axes(recipe):
    sweeps = ("--sweep", "ranks=1,2", "--sweep", "run.seed=3,4", "--sweep", "optimizer.learning_rate=1e-3,0.1")
    axes = study.axes_of(parse(recipe, "--limits", "200,300.5", "--clocks", "900", *sweeps))
    assert (axes.limits_w, axes.clocks_mhz, axes.ranks, axes.threads) == ((200.0, 300.5), (900.0,), (1, 2), ())
    assert axes.keys == {"run.seed": (3, 4), "optimizer.learning_rate": (1e-3, 0.1)}
    assert study.axes_of(parse(recipe, "--sweep", "threads=1,8", "-n", "3")) == Axes((3,), (1, 8))


@cases(
    "words, code, message",
    ("--limits 200,x", 2, "expected a number"),
    ("--limits 200,nan", 2, "expected a number"),
    ("--limits 200,,300", 2, "expected a number"),
    ("--clocks 900.5", 2, "whole number"),
    ("--sweep run.seed", 2, "expected KEY=V1,V2"),
    ("--sweep run.seed=1,", 2, "expected KEY=V1,V2"),
    ("--sweep run.seed=1,01", 78, "are the same"),
    ("--sweep threads=2,2", 78, "list each value once"),
    ("--sweep threads=0,1", 2, "a number of at least 1"),
    ("--sweep ranks=1,2.5", 2, "a whole number"),
    ("--sweep run.seed=1 --sweep run.seed=2", 2, "is given twice"),
    ("--sweep ranks=1,2 -n 2", 2, "leave -n out"),
    ("--sweep run.sed=1,2", 78, "in --sweep; the nearest known is 'run.seed'"),
    ("--sweep run.seed=1,x", 78, "a whole number"),
    ("--sweep run.seed=1,2 --set run.seed=3", 2, "run.seed is in --set and in --sweep"),
    ("--sweep run.seed=1,2 --set energy.sources=none", 78, "measures no energy"),
    ("--sweep threads=1,3 --run-args '--cpus-per-task 2'", 2, "also sets --cpus-per-task"),
    ("", 2, "nothing varies"),
    ("--sweep run.seed=1 --change-limits", 2, "need --limits or --clocks"),
    ("--limits 1 --max-slowdown 0.9", 2, "number of at least 1"),
    ("--limits 1 --max-slowdown nan", 2, "number of at least 1"),
    ("--limits 1 --objective speed", 2, "'edp', 'energy', 'ed2p', 'time'"),
    ("--restore", 2, "not allowed with"),
)
def test_invalid_options_are_rejected(recipe, tmp_path, capsys, words, code, message):
    assert run_study(recipe, *shlex.split(words), "-o", tmp_path / "power.h5") == code
    assert message in capsys.readouterr().err and not (tmp_path / "power.h5").exists()


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "powercap" / "intel-rapl:0"
    path.mkdir(parents=True)
    texts = {"name": "package-0", "constraint_0_name": "long_term", "constraint_0_power_limit_uw": "150000000"}
    for name, text in (texts | {"constraint_0_max_power_uw": "200000000"}).items():
        (path / name).write_text(text)
    return path / "constraint_0_power_limit_uw"


def run_study(*words):
    try:
        return harness.run(study, "power", list(map(str, words)))
    except SystemExit as leaving:  # of argparse
        return leaving.code


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """No visible GPU, and a journal of limits for the test."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_limits_are_not_changed_without_the_option(recipe, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trial, "run", lambda *arguments: pytest.fail("a trial was started"))
    words = (recipe, "--limits", "90,100", "-o", tmp_path / "power.h5")
    assert run_study(*words) == 2
    error = capsys.readouterr().err
    assert "would set 90 W, 100 W in turn on intel-rapl:0 (package-0)" in error and "add --change-limits" in error
    assert run_study(*words, "--dry-run", "--change-limits") == 0
    output = capsys.readouterr().out
    assert "now 150 W, allowed more than 0 to 200 W" in output and output.count("to run") == 9
    assert package.read_text() == "150000000" and not (tmp_path / "power.h5").exists()


def test_limit_out_of_range_is_rejected_first(recipe, package, tmp_path, capsys):
    assert run_study(recipe, "--limits", "90,250", "-o", tmp_path / "power.h5", "--change-limits") == 78
    assert "250 W is invalid for intel-rapl:0" in capsys.readouterr().err and package.read_text() == "150000000"


def test_limits_are_rejected_in_jobs_of_several_nodes(recipe, package, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert run_study(recipe, "--limits", "90", "-o", tmp_path / "power.h5") == 69
    assert "the job has 2 nodes" in capsys.readouterr().err


def fake_sweep(monkeypatch, package, seen, end=None):
    """Play trials whose time and energy depend on the limit in force."""

    def run(of, folder, limit_s, line, environment):
        watts = int(package.read_text()) / 1e6
        seen.append((of.name, watts))
        if end is not None:
            end(len(seen))
        return make_outcome(
            energy_j_by_phase={"training": 2 * watts}, seconds_by_phase={"training": 4.0 if watts > 90 else 4.2}
        )

    monkeypatch.setattr(trial, "run", run)


def test_study_of_processor_limits(recipe, package, tmp_path, monkeypatch, capsys):
    seen = []
    fake_sweep(monkeypatch, package, seen)
    file = tmp_path / "power.h5"
    words = (recipe, "-n", 2, "--limits", "90,120", "--change-limits", "-o", file, "--seed", "7")
    assert run_study(*words) == 0
    assert seen[0][1] == 150.0 and len(seen) == 1 + 9, "expected a warm-up at the original limit"
    assert all(watts == {"90 W": 90.0, "120 W": 120.0, "as found": 150.0}[name] for name, watts in seen[1:])
    assert package.read_text().strip() == "150000000" and not list((tmp_path / "state").rglob("*.json"))
    assert "recommended: 90 W: " in capsys.readouterr().out, "the energy-delay product is lowest at 90 W"
    stored = results.read(file)
    result = report.summarize(stored, "edp")
    assert {row.name: row.in_force_w for row in result.rows} == {"as found": 150, "90 W": 90, "120 W": 120}
    assert stored.provenance["power_devices"] == "intel-rapl:0 (package-0)" and stored.provenance["power_seed"] == "7"

    assert run_study(*words) == 0 and len(seen) == 10, "recorded trials must not run again"
    capsys.readouterr()
    assert run_study("--show", file, "--objective", "time") == 0
    assert "recommended: as found: no configuration has a lower time" in capsys.readouterr().out
    (package.parent / "name").write_text("package-1")
    assert run_study(*words) == 2 and "was measured on intel-rapl:0 (package-0), not on" in capsys.readouterr().err


def test_signal_restores_the_limit_and_next_call_resumes(recipe, package, tmp_path, monkeypatch, capsys):
    seen = []
    fake_sweep(monkeypatch, package, seen, lambda count: signal.raise_signal(signal.SIGTERM) if count == 4 else None)
    words = (recipe, "--limits", "90,120", "--change-limits", "-o", tmp_path / "power.h5", "--no-warm-up")
    assert run_study(*words) == 75 and "6 trials remain" in capsys.readouterr().err
    assert package.read_text().strip() == "150000000" and len(results.statuses(tmp_path / "power.h5")) == 3
    assert run_study(*words) == 0 and len(seen) == 4 + 6
    first, last = [name for name, _ in seen[:3]], [name for name, _ in seen[-3:]]
    assert sorted(first) == sorted(last), "the order must be the order of the first call"


def test_trial_fails_if_its_limit_changes(recipe, package, tmp_path, monkeypatch, capsys):
    seen = []
    fake_sweep(monkeypatch, package, seen, lambda count: seen[-1][1] == 120.0 and package.write_text("140000000"))
    words = ("--limits", "120", "--change-limits", "-o", tmp_path / "p.h5", "--no-warm-up", "--repeats", 1)
    assert run_study(recipe, *words) == 1
    assert "another process changed the limit during the trial, from 120 W to 140 W" in capsys.readouterr().err
    statuses = sorted(results.statuses(tmp_path / "p.h5").values())
    assert statuses == [FAILED, OK] and package.read_text().strip() == "150000000"


def test_trial_on_several_nodes_is_invalid():
    outcome = make_outcome(energy_sources=[{"node": 0}, {"node": 1}])
    assert "it ran on 2 nodes" in study.invalid_reason(outcome, None, None)
    assert study.invalid_reason(make_outcome(), 90.0, 90.0) == ""


CHOOSING = """
import json
from benchmarks.power.devices import Axes, opened
from hpcdist.errors import HpcdistError

def chosen(device, ranks=1, on=None, clocks=(), **environment):
    settings = {"run.device": device, "energy.powercap": "nowhere"}
    try:
        axes = Axes(ranks=(ranks,), limits_w=(200.0,), clocks_mhz=clocks)
        with opened(axes, settings, on, environment) as devices:
            return devices.kind, [knob.device for knob in devices.power], devices.lines()[-1]
    except HpcdistError as error:
        return str(error)

visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,0"}
print(json.dumps([
    chosen("cpu", **visible),
    chosen("gpu", 3, clocks=(900.0,)),
    chosen("gpu", 2),
    chosen("cpu", on="gpu"),
    chosen("cpu"),
    chosen("gpu", CUDA_VISIBLE_DEVICES="7"),
    chosen("gpu", CUDA_VISIBLE_DEVICES="3"),
    chosen("gpu", on="cpu", clocks=(900.0,)),
]))
"""


def test_limited_gpus_are_the_gpus_of_the_trials(nvml_stub, tmp_path):
    words = "limits=100000:300000:350000 clocks=210:1980"
    rows = [f"GPU-0{n} 0:{n}:0 H200 0 fixed:1 {words}\n" for n in range(3)]
    (tmp_path / "gpus").write_text("".join(rows))
    added = {"LD_LIBRARY_PATH": str(nvml_stub), "NVML_STUB": str(tmp_path / "gpus")}
    added["PYTHONPATH"] = os.pathsep.join([str(Path(hpcdist.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = jobs.python(CHOOSING, env=os.environ | added)
    assert done.returncode == 0, done.stderr
    permuted, every, several, none, processors, beyond, few, mixed = json.loads(done.stdout)
    assert permuted == ["gpu", ["GPU-02", "GPU-00"], "GPU-00 (H200): now 300 W, allowed 100 to 350 W, default 300 W"]
    assert every[:2] == ["gpu", ["GPU-00", "GPU-01", "GPU-02"]]
    assert every[2] == "GPU-02 (H200): now unlocked or unknown, allowed 210 to 1980 MHz"
    assert "3 GPUs are visible, but 2 ranks use fewer" in several and "CUDA_VISIBLE_DEVICES" in several
    assert "the trials use no GPU" in none and "nowhere does not exist" in processors
    assert "CUDA_VISIBLE_DEVICES=7 names no GPU" in beyond and "CUDA_VISIBLE_DEVICES=3 names no GPU" in few
    assert "--clocks works for GPUs only" in mixed


def test_threads_become_launcher_options(recipe, tmp_path, capsys):
    assert run_study(recipe, "--sweep", "threads=1,3", "-o", tmp_path / "p.h5", "--dry-run", "--repeats", 1) == 0
    output = capsys.readouterr().out
    assert "--cpus-per-task 1 train" in output and "--cpus-per-task 3 train" in output


@cases("name, threads", ("power", "None"), ("tensor", "1"))
def test_only_trials_of_the_power_study_select_their_threads(name, threads):
    code = f"import os, sys; sys.argv[1:] = [{name!r}]; import benchmarks.__main__; print(os.environ.get({OMP!r}))"
    kept = {key: value for key, value in os.environ.items() if key != OMP}
    assert jobs.python(code, env=kept | {"PYTHONPATH": harness.search_path()}).stdout.strip() == threads


def test_restore_without_changes(tmp_path, capsys):
    assert run_study("--restore") == 0 and "no changed limits were left" in capsys.readouterr().out
    (tmp_path / "state" / "hpcdist" / "limits").mkdir(parents=True)
    (tmp_path / "state" / "hpcdist" / "limits" / "damaged.json").write_text("{")
    assert run_study("--restore") == 69 and "not restored" in capsys.readouterr().err


def test_moved_command_names_its_successor(capsys):
    code, _, error = jobs.call_command(capsys, "bench", "power", "r.toml", "--limits", "200")
    assert code == 2 and "python -m benchmarks power" in error
