"""Injected stragglers: as slow as requested, in the same steps every time, with the same numbers."""

import time

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases, on_threads
from harness.trainings import assemble_trainer, assert_rejected
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.operations import Kind
from hpcdist.training.build.fault_injection import Slowdown, SlowdownTimer, is_slow
from hpcdist.training.recipe import recipe as recipe_recipe
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.recipe.chaos_config import ChaosConfig

STEPS = 4


@pytest.fixture
def text(text):
    return {"data.path": text, "run.steps": STEPS}


def test_slow_steps_are_reproducible_and_differ_between_ranks():
    config = ChaosConfig(slow_ranks=(0, 2), slow_probability=0.125, seed=3)
    drawn = {rank: [is_slow(config, rank, step) for step in range(1, 2001)] for rank in range(4)}
    assert not any(drawn[1]) and not any(drawn[3])
    for rank in (0, 2):
        assert 0.09 < np.mean(drawn[rank]) < 0.16
        assert drawn[rank][17] == is_slow(config, rank, 18)
    assert drawn[0] != drawn[2]
    other = ChaosConfig(slow_ranks=(0,), slow_probability=0.125, seed=4)
    assert drawn[0] != [is_slow(other, 0, step) for step in range(1, 2001)]
    always, never = (ChaosConfig(slow_ranks=(0,), slow_probability=p) for p in (1.0, 0.0))
    assert all(is_slow(always, 0, step) and not is_slow(never, 0, step) for step in range(1, 50))


@cases(
    "least_s, factor, needs_s, ends_s",
    (0.0, 1.0, [1, 2, 1], [1, 3, 4]),  # nothing is added
    (0.0, 3.0, [1, 2, 1], [3, 9, 12]),
    (9.0, 1.0, [1, 2, 1], [3, 6, 9]),  # spread evenly
    (9.0, 2.0, [1, 2, 1], [6, 12, 18]),
    (3.0, 2.0, [4, 0, 1], [8, 8, 10]),  # it takes longer than that by itself
)
def test_pace_sleeps_the_missing_time(least_s, factor, needs_s, ends_s):
    pace, clock = SlowdownTimer(len(needs_s), least_s, factor), 0.0
    for need_s, end_s in zip(needs_s, ends_s, strict=True):
        taken_s = need_s + pace.lacking_s(need_s)
        pace.took(taken_s)
        clock += taken_s
        assert clock == pytest.approx(end_s)


def test_pace_compensates_for_long_sleeps():
    pace = SlowdownTimer(2, 2.0, 1.0)
    assert pace.lacking_s(0.25) == 0.75
    pace.took(1.5)
    assert pace.lacking_s(0.25) == pytest.approx(0.25)


def losses(comm, settings):
    """Return the losses and compute times of a run, and its parameters."""
    trainer = assemble_trainer(comm, settings)
    steps = trainings.run_steps(trainer, STEPS)
    result, computed_s = [step.loss for step in steps], [step.seconds["compute_s"] for step in steps]
    return result, computed_s, trainer.exchange.parameters.array.tobytes()


@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero3"])
def test_slow_rank_changes_times_but_no_bits(strategy, text):
    settings = {**text, "parallel.strategy": strategy, "communication.algorithm": "ring"}
    slow = {**settings, "chaos.slow_ranks": "[1]", "chaos.slow_factor": 2, "chaos.step_s": 0.02}
    calm = run_threads(2, lambda comm: losses(comm, settings))
    late = run_threads(2, lambda comm: losses(comm, slow))
    assert [(one[0], one[2]) for one in calm] == [(one[0], one[2]) for one in late]
    # 7 samples on 2 ranks: of an even share, 3.5, the first rank has 4. Sleep never ends too early.
    assert min(late[0][1]) >= 0.02 * 4 / 3.5 and min(late[1][1]) >= 2 * 0.02 * 3 / 3.5


@on_threads(1)
def test_only_steps_are_slowed_down(comm, text):
    trainer = assemble_trainer(comm, {**text, "chaos.slow_ranks": "[0]", "chaos.slow_factor": 1e9})
    assert [type(observer) for observer in trainer.executor._observers] == [Slowdown]
    with trainer.batches(1) as batches:
        batch = next(batches)
    trainer.executor.evaluate(*batch)


def test_executor_has_no_observer_without_chaos(text):
    (results,) = run_threads(1, lambda comm: assemble_trainer(comm, text).executor._observers)
    assert results == ()


def test_colocated_server_serves_while_it_is_slowed_down(text):
    settings = {**text, "parallel.strategy": "parameter_server", "parameter_server.consistency": "asp"}
    settings |= {"chaos.step_s": 0.05}

    def looks(comm):
        trainer = assemble_trainer(comm, settings)
        seen = []
        look = trainer.exchange.handlers[Kind.COLLECT]

        def count_look(op):
            seen.append(time.perf_counter())
            look(op)

        trainer.exchange.handlers = {**trainer.exchange.handlers, Kind.COLLECT: count_look}
        if trainer.context.computes:
            (slowdown,) = trainer.executor._observers
            slowdown._sleep(0.03)
        return len(seen)

    assert run_threads(2, looks) == [0, 0], "a worker alone sleeps, and a dedicated server does not"
    settings["parameter_server.placement"] = "colocated"
    assert min(run_threads(2, looks)) > 3


@cases(
    "settings, message",
    ({"chaos.slow_ranks": "[1, 1]"}, "list each rank once"),
    ({"chaos.slow_ranks": "[-1]"}, "each must be at least 0"),
    ({"chaos.slow_ranks": "[0]", "chaos.slow_factor": 0.5}, "chaos.slow_factor = 0.5; it must be"),
    ({"chaos.slow_ranks": "[0]", "chaos.slow_factor": "inf"}, "finite"),
    ({"chaos.slow_ranks": "[0]", "chaos.slow_probability": 1.5}, "between 0 and 1"),
    ({"chaos.step_s": -1}, "chaos.step_s = -1.0"),
    ({"chaos.seed": -1}, "chaos.seed = -1"),
    ({"chaos.slow_factor": 4}, "has no effect with chaos.slow_ranks"),
    ({"chaos.slow_ranks": "0"}, "expected a list of whole numbers. Meaning: "),
    ({"chaos.slow_ranks": "[0.5]"}, "expected a list of whole numbers"),
    ({"chaos.kill": "['1']"}, r"chaos.kill has '1': expected RANK@STEP as in '2@100' or '2@100:PHASE'"),
    ({"chaos.kill": "['1@0']"}, "steps are counted from 1"),
    ({"chaos.kill": "['1@3:lunch']"}, "'lunch' is not one of begin, forward, backward, exchange, update, save"),
    ({"chaos.kill": "['1@3', '1@3:begin']"}, "repeats a fault; list each fault once"),
    ({"chaos.kill": "[1]"}, "expected a list of texts. Meaning: Ranks to kill"),
    ({"chaos.kill": "1@3"}, "expected a list of texts"),
    ({"chaos.stall": "['1@3']"}, "expected RANK@STEP as in '2@100:SECONDS'"),
    ({"chaos.stall": "['1@3:0']"}, "finite number of seconds above 0"),
    ({"chaos.stall": "['1@3:long']"}, "finite number of seconds above 0"),
    ({"chaos.corrupt": "['1@3:losses']"}, "not one of gradients, parameters"),
    ({"chaos.disk": "['1@3']"}, "expected RANK@STEP as in '2@100:WHAT'"),
    ({"chaos.overflow": "[0]"}, "step numbers must be at least 1"),
    ({"chaos.overflow": "[2, 2]"}, "repeats a fault; list each fault once"),
    ({"chaos.overflow": "[4]", "run.steps": 3}, "the run ends with step 3"),
    ({"chaos.kill": "['0@4']", "run.steps": 3}, "before step 4; name steps from 1 to 3"),
)
def test_invalid_chaos_settings_are_rejected(settings, message):
    assert_rejected(settings, message)


def test_slow_ranks_must_compute(text):
    with pytest.raises(ConfigurationError, match=r"slow_ranks = \[0, 2\] on 2 ranks: there is no rank 2"):
        run_threads(2, lambda comm: assemble_trainer(comm, {**text, "chaos.slow_ranks": "[0, 2]"}))
    served = {**text, "parallel.strategy": "parameter_server", "chaos.slow_ranks": "[1]"}
    with pytest.raises(ConfigurationError, match="rank 1 is only a server"):
        run_threads(2, lambda comm: assemble_trainer(comm, served))


def test_recipe_stores_chaos_and_may_resume_without_it(tmp_path):
    (tmp_path / "a.toml").write_text("[chaos]\nslow_ranks = [0, 3]\nslow_probability = 0.125\n")
    recipe = recipes.load(tmp_path / "a.toml", (), {}).recipe
    assert recipe.chaos.slow_ranks == (0, 3)
    (tmp_path / "b.toml").write_text(recipes.dump(recipe))
    assert recipes.load_stored(tmp_path / "b.toml") == recipe
    assert recipe_recipe.is_operational("chaos.slow_ranks") and recipe_recipe.is_operational("chaos.step_s")


def test_chaos_is_described():
    assert ChaosConfig().described() == "" and not ChaosConfig().on
    config = ChaosConfig(slow_ranks=(0, 1), slow_probability=0.125, step_s=0.02)
    assert config.on and config.described() == (
        "computing takes 0.02 s a step by sleep; ranks 0, 1 3 times slower with probability 0.125 a step"
    )
