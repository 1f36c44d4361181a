"""Error feedback: no gradient is lost over the steps, and a rolled-back step has no effect."""

import numpy as np
import pytest

from harness.compressed.compressors import decode_values
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.compression.adaptive import Adaptive
from hpcdist.compression.casts import Float16
from hpcdist.compression.compressor import ErrorFeedback, RandomKey
from hpcdist.compression.sign import SignSgd
from hpcdist.compression.uniform import Blockwise, Qsgd
from hpcdist.errors import UsageError

LAYOUT = Layout.of([TensorSpec(0, "weight", (20, 30)), TensorSpec(0, "bias", (7,)), TensorSpec(1, "weight", (300,))])
COMPRESSORS = [SignSgd(), Blockwise(bits=4), Adaptive(), Qsgd(bits=8), Float16()]
every = pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda compressor: compressor.name)


def draw_gradients(step, scale=1.0):
    rng = np.random.default_rng(step)
    return {s.key: (rng.standard_normal(s.range.size) * scale).astype(np.float32) for s in LAYOUT.segments}


def encode_step(feedback, compressor, gradients, step):
    """Encode all tensors. Return the decoded values."""
    sent = {}
    for number, segment in enumerate(LAYOUT.segments):
        payload = np.empty(compressor.payload_bytes(segment.range.size), np.uint8)
        key = RandomKey(1, step, 0, number)
        feedback.encode(segment.range, gradients[segment.key], compressor, payload, key)
        sent[segment.key] = decode_values(compressor, payload, segment.range.size)
    return sent


@every
def test_sent_sum_is_gradient_sum_minus_last_residual(compressor):
    feedback, steps = ErrorFeedback(LAYOUT), 30
    given = {s.key: np.zeros(s.range.size) for s in LAYOUT.segments}
    sent = {key: zeros.copy() for key, zeros in given.items()}
    for step in range(steps):
        gradients = draw_gradients(step)
        for key, got in encode_step(feedback, compressor, gradients, step).items():
            sent[key] += got
            given[key] += gradients[key]
        feedback.keep()
    for segment in LAYOUT.segments:
        residual = feedback.residuals.range(segment.range)
        assert residual.any()  # otherwise the test shows nothing
        scale = np.abs(given[segment.key]).max() + np.abs(residual).max()
        assert np.abs(given[segment.key] - residual - sent[segment.key]).max() <= steps * scale * 2**-23


def test_mean_of_signs_converges_to_the_gradient():
    """Without feedback, signs of a constant gradient would send a wrong direction forever."""
    gradient, steps = np.float32([4.0, 1.0, -0.5, 0.1]), 400
    feedback, total = ErrorFeedback(Layout.of([TensorSpec(0, "w", (4,))])), np.zeros(4)
    payload = np.empty(SignSgd().payload_bytes(4), np.uint8)
    for step in range(steps):
        feedback.encode(Range(0, 4), gradient, SignSgd(), payload, RandomKey(0, step, 0, 0))
        total += decode_values(SignSgd(), payload, 4)
        feedback.keep()
    SignSgd().encode(gradient, payload, RandomKey(0, 0, 0, 0))
    alone = decode_values(SignSgd(), payload, 4)
    assert np.abs(total / steps - gradient).max() < 0.1 < np.abs(alone - gradient).max()


@every
def test_rolled_back_step_has_no_effect(compressor):
    feedback, other = ErrorFeedback(LAYOUT), ErrorFeedback(LAYOUT)
    for step in range(3):
        for each in (feedback, other):
            encode_step(each, compressor, draw_gradients(step), step)
            each.keep()
    before = feedback.residuals.array.copy()
    encode_step(feedback, compressor, draw_gradients(77, 1e6), 3)
    assert (feedback.residuals.array != before).any()
    feedback.rollback()
    assert feedback.residuals.array.tobytes() == before.tobytes()
    again = [encode_step(each, compressor, draw_gradients(4), 3) for each in (feedback, other)]
    assert all((again[0][key] == again[1][key]).all() for key in again[0])


def test_rollback_restores_only_encoded_ranges():
    feedback = ErrorFeedback(LAYOUT)
    first, second = (segment.range for segment in LAYOUT.segments[:2])
    feedback.compensate(first, np.ones(first.size, np.float32))
    feedback.keep()
    feedback.compensate(second, np.ones(second.size, np.float32))
    feedback.rollback()
    assert (feedback.residuals.range(first) == 1).all() and not feedback.residuals.range(second).any()


def test_overlapping_ranges_in_one_step_are_rejected():
    feedback = ErrorFeedback(LAYOUT)
    feedback.compensate(Range(0, 10), np.ones(10, np.float32))
    feedback.compensate(Range(10, 10), np.ones(0, np.float32))
    with pytest.raises(UsageError, match=r"keep\(\) or rollback\(\)"):
        feedback.compensate(Range(9, 20), np.ones(11, np.float32))
    feedback.keep()
    feedback.compensate(Range(9, 20), np.ones(11, np.float32))
    assert feedback.residuals.array[9] == 2


def test_rollback_needs_can_roll_back():
    feedback = ErrorFeedback(LAYOUT, can_roll_back=False)
    feedback.rollback()  # there is nothing to undo
    feedback.compensate(Range(0, 10), np.ones(10, np.float32))
    with pytest.raises(UsageError, match="can_roll_back=True"):
        feedback.rollback()


@every
def test_gpu_keeps_the_same_residuals(gpu, compressor):
    host, device = ErrorFeedback(LAYOUT), ErrorFeedback(LAYOUT, on="gpu")
    where = LAYOUT.segments[0].range
    for step in range(3):
        gradient = draw_gradients(step)["0.weight"]
        payload = np.empty(compressor.payload_bytes(where.size), np.uint8)
        on_device, given = gpu.empty(payload.size, np.uint8), gpu.asarray(gradient)
        host.encode(where, gradient, compressor, payload, RandomKey(1, step, 0, 0))
        gpu.LOG.clear()
        device.encode(where, given, compressor, on_device, RandomKey(1, step, 0, 0))
        assert not gpu.LOG.events
        assert on_device.get().tobytes() == payload.tobytes()
        for each in (host, device):
            each.rollback() if step == 1 else each.keep()
    assert device.residuals.array.get().tobytes() == host.residuals.array.tobytes()
