"""The times when a run saves by the clock, and before its job ends."""

import math

import numpy as np
import pytest

from harness.trainings import assert_rejected
from hpcdist.checkpoint.config import OBSERVED, CheckpointConfig
from hpcdist.comm.record.run_journal import StartRecord
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.daly_interval import daly
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import ASSUMED_BYTES_PER_S, ASSUMED_SAVE_S, LEAVING_S, CheckpointTimer, quantile
from hpcdist.training.run.stop_requests import JOB_END, end_of_job


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def simulate_saves(pace, clock, step_s, cost_s, until_s):
    """Simulate steps of a run that saves when it is due. Return the work between its saves."""
    work, result = 0.0, []
    while clock.now < until_s:
        due = pace.due()  # said before the step, answered after it
        clock.now += step_s
        work += step_s
        pace.stepped(step_s)
        if due:
            clock.now += cost_s
            pace.saved(cost_s)
            result.append(work)
            work = 0.0
    return result


def test_saves_follow_the_daly_interval():
    clock = Clock()
    pace = CheckpointTimer(CheckpointConfig(mtbf_s=10_000), int(3 * ASSUMED_BYTES_PER_S), clock=clock)
    assert pace.interval_s == daly(ASSUMED_SAVE_S + 3.0, 10_000)
    result = simulate_saves(pace, clock, step_s=2.0, cost_s=5.0, until_s=20_000)
    assert abs(result[0] - daly(ASSUMED_SAVE_S + 3.0, 10_000)) <= 4, "by the guess, until one was measured"
    assert len(result) > 20 and all(abs(work - daly(5.0, 10_000)) <= 4 for work in result[1:])


def test_no_save_is_due_without_failures():
    clock = Clock()
    pace = CheckpointTimer(CheckpointConfig(), 1 << 30, clock=clock)
    clock.now += 1e9
    assert not pace.due() and not pace.time_up() and pace.interval_s == math.inf


def test_single_slow_save_does_not_raise_the_cost():
    pace = CheckpointTimer(CheckpointConfig(mtbf_s=3600), 0)
    for seconds in (1.0, 1.0, 60.0):
        pace.saved(seconds)
    assert pace.cost_s == 1.0


def test_time_is_up_if_a_step_and_a_save_would_not_fit():
    clock = Clock()
    messages = []
    ends, guess_bytes = 1100.0 + LEAVING_S, int((20 - ASSUMED_SAVE_S) * ASSUMED_BYTES_PER_S)
    pace = CheckpointTimer(CheckpointConfig(), guess_bytes, ends, messages.append, clock)
    clock.now = 1079.0
    assert not pace.time_up()
    clock.now = 1081.0
    assert pace.time_up() and pace.time_up(), "20 s by the guess"
    assert len(messages) == 1 and "ends in 21.0 s" in messages[0]
    pace = CheckpointTimer(CheckpointConfig(), guess_bytes, ends, messages.append, clock)
    for seconds in (*np.linspace(1, 2, 99), 9.0):
        pace.stepped(float(seconds))
    for seconds in (4.0, 4.0, 6.0):
        pace.saved(1.0)  # the steps went on: what counts is when it was complete
        pace.completed(seconds)
    clock.now = 1091.5
    assert not pace.time_up(), "6 s and 2 s are left: the slowest step is one of a hundred"
    clock.now = 1092.5
    assert pace.time_up()


def test_quantiles_of_samples():
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0 and quantile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert quantile(list(map(float, range(1, 101))), 0.99) == 99.0


def test_end_of_the_job_comes_from_option_or_environment():
    assert end_of_job(None, 5.0, {}) == math.inf
    assert end_of_job(60.0, 5.0, {}) == 65.0
    assert end_of_job(60.0, 5.0, {JOB_END: "50"}) == 50.0
    assert end_of_job(None, 5.0, {JOB_END: "1750000000"}) == 1750000000.0
    with pytest.raises(ConfigurationError, match="expected seconds"):
        end_of_job(None, 5.0, {JOB_END: "tomorrow"})


@pytest.mark.full
def test_observed_time_between_failures(tmp_path):
    clock, config = Clock(), CheckpointConfig(mtbf_s=OBSERVED)
    first = CheckpointTimer(config, 0, clock=clock, starts=StartRecord(tmp_path, clock))
    first.saved(5.0)
    assert first.mtbf_s == 5.0, "it has seen nothing yet"
    result = simulate_saves(first, clock, step_s=1.0, cost_s=5.0, until_s=21_000)
    assert first.mtbf_s == pytest.approx(20_000, rel=1e-3)
    assert abs(result[-1] - daly(5.0, 20_000)) <= 4, "the longer nothing fails, the longer it waits"
    assert result[0] < result[len(result) // 2] < result[-1]
    clock.now += 50_000
    second = CheckpointTimer(config, 0, clock=clock, starts=StartRecord(tmp_path, clock))
    second.saved(5.0)
    assert second.mtbf_s == pytest.approx(10_000, rel=1e-2), "20,000 s, and one start that failed"
    second.ended(stopped=True)
    assert CheckpointTimer(config, 0, clock=clock, starts=StartRecord(tmp_path, clock)).mtbf_s == second.mtbf_s
    assert CheckpointTimer(config, 0, clock=clock).interval_s == math.inf, "another rank than the one that decides"


@pytest.mark.parametrize("text", ["60", "observed", "'observed'"])
def test_time_between_failures_in_a_recipe(text, tmp_path):
    stored = tmp_path / "recipe.toml"
    stored.write_text(recipes.dump(recipes.load(None, [f"checkpoint.mtbf_s={text}"]).recipe))
    assert recipes.load_stored(stored).checkpoint.mtbf_s == (60.0 if text == "60" else OBSERVED)


@pytest.mark.parametrize("text", ["seen", "-1", "nan", "true"])
def test_invalid_times_between_failures_are_rejected(text):
    assert_rejected([f"checkpoint.mtbf_s={text}"], "'observed'")
    with pytest.raises(ConfigurationError, match="'observed'"):
        CheckpointConfig(mtbf_s="seen")
