"""Growing batches: the samples of each step, its learning rate, and runs that resume in the middle of a stage."""

import itertools

import numpy as np
import pytest

from harness.trainings import difference, losses, recipe_keys, recipe_of, run_single_process, trainer_of
from harness.trainings import state as state_of
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError
from hpcdist.optim import rates
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.rates import learning_rate, staged_batches
from hpcdist.training.build import state
from hpcdist.training.data import Prefetcher, open_source
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.saving import CheckpointSaver

WARMUP = (12, 4, 36, 8)  # 3 steps of 4, 3 of 8, then 12 each
RUN = {"run.batch_warmup": list(WARMUP)} | recipe_keys(
    "layers=1 hidden=16 heads=2 data.context=8 precision.mode=float64 steps=9 global_batch=12 optimizer.name=lars "
    "optimizer.base_batch=12 optimizer.scaling=linear optimizer.warmup_samples=30 algorithm=ring"
)


def count_samples(batches, steps):
    """Return the number of samples before each step, by taking one step after the other."""
    return [0, *itertools.accumulate(batches.size(step) for step in range(steps))]


@pytest.mark.parametrize("warmup", [(), (4, 4), (12, 4, 36, 8), (1, 1, 3, 2, 6, 3), (1000, 10, 3000, 11 * 4 + 6)])
def test_steps_and_samples_are_converted_both_ways(warmup):
    batches = staged_batches(64, warmup)
    steps = 150
    before = count_samples(batches, steps)
    assert [batches.samples_before(step) for step in range(steps + 1)] == before
    assert [batches.steps_for(samples) for samples in before] == pytest.approx(list(range(steps + 1)))
    for step in range(steps):  # and linear in between
        half = (before[step] + before[step + 1]) / 2
        assert batches.steps_for(half) == pytest.approx(step + 0.5)
    assert batches.size(10**9) == 64 and batches.sizes == [*warmup[1::2], 64]
    assert batches.samples_before(10**6) == before[-1] + 64 * (10**6 - steps)


def test_sizes_of_known_steps():
    batches = staged_batches(12, WARMUP)
    assert [batches.size(step) for step in range(8)] == [4, 4, 4, 8, 8, 8, 12, 12]
    assert [batches.samples_before(step) for step in range(8)] == [0, 4, 8, 12, 20, 28, 36, 48]


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_rate_follows_the_batch_and_warm_up_counts_samples(rule):
    options = {} if rule == "none" else {"base_batch": 6}
    config = OptimizerConfig(learning_rate=0.6, scaling=rule, warmup_samples=30, decay="constant", **options)
    result = rates.resolve_rate(config, staged_batches(12, WARMUP))
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[rule]
    sizes, taken = [4, 4, 4, 8, 8, 8, 12, 12], [4, 8, 12, 20, 28, 36, 48, 60]
    expected = [0.6 * (size / 6) ** power * min(1.0, samples / 30) for size, samples in zip(sizes, taken, strict=True)]
    assert [learning_rate(result, update, 100) for update in range(1, 9)] == pytest.approx(expected)
    by_updates = rates.resolve_rate(OptimizerConfig(learning_rate=0.6, warmup_steps=4), staged_batches(12, WARMUP))
    assert [learning_rate(by_updates, update, 100) for update in (1, 2, 4)] == pytest.approx([0.15, 0.3, 0.6])
    assert "steps of 4, 8, 12 samples, the last from sample 36 on" in rates.describe_rate(
        config, staged_batches(12, WARMUP)
    )


@pytest.mark.parametrize(("ranks", "warmup"), [(1, WARMUP), (3, WARMUP), (2, ()), (4, (8, 4, 24, 8))])
def test_samples_are_visited_once_in_the_same_order(ranks, warmup, shared_text):
    recipe = recipe_of({**RUN, "data.path": shared_text, "run.batch_warmup": list(warmup)})
    steps = 8

    def body(comm):
        source = open_source(recipe.data, recipe.model, comm)
        first, second = (Prefetcher(source, recipe, comm, *part) for part in ((0, 5), (5, steps)))  # resumed after 5
        with first, second:
            return [x for x, _ in (*first, *second)]

    shares = run_threads(ranks, body)
    taken = np.concatenate([shares[rank][step] for step in range(steps) for rank in range(ranks)])
    plain = recipes.load(None, [f"data.path={shared_text}", "data.context=8", "run.global_batch=1"], {}).recipe
    with Prefetcher(open_source(plain.data, plain.model, solo()), plain, solo(), 0, len(taken)) as one_by_one:
        expected = np.concatenate([x for x, _ in one_by_one])
    assert len(taken) == recipe.run.batches.samples_before(steps)
    assert np.array_equal(taken, expected)


LAYOUTS = {
    "allreduce": (3, {"parallel.microbatches": 2}),
    "delayed": (2, {"communication.delayed": "true", "communication.overlap": "thread"}),
    "zero3": (2, {"parallel.strategy": "zero3", "parallel.microbatches": 4}),
    "1f1b x zero1": (4, {"parallel.strategy": "zero1", "parallel.pipeline": 2, "parallel.microbatches": 4}),
    "a server": (3, {"parallel.strategy": "parameter_server", "parameter_server.servers": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("delayed")
def test_growing_batches_match_under_every_exchange(layout, shared_text):
    ranks, keys = LAYOUTS[layout]
    settings = {**RUN, "data.path": shared_text}
    if "communication.delayed" in keys:  # another run, the same on all ranks
        settings |= keys
        trainer = trainer_of(solo(), settings)
        expected, weights = losses(trainer, 9), state_of(trainer)
    else:
        reference = run_single_process(settings, 9)
        expected, weights = reference.losses, reference.state

    def body(comm):
        trainer = trainer_of(comm, {**settings, **keys})
        return losses(trainer, 9), difference(trainer, weights)

    for result, apart in run_threads(ranks, body):
        np.testing.assert_allclose(result, expected, rtol=1e-10)
        assert apart < 1e-9


@pytest.mark.parametrize("stop", [2, 3, 5, 7])
def test_resume_in_any_stage_is_bit_identical(stop, shared_text, tmp_path):
    settings = {**RUN, "data.path": shared_text, "communication.algorithm": "auto"}
    whole = trainer_of(solo(), settings)
    expected = losses(whole, 9)
    first = trainer_of(solo(), settings)
    actual_losses = losses(first, stop)
    assert state.scalars(first, stop)["samples"] == [0, 4, 8, 12, 20, 28, 36, 48][stop]
    saved = CheckpointSaver(first, tmp_path / "checkpoints").save(stop)
    second = trainer_of(solo(), settings, saved)
    assert actual_losses + losses(second, 9) == expected
    theirs = state_of(whole)
    assert all(np.array_equal(values, theirs[key]) for key, values in state_of(second).items())


REFUSED = [
    ({"run.batch_warmup": [4]}, "has an odd length, 1; expected two numbers per warm-up stage"),
    ({"run.batch_warmup": [8, 0]}, "a step must have at least 1 sample"),
    ({"run.batch_warmup": [8, 4, 8, 6]}, "each stage must end after the previous stage"),
    ({"run.batch_warmup": [10, 4]}, "is not a whole number of steps of 4 samples; let this stage end at sample 8"),
    ({"run.batch_warmup": [12, 12]}, "but 12 samples per step are followed by 12"),
    ({"run.batch_warmup": [8, 8, 16, 4]}, "up to run.global_batch, but 8 samples per step are followed by 4"),
    (recipe_keys("logical_shards=4 algorithm=auto"), "run.logical_shards = 4 is not built"),
    ({"data.shares": "measured"}, "data.shares = 'measured' is not built"),
    ({"precision.mode": "float16"}, "precision.mode = 'float16' is not built"),
    (recipe_keys("strategy=gossip optimizer.name=sgd"), "have no common sample count"),
    (recipe_keys("strategy=parameter_server parameter_server.consistency=asp"), "have no common sample count"),
    ({"parallel.data": 5}, "with 5 data ranks: each needs at least one sample of a step"),
    ({"parallel.microbatches": 6}, "parallel.microbatches = 6 with run.batch_warmup = "),
    (recipe_keys("pipeline=2 microbatches=3"), "parallel.pipeline = 2: micro-batches of a pipeline"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_batch_stages_are_rejected(keys, message):
    with pytest.raises(ConfigurationError) as caught:
        recipes.load(None, [f"{key}={value}" for key, value in {**RUN, **keys}.items()], {})
    assert message in str(caught.value)
