"""Data parallel training equals one process: every algorithm, uneven samples, accumulation, clipping."""

import numpy as np
import pytest

from hpcdist import collectives, models
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import run_threads, solo
from hpcdist.errors import NonFiniteError
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange, buckets_of_layers
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.replica_check import explain_nonfinite

SAMPLES, STEPS = 7, 6  # 7 samples over 1..4 ranks are uneven nearly everywhere
MODEL = ModelConfig(layers=1, hidden=16, heads=2)


class Run:
    """A data parallel run of a tiny gpt on one rank."""

    def __init__(self, comm: Communicator, dtype: str, algorithm: str, microbatches: int):
        self.comm, self.microbatches = comm, microbatches
        self.model = models.build(MODEL, dtype, context=8)
        context = RankContext(
            world=comm,
            data=comm,
            pipeline=solo(),
            model=self.model,
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, clip_norm=0.5),
            total_steps=STEPS,
            algorithm=algorithm,
            bucket_bytes=4096,
        )
        self.exchange = AllreduceExchange(context)
        self.parameters = self.exchange.parameters
        self.model.initialise(self.parameters, seed=3)
        self.executor = build_executor(context, self.exchange)
        parallel = ParallelConfig(microbatches=microbatches)
        self.operations = operations(context, self.exchange, self.executor.copies, parallel)

    def batches(self, step: int, data: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        mine = np.array_split(data[step], self.comm.size)[self.comm.rank]
        return [(part[:, :-1], part[:, 1:]) for part in np.array_split(mine, self.microbatches)]

    def losses(self, data: np.ndarray) -> list[float]:
        return [
            self.executor.run(self.operations, self.batches(step, data), SAMPLES, step, np.zeros(2)).loss
            for step in range(STEPS)
        ]


def text(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (STEPS, SAMPLES, 9)).astype(np.uint8)


@pytest.mark.parametrize("algorithm", sorted(collectives.ALLREDUCE))
def test_every_algorithm_and_size_trains_as_one_process(algorithm: str, rng: np.random.Generator) -> None:
    data = text(rng)
    alone = run_threads(1, lambda comm: Run(comm, "float64", "native", 1).losses(data))[0]
    for size in (2, 3, 4):
        nodes_of = 2 if algorithm == "hierarchical" else None
        for losses in run_threads(size, lambda comm: Run(comm, "float64", algorithm, 1).losses(data), nodes_of):
            np.testing.assert_allclose(losses, alone, rtol=1e-12)


def test_training_lowers_the_loss_of_a_repeated_batch(rng: np.random.Generator) -> None:
    data = np.repeat(text(rng)[:1], STEPS, axis=0)
    losses = run_threads(2, lambda comm: Run(comm, "float32", "ring", 1).losses(data))[0]
    assert losses[-1] < losses[0] - 0.05


def test_a_rank_without_samples_contributes_nothing(rng: np.random.Generator) -> None:
    data = text(rng)
    alone = run_threads(1, lambda comm: Run(comm, "float64", "native", 1).losses(data))[0]
    crowd = run_threads(4, lambda comm: Run(comm, "float64", "ring", 3).losses(data))[3]  # 1-2 samples, 3 parts
    np.testing.assert_allclose(crowd, alone, rtol=1e-12)


def test_nan_names_step_rank_and_tensor_and_updates_nothing(rng: np.random.Generator) -> None:
    data = text(rng)

    def body(comm: Communicator) -> tuple[str, bool]:
        run = Run(comm, "float32", "ring", 1)
        if comm.rank == 1:
            run.parameters.view(run.model.layout.segments[4].key)[...] = np.nan
        before = run.parameters.array.copy()
        batches = run.batches(0, data)
        try:
            run.executor.run(run.operations, batches, SAMPLES, 17, np.zeros(2))
        except NonFiniteError as error:
            said = explain_nonfinite(comm, run.executor, run.operations, batches, error)
            return str(said), bool(np.array_equal(before, run.parameters.array, equal_nan=True))
        return "no error", False

    results = run_threads(3, body)
    key = models.build(MODEL, "float32", context=8).layout.segments[4].key
    for text_of, untouched in results:
        assert "step 17" in text_of and f"rank 1: parameter {key}" in text_of and untouched
        assert "rank 0:" not in text_of and "rank 2:" not in text_of


def test_wishes_are_summed_over_the_ranks(rng: np.random.Generator) -> None:
    data = text(rng)

    def body(comm: Communicator) -> list[float]:
        run = Run(comm, "float32", "ring", 1)
        stop_requests = np.array([0.0, float(comm.rank == 2)])
        return run.executor.run(run.operations, run.batches(0, data), SAMPLES, 0, stop_requests).stop_requests.tolist()

    assert run_threads(3, body) == [[0.0, 1.0]] * 3


@pytest.mark.parametrize("bucket_bytes", [1, 64, 256, 1000, 10**9])
def test_buckets_tile_the_space_from_the_end(bucket_bytes: int) -> None:
    layout = Layout.of([TensorSpec(layer, "w", (size,)) for layer, size in enumerate((100, 1, 300, 32))])
    found = buckets_of_layers(layout, 4, bucket_bytes)
    ordered = sorted(found)
    assert ordered[0].start == 0 and ordered[-1].stop == layout.size
    assert all(a.stop == b.start for a, b in zip(ordered, ordered[1:], strict=False))
    assert found[0].stop == layout.size, "the last layers come first"


def test_buckets_of_a_part_tile_it() -> None:
    layout = Layout.of([TensorSpec(layer, "w", (size,)) for layer, size in enumerate((100, 1, 300, 32))])
    part = Range(layout.units[1].start, layout.units[2].stop)
    for bucket_bytes in (1, 256, 10**9):
        ordered = sorted(buckets_of_layers(layout, 4, bucket_bytes, part))
        assert ordered[0].start == part.start and ordered[-1].stop == part.stop
        assert all(a.stop == b.start for a, b in zip(ordered, ordered[1:], strict=False))
