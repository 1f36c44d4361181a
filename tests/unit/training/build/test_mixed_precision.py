"""16-bit working copies with a float32 master: the rounding rule, and every architecture follows it."""

from dataclasses import replace

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases, on_threads
from harness.trainings import assert_rejected, difference, small_trainer
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import NonFiniteError
from hpcdist.models.arena import Arena
from hpcdist.optim.base import BLOCK
from hpcdist.optim.norms import clip_scale
from hpcdist.strategies.core.mixed_precision import DynamicLossScale
from hpcdist.training import inference
from hpcdist.training.run.loop import mean_validation_loss
from hpcdist.training.run.saving import CheckpointSaver

MODES = ("bfloat16", "float16")
STRATEGIES = ("allreduce", "zero1", "zero2", "zero3")
SAMPLES = 12
SERVED = ["precision.mode=bfloat16", "parallel.strategy=parameter_server"]


def trainer_of(comm, path, keys, resume=None):
    settings = {
        "model.layers": 2,
        "run.steps": 40,
        "run.global_batch": SAMPLES,
        "run.validation_samples": 20,
        "communication.algorithm": "all_to_all",
        "precision.mode": "bfloat16",
        **keys,
    }
    if str(settings.get("parallel.strategy", "")).startswith("zero") and "communication.algorithm" not in keys:
        settings["communication.algorithm"] = "ring"  # for 16 bits both sum in the order of the ranks
    if settings["precision.mode"] == "float16":
        settings.setdefault("precision.loss_scale", 1024)  # small enough: no step is skipped
    return small_trainer(comm, path, settings, resume)


def state_of(trainer):
    """Return master and moments of the whole model from the pieces that the ranks save. Collective."""
    whole = trainings.state(trainer)
    assert all(values.dtype == np.float32 for values in whole.values()), "never a rounded copy"
    return whole


class Reference:
    """The rounding rule with conversions of numpy and ml_dtypes, and AdamW in float32."""

    def __init__(self, trainer, scale):
        self.model, self.config, self.trainer = trainer.model, trainer.recipe.optimizer, trainer
        self.scale = scale
        self.half = dtype_of(trainer.recipe.precision.mode)
        self.master, self.wide, self.gradient = (FlatStore(self.model.layout, np.dtype("float32")) for _ in range(3))
        self.model.initialise(self.master, trainer.recipe.run.seed)
        self.m, self.v = np.zeros_like(self.master.array), np.zeros_like(self.master.array)
        self.arena, self.count = Arena(), 0

    def step(self, batches):
        loss, total = 0.0, np.zeros(self.master.size, self.half)
        self.wide.array[...] = self.master.array.astype(self.half).astype(np.float32)
        parameters = self.model.bind(self.wide)
        per_target = 1.0 / (SAMPLES * self.model.tokens_per_sample)
        for number, (inputs, targets) in enumerate(batches):
            gradients = self.model.bind_gradients(self.gradient)
            logits = self.model.forward(parameters, inputs, self.arena)
            last = self.arena.saved(self.model.stages[-1].layer)
            loss += self.model.loss.forward(logits, targets, self.model.operations, last)
            self.model.backward(parameters, gradients, per_target * self.scale, self.arena)
            added = self.gradient.array if number == 0 else total.astype(np.float32) + self.gradient.array
            total = added.astype(self.half)
        self._update(total)
        return loss * per_target

    def _update(self, gradient):
        config, real = self.config, np.float32
        squared = float(np.sum(gradient.astype(np.float64) ** 2)) / self.scale**2
        factor = clip_scale(squared, config.clip_norm) / self.scale
        self.count += 1
        rate = real(self.trainer.learning_rate(self.count))
        g = gradient.astype(np.float32) * real(factor)
        self.m = self.m * real(config.beta1) + g * real(1 - config.beta1)
        self.v = self.v * real(config.beta2) + g * g * real(1 - config.beta2)
        first, second = (real(1 / (1 - beta**self.count)) for beta in (config.beta1, config.beta2))
        u = self.m * first / (np.sqrt(self.v * second) + real(config.epsilon))
        for segment in self.model.layout.segments:
            where, decay = segment.range.slice, real(config.weight_decay if segment.spec.adapted else 0.0)
            w = self.master.array[where]
            w -= rate * (u[where] + decay * w)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_one_rank_has_the_bits_of_the_rounding_rule(text, mode, microbatches, clip):
    keys = {"precision.mode": mode, "parallel.microbatches": microbatches, "optimizer.clip_norm": clip}
    trainer = trainer_of(solo(), text, keys)
    rule = Reference(trainer, trainer.executor.loss_scale.scale)
    with trainer.batches(8) as batches:
        expected = [rule.step(trainer.cut(batch)) for batch in batches]
    losses = trainings.losses(trainer, 8)
    # The norm, and so the factor of a clip, is summed in another order: an ulp of it now and then.
    np.testing.assert_allclose(losses, expected, rtol=1e-6 if clip else 0)
    state = state_of(trainer)
    for segment in trainer.model.layout.segments:
        result, requested = state["parameters", segment.key], rule.master.view(segment.key).reshape(-1)
        np.testing.assert_allclose(result, requested, rtol=3e-6 if clip else 0, atol=1e-9 if clip else 0)
        working = trainer.exchange.parameters.view(segment.key).reshape(-1)
        assert working.dtype == rule.half and working.tobytes() == result.astype(rule.half).tobytes()


def run_of(comm, text, keys, steps=6):
    trainer = trainer_of(comm, text, keys)
    return trainings.losses(trainer, steps), state_of(trainer), mean_validation_loss(trainer)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [3, 4])
def test_sharded_training_has_the_bits_of_allreduce(text, size, mode):
    """Sums are in rank order. There is no clipping, whose norm is summed by shards."""
    keys = {"precision.mode": mode, "optimizer.clip_norm": 0}
    losses, state, validation = run_threads(size, lambda comm: run_of(comm, text, keys))[0]
    for strategy in STRATEGIES[1:]:
        other = keys | {"parallel.strategy": strategy}
        for result in run_threads(size, lambda comm, other=other: run_of(comm, text, other)):
            assert result[0] == losses and result[2] == validation, strategy
            assert all(result[1][key].tobytes() == values.tobytes() for key, values in state.items()), strategy


@pytest.mark.parametrize("optimizer", ["sgd", "lars", "lamb"])
@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3"])
def test_every_optimizer_is_close_to_one_rank(text, strategy, optimizer):
    """Gradients are rounded per rank and micro-batch, by 2^-11 each, so sums may differ by that."""
    keys = {"precision.mode": "float16", "optimizer.name": optimizer, "optimizer.clip_norm": 0.3, "model.tied": "true"}
    losses, state, _ = run_of(solo(), text, keys)
    keys |= {"parallel.strategy": strategy, "parallel.microbatches": 2}
    for result in run_threads(3, lambda comm: run_of(comm, text, keys)):
        np.testing.assert_allclose(result[0], losses, rtol=2e-4)
        assert difference(result[1], state) < 1e-3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.full
def test_16_bit_training_learns_like_float32(text, mode):
    plain = trainings.losses(trainer_of(solo(), text, {"precision.mode": "float32"}), 40)
    half = run_threads(2, lambda comm: trainings.losses(trainer_of(comm, text, {"precision.mode": mode}), 40))[0]
    assert half[-1] < half[0] - 1.0 and plain[-1] < plain[0] - 1.0
    np.testing.assert_allclose(half, plain, rtol=0.01 if mode == "bfloat16" else 0.002)


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "optimizer"),
    [("allreduce", 1, 1, 1), ("zero1", 1, 1, 2), ("zero2", 1, 2, 2), ("zero3", 2, 2, 2)],
)
@on_threads(2)
def test_memory_matches_the_closed_form(comm, text, strategy, parameters, gradients, optimizer):
    """2 + 2 + 12 bytes per parameter, each divided by the ranks that shard it, and the listed buffers."""
    trainer = trainer_of(comm, text, {"parallel.strategy": strategy, "model.hidden": 128, "model.layers": 4})
    trainings.losses(trainer, 2)
    psi = trainer.model.layout.parameters
    layer = max(part.size for part in trainer.context.ranges.values())
    update = 4 * min(BLOCK, max(part.size for part in trainer.exchange.update.parts))
    named = {  # a layer in float32; where it is cut, one in 16 bits; and what an update widens
        "parameters": 4 * layer + (2 * layer if parameters > 1 else 0),
        "gradients": 4 * layer + (2 * layer if gradients > 1 else 0) + update,
        "optimizer": 0,
    }
    for kind, bytes_each, ranks in (
        ("parameters", 2, parameters),
        ("gradients", 2, gradients),
        ("optimizer", 12, optimizer),
    ):
        held = trainer.ledger.peak[kind] - named[kind]
        assert held == pytest.approx(bytes_each * psi / ranks, rel=0.03), kind


@pytest.mark.parametrize(
    ("strategy", "algorithm", "volumes"),
    [("allreduce", "all_to_all", 2), ("zero1", "ring", 2), ("zero2", "ring", 2), ("zero3", "ring", 3)],
)
@on_threads(4)
def test_bytes_sent_are_half_of_float32(comm, text, strategy, algorithm, volumes):
    keys = {"parallel.strategy": strategy, "communication.algorithm": algorithm, "model.hidden": 64}
    trainer = trainer_of(comm, text, keys)
    trainings.losses(trainer, 1)
    with count_traffic(comm) as traffic:
        trainer = replace(trainer, first_step=1)
        trainings.losses(trainer, 2)
    psi = 2 * trainer.model.layout.parameters
    last = 2 * sum(spec.size for spec in trainer.model.stages[-1].tensors())
    sent = volumes * psi - (last if strategy == "zero3" else 0)  # whose forward and backward follow each other
    assert not traffic.unknown
    assert traffic.sent_bytes == pytest.approx(sent * (comm.size - 1) / comm.size, rel=0.01, abs=1024)


def plant_overflow(trainer, rank):
    """Make one gradient of ``rank`` overflow by scaling its share of the loss."""
    if trainer.comm.rank == rank:
        backward = trainer.model.loss.backward
        trainer.model.loss.backward = lambda scale, *rest: backward(1e9 * scale, *rest)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 3])
def test_overflow_on_one_rank_is_skipped_by_all(text, size, strategy):
    keys = {"precision.mode": "float16", "precision.loss_scale": 0, "precision.hysteresis": 2}
    keys |= {"parallel.strategy": strategy, "parallel.microbatches": 2}

    def body(comm):
        trainer = trainer_of(comm, text, keys)
        scale, result = trainer.executor.loss_scale, []
        assert isinstance(scale, DynamicLossScale)
        scale.scale = 1024.0
        healthy = trainer.model.loss.backward
        with trainer.batches(6) as batches:
            for step, batch in enumerate(batches, start=1):
                before, working = state_of(trainer), trainer.exchange.parameters.array.copy()
                if step in (2, 3, 4):
                    plant_overflow(trainer, size - 1)
                done = trainer.executor.run(trainer.operations, trainer.cut(batch), SAMPLES, step, np.ones(2))
                trainer.model.loss.backward = healthy
                assert done.stop_requests.tolist() == [size] * 2 and np.isfinite(done.loss)
                same = all(values.tobytes() == before[key].tobytes() for key, values in state_of(trainer).items())
                assert same == done.skipped == (working.tobytes() == trainer.exchange.parameters.array.tobytes())
                result.append((done.skipped, done.loss_scale, scale.scale, trainer.exchange.state()["count"]))
        return result, state_of(trainer)

    expected = [
        (False, 1024, 1024, 1),
        (True, 1024, 1024, 1),
        (True, 1024, 512, 1),
        (True, 512, 256, 1),
        (False, 256, 256, 2),
        (False, 256, 256, 3),
    ]
    for result, _ in run_threads(size, body):
        assert result == expected


def test_skipped_steps_leave_no_trace(text):
    """The other steps have the bits of a run without the bad batches."""
    keys = {"precision.mode": "float16", "precision.loss_scale": 256, "parallel.strategy": "zero2"}

    def body(comm, bad, used):
        trainer = trainer_of(comm, text, keys)
        healthy = trainer.model.loss.backward
        with trainer.batches(6) as batches:
            for step, batch in enumerate(batches, start=1):
                if step in used:
                    if step in bad:
                        plant_overflow(trainer, 1)
                    trainer.executor.run(trainer.operations, trainer.cut(batch), SAMPLES, step, np.zeros(2))
                    trainer.model.loss.backward = healthy
        return state_of(trainer)

    met = run_threads(2, lambda comm: body(comm, (3, 4), (1, 2, 3, 4, 5, 6)))[0]
    never = run_threads(2, lambda comm: body(comm, (), (1, 2, 5, 6)))[0]
    assert all(values.tobytes() == never[key].tobytes() for key, values in met.items())


@pytest.mark.parametrize("mode", MODES)
def test_non_finite_loss_ends_the_run_with_the_reason(text, mode):
    def body(comm):
        trainer = trainer_of(comm, text, {"precision.mode": mode, "parallel.strategy": "zero3"})
        if comm.rank == 1:
            *_, (_, touched) = trainer.exchange.parameters.tensors()
            trainer.exchange.parameters.range(touched)[...] = np.nan
        return trainings.failure_reason(trainer)

    for messages in run_threads(2, body):
        assert "step 1: loss nan" in messages and "rank 1: parameter" in messages and "rank 0:" not in messages


def test_non_finite_bfloat16_gradient_ends_the_run(text):
    trainer = trainer_of(solo(), text, {})
    backward = trainer.model.loss.backward
    trainer.model.loss.backward = lambda scale, *rest: backward(1e38 * scale, *rest) * 1e38
    with trainer.batches(1) as batches:
        parts = trainer.cut(next(iter(batches)))
    before = state_of(trainer)
    with pytest.raises(NonFiniteError, match="step 7: loss .*, gradient norm"), np.errstate(all="ignore"):
        trainer.executor.run(trainer.operations, parts, SAMPLES, 7, np.zeros(2))
    assert all(values.tobytes() == before[key].tobytes() for key, values in state_of(trainer).items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_run_has_the_same_bits(text, tmp_path, strategy, mode):
    keys = {"precision.mode": mode, "parallel.strategy": strategy}
    if mode == "float16":
        keys |= {"precision.loss_scale": 0, "precision.growth_interval": 2}  # it rises, and overflows, on the way

    def run_whole(comm):
        trainer = trainer_of(comm, text, keys)
        return trainings.losses(trainer, 12), state_of(trainer), trainer.executor.loss_scale.state()

    def run_first(comm):
        trainer = trainer_of(comm, text, keys)
        return trainings.losses(trainer, 5), CheckpointSaver(trainer, tmp_path / "checkpoints").save(5)

    def run_second(comm):
        trainer = trainer_of(comm, text, keys, saved)
        return trainings.losses(trainer, 12), state_of(trainer), trainer.executor.loss_scale.state()

    losses, state, scale = run_threads(2, run_whole)[0]
    before, saved = run_threads(2, run_first)[0]
    rest, result, scale_then = run_threads(2, run_second)[1]
    assert before + rest == losses and scale_then == scale
    assert all(result[key].tobytes() == values.tobytes() for key, values in state.items())


def test_checkpoint_moves_to_other_strategies_and_precisions(text, tmp_path):
    def run_first(comm):
        trainer = trainer_of(comm, text, {"parallel.strategy": "zero2"})
        trainings.losses(trainer, 4)
        return CheckpointSaver(trainer, tmp_path / "checkpoints").save(4), state_of(trainer)

    saved, state = run_threads(3, run_first)[0]
    for strategy, mode, size in (
        ("allreduce", "bfloat16", 1),
        ("zero1", "bfloat16", 2),
        ("zero3", "float16", 4),
        ("allreduce", "float32", 2),
    ):
        keys = {"parallel.strategy": strategy, "precision.mode": mode}

        def run_second(comm, keys=keys):
            trainer = trainer_of(comm, text, keys, saved)
            return state_of(trainer), trainings.losses(trainer, 8)

        for before, losses in run_threads(size, run_second):
            assert all(before[key].tobytes() == values.tobytes() for key, values in state.items())
            assert np.isfinite(losses).all()


def test_evaluation_uses_the_working_copy(text, tmp_path):
    trainer = trainer_of(solo(), text, {})
    trainings.losses(trainer, 6)
    expected = mean_validation_loss(trainer)
    CheckpointSaver(trainer, tmp_path / "checkpoints").save(6)
    trained = inference.load(solo(), tmp_path, trainer.recipe)
    assert trained.validation_loss() == pytest.approx(expected, rel=1e-6)
    held = trained.parameters.array
    assert (held == held.astype(dtype_of("bfloat16")).astype(np.float32)).all()


@cases(
    "overrides, key",
    ([*SERVED, "parameter_server.consistency=asp"], "parameter_server.consistency"),
    ([*SERVED, "parameter_server.backup_workers=1"], "backup_workers"),
    ([*SERVED, "parameter_server.transport=shared"], "parameter_server.transport"),
    ([*SERVED, "communication.algorithm=hierarchical"], "communication.algorithm"),
    (["precision.mode=bfloat16", "parallel.strategy=local_sgd"], "parallel.strategy"),
    (["precision.minimum_scale=2"], "precision.minimum_scale"),
    (["precision.mode=float16", "precision.loss_scale=8", "precision.minimum_scale=2"], "minimum_scale"),
    (["precision.mode=float16", "precision.minimum_scale=3"], "a power of two from 2.-24 to 2.16"),
    (["precision.mode=float16", "precision.minimum_scale=131072"], "a power of two from 2.-24 to 2.16"),
    (["precision.mode=bfloat16", "parallel.strategy=gossip"], "parallel.strategy"),
    (["precision.mode=float16", "run.logical_shards=4"], "run.logical_shards"),
    (["precision.mode=float16", "communication.overlap=thread", "communication.delayed=true"], "delayed"),
    (["precision.mode=float16", "parallel.strategy=zero1", "zero.shared_parameters=true"], "shared_parameters"),
    (["precision.loss_scale=8"], "precision.loss_scale"),
    (["precision.mode=bfloat16", "precision.loss_scale=8"], "precision.loss_scale"),
    (["precision.mode=bfloat16", "precision.hysteresis=3"], "precision.hysteresis"),
    (["precision.mode=float16", "precision.loss_scale=8", "precision.growth_interval=5"], "growth_interval"),
    (["precision.mode=float16", "precision.loss_scale=100"], "a power of two"),
    (["precision.mode=float16", "precision.loss_scale=-2"], "a power of two"),
    (["precision.mode=float16", "precision.loss_scale=inf"], "a power of two"),
    (["precision.mode=float16", "precision.hysteresis=0"], "precision.hysteresis"),
    (["precision.activations=half"], "precision.activations = 'half'"),
    (["precision.activations=working"], "this mode has no 16-bit working copies"),
    (
        ["precision.mode=bfloat16", "precision.activations=working"],
        r"^run.device = 'cpu' with precision.activations = 'working' and precision.mode = 'bfloat16' is not built",
    ),
)
def test_options_incompatible_with_16_bits_are_rejected(overrides, key):
    assert_rejected(overrides, key)
