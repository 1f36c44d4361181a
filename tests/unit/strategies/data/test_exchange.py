"""ZeRO with any degrees matches one process: parameters, gradients and optimizer state sharded over separate groups."""

from dataclasses import asdict
from functools import cache

import numpy as np
import pytest

from harness.marks import cases, on_threads
from harness.rank_run import RankRun, optimizer_of
from harness.trainings import TOLERANCE, difference
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies import build
from hpcdist.strategies.core.grid import ProcessGrid, ShardingDegrees
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.training.recipe import recipe

SAMPLES, STEPS = 11, 20
MODEL = ModelConfig(layers=1, hidden=16, heads=2, vocabulary=64)


def degrees(size):
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return [
        ZeroConfig(parameters=p, gradients=g, optimizer=o)
        for o in divisors
        for g in divisors
        for p in divisors
        if o % g == 0 and g % p == 0
    ]


class Run(RankRun):
    """A tiny model on one rank of a data axis. ``keys`` are keys of the optimizer."""

    def __init__(self, comm, make, dtype="float64", config=MODEL, microbatches=1, algorithm="ring", **keys):
        given = {"config": config, "dtype": dtype, "microbatches": microbatches, "algorithm": algorithm}
        super().__init__(comm, make, optimizer=optimizer_of(**keys), total_steps=STEPS, **given)


def zero(stage=1, config=ZeroConfig()):  # noqa: B008 (frozen)
    return lambda context: catalogue.zero(context, stage, config)


@cache
def text():
    """Return sequences in which each token determines the next token."""
    return ((np.random.default_rng(5).integers(0, 8, (STEPS, SAMPLES, 1)) + np.arange(9)) % 8 * 7).astype(np.uint8)


def alone(**keys):
    return _alone(tuple(sorted(keys.items(), key=lambda item: item[0])))


@cache
def _alone(keys):
    def body(comm):
        run = Run(comm, catalogue.allreduce, **dict(keys))
        return run.losses(text()), run.state()

    return run_threads(1, body)[0]


def train(comm, make, steps=STEPS, **keys):
    run = Run(comm, make, **keys)
    return run.losses(text()[:steps]), run.state()


@pytest.mark.parametrize("size", [1, 4, 6])
@pytest.mark.full_except("4", "1")
def test_all_degrees_match_one_process(size):
    losses, _ = alone()
    for config in degrees(size):
        for result, _ in run_threads(size, lambda comm, config=config: train(comm, zero(1, config), steps=2)):
            np.testing.assert_allclose(result, losses[:2], rtol=1e-12)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.full_except("3")
def test_zero_with_explicit_degrees_has_the_bits_of_its_stage(stage):
    degrees = ZeroConfig(**asdict(ZeroConfig().degrees(stage, 3)))
    by_stage = run_threads(3, lambda comm: train(comm, zero(stage), steps=4, microbatches=2))
    for (losses, state), (expected, expected_state) in zip(
        run_threads(3, lambda comm: train(comm, zero(1, degrees), steps=4, microbatches=2)), by_stage, strict=True
    ):
        assert losses == expected
        assert state.keys() == expected_state.keys()
        assert all(state[key].tobytes() == expected_state[key].tobytes() for key in state)


@cases(
    "kind, config, why",
    (Kind.COMBINE, ZeroConfig(parameters=1, gradients=2, optimizer=4), "by 0 COMBINE operations"),
    (Kind.COMBINE, ZeroConfig(parameters=2, gradients=2, optimizer=2), "by 0 COMBINE operations"),
    (Kind.REFRESH, ZeroConfig(parameters=2, gradients=4, optimizer=4), "no REFRESH follows the update"),
)
@on_threads(4)
def test_step_without_its_second_half_is_rejected(comm, kind, config, why):
    run = Run(comm, zero(3, config))
    steps = [op for op in run.operations if op.kind is not kind]
    assert len(steps) < len(run.operations)
    with pytest.raises(ScheduleError, match=why):
        build.prove(run.context, ProcessGrid(data=4), steps, 1, accumulates=False, degrees=run.exchange.traits.degrees)


OPTIMIZERS = {"sgd": {"learning_rate": 0.05}, "adamw": {}, "lars": {"learning_rate": 0.5}, "lamb": {}}
MIXED = ZeroConfig(parameters=1, gradients=2, optimizer=4, persistent_below=0)
SHARED = ZeroConfig(shared_parameters=True)
# name -> (ranks, ranks of a node, stage, config)
WAYS = {
    "zero1": (3, None, 1, ZeroConfig()),
    "zero2": (3, None, 2, ZeroConfig()),
    "zero3": (2, None, 3, ZeroConfig(persistent_below=1000)),
    "mixed": (4, None, 2, MIXED),
    "hpZ": (4, 2, 3, ZeroConfig(parameters=2)),
    "shared": (3, None, 1, SHARED),
    "shared on nodes": (4, 2, 1, SHARED),
    "shared on unequal nodes": (5, 3, 2, SHARED),
}


@cases(
    "name, optimizer, dtype",
    *((name, "adamw", "float64") for name in WAYS),
    ("zero3", "sgd", "float32"),
    ("mixed", "lamb", "float64"),
    ("hpZ", "lars", "float64"),
    ("shared on nodes", "lamb", "float32"),
)
@pytest.mark.full_except("shared-adamw-float64")
def test_configs_with_clipping_and_accumulation_match_one_process(name, optimizer, dtype):
    size, per_node, stage, config = WAYS[name]
    keys = {"name": optimizer, "dtype": dtype, **OPTIMIZERS[optimizer]}
    losses, state = alone(**keys)
    assert losses[-1] < losses[0] - 0.05, "the model learns"
    for result, mine in run_threads(
        size, lambda comm: train(comm, zero(stage, config), microbatches=2, **keys), per_node
    ):
        np.testing.assert_allclose(result, losses, rtol=TOLERANCE[dtype])
        assert difference(mine, state) <= TOLERANCE[dtype]


@pytest.mark.parametrize("algorithm", ["native", "node_shared", "circulant", "hierarchical"])
@pytest.mark.parametrize("config", [ZeroConfig(), MIXED, ZeroConfig(parameters=2, optimizer=2, gradients=2), SHARED])
def test_every_algorithm_works_on_every_level(algorithm, config):
    losses, _ = alone()
    stage = 3 if config.parameters == 2 else 1
    per_node = 2 if algorithm == "hierarchical" else None
    for result, _ in run_threads(
        4, lambda comm: train(comm, zero(stage, config), steps=4, algorithm=algorithm), per_node
    ):
        np.testing.assert_allclose(result, losses[:4], rtol=1e-12)


def volume(size, config, microbatches, first, last):
    """Return the bytes that a rank sends in a step, in units of Psi, by the module's docstring.

    The model has two layers.
    """
    p, g, o = config.parameters, config.gradients, config.optimizer
    gradients = (microbatches * (1 - 1 / g) if g > 1 else 0) + (1 / g - 1 / o) + 2 / o * (1 - o / size)
    gathered = microbatches * (2 - last) - (microbatches - 1) * first
    return gradients + (1 / p - 1 / o) + gathered * (1 - 1 / p)


@pytest.mark.parametrize(("size", "microbatches"), [(3, 2), (4, 2)])
@pytest.mark.full_except("4-2")
def test_sent_bytes_match_the_closed_form_for_all_degrees(size, microbatches):
    model = ModelConfig(layers=1, hidden=64, heads=2, vocabulary=256)

    def body(comm, config):
        run = Run(comm, zero(1, config), "float32", model, microbatches)
        run.losses(text()[:1])  # communicators are split and scratch memory taken
        with count_traffic(comm) as traffic:
            run.losses(text()[1:2])
        assert not traffic.unknown
        return traffic.sent_bytes, [sum(spec.size for spec in stage.tensors()) * 4 for stage in run.model.stages]

    for config in degrees(size):
        results = run_threads(size, lambda comm, config=config: body(comm, config))
        sent, layers = max(sent for sent, _ in results), results[0][1]
        psi = sum(layers)
        expected = volume(size, config, microbatches, layers[0] / psi, layers[-1] / psi) * psi
        assert sent == pytest.approx(expected, rel=0.01, abs=2048), f"{config}: {sent / psi:.3f} Psi"


@on_threads(2)
def test_small_units_stay_gathered_and_their_state_is_sharded(comm):
    whole, run = (Run(comm, zero(3, ZeroConfig(persistent_below=below)), "float32") for below in (0, 1100))
    sizes = {unit: sum(spec.size for spec in stage.tensors()) for unit, stage in enumerate(run.model.stages)}
    small = {unit for unit, size in sizes.items() if size < 1100}
    assert 0 < len(small) < len(sizes)
    for one, kept in ((whole, set()), (run, small)):
        assert {op.unit for op in one.operations if op.kind is Kind.FREE} == set(sizes) - kept
        agreed = next(at for at, op in enumerate(one.operations) if op.kind is Kind.AGREE)
        after = [op.unit for op in one.operations[agreed:] if op.kind is Kind.GATHER]
        assert sorted(after) == sorted(kept), "one gather after the update"
        assert not kept & {op.unit for op in one.operations[:agreed] if op.kind is Kind.GATHER}
    assert run.exchange.update.optimizer.slots["m"].size == whole.exchange.update.optimizer.slots["m"].size
    assert run.exchange.parameters.size > whole.exchange.parameters.size


@pytest.mark.full
def test_checkpoint_moves_between_any_degrees():
    losses, _ = alone()
    ways = [ZeroConfig(), MIXED, ZeroConfig(parameters=2, gradients=2, optimizer=2), SHARED]
    for size, stage, config in ((4, 3, ways[0]), (4, 2, MIXED), (4, 3, ways[2]), (3, 1, SHARED)):

        def save(comm, stage=stage, config=config):
            run = Run(comm, zero(stage, config))
            run.losses(text()[:5])
            return run.state(), run.exchange.state()

        state, scalars = run_threads(size, save)[0]
        for others, stage, other in ((1, 1, ways[0]), (4, 3, ways[0]), (4, 2, MIXED), (4, 1, ways[2]), (4, 2, SHARED)):

            def resume(comm, stage=stage, other=other):
                run = Run(comm, zero(stage, other))
                run.load(state, scalars, 5)  # noqa: B023 (called before the loop goes on)
                return run.losses(text()[5:8])

            for result in run_threads(others, resume):
                np.testing.assert_allclose(result, losses[5:8], rtol=1e-12)


@pytest.mark.parametrize("config", [ZeroConfig(), ZeroConfig(parameters=4), ZeroConfig(gradients=2), SHARED])
def test_more_ranks_than_elements_of_a_layer(config):
    tiny = ModelConfig(layers=1, hidden=2, heads=1, vocabulary=2)
    data = text() // 7 % 2
    stage = 3 if config.parameters else 2

    def body(comm, make):
        run = Run(comm, make, "float32", tiny)
        if comm.rank == 7:
            assert not all(cuts[-1] for cuts in run.exchange.reducer.cuts.cuts.values()), (
                "this rank owns nothing of a layer"
            )
        return run.losses(data[:4])

    expected = run_threads(1, lambda comm: body(comm, catalogue.allreduce))[0]
    for result in run_threads(8, lambda comm: body(comm, zero(stage, config))):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def without_unit(operations, unit):
    """Return the list of a rank that takes a branch in which a unit is not computed."""
    return [op for op in operations if op.unit != unit]


@on_threads(3)
def test_rank_on_another_branch_raises_with_the_unit(comm):
    run = Run(comm, zero(3))
    run.losses(text()[:2])
    run.executor.evaluate(*run.batches(text()[0])[0])  # of an order of its own
    run.losses(text()[2:3])
    if comm.rank == 1:
        with pytest.raises(ScheduleError, match=r"got GATHER\(0, 2\).*expected GATHER\(0, 1\) of unit 1 as number"):
            run.step(text()[3], operations=without_unit(run.operations, unit=1))


@on_threads(2)
def test_gather_out_of_order_is_rejected(comm):
    run = Run(comm, zero(3))
    run.losses(text()[:1])
    run.exchange.begin(run.operations)
    with pytest.raises(ScheduleError, match=r"got GATHER\(0, 1\) of unit 1, expected GATHER\(0, 0\) of unit 0"):
        run.exchange.handlers[Kind.GATHER](Operation(Kind.GATHER, 0, 1))


@on_threads(3)
def test_ranks_on_different_branches_all_raise(comm):
    run = Run(comm, zero(3))
    steps = without_unit(run.operations, unit=1) if comm.rank == 2 else run.operations
    with pytest.raises(ScheduleError, match=r"number 2 is GATHER\(0, 2\).* on rank 2, but GATHER\(0, 1\)"):
        run.step(text()[0], operations=steps)


def test_shared_parameters_use_one_copy_per_node():
    def body(comm):
        run = Run(comm, zero(1, SHARED), "float32")
        addresses = []
        for samples in text()[:3]:
            run.losses([samples])
            addresses.append(run.exchange.parameters.array.ctypes.data)
        assert addresses[0] == addresses[2] != addresses[1], "two buffers take turns"
        psi = run.model.layout.size * 4
        return addresses[0], run.ledger.peak["parameters"], psi, run.exchange.parameters.array.tobytes()

    for per_node, nodes in ((None, 1), (2, 2)):
        results = run_threads(4, body, per_node)
        assert len({address for address, *_ in results}) == nodes
        assert len({weights for *_, weights in results}) == 1
        assert sum(counted for _, counted, *_ in results) == 2 * nodes * results[0][2]


@on_threads(2)
def test_failed_step_does_not_change_shared_parameters(comm):
    run = Run(comm, zero(1, SHARED), "float32")
    run.losses(text()[:2])
    before = run.exchange.parameters.array.copy()
    apply = run.executor._handlers[Kind.APPLY]

    def raise_interrupt(op):
        apply(op)
        raise KeyboardInterrupt

    run.executor._handlers[Kind.APPLY] = raise_interrupt
    with pytest.raises(KeyboardInterrupt):
        run.losses(text()[2:3])
    comm.barrier()
    assert run.exchange.parameters.array.tobytes() == before.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.full_except("2")
def test_model_state_memory_matches_the_closed_form(size):
    model = ModelConfig(layers=8, hidden=32, heads=2, vocabulary=64)
    forms = [  # bytes per parameter, and number of additional layers
        (catalogue.allreduce, 16, 0),
        (zero(1), 8 + 8 / size, 0),
        (zero(2), 4 + 12 / size, 1),
        (zero(3), 16 / size, 2),
        (zero(1, SHARED), 4 + (8 + 8) / size if size > 1 else 16, 0),  # two buffers, and this rank's share of them
        (zero(2, SHARED), (8 + 12) / size if size > 1 else 16, 1),
    ]

    def body(comm, make, each, layers):
        run = Run(comm, make, "float32", model)
        kinds = ("parameters", "gradients", "optimizer")
        before = sum(run.ledger.current[kind] for kind in kinds)
        assert before == pytest.approx(each * run.model.layout.parameters, rel=0.03)
        run.losses(text()[:1])
        unit = max(part.size for part in run.context.ranges.values()) * 4
        assert sum(run.ledger.peak[kind] for kind in kinds) <= before + layers * unit

    for form in forms:
        run_threads(size, lambda comm, form=form: body(comm, *form))


def rejection(*overrides):
    with pytest.raises(ConfigurationError) as result:
        recipe.load(None, overrides, {})
    return str(result.value)


@cases(
    "overrides, output",
    (("zero.gradients=-1",), "it must be at least 0. Meaning: Ranks that shard the gradients"),
    (("zero.persistent_below=-1",), "0: shard all layers"),
    (("zero.parameters=2",), "no effect with parallel.strategy = 'allreduce'; remove it, or choose the strategy"),
    (("zero.shared_parameters=true", "parallel.strategy=zero1", "parallel.pipeline=2"), "parallel.pipeline = 1"),
    (("zero.persistent_below=5", "parallel.strategy=zero2"), "parameters are not sharded; remove it, or choose"),
    (("zero.shared_parameters=true", "parallel.strategy=zero3"), "choose zero1 or zero2"),
    (("zero.shared_parameters=true", "parallel.strategy=zero1", "run.device=gpu"), "run.device = 'cpu'"),
    (
        ("zero.shared_parameters=true", "parallel.strategy=zero1", "zero.optimizer=2"),
        "set zero.shared_parameters = false, or zero.optimizer = 0",
    ),
)
def test_useless_or_impossible_options_are_rejected(overrides, output):
    assert output in rejection(*overrides)


@cases(
    "config, stage, expected",
    (ZeroConfig(), 1, (1, 1, 12)),
    (ZeroConfig(), 2, (1, 12, 12)),
    (ZeroConfig(), 3, (12, 12, 12)),
    (ZeroConfig(parameters=4), 3, (4, 12, 12)),
    (ZeroConfig(gradients=2, optimizer=6), 2, (1, 2, 6)),
    (ZeroConfig(optimizer=3), 1, (1, 1, 3)),
)
def test_default_degrees_follow_the_stage(config, stage, expected):
    assert config.degrees(stage, 12) == ShardingDegrees(*expected)


@cases(
    "config, stage, output",
    (ZeroConfig(optimizer=2), 3, "zero.parameters = 4, zero.gradients = 4, zero.optimizer = 2 on 4 data ranks: each"),
    (ZeroConfig(parameters=2), 1, "zero.parameters = 2 does not divide zero.gradients = 1"),
    (
        ZeroConfig(optimizer=3),
        1,
        "zero.optimizer = 3 does not divide data ranks = 4; choose degrees among the divisors of 4",
    ),
)
def test_degrees_that_do_not_divide_are_rejected(config, stage, output):
    with pytest.raises(ConfigurationError) as result:
        config.degrees(stage, 4)
    assert output in str(result.value)
