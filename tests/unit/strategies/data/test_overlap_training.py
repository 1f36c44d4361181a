"""ZeRO whose exchanges overlap the computation: the same bits, bounded memory, counted gathers, rejections."""

import math
from functools import cache, partial

import numpy as np
import pytest

from harness.marks import cases, on_threads
from harness.rank_run import RankRun, text
from harness.trainings import assert_rejected
from hpcdist import collectives
from hpcdist.collectives import progress
from hpcdist.comm.record.timing import count_traffic
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, ScheduleError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.background import PrefetchCounts
from hpcdist.strategies.core.operations import Kind, Operation
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.data.config import ZeroConfig
from hpcdist.strategies.schedule.verify.proof import verify
from hpcdist.training.recipe import recipe as recipes
from hpcdist.training.run.loop import StepStatistics
from hpcdist.training.run.summary import prefetch_figures

SAMPLES, STEPS, LAYERS = 7, 2, 3
KINDS = ("thread", "poll")
PREFETCHED = [(3, 0), (3, 1), (3, 2), (3, 9)]  # stage, units ahead
CASES = [(1, 0), (2, 0), *PREFETCHED]
POLLED_RING = ("communication.overlap=poll", "communication.algorithm=ring")


class Run(RankRun):
    """A run of a tiny gpt on one rank. Further keys are keys of ZeRO."""

    def __init__(
        self,
        comm,
        stage,
        overlap="none",
        algorithm="ring",
        prefetch=0,
        *,
        microbatches=1,
        schedule="auto",
        tied=False,
        pipeline=1,
        **zero,
    ):
        make = partial(catalogue.zero, stage=stage, config=ZeroConfig(prefetch=prefetch, **zero))
        parallel = ParallelConfig(pipeline=pipeline, microbatches=microbatches, schedule=schedule)
        config = ModelConfig(layers=LAYERS, hidden=16, heads=2, tied=tied)
        context = {"algorithm": algorithm, "overlap": overlap, "total_steps": STEPS}
        super().__init__(comm, make, config=config, dtype="float32", parallel=parallel, **context)

    def train(self, data):
        """Return the losses of steps, of the evaluations after them, and the local weights."""
        losses, evaluated = [], []
        for number, samples in enumerate(data):
            losses.append(self.step(samples, number))
            evaluated.append(self.executor.evaluate(samples[:2, :-1], samples[:2, 1:]))
        return losses, evaluated, self.exchange.parameters.array.tobytes()


def train_on_threads(size, data, *args, **keys):
    def body(comm):
        with Run(comm, *args, **keys) as run:
            return run.train(data)

    return run_threads(size, body, 2 if "hierarchical" in args else None)


DATA = text(np.random.default_rng(11), STEPS, SAMPLES)


@cache
def plain(size, stage, algorithm="ring", **keys):
    """Return the result of a run without overlap."""
    return train_on_threads(size, DATA, stage, "none", algorithm, **keys)


@pytest.mark.parametrize(
    ("algorithm", "size"), [*((name, 4) for name in sorted(collectives.SHARDED)), ("ring", 1), ("ring", 2)]
)
@pytest.mark.parametrize(("stage", "prefetch"), [(1, 0), (2, 0), (3, 1)])
@pytest.mark.full_except("1-0-node_shared-4")
def test_zero_overlap_by_a_thread_has_the_same_bits(algorithm, stage, prefetch, size):
    assert train_on_threads(size, DATA, stage, "thread", algorithm, prefetch) == plain(size, stage, algorithm)


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize(("stage", "prefetch"), CASES)
@pytest.mark.full_except("2-0-poll")
def test_any_number_of_ranks_and_prefetches_has_the_same_bits(overlap, stage, prefetch, monkeypatch):
    monkeypatch.setattr(progress, "SEGMENT_BYTES", 512)  # several lanes
    for size in (2, 8) if overlap == "thread" else (2, 5):
        assert train_on_threads(size, DATA, stage, overlap, "ring", prefetch) == plain(size, stage)


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize("schedule", ["auto", "gpipe"])
@pytest.mark.parametrize(("stage", "prefetch"), [(1, 0), (2, 0), (3, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_zero_overlap_with_microbatches_has_the_same_bits(overlap, schedule, stage, prefetch, tied):
    keys = {"microbatches": 3, "schedule": schedule, "tied": tied}
    assert train_on_threads(2, DATA, stage, overlap, "ring", prefetch, **keys) == plain(2, stage, **keys)


@pytest.mark.parametrize("overlap", KINDS)
def test_pipeline_with_zero1_overlap_has_the_same_bits(overlap, rng):
    data, keys = text(rng, STEPS, SAMPLES), {"microbatches": 2, "pipeline": 2, "tied": True}

    def body(comm, overlap):
        with Run(comm, 1, overlap, **keys) as run:
            return [run.step(samples, 1) for samples in data], run.exchange.parameters.array.tobytes()

    assert run_threads(4, lambda comm: body(comm, overlap)) == run_threads(4, lambda comm: body(comm, "none"))


@pytest.mark.parametrize("overlap", KINDS)
def test_overlap_sends_the_same_messages(overlap, rng):
    data = text(rng, STEPS, SAMPLES)

    def body(comm, overlap, prefetch):
        with count_traffic(comm) as traffic, Run(comm, 3, overlap, "ring", prefetch) as run:
            before = traffic.sent_bytes
            run.step(data[0], 1)
            assert not traffic.unknown.keys() & {"iallreduce", "all_gather", "reduce_scatter"}
            return traffic.sent_bytes - before

    assert run_threads(3, lambda comm: body(comm, overlap, 2)) == run_threads(3, lambda comm: body(comm, "none", 0))


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize("prefetch", [1, 2])
@on_threads(2)
def test_prefetched_gathers_and_their_time_are_counted(comm, overlap, prefetch, rng):
    data = text(rng, STEPS, SAMPLES)
    with Run(comm, 3, overlap, "ring", prefetch) as run:
        behind = run.exchange.background
        assert behind is not None
        for number, samples in enumerate(data):
            run.step(samples, number)
            result = behind.fetched()
            assert result.hits + result.misses == 2 * len(run.model.stages) - 1, "each forward, and but the last back"
            assert 0 < result.exposed_s <= behind.taken()[0]
        run.executor.evaluate(data[0][:, :-1], data[0][:, 1:])
        after = behind.fetched()
        assert after.hits == after.misses == 0, "an evaluation gathers in turn"


def test_completed_prefetch_is_a_hit():
    """A gather that started long ago is complete. A gather that another rank has not begun is not."""

    def body(comm):
        with Run(comm, 3, "thread", "ring", 1) as run:
            behind, handlers = run.exchange.background, run.exchange.handlers
            assert behind is not None
            for late in (False, True):
                if late and comm.rank == 1:
                    comm.recv(np.zeros(1), 0)  # sent when rank 0 has looked
                handlers[Kind.START_GATHER](Operation(Kind.START_GATHER, unit=1))
                if not late:
                    behind.drain()
                    comm.barrier()
                elif comm.rank == 0:
                    assert not behind._in_flight[run.model.stages[1].layer].test()
                    behind._in_flight[run.model.stages[1].layer] = Watched(comm, behind, run)
                handlers[Kind.WAIT_GATHER](Operation(Kind.WAIT_GATHER, unit=1))
                handlers[Kind.FREE](Operation(Kind.FREE, unit=1))
            result = behind.fetched()
            return result.hits, result.misses

    hits = run_threads(2, body)
    assert hits[0] == (1, 1) and sum(hits[1]) == 2


class Watched:
    """A handle that lets the other rank continue only after a test found it incomplete."""

    def __init__(self, comm, behind, run):
        self.comm, self.inner = comm, behind._in_flight[run.model.stages[1].layer]

    def test(self):
        result = self.inner.test()
        self.comm.send(np.zeros(1), 1)
        return bool(result)

    def wait(self):
        self.inner.wait()


@pytest.mark.parametrize(("stage", "prefetch"), [(2, 0), (3, 0), (3, 1), (3, 3)])
@pytest.mark.parametrize("algorithm", ["ring", "node_shared"])
def test_memory_of_gathered_layers_is_bounded(algorithm, stage, prefetch, rng):
    """One computed gradient and two in flight; one used layer of parameters and ``prefetch`` more."""
    data = text(rng, STEPS, SAMPLES)

    def body(comm, overlap):
        with Run(comm, stage, overlap, algorithm, prefetch if overlap != "none" else 0) as run:
            run.train(data)
            return run.ledger.peak, max(part.size for part in run.context.ranges.values()) * 4

    for (without, layer), (behind, _) in zip(
        run_threads(2, lambda comm: body(comm, "none")), run_threads(2, lambda comm: body(comm, "thread")), strict=True
    ):
        more = {kind: behind[kind] - without[kind] for kind in ("parameters", "gradients")}
        assert more == {"parameters": prefetch * layer if stage == 3 else 0, "gradients": 2 * layer}


@pytest.mark.parametrize(("stage", "prefetch", "tied"), [(2, 0, True), (3, 1, False)])
def test_rank_without_samples_uses_shared_memory_like_others(stage, prefetch, tied, rng):
    data = text(rng, STEPS, SAMPLES)[:2, :2]  # of the three ranks the last has none
    behind = train_on_threads(3, data, stage, "thread", "node_shared", prefetch, tied=tied)
    assert behind == train_on_threads(3, data, stage, "none", "node_shared", tied=tied)


@pytest.mark.parametrize("overlap", KINDS)
@pytest.mark.parametrize(("stage", "prefetch"), CASES)
def test_overlapped_zero_list_is_proven(overlap, stage, prefetch):
    def body(comm, tied, schedule):
        with Run(comm, stage, overlap, "ring", prefetch, microbatches=3, tied=tied, schedule=schedule) as run:
            return run

    for tied, schedule in ((False, "auto"), (True, "auto"), (True, "gpipe")):
        runs = run_threads(2, lambda comm, tied=tied, schedule=schedule: body(comm, tied, schedule))
        proof = verify(
            [run.operations for run in runs],
            grid=runs[0].grid,
            units=dict(enumerate(runs[0].model.layout.units.values())),
            microbatches=3,
            needs=runs[0].model.needs,
            accumulates=stage == 1,
        )
        if stage == 3 and not tied:
            assert proof.gathered == (1 + min(prefetch, len(runs[0].model.stages) - 1),)
        kinds = [op.kind for op in runs[0].operations]
        assert Kind.REDUCE not in kinds and kinds.count(Kind.START) == kinds.count(Kind.WAIT) > 0
        assert (Kind.START_GATHER in kinds) == (prefetch > 0)
        assert (Kind.POLL in kinds) == (overlap == "poll")


@pytest.mark.parametrize("overlap", KINDS)
@on_threads(2)
def test_non_finite_value_with_overlap_updates_nothing(comm, overlap, rng):
    data = text(rng, STEPS, SAMPLES)
    with Run(comm, 3, overlap, "ring", 1) as run:
        if comm.rank == 1:
            run.exchange.parameters.array[...] = np.nan
        why = run.failure(data[0], 17)
        assert "step 17" in why and "rank 1: parameter" in why


@on_threads(2)
def test_different_branch_on_one_rank_is_named(comm, rng):
    data = text(rng, STEPS, SAMPLES)
    with Run(comm, 3, "thread", "ring", 1) as run:
        run.step(data[0], 1)
        index = next(index for index, op in enumerate(run.operations) if op.kind is Kind.START_GATHER)
        other = [*run.operations[:index], *run.operations[index + 1 :]]
        with pytest.raises(ScheduleError, match=r"got START_GATHER\(0, 1\) of unit 1, expected .* of unit 0"):
            run.step(data[1], 2, other)


@pytest.mark.parametrize("degree", [1, 2])
def test_smaller_degrees_with_overlap_are_rejected(degree):
    with pytest.raises(ConfigurationError, match=r"'thread' is not supported .* over all 4 data ranks"):
        run_threads(4, lambda comm: Run(comm, 1, "thread", optimizer=degree))


@cases(
    "settings, match",
    (["parallel.strategy=zero3", "zero.prefetch=1"], r"zero.prefetch = 1 with communication.overlap = 'none'"),
    (["parallel.strategy=zero3", "zero.prefetch=-1"], r"zero.prefetch = -1; it must be at least 0. Meaning: Number"),
    (
        ["parallel.strategy=zero2", "zero.prefetch=1", "communication.overlap=thread"],
        r"zero.prefetch = 1 with parallel.strategy = 'zero2': parameters are not sharded",
    ),
    (["parallel.strategy=zero1", "communication.overlap=poll"], r"'auto': it cannot be polled"),
    (
        [*POLLED_RING, "parallel.strategy=zero2", "precision.mode=bfloat16"],
        r"communication.overlap = 'poll' with precision.mode = 'bfloat16' is not built",
    ),
    (["parallel.strategy=zero1", "communication.bucket_bytes=9"], r"bucket_bytes = 9 has no effect"),
)
def test_unsupported_overlap_recipes_are_rejected(settings, match):
    assert_rejected(settings, match)


def test_supported_overlap_recipes_are_accepted():
    for strategy in ("zero1", "zero2", "zero3"):
        result = recipes.load(None, [f"parallel.strategy={strategy}", "communication.overlap=thread"]).recipe
        assert result.communication.overlap == "thread" and not math.isnan(result.zero.prefetch)


def test_summary_reports_prefetched_gathers():
    def rank(*steps):
        made = StepStatistics()
        for fetched in steps:
            made.add(1.0, 0.0, hits=fetched.hits, misses=fetched.misses, fetches_exposed_s=fetched.exposed_s)
        return {**made.measured(), "prefetches": True}

    ranks = [
        rank(PrefetchCounts(0, 9, 9.0), PrefetchCounts(4, 2, 0.5), PrefetchCounts(6, 0, 0.25)),
        rank(PrefetchCounts(5, 1, 0.75)),
    ]
    result = prefetch_figures(ranks)  # the first step is left out where there is another
    assert result == {"prefetch_hits": 5.0, "prefetch_misses": 1.0, "prefetch_exposed_s": 0.5}
    assert prefetch_figures([{**ranks[0], "prefetches": False}]) == dict.fromkeys(result)
