"""PowerSGD: exact for matrices of low rank, the best approximation after some steps, and linear in both rounds."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.compression import powersgd
from hpcdist.compression.powersgd import PowerSgd
from hpcdist.errors import UsageError

ROWS, COLUMNS = 40, 60


def matrix_of_rank(rng, rank, rows=ROWS, columns=COLUMNS):
    return (rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))).astype(np.float32)


def matrix_with_spectrum(rng, values):
    left, _ = np.linalg.qr(rng.standard_normal((ROWS, values.size)))
    right, _ = np.linalg.qr(rng.standard_normal((COLUMNS, values.size)))
    return ((left * values) @ right.T).astype(np.float32)


def make_state(rank, seed=7, rows=ROWS, columns=COLUMNS):
    return PowerSgd((rows, columns), rank, seed=seed, tensor=3)


def exchange(states, matrices):
    """Run a step of all ranks with both rounds averaged. Return the first rank's mean matrix."""
    one = states[0]
    p = np.full((len(states), one.rows * one.rank), np.nan, np.float32)
    q = np.full((len(states), one.columns * one.rank), np.nan, np.float32)
    for state, matrix, mine in zip(states, matrices, p, strict=True):
        state.project(matrix.reshape(-1), mine)
    p[...] = p.mean(axis=0)
    for state, matrix, mine_p, mine_q in zip(states, matrices, p, q, strict=True):
        state.orthogonalise(mine_p)
        state.project_back(matrix.reshape(-1), mine_p, mine_q)
    assert all(mine.tobytes() == p[0].tobytes() for mine in p)
    q[...] = q.mean(axis=0)
    outs = [np.full(matrix.size, np.nan, np.float32) for matrix in matrices]
    for state, mine_p, mine_q, out in zip(states, p, q, outs, strict=True):
        state.reconstruct(mine_p, mine_q, out)
    return outs[0].reshape(matrices[0].shape)


def relative_distance(one, other):
    wide = other.astype(np.float64)
    return float(np.linalg.norm(one - wide) / np.linalg.norm(wide))


@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_low_rank_matrix_is_recovered_in_one_step(rank, rng):
    for true_rank in {1, (rank + 1) // 2, rank}:
        matrix, state = matrix_of_rank(rng, true_rank), make_state(rank)
        start, _ = np.linalg.qr(state.query.astype(np.float64))
        least = np.linalg.svd(matrix @ start, compute_uv=False)[true_rank - 1]
        # The rounding error of M Q grows with M, and is divided by the smallest singular value of M on the start.
        assert relative_distance(exchange([state], [matrix]), matrix) < 2e-6 * np.linalg.norm(matrix, 2) / least


def test_steps_converge_to_the_best_approximation(rng):
    rank = 4
    spectrum = 0.8 ** np.arange(ROWS)
    matrix = matrix_with_spectrum(rng, spectrum)
    best = float(np.linalg.norm(spectrum[rank:]) / np.linalg.norm(spectrum))
    state = make_state(rank)
    errors = [relative_distance(exchange([state], [matrix]), matrix) for _ in range(60)]
    directions, _ = np.linalg.qr(rng.standard_normal((ROWS, rank)))
    assert best < errors[0] < relative_distance(directions @ (directions.T @ matrix), matrix)
    assert errors[-1] < errors[1] < errors[0]
    assert best * (1 - 1e-5) <= errors[-1] <= best * (1 + 1e-4)


def test_both_rounds_are_linear(rng):
    matrices = [matrix_of_rank(rng, 30) for _ in range(5)]
    mean = np.mean(matrices, axis=0, dtype=np.float64).astype(np.float32)
    many, one = [make_state(3) for _ in matrices], make_state(3)
    for _ in range(3):
        assert relative_distance(exchange(many, matrices), exchange([one], [mean])) < 1e-4
    for state in many:
        assert state.query.tobytes() == many[0].query.tobytes()


def test_error_feedback_loses_no_part_of_the_mean(rng):
    ranks, steps = 3, 200
    gradients = [matrix_of_rank(rng, 20) for _ in range(ranks)]
    mean = np.mean(gradients, axis=0, dtype=np.float64)
    states, residuals = [make_state(2) for _ in range(ranks)], [np.zeros_like(gradients[0]) for _ in range(ranks)]
    taken = np.zeros_like(mean)
    for _ in range(steps):
        sums = [gradient + residual for gradient, residual in zip(gradients, residuals, strict=True)]
        out = exchange(states, sums)
        residuals = [total - out for total in sums]
        taken += out
    assert relative_distance(taken + np.mean(residuals, axis=0, dtype=np.float64), steps * mean) < 1e-4
    assert relative_distance(taken, steps * mean) < 0.2  # without feedback, 10 of 20 directions would be lost


def test_lost_rank_is_recovered(rng):
    state = make_state(4)
    for before in (np.zeros((ROWS, COLUMNS), np.float32), np.ones((ROWS, COLUMNS), np.float32), matrix_of_rank(rng, 1)):
        assert np.abs(exchange([state], [before]) - before).max() < 1e-4
        exchange([state], [before])
        matrix = matrix_of_rank(rng, 4)
        exchange([state], [matrix])
        assert relative_distance(exchange([state], [matrix]), matrix) < 1e-5


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_extreme_scales_do_not_overflow(scale, rng):
    state, matrix = make_state(2), matrix_of_rank(rng, 2) * np.float32(scale)
    for _ in range(3):
        assert relative_distance(exchange([state], [matrix]), matrix) < 1e-5


def test_columns_become_orthonormal_or_zero(rng):
    columns = rng.standard_normal((200, 5)).astype(np.float32)
    columns[:, 2] = -4 * columns[:, 0]  # linearly dependent, without rounding
    columns[:, 4] = columns[:, 1] + 1e-4 * columns[:, 4]  # nearly dependent
    span = columns.astype(np.float64)
    powersgd.orthogonalise(columns)
    assert not columns[:, 2].any()
    kept = columns[:, [0, 1, 3, 4]].astype(np.float64)
    np.testing.assert_allclose(kept.T @ kept, np.eye(4), atol=1e-6)
    np.testing.assert_allclose(kept @ (kept.T @ span), span, atol=1e-5)


def test_matrix_shape_minimises_traffic():
    cut = {(3, 96, 96): (288, 96), (64, 16, 3, 3): (64, 144), (96, 8, 96): (96, 768), (7,): (7, 1), (): (1, 1)}
    assert {shape: powersgd.matrix_shape(shape) for shape in cut} == cut
    assert powersgd.rank_of((3, 96, 96), 4) == 4


def test_wire_bytes_match_the_formula():
    shapes = [(64, 48), (512, 3, 3, 3), (2000,), (10, 8), (), (1, 500), (500, 1)]
    rank = 4
    sent = [4 * (64 + 48), 4 * (512 + 27), 2000, 80, 1, 500, 500]  # 10 x 8: its factors of rank 4 have 72 elements
    assert powersgd.wire_bytes(shapes, rank, least_saving=2) == 4 * sum(sent)
    sent[3] = 4 * (10 + 8)
    assert powersgd.wire_bytes(shapes, rank) == 4 * sum(sent)
    assert powersgd.rank_of((10, 8), 100) == 0 and powersgd.rank_of((10_000, 3), 2) == 2
    # With the rank limited to the smaller dim, the factors are never smaller than the matrix.
    assert [powersgd.rank_of((100, 3), rank, least_saving=0.5) for rank in (1, 3, 5)] == [1, 3, 3]
    assert powersgd.round_elements((64, 48), 4) == (256, 192)


def test_query_depends_on_seed_and_tensor():
    assert make_state(3).query.tobytes() == make_state(3).query.tobytes() != make_state(3, seed=8).query.tobytes()
    assert (
        PowerSgd((9, 5), 2, seed=7, tensor=4).query.tobytes() != PowerSgd((9, 5), 2, seed=7, tensor=3).query.tobytes()
    )
    assert set(make_state(2).arrays()) == {"query"}


def test_bad_input_is_rejected():
    with pytest.raises(UsageError, match="the rank of PowerSGD must be at least 1, got 0"):
        powersgd.rank_of((4, 4), 0)
    for rank in (0, 6):
        with pytest.raises(UsageError, match="pass the result of rank_of"):
            make_state(rank, rows=5)
    state, p = make_state(2), np.empty(2 * ROWS, np.float32)
    for wrong in (np.zeros(ROWS * COLUMNS - 1, np.float32), np.zeros(ROWS * COLUMNS)):
        with pytest.raises(UsageError, match="matrix, not only a shard"):
            state.project(wrong, p)


def test_gpu_gives_close_values_without_waits(gpu, rng):
    host, there = make_state(3), PowerSgd((ROWS, COLUMNS), 3, seed=7, tensor=3, on="gpu")
    for matrix in (matrix_of_rank(rng, 20), np.ones((ROWS, COLUMNS), np.float32), matrix_of_rank(rng, 20)):
        moved = backend.place(matrix.reshape(-1), "gpu")
        p, q, out = (backend.empty(size, matrix.dtype, "gpu") for size in (3 * ROWS, 3 * COLUMNS, matrix.size))
        gpu.LOG.clear()
        there.project(moved, p)
        there.orthogonalise(p)
        there.project_back(moved, p, q)
        there.reconstruct(p, q, out)
        assert gpu.LOG.events == []
        assert relative_distance(out.get().reshape(matrix.shape), exchange([host], [matrix])) < 1e-4
