"""Reductions that overlap the backward: the list is proven, the bits do not change, and bad recipes are rejected."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.marks import cases
from harness.rank_run import RankRun, text
from harness.trainings import recipe_of
from hpcdist import collectives
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import progress
from hpcdist.comm import config
from hpcdist.comm.threads.communicator import ThreadCommunicator, run_threads
from hpcdist.errors import ConfigurationError, MissingCapabilityError, ScheduleError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import StepStatistics
from hpcdist.training.run.summary import overlap_figures

SAMPLES, STEPS = 7, 4
MODEL = ModelConfig(layers=2, hidden=16, heads=2, tied=True)
KINDS = ("thread", "poll")


class Run(RankRun):
    """A run of a tiny gpt, tied, on one rank of ``grid``."""

    def __init__(self, comm, overlap, algorithm, grid=None, microbatches=1):
        keys = {"microbatches": microbatches, "pipeline": 1 if grid is None else grid.pipeline}
        context = {"algorithm": algorithm, "bucket_bytes": 4096, "overlap": overlap, "total_steps": STEPS}
        super().__init__(comm, catalogue.allreduce, config=MODEL, dtype="float32", **keys, **context)


def train(overlap, algorithm, data, size, **keys):
    def body(comm):
        with Run(comm, overlap, algorithm, **keys) as run:
            return run.train(data)

    return run_threads(size, body, 2 if algorithm == "hierarchical" else None)


@pytest.mark.parametrize("algorithm", sorted(collectives.ALLREDUCE))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_overlap_by_a_thread_has_the_same_bits(algorithm, size, rng):
    data = text(rng, STEPS, SAMPLES)
    assert train("thread", algorithm, data, size) == train("none", algorithm, data, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_overlap_by_polling_has_the_same_bits(size, rng, monkeypatch):
    monkeypatch.setattr(progress, "SEGMENT_BYTES", 512)  # several lanes
    data = text(rng, STEPS, SAMPLES)
    for algorithm in config.POLLED:
        assert train("poll", algorithm, data, size) == train("none", algorithm, data, size)


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_overlap_with_microbatches_and_pipelines_has_the_same_bits(overlap, pipeline, rng):
    data = text(rng, STEPS, SAMPLES)
    keys = {"grid": ProcessGrid(data=2, pipeline=pipeline), "microbatches": 3}
    ranks = 2 * pipeline
    assert train(overlap, "ring", data, ranks, **keys) == train("none", "ring", data, ranks, **keys)


def test_polled_algorithms_are_resumable():
    assert all(set(config.POLLED) <= set(reference) for reference in progress.RESUMABLE.values())


@pytest.mark.parametrize("overlap", KINDS)
def test_non_finite_value_is_named_and_updates_nothing(overlap, rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        with Run(comm, overlap, "ring") as run:
            if comm.rank == 1:
                run.exchange.parameters.view(run.model.layout.segments[4].key)[...] = np.nan
            return run.failure(data[0], 17)

    for why in run_threads(3, body):
        assert "step 17" in why and "rank 1: parameter" in why


@pytest.mark.parametrize("overlap", KINDS)
def test_exposed_time_is_measured(overlap, rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        with Run(comm, overlap, "ring") as run:
            overlapped = run.exchange.background
            assert overlapped is not None
            first = overlapped.taken()
            run.train(data)
            return [first, overlapped.taken(), overlapped.taken()]

    for first, training, after in run_threads(2, body):
        assert first[0] == after[0] == 0.0 < training[0]
        if overlap == "thread":
            assert first[1] == after[1] == 0.0 < training[1]
        else:
            assert math.isnan(training[1]), "nobody knows what moves while nobody looks"


# --- the list -------------------------------------------------------------------------------------------------------


def lists(overlap, grid, microbatches):
    def body(comm):
        with Run(comm, overlap, "ring", grid, microbatches) as run:
            return run

    runs = run_threads(grid.size, body)
    return [run.operations for run in runs], runs[0]


def prove(steps, run):
    units = dict(enumerate(run.model.layout.units.values()))
    verify(steps, grid=run.grid, units=units, microbatches=run.parallel.microbatches, needs=run.model.needs)


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize(
    "grid", [ProcessGrid(data=1), ProcessGrid(data=2), ProcessGrid(data=3), ProcessGrid(data=2, pipeline=2)], ids=str
)
def test_overlapped_list_is_proven(overlap, grid):
    steps, run = lists(overlap, grid, 3)
    prove(steps, run)
    for local_data in steps:
        kinds = [op.kind for op in local_data]
        if grid.data == 1:
            assert not {Kind.START, Kind.WAIT, Kind.POLL} & set(kinds), "there is nobody to wait for"
            continue
        assert Kind.REDUCE not in kinds and kinds.count(Kind.START) == kinds.count(Kind.WAIT) > 1
        last = max(index for index, kind in enumerate(kinds) if kind is Kind.BACKWARD)
        assert last < kinds.index(Kind.WAIT) < kinds.index(Kind.AGREE)
        if grid.pipeline == 1:  # else the first stage waits for the gradient of the tied tensor first
            assert kinds.index(Kind.START) < last
            assert (Kind.POLL in kinds) == (overlap == "poll")


Break = Callable[[list[Operation]], object]


def index_of(steps, kind):
    return [op.kind for op in steps].index(kind)


@cases(
    "damage, match",
    (lambda steps: steps.pop(index_of(steps, Kind.WAIT)), r"START\(.*\) is never completed"),
    (lambda steps: steps.pop(index_of(steps, Kind.START)), r"is never exchanged"),
    (
        lambda steps: steps.insert(index_of(steps, Kind.WAIT), steps[index_of(steps, Kind.WAIT)]),
        r"another WAIT has already waited",
    ),
    (lambda steps: steps.insert(0, steps.pop(index_of(steps, Kind.WAIT))), r"waits for an exchange that was not"),
    (lambda steps: steps.insert(0, steps.pop(index_of(steps, Kind.START))), r"put START\(.*\) after BACKWARD"),
    (
        lambda steps: steps.insert(index_of(steps, Kind.WAIT), steps.pop(index_of(steps, Kind.AGREE))),
        r"WAIT\(.*\) comes after AGREE",
    ),
)
def test_broken_list_is_rejected(damage, match):
    steps, run = lists("thread", ProcessGrid(data=2), 1)
    damage(steps[1])
    with pytest.raises(ScheduleError, match=rf"rank 1: .*{match}"):
        prove(steps, run)


@pytest.mark.parametrize("kind", [Kind.START, Kind.WAIT])
def test_different_order_on_one_rank_is_rejected(kind):
    steps, run = lists("thread", ProcessGrid(data=2), 1)
    local_data = steps[1]
    indices = [index for index, op in enumerate(local_data) if op.kind is kind]
    first, second = indices[-2:]  # of START: both complete after the last BACKWARD, or an earlier check fails
    if kind is Kind.START:
        local_data.insert(second, local_data.pop(first))
    else:
        local_data[first], local_data[second] = local_data[second], local_data[first]
    with pytest.raises(ScheduleError, match=rf"rank \d \w+ the collective {kind.name}.* the same order"):
        prove(steps, run)


def test_direction_before_the_wait_is_rejected():
    steps, run = lists("thread", ProcessGrid(data=2), 1)
    for local_data in steps:  # no AGREE says so before
        local_data.pop(index_of(local_data, Kind.AGREE))
        local_data.append(local_data.pop(index_of(local_data, Kind.WAIT)))
    with pytest.raises(ScheduleError, match=r"DIRECTION\(.*\) comes before WAIT"):
        prove(steps, run)


# --- what cannot be had ---------------------------------------------------------------------------------------------


@cases(
    "keys, match",
    ({"overlap": "always"}, r"communication.overlap = 'always'; choose one of none, thread, poll"),
    ({"overlap": "poll"}, r"'auto': it cannot be polled .* choose the algorithm ring"),
    ({"overlap": "poll", "algorithm": "native"}, r"'native': it cannot be polled"),
)
def test_unsupported_recipe_is_rejected(keys, match):
    with pytest.raises(ConfigurationError, match=match):
        recipe_of({f"communication.{key}": value for key, value in keys.items()})


@cases(
    "setting, match",
    ("parallel.strategy=parameter_server", "set parallel.strategy to one of allreduce, zero1"),
    ("run.device=gpu", "run.device = 'gpu' is not built"),
    ("run.logical_shards=4", "set communication.overlap = 'none'"),
)
def test_other_strategies_and_devices_are_rejected(setting, match):
    with pytest.raises(ConfigurationError, match=match) as caught:
        recipes.load(None, ["communication.overlap=thread", setting])
    assert caught.value.exit_code == 78 and "communication.overlap = 'thread'" in str(caught.value)


def test_library_without_thread_support_is_rejected(monkeypatch):
    monkeypatch.setattr(ThreadCommunicator, "supports", lambda self, feature: False)
    with pytest.raises(MissingCapabilityError, match=r"MPI_THREAD_MULTIPLE") as caught:
        run_threads(2, lambda comm: Run(comm, "thread", "ring"))
    assert caught.value.exit_code == 69


def test_reduction_works_in_place_on_its_range():
    """START takes the range itself without a copy: after the wait, the store holds the sum."""

    def body(comm):
        with Run(comm, "thread", "ring") as run:
            part = Range(3, 103)
            run.exchange.gradients.array[...] = comm.rank + 1
            run.exchange.handlers[Kind.START](Operation(Kind.START, range=part))
            run.exchange.handlers[Kind.WAIT](Operation(Kind.WAIT, range=part))
            inside = run.exchange.gradients.range(part)
            return bool((inside == 6).all()) and bool((run.exchange.gradients.array[103:] == comm.rank + 1).all())

    assert run_threads(3, body) == [True] * 3


def test_summary_reports_the_exposed_time():
    def rank(*steps):
        made = StepStatistics()
        for exposed_s, total_s in steps:
            made.add(1.0, 0.0, reductions_exposed_s=exposed_s, reductions_s=total_s)
        return made.measured()

    result = overlap_figures([rank((9.0, 9.0), (0.5, 2.0), (0.25, 2.0)), rank((9.0, 9.0), (0.5, 1.0), (0.75, 1.0))])
    assert result == {"reductions_s": 1.5, "reductions_exposed_s": 0.5, "communication_hidden_share": 1 - 0.5 / 1.5}
    polled = overlap_figures([rank((9.0, math.nan), (0.5, math.nan))])
    assert polled == {"reductions_s": None, "reductions_exposed_s": 0.5, "communication_hidden_share": None}
    assert overlap_figures([rank()]) == dict.fromkeys(result)
