"""1-bit Adam compared with its formulas in float64: warm-up, frozen steps on several ranks, and frozen variances."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.compression import onebit_adam
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.onebit_adam import AdamMoments, OneBitAdam
from hpcdist.compression.sign import SignSgd
from hpcdist.errors import UsageError

MOMENTS = AdamMoments(beta1=0.9, beta2=0.95, epsilon=1e-6)
WARM, STEPS = 6, 8


def payload_bytes(state):
    """Return the payload size of each chunk in bytes."""
    return [state.compressor.payload_bytes(chunk.size) for chunk in state.chunks]


def frozen_step(states, gradients, number):
    """Run a frozen step of all ranks. Return their directions."""
    messages = []
    for rank, (state, gradient) in enumerate(zip(states, gradients, strict=True)):
        state.accumulate(gradient)
        messages.append([np.empty(size, np.uint8) for size in payload_bytes(state)])
        for owner, payload in enumerate(messages[-1]):
            state.encode_worker(owner, payload, RandomKey(0, number, rank, owner))
    gathered = []
    for rank, state in enumerate(states):
        for message in messages:
            state.add_worker(message[rank])
        gathered.append(np.empty(payload_bytes(state)[rank], np.uint8))
        state.encode_server(gathered[-1], RandomKey(0, number, rank, len(states)))
    outs = [np.full(gradients[0].size, np.nan, np.float32) for _ in states]
    for state, out in zip(states, outs, strict=True):
        for owner, payload in enumerate(gathered):
            state.receive(owner, payload)
        state.direction(out)
    return outs


def scaled_signs(values, scale):
    if not values.size:
        return values
    magnitude = np.abs(values).mean() if scale == "mean" else np.sqrt((values * values).mean())
    return np.where(values < 0, -magnitude, magnitude)


def warmed_up_states(n, ranks, rng, compressor=None):
    states = [OneBitAdam(n, rank, ranks, MOMENTS, compressor=compressor) for rank in range(ranks)]
    for _ in range(WARM):
        gradient = rng.standard_normal(n).astype(np.float32)
        gradient[::7] = 0
        for state in states:
            state.warm(gradient.copy())
    for state in states:
        state.freeze()
    return states


def test_warm_up_is_adam(rng):
    n = 500
    state = OneBitAdam(n, 0, 1, MOMENTS)
    m, v = np.zeros((2, n))
    for count in range(1, WARM + 1):
        gradient = rng.standard_normal(n).astype(np.float32)
        g = gradient.astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        expected = m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.95**count)) + 1e-6)
        state.warm(gradient)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    state.freeze()
    np.testing.assert_allclose(state.v, v / (1 - 0.95**WARM), rtol=1e-5)
    np.testing.assert_allclose(state.m, m, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", ["mean", "norm"])
@pytest.mark.parametrize(("n", "ranks"), [(200, 1), (200, 3), (20, 4)])
def test_frozen_steps_match_the_formulas(n, ranks, scale, rng):
    states = warmed_up_states(n, ranks, rng, SignSgd(scale=scale))
    one = states[0]
    moves = one.v > 0
    assert moves.sum() == n - len(range(0, n, 7))
    m, v = one.m.astype(np.float64), one.v.astype(np.float64)
    worker, server = np.zeros((ranks, n)), np.zeros(n)
    for number in range(STEPS):
        gradients = [rng.standard_normal(n).astype(np.float32) * moves for _ in range(ranks)]
        outs = frozen_step(states, gradients, number)
        worker += 0.9 * m + 0.1 * np.array(gradients, np.float64)
        uncertain = np.abs(worker[:, moves]).min()  # rounding may flip the sign of values near 0
        taken = np.zeros_like(worker)
        for chunk in one.chunks:
            for rank in range(ranks):
                taken[rank, chunk.slice] = scaled_signs(worker[rank, chunk.slice], scale)
        worker = (worker - taken) * moves
        server = (server + taken.mean(axis=0)) * moves
        if min(uncertain, np.abs(server[moves]).min()) < 1e-5:
            break
        for chunk in one.chunks:
            m[chunk.slice] = scaled_signs(server[chunk.slice], scale)
        server = (server - m) * moves
        m *= moves
        expected = m / (1 - 0.9 ** (WARM + number + 1)) / (np.sqrt(v) + 1e-6)
        np.testing.assert_allclose(outs[0], expected, rtol=1e-3)
        assert all(out.tobytes() == outs[0].tobytes() for out in outs)
        assert not outs[0][~moves].any()
        server_errors = np.concatenate([state.server_error for state in states])
        np.testing.assert_allclose(server_errors * moves, server, atol=1e-5)
        for state, error in zip(states, worker, strict=True):
            np.testing.assert_allclose(state.worker_error * moves, error, atol=1e-5)


def test_two_sided_error_feedback_loses_nothing(rng):
    n, ranks = 300, 3
    states = [OneBitAdam(n, rank, ranks, AdamMoments(beta1=0.0)) for rank in range(ranks)]
    for state in states:
        state.warm(np.ones(n, np.float32))
        state.freeze()
    gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(ranks)]
    steps = 300
    taken = np.zeros(n)
    for number in range(steps):
        frozen_step(states, gradients, number)
        taken += states[0].m
    kept = np.mean([state.worker_error for state in states], axis=0)
    kept += np.concatenate([state.server_error for state in states])
    mean = np.mean(gradients, axis=0, dtype=np.float64)
    np.testing.assert_allclose(taken + kept, steps * mean, atol=1e-2)
    assert np.linalg.norm(taken / steps - mean) < 0.15 * np.linalg.norm(mean)


def test_chunk_sizes_and_payload_bytes():
    for n, ranks in ((1 << 20, 8), (1000, 3), (5, 4), (0, 2)):
        states = [OneBitAdam(n, rank, ranks, MOMENTS) for rank in range(ranks)]
        sizes = [chunk.size for chunk in states[0].chunks]
        assert sum(sizes) == n and all(chunk.start % 16 == 0 for chunk in states[0].chunks if chunk)
        bytes_of = [4 + -(-size // 8) if size else 0 for size in sizes]
        for state in states:
            assert payload_bytes(state) == bytes_of
            assert set(state.arrays()) == {"m", "v", "worker_error", "server_error"}
    local_data, *others = payload_bytes(OneBitAdam(1 << 20, 0, 8, MOMENTS))
    sent = sum(others) + 7 * local_data  # 7 chunks to their owners, and this rank's chunk to 7 ranks
    assert sent == 14 * (4 + (1 << 17) // 8) and 2 * 7 / 8 * (4 << 20) / sent > 31.9
    assert [place.start for place in onebit_adam.places([3, 0, 65, 1])] == [0, 4, 4, 72]


def test_bad_input_is_rejected():
    state = OneBitAdam(8, 0, 1, MOMENTS)
    gradient = np.ones(8, np.float32)
    with pytest.raises(UsageError, match="not frozen; call warm"):
        state.accumulate(gradient)
    with pytest.raises(UsageError, match="without a variance"):
        state.freeze()
    for wrong in (np.ones(8), np.ones(7, np.float32)):
        with pytest.raises(UsageError, match="pass a float32 array"):
            state.warm(wrong)
    state.warm(gradient)
    state.freeze()
    with pytest.raises(UsageError, match="frozen; call accumulate"):
        state.warm(gradient)
    with pytest.raises(UsageError, match="a second time"):
        state.freeze()
    for wrong in ({"beta1": 1.0}, {"beta2": -0.1}, {"epsilon": 0.0}):
        with pytest.raises(UsageError):
            AdamMoments(**wrong)


def test_gpu_gives_the_same_bits_without_waits(gpu, rng):
    n = 700
    host, there = (OneBitAdam(n, 0, 1, MOMENTS, on=on) for on in ("cpu", "gpu"))
    gradients = [rng.standard_normal(n).astype(np.float32) for _ in range(4)]
    for gradient in gradients:
        gradient[:30] = 0
    moved = [backend.place(gradient, "gpu") for gradient in gradients]
    host.warm(gradients[0])
    host.freeze()
    gpu.LOG.clear()
    there.warm(moved[0])
    there.freeze()
    (size,) = payload_bytes(host)
    payload, out = (backend.empty(*given, "gpu") for given in ((size, np.dtype("uint8")), (n, np.dtype("float32"))))
    for number in (1, 2, 3):
        there.accumulate(moved[number])
        there.encode_worker(0, payload, RandomKey(0, number, 0, 0))
        there.add_worker(payload)
        there.encode_server(payload, RandomKey(0, number, 0, 1))
        there.receive(0, payload)
        there.direction(out)
        (expected,) = frozen_step([host], [gradients[number]], number)
        assert gpu.LOG.events == []
    assert out.get().tobytes() == expected.tobytes() and moved[0].get().tobytes() == gradients[0].tobytes()
