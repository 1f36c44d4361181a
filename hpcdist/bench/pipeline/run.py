"""Run a benchmark of pipelines: schedules take turns on the same batches, and every operation is timed.

Each schedule trains a model of its own, whose executor records the begin and end of each operation. Beside them the
same model is trained on one rank alone, by every rank at the same time: what so many ranks reach without waiting.
They share caches and memory as the ranks of the pipeline do. From the times of a case come three bubbles:

    measured     what the rank with the longest span waits in receives, over that span: from its first pass to its last
    simulated    the simulator with the seconds of F and B, or I and W, of each unit, as measured in the same steps (the
                 mean of a step, then the median over the steps), and those of a message
    replayed     the simulator with the seconds of every single pass of the same step: the difference is no noise of the
                 machine, but what the simulator does not model

and the overhead: the part of that span that is neither computing nor waiting. All are medians over the steps.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.pipeline.request import PipelineCase, PipelineRequest, PipelineShape, cases
from hpcdist.bench.pipeline.results import MeasuredCase
from hpcdist.bench.timing import without_collection
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import NonFiniteError
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import build_executor, operations
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.exchange import Exchange
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.pipeline.costs import PassSeconds, agree, measure
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.schedule.executor import StepResult
from hpcdist.strategies.schedule.generate import registry
from hpcdist.strategies.schedule.generate.registry import SCHEDULES
from hpcdist.strategies.schedule.operations import COMPUTE, Kind, Operation, StagePlacement
from hpcdist.strategies.schedule.simulate import program as programs
from hpcdist.strategies.schedule.simulate import timeline as simulate_timeline
from hpcdist.strategies.schedule.simulate.program import LinkCost, Program, StepCosts
from hpcdist.strategies.schedule.step import Handler, StepObserver

RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
_TAG = 7002


class OperationTimer(StepObserver):
    """Observer that keeps when each operation of the last step began and ended, by `time.perf_counter`."""

    def __init__(self, exchange: Exchange) -> None:
        self._array = exchange.parameters.array
        self.timed: list[tuple[float, float]] = []

    def around(self, kind: Kind, handler: Handler) -> Handler:
        """Return ``handler`` with a look at the clock before and behind; what a GPU computes is waited for."""
        clock, array, on_device = time.perf_counter, self._array, kind in COMPUTE

        def timed(op: Operation) -> None:
            begin_s = clock()
            handler(op)
            if on_device:
                backend.synchronise(array)
            self.timed.append((begin_s, clock()))

        return timed


@dataclass(frozen=True)
class PipelineSample:
    """One step on one rank: from a barrier to its end, and (operations, begin and end) on the clock of the rank."""

    begin_s: float
    step_s: float
    spans_s: np.ndarray
    loss: float


class TimedTraining:
    """Model in training under the plain allreduce, whose operations are timed. Building one is collective.

    ``initial`` are its first parameters, on the host; None: those of ``seed``, or that it has itself.
    """

    def __init__(
        self, context: RankContext, parallel: ParallelConfig, initial: FlatStore | None = None, seed: int = 0
    ) -> None:
        exchange = catalogue.allreduce(context)
        self._timer, self._number = OperationTimer(exchange), 0
        self._executor = executor = build_executor(context, exchange, observers=(self._timer,))
        self.operations = operations(context, exchange, executor.copies, parallel)
        if initial is None:
            initial = FlatStore(context.model.layout, context.model.dtype)
            context.model.initialise(initial, seed)
        exchange.load_initial(initial)
        executor.copies.refresh()

    def timed_step(
        self, batches: Sequence[tuple[np.ndarray, np.ndarray]], samples: int, together: Communicator
    ) -> tuple[StepResult, float, float, float]:
        """Make a step from a barrier of ``together`` on; return it, its begin, and its seconds by clock and CPU."""
        self._number += 1
        self._timer.timed.clear()
        together.barrier()
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        done = self._executor.run(self.operations, batches, samples, self._number, np.zeros(1))
        end_s = time.perf_counter()
        return done, begin_s, end_s - begin_s, time.process_time() - cpu_s


class PipelineRun(TimedTraining):
    """Model in training on the pipeline of ``comm``. Building one is collective."""

    def __init__(
        self, comm: Communicator, model: Model, schedule: str, microbatches: int, placement: StagePlacement
    ) -> None:
        context = RankContext(
            world=comm,
            data=solo(),
            pipeline=comm,
            model=model,
            optimizer=OptimizerConfig(learning_rate=1e-4),
            total_steps=1000,
            placement=placement,
        )
        chunks = len(placement.chunks) // comm.size if schedule == "interleaved" else 1
        parallel = ParallelConfig(pipeline=comm.size, schedule=schedule, microbatches=microbatches, chunks=chunks)
        super().__init__(context, parallel, seed=1)

    def step(self, tokens: np.ndarray, together: Communicator) -> PipelineSample:
        """Make a step on ``tokens`` (micro-batches, samples, context + 1).

        Collective over ``together``, from whose barrier on it is timed.
        """
        batches = [(part[:, :-1], part[:, 1:]) for part in tokens]
        done, begin_s, step_s, _ = self.timed_step(batches, tokens.shape[0] * tokens.shape[1], together)
        return PipelineSample(begin_s, step_s, np.array(self._timer.timed), done.loss)


def build_model(shape: PipelineShape) -> Model:
    """Return the model (local)."""
    config = ModelConfig(layers=shape.layers, hidden=shape.hidden, heads=shape.heads, vocabulary=shape.vocabulary)
    return models.build(config, "float32", context=shape.context)


def unit_seconds(comm: Communicator, shape: PipelineShape) -> tuple[PassSeconds, ...]:
    """Return the seconds of each unit for a micro-batch, measured on all ranks at once. Collective."""
    model = build_model(shape)
    comm.barrier()
    return agree(comm, measure(model, shape.samples))


def place_units(case: PipelineCase, seconds: Sequence[PassSeconds]) -> StagePlacement:
    """Return the placement in which the slowest rank is as fast as can be (local)."""
    row = SCHEDULES[case.schedule]
    count = case.ranks * case.chunks
    empty = row.place([range(unit, unit + 1) for unit in range(count)], case.ranks)
    whole = [unit_s.forward + (unit_s.input + unit_s.weight if row.splits else unit_s.backward) for unit_s in seconds]
    cut = partition(whole, empty.ranks, StageDevices.alike(case.ranks), None)
    assert cut is not None, "there are no limits of memory"
    return row.place(cut.chunks, case.ranks)


def message_s(comm: Communicator, shape: PipelineShape, turns: int = 100) -> float:
    """Return how long a message takes from rank 0 to rank 1, with both at it: half of there and back. Collective.

    It is the first decile: a rank that is interrupted would be seen as a slow message.
    """
    values = np.zeros(shape.samples * shape.context * shape.hidden, np.float32)
    taken = []
    for _ in range(turns):
        comm.barrier()
        begin_s = time.perf_counter()
        if comm.rank == 0:
            comm.send(values, 1, _TAG)
            comm.recv(values, 1, _TAG)
        elif comm.rank == 1:
            comm.recv(values, 0, _TAG)
            comm.send(values, 0, _TAG)
        taken.append((time.perf_counter() - begin_s) / 2)
    seconds: float = comm.broadcast_object(float(np.percentile(taken, 10)))
    return seconds


Say = Callable[[str], None]
Keep = Callable[[Sequence[MeasuredCase]], None]
SAME: Final = 1e-3  # relative: losses of all schedules on the same batches
_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def run(comm: Communicator, wanted: PipelineRequest, done: Sequence[str], keep: Keep, say: Say) -> None:
    """Measure the cases that are not ``done``, by id; ``keep`` and ``say`` are called on rank 0. Collective."""
    todo = [case for case in cases(wanted)[0] if case.id not in done]
    if not todo:
        return
    seconds = unit_seconds(comm, wanted.shape)
    link_s = message_s(comm, wanted.shape)
    for microbatches in dict.fromkeys(case.microbatches for case in todo):
        together = [case for case in todo if case.microbatches == microbatches]
        if comm.rank == 0:
            say(f"{microbatches} micro-batches: {', '.join(case.schedule for case in together)}")
        with without_collection():
            measured = _measure(comm, wanted, together, seconds, link_s)
        gc.collect()  # the models that have been measured
        if comm.rank == 0:
            keep(measured)


@dataclass(frozen=True)
class _Raw:
    """Record that the ranks bring together of one case: operations and samples, by rank."""

    steps: list[list[Operation]]
    samples: list[list[PipelineSample]]


def _measure(
    comm: Communicator,
    wanted: PipelineRequest,
    together: Sequence[PipelineCase],
    seconds: Sequence[PassSeconds],
    message_s: float,
) -> list[MeasuredCase]:
    """Measure cases of as many micro-batches, and the model on one rank, in turns. Collective."""
    model = build_model(wanted.shape)
    microbatches = together[0].microbatches
    places = [place_units(case, seconds) for case in together]
    alone = PipelineRun(solo(), model, "sequential", microbatches, StagePlacement((range(len(model.stages)),), (0,)))
    crews = [
        PipelineRun(comm, model, case.schedule, microbatches, at) for case, at in zip(together, places, strict=True)
    ]
    every = [alone, *crews]
    draw, order = np.random.default_rng([wanted.seed, 1]), np.random.default_rng([wanted.seed, 2])
    recorded: list[list[PipelineSample]] = [[] for _ in every]
    shape = wanted.shape
    for number in range(wanted.warmup + wanted.steps):
        size = (microbatches, shape.samples, shape.context + 1)
        tokens = draw.integers(0, shape.vocabulary, size).astype(np.uint8)
        taken = {int(turn): every[turn].step(tokens, comm) for turn in order.permutation(len(every))}
        _check_losses([taken[turn].loss for turn in range(len(every))], ["one rank", *(c.schedule for c in together)])
        for turn, sample in taken.items():
            if number >= wanted.warmup:
                recorded[turn].append(sample)
    one_clock = comm.nodes().count == 1
    ideal_s = np.array(comm.allgather_object([sample.step_s for sample in recorded[0]])).T  # (steps, ranks)
    measured = []
    for case, at, crew, samples in zip(together, places, crews, recorded[1:], strict=True):
        raw = _Raw(*map(list, zip(*comm.allgather_object((crew.operations, samples)), strict=True)))
        if comm.rank == 0:
            measured.append(_measured(case, at, raw, ideal_s, message_s, one_clock=one_clock))
    return measured


def _check_losses(losses: Sequence[float], names: Sequence[str]) -> None:
    for loss, name in zip(losses, names, strict=True):
        if not abs(loss - losses[0]) <= SAME * abs(losses[0]):
            raise NonFiniteError(
                f"{name} has loss {loss}, {names[0]} has {losses[0]} on the same batches: not the same run"
            )


def _measured(
    case: PipelineCase, placement: StagePlacement, raw: _Raw, ideal_s: np.ndarray, message_s: float, *, one_clock: bool
) -> MeasuredCase:
    """Return the measurements of a case (local)."""
    costs = _costs(placement, raw, message_s)
    timeline = simulate_timeline.simulate_lists(raw.steps, placement, costs)
    count = len(raw.samples[0])
    shares = np.array(
        [
            [_shares(steps, of_rank[step]) for steps, of_rank in zip(raw.steps, raw.samples, strict=True)]
            for step in range(count)
        ]
    )
    span_s, busy_s, idle_s = (shares[:, :, part] for part in range(3))  # (steps, ranks)
    begins_s = np.array([[of_rank[step].begin_s for of_rank in raw.samples] for step in range(count)])
    first_s = np.broadcast_to(begins_s.min(axis=1, keepdims=True) if one_clock else begins_s, begins_s.shape)
    return MeasuredCase(
        case=case,
        placement=placement,
        operations=raw.steps,
        step_s=np.array([[of_rank[step].step_s for of_rank in raw.samples] for step in range(count)]),
        ideal_s=ideal_s,
        span_s=span_s,
        busy_s=busy_s,
        idle_s=idle_s,
        spans_s=[
            np.array([sample.spans_s for sample in samples]) - first_s[:, [rank], None]
            for rank, samples in enumerate(raw.samples)
        ],
        replayed=np.array([_replayed(timeline.program, raw, step) for step in range(count)]),
        simulated=timeline.bubble,
        simulated_by_rank=np.array([stage.bubble for stage in timeline.stages]),
        simulated_makespan=timeline.makespan_rate,
        closed=_closed(case, costs),
        unit_s=np.array([costs.forward_s, costs.backward_s, costs.input_s, costs.weight_s]).T,
        message_s=message_s,
    )


def _shares(steps: Sequence[Operation], sample: PipelineSample) -> tuple[float, float, float]:
    """Return span, computing and waiting of one rank in one step."""
    begin_s, end_s = sample.spans_s.T
    computes = np.array([op.kind in COMPUTE for op in steps])
    first_s, last_s = begin_s[computes].min(), end_s[computes].max()
    waits = np.array([op.kind in RECEIVES for op in steps]) & (begin_s >= first_s) & (end_s <= last_s)
    took_s = end_s - begin_s
    return float(last_s - first_s), float(took_s[computes].sum()), float(took_s[waits].sum())


def _costs(placement: StagePlacement, raw: _Raw, message_s: float) -> StepCosts:
    """Return the seconds of each unit: of a step the mean over its micro-batches, of these the median."""
    unit_s = np.zeros((len(_KINDS), placement.units.stop))
    for steps, samples in zip(raw.steps, raw.samples, strict=True):
        took_s = np.array([sample.spans_s[:, 1] - sample.spans_s[:, 0] for sample in samples])  # (steps, operations)
        for number, kind in enumerate(_KINDS):
            for unit in {op.unit for op in steps if op.kind is kind}:
                at = [index for index, op in enumerate(steps) if (op.kind, op.unit) == (kind, unit)]
                unit_s[number, unit] = np.median(took_s[:, at].mean(axis=1))
    forward_s, backward_s, input_s, weight_s = unit_s.tolist()
    return StepCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        input_s=input_s,
        weight_s=weight_s,
        link=LinkCost(latency_s=message_s),
    )


def _replayed(program: Program, raw: _Raw, step: int) -> float:
    """Return the bubble that the simulator finds with the times of this step's own passes."""
    took_s = np.concatenate([of_rank[step].spans_s[:, 1] - of_rank[step].spans_s[:, 0] for of_rank in raw.samples])
    again = replace(program, seconds=np.where(program.work >= 0, took_s, 0.0))
    return simulate_timeline.StepTimeline(again, programs.run(again)).bubble


def _closed(case: PipelineCase, costs: StepCosts) -> float | None:
    """Return the bubble in closed form, for stages that are alike: with the mean of these costs."""
    forward_s, joint_s, input_s, weight_s = (
        sum(row) for row in (costs.forward_s, costs.backward_s, costs.input_s, costs.weight_s)
    )
    if not input_s:
        input_s = weight_s = joint_s / 2
    return registry.bubble(
        case.schedule,
        case.ranks,
        case.microbatches,
        chunks=case.chunks,
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
    )
