"""Time against energy: trials and their order, the Pareto front and the choice against brute force, and the report."""

import json
import math
import os
import re
import signal
import statistics
from pathlib import Path

import click.testing
import numpy as np
import pytest

import hpcdist
from harness import jobs
from harness.marks import cases
from hpcdist.bench.power import pareto, plot, report
from hpcdist.bench.power.pareto import BEHIND, FRONT, NEAR, EstimateInterval, ParetoCandidate
from hpcdist.bench.sweep import results, trial
from hpcdist.bench.sweep.definition import SweepTrial
from hpcdist.bench.sweep.results import SweepConfiguration, SweepResults, TrialRepeat
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome, TrialSample
from hpcdist.cli.bench.power import axes as power_axes
from hpcdist.cli.bench.power import command
from hpcdist.errors import ConfigurationError, MissingCapabilityError, StorageError, UsageError

# Candidates: with values from a small set, so that ties are common, or with noise.


def draw_candidates(rng, count, repeats, noise=0.0, values=None):
    actual = []
    for number in range(count):
        at = np.exp(rng.normal(size=2)) if values is None else rng.choice(values, 2)
        rows = at * np.exp(noise * rng.normal(size=(repeats, 2)))
        actual.append(
            ParetoCandidate(f"c{number}", {n: tuple(map(float, row)) for n, row in enumerate(rows)}, number > 0)
        )
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
    logs = [
        math.log(value(*one.repeats[n]) / value(*other.repeats[n])) for n in one.repeats.keys() & other.repeats.keys()
    ]
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
    result = draw_candidates(
        rng, int(rng.integers(2, 9)), int(rng.integers(2, 7)), noise=float(rng.choice([0.01, 0.1, 0.5]))
    )
    for candidate, verdict in zip(result, pareto.verdicts(result), strict=True):
        local_data = geometric_means(candidate)
        better = [
            other
            for other in result
            if all(a <= b for a, b in zip(geometric_means(other), local_data, strict=True)) and other is not candidate
        ]
        sure = [
            all(slow_ratio(other, candidate, VALUES[name])[2] <= 1 for name in ("time", "energy")) for other in better
        ]
        assert verdict == (BEHIND if any(sure) else NEAR if better else FRONT)


@pytest.mark.parametrize("objective", pareto.OBJECTIVES)
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
    assert chosen.name == best.name and chosen.reference == base.name
    if best is not base:
        assert chosen.energy.value == pytest.approx(geometric_means(best)[1] / geometric_means(base)[1])
        assert chosen.time.value == pytest.approx(geometric_means(best)[0] / geometric_means(base)[0])
        assert math.isnan(chosen.time.high) == (repeats == 1)


def make_candidate(name, *rows, capped=True):
    return ParetoCandidate(name, dict(enumerate(rows)), capped)


def test_recommendation_text():
    base = make_candidate("as found", (1.0, 100.0), (1.0, 102.0), (1.0, 98.0), capped=False)
    low = make_candidate("250 W", (1.04, 82.0), (1.04, 83.64), (1.04, 80.36))
    result = pareto.recommend([base, low], "energy", 1.1)
    assert result.reason == "250 W: 18 % less energy [18, 18] at 4 % more time [4, 4] than as found"
    assert pareto.recommend([base, low], "edp").reason.endswith("(14.7 % less energy-delay product [14.7, 14.7])")
    assert (
        pareto.recommend([base, low], "energy", 1.03).reason == "as found: none has less energy within 1.03 x its time"
    )
    assert pareto.recommend([base, low], "time").name == "as found"
    noisy = make_candidate("200 W", (1.2, 70.0), (1.2, 130.0), (1.2, 60.0))
    assert "within the noise of 3 repeats" in pareto.recommend([base, noisy], "energy").reason
    output = pareto.recommend(
        [base, low, make_candidate("240 W", (1.05, 81.0), (1.05, 83.0), (1.05, 81.0))], "energy"
    ).reason
    assert output.startswith("240 W: 18.3 % less energy") and output.endswith("; the noise does not tell it from 250 W")
    once = pareto.recommend(
        [make_candidate("as found", (1.0, 9.0), capped=False), make_candidate("1 W", (1.0, 6.0))], "energy"
    )
    assert once.reason == (
        "1 W: 33.3 % less energy, the same time, against as found; of one repeat, whose noise nobody knows: --repeats 3"
    )


def test_fastest_candidate_is_reference_if_all_are_limited():
    actual = [make_candidate("a", (2.0, 1.0)), make_candidate("b", (1.0, 2.0))]
    assert pareto.reference(actual).name == "b"
    assert pareto.recommend(actual, "energy", 1.5).name == "b"
    assert pareto.recommend(actual[:1], "energy").name is None
    assert pareto.recommend([], "energy").name is None


def test_ratio_uses_only_common_repeats():
    first = ParetoCandidate("a", {0: (1.0, 1.0), 1: (2.0, 2.0), 5: (100.0, 100.0)})
    second = ParetoCandidate("b", {0: (2.0, 1.0), 1: (4.0, 2.0), 7: (0.1, 0.1)})
    assert pareto.ratio(first, second, "time") == EstimateInterval(0.5, 0.5, 0.5)
    apart = pareto.ratio(ParetoCandidate("a", {0: (1.0, 1.0)}), ParetoCandidate("b", {1: (4.0, 1.0)}), "time")
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


@pytest.mark.parametrize("factor", [0.9, math.nan, math.inf, -1.0])
def test_invalid_slowdown_and_objective_are_rejected(factor):
    with pytest.raises(UsageError, match="factor of at least 1"):
        pareto.recommend([], "energy", factor)
    with pytest.raises(UsageError, match="choose one of energy, edp, ed2p, time"):
        pareto.recommend([], "speed")


# Trials.


def recipe_text(settings, ranks):
    return json.dumps([dict(settings), ranks])


def test_trials_are_all_combinations_and_one_without_limits():
    axes = pareto.PowerAxes(
        ranks=(1, 2), threads=(1,), limits_w=(200.0, 300.0), clocks_mhz=(900.0,), keys={"run.seed": (1, 2)}
    )
    trials = pareto.expand(axes, recipe_text)
    assert len(trials) == len({trial.id for trial in trials}) == 2 * 2 * 3
    assert [trial.name for trial in trials[:3]] == [
        "seed=1 threads=1 as found",
        "seed=1 threads=1 200 W 900 MHz",
        "seed=1 threads=1 300 W 900 MHz",
    ]
    assert [pareto.limits_of(trial) for trial in trials[:3]] == [(None, None), (200.0, 900.0), (300.0, 900.0)]
    assert [trial.id for trial in pareto.expand(axes, recipe_text)] == [trial.id for trial in trials]
    assert [trial.name for trial in pareto.expand(pareto.PowerAxes(keys={"a.x": (1,), "b.x": (2,)}), recipe_text)] == [
        "a.x=1 b.x=2"
    ]
    assert pareto.expand(pareto.PowerAxes(limits_w=(200.0,)), recipe_text)[0].name == "as found"


def test_duplicate_trials_are_rejected():
    with pytest.raises(ConfigurationError, match=r"'seed=1' and 'seed=1' on 1 ranks are the same"):
        pareto.expand(pareto.PowerAxes(keys={"run.seed": (1, 1)}), recipe_text)


def test_order_is_random_and_reversed_in_every_second_repeat(tmp_path, rng):
    trials = pareto.expand(
        pareto.PowerAxes(limits_w=tuple(float(watts) for watts in range(100, 900, 100))), recipe_text
    )
    seed = int(rng.integers(1 << 32))
    items = pareto.plan(trials, 6, tmp_path / "none.h5", False, seed)
    orders = [[item.position for item in items if item.repeat == repeat] for repeat in range(6)]
    assert all(sorted(order) == list(range(len(trials))) for order in orders)
    assert orders[1] == orders[0][::-1] and orders[3] == orders[2][::-1] and orders[5] == orders[4][::-1]
    assert [item.position for item in pareto.plan(trials, 6, tmp_path / "none.h5", False, seed)] == [
        position for order in orders for position in order
    ]
    assert len({tuple(orders[n]) for n in (0, 2, 4)}) > 1


def make_summary(**changed):
    actual = {
        "seconds_by_phase": {"training": 4.0, "validation": 1.0},
        "energy_j_by_phase": {"training": 200.0, "validation": 50.0},
        "energy_j_by_kind": {"gpu": 230.0, "cpu": 20.0},
        "energy_j": 250.0,
        "energy_reason": None,
        "energy_reason_by_phase": {},
        "energy_not_included": ["dram (node 0): none"],
        "energy_sources": [{"node": 0}],
        "tokens_per_s": 100.0,
        "train_loss": 2.0,
        "val_loss": 2.5,
    }
    return actual | changed


def make_outcome(**changed):
    samples = {
        "tokens": TrialSample(np.array([100, 100, 200]), "1", ""),
        "iteration": TrialSample(np.arange(3), "1", ""),
        "step_s": TrialSample(np.array([[9.0, 1.0], [1.0, 2.0], [3.0, 1.0]]), "s", ""),
    }
    return TrialOutcome(OK, "2026-01-01T00:00:00+00:00", 7.0, 0, summary=make_summary(**changed), samples=samples)


def test_figures_of_a_trial():
    result = pareto.figures(make_outcome())
    assert result["s_per_token"] == 4.0 / 400 and result["j_per_token"] == 200.0 / 400
    assert (result["mean_w"], result["edp_js"], result["total_j"]) == (50.0, 800.0, 250.0)
    assert (result["gpu_j"], result["cpu_j"], result["kinds"], result["energy_reason"]) == (
        230.0,
        20.0,
        "cpu + gpu",
        "",
    )
    assert result["not_included"] == "dram (node 0): none"


@cases(
    "changed",
    {"energy_j_by_phase": {"training": None}, "energy_reason": "no driver", "energy_j": None},
    {"energy_j_by_phase": {"training": math.nan}, "energy_reason_by_phase": {"training": "no driver"}},
    {"energy_j_by_phase": {}, "energy_reason": "no driver"},
)
def test_unknown_energy_is_none_with_a_reason(changed):
    result = pareto.figures(make_outcome(**changed))
    assert (
        result["j_per_token"] is result["mean_w"] is result["edp_js"] is None and result["energy_reason"] == "no driver"
    )
    assert result["s_per_token"] == 0.01


# Results.


def repeat(number, seconds, joules, *, limit_w=None, status=OK, kinds="gpu", reason=""):
    reference = {"s_per_token": seconds, "j_per_token": joules, "limit_w": limit_w, "clock_mhz": None, "threads": None}
    reference |= {
        "in_force_w": 700.0 if limit_w is None else limit_w,
        "kinds": kinds,
        "not_included": "cpu (node 0): none",
    }
    reference |= {"mean_w": None if joules is None else joules / seconds, "energy_reason": reason}
    reference |= {"edp_js": None if joules is None else joules * seconds * 1e6, "total_j": joules and joules * 1e3}
    reference |= {} if joules is None else {"gpu_j": joules * 750, "cpu_j": joules * 250}
    output = {f"power.{name}": value for name, value in reference.items()} | {
        "tokens_per_s": 1 / seconds,
        "train_loss": 2.0,
    }
    samples = {"step_s": np.array([[9.0, 9.0], [seconds, seconds / 2]])}
    if status != OK:
        output, samples = {}, {}
    return TrialRepeat(
        number, status, 0 if status == OK else 1, "" if status == OK else "boom", 1.0, "abc", "1", output, samples
    )


def configuration(name, *repeats, ranks=2):
    return SweepConfiguration(f"id-{name}-{ranks}", name, ranks, "", tuple(repeats))


def sweep_results(*configurations, **output):
    provenance = {"power_seed": "1", "power_devices": "GPU-00 (H200)", "power_limited": "gpu", "created_utc": "now"}
    return SweepResults(provenance | output, configurations)


def power_configurations(rng, noise=0.002):
    def rows(limit_w, seconds, joules):
        return [
            repeat(
                n, seconds * math.exp(noise * rng.normal()), joules * math.exp(noise * rng.normal()), limit_w=limit_w
            )
            for n in range(3)
        ]

    return [
        configuration("as found", *rows(None, 1.00e-4, 0.070)),
        configuration("400 W", *rows(400.0, 1.04e-4, 0.050)),
        configuration("200 W", *rows(200.0, 1.60e-4, 0.047)),
        configuration("100 W", *rows(100.0, 3.00e-4, 0.060)),
    ]


def test_report_of_a_power_sweep(rng, tmp_path):
    result = report.report(sweep_results(*power_configurations(rng)), "edp", 1.1)
    assert [row.verdict for row in result.rows] == [FRONT, FRONT, FRONT, BEHIND]
    assert result.chosen.name == "400 W" and result.chosen.energy.value == pytest.approx(5 / 7, rel=0.02)
    assert [row.in_force_w for row in result.rows] == [700.0, 400.0, 200.0, 100.0]
    assert result.rows[1].step_s == pytest.approx(1.04e-4, rel=0.02), "expected the slowest rank without the first step"
    lines = report.text(tmp_path / "power.h5", result).splitlines()
    (head,) = [line for line in lines if line.startswith("configuration")]
    assert "mJ/token" in head and "gpu J" in head and "ranks" not in head, "values in common have no column"
    (row,) = [line for line in lines if line.startswith("400 W")]
    assert "+-" in row and row.split()[-3:] == ["front", "3", "ok"]
    longer, less = (float(cell) for cell in re.findall(r"([+-]\d+\.\d) %", row))
    assert longer == pytest.approx(4, abs=1.5) and less == pytest.approx(-100 * 2 / 7, abs=1.5)
    assert any(line.startswith("recommended: 400 W: 2") and "% less energy [" in line for line in lines)
    assert "energy is that of gpu; not included: cpu (node 0): none" in lines
    plain = report.jsonable(result)
    assert plain["recommendation"]["name"] == "400 W" and plain["configurations"][3]["verdict"] == BEHIND
    assert json.loads(json.dumps(plain)) == plain


def test_no_recommendation_without_energy(rng, tmp_path):
    rows = [configuration(name, repeat(0, 1e-4, None, reason="no driver answers", kinds="")) for name in ("a", "b")]
    result = report.report(sweep_results(*rows), "time")
    text = report.text(tmp_path, result)
    assert result.chosen.name is None and "no recommendation: energy was not measured" in text
    assert "no energy: all: no driver answers" in text and "front" not in text
    with pytest.raises(UsageError, match="no configuration has both"):
        plot.plot(result, tmp_path / "plot.png")


@cases(
    "output, kinds, reason",
    ({}, "cpu + gpu", "energy is that of different parts: cpu + gpu or gpu"),
    ({"power_limited": "cpu"}, "gpu", "the limits are those of cpu, and energy is that of gpu"),
    ({"power_declared": "declared"}, "gpu", "the declared model of energy does not know of limits"),
)
def test_incomparable_configurations_are_not_recommended(output, kinds, reason):
    rows = [
        configuration("as found", repeat(0, 1e-4, 0.07)),
        configuration("9 W", repeat(0, 2e-4, 0.01, limit_w=9.0, kinds=kinds)),
    ]
    result = report.report(sweep_results(*rows, **output), "energy")
    assert result.chosen.name is None and result.chosen.reason == f"no recommendation: {reason}"


def test_report_notes_an_ineffective_limit():
    rows = [
        configuration("as found", repeat(0, 1e-4, 0.07)),
        configuration("300 W", repeat(0, 1e-4, 0.06, limit_w=300.0)),
    ]
    one_device = report.report(sweep_results(*rows), "energy").notes
    (line,) = [note for note in one_device if note.startswith("300 W: a device drew 450 W in the mean")]
    assert "too short" in line, "600 W in the mean; three quarters are the GPU's"
    both = report.report(sweep_results(*rows, power_devices="GPU-00 (H200), GPU-01 (H200)"), "energy").notes
    assert not [note for note in both if "drew" in note]


def test_declared_energy_model_is_noted_in_the_report():
    rows = [configuration("x=1", repeat(0, 1e-4, 0.07)), configuration("x=2", repeat(0, 2e-4, 0.01))]
    result = report.report(sweep_results(*rows, power_declared="declared", power_limited=""), "energy")
    assert result.chosen.name == "x=2" and "energy is that of a declared model, not measured" in result.notes


def test_report_with_failed_trials_and_several_rank_counts(tmp_path):
    bad = repeat(1, 1e-4, 0.07, status=FAILED)
    rows = [
        configuration("x=1", repeat(0, 1e-4, 0.07), bad),
        configuration("x=1", repeat(0, 2e-4, 0.01), ranks=4),
        configuration("x=2", bad),
    ]
    result = report.report(sweep_results(*rows), "energy")
    assert [row.failed for row in result.rows] == [1, 0, 1] and [row.ok for row in result.rows] == [1, 1, 0]
    assert result.chosen.name == "x=1 on 4 ranks", "the name must include the ranks"
    assert "failed: x=1 on 2 ranks, x=2 on 2 ranks: boom" in report.text(tmp_path, result)
    with pytest.raises(UsageError, match="another sweep"):
        report.report(SweepResults({}, tuple(rows)), "energy")
    assert "no trial has ended yet" in report.text(tmp_path, report.report(sweep_results(), "energy"))


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.full_except("svg")
def test_plot_is_written(rng, tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{ending}"
    plot.plot(report.report(sweep_results(*power_configurations(rng, 0.01)), "edp"), file)
    assert file.stat().st_size > 5000
    if ending == "svg":
        drawn = file.read_text()
        assert "<!-- 400 W -->" in drawn and "energy of a million tokens (kJ)" in drawn
    single = report.report(
        sweep_results(configuration("a", repeat(0, 1e-4, 0.07)), configuration("b", repeat(0, 1e-4, 0.07))), "edp"
    )
    plot.plot(single, file)
    with pytest.raises(StorageError):
        plot.plot(single, tmp_path / "nowhere" / "plot.png")


def test_report_reads_stored_trials(tmp_path, rng):
    """The report reads everything that a trial stores."""
    path = tmp_path / "power.h5"
    results.prepare(path, {"power_seed": "5", "power_devices": "", "power_limited": ""})
    for position, (name, joules) in enumerate([("a", 200.0), ("b", 100.0)]):
        made = make_outcome(energy_j_by_phase={"training": joules})
        messages = {**pareto.figures(made), "in_force_w": None, "limit_w": None, "clock_mhz": None, "threads": 2}
        made = TrialOutcome(
            OK, made.started_utc, 1.0, 0, summary={**made.summary, "power": messages}, samples=made.samples
        )
        results.append(path, SweepTrial(name, name, 2, {}, ""), position, 0, made, "abc")
    result = report.report(results.read(path), "energy")
    assert [row.j_per_token.value for row in result.rows] == [pytest.approx(0.5), pytest.approx(0.25)]
    assert result.rows[0].threads == 2 and result.rows[0].in_force_w is None and result.rows[0].step_s == 2.5
    assert result.chosen.name == "b" and result.rows[0].joules == {"gpu": 230.0, "cpu": 20.0}


# The command.


def options(**changed):
    actual = {"recipe": "r.toml", "limits": "", "clocks": "", "sweeps": (), "overrides": (), "ranks": None}
    actual |= dict.fromkeys(("on", "change_limits", "dry_run", "run_args", "restore", "show"))
    return actual | changed


def test_options_become_sweep_axes():
    axes = power_axes.sweep_axes(
        options(
            limits="200,300.5", clocks="900", sweeps=("ranks=1,2", "run.seed=3,4", "optimizer.learning_rate=1e-3,0.1")
        )
    )
    assert (axes.limits_w, axes.clocks_mhz, axes.ranks, axes.threads) == ((200.0, 300.5), (900.0,), (1, 2), ())
    assert axes.keys == {"run.seed": (3, 4), "optimizer.learning_rate": (1e-3, 0.1)}
    assert power_axes.sweep_axes(options(sweeps=("threads=1,8",), ranks=3)).threads == (1, 8)


@cases(
    "changed, words",
    ({"limits": "200,x"}, "expected numbers of W"),
    ({"limits": "200,nan"}, "expected numbers of W"),
    ({"limits": "200,,300"}, "expected numbers of W"),
    ({"limits": "200,200.0"}, "is there twice"),
    ({"clocks": "900.5"}, "whole numbers of MHz"),
    ({"sweeps": ("run.seed",)}, "expected KEY=V1,V2"),
    ({"sweeps": ("run.seed=1,",)}, "expected KEY=V1,V2"),
    ({"sweeps": ("threads=0,1",)}, "whole numbers of at least 1"),
    ({"sweeps": ("ranks=1,two",)}, "whole numbers of at least 1"),
    ({"sweeps": ("run.seed=1", "run.seed=2")}, "is given twice"),
    ({"sweeps": ("ranks=1,2",), "ranks": 2}, "leave -n out"),
    ({"sweeps": ("run.sed=1,2",)}, "in --sweep; the nearest known is 'run.seed'"),
    ({"sweeps": ("run.seed=1,x",)}, "a whole number"),
)
def test_invalid_axes_are_rejected(changed, words):
    with pytest.raises((UsageError, ConfigurationError), match=words):
        power_axes.sweep_axes(options(**changed))


@cases(
    "changed, words",
    ({"restore": True, "show": True, "recipe": None}, "choose one"),
    ({"restore": True}, "leave out RECIPE"),
    ({"show": True, "recipe": None, "sweeps": ("a=1",)}, "leave out --sweep"),
    ({"recipe": None, "limits": "1"}, "name a RECIPE"),
    ({}, "nothing to vary"),
    ({"sweeps": ("a=1",), "change_limits": True}, "no --limits or --clocks"),
)
def test_conflicting_options_are_rejected(changed, words):
    with pytest.raises(UsageError, match=words):
        power_axes.check_options(options(**changed))


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.toml"
    (tmp_path / "text.txt").write_text("abc " * 500)
    path.write_text(f"[data]\npath = 'text.txt'\n[energy]\npowercap = '{tmp_path / 'powercap'}'\n")
    return path


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "powercap" / "intel-rapl:0"
    path.mkdir(parents=True)
    texts = {"name": "package-0", "constraint_0_name": "long_term", "constraint_0_power_limit_uw": "150000000"}
    for name, text in (texts | {"constraint_0_max_power_uw": "200000000"}).items():
        (path / name).write_text(text)
    return path / "constraint_0_power_limit_uw"


def invoke_power(*arguments, **environment):
    runner = click.testing.CliRunner()
    return runner.invoke(
        command.command,
        list(map(str, arguments)),
        standalone_mode=False,
        env={"CUDA_VISIBLE_DEVICES": None, **environment},
    )


def test_limits_are_not_changed_without_the_option(recipe, package, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "run", lambda *arguments: pytest.fail("a trial was started"))
    output = tmp_path / "power.h5"
    done = invoke_power(recipe, "--limits", "90,100", "-o", output)
    assert isinstance(done.exception, UsageError)
    assert "would set 90 W, 100 W in turn on intel-rapl:0 (package-0)" in str(done.exception)
    assert "nothing was changed: add --change-limits" in str(done.exception)
    plan = invoke_power(recipe, "--limits", "90,100", "-o", output, "--dry-run", "--change-limits")
    assert plan.return_value == 0 and "takes more than 0 to 200 W" in plan.output and plan.output.count("to run") == 9
    assert package.read_text() == "150000000" and not output.exists()


def test_limit_out_of_range_is_rejected_first(recipe, package, tmp_path):
    done = invoke_power(recipe, "--limits", "90,250", "-o", tmp_path / "power.h5", "--change-limits")
    assert isinstance(done.exception, ConfigurationError) and "250 W for intel-rapl:0" in str(done.exception)
    assert package.read_text() == "150000000"


def test_sweep_without_energy_source_is_rejected(recipe, package, tmp_path):
    done = invoke_power(recipe, "--sweep", "run.seed=1,2", "--set", "energy.sources=none", "-o", tmp_path / "power.h5")
    assert isinstance(done.exception, ConfigurationError) and "no trial would measure energy" in str(done.exception)
    both = invoke_power(recipe, "--sweep", "run.seed=1,2", "--set", "run.seed=3", "-o", tmp_path / "power.h5")
    assert isinstance(both.exception, UsageError) and "run.seed is given by --set and by --sweep" in str(both.exception)


def test_limits_are_rejected_in_jobs_of_several_nodes(recipe, package, tmp_path):
    done = invoke_power(recipe, "--limits", "90", "-o", tmp_path / "power.h5", SLURM_JOB_NUM_NODES="2")
    assert isinstance(done.exception, MissingCapabilityError) and "the job has 2 nodes" in str(done.exception)


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


def test_sweep_over_processor_limits(recipe, package, tmp_path, monkeypatch):
    seen = []
    fake_sweep(monkeypatch, package, seen)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    arguments = (recipe, "-n", 2, "--limits", "90,120", "--change-limits", "-o", tmp_path / "power.h5", "--json")
    done = invoke_power(*arguments)
    assert done.return_value == 0, done.exception or done.output
    assert seen[0][1] == 150.0 and len(seen) == 1 + 9, "expected a warm-up at the original limit"
    assert all(watts == {"90 W": 90.0, "120 W": 120.0, "as found": 150.0}[name] for name, watts in seen[1:])
    assert package.read_text().strip() == "150000000" and not list((tmp_path / "state").rglob("*.json"))
    document = json.loads(done.output.splitlines()[-1])
    assert document["recommendation"]["name"] == "90 W", "the energy-delay product is lowest at 90 W"
    assert {row["name"]: row["in_force_w"] for row in document["configurations"]} == {
        "as found": 150,
        "90 W": 90,
        "120 W": 120,
    }
    assert (
        document["provenance"]["power_devices"] == "intel-rapl:0 (package-0)" and document["provenance"]["power_seed"]
    )

    assert invoke_power(*arguments).return_value == 0 and len(seen) == 10, "recorded trials must not run again"
    shown = invoke_power("--show", "-o", tmp_path / "power.h5", "--objective", "time")
    assert "recommended: as found: none has less time" in shown.output or "recommended: 120 W" in shown.output


def test_signal_restores_the_limit_and_next_call_resumes(recipe, package, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake_sweep(monkeypatch, package, seen, lambda count: signal.raise_signal(signal.SIGTERM) if count == 4 else None)
    arguments = (recipe, "--limits", "90,120", "--change-limits", "-o", tmp_path / "power.h5", "--no-warmup")
    assert invoke_power(*arguments).return_value == 75
    assert package.read_text().strip() == "150000000" and len(results.statuses(tmp_path / "power.h5")) == 3
    assert invoke_power(*arguments).return_value == 0 and len(seen) == 4 + 6
    first, last = [name for name, _ in seen[:3]], [name for name, _ in seen[-3:]]
    assert sorted(first) == sorted(last), "the order must be the order of the first call"


def test_trial_fails_if_its_limit_changes(recipe, package, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fake_sweep(
        monkeypatch, package, seen, lambda count: package.write_text("140000000") if seen[-1][1] == 120.0 else None
    )
    done = invoke_power(
        recipe, "--limits", "120", "--change-limits", "-o", tmp_path / "p.h5", "--no-warmup", "--repeats", 1
    )
    assert done.return_value == 1 and "somebody has changed the limit while it ran, from 120 W to 140 W" in done.output
    statuses = sorted(results.statuses(tmp_path / "p.h5").values())
    assert statuses == [FAILED, OK] and package.read_text().strip() == "150000000"


CHOOSING = """
import json
from types import SimpleNamespace
from hpcdist.bench.power.pareto import PowerAxes
from hpcdist.cli.bench.power.axes import LimitedDevices
from hpcdist.errors import HpcdistError

def chosen(device, ranks=1, on=None, clocks=(), **environment):
    recipe = SimpleNamespace(run=SimpleNamespace(device=device), energy=SimpleNamespace(powercap="nowhere"))
    try:
        axes = PowerAxes(ranks=(ranks,), limits_w=(200.0,), clocks_mhz=clocks)
        with LimitedDevices(axes, recipe, on, environment) as devices:
            return devices.kind, [knob.device for knob in devices.power], devices.described()[-1]
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
    assert permuted == ["gpu", ["GPU-02", "GPU-00"], "GPU-00 (H200): at 300 W, takes 100 to 350 W, by default 300 W"]
    assert every[:2] == ["gpu", ["GPU-00", "GPU-01", "GPU-02"]]
    assert every[2] == "GPU-02 (H200): clocks as they are, takes 210 to 1980 MHz"
    assert "3 GPUs are visible, more than the 2 ranks use" in several and "CUDA_VISIBLE_DEVICES" in several
    assert "the trials compute on no GPU" in none and "nowhere does not exist" in processors
    assert "CUDA_VISIBLE_DEVICES=7 names no GPU" in beyond and "CUDA_VISIBLE_DEVICES=3 names no GPU" in few
    assert "--clocks are those of GPUs" in mixed


def test_threads_become_launcher_options(recipe, tmp_path):
    done = invoke_power(recipe, "--sweep", "threads=1,3", "-o", tmp_path / "p.h5", "--dry-run", "--repeats", 1)
    assert "--cpus-per-task 1 train" in done.output and "--cpus-per-task 3 train" in done.output
    both = invoke_power(recipe, "--sweep", "threads=1,3", "--run-args", "--cpus-per-task 2", "-o", tmp_path / "p.h5")
    assert isinstance(both.exception, UsageError) and "both say --cpus-per-task" in str(both.exception)


def test_restore_without_changes(tmp_path):
    done = invoke_power("--restore", XDG_STATE_HOME=str(tmp_path))
    assert done.return_value == 0 and "no changed limits were left" in done.output


def test_objective_names_agree():
    assert command.OBJECTIVES == pareto.OBJECTIVES == tuple(pareto.OBJECTIVE_NAMES)
