"""DGC compared with its formulas in float64: accumulated, sent and cleared values, and its limits."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.compression import coo, dgc
from hpcdist.compression.dgc import DeepGradientCompression
from hpcdist.errors import ConfigurationError, UsageError

N, STEPS = 300, 40


def run_step(state, gradient, k, scale=1.0):
    payload = np.empty(8 * k, np.uint8)
    state.accumulate(gradient, scale)
    state.encode(payload)
    out = np.empty(gradient.size, np.float32)
    coo.write(payload, out)
    return out


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_match_the_formulas(nesterov, masks, rng):
    m, k = 0.9, 30
    state = DeepGradientCompression(N, momentum=m, nesterov=nesterov, masks_velocity=masks)
    u, v = np.zeros((2, N))
    for _ in range(STEPS):
        gradient = rng.standard_normal(N).astype(np.float32)
        g = 0.25 * gradient.astype(np.float64)
        u = m * (u + g) if nesterov else m * u + g
        v = v + u + g if nesterov else v + u
        sent = run_step(state, gradient, k, 0.25)
        chosen = sent != 0
        assert chosen.sum() == k and np.abs(v[chosen]).min() >= np.abs(v[~chosen]).max() - 1e-4
        np.testing.assert_allclose(sent[chosen], v[chosen], atol=1e-5)
        v[chosen] = 0
        if masks:
            u[chosen] = 0
        for got, want in ((state.velocity, u), (state.unsent, v)):
            np.testing.assert_allclose(got, want, atol=1e-5)
    assert set(state.arrays()) == {"velocity", "unsent"}


@pytest.mark.parametrize("nesterov", [False, True])
def test_full_density_is_momentum_sgd_and_masked_is_plain_sgd(nesterov, rng):
    m, rate = 0.8, 0.1
    open_, masked = (
        DeepGradientCompression(N, momentum=m, nesterov=nesterov, masks_velocity=False),
        DeepGradientCompression(N, momentum=m, nesterov=nesterov),
    )
    weights = np.zeros((2, N))
    dense, plain, velocity = np.zeros((3, N))
    for _ in range(STEPS):
        gradient = rng.standard_normal(N).astype(np.float32)
        weights[0] -= rate * run_step(open_, gradient, N)
        weights[1] -= rate * run_step(masked, gradient, N)
        g = gradient.astype(np.float64)
        velocity = m * velocity + g
        dense -= rate * (g + m * velocity if nesterov else velocity)
        plain -= rate * ((1 + m) * g if nesterov else g)
    np.testing.assert_allclose(weights, [dense, plain], atol=1e-5)
    assert np.abs(dense - plain).max() > 0.1


def test_no_gradient_is_lost_without_momentum(rng):
    state = DeepGradientCompression(N, momentum=0.0)
    gradients = rng.integers(-50, 50, (STEPS, N)).astype(np.float32)  # whole numbers: sums are exact
    sent = sum(run_step(state, gradient, 3) for gradient in gradients)
    assert np.array_equal(sent + state.unsent, gradients.sum(axis=0))


def test_density_falls_in_stages():
    sparsity = [100 * (1 - dgc.density_at(stage, 0.001)) for stage in range(7)]
    assert sparsity[:3] == [75, 93.75, 98.4375] and sparsity[3] == pytest.approx(99.6, abs=0.05)
    assert sparsity[4:] == [99.9] * 3
    assert [dgc.density_at(stage, 0.05) for stage in range(4)] == [0.25, 0.0625, 0.05, 0.05]
    for wrong in (0.0, 1.5):
        with pytest.raises((UsageError, ConfigurationError)):
            dgc.density_at(0, wrong)


def test_local_clipping_keeps_the_norm_of_the_sum(rng):
    ranks, limit = 16, 2.0
    clipped = [g * dgc.clip_factor(float(g @ g), limit, ranks) for g in rng.standard_normal((ranks, 5000))]
    for one in clipped:
        assert np.linalg.norm(one) == pytest.approx(limit / 4)
    assert np.linalg.norm(sum(clipped)) == pytest.approx(limit, rel=0.2)
    assert dgc.clip_factor(0.2, limit, ranks) == dgc.clip_factor(9e9, 0, ranks) == dgc.clip_factor(0.0, 1.0, 1) == 1
    for wrong in ((float("nan"), 1.0, 1), (float("inf"), 1.0, 1), (1.0, -1.0, 1), (1.0, 1.0, 0)):
        with pytest.raises(UsageError):
            dgc.clip_factor(*wrong)


def test_bad_input_is_rejected():
    with pytest.raises(UsageError, match="momentum must be at least 0 and below 1, got 1.0"):
        DeepGradientCompression(4, momentum=1.0)
    state = DeepGradientCompression(4, momentum=0.9)
    for wrong in (np.zeros(4), np.zeros(3, np.float32)):
        with pytest.raises(UsageError, match="pass a float32 gradient of shape"):
            state.accumulate(wrong)
    with pytest.raises(UsageError, match="1 <= k <= n"):
        state.encode(np.empty(0, np.uint8))


@pytest.mark.parametrize("nesterov", [False, True])
def test_gpu_gives_the_same_bits_without_waits(nesterov, gpu, rng):
    host, there = (DeepGradientCompression(N, momentum=0.9, nesterov=nesterov, on=on) for on in ("cpu", "gpu"))
    payload, sent = np.empty(80, np.uint8), backend.empty(80, np.dtype(np.uint8), "gpu")
    for _ in range(4):
        gradient = rng.standard_normal(N).astype(np.float32)
        moved = backend.place(gradient, "gpu")
        gpu.LOG.clear()
        there.accumulate(moved, 0.3)
        there.encode(sent)
        assert gpu.LOG.events == []
        host.accumulate(gradient, 0.3)
        host.encode(payload)
        assert sent.get().tobytes() == payload.tobytes()
    for name, array in host.arrays().items():
        assert there.arrays()[name].get().tobytes() == array.tobytes()
