"""16-bit working copies in pipelines and on a tensor axis: the rounding rule, and one verdict on an overflow."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness import trainings
from harness.trainings import LAYOUT_KEYS as LAYOUT
from harness.trainings import NOISE, losses, state, trainer_of
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import NonFiniteError
from hpcdist.models.arena import Arena
from hpcdist.strategies.core.mixed_precision import MAXIMUM_OVERFLOWS
from hpcdist.strategies.core.operations import EXCHANGED
from hpcdist.training.run.saving import CheckpointSaver

Keys = dict[str, Any]
State = dict[tuple[str, str], np.ndarray]

SAMPLES = 12
BASE = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "data.context": 8,
    "run.steps": 40,
    "run.global_batch": SAMPLES,
    "optimizer.warmup_steps": 2,
    "optimizer.clip_norm": 0,  # its norm is summed by stages
    "parallel.microbatches": 4,
    "communication.algorithm": "all_to_all",
}
BFLOAT16 = {"precision.mode": "bfloat16"}
FLOAT16 = {"precision.mode": "float16", "precision.loss_scale": 1024}  # small enough: no step is skipped
PIPELINE = {"parallel.pipeline": 2}
TENSOR = {"parallel.tensor": 2}
TIED = {"model.tied": "true"}
SGD = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1, "optimizer.momentum": 0.9}
ZERO1, ZERO2, ZERO3 = ({"parallel.strategy": f"zero{stage}", "communication.algorithm": "ring"} for stage in (1, 2, 3))
SERVER = {"parallel.strategy": "parameter_server", "communication.algorithm": "native"}
COLOCATED = SERVER | {"parameter_server.placement": "colocated"}
SCHEDULES = {
    "gpipe": {"parallel.schedule": "gpipe"},
    "1f1b": {},
    "1f1b, recomputed": {"parallel.recompute": "true"},
    "interleaved": {"parallel.schedule": "interleaved", "parallel.chunks": 2},
    "zb-h1": {"parallel.schedule": "zb-h1"},
    "zb-h2": {"parallel.schedule": "zb-h2"},
    "zb-v": {"parallel.schedule": "zb-v"},
}


@pytest.fixture
def text(text):
    return {**BASE, "data.path": text}


def bits(result):
    assert all(values.dtype == np.float32 for values in result.values()), "never a rounded copy"
    return {key: values.tobytes() for key, values in result.items()}


def run(comm, keys, steps, resume=None):
    trainer = trainer_of(comm, keys, resume)
    result = losses(trainer, steps), state(trainer)
    trainer.close()
    return result


class Rule:
    """One process that rounds like a pipeline: the last stage's part of a tied tensor is rounded separately.


    It uses conversions of numpy and ml_dtypes, and a momentum update in float32.
    """

    def __init__(self, trainer):
        self.trainer, self.model = trainer, trainer.model
        self.half = dtype_of(trainer.recipe.precision.mode)
        stores = (FlatStore(self.model.layout, np.dtype("float32")) for _ in range(4))
        self.master, self.wide, self.own, self.copy = stores
        self.model.initialise(self.master, trainer.recipe.run.seed)
        self.velocity = np.zeros_like(self.master.array)
        self.arena, self.count = Arena(), 0
        self.last = self.model.stages[-1]
        self.tied_layers = {self.model.layout.by_key[key].spec.layer for key in self.last.tied.values()}

    def step(self, batches):
        scale = self.trainer.executor.loss_scale.scale
        per_target, loss = 1.0 / (SAMPLES * self.model.tokens_per_sample), 0.0
        self.wide.array[...] = self.master.array.astype(self.half).astype(np.float32)
        parameters, unit = self.model.bind(self.wide), len(self.model.stages) - 1
        local_data, copy = (np.zeros(self.master.size, self.half) for _ in range(2))
        for inputs, targets in batches:
            self.own.zero()
            self.copy.zero()
            gradients = self.model.bind_gradients(self.own)
            gradients[unit] = self.model.bind_stage_gradients(unit, self._store_of, set())
            logits = self.model.forward(parameters, inputs, self.arena)
            saved = self.arena.saved(self.last.layer)
            loss += float(self.model.loss.forward(logits, targets, self.model.operations, saved))
            self.model.backward(parameters, gradients, per_target * scale, self.arena)
            local_data = (local_data.astype(np.float32) + self.own.array).astype(self.half)
            copy = (copy.astype(np.float32) + self.copy.array).astype(self.half)
        self.count += 1
        gradient = (local_data.astype(np.float32) + copy.astype(np.float32)).astype(self.half).astype(np.float32)
        momentum, rate = self.trainer.recipe.optimizer.momentum, self.trainer.learning_rate(self.count)
        self.velocity = np.float32(momentum) * self.velocity + gradient * np.float32(1 / scale)
        self.master.array[...] -= np.float32(rate) * self.velocity
        return loss * per_target

    def _store_of(self, layer):
        return self.copy if layer in self.tied_layers else self.own


@pytest.mark.parametrize(("number", "name"), list(enumerate(SCHEDULES)))
@pytest.mark.full_except("0-gpipe")
def test_pipeline_has_the_bits_of_the_rounding_rule(text, number, name):
    """The bits are equal.

    If a backward is split, contributions of micro-batches to vectors are summed before rounding.
    """
    keys = text | SGD | {"optimizer.weight_decay": 0, "model.tied": str(number % 2 == 0).lower()}
    keys |= (BFLOAT16, FLOAT16)[number // 2 % 2]
    rule = Rule(trainer_of(solo(), keys))
    with rule.trainer.batches(4) as batches:
        expected = [rule.step(rule.trainer.cut(batch)) for batch in batches]
    segments = [segment.key for segment in rule.model.layout.segments]
    for result, kept in run_threads(2, lambda comm: run(comm, keys | PIPELINE | SCHEDULES[name], 4)):
        np.testing.assert_allclose(result, expected, rtol=1e-4 if "zb" in name else 1e-12)
        for key in segments:
            mine, right = kept["parameters", key], rule.master.view(key).reshape(-1)
            if "zb" in name:
                assert np.abs(mine - right).max() < 2e-3
            else:
                assert mine.tobytes() == right.tobytes(), key


@pytest.mark.parametrize(
    ("mode", "layout", "servers"), [(BFLOAT16, SERVER, 2), (FLOAT16, SERVER, 1), (BFLOAT16, COLOCATED, 0)]
)
@pytest.mark.full_except("mode2-layout2-0")
def test_servers_sum_in_float32_and_have_the_bits_of_allreduce(text, mode, layout, servers):
    keys = text | mode | {"parallel.microbatches": 2}
    losses_then, kept = run_threads(3, lambda comm: run(comm, keys, 4))[0]
    served = keys | layout | {"parameter_server.servers": servers}
    for result, mine in run_threads(3 + servers, lambda comm: run(comm, served, 4)):
        assert result == losses_then and bits(mine) == bits(kept)


GRIDS = {
    "data 2 x pipeline 2": (4, PIPELINE | TIED | BFLOAT16),
    "data 2 x pipeline 2, zero1": (4, PIPELINE | TIED | ZERO1 | FLOAT16),
    "data 2 x pipeline 2, zero2, each micro-batch": (4, PIPELINE | ZERO2 | BFLOAT16),
    "data 2 x pipeline 2, zero2, kept": (4, PIPELINE | TIED | ZERO2 | FLOAT16 | {"zero.keep_gradients": "true"}),
    "data 2 x pipeline 2, zero3": (4, PIPELINE | ZERO3 | FLOAT16),
    "data 2 x pipeline 2, served": (4, PIPELINE | TIED | COLOCATED | BFLOAT16),
    "tensor 2": (2, TENSOR | TIED | FLOAT16),
    "tensor 2, rows": (2, TENSOR | BFLOAT16 | {"parallel.sequence_parallel": "true"}),
    "data 2 x tensor 2, zero3, lamb": (4, TENSOR | ZERO3 | FLOAT16 | {"optimizer.name": "lamb"}),
    "pipeline 2 x tensor 2, zb-h1": (4, PIPELINE | TENSOR | TIED | BFLOAT16 | {"parallel.schedule": "zb-h1"}),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.matrix_except(
    *("data 2 x pipeline 2, zero1", "data 2 x pipeline 2, zero2, kept", "data 2 x pipeline 2, served"),
    *("tensor 2, rows", "data 2 x tensor 2, zero3, lamb", "pipeline 2 x tensor 2, zb-h1"),
)
@pytest.mark.full_except("data 2 x pipeline 2, zero1")
def test_every_grid_is_close_to_one_rank(text, name):
    """The bound allows 16-bit roundings of sums in another order: 2^-9 for bfloat16, 2^-12 for float16, each."""
    size, layout = GRIDS[name]
    keys = text | {"optimizer.clip_norm": 0.3} | layout
    plain = {key: value for key, value in keys.items() if not key.startswith(LAYOUT)}
    expected, right = run(solo(), plain | {"parallel.microbatches": 4}, 5)
    weights = [key for key in right if key[0] == "parameters" and not key[1].endswith(NOISE)]
    size_of_all = np.linalg.norm([np.linalg.norm(right[key]) for key in weights])
    for result, kept in run_threads(size, lambda comm: run(comm, keys, 5)):
        np.testing.assert_allclose(result, expected, rtol=2e-4)
        apart = [np.linalg.norm(kept[key].astype(np.float64) - right[key]) for key in weights]
        assert np.linalg.norm(apart) / size_of_all < 2e-3


def local_state(trainer):
    """Return the bits of all state that this rank keeps between steps: copies, master, moments, clocks. Local."""
    exchange, copies = trainer.exchange, trainer.executor.copies
    kept = [piece.array.copy().tobytes() for piece in (*exchange.wanted(), *exchange.pieces())]
    return [
        exchange.parameters.array.tobytes(),
        copies.parameters.array.tobytes(),
        *kept,
        repr(exchange.state()).encode(),
    ]


def plant_overflow(trainer, *, in_copy):
    """Make one element of this rank's next gradients infinite. Return a function that ends it."""
    exchange, copies, healthy = trainer.exchange, trainer.executor.copies, trainer.exchange.handlers
    left = [-1]  # places, none of them padding

    def damage(values):
        values[left.pop()] = np.inf

    def send(handler, op):
        assert op.range is not None
        if left and trainer.executor.gradients_in(op.range) is not None:
            inside = list(trainer.model.layout.within(op.range))
            # On a tensor axis what all ranks have whole is the hard case: one of them counts it.
            shared = [where for segment, where in inside if trainer.grid.tensor > 1 and not segment.spec.whole]
            damage(trainer.exchange.gradients_at(layer_of(trainer, op)).range((shared or [inside[-1][1]])[0]))
        handler(op)

    if in_copy:
        finish = trainer.executor._bound.complete_copies

        def complete():
            finish()
            if left and copies.keys:
                damage(copies.gradients.view(min(copies.keys)).reshape(-1))

        trainer.executor._bound.complete_copies = complete
        return lambda: setattr(trainer.executor._bound, "complete_copies", finish)
    sends = {kind: lambda op, handler=healthy[kind]: send(handler, op) for kind in EXCHANGED if kind in healthy}
    exchange.handlers = {**healthy, **sends}
    return lambda: setattr(exchange, "handlers", healthy)


def layer_of(trainer, op):
    assert op.range is not None
    ranges = trainer.context.ranges.items()
    return next(trainer.model.stages[unit].layer for unit, part in ranges if part.intersect(op.range))


STEPS = {
    "allreduce": (2, FLOAT16 | TIED),
    "a server": (3, SERVER | FLOAT16),
    "data 2 x pipeline 2, topk with feedback": (
        4,
        PIPELINE | TIED | FLOAT16 | {"communication.algorithm": "native", "communication.compression": "topk"},
    ),
    "pipeline 2": (2, PIPELINE | TIED | FLOAT16),
    "pipeline 2, interleaved": (2, PIPELINE | TIED | FLOAT16 | SCHEDULES["interleaved"]),
    **{
        name: (GRIDS[name][0], GRIDS[name][1] | FLOAT16)
        for name in (
            "data 2 x pipeline 2, zero2, each micro-batch",
            "data 2 x pipeline 2, zero3",
            "data 2 x pipeline 2, served",
            "tensor 2",
            "pipeline 2 x tensor 2, zb-h1",
        )
    },
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.full_except("tensor 2", "data 2 x pipeline 2, zero3")
def test_overflow_on_one_rank_of_one_stage_is_skipped_by_all(text, name):
    """Each rank overflows in turn, and the copy of a tied tensor. No trace is left in the following steps."""
    size, layout = STEPS[name]
    keys = text | layout

    def body(comm, *, bad):
        trainer = trainer_of(comm, keys)
        computing = comm.allgather_object(trainer.context.computes)
        copied = any(comm.allgather_object(bool(trainer.executor.copies.keys)))
        culprits = [(rank, False) for rank in range(size) if computing[rank]]
        culprits += [(-1, True)] * copied
        with trainer.batches(2) as batches:
            first, second = (trainer.cut(batch) for batch in batches)

        def step(number, parts):
            return trainer.executor.run(trainer.operations, parts, SAMPLES, number, np.ones(2))

        results = [step(1, first).loss]
        for rank, in_copy in culprits if bad else []:
            before = local_state(trainer)
            mine = comm.rank == rank or (in_copy and bool(trainer.executor.copies.keys))
            heal = plant_overflow(trainer, in_copy=in_copy) if mine else lambda: None
            done = step(2, second)
            heal()
            assert done.skipped and np.isfinite(done.loss), (rank, in_copy)
            assert local_state(trainer) == before, (rank, in_copy)
        assert trainer.executor.loss_scale.skipped == (len(culprits) if bad else 0)
        results.append(step(2, second).loss)
        kept = local_state(trainer)
        trainer.close()
        return results, kept

    assert run_threads(size, lambda comm: body(comm, bad=True)) == run_threads(size, lambda comm: body(comm, bad=False))


@pytest.mark.parametrize("culprit", [0, 3])
def test_non_finite_bfloat16_gradient_ends_the_run_on_all_ranks(text, culprit):
    def body(comm):
        trainer = trainer_of(comm, text | PIPELINE | BFLOAT16)
        if comm.rank == culprit:
            plant_overflow(trainer, in_copy=False)
        before = local_state(trainer)
        why = trainings.failure_reason(trainer)
        assert local_state(trainer) == before and re.search("step 1: loss .*, gradient norm inf", why)
        return why

    assert len(set(run_threads(4, body))) == 1


def test_overflow_at_the_minimum_scale_stops_all_ranks(text):
    keys = (
        text | PIPELINE | {"precision.mode": "float16", "precision.minimum_scale": 2.0**15, "precision.hysteresis": 3}
    )
    last = 3 + MAXIMUM_OVERFLOWS  # two at the first scale, the third lowers it

    def body(comm):
        trainer = trainer_of(comm, keys)
        before = local_state(trainer)
        with trainer.batches(1) as batches:
            parts = trainer.cut(next(iter(batches)))
        for number in range(1, last):
            heal = plant_overflow(trainer, in_copy=False) if comm.rank == number % 4 else lambda: None
            assert trainer.executor.run(trainer.operations, parts, SAMPLES, number, np.ones(2)).skipped
            heal()
        if comm.rank == 2:
            plant_overflow(trainer, in_copy=False)
        with pytest.raises(NonFiniteError) as failed:
            trainer.executor.run(trainer.operations, parts, SAMPLES, last, np.ones(2))
        assert local_state(trainer) == before
        return str(failed.value)

    (output,) = set(run_threads(4, body))
    assert output.startswith(f"step {last}: ") and "\n" not in output
    assert f"overflowed float16 for {MAXIMUM_OVERFLOWS} steps in a row at the loss scale 32768; try " in output
    assert "optimizer.learning_rate" in output and "precision.minimum_scale" in output


@pytest.mark.full
def test_bfloat16_training_learns_like_float32(text):
    """30 steps in bfloat16 agree within 1 %."""
    keys = text | TIED | {"optimizer.learning_rate": 3e-3}
    plain, _ = run(solo(), keys, 30)
    half, _ = run_threads(2, lambda comm: run(comm, keys | BFLOAT16 | PIPELINE, 30))[0]
    assert half[-1] < half[0] - 1.0
    np.testing.assert_allclose(half, plain, rtol=0.01)


RESUMED = {  # and who takes it over: ranks, keys
    "pipeline": (PIPELINE | TIED | ZERO1, [(1, {}), (3, SERVER | BFLOAT16)]),
    "tensor": (TENSOR | ZERO3, [(2, PIPELINE | BFLOAT16)]),
    "servers": (SERVER | {"parameter_server.servers": 2}, [(2, TENSOR | FLOAT16)]),
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.full
def test_resume_has_the_same_bits_and_other_layouts_can_resume(text, tmp_path, name):
    layout, others = RESUMED[name]
    keys = text | layout | {"precision.mode": "float16", "precision.growth_interval": 2}  # it rises, and overflows

    def run_whole(comm):
        trainer = trainer_of(comm, keys)
        result = losses(trainer, 4)
        saved, then = CheckpointSaver(trainer, tmp_path / "checkpoints").save(4), bits(state(trainer))
        trainer = replace(trainer, first_step=4)
        result += losses(trainer, 9)
        return result, saved, then, bits(state(trainer)), trainer.executor.loss_scale.state()

    def run_resumed(comm):
        trainer = trainer_of(comm, keys, saved)
        return losses(trainer, 9), bits(state(trainer)), trainer.executor.loss_scale.state()

    expected, saved, then, last, scale = run_threads(4, run_whole)[0]
    assert scale["skipped"] > 0
    assert run_threads(4, run_resumed) == [(expected[4:], last, scale)] * 4
    tied = TIED if "model.tied" in layout else {}
    for size, other in others:

        def take_over(comm, other=other):
            trainer = trainer_of(comm, text | tied | other, saved)
            return bits(state(trainer)), losses(trainer, 6)

        for result, rest in run_threads(size, take_over):
            assert result == then and np.isfinite(rest).all()
