"""The gradient noise scale: against a closed form, and what every architecture measures against one process."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases
from harness.trainings import assembled, recipe_keys, refused
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError
from hpcdist.optim.rates import SMOOTHING, SmoothedNoise, estimate_noise
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.telemetry.metrics.side_tables import NOISE_SCALE
from hpcdist.telemetry.metrics.step_metrics import MetricsWriter
from hpcdist.telemetry.report import report, text
from hpcdist.training.build import state
from hpcdist.training.elastic.job import refit
from hpcdist.training.observe import noise_scale
from hpcdist.training.recipe import recipe as recipes

Settings = dict[str, object]


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (1, 3, 4, 24), (16, 16)])
def test_equals_the_closed_form_of_gaussian_gradients(sizes):
    """Gradients are a true one and noise of a known covariance: no estimate is biased, however uneven the batches."""
    rng, steps, big = np.random.default_rng(7), 3000, sum(sizes)
    true, deviation = rng.standard_normal(30) * 0.3, np.linspace(0.2, 2.0, 30)
    groups = [true + deviation * rng.standard_normal((steps, 30)) / math.sqrt(size) for size in sizes]
    whole = sum(size * group for size, group in zip(sizes, groups, strict=True)) / big
    small = sum(size / big * (group**2).sum(axis=1) for size, group in zip(sizes, groups, strict=True))
    found = [
        estimate_noise(a, len(sizes) / big, b, big)
        for a, b in zip(small.tolist(), (whole**2).sum(axis=1).tolist(), strict=True)
    ]
    trace, gradient_squared = (deviation**2).sum(), (true**2).sum()
    for values, expected in (
        ([one.trace for one in found], trace),
        ([one.gradient_squared for one in found], gradient_squared),
    ):
        error = np.std(values) / math.sqrt(steps)
        assert abs(np.mean(values) - expected) < 4 * error < 0.2 * expected
    smoothed = SmoothedNoise()
    for one in found:
        smoothed.add(one)
    error = math.sqrt((1 - SMOOTHING) / (1 + SMOOTHING))  # of the smoothed means, over that of one estimate
    mean, spread = smoothed.mean, float(np.std([one.trace for one in found]))
    assert abs(mean.trace - trace) < 4 * error * spread
    together = np.mean([one.trace for one in found]) / np.mean([one.gradient_squared for one in found])
    assert abs(together / (trace / gradient_squared) - 1) < 0.1 and abs(mean.noise_scale / together - 1) < 0.5


def test_the_formulas_of_the_paper_in_its_own_form():
    small, big = (5.0, 4), (2.0, 32)  # |g|^2, samples
    found = estimate_noise(small[0], 1 / small[1], *big)
    assert found.gradient_squared == pytest.approx((32 * 2.0 - 4 * 5.0) / (32 - 4))
    assert found.trace == pytest.approx((5.0 - 2.0) / (1 / 4 - 1 / 32))
    assert math.isnan(estimate_noise(50.0, 1 / 4, 2.0, 32).noise_scale)  # the gradient is below the error


def test_numerator_and_denominator_are_averaged_apart_and_kept():
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
    """What one rank found: of its replica the first sample, and the samples of each micro-batch that is one."""

    steps: list[StepResult]
    parts: list[tuple[int, int]]
    kept: dict[str, float]


@pytest.fixture
def words(text):
    return {"data.path": text, **STILL}


def trained(ranks, settings):
    def body(comm):
        trainer = assembled(comm, settings, directory=Path(str(settings["data.path"])).parent)
        found = trainings.results(trainer, trainer.recipe.run.steps)
        context, sizes, parts = trainer.context, trainer.executor.sizes, []
        if context.computes and context.pipeline.rank == context.tensor.rank == 0:
            together = trainer.exchange.accumulates and not trainer.noise.looks_at_first
            sizes = [sum(sizes)] if together else sizes[:1] if trainer.noise.looks_at_first else sizes
            first = trainer.first_sample(1)
            for size in filter(None, sizes):
                parts.append((first, size))
                first += size
        return Measured(found, parts, state.scalars(trainer, 3)["noise_scale"])

    return run_threads(ranks, body)


def norms_alone(settings, parts, step):
    """Return the norms of the mean gradients of ``parts`` of the batch of a step, in one process without any layout."""
    kept = {key: value for key, value in settings.items() if not key.startswith(("parallel", "communication"))}
    kept |= {"run.logical_shards": 0, "run.noise_scale_every_steps": 0, "precision.mode": "float64"}
    kept = {key: value for key, value in kept.items() if not key.startswith(("parameter_server.", "zero."))}
    trainer = assembled(solo(), kept)
    with trainer.batches(step) as batches:
        inputs, targets = [trainer.place(batch) for batch in batches][step - 1]
    found = []
    for first, size in parts:
        batch = [(inputs[first : first + size], targets[first : first + size])]
        found.append(trainer.executor.run(trainer.operations, batch, size, 1, np.zeros(2)).gradient_norm)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.full_except("accumulated")
def test_every_architecture_measures_the_norms_of_its_small_batches(layout, words):
    ranks, keys, count = LAYOUTS[layout]
    settings = {**words, **keys, "run.noise_scale_every_steps": 2}
    found = trained(ranks, settings)
    parts = sorted(part for rank in found for part in rank.parts)
    assert len(parts) == count and len({str(rank.steps[1].measured) for rank in found}) == 1
    own = norms_alone(settings, [*parts, (0, 10)], 2)
    # One small batch stands for all where it is the only one.
    shares = [size / sum(size for _, size in parts) for _, size in parts]
    squared = sum(share * norm**2 for share, norm in zip(shares, own[:-1], strict=True))
    inverse = sum(share / size for share, (_, size) in zip(shares, parts, strict=True))
    bound = 2e-2 if layout == "bfloat16" else 1e-9
    np.testing.assert_allclose(found[0].steps[1].measured, [squared, inverse], rtol=bound)
    np.testing.assert_allclose(found[0].steps[1].gradient_norm, own[-1], rtol=bound)
    assert [rank.steps[step].measured.tolist() for rank in found for step in (0, 2)] == [[0.0, 0.0]] * 2 * ranks
    expected = SmoothedNoise()
    expected.add(estimate_noise(squared, inverse, own[-1] ** 2, 10))
    for rank in found:
        assert rank.kept == pytest.approx(expected.state(), rel=50 * bound)


def test_a_skipped_step_is_not_measured_and_a_scaled_one_is_as_it_would_be(words):
    plain = {**words, "precision.mode": "float32", "run.noise_scale_every_steps": 1, "run.steps": 2}
    scaled = {**plain, "precision.mode": "float16", "parallel.strategy": "zero1"}
    calm = trained(2, plain)[0]
    fixed = trained(2, {**scaled, "precision.loss_scale": 1024.0})[0]
    for step in range(2):
        np.testing.assert_allclose(fixed.steps[step].measured, calm.steps[step].measured, rtol=2e-2)
    over = trained(2, {**scaled, "chaos.overflow": "[1]"})[0]
    assert [step.skipped for step in over.steps] == [True, False]
    only = SmoothedNoise()
    only.add(estimate_noise(*over.steps[1].measured.tolist(), over.steps[1].gradient_norm ** 2, 10))
    assert over.kept == pytest.approx(only.state())


@pytest.mark.parametrize("layout", ["accumulated", "alone", "zero2", "a server"])
@pytest.mark.full_except("a server")
def test_a_gpu_measures_what_the_cpu_does(gpu, layout, words):
    ranks, keys, _ = LAYOUTS[layout]
    settings = {**words, **keys, "run.noise_scale_every_steps": 2}
    host, there = trained(ranks, settings), trained(ranks, {**settings, "run.device": "gpu"})
    for mine, theirs in zip(host, there, strict=True):
        np.testing.assert_allclose(theirs.steps[1].measured, mine.steps[1].measured, rtol=1e-11)
        assert theirs.kept == pytest.approx(mine.kept, rel=1e-9)


def test_a_step_that_is_computed_again_is_measured_once(words):
    keys = {**words, "run.noise_scale_every_steps": 1}
    once, twice = trained(2, keys)[0], trained(2, {**keys, "run.recompute_every_steps": 1})[0]
    assert [step.measured.tolist() for step in once.steps] == [step.measured.tolist() for step in twice.steps]
    assert once.kept == twice.kept


def test_the_table_the_summary_and_the_report_have_it(tmp_path):
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
    assert "noise      scale 80.0 samples, the critical batch" in text(report(tmp_path))
    told = noise_scale.describe_noise({"noise_scale": 48.0, "global_batch": 16})
    assert "48.0 samples" in told[0] and "4.00 times the fewest steps, and 1.33 times the fewest samples" in told[0]
    assert (
        noise_scale.describe_noise({}) == []
        and "not known"
        in noise_scale.describe_noise({"noise_scale": None, "noise_scale_reason": noise_scale.WHY_UNKNOWN})[0]
    )


EACH = {"run.noise_scale_every_steps": 1}


@cases(
    "settings, message",
    ({"run.noise_scale_every_steps": -1}, "run.noise_scale_every_steps = -1; it must be at least 0"),
    ({**EACH, "parallel.strategy": "gossip"}, "no step has the gradient of all replicas"),
    ({**EACH, "parallel.strategy": "local_sgd"}, "no step has the gradient of all replicas"),
    ({**EACH, **SERVER, "parameter_server.consistency": "asp"}, "consistency = 'bsp' and no backup workers"),
    (EACH | recipe_keys("delayed=true overlap=thread"), "the sum of a step's gradients is known one step later"),
    (EACH | recipe_keys("tensor=2 sequence_parallel=true"), "parallel.sequence_parallel = true"),
    ({**EACH, "parallel.data": 1}, "with 1 data rank: its gradient is that of the whole batch"),
    (
        EACH | recipe_keys("data=1 pipeline=2 microbatches=4 tied=true"),
        "the gradient of the tied tensor is whole once a step",
    ),
)
def test_what_has_no_two_batch_sizes_is_refused(settings, message):
    refused(settings, message)


def test_a_world_of_one_is_refused_and_what_is_left_of_a_job_goes_on_without(words):
    with pytest.raises(ConfigurationError, match="use 2 data ranks or more, or parallel.microbatches of 2 or more"):
        assembled(solo(), {**words, **EACH})
    recipe = recipes.load(None, ["run.noise_scale_every_steps=1"], {}).recipe
    found = [refit(recipe, ranks) for ranks in (3, 1)]
    assert [(fit[0].run.noise_scale_every_steps, fit[1]) for fit in found if fit] == [(1, 3), (0, 1)]


def test_a_backward_that_mixes_micro_batches_is_refused_where_the_first_counts(words):
    keys = {**words, **EACH, "parallel.pipeline": 2, "parallel.microbatches": 5, "parallel.schedule": "zb-h2"}
    for rank in run_threads(2, lambda comm: _refusal(comm, {**keys, "model.tied": "false"})):
        assert "its schedule computes BACKWARD_INPUT(" in rank and "choose another parallel.schedule" in rank


def _refusal(comm, settings):
    try:
        assembled(comm, settings)
    except ConfigurationError as error:
        return str(error)
    return ""
