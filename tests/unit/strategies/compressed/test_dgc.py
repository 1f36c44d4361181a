"""DGC as an exchange compared with the paper's algorithm in float64, with momentum SGD, and with its message sizes."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from harness.compressed.optimizers import layout, pad_values, seat_of, step, steps
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.data import catalogue

STEPS = 12
LAYOUT = layout()
WHOLE = 1 << 20  # bytes of a bucket: none cuts a tensor


def sgd(**keys):
    return {"name": "sgd", "learning_rate": 0.25, "momentum": 0.5, "weight_decay": 0.0, "clip_norm": 0.0} | keys


@dataclass
class Paper:
    """Algorithm 4 of the paper for all ranks in float64: momentum correction, masking, warm-up, local clipping."""

    ranks: int
    rate: float = 0.25
    momentum: float = 0.5
    nesterov: bool = False
    clip: float = 0.0
    decay: float = 0.0
    masks: bool = True
    w: np.ndarray = field(default_factory=lambda: np.zeros(LAYOUT.size))

    def __post_init__(self):
        self.u, self.v = np.zeros((2, self.ranks, LAYOUT.size))

    def step(self, gradients, density):
        total = np.zeros(LAYOUT.size)
        for rank, gradient in enumerate(gradients.astype(np.float64)):
            norm = np.linalg.norm(gradient)
            limit = self.clip / self.ranks**0.5
            g = gradient * min(1.0, limit / norm) if self.clip else gradient
            u, v = self.u[rank], self.v[rank]
            if self.nesterov:
                u[:] = self.momentum * (u + g)
                v += u + g
            else:
                u[:] = self.momentum * u + g
                v += u
            for segment in LAYOUT.segments:
                where = segment.range.slice
                k = max(1, int(np.ceil(density * segment.range.size)))
                chosen = np.argsort(-np.abs(v[where]), kind="stable")[:k] + where.start
                total[chosen] += v[chosen]
                v[chosen] = 0
                if self.masks:
                    u[chosen] = 0
        for segment in LAYOUT.segments if self.decay else ():
            if segment.spec.adapted:
                total[segment.range.slice] += self.decay * self.w[segment.range.slice]
        self.w = self.w - self.rate * total


@pytest.mark.parametrize(("ranks", "nesterov"), [(3, True), (4, False)])
def test_dgc_has_the_bits_of_the_paper_algorithm(ranks, nesterov, rng):
    """Values are whole numbers and constants are powers of two: sums are exact, so no selection depends on rounding."""
    given = np.array([[pad_values(lambda n: rng.integers(-9, 10, n)) for _ in range(ranks)] for _ in range(STEPS)])
    config = CompressionConfig(density=0.1, warmup_steps=6)

    def body(comm):
        exchange = catalogue.dgc(seat_of(comm, sgd(nesterov=nesterov), WHOLE), config)
        results = steps(exchange, given[:, comm.rank])
        return results, *(
            residuals.feedback.residuals.array for residuals in (exchange.reducer.velocity, exchange.reducer.unsent)
        )

    results = run_threads(ranks, body)
    paper = Paper(ranks, nesterov=nesterov)
    for number in range(STEPS):
        # four stages in six steps: 2, 1, 2 and 1 of them; 1/16 and less are below the density asked for
        paper.step(given[number], 0.25 if number < 2 else 0.1)
        for weights, _, _ in results:
            assert np.array_equal(weights[number], paper.w)
    for rank, (_, velocity, unsent) in enumerate(results):
        assert np.array_equal(velocity, paper.u[rank]) and np.array_equal(unsent, paper.v[rank])
    assert np.count_nonzero(paper.w) > LAYOUT.parameters / 2


@pytest.mark.parametrize(("ranks", "masks"), [(1, True), (2, False), (4, True)])
def test_dgc_with_clipping_and_decay_matches_the_formula(ranks, masks, rng):
    given = np.array([[pad_values(rng.standard_normal) for _ in range(ranks)] for _ in range(STEPS)])
    given *= rng.choice([0.002, 0.1], (STEPS, ranks, 1)).astype(np.float32)  # some are clipped
    keys = sgd(momentum=0.9, clip_norm=1.0, weight_decay=0.05)

    def body(comm):
        exchange = catalogue.dgc(seat_of(comm, keys), CompressionConfig(density=1.0), masks_velocity=masks)
        exchange.parameters.array[...] = start
        return steps(exchange, given[:, comm.rank]), [step(exchange, given[0, comm.rank])]

    start = pad_values(rng.standard_normal)
    results = run_threads(ranks, body)
    # on one rank nothing is masked, since nothing is sent
    paper = Paper(ranks, momentum=0.9, clip=1.0, decay=0.05, masks=masks and ranks > 1, w=start.astype(np.float64))
    for number in range(STEPS):
        paper.step(given[number], 1.0)
        for weights, _ in results:
            np.testing.assert_allclose(weights[number], paper.w, atol=2e-5)
            assert weights[number].tobytes() == results[0][0][number].tobytes()
    expected = np.linalg.norm(given[0].astype(np.float64))
    assert [output for _, (output,) in results] == pytest.approx([expected] * ranks)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_dgc_at_full_density_is_momentum_sgd(ranks, nesterov, rng):
    given = np.array([[pad_values(rng.standard_normal) for _ in range(ranks)] for _ in range(STEPS)])

    def body(comm):
        context = seat_of(comm, sgd(momentum=0.9, nesterov=nesterov))
        exchange = catalogue.dgc(context, CompressionConfig(density=1.0), masks_velocity=False)
        return steps(exchange, given[:, comm.rank])[-1]

    w, velocity = np.zeros((2, LAYOUT.size))
    for g in given.sum(axis=1, dtype=np.float64):
        velocity = 0.9 * velocity + g
        w -= 0.25 * (g + 0.9 * velocity if nesterov else velocity)
    for weights in run_threads(ranks, body):
        np.testing.assert_allclose(weights, w, atol=1e-4)


def test_dgc_on_one_rank_is_momentum_sgd_at_any_density(rng):
    given = [pad_values(lambda n: rng.integers(-9, 10, n)) for _ in range(STEPS)]

    def body(comm):
        return steps(catalogue.dgc(seat_of(comm, sgd()), CompressionConfig(density=0.01)), given)[-1]

    w, velocity = np.zeros((2, LAYOUT.size))
    for g in given:
        velocity = 0.5 * velocity + g
        w -= 0.25 * velocity
    assert np.array_equal(run_threads(1, body)[0], w)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sent_bytes_of_dgc_match_the_formula(ranks, rng):
    gradient = pad_values(rng.standard_normal)

    def body(comm):
        config = CompressionConfig(density=0.001, warmup_steps=8)
        exchange, result = catalogue.dgc(seat_of(comm, sgd(), WHOLE), config), []
        for _ in range(10):
            with count_traffic(comm) as traffic:
                step(exchange, gradient)
                exchange.agree(np.zeros(1))
            with count_traffic(comm) as agreed:
                exchange.agree(np.zeros(1))
            result.append(traffic.sent_bytes - 2 * agreed.sent_bytes)
            assert not traffic.unknown
        return result

    sizes = [segment.range.size for segment in LAYOUT.segments]
    expected = []
    for density in (1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64, 1 / 256, 1 / 256, 0.001, 0.001):
        payloads = [8 * max(1, int(np.ceil(density * size))) for size in sizes]
        aligned = sum(-(-size // 4) * 4 for size in payloads[:-1]) + payloads[-1]  # placed by words
        expected.append((ranks - 1) * aligned)
    for sent in run_threads(ranks, body):
        assert sent == expected
