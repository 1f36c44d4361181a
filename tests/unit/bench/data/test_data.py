"""The comparison of exchanges: contenders, speeds, losses over time, and the report."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from harness.marks import cases
from hpcdist.bench.data import report, request
from hpcdist.bench.data.request import CONTENDERS
from hpcdist.bench.sweep import results
from hpcdist.bench.sweep.definition import Sweep, SweepTrial
from hpcdist.bench.sweep.trial import FAILED, OK, TrialOutcome, TrialSample
from hpcdist.cli.bench.group import command
from hpcdist.cli.bench.trials import SweepRecipes
from hpcdist.errors import CONFIGURATION, ConfigurationError, UsageError
from hpcdist.training.recipe import recipe as recipes


@pytest.fixture(autouse=True)
def _no_settings_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HPCDIST_SITE", raising=False)


def expand_contenders(contenders, ranks=4):
    scenarios = {request.CALM: {}, request.STRAGGLERS: request.stragglers((0,), 3.0, 0.125)}
    expected = request.ExchangeRequest(ranks, {"run.steps": 5}, contenders, scenarios)
    return request.expand(expected, SweepRecipes(Sweep(Path("bench data"), (ranks,), 1, {}, {}, (), ())))


def test_every_contender_has_a_distinct_trial():
    trials, left_out = expand_contenders(CONTENDERS)
    assert left_out == {}
    assert len({trial.id for trial in trials}) == len(trials) == 2 * len(CONTENDERS)
    assert [request.parts_of(trial.name) for trial in trials[:2]] == [
        ("allreduce", "calm"),
        ("allreduce", "stragglers"),
    ]
    calm, late = (recipes.load(load_trial_recipe(trial)).recipe for trial in trials[:2])
    assert calm.run == late.run and calm.run.steps == 5 and not calm.chaos.on
    assert late.chaos.slow_ranks == (0,) and late.chaos.slow_probability == 0.125


def load_trial_recipe(trial):
    import tomllib

    from hpcdist.training.recipe import settings

    return settings.table(tomllib.loads(trial.recipe), "trial", recipes.known_keys(), Path())


def test_invalid_contenders_are_left_out_with_a_reason():
    trials, left_out = expand_contenders(
        {"unknown": {"no.such": 1}, "wrong": {"run.steps": -1}, "good": {}, "few": CONTENDERS["servers, bsp"]}, ranks=1
    )
    assert [request.parts_of(trial.name)[0] for trial in trials] == ["good", "good"]
    assert "no.such" in left_out["unknown"] and "run.steps = -1" in left_out["wrong"]
    assert "at least 1 must compute" in left_out["few"]


def test_speed_of_synchronous_and_asynchronous_workers():
    together = np.full((11, 2), 0.5)
    together[0] = 7.0
    assert report.steps_per_s(together) == pytest.approx(2.0)
    apart = np.column_stack([np.full(13, 0.5), np.full(13, 1.5)])
    apart[0] = [2.0, 40.0]
    # In 6 s the fast worker makes its 12 steps, and the other 4: 16 half batches.
    assert report.steps_per_s(apart) == pytest.approx(8 / 6)
    apart[1:3] = 7.0
    assert np.isnan(report.steps_per_s(together[:1]))


def test_steps_without_the_slow_worker_count():
    """With a backup worker: the slow worker takes part in one step of three, or only in the first."""
    quick = np.full((13, 3), 0.5)
    quick[0] = 9.0
    for slow in ([9.0, *np.tile([1.5, np.nan, np.nan], 4)], [36.0] + [np.nan] * 12):
        step_s = np.column_stack([slow, quick])
        assert report.steps_per_s(step_s) == pytest.approx(2.0)
        assert report.ends_s(step_s)[-1].tolist() == [6.0] * 4


def test_loss_at_a_time_is_the_loss_of_the_last_step():
    step_s, loss = np.full((5, 2), 2.0), np.array([9.0, 4.0, 3.0, 2.0, 1.0])
    times, losses = report.loss_curve(step_s, loss, window=2)
    assert times.tolist() == [2, 4, 6, 8] and losses.tolist() == [4, 3.5, 2.5, 1.5]
    assert [report.loss_at(times, losses, moment) for moment in (2, 5, 8, 99)] == [4, 3.5, 1.5, 1.5]
    assert np.isnan(report.loss_at(times, losses, 1.0))


def make_outcome(step_s, loss, steps=11, sent=1e6, slow=1.0, dropped=None, loaded=None):
    """Return the outcome of a run on two workers and a server without steps."""
    times = np.column_stack([np.full(steps, step_s), np.full(steps, step_s * slow), np.full(steps, np.nan)])
    wide = {"step_s": times, "compute_s": times / 2, "communication_s": times / 4, "update_s": times / 8}
    wide["sent_bytes"] = np.full((steps, 3), sent)
    common = {"loss": np.linspace(4.0, loss, steps), "tokens": np.full(steps, 64), "iteration": np.arange(steps) + 1}
    samples = {name: TrialSample(values, "1", name) for name, values in {**wide, **common}.items()}
    peaks = dict.fromkeys(report.CATEGORIES, 2**20)
    summary = {"val_loss": loss + 1, "peak_bytes": peaks, "pss_bytes": {"sum": 3 * 2**20}, "bytes_sent_per_step": 5}
    if loaded is not None:
        summary["bytes_loaded_per_step"] = loaded
    if dropped is not None:
        summary["dropped_gradients"] = dropped
    return TrialOutcome(OK, "", 1.0, 0, summary=summary, samples=samples)


@pytest.fixture
def measurements(tmp_path):
    path = tmp_path / "results.h5"
    results.prepare(path, {})
    runs = {
        "allreduce | calm": make_outcome(0.5, 2.0),
        "servers, asp | calm": make_outcome(0.25, 3.0),
        "allreduce | stragglers": make_outcome(1.5, 2.0),
        "servers, asp | stragglers": make_outcome(0.5, 3.0, slow=3.0),
        "broken | calm": TrialOutcome(FAILED, "", 1.0, 1, "RuntimeError: it broke"),
        "refused | calm": TrialOutcome(FAILED, "", 1.0, CONFIGURATION, "exit code 78: set it to 1"),
        "silent | calm": make_outcome(1.0, 2.5, sent=np.nan),
        "backed up | calm": make_outcome(1.0, 2.5, dropped=3),
        "loads | calm": make_outcome(1.0, 2.5, loaded=2_500_000),
    }
    for position, (name, run) in enumerate(runs.items()):
        results.append(path, SweepTrial(f"id{position}", name, 3, {}, ""), position, 0, run, "")
    results.append(path, SweepTrial("other", "of a sweep", 3, {}, ""), 99, 0, make_outcome(9.0, 9.0), "")
    return results.read(path)


def test_rows_compare_speed_and_loss_of_contenders(measurements):
    table = {(row.contender, row.scenario): row for row in report.rows(measurements)}
    assert len(table) == 9
    calm, asp = table["allreduce", "calm"], table["servers, asp", "calm"]
    assert calm.tokens_per_s == pytest.approx(128) and calm.x_first == 1.0
    assert asp.x_first == pytest.approx(2.0) and asp.loss_at_steps == pytest.approx(3.0)
    assert asp.loss_at_time == pytest.approx(3.0), "the run that ended first"
    assert calm.loss_at_time == pytest.approx(3.0), "2.5 s after the first step: the fifth of the other ten steps"
    assert calm.loss_at_steps == pytest.approx(2.0) and calm.val_loss == 3.0
    assert calm.bytes_sent_per_step == 1e6 and calm.pss_bytes == 3 * 2**20
    late, free = table["allreduce", "stragglers"], table["servers, asp", "stragglers"]
    assert late.steps_per_s == pytest.approx(1 / 1.5) and late.x_first == 1.0
    assert free.steps_per_s == pytest.approx((2 + 2 / 3) / 2)
    assert table["silent", "calm"].bytes_sent_per_step == 5, "expected the value of the summary"
    assert table["refused", "calm"].refused and not table["broken", "calm"].refused
    assert table["broken", "calm"].tokens_per_s is None


def test_report_explains_missing_results(measurements):
    table = report.rows(measurements)
    shown = report.text(table, {"absent": "is not built"})
    assert "left out: absent: is not built" in shown and "left out: refused: exit code 78: set it to 1" in shown
    assert "broken, calm: RuntimeError: it broke" in shown and "1 FAILED" in shown
    assert shown.index("calm\n") < shown.index("stragglers\n")
    output = report.jsonable(table, {"absent": "is not built"}, {"git_commit": "abc"})
    json.dumps(output, allow_nan=False)
    assert output["left_out"] == {"absent": "is not built"} and len(output["rows"]) == 9


def test_report_explains_tokens_of_backup_workers(measurements):
    table = report.rows(measurements)
    assert {row.contender: row.dropped for row in table if row.dropped is not None} == {"backed up": 3}
    lines = [line for line in report.text(table, {}).splitlines() if "tokens/s are of" in line]
    assert len(lines) == 1 and lines[0].startswith("backed up, calm: ")
    assert "; 3 gradients a training came too late" in lines[0]


def test_report_lists_loaded_bytes_next_to_sent_bytes(measurements):
    table = report.rows(measurements)
    assert {row.contender: row.bytes_loaded_per_step for row in table if row.bytes_loaded_per_step} == {"loads": 2.5e6}
    assert "loads, calm: 2.500 MB a step loaded from what others of the node wrote, beside what is sent" in report.text(
        table, {}
    )


def test_plot_draws_losses(measurements, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(measurements, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="nothing to plot"):
        report.plot(results.SweepResults({}, ()), tmp_path / "b.png")


def invoke(*arguments):
    done = CliRunner().invoke(command, ["data", *arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.return_value, done.output


def test_command_lists_contenders_and_rejects_unknown_ones():
    code, shown = invoke("--list", "--contender", "zero1")
    assert (code, shown) == (0, 'zero1: parallel.strategy="zero1"\n')
    with pytest.raises(UsageError, match="choose from 'allreduce', "):
        invoke("--contender", "zero9")
    with pytest.raises(UsageError, match="at least 1 must compute"):
        invoke("-n", "1", "--contender", "servers, asp")
    with pytest.raises(ConfigurationError, match="unknown key"):
        invoke("--set", "no.such=1")


@cases(
    "arguments, match",
    (["--slow-rank", "2"], "chaos.slow_ranks = [2] on 2 ranks: there is no rank 2; use ranks 0 to 1"),
    (["--slow-factor", "0.5"], "chaos.slow_factor = 0.5; it must be finite and at least 1"),
    (["--slow-probability", "2"], "chaos.slow_probability = 2.0; it must be between 0 and 1"),
)
def test_impossible_straggler_is_rejected_once(arguments, match):
    with pytest.raises(UsageError, match=re.escape(match)) as refused:
        invoke("-n", "2", *arguments)
    assert str(refused.value).count("chaos.") == 1
