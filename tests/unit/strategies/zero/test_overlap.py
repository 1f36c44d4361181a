"""Reductions behind the backward: the list is proven, the bits are those without, and what cannot be had is refused."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.marks import cases
from harness.rank_run import RankRun, text
from harness.trainings import recipe_of
from hpcdist import collectives
from hpcdist.arrays.ranges import Range
from hpcdist.collectives.nonblocking import progress
from hpcdist.comm import config
from hpcdist.comm.threads.communicator import ThreadCommunicator, run_threads
from hpcdist.errors import ConfigurationError, MissingCapabilityError, ScheduleError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.schedule.operations import Kind, Operation
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
        super().__init__(comm, AllreduceExchange, config=MODEL, dtype="float32", **keys, **context)


def trained(overlap, algorithm, data, size, **keys):
    def body(comm):
        with Run(comm, overlap, algorithm, **keys) as run:
            return run.train(data)

    return run_threads(size, body, 2 if algorithm == "hierarchical" else None)


@pytest.mark.parametrize("algorithm", sorted(collectives.ALLREDUCE))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_thread_trains_to_the_same_bits(algorithm, size, rng):
    data = text(rng, STEPS, SAMPLES)
    assert trained("thread", algorithm, data, size) == trained("none", algorithm, data, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_polling_trains_to_the_same_bits(size, rng, monkeypatch):
    monkeypatch.setattr(progress, "SEGMENT_BYTES", 512)  # several lanes
    data = text(rng, STEPS, SAMPLES)
    for algorithm in config.POLLED:
        assert trained("poll", algorithm, data, size) == trained("none", algorithm, data, size)


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_microbatches_and_pipelines_train_to_the_same_bits(overlap, pipeline, rng):
    data = text(rng, STEPS, SAMPLES)
    keys = {"grid": ProcessGrid(data=2, pipeline=pipeline), "microbatches": 3}
    ranks = 2 * pipeline
    assert trained(overlap, "ring", data, ranks, **keys) == trained("none", "ring", data, ranks, **keys)


def test_what_is_polled_in_training_comes_in_steps():
    assert all(set(config.POLLED) <= set(known) for known in progress.RESUMABLE.values())


@pytest.mark.parametrize("overlap", KINDS)
def test_a_value_that_is_not_finite_is_named_and_updates_nothing(overlap, rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        with Run(comm, overlap, "ring") as run:
            if comm.rank == 1:
                run.exchange.parameters.view(run.model.layout.segments[4].key)[...] = np.nan
            return run.failure(data[0], 17)

    for why in run_threads(3, body):
        assert "step 17" in why and "rank 1: parameter" in why


@pytest.mark.parametrize("overlap", KINDS)
def test_what_is_exposed_is_measured(overlap, rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm):
        with Run(comm, overlap, "ring") as run:
            overlapped = run.exchange.overlap
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
def test_the_list_is_proven(overlap, grid):
    steps, run = lists(overlap, grid, 3)
    prove(steps, run)
    for own in steps:
        kinds = [op.kind for op in own]
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


def where(steps, kind):
    return [op.kind for op in steps].index(kind)


@cases(
    "damage, match",
    (lambda own: own.pop(where(own, Kind.WAIT)), r"START\(.*\) is never waited for"),
    (lambda own: own.pop(where(own, Kind.START)), r"is never exchanged"),
    (lambda own: own.insert(where(own, Kind.WAIT), own[where(own, Kind.WAIT)]), r"was waited for before"),
    (lambda own: own.insert(0, own.pop(where(own, Kind.WAIT))), r"waits for what was not started"),
    (lambda own: own.insert(0, own.pop(where(own, Kind.START))), r"START\(.*\) comes before BACKWARD"),
    (lambda own: own.insert(where(own, Kind.WAIT), own.pop(where(own, Kind.AGREE))), r"WAIT\(.*\) comes after AGREE"),
)
def test_a_broken_list_is_refused(damage, match):
    steps, run = lists("thread", ProcessGrid(data=2), 1)
    damage(steps[1])
    with pytest.raises(ScheduleError, match=rf"rank 1: .*{match}"):
        prove(steps, run)


@pytest.mark.parametrize("kind", [Kind.START, Kind.WAIT])
def test_another_order_on_one_rank_is_refused(kind):
    steps, run = lists("thread", ProcessGrid(data=2), 1)
    own = steps[1]
    indices = [index for index, op in enumerate(own) if op.kind is kind]
    first, second = indices[-2:]  # of START: both complete behind the last BACKWARD, or the check before refuses
    if kind is Kind.START:
        own.insert(second, own.pop(first))
    else:
        own[first], own[second] = own[second], own[first]
    with pytest.raises(ScheduleError, match=rf"rank \d: {kind.name}.* meets {kind.name}.*the same order"):
        prove(steps, run)


def test_a_direction_before_the_wait_is_refused():
    steps, run = lists("thread", ProcessGrid(data=2), 1)
    for own in steps:  # no AGREE says so before
        own.pop(where(own, Kind.AGREE))
        own.append(own.pop(where(own, Kind.WAIT)))
    with pytest.raises(ScheduleError, match=r"DIRECTION\(.*\) comes before WAIT"):
        prove(steps, run)


# --- what cannot be had ---------------------------------------------------------------------------------------------


@cases(
    "keys, match",
    ({"overlap": "always"}, r"communication.overlap = 'always'; choose one of none, thread, poll"),
    ({"overlap": "poll"}, r"'auto': it has no steps .* choose the algorithm ring"),
    ({"overlap": "poll", "algorithm": "native"}, r"'native': it has no steps"),
)
def test_a_recipe_that_cannot_be_had_is_refused(keys, match):
    with pytest.raises(ConfigurationError, match=match):
        recipe_of({f"communication.{key}": value for key, value in keys.items()})


@cases(
    "setting, match",
    ("parallel.strategy=parameter_server", "set parallel.strategy to one of allreduce, zero1"),
    ("run.device=gpu", "run.device = 'gpu' is not built"),
    ("run.logical_shards=4", "set communication.overlap = 'none'"),
)
def test_other_strategies_and_devices_refuse(setting, match):
    with pytest.raises(ConfigurationError, match=match) as caught:
        recipes.load(None, ["communication.overlap=thread", setting])
    assert caught.value.exit_code == 78 and "communication.overlap = 'thread'" in str(caught.value)


def test_a_library_without_threads_is_refused(monkeypatch):
    monkeypatch.setattr(ThreadCommunicator, "supports", lambda self, feature: False)
    with pytest.raises(MissingCapabilityError, match=r"MPI_THREAD_MULTIPLE") as caught:
        run_threads(2, lambda comm: Run(comm, "thread", "ring"))
    assert caught.value.exit_code == 69


def test_gradients_of_a_range_are_those_that_travel():
    """START takes the range itself, no copy: what is waited for is in the store."""

    def body(comm):
        with Run(comm, "thread", "ring") as run:
            part = Range(3, 103)
            run.exchange.gradients.array[...] = comm.rank + 1
            run.exchange.start(Operation(Kind.START, range=part))
            run.exchange.wait(Operation(Kind.WAIT, range=part))
            inside = run.exchange.gradients.range(part)
            return bool((inside == 6).all()) and bool((run.exchange.gradients.array[103:] == comm.rank + 1).all())

    assert run_threads(3, body) == [True] * 3


def test_the_summary_tells_what_was_exposed():
    def rank(*steps):
        made = StepStatistics()
        for exposed_s, total_s in steps:
            made.add(1.0, 0.0, reductions_exposed_s=exposed_s, reductions_s=total_s)
        return made.measured()

    found = overlap_figures([rank((9.0, 9.0), (0.5, 2.0), (0.25, 2.0)), rank((9.0, 9.0), (0.5, 1.0), (0.75, 1.0))])
    assert found == {"reductions_s": 1.5, "reductions_exposed_s": 0.5, "communication_hidden_share": 1 - 0.5 / 1.5}
    polled = overlap_figures([rank((9.0, math.nan), (0.5, math.nan))])
    assert polled == {"reductions_s": None, "reductions_exposed_s": 0.5, "communication_hidden_share": None}
    assert overlap_figures([rank()]) == dict.fromkeys(found)
