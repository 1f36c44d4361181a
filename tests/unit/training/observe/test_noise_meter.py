"""The gradient noise scale: compared with a closed form, and every architecture compared with one process."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases
from harness.trainings import assemble_trainer, assert_rejected, recipe_keys
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError
from hpcdist.optim.rates import SMOOTHING, SmoothedNoise, estimate_noise
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.telemetry.metrics.side_tables import NOISE_SCALE
from hpcdist.telemetry.metrics.step_metrics import MetricsWriter
from hpcdist.telemetry.report import report, text
from hpcdist.training.build import state
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.elastic_job import refit

Settings = dict[str, object]


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (1, 3, 4, 24), (16, 16)])
def test_noise_scale_matches_the_closed_form_for_gaussian_gradients(sizes):
    """Gradients are a true gradient plus noise with a known covariance: estimates are unbiased for any batch sizes."""
    rng, steps, big = np.random.default_rng(7), 3000, sum(sizes)
    true, deviation = rng.standard_normal(30) * 0.3, np.linspace(0.2, 2.0, 30)
    groups = [true + deviation * rng.standard_normal((steps, 30)) / math.sqrt(size) for size in sizes]
    whole = sum(size * group for size, group in zip(sizes, groups, strict=True)) / big
    small = sum(size / big * (group**2).sum(axis=1) for size, group in zip(sizes, groups, strict=True))
    results = [
        estimate_noise(a, len(sizes) / big, b, big)
        for a, b in zip(small.tolist(), (whole**2).sum(axis=1).tolist(), strict=True)
    ]
    trace, gradient_squared = (deviation**2).sum(), (true**2).sum()
    for values, expected in (
        ([one.trace for one in results], trace),
        ([one.gradient_squared for one in results], gradient_squared),
    ):
        error = np.std(values) / math.sqrt(steps)
        assert abs(np.mean(values) - expected) < 4 * error < 0.2 * expected
    smoothed = SmoothedNoise()
    for one in results:
        smoothed.add(one)
    error = math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING))  # of the smoothed means, relative to the error of one estimate
    mean, spread = smoothed.mean, float(np.std([one.trace for one in results]))
    assert abs(mean.trace - trace) < 4 * error * spread
    together = np.mean([one.trace for one in results]) / np.mean([one.gradient_squared for one in results])
    assert abs(together / (trace / gradient_squared) - 1) < 0.1 and abs(mean.noise_scale / together - 1) < 0.5


def test_estimates_match_the_formulas_of_the_paper():
    small, big = (5.0, 4), (2.0, 32)  # |g|^2, samples
    result = estimate_noise(small[0], 1 / small[1], *big)
    assert result.gradient_squared == pytest.approx((32 * 2.0 - 4 * 5.0) / (32 - 4))
    assert result.trace == pytest.approx((5.0 - 2.0) / (1 / 4 - 1 / 32))
    assert math.isnan(estimate_noise(50.0, 1 / 4, 2.0, 32).noise_scale)  # the gradient is below the error


def test_numerator_and_denominator_are_averaged_separately():
    one, other = estimate_noise(5.0, 1 / 4, 2.0, 32), estimate_noise(90.0, 1 / 4, 3.0, 32)
    smoothed = SmoothedNoise()
    assert math.isnan(smoothed.mean.noise_scale)
    smoothed.add(one)
    assert smoothed.mean.noise_scale == pytest.approx(one.noise_scale)  # not drawn to the 0 that it began with
    smoothed.add(other)
    mean = smoothed.mean
    assert mean.trace == pytest.approx((0.98 * one.trace + other.trace) / 1.98)
    assert mean.gradient_squared == pytest.approx((0.98 * one.gradient_squared + other.gradient_squared) / 1.98)
    again = SmoothedNoise()
    again.restore(json.loads(json.dumps(smoothed.state())))
    assert again.mean == mean and again.state() == smoothed.state()
    again.restore({})
    assert math.isnan(again.mean.trace)


STILL = {  # every step is one of the same weights
    "optimizer.learning_rate": 1e-30,
    "optimizer.weight_decay": 0,
    "precision.mode": "float64",
    "run.global_batch": 10,
    "run.steps": 3,
    "communication.algorithm": "ring",
}
SERVER = {"parallel.strategy": "parameter_server"}
# name -> (ranks, keys, small batches)
LAYOUTS = {
    "allreduce": (3, {}, 3),
    "accumulated": (2, {"parallel.microbatches": 2}, 2),
    "thread": (3, {"communication.overlap": "thread"}, 3),
    "bucketed": (2, {"communication.bucket_bytes": 512}, 2),
    "alone": (1, recipe_keys("microbatches=3 tied=true"), 1),
    "alone, logical shards": (1, recipe_keys("algorithm=auto logical_shards=5"), 5),
    "logical shards": (2, recipe_keys("algorithm=auto logical_shards=5"), 5),
    "zero1": (3, {"parallel.strategy": "zero1"}, 3),
    "zero2": (3, recipe_keys("strategy=zero2 microbatches=2"), 6),
    "zero3": (2, recipe_keys("strategy=zero3 microbatches=2 overlap=thread"), 4),
    "zero3 in shards": (2, recipe_keys("algorithm=auto strategy=zero3 logical_shards=5"), 5),
    "a pipeline alone": (2, recipe_keys("pipeline=2 microbatches=5 tied=false"), 1),
    "1f1b x zero1": (4, recipe_keys("pipeline=2 microbatches=2 strategy=zero1"), 2),
    "1f1b x zero2": (4, recipe_keys("pipeline=2 microbatches=2 strategy=zero2 tied=false"), 4),
    "tensor": (4, {"parallel.tensor": 2}, 2),
    "a server": (3, {**SERVER, "parameter_server.servers": 1}, 2),
    "colocated servers": (2, {**SERVER, "parameter_server.placement": "colocated"}, 2),
    "a server in shards": (3, SERVER | recipe_keys("parameter_server.servers=1 algorithm=auto logical_shards=5"), 5),
    "zero2 in pairs": (4, recipe_keys("strategy=zero2 zero.gradients=2 zero.optimizer=4 microbatches=2"), 8),
    "two servers": (4, {**SERVER, "parameter_server.servers": 2}, 2),
    "bfloat16": (2, recipe_keys("precision.mode=bfloat16 strategy=zero2 microbatches=2"), 4),
}


@dataclass
class Measured:
    """The result of one rank, the first sample of its replica, and the samples of each small batch."""

    steps: list[StepResult]
    parts: list[tuple[int, int]]
    kept: dict[str, float]


@pytest.fixture
def words(text):
    return {"data.path": text, **STILL}


def train(ranks, settings):
    def body(comm):
        trainer = assemble_trainer(comm, settings, directory=Path(str(settings["data.path"])).parent)
        result = trainings.run_steps(trainer, trainer.recipe.run.steps)
        context, sizes, parts = trainer.context, trainer.executor.sizes, []
        if context.computes and context.pipeline.rank == context.tensor.rank == 0:
            together = trainer.exchange.traits.accumulates and not trainer.noise.looks_at_first
            sizes = [sum(sizes)] if together else sizes[:1] if trainer.noise.looks_at_first else sizes
            first = trainer.first_sample(1)
            for size in filter(None, sizes):
                parts.append((first, size))
                first += size
        return Measured(result, parts, state.scalars(trainer, 3)["noise_scale"])

    return run_threads(ranks, body)


def norms_alone(settings, parts, step):
    """Return the norms of the mean gradients of ``parts`` of a step's batch, in one process without a layout."""
    kept = {key: value for key, value in settings.items() if not key.startswith(("parallel", "communication"))}
    kept |= {"run.logical_shards": 0, "run.noise_scale_every_steps": 0, "precision.mode": "float64"}
    kept = {key: value for key, value in kept.items() if not key.startswith(("parameter_server.", "zero."))}
    trainer = assemble_trainer(solo(), kept)
    with trainer.batches(step) as batches:
        inputs, targets = [trainer.place(batch) for batch in batches][step - 1]
    results = []
    for first, size in parts:
        batch = [(inputs[first : first + size], targets[first : first + size])]
        results.append(trainer.executor.run(trainer.operations, batch, size, 1, np.zeros(2)).gradient_norm)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("accumulated")
def test_every_architecture_measures_the_norms_of_its_small_batches(layout, words):
    ranks, keys, count = LAYOUTS[layout]
    settings = {**words, **keys, "run.noise_scale_every_steps": 2}
    result = train(ranks, settings)
    parts = sorted(part for rank in result for part in rank.parts)
    assert len(parts) == count and len({str(rank.steps[1].measured) for rank in result}) == 1
    candidate = norms_alone(settings, [*parts, (0, 10)], 2)
    # One small batch stands for all where it is the only one.
    shares = [size / sum(size for _, size in parts) for _, size in parts]
    squared = sum(share * norm**2 for share, norm in zip(shares, candidate[:-1], strict=True))
    inverse = sum(share / size for share, (_, size) in zip(shares, parts, strict=True))
    bound = 2e-2 if layout == "bfloat16" else 1e-9
    np.testing.assert_allclose(result[0].steps[1].measured, [squared, inverse], rtol=bound)
    np.testing.assert_allclose(result[0].steps[1].gradient_norm, candidate[-1], rtol=bound)
    assert [rank.steps[step].measured.tolist() for rank in result for step in (0, 2)] == [[0.0, 0.0]] * 2 * ranks
    expected = SmoothedNoise()
    expected.add(estimate_noise(squared, inverse, candidate[-1] ** 2, 10))
    for rank in result:
        assert rank.kept == pytest.approx(expected.state(), rel=50 * bound)


def test_skipped_steps_are_ignored_and_the_loss_scale_is_removed(words):
    plain = {**words, "precision.mode": "float32", "run.noise_scale_every_steps": 1, "run.steps": 2}
    scaled = {**plain, "precision.mode": "float16", "parallel.strategy": "zero1"}
    calm = train(2, plain)[0]
    fixed = train(2, {**scaled, "precision.loss_scale": 1024.0})[0]
    for step in range(2):
        np.testing.assert_allclose(fixed.steps[step].measured, calm.steps[step].measured, rtol=2e-2)
    over = train(2, {**scaled, "chaos.overflow": "[1]"})[0]
    assert [step.skipped for step in over.steps] == [True, False]
    only = SmoothedNoise()
    only.add(estimate_noise(*over.steps[1].measured.tolist(), over.steps[1].gradient_norm ** 2, 10))
    assert over.kept == pytest.approx(only.state())


@pytest.mark.parametrize("layout", ["accumulated", "alone", "zero2", "a server"])
@pytest.mark.full_except("a server")
def test_noise_scale_on_the_gpu_matches_the_cpu(gpu, layout, words):
    ranks, keys, _ = LAYOUTS[layout]
    settings = {**words, **keys, "run.noise_scale_every_steps": 2}
    host, there = train(ranks, settings), train(ranks, {**settings, "run.device": "gpu"})
    for mine, theirs in zip(host, there, strict=True):
        np.testing.assert_allclose(theirs.steps[1].measured, mine.steps[1].measured, rtol=1e-11)
        assert theirs.kept == pytest.approx(mine.kept, rel=1e-9)


def test_repeated_step_is_measured_once(words):
    keys = {**words, "run.noise_scale_every_steps": 1}
    once, twice = train(2, keys)[0], train(2, {**keys, "run.recompute_every_steps": 1})[0]
    assert [step.measured.tolist() for step in once.steps] == [step.measured.tolist() for step in twice.steps]
    assert once.kept == twice.kept


def test_noise_scale_is_in_table_summary_and_report(tmp_path):
    path = tmp_path / "metrics.h5"
    with MetricsWriter(path, 1) as writer:
        row = dict(loss=1.0, learning_rate=0.1, tokens=8)
        times = {name: np.ones(1) for name in ("step_s", "compute_s", "communication_s", "update_s", "sent_bytes")}
        for step in (1, 2, 3):
            writer.append(step=step, **row, **times)
        columns = [column.name for column in NOISE_SCALE.columns if column.name != "session"]
        writer.put(NOISE_SCALE, **dict.fromkeys(columns, ()))
        assert "noise_scale" not in report(tmp_path).figures
        rows = [(step, 4.0, 16, 3.0, 2.0, 0.5, 20.0 * step, 40.0 * step) for step in (1, 2, 3)]
        writer.put(NOISE_SCALE, **dict(zip(columns, zip(*rows, strict=True), strict=True)))
        writer.put(NOISE_SCALE, **dict(zip(columns, zip(*rows[1:2], strict=True), strict=True)))
    assert "80.0 samples  (gradient noise scale, the critical batch)" in text(report(tmp_path))
    with MetricsWriter(tmp_path / "metrics.h5", 1, resume_step=3) as writer:
        writer.describe(global_batch=40)
    assert "3.00 times the fewest steps and 1.50 times the fewest samples" in text(report(tmp_path))


EACH = {"run.noise_scale_every_steps": 1}


@cases(
    "settings, message",
    ({"run.noise_scale_every_steps": -1}, "run.noise_scale_every_steps = -1; it must be at least 0"),
    ({**EACH, "parallel.strategy": "gossip"}, "no step has both the gradient of all replicas"),
    ({**EACH, "parallel.strategy": "local_sgd"}, "no step has both the gradient of all replicas"),
    ({**EACH, **SERVER, "parameter_server.consistency": "asp"}, "consistency = 'bsp' and no backup workers"),
    (EACH | recipe_keys("delayed=true overlap=thread"), "the sum of a step's gradients is known one step later"),
    (EACH | recipe_keys("tensor=2 sequence_parallel=true"), "parallel.sequence_parallel = true"),
    ({**EACH, "parallel.data": 1}, "with 1 data rank: its gradient is the gradient of the whole batch"),
    (
        EACH | recipe_keys("data=1 pipeline=2 microbatches=4 tied=true"),
        "the gradient of the tied tensor is complete only at the end of a step",
    ),
)
def test_layouts_with_one_batch_size_are_rejected(settings, message):
    assert_rejected(settings, message)


def test_single_rank_is_rejected_but_a_shrunk_job_continues(words):
    with pytest.raises(ConfigurationError, match="use at least 2 data ranks, or parallel.microbatches of at least 2"):
        assemble_trainer(solo(), {**words, **EACH})
    recipe = recipes.load(None, ["run.noise_scale_every_steps=1"], {}).recipe
    results = [refit(recipe, ranks) for ranks in (3, 1)]
    assert [(fit[0].run.noise_scale_every_steps, fit[1]) for fit in results if fit] == [(1, 3), (0, 1)]


def test_schedules_that_mix_micro_batches_are_rejected(words):
    keys = {**words, **EACH, "parallel.pipeline": 2, "parallel.microbatches": 5, "parallel.schedule": "zb-h2"}
    for rank in run_threads(2, lambda comm: _refusal(comm, {**keys, "model.tied": "false"})):
        assert "the schedule computes BACKWARD_INPUT(" in rank and "choose another parallel.schedule" in rank


def _refusal(comm, settings):
    try:
        assemble_trainer(comm, settings)
    except ConfigurationError as error:
        return str(error)
    return ""
