"""Replicas that mix or average, compared with their matrix recursion in float64, and with allreduce."""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from harness import trainings
from harness.marks import cases
from harness.rank_run import seat
from harness.trainings import Trained, assemble_trainer, check_same, recipe_keys, with_pointers
from hpcdist import models
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import DECENTRALISED_EXCHANGES, build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.decentralised.config import DecentralisedConfig
from hpcdist.strategies.decentralised.gossip import GossipExchange
from hpcdist.strategies.decentralised.gossip import build as build_graph
from hpcdist.strategies.decentralised.replicas import LocalSgdExchange, Replicas
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.run.saving import CheckpointSaver

MODEL = ModelConfig(layers=1, hidden=8, heads=2)
SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0, "decay": "constant", "warmup_steps": 0}
SGD |= {"weight_decay": 0.0, "clip_norm": 0.0}
STEPS = 7


def seat_of(comm, optimizer, dtype="float64"):
    keys = {"total_steps": STEPS, "bucket_bytes": 2000}
    return seat(comm, models.build(MODEL, dtype, context=4), OptimizerConfig(**optimizer), **keys)


@dataclass
class Quadratic:
    """Rank i pulls its parameters x towards its target: its gradient is x minus the target.


    ``samples`` are the samples of each rank. An exchange gets the rank's share of the mean over all samples.
    """

    exchange: Replicas
    rank: int
    target: np.ndarray
    samples: list[int]
    trail: list[np.ndarray] = field(default_factory=list)

    @property
    def x(self):
        return self.exchange.parameters.array

    def step(self, save=False):
        self.exchange.count_samples(self.samples[self.rank], sum(self.samples))
        share = self.samples[self.rank] / sum(self.samples)
        self.exchange.gradients.array[...] = share * (self.x - self.target)
        handlers = dict(self.exchange.handlers)
        handlers[Kind.AGREE] = self._agree
        for op in self.exchange.plan():
            handlers[op.kind](op)
        if save:
            self.exchange.flush()
        self.trail.append(self.x.copy())

    def _agree(self, op):
        self.exchange.agree(np.array([self.exchange.norm_squared()]))
        self.exchange.begin_update(1.0)


def trails(size, strategy, keys, optimizer, start, targets, samples, saves=()):
    """Return the parameters of all ranks after each step (steps, ranks, n), distances, and the mask of non-padding."""

    def body(comm):
        context = seat_of(comm, optimizer)
        exchange = DECENTRALISED_EXCHANGES[strategy](context, DecentralisedConfig(**keys))
        mask = np.zeros(context.layout.size)
        for segment in context.layout.segments:
            mask[segment.range.slice] = 1
        run = Quadratic(exchange, comm.rank, mask * targets[comm.rank], samples)
        run.x[...] = mask * start[comm.rank]
        if isinstance(exchange, LocalSgdExchange):
            exchange.restore(exchange.state())  # the outer optimizer takes note of where it begins
        for step in range(1, STEPS + 1):
            run.step(save=step in saves)
        return np.array(run.trail), exchange.distances, mask

    results = run_threads(size, body)
    return np.array([trail for trail, _, _ in results]).swapaxes(0, 1), [d for _, d, _ in results], results[0][2]


def size_of_model():
    return models.build(MODEL, "float64", context=4).layout.size


def distance(x, weights=None):  # (ranks, n), (ranks, 1)
    mean = x.mean(axis=0) if weights is None else (weights * x).sum(axis=0)
    return float(np.sqrt(((x - mean) ** 2).sum() / len(x)) / np.linalg.norm(mean))


GRAPHS = {
    "ring": {"graph": "ring"},
    "torus": {"graph": "torus"},
    "exponential": {"graph": "exponential"},
    "one_peer": {"graph": "one_peer"},
    "complete": {"graph": "complete"},
}


@pytest.mark.parametrize("order", ["combine_first", "adapt_first"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.full_except("2-adapt_first")
def test_gossip_follows_the_recursion_of_its_matrices(size, order, rng):
    """The recursion includes momentum, decay, and uneven samples."""
    n, rate, momentum, decay = size_of_model(), 0.2, 0.5, 0.01
    start, targets = rng.standard_normal((2, size, n))
    samples = [1 + 2 * (rank % 3) for rank in range(size)]
    optimizer = SGD | {"learning_rate": rate, "momentum": momentum, "weight_decay": decay}
    adapted = np.zeros(n)
    for segment in models.build(MODEL, "float64", context=4).layout.segments:
        adapted[segment.range.slice] = segment.spec.adapted
    chain = {"graph": "edges", "edges": " ".join(f"{rank}-{rank + 1}" for rank in range(size - 1))}
    for keys in [*GRAPHS.values(), *([chain] if size > 1 else [])]:
        keys = keys | {"order": order, "report_every": 3}
        result, distances, mask = trails(size, "gossip", keys, optimizer, start, targets, samples)
        graph = build_graph(str(keys["graph"]), size, str(keys.get("edges", "")))
        x, goals, v = start * mask, targets * mask, np.zeros((size, n))
        weights = size * np.array(samples) / sum(samples)
        for step in range(STEPS):
            mix = graph.matrix(step % max(1, len(graph.rounds)))
            v = momentum * v + weights[:, None] * (x - goals) + decay * adapted * x
            x = mix @ x - rate * v if order == "combine_first" else mix @ (x - rate * v)
            np.testing.assert_allclose(result[step], x, rtol=0, atol=1e-12 * np.abs(x).max(), err_msg=graph.name)
            if (step + 1) % 3 == 0 and size > 1:
                assert distances[0][step + 1] == pytest.approx(distance(x), rel=1e-10)
        assert all(one == distances[0] for one in distances) and sorted(distances[0]) == [3, 6]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("moments", ["keep", "average", "reset"])
@pytest.mark.full_except("average-2")
def test_local_sgd_matches_local_steps_and_weighted_means(size, moments, rng):
    n, rate, momentum, period = size_of_model(), 0.2, 0.5, 3
    targets = rng.standard_normal((size, n))
    start = np.broadcast_to(rng.standard_normal(n), (size, n))
    samples = [1 + rank % 3 for rank in range(size)]
    optimizer = SGD | {"learning_rate": rate, "momentum": momentum}
    weights = np.array(samples)[:, None] / sum(samples)
    for outer_rate, outer_momentum, saves in ((1.0, 0.0, (5,)), (0.7, 0.9, ()), (0.5, 0.0, ()), (0.7, 0.9, (2, 4))):
        keys = {"period": period, "moments": moments}
        keys |= {"outer_learning_rate": outer_rate, "outer_momentum": outer_momentum}
        result, distances, mask = trails(size, "local_sgd", keys, optimizer, start, targets, samples, saves)
        x, goals, v = start * mask, targets * mask, np.zeros((size, n))
        begun, outer, since = x[0].copy(), np.zeros(n), 0
        expected = {}
        for step in range(1, STEPS + 1):
            v = momentum * v + x - goals
            x, since = x - rate * v, since + 1
            saving = step in saves
            if since == period or saving:
                if since:
                    expected[step] = distance(x, weights)
                    apart = begun - (weights * x).sum(axis=0)
                    outer = outer_momentum * outer + apart
                    begun = begun - outer_rate * (apart + outer_momentum * outer)
                    x, since = np.tile(begun, (size, 1)), 0
                if moments == "reset":
                    v = np.zeros_like(v)
                elif moments == "average" or saving:
                    v = np.tile((weights * v).sum(axis=0), (size, 1))
            np.testing.assert_allclose(result[step - 1], x, rtol=0, atol=1e-12 * np.abs(x).max())
        assert distances[0].keys() == expected.keys()
        if size > 1:
            assert [distances[0][step] for step in expected] == pytest.approx(list(expected.values()), rel=1e-9)


@pytest.mark.parametrize("graph", ["ring", "torus", "exponential"])
@pytest.mark.full
def test_consensus_distance_decays_with_the_spectral_gap(graph, rng):
    """Without gradients each step contracts the distance by at least 1 - gap. Without mixing it would be constant."""
    size, n = 6, size_of_model()
    start = rng.standard_normal((size, n)) + 3
    keys = {"graph": graph, "report_every": 1}
    optimizer = SGD | {"learning_rate": 1e-300}
    result, distances, mask = trails(size, "gossip", keys, optimizer, start, start, [1] * size)
    gap = build_graph(graph, size).gap
    before = distance(start * mask)
    for step in range(1, STEPS + 1):
        now = distances[0][step]
        assert now <= before * (1 - gap) * (1 + 1e-9)
        before = now
    # The slowest mode remains in the end: the rate follows the gap, not a faster mode.
    assert distances[0][STEPS] >= 0.9 * distances[0][STEPS - 1] * (1 - gap)
    np.testing.assert_allclose(result[-1].mean(axis=0), (start * mask).mean(axis=0), rtol=0, atol=1e-13)


def test_replicas_on_a_quadratic_reach_the_fixed_point(rng):
    """The limit is the fixed point of x = W x - rate (x - c), combine first.

    The mean of the replicas is the optimum.
    """
    size, n, rate = 5, size_of_model(), 0.3
    start, targets = np.zeros((size, n)), rng.standard_normal((size, n)) + 2
    steps = 80

    def body(comm):
        exchange = DECENTRALISED_EXCHANGES["gossip"](
            seat_of(comm, SGD | {"learning_rate": rate}), DecentralisedConfig()
        )
        mask = exchange.parameters.array * 0
        for segment in exchange.context.layout.segments:
            mask[segment.range.slice] = 1
        run = Quadratic(exchange, comm.rank, mask * targets[comm.rank], [1] * size)
        for _ in range(steps):
            run.step()
        exchange.measure()
        return run.x / np.where(mask, mask, 1), exchange.distances[steps]

    results = run_threads(size, body)
    x = np.array([values for values, _ in results])
    mix = build_graph("ring", size).matrix()
    goals = targets * (np.abs(x).sum(axis=0) > 0)
    fixed = np.linalg.solve((1 + rate) * np.eye(size) - mix, rate * goals)
    np.testing.assert_allclose(x, fixed, rtol=0, atol=1e-9)
    np.testing.assert_allclose(x.mean(axis=0), goals.mean(axis=0), rtol=0, atol=1e-9)
    assert results[0][1] == pytest.approx(distance(fixed), rel=1e-9)
    assert np.abs(start).sum() == 0


def test_gradients_are_clipped_by_the_local_norm(rng):
    size, n, limit = 3, size_of_model(), 0.5
    start, targets = rng.standard_normal((2, size, n))
    optimizer = SGD | {"clip_norm": limit, "learning_rate": 1.0}
    result, _, mask = trails(size, "local_sgd", {"period": 100}, optimizer, start, targets, [1, 2, 3])
    first = start * mask - result[0]
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), limit, rtol=1e-12)
    whole = (start - targets) * mask
    np.testing.assert_allclose(first, limit * whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-12)


# Trainings of a tiny model, by threads.
BASE = {
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.5,
    "optimizer.momentum": 0.0,
    "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": 0.0,  # with it, gradients are clipped one by one, before they are averaged
    "precision.mode": "float64",
    "communication.algorithm": "ring",
}
SAME = {
    "complete, adapt first": recipe_keys(
        "strategy=gossip decentralised.graph=complete decentralised.order=adapt_first"
    ),
    "local_sgd of period 1": recipe_keys("strategy=local_sgd decentralised.period=1"),
    "local_sgd with momentum": recipe_keys(
        "strategy=local_sgd decentralised.period=1 decentralised.moments=average optimizer.momentum=0.9 "
        "optimizer.weight_decay=0.01"
    ),
    "local_sgd accumulating": recipe_keys("strategy=local_sgd decentralised.period=1 microbatches=3"),
}


def train(comm, settings, steps=5, first=None):
    trainer = first or assemble_trainer(comm, settings)
    return trainer, trainings.losses(trainer, steps)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SAME)
@pytest.mark.full_except("local_sgd accumulating-2")
def test_averaging_in_every_step_equals_allreduce(name, size, words):
    settings = {**BASE, **words, **SAME[name]}
    plain = {key: value for key, value in settings.items() if not key.startswith(("parallel.", "decentralised."))}

    def body(settings):
        def run(comm):
            trainer, losses = train(comm, settings)
            return trainer.exchange.parameters.array, losses

        return run

    (expected, losses), *_ = run_threads(size, body(plain))
    for parameters, mine in run_threads(size, body(settings)):
        np.testing.assert_allclose(mine, losses, rtol=1e-12)
        assert np.linalg.norm(parameters - expected) <= 1e-12 * np.linalg.norm(expected)


@pytest.mark.parametrize("order", ["combine_first", "adapt_first"])
@pytest.mark.parametrize(("graph", "degree"), [("ring", 2), ("torus", 3), ("exponential", 3), ("one_peer", 1)])
def test_sent_bytes_match_the_number_of_neighbours(graph, degree, order, words):
    settings = {**BASE, **words, "parallel.strategy": "gossip", "decentralised.graph": graph, "model.hidden": 32}
    settings |= {"decentralised.order": order, "decentralised.report_every": 0}

    def body(comm):
        trainer, _ = train(comm, settings, 1)
        trainer = replace(trainer, first_step=1)
        with count_traffic(comm) as traffic:
            train(comm, settings, 2, trainer)
        assert not traffic.unknown
        return traffic.sent_bytes / (trainer.model.layout.parameters * 8)

    assert run_threads(6, body) == pytest.approx([degree] * 6, rel=0.01)


def test_sent_bytes_of_an_averaging_match_allreduce(words):
    settings = {**BASE, **words, "parallel.strategy": "local_sgd", "decentralised.period": 2, "model.hidden": 32}

    def body(comm):
        trainer, _ = train(comm, settings, 2)
        results = []
        for step in (2, 3):
            trainer = replace(trainer, first_step=step)
            with count_traffic(comm) as traffic:
                train(comm, settings, step + 1, trainer)
            results.append(traffic.sent_bytes / (trainer.model.layout.parameters * 8))
        return results

    for without, whole in run_threads(4, body):
        assert without < 0.01 and whole == pytest.approx(2 * 3 / 4, rel=0.01)


@cases(
    "keys",
    recipe_keys("strategy=gossip decentralised.graph=one_peer"),
    recipe_keys("strategy=gossip decentralised.order=adapt_first"),
    recipe_keys("strategy=local_sgd decentralised.period=3"),
    recipe_keys(
        "strategy=local_sgd decentralised.period=3 decentralised.outer_learning_rate=0.7 "
        "decentralised.outer_momentum=0.9"
    ),
    ids=["one_peer", "ring", "local_sgd", "outer"],
)
@pytest.mark.full_except("ring")
def test_resume_has_the_bits_of_a_run_that_saved(keys, tmp_path, words):
    settings = {**words, "optimizer.name": "adamw", "communication.algorithm": "ring", **keys}

    def body(comm):
        whole, first = train(comm, settings, 4)
        saved = CheckpointSaver(whole, tmp_path / "checkpoints").save(4)
        alike = comm.allgather_object(whole.exchange.parameters.array.tobytes())
        whole = replace(whole, first_step=4)
        _, rest = train(comm, settings, 9, whole)
        resumed = assemble_trainer(comm, settings, saved)
        _, again = train(comm, settings, 9, resumed)
        bits = [trainer.exchange.parameters.array.tobytes() for trainer in (whole, resumed)]
        alone = assemble_trainer(
            solo(), words | {"communication.algorithm": "ring"}, saved
        )  # another strategy and size
        same = alone.exchange.parameters.array.tobytes() == alike[0]
        return rest, again, bits[0] == bits[1], same and len(set(alike)) == 1 and len(first) == 4

    for rest, again, equal, one_model in run_threads(3, body):
        assert rest == again and equal and one_model


ON_GPUS = [
    {"parallel.strategy": "gossip", "decentralised.report_every": 2, "parallel.microbatches": 2},
    {"parallel.strategy": "local_sgd", "decentralised.period": 2, "decentralised.outer_momentum": 0.9},
]


@pytest.mark.parametrize("pointers", [False, True])
@pytest.mark.parametrize("keys", ON_GPUS, ids=["ring", "local_sgd"])
@pytest.mark.full
def test_decentralised_training_on_the_gpu_matches_the_cpu(gpu, words, keys, pointers):
    settings = {**words, **keys, "precision.mode": "float64", "run.steps": 2}

    def body(comm):
        if pointers:
            with_pointers(comm)
        return Trained(comm, {**settings, "run.device": "gpu"})

    host = run_threads(3, lambda comm: Trained(comm, settings))
    check_same(host, run_threads(3, body), 1e-12)


def test_saving_twice_changes_nothing(tmp_path, words):
    settings = {**words, "parallel.strategy": "gossip"}

    def body(comm):
        trainer, _ = train(comm, settings, 2)
        first = trainer.exchange.flush(), trainer.exchange.parameters.array.tobytes()
        again = trainer.exchange.flush(), trainer.exchange.parameters.array.tobytes()
        return first[0] and not again[0] and first[1] == again[1]

    assert run_threads(3, body) == [True] * 3


def test_equal_float32_replicas_do_not_change(rng):
    """Weights such as 1/3 are rounded. Neither mixing nor averaging may scale the model by the error."""

    def body(comm):
        same = True
        for strategy in ("gossip", "local_sgd"):
            config = DecentralisedConfig(**({"period": 1} if strategy == "local_sgd" else {}))
            exchange = DECENTRALISED_EXCHANGES[strategy](seat_of(comm, SGD, "float32"), config)
            values = exchange.parameters.array
            values[...] = start
            for _ in range(60):
                exchange.count_samples(1, comm.size)
                exchange.gradients.array[...] = 0
                for op in exchange.plan():
                    if op.kind is Kind.AGREE:
                        exchange.begin_update(1.0)
                    else:
                        exchange.handlers[op.kind](op)
            drift = np.linalg.norm(values.astype(np.float64) - start) / np.linalg.norm(start)
            same &= bool(drift == 0 if strategy == "gossip" else abs(values.sum(dtype=np.float64) / total - 1) < 1e-7)
        return same

    layout = models.build(MODEL, "float32", context=4).layout
    start = np.zeros(layout.size, np.float32)
    for segment in layout.segments:
        start[segment.range.slice] = rng.random(segment.range.size, np.float32) + 0.5
    total = start.sum(dtype=np.float64)
    assert run_threads(3, body) == [True] * 3


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("keys", [*GRAPHS.values(), {"order": "adapt_first"}, None], ids=str)
def test_every_list_is_proven(keys, microbatches):
    strategy = "local_sgd" if keys is None else "gossip"
    for size, optimizer in itertools.product((1, 2, 5), ("sgd", "lamb")):
        verify_lists(lists_of(size, strategy, keys or {}, optimizer, microbatches), size, microbatches)


def list_operations(comm, strategy, keys, optimizer, microbatches):
    context = seat_of(comm, {"name": optimizer})
    exchange = DECENTRALISED_EXCHANGES[strategy](context, DecentralisedConfig(**keys))
    executor = build_executor(context, exchange)
    return operations(context, exchange, executor.copies, ParallelConfig(strategy=strategy, microbatches=microbatches))


def lists_of(size, strategy, keys, optimizer="sgd", microbatches=1):
    return run_threads(size, lambda comm: list_operations(comm, strategy, keys, optimizer, microbatches))


def verify_lists(lists, size, microbatches=1):
    model = models.build(MODEL, "float64", context=4)
    units = dict(enumerate(model.layout.units.values()))
    verify(lists, grid=ProcessGrid(data=size), units=units, microbatches=microbatches, needs=model.needs)


def test_combine_first_overlaps_mixing_with_the_gradient():
    kinds = [op.kind for op in lists_of(3, "gossip", {})[0]]
    assert kinds[0] is Kind.MIX_START and kinds.index(Kind.MIX_WAIT) > max(
        index for index, kind in enumerate(kinds) if kind is Kind.BACKWARD
    )
    assert kinds.count(Kind.POLL) == kinds.count(Kind.FORWARD) + kinds.count(Kind.BACKWARD)
    later = lists_of(3, "gossip", {"order": "adapt_first"})[0]
    assert [op.kind for op in later][-3:] == [Kind.MIX_START, Kind.MIX_WAIT, Kind.MIX]


def test_lists_with_wrong_mixing_are_rejected():
    good = lists_of(2, "gossip", {})
    verify_lists(good, 2)

    def without(kind):
        return [[op for op in steps if op.kind is not kind] for steps in good]

    def swapped(one, other):
        results = [list(steps) for steps in good]
        for steps in results:
            kinds = [op.kind for op in steps]
            a, b = kinds.index(one), kinds.index(other)
            steps[a], steps[b] = steps[b], steps[a]
        return results

    for lists, why in (
        (without(Kind.MIX_WAIT), "changes parameters that MIX_START.* is still sending"),
        (without(Kind.MIX_START), "waits for an exchange that was not started"),
        (without(Kind.MIX), "are never used; put a MIX"),
        (without(Kind.KEEP), "is never exchanged"),
        (swapped(Kind.MIX, Kind.DIRECTION), "comes before DIRECTION"),
        ([good[0], without(Kind.MIX_START)[1]], "waits for an exchange that was not started"),
    ):
        with pytest.raises(ScheduleError, match=why):
            verify_lists(lists, 2)


def test_bad_graphs_are_rejected_on_every_rank(words):
    settings = {**words, "parallel.strategy": "gossip", "decentralised.graph": "edges", "decentralised.edges": "0-1"}

    def body(comm):
        with pytest.raises(ConfigurationError) as refused:
            assemble_trainer(comm, settings)
        return str(refused.value)

    for messages in run_threads(4, body):
        assert "{0, 1} and {2} and {3}" in messages


def test_description_of_a_run():
    def body(comm):
        gossip = GossipExchange(seat_of(comm, SGD), DecentralisedConfig(graph="torus"))
        local = LocalSgdExchange(seat_of(comm, {"name": "adamw"}), DecentralisedConfig(outer_momentum=0.9))
        return [gossip.traits.mixing, local.traits.mixing]

    for gossip, local in run_threads(4, body):
        assert gossip == "torus of 2 x 2 ranks, spectral gap 0.667, combine first"
        assert local == "averaging every 8 steps, moments: keep, outer Nesterov 0.9, outer rate 1"


def test_distance_of_zero_parameters_is_nan():
    def body(comm):
        exchange = DECENTRALISED_EXCHANGES["gossip"](seat_of(comm, SGD), DecentralisedConfig())
        exchange.measure()
        return exchange.distances[0]

    assert all(math.isnan(result) for result in run_threads(2, body))
