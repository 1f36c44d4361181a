"""Data parallel training matches one process: every algorithm, uneven samples, accumulation, clipping."""

from functools import partial

import numpy as np
import pytest

from harness.rank_run import GPT, RankRun, gpt, text
from hpcdist import collectives
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.core.rank_context import buckets_of_layers
from hpcdist.strategies.data import catalogue

SAMPLES, STEPS = 7, 6  # 7 samples over 1..4 ranks are uneven nearly everywhere
Run = partial(RankRun, make=catalogue.allreduce, config=GPT, bucket_bytes=4096)


def losses(size, data, ranks_per_node=None, **keys):
    return run_threads(size, lambda comm: Run(comm, **keys).losses(data), ranks_per_node)


@pytest.mark.parametrize("algorithm", sorted(collectives.ALLREDUCE))
@pytest.mark.full_except("node_shared")
def test_every_algorithm_and_size_matches_one_process(algorithm, rng):
    data = text(rng, 3, SAMPLES)
    (alone,) = losses(1, data, algorithm="native")
    for size in (2, 3, 4):
        for together in losses(size, data, 2 if algorithm == "hierarchical" else None, algorithm=algorithm):
            np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_training_lowers_the_loss_of_a_repeated_batch(rng):
    first, *_, last = losses(2, np.repeat(text(rng, 1, SAMPLES), STEPS, axis=0), dtype="float32")[0]
    assert last < first - 0.05


def test_rank_without_samples_contributes_nothing(rng):
    data = text(rng, STEPS, SAMPLES)
    (alone,) = losses(1, data, algorithm="native")
    crowd = losses(4, data, microbatches=3)[3]  # 1-2 samples, 3 parts
    np.testing.assert_allclose(crowd, alone, rtol=1e-12)


def test_nan_names_step_rank_and_tensor_and_updates_nothing(rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        run = Run(comm, dtype="float32")
        if comm.rank == 1:
            run.exchange.parameters.view(run.model.layout.segments[4].key)[...] = np.nan
        return run.failure(data[0], 17)

    key = gpt().layout.segments[4].key
    for why in run_threads(3, body):
        assert "step 17" in why and f"rank 1: parameter {key}" in why
        assert "rank 0:" not in why and "rank 2:" not in why


def test_stop_requests_are_summed_over_the_ranks(rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        run, stop_requests = Run(comm, dtype="float32"), np.array([0.0, float(comm.rank == 2)])
        return run.executor.run(run.operations, run.batches(data[0]), SAMPLES, 0, stop_requests).stop_requests.tolist()

    assert run_threads(3, body) == [[0.0, 1.0]] * 3


@pytest.mark.parametrize("bucket_bytes", [1, 64, 256, 1000, 10**9])
def test_buckets_tile_the_space_from_the_end(bucket_bytes):
    layout = Layout.of([TensorSpec(layer, "w", (size,)) for layer, size in enumerate((100, 1, 300, 32))])
    result = buckets_of_layers(layout, 4, bucket_bytes)
    ordered = sorted(result)
    assert ordered[0].start == 0 and ordered[-1].stop == layout.size
    assert all(a.stop == b.start for a, b in zip(ordered, ordered[1:], strict=False))
    assert result[0].stop == layout.size, "the last layers come first"


def test_buckets_of_a_part_tile_the_part():
    layout = Layout.of([TensorSpec(layer, "w", (size,)) for layer, size in enumerate((100, 1, 300, 32))])
    part = Range(layout.units[1].start, layout.units[2].stop)
    for bucket_bytes in (1, 256, 10**9):
        ordered = sorted(buckets_of_layers(layout, 4, bucket_bytes, part))
        assert ordered[0].start == part.start and ordered[-1].stop == part.stop
        assert all(a.stop == b.start for a, b in zip(ordered, ordered[1:], strict=False))
