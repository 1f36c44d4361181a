"""16-bit working copies over real messages: sharded training has the bits of allreduce, with skips and resumes."""

from functools import partial

import numpy as np
import pytest

from harness.trainings import small_trainer, state_bits
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.schedule.replica_check import check_replicas
from hpcdist.training.run.saving import CheckpointSaver

SAMPLES, STEPS, BAD = 12, 8, (3, 4)


# The norm of clipping would be summed by shards.
_trainer = partial(small_trainer, **{"run.steps": 40, "run.global_batch": SAMPLES, "optimizer.clip_norm": 0})


def _train(trainer, last=STEPS):
    """Return the loss, the skip flag and the scale of each step. On the last rank two gradients overflow."""
    result, healthy = [], trainer.model.loss.backward
    with trainer.batches(last) as batches:
        for step, batch in enumerate(batches, start=trainer.first_step + 1):
            if (
                step in BAD
                and trainer.comm.rank == trainer.comm.size - 1
                and trainer.recipe.precision.mode == "float16"
            ):
                trainer.model.loss.backward = lambda scale, *rest: healthy(1e9 * scale, *rest)
            done = trainer.executor.run(trainer.operations, trainer.cut(batch), SAMPLES, step, np.zeros(2))
            trainer.model.loss.backward = healthy
            result.append((done.loss, done.skipped, done.loss_scale))
            if trainer.exchange.traits.identical:
                check_replicas(trainer.data_axis, trainer.exchange.parameters, step)
    return result


@pytest.mark.parametrize("mode", ["bfloat16", "float16"])
def test_rank_sharded_working_copies_have_the_bits_of_allreduce(comm, folder, mode):
    keys = {"precision.mode": mode, "communication.algorithm": "all_to_all"}
    if mode == "float16":
        keys |= {"precision.hysteresis": 1, "precision.growth_interval": 3}
    reference = _trainer(comm, folder, keys)
    expected, state = _train(reference), state_bits(reference)
    scales = [scale for _, _, scale in expected]
    if mode == "float16":
        assert [step for step, (_, skipped, _) in enumerate(expected, start=1) if skipped] == list(BAD)
        assert scales == [65536, 65536, 65536, 32768, 16384, 16384, 16384, 32768]
    for strategy, algorithm in (("zero1", "ring"), ("zero2", "node_shared"), ("zero3", "native")):
        other = keys | {"parallel.strategy": strategy, "communication.algorithm": algorithm}
        trainer = _trainer(comm, folder, other)
        result = _train(trainer)
        # Losses are summed by another algorithm: the last of their 53 bits may differ.
        np.testing.assert_allclose([loss for loss, *_ in result], [loss for loss, *_ in expected], rtol=1e-14)
        assert [rest for _, *rest in result] == [rest for _, *rest in expected], strategy
        assert state_bits(trainer) == state, strategy


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_rank_resumed_run_with_working_copies_has_the_same_bits(comm, folder, strategy):
    keys = {"precision.mode": "float16", "precision.growth_interval": 3, "parallel.strategy": strategy}
    keys |= {"communication.algorithm": "ring"}
    whole = _trainer(comm, folder, keys)
    expected = _train(whole)
    half = _trainer(comm, folder, keys)
    first = _train(half, 3)  # between two overflows in a row
    resumed = _trainer(comm, folder, keys, resume=CheckpointSaver(half, folder / "checkpoints").save(3))
    assert first + _train(resumed) == expected
    assert state_bits(resumed) == state_bits(whole)
    assert resumed.executor.loss_scale.state() == whole.executor.loss_scale.state()


def test_rank_overlapped_sums_of_16_bits_have_the_same_bits(comm, folder):
    for strategy, algorithm in (("allreduce", "ring"), ("zero2", "ring")):
        keys = {"precision.mode": "bfloat16", "parallel.strategy": strategy, "communication.algorithm": algorithm}
        plain = _trainer(comm, folder, keys)
        behind = _trainer(comm, folder, keys | {"communication.overlap": "thread", "parallel.microbatches": 1})
        assert _train(behind) == _train(plain)
        assert state_bits(behind) == state_bits(plain)
        behind.close()


def test_rank_servers_of_working_copies_have_the_bits_of_allreduce(comm, folder):
    keys = {"precision.mode": "bfloat16"}
    reference = _trainer(comm, folder, keys | {"communication.algorithm": "all_to_all"})
    expected, state = _train(reference, 3), state_bits(reference)
    served = {"parallel.strategy": "parameter_server", "parameter_server.placement": "colocated"}
    trainer = _trainer(comm, folder, keys | served | {"communication.algorithm": "native"})
    np.testing.assert_allclose([loss for loss, *_ in _train(trainer, 3)], [loss for loss, *_ in expected], rtol=1e-14)
    assert state_bits(trainer) == state
    trainer.close()


def _overflow_once(trainer):
    """Make one element of the next local gradient sum infinite. Return a function that asserts that it happened."""
    exchange, healthy = trainer.exchange, trainer.exchange.handlers

    def reduce(op):
        exchange.handlers = healthy
        assert op.range is not None
        (_, touched), *_ = trainer.model.layout.within(op.range)
        values = trainer.executor.gradients_in(touched)
        assert values is not None
        values[0] = np.inf
        healthy[Kind.REDUCE](op)

    exchange.handlers = {**healthy, Kind.REDUCE: reduce}
    return lambda: None if exchange.handlers is healthy else pytest.fail("no gradient was summed")


@pytest.mark.parametrize("strategy", ["allreduce", "zero1"])
def test_rank_overflow_in_one_stage_of_one_rank_changes_no_state(comm, folder, strategy):
    """The pipeline has two or three stages, a tied tensor and a tensor axis.

    The last rank overflows, then the first.
    """
    stages = next((count for count in (2, 3) if comm.size % count == 0), 1)
    shapes = [{"parallel.pipeline": stages, "model.tied": "true"}]
    shapes += [{"parallel.tensor": 2}] if comm.size % 2 == 0 else []
    for shape in shapes:
        keys = {"precision.mode": "float16", "precision.loss_scale": 256, "parallel.microbatches": 2, **shape}
        keys |= {"parallel.strategy": strategy, "communication.algorithm": "ring"}
        met, never = _trainer(comm, folder, keys), _trainer(comm, folder, keys)
        with met.batches(2) as batches:
            for step, batch in enumerate(batches, start=1):
                parts = met.cut(batch)
                for culprit in (comm.size - 1, 0):
                    before = state_bits(met), met.exchange.parameters.array.tobytes(), met.exchange.state()
                    check = _overflow_once(met) if comm.rank == culprit else lambda: None
                    assert met.executor.run(met.operations, parts, SAMPLES, step, np.zeros(2)).skipped
                    check()
                    assert (state_bits(met), met.exchange.parameters.array.tobytes(), met.exchange.state()) == before
                assert not met.executor.run(met.operations, parts, SAMPLES, step, np.zeros(2)).skipped
        _train(never, 2)
        assert state_bits(met) == state_bits(never)
        met.close()
        never.close()
