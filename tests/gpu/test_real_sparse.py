"""Top-k, random-k, DGC, 1-bit Adam and PowerSGD on a real GPU: bit-identical to the CPU, except for matrix products."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.compression import coo
from hpcdist.compression.compressor import RandomKey
from hpcdist.compression.dgc import DeepGradientCompression
from hpcdist.compression.onebit_adam import AdamMoments, OneBitAdam
from hpcdist.compression.powersgd import PowerSgd
from hpcdist.compression.randomk import RandomK
from hpcdist.compression.topk import TopK

BYTES, REAL = np.dtype(np.uint8), np.dtype(np.float32)
N = 100_003


@pytest.mark.parametrize("compressor", [TopK(density=0.01), RandomK(density=0.01), TopK(density=1.0)], ids=str)
@pytest.mark.parametrize("levels", [0, 2])
def test_compressor_payloads_on_the_gpu_match_the_cpu(cupy, compressor, levels, rng):
    values = rng.standard_normal(N).astype(np.float32)
    if levels:
        values = np.round(values * levels)  # ties
    results = {}
    for on in ("cpu", "gpu"):
        payload, out = backend.empty(compressor.payload_bytes(N), BYTES, on), backend.empty(N, REAL, on)
        compressor.encode(backend.place(values, on), payload, RandomKey(1 << 40, 2, 0, 3))
        compressor.decode(payload, out)
        compressor.add(payload, out, 0.5)
        results[on] = backend.to_host(payload).tobytes(), backend.to_host(out).tobytes()
    assert results["gpu"] == results["cpu"]


def test_sums_of_sparse_payloads_on_the_gpu_match_the_cpu(cupy, rng):
    compressor = TopK(density=0.05)
    payloads = np.empty((4, compressor.payload_bytes(N)), np.uint8)
    for payload in payloads:
        compressor.encode(rng.standard_normal(N).astype(np.float32), payload, RandomKey(0, 0, 0, 0))
    results = {}
    for on in ("cpu", "gpu"):
        out = backend.zeros(N, REAL, on)
        for payload in payloads:
            coo.add(backend.place(payload, on), out)
        results[on] = backend.to_host(out).tobytes()
    assert results["gpu"] == results["cpu"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_on_the_gpu_is_bit_identical_to_the_cpu(cupy, nesterov, rng):
    states = {on: DeepGradientCompression(N, momentum=0.9, nesterov=nesterov, on=on) for on in ("cpu", "gpu")}
    payloads = {on: backend.empty(8 * 300, BYTES, on) for on in states}
    for _ in range(4):
        gradient = rng.standard_normal(N).astype(np.float32)
        for on, state in states.items():
            state.accumulate(backend.place(gradient, on), 0.25)
            state.encode(payloads[on])
        assert backend.to_host(payloads["gpu"]).tobytes() == payloads["cpu"].tobytes()
    for name, array in states["cpu"].arrays().items():
        assert backend.to_host(states["gpu"].arrays()[name]).tobytes() == array.tobytes()


def test_one_bit_adam_on_the_gpu_matches_the_cpu(cupy, rng):
    states = {on: OneBitAdam(N, 0, 1, AdamMoments(), on=on) for on in ("cpu", "gpu")}
    gradients = [rng.standard_normal(N).astype(np.float32) for _ in range(3)]
    outs = {}
    for on, state in states.items():
        state.warm(backend.place(gradients[0].copy(), on))
        state.freeze()
        size = state.compressor.payload_bytes(N)
        payload, outs[on] = backend.empty(size, BYTES, on), backend.empty(N, REAL, on)
        for number, gradient in enumerate(gradients[1:]):
            state.accumulate(backend.place(gradient, on))
            state.encode_worker(0, payload, RandomKey(0, number, 0, 0))
            state.add_worker(payload)
            state.encode_server(payload, RandomKey(0, number, 0, 1))
            state.receive(0, payload)
        state.direction(outs[on])
    got, want = backend.to_host(outs["gpu"]), outs["cpu"]
    assert np.isclose(got, want, rtol=1e-4).mean() > 0.999  # a sign near 0 may turn


def test_powersgd_on_the_gpu_matches_the_cpu(cupy, rng):
    rows, columns, rank = 300, 200, 4
    states = {on: PowerSgd((rows, columns), rank, seed=1, tensor=2, on=on) for on in ("cpu", "gpu")}
    for _ in range(3):
        matrix = (rng.standard_normal((rows, 3)) @ rng.standard_normal((3, columns))).astype(np.float32).reshape(-1)
        for on, state in states.items():
            p, q, out = (backend.empty(size, REAL, on) for size in (rows * rank, columns * rank, rows * columns))
            placed = backend.place(matrix, on)
            state.project(placed, p)
            state.orthogonalise(p)
            state.project_back(placed, p, q)
            state.reconstruct(p, q, out)
            assert np.linalg.norm(backend.to_host(out) - matrix) < 1e-4 * np.linalg.norm(matrix)
