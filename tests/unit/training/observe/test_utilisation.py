"""The operations of a model in the summary, and the peak that they are compared with."""

import json
import math

import numpy as np
import pytest

from harness.trainings import assemble_trainer
from hpcdist.arrays import matmul_peak
from hpcdist.arrays.backend import to_host
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.counts import counts
from hpcdist.training.observe import figures
from hpcdist.training.observe.figures import NO_MEMORY_FOR_PEAK, describe_utilisation, utilisation_figures

PEAK = 5e9
SPEED = 1000.0  # tokens/s


def utilisation_of(settings, ranks, speed=SPEED):
    """Return the figures, which are the same on all ranks, and the closed forms."""

    def body(comm):
        trainer = assemble_trainer(comm, settings)
        inputs = trainer.source.inputs
        return utilisation_figures(comm, trainer, speed, "no step"), counts(trainer.recipe.model, **inputs), inputs

    results = run_threads(ranks, body)
    assert all(one[0] == results[0][0] for one in results)
    json.dumps(results[0][0], allow_nan=False)
    return results[0][0], results[0][1:]


def test_utilisation_is_a_share_of_the_peak_of_all_ranks(words, monkeypatch):
    monkeypatch.setattr(figures, "matmul_flops_per_s", lambda dtype, on, seconds: PEAK)
    result, (numbers, inputs) = utilisation_of(words, 3)
    assert result["flops_per_sample"] == numbers.flops
    assert result["flops_per_s"] == pytest.approx(SPEED / inputs["context"] * numbers.flops)
    assert result["peak_flops_per_s"] == 3 * PEAK
    assert result["mfu"] == pytest.approx(result["flops_per_s"] / (3 * PEAK))
    (line,) = describe_utilisation(result)
    assert f"{result['mfu']:.1%}" in line


def test_servers_do_not_count_for_the_peak(words, monkeypatch):
    monkeypatch.setattr(figures, "matmul_flops_per_s", lambda dtype, on, seconds: PEAK)
    served = words | {"parallel.strategy": "parameter_server", "parameter_server.servers": 1}
    assert utilisation_of(served, 3)[0]["peak_flops_per_s"] == 2 * PEAK


def test_unknown_utilisation_is_reported_with_the_reason(words, monkeypatch):
    slow = utilisation_of(words, 1, speed=math.nan)[0]
    assert (slow["flops_per_s"], slow["mfu"], slow["mfu_reason"]) == (None, None, "no step")
    assert slow["flops_per_sample"] > 0 and describe_utilisation(slow) == []

    def raise_memory_error(*_):
        raise MemoryError

    monkeypatch.setattr(figures, "matmul_flops_per_s", raise_memory_error)
    result = utilisation_of(words, 2)[0]
    assert (result["mfu"], result["mfu_reason"]) == (None, NO_MEMORY_FOR_PEAK) and result["flops_per_s"] > 0
    assert NO_MEMORY_FOR_PEAK in describe_utilisation(result)[0]


def test_peak_is_the_speed_of_the_fastest_product(monkeypatch):
    seconds = iter([9.0, 0.5, 0.25, 1.0])  # the first touches memory, and does not count
    monkeypatch.setattr(matmul_peak.MatrixProduct, "run", lambda self: next(seconds))
    assert matmul_peak.matmul_flops_per_s(np.dtype(np.float32), seconds=0.0, side=16) == 2 * 16**3 / 0.25


def test_product_counts_the_operations_of_its_matrices():
    product = matmul_peak.MatrixProduct(np.dtype(np.float64), side=20)
    assert product.run() > 0 and product.flops == 2 * 20**3
    np.testing.assert_allclose(product._into, product._a @ product._b, rtol=1e-12)


@pytest.mark.parametrize("side", [1, 64, 150])
def test_product_matrices_are_filled_from_few_random_rows(side, gpu, monkeypatch):
    """They are copied to the GPU and repeated there until the matrix is full."""
    placed, place = [], matmul_peak.backend.place

    def place_and_watch(array, on):
        placed.append(array.shape)
        return place(array, on)

    monkeypatch.setattr(matmul_peak.backend, "place", place_and_watch)
    product = matmul_peak.MatrixProduct(np.dtype(np.float32), "gpu", side)
    rows = min(side, matmul_peak.ROWS)
    assert placed == [(rows, side)] * 2
    a, b = (to_host(one) for one in (product._a, product._b))
    for matrix in (a, b):
        assert len(np.unique(matrix, axis=0)) == rows
        np.testing.assert_array_equal(matrix, np.resize(matrix[:rows], (side, side)))
    assert product.run() > 0
    np.testing.assert_allclose(to_host(product._into), a @ b, rtol=1e-4, atol=1e-4)


def test_blas_description_has_kernels_and_settings():
    output = matmul_peak.blas({"OPENBLAS_CORETYPE": "Haswell", "PATH": "/bin", "OMP_NUM_THREADS": "1"})
    assert output.endswith("OMP_NUM_THREADS=1, OPENBLAS_CORETYPE=Haswell") and "PATH" not in output
    if matmul_peak._bundled():
        assert output.startswith("kernels ") and len(output.split(",")[0]) > len("kernels ")


def test_blas_without_information_is_not_known(monkeypatch):
    monkeypatch.setattr(matmul_peak, "_bundled", list)
    assert matmul_peak.blas({"PATH": "/bin"}) == "not known"
