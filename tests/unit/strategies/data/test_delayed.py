"""Delayed gradients: the module's rule compared with independent references; bits, flushes, and rejected recipes."""

import re
from dataclasses import replace

import numpy as np
import pytest

from harness.inputs import write_text
from harness.marks import cases
from harness.rank_run import RankRun, gpt, text
from harness.trainings import assemble_trainer, assert_rejected, recipe_keys
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, NonFiniteError, ScheduleError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.optim import optimizer as optimizers
from hpcdist.optim import rates
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

SAMPLES, STEPS = 7, 6
KINDS = ("thread", "poll")
SGD = OptimizerConfig(name="sgd", momentum=0.0, learning_rate=0.3, weight_decay=0.01, warmup_steps=3, clip_norm=0.7)
MOMENTUM = replace(SGD, momentum=0.9, learning_rate=0.05)
ADAMW = OptimizerConfig(learning_rate=1e-2, warmup_steps=3, clip_norm=0.5)
LAMB = replace(ADAMW, name="lamb")


MODEL = ModelConfig(layers=2, hidden=16, heads=2, tied=True)


class Run(RankRun):
    """A run of a tiny gpt on one rank."""

    def __init__(self, comm, overlap="poll", optimizer=ADAMW, *, algorithm="ring", microbatches=1, pipeline=1):
        keys = {"microbatches": microbatches, "pipeline": pipeline, "algorithm": algorithm, "overlap": overlap}
        keys |= {"config": MODEL, "optimizer": optimizer, "total_steps": STEPS, "bucket_bytes": 4096}
        super().__init__(comm, catalogue.delayed, **keys)

    def flush(self):
        left = self.exchange.finish()
        self.executor.copies.refresh()
        return left

    def train(self, data, flushes=()):
        """Return the losses, and the weights of this rank's stages after the last step.

        ``flushes`` are the steps with a flush.
        """
        losses = []
        for number, samples in enumerate(data, start=1):
            losses.append(self.step(samples, number))
            if number in flushes:
                assert self.flush()
                assert not self.flush(), "nothing is left"
        return losses, self.exchange.parameters.array.copy()


class Reference:
    """Gradients of the whole batch at any weights, computed by the model alone. Subclasses define the updates."""

    def __init__(self, config):
        self.config, self.model = config, gpt(MODEL, "float64")
        self.weights, self.gradient = (FlatStore(self.model.layout, self.model.dtype) for _ in range(2))
        self.model.initialise(self.weights, 3)
        self.arena, self.updates = Arena(), 0

    def loss_and_gradient(self, samples):
        views, into = self.model.bind(self.weights), self.model.bind_gradients(self.gradient)
        for bound in into:
            bound.begin_step()
        logits = self.model.forward(views, samples[:, :-1], self.arena)
        saved = self.arena.saved(self.model.stages[-1].layer)
        loss = self.model.loss.forward(logits, samples[:, 1:], self.model.operations, saved)
        self.model.backward(views, into, 1 / samples[:, 1:].size, self.arena)
        for bound in into:
            bound.finish()
        return loss / samples[:, 1:].size, self.gradient.array.copy()

    def train(self, data, flushes=()):
        """Apply the gradient of each step after the next gradient is computed, or immediately at a flush."""
        losses, late = [], None
        for number, samples in enumerate(data, start=1):
            loss, gradient = self.loss_and_gradient(samples)
            losses.append(loss)
            if late is not None:
                self.update(late)
            late = gradient
            if number in flushes:
                self.update(late)
                late = None
        return losses, self.weights.array

    def update(self, gradient):
        self.updates += 1
        norm = np.sqrt(sum((gradient[each.range.slice] ** 2).sum() for each in self.model.layout.segments))
        self.apply(gradient, min(1.0, self.config.clip_norm / norm))

    def apply(self, gradient, scale):
        raise NotImplementedError


class ByHand(Reference):
    """w <- w - eta (scale g + decay w) in numpy, where eta is the rate of the step that computed the gradient."""

    def apply(self, gradient, scale):
        assert self.config.name == "sgd" and self.config.momentum == 0
        rate = rates.learning_rate(self.config, self.updates, STEPS)
        for segment in self.model.layout.segments:
            local_slice = segment.range.slice
            decay = self.config.weight_decay if segment.spec.adapted else 0.0
            self.weights.array[local_slice] -= rate * (
                scale * gradient[local_slice] + decay * self.weights.array[local_slice]
            )


class ByTheOptimizer(Reference):
    """The optimizer on one rank, called with the late gradient."""

    def __init__(self, config):
        super().__init__(config)
        whole = Range(0, self.model.layout.size)
        dtype = np.dtype(self.model.dtype)
        self.optimizer = optimizers.build(config, self.model.layout, whole, dtype, total_steps=STEPS)

    def apply(self, gradient, scale):
        whole = Range(0, self.model.layout.size)
        store = FlatStore(self.model.layout, self.model.dtype)
        store.array[...] = gradient
        self.optimizer.begin_step()
        self.optimizer.direction(whole, self.weights, store, scale)
        norms = self.optimizer.partial_norms() if self.optimizer.needs_norms else None
        self.optimizer.apply(whole, self.weights, store, None, norms)


def distance(result, right):
    return float(np.linalg.norm(result - right) / np.linalg.norm(right))


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize(
    ("size", "flushes"),
    [(size, flushes) for size in range(1, 9) for flushes in ((), (3,), (1, 2, 5)) if not flushes or size in (3, 8)],
)
@pytest.mark.full_except("3-flushes3-thread")
@pytest.mark.matrix_except(
    "1-flushes0-poll", "3-flushes3-thread", "3-flushes4-poll", "5-flushes6-thread", "8-flushes11-poll"
)
def test_delayed_updates_match_the_reference(overlap, size, flushes, rng):
    """There are eight ranks and seven samples, so one rank has no sample."""
    data = text(rng, STEPS, SAMPLES)
    losses, weights = ByHand(SGD).train(data, flushes)

    def body(comm):
        with Run(comm, overlap, SGD) as run:
            return run.train(data, flushes)

    for result, local_values in run_threads(size, body):
        np.testing.assert_allclose(result, losses, rtol=1e-12)
        assert distance(local_values, weights) < 1e-12


@pytest.mark.parametrize("config", [MOMENTUM, ADAMW, LAMB], ids=lambda config: config.name)
@pytest.mark.parametrize("flushes", [(), (4,)])
@pytest.mark.full_except("flushes1-adamw")
def test_delayed_optimizers_match_one_rank(config, flushes, rng):
    data = text(rng, STEPS, SAMPLES)
    losses, weights = ByTheOptimizer(config).train(data, flushes)

    def body(comm, **keys):
        with Run(comm, "thread", config, **keys) as run:
            return run.train(data, flushes)

    for result, local_values in run_threads(3, body):
        np.testing.assert_allclose(result, losses, rtol=1e-9)
        assert distance(local_values, weights) < 1e-9, "of the bias of the keys, whose true gradient is zero"
    staged = run_threads(4, lambda comm: body(comm, microbatches=3, pipeline=2))
    for result, _ in staged:
        np.testing.assert_allclose(result, losses, rtol=1e-9)
    assert distance(np.concatenate([staged[0][1], staged[2][1]]), weights) < 1e-9


def test_last_gradient_stays_pending_without_a_flush(rng):
    """The first step changes nothing. A flush after every step removes the delay."""
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        with Run(comm, "thread", SGD) as run:
            initial = run.exchange.parameters.array.copy()
            run.step(data[0])
            assert (run.exchange.parameters.array == initial).all() and run.exchange.state()["count"] == 0
            run.flush()
            assert (run.exchange.parameters.array != initial).any() and run.exchange.state()["count"] == 1

    run_threads(2, body)
    undelayed, late = ByHand(SGD), None
    for samples in data:
        _, late = undelayed.loss_and_gradient(samples)
        undelayed.update(late)
    _, flushed = ByHand(SGD).train(data, tuple(range(1, STEPS + 1)))
    assert (undelayed.weights.array == flushed).all()


@pytest.mark.parametrize("algorithm", ["ring", "node_shared", "native"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.full_except("1-native")
def test_delayed_bits_are_reproducible_for_threads_and_polling(algorithm, microbatches, rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm, overlap):
        with Run(comm, overlap, algorithm=algorithm, microbatches=microbatches) as run:
            losses, weights = run.train(data, (3,))
            return losses, weights.tobytes()

    first = run_threads(3, lambda comm: body(comm, "thread"))
    assert run_threads(3, lambda comm: body(comm, "thread")) == first and len({bits for _, bits in first}) == 1
    if algorithm == "ring":
        assert run_threads(3, lambda comm: body(comm, "poll")) == first


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_delayed_list_is_proven_and_broken_lists_are_rejected(overlap, pipeline):
    def body(comm):
        with Run(comm, overlap, pipeline=pipeline, microbatches=2) as run:
            return run

    runs = run_threads(2 * pipeline, body)
    lists = [run.operations for run in runs]

    def prove():
        units = dict(enumerate(runs[0].model.layout.units.values()))
        verify(lists, grid=runs[0].grid, units=units, microbatches=2, needs=runs[0].model.needs)

    prove()
    kinds = [op.kind for op in lists[1]]
    assert kinds.count(Kind.DEFER) == kinds.count(Kind.SETTLE) > 1 and Kind.WAIT not in kinds
    if overlap == "poll":
        assert kinds.index(Kind.POLL) < kinds.index(Kind.DEFER), "what the step before has left moves from the start"
    taken = lists[1].pop(kinds.index(Kind.SETTLE))
    with pytest.raises(ScheduleError, match=r"rank 1: DEFER\(.*\) needs exactly one SETTLE"):
        prove()
    lists[1].append(taken)
    with pytest.raises(ScheduleError, match=r"DIRECTION\(.*\) comes before SETTLE"):
        prove()
    lists[1].pop()
    lists[1].insert(kinds.index(Kind.SETTLE), taken)
    lists[1].pop(kinds.index(Kind.DEFER))
    with pytest.raises(ScheduleError, match=r"never exchanged|needs exactly one DEFER"):
        prove()


@pytest.mark.parametrize("overlap", KINDS)
def test_non_finite_gradient_ends_the_run_on_all_ranks(overlap, rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        with Run(comm, overlap) as run:
            run.step(data[0])
            if comm.rank == 1:
                run.exchange.parameters.view(run.model.layout.segments[4].key)[...] = np.nan
            why = run.failure(data[1], 2)
            assert "step 2" in why and "rank 1: parameter" in why

    run_threads(3, body)

    def flush_late(comm):
        with Run(comm, overlap) as run:
            run.step(data[0])
            for bucket in run.exchange._buckets:
                run.exchange._settle(run.exchange.gradients, bucket)
            run.exchange.gradients.array[...] = np.inf
            with pytest.raises(NonFiniteError, match="step 1: the gradient of this last step has"):
                run.flush()
            why, key = run.failure(data[1], 2), run.model.layout.segments[0].key
            assert re.search(r"step 2: loss [0-9.]+, gradient norm of step 1 inf", why)
            assert f"the step before left it in the gradient of {key}, summed" in why
            assert "samples of that step" in why and "rank 0:" not in why

    run_threads(2, flush_late)


@pytest.mark.parametrize("overlap", KINDS)
@cases(
    "layout",
    {},
    {"parallel.pipeline": 2},
    {"parallel.pipeline": 2, "parallel.schedule": "interleaved", "parallel.chunks": 2},
    ids=["data", "pipeline", "chunks"],
)
@pytest.mark.full_except("chunks-thread")
def test_saving_does_not_change_the_bits_of_a_run(overlap, layout, tmp_path, rng):
    """The pending gradient is one of the pieces. An exchange that would drop it is rejected."""
    settings = {"data.path": write_text(tmp_path / "text.txt", rng), "communication.overlap": overlap} | recipe_keys(
        "delayed=true algorithm=ring strategy=allreduce global_batch=6 microbatches=2 optimizer.name=lamb"
    )
    alone, settings = dict(settings), settings | layout

    def body(comm, settings, *, saves):
        trainer = assemble_trainer(comm, settings)
        with trainer.batches(5) as batches:
            parts = [trainer.cut(trainer.place(batch)) for batch in batches]

        def train(trainer, first, last):
            return [trainer.step(step + 1, parts[step], np.zeros(3)).loss for step in range(first, last)]

        losses = train(trainer, 0, 3)
        if saves:
            path = CheckpointSaver(trainer, tmp_path / "checkpoints").save(3)
            assert trainer.exchange.state() == {"count": 2, "pending": True}
            mean_validation_loss(trainer)
            trainer.close()
            with pytest.raises(ConfigurationError, match="has a pending gradient"):
                assemble_trainer(comm, settings | {"communication.delayed": "false"}, path)
            trainer = assemble_trainer(comm, settings, path)
        losses += train(trainer, 3, 5)
        trainer.finish()
        assert trainer.exchange.state() == {"count": 5, "pending": False}
        trainer.close()
        return losses, trainer.exchange.parameters.array.tobytes()

    whole = run_threads(4, lambda comm: body(comm, settings, saves=False))
    assert run_threads(4, lambda comm: body(comm, settings, saves=True)) == whole
    np.testing.assert_allclose(whole[0][0], run_threads(1, lambda comm: body(comm, alone, saves=False))[0][0], 1e-5)


@cases(
    "settings, match",
    ([], r"communication.delayed = true with communication.overlap = 'none'"),
    (["communication.overlap=thread", "parallel.strategy=zero1"], r"delayed = true has no effect with .*'zero1'"),
    (["communication.overlap=thread", "run.logical_shards=4"], r"run.logical_shards = 4"),
    (["communication.overlap=thread", "precision.mode=bfloat16"], r"precision.mode = 'bfloat16' is not built"),
)
def test_unsupported_recipes_are_rejected(settings, match):
    assert_rejected(["communication.delayed=true", *settings], match)
