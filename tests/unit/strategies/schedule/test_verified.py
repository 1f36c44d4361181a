"""The lists that a run really executes are proven: every architecture, layout and schedule, on every rank."""

import itertools

import pytest

from harness.rank_run import RankRun, split_by_parameters
from hpcdist import models
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.models.config import ModelConfig
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import EXCHANGES
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.verify.proof import verify

MICROBATCHES = 3


def gpt(tied):
    return models.build(ModelConfig(layers=3, hidden=8, heads=2, tied=tied), "float32", context=4)


def lists(grid, model, parallel, optimizer):
    """The list of every rank, and whether gradients of micro-batches are added up."""

    def body(comm):
        keys = {"optimizer": OptimizerConfig(name=optimizer), "bucket_bytes": 2000}
        run = RankRun(comm, EXCHANGES[parallel.strategy], model=model, parallel=parallel, **keys)
        return run.operations, run.exchange.accumulates

    results = run_threads(grid.size, body)
    return [steps for steps, _ in results], results[0][1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("strategy", ["allreduce", "zero1", "zero2", "zero3"])
def test_replicas_run_a_proven_step(strategy, schedule, tied):
    model = gpt(tied)
    for data, optimizer in itertools.product((1, 2, 3), ("adamw", "lamb")):
        parallel = ParallelConfig(strategy=strategy, schedule=schedule, microbatches=MICROBATCHES)
        steps, accumulates = lists(ProcessGrid(data=data), model, parallel, optimizer)
        proof = verify(
            steps,
            grid=ProcessGrid(data=data),
            units=dict(enumerate(model.layout.units.values())),
            microbatches=MICROBATCHES,
            needs=model.needs,
            accumulates=accumulates,
        )
        assert proof.live == (MICROBATCHES if schedule == "gpipe" else 1,)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("strategy", ["allreduce", "zero1"])
def test_pipelines_run_a_proven_step(strategy, schedule, tied):
    model = gpt(tied)
    for data, pipeline, recompute in itertools.product((1, 2), (2, 3, 5), (False, True)):
        grid = ProcessGrid(data=data, pipeline=pipeline)
        parallel = ParallelConfig(
            pipeline=pipeline, strategy=strategy, schedule=schedule, microbatches=MICROBATCHES, recompute=recompute
        )
        steps, accumulates = lists(grid, model, parallel, "lamb")
        proof = verify(
            steps,
            grid=grid,
            units=dict(enumerate(model.layout.units.values())),
            microbatches=MICROBATCHES,
            needs=model.needs,
            accumulates=accumulates,
        )
        expected = [min(pipeline - stage, MICROBATCHES) for stage in range(pipeline)]
        assert proof.live == (tuple(expected) if schedule == "1f1b" else (MICROBATCHES,) * pipeline)


def test_stages_are_cut_to_the_smallest_largest_part():
    model = gpt(False)
    sizes = [sum(spec.size for spec in stage.tensors()) for stage in model.stages]
    for ranks in range(1, len(sizes) + 1):
        parts = split_by_parameters(model, ranks).chunks
        assert [unit for part in parts for unit in part] == list(range(len(sizes))) and all(parts)
        best = min(
            max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *inner, len(sizes))))
            for inner in itertools.combinations(range(1, len(sizes)), ranks - 1)
        )
        assert max(sum(sizes[unit] for unit in part) for part in parts) == best
