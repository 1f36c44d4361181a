"""`hpcdist bench pipeline`: schedules take turns on the same batches, and every operation of every step is timed.

From the times of a case come three bubbles:

    measured     what the rank with the longest span waits in receives, over that span: from its first pass to its last
    simulated    `simulate` with the seconds of F and B, or I and W, of each unit, as measured in the same steps (the
                 mean of a step, then the median over the steps), and those of a message
    replayed     `simulate` with the seconds of every single pass of the same step: what is left is not noise of the
                 machine, but what the simulator does not know

and the overhead: what of that span is neither computing nor waiting. All are medians over the steps.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hpcdist.bench import pipeline_runs as runs
from hpcdist.bench.pipeline_file import Measured
from hpcdist.bench.pipeline_plan import Case, Wanted, cases
from hpcdist.bench.pipeline_runs import RECEIVES, Run, Sample
from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.pipeline.measured import PassSeconds
from hpcdist.strategies.schedule.generate import registry
from hpcdist.strategies.schedule.operations import COMPUTE, Kind, Operation
from hpcdist.strategies.schedule.placement import StagePlacement
from hpcdist.strategies.schedule.simulate import lists
from hpcdist.strategies.schedule.simulate import program as programs
from hpcdist.strategies.schedule.simulate import timeline as simulate_timeline
from hpcdist.strategies.schedule.simulate.costs import LinkCost, StepCosts
from hpcdist.strategies.schedule.simulate.program import Program

Say = Callable[[str], None]
Keep = Callable[[Sequence[Measured]], None]
SAME: Final = 1e-3  # relative: losses of all schedules on the same batches
_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def run(comm: Communicator, wanted: Wanted, done: Sequence[str], keep: Keep, say: Say) -> None:
    """Measure the cases that are not ``done``, by id; ``keep`` and ``say`` are called on rank 0. Collective."""
    todo = [case for case in cases(wanted)[0] if case.id not in done]
    if not todo:
        return
    seconds = runs.unit_seconds(comm, wanted.shape)
    message_s = runs.message_s(comm, wanted.shape)
    for microbatches in dict.fromkeys(case.microbatches for case in todo):
        together = [case for case in todo if case.microbatches == microbatches]
        if comm.rank == 0:
            say(f"{microbatches} micro-batches: {', '.join(case.schedule for case in together)}")
        with _collected():
            found = _measure(comm, wanted, together, seconds, message_s)
        if comm.rank == 0:
            keep(found)


@contextmanager
def _collected() -> Iterator[None]:
    """Collect garbage at the end, and none meanwhile: it would hit one of those that take turns."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
        gc.collect()  # the models that have been measured


@dataclass(frozen=True)
class _Raw:
    """What the ranks bring together of one case: operations and samples, by rank."""

    steps: list[list[Operation]]
    samples: list[list[Sample]]


def _measure(
    comm: Communicator, wanted: Wanted, together: Sequence[Case], seconds: Sequence[PassSeconds], message_s: float
) -> list[Measured]:
    """Measure cases of as many micro-batches, and the model on one rank, in turns. Collective."""
    model = runs.build_model(wanted.shape)
    microbatches = together[0].microbatches
    places = [runs.place(case, seconds) for case in together]
    alone = Run(runs.solo(), model, "sequential", microbatches, StagePlacement((range(len(model.stages)),), (0,)))
    crews = [Run(comm, model, case.schedule, microbatches, at) for case, at in zip(together, places, strict=True)]
    every = [alone, *crews]
    draw, order = np.random.default_rng([wanted.seed, 1]), np.random.default_rng([wanted.seed, 2])
    kept: list[list[Sample]] = [[] for _ in every]
    shape = wanted.shape
    for number in range(wanted.warmup + wanted.steps):
        size = (microbatches, shape.samples, shape.context + 1)
        tokens = draw.integers(0, shape.vocabulary, size).astype(np.uint8)
        taken = {int(turn): every[turn].step(tokens, comm) for turn in order.permutation(len(every))}
        _check_losses([taken[turn].loss for turn in range(len(every))], ["one rank", *(c.schedule for c in together)])
        for turn, sample in taken.items():
            if number >= wanted.warmup:
                kept[turn].append(sample)
    one_clock = comm.nodes().count == 1
    ideal_s = np.array(comm.allgather_object([sample.step_s for sample in kept[0]])).T  # (steps, ranks)
    found = []
    for case, at, crew, samples in zip(together, places, crews, kept[1:], strict=True):
        raw = _Raw(*map(list, zip(*comm.allgather_object((crew.operations, samples)), strict=True)))
        if comm.rank == 0:
            found.append(_measured(case, at, raw, ideal_s, message_s, one_clock=one_clock))
    return found


def _check_losses(losses: Sequence[float], names: Sequence[str]) -> None:
    for loss, name in zip(losses, names, strict=True):
        if not abs(loss - losses[0]) <= SAME * abs(losses[0]):
            raise NonFiniteError(
                f"{name} has loss {loss}, {names[0]} has {losses[0]} on the same batches: not the same run"
            )


def _measured(
    case: Case, placement: StagePlacement, raw: _Raw, ideal_s: np.ndarray, message_s: float, *, one_clock: bool
) -> Measured:
    """Return all that is told of a case (local)."""
    costs = _costs(placement, raw, message_s)
    program = lists.program(raw.steps, placement, costs)
    timeline = simulate_timeline.StepTimeline(program, programs.run(program))
    count = len(raw.samples[0])
    shares = np.array(
        [
            [_shares(steps, one[step]) for steps, one in zip(raw.steps, raw.samples, strict=True)]
            for step in range(count)
        ]
    )
    span_s, busy_s, idle_s = (shares[:, :, part] for part in range(3))  # (steps, ranks)
    begins_s = np.array([[one[step].begin_s for one in raw.samples] for step in range(count)])
    first_s = np.broadcast_to(begins_s.min(axis=1, keepdims=True) if one_clock else begins_s, begins_s.shape)
    return Measured(
        case=case,
        placement=placement,
        operations=raw.steps,
        step_s=np.array([[one[step].step_s for one in raw.samples] for step in range(count)]),
        ideal_s=ideal_s,
        span_s=span_s,
        busy_s=busy_s,
        idle_s=idle_s,
        spans_s=[
            np.array([one.spans_s for one in samples]) - first_s[:, [rank], None]
            for rank, samples in enumerate(raw.samples)
        ],
        replayed=np.array([_replayed(program, raw, step) for step in range(count)]),
        simulated=timeline.bubble,
        simulated_by_rank=np.array([stage.bubble for stage in timeline.stages]),
        simulated_makespan=timeline.makespan_rate,
        closed=_closed(case, costs),
        unit_s=np.array([costs.forward_s, costs.backward_s, costs.input_s, costs.weight_s]).T,
        message_s=message_s,
    )


def _shares(steps: Sequence[Operation], sample: Sample) -> tuple[float, float, float]:
    """Return span, computing and waiting of one rank in one step."""
    begin_s, end_s = sample.spans_s.T
    computes = np.array([op.kind in COMPUTE for op in steps])
    first_s, last_s = begin_s[computes].min(), end_s[computes].max()
    waits = np.array([op.kind in RECEIVES for op in steps]) & (begin_s >= first_s) & (end_s <= last_s)
    took_s = end_s - begin_s
    return float(last_s - first_s), float(took_s[computes].sum()), float(took_s[waits].sum())


def _costs(placement: StagePlacement, raw: _Raw, message_s: float) -> StepCosts:
    """Return the seconds of each unit: of a step the mean over its micro-batches, of these the median."""
    found = np.zeros((len(_KINDS), placement.units.stop))
    for steps, samples in zip(raw.steps, raw.samples, strict=True):
        took_s = np.array([one.spans_s[:, 1] - one.spans_s[:, 0] for one in samples])  # (steps, operations)
        for number, kind in enumerate(_KINDS):
            for unit in {op.unit for op in steps if op.kind is kind}:
                at = [index for index, op in enumerate(steps) if (op.kind, op.unit) == (kind, unit)]
                found[number, unit] = np.median(took_s[:, at].mean(axis=1))
    forward_s, backward_s, input_s, weight_s = found.tolist()
    return StepCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        input_s=input_s,
        weight_s=weight_s,
        link=LinkCost(latency_s=message_s),
    )


def _replayed(program: Program, raw: _Raw, step: int) -> float:
    """Return the bubble that the simulator finds with the times of this step's own passes."""
    took_s = np.concatenate([one[step].spans_s[:, 1] - one[step].spans_s[:, 0] for one in raw.samples])
    again = replace(program, seconds=np.where(program.work >= 0, took_s, 0.0))
    return simulate_timeline.StepTimeline(again, programs.run(again)).bubble


def _closed(case: Case, costs: StepCosts) -> float | None:
    """Return the closed form for stages that are as the mean of these."""
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
