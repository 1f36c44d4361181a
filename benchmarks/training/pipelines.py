"""Bubbles of pipeline schedules: measured, simulated and in closed form, with their speed.

    python -m benchmarks pipelines
    python -m benchmarks pipelines --only 1f1b zb-h1 --microbatches 8 16 -o pipelines.h5 --plot pipelines.png

Each schedule trains a copy of one GPT on the ranks of one pipeline, and every rank also trains the GPT alone ("one
rank"). All of them alternate on the same batches and must have the same loss. Every operation is timed. The stages are
balanced with the measured pass times of the model's layers.

The span of a rank lasts from its first pass to the end of its last pass. The table is about the rank with the longest
span in each step, and has medians over the steps:

    measured     share of the span in which the rank waits for a message
    simulated    the same share in the simulator, with the measured times of each layer's passes and of a message
    replayed     the same share in the simulator, with the times of every single pass of the step. The difference to
                 "measured" comes from effects that the simulator does not model
    closed form  bubble of equal stages and messages without cost, where a formula exists
    overhead     share of the span that is neither computing nor waiting
    x ideal      step time relative to ranks that do the same work without a pipeline: below 1 is faster
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import models
from hpcdist.bench.timing import TimedTraining, without_collection
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.start import Session
from hpcdist.comm.threads.communicator import solo
from hpcdist.errors import ConfigurationError, UsageError
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.optim.config import OptimizerConfig
from hpcdist.reporting.plotting import drawing
from hpcdist.reporting.table import MISSING, aligned
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.operations import COMPUTE, Kind, Operation, StagePlacement
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.costs import PassSeconds, agree
from hpcdist.strategies.pipeline.costs import measure as pass_seconds
from hpcdist.strategies.pipeline.partition import StageDevices, partition
from hpcdist.strategies.schedule import registry
from hpcdist.strategies.schedule import simulated_program as programs
from hpcdist.strategies.schedule.registry import SCHEDULES, check_schedule
from hpcdist.strategies.schedule.simulated_program import LinkCost, StepCosts
from hpcdist.strategies.schedule.timeline import StepTimeline, simulate_lists

SCHEMA, RANKS, COMMITTED = "hpcdist-benchmark-pipelines", 2, "training/2026-11-30-pipelines.h5"
SMALL = {"microbatches": [8], "steps": 6, "only": ["1f1b", "zb-h1"]}

NAMES: Final = tuple(name for name, schedule in SCHEDULES.items() if schedule.pipelines)
SIZES: Final = {"layers": 8, "hidden": 256, "context": 128, "samples": 1}  # samples: of a micro-batch
OPTIONS: Final = {**SIZES, "microbatches": [4, 8, 16], "chunks": 2, "steps": 12, "only": NAMES}
ONE_RANK: Final = "one rank"
WARM_UP: Final = 2
AGREEMENT: Final = 1e-3  # relative difference of the losses on the same batch
VOCABULARY: Final = 256
TURNS: Final = 100  # messages that measure the time of one message
RECEIVES: Final = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
PASSES: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_TAG: Final = 7002
Spans = np.ndarray  # begin and end of operations, of shape (steps, operations, 2), in seconds


class Contender:
    """A GPT in training on the pipeline of ``comm``. Building it is collective."""

    def __init__(self, comm: Communicator, model: Model, schedule: str, microbatches: int, at: StagePlacement) -> None:
        self.schedule, self.microbatches, self.placement = schedule, microbatches, at
        context = RankContext(
            world=comm,
            data=solo(),
            pipeline=comm,
            model=model,
            optimizer=OptimizerConfig(learning_rate=1e-4),
            total_steps=1000,
            placement=at,
        )
        chunks = len(at.chunks) // comm.size if schedule == "interleaved" else 1
        parallel = ParallelConfig(pipeline=comm.size, schedule=schedule, microbatches=microbatches, chunks=chunks)
        self.training = TimedTraining(context, parallel, seed=1)
        self.steps: list[tuple[float, np.ndarray]] = []  # seconds of each step, and the spans of its operations

    def step(self, tokens: np.ndarray, together: Communicator) -> float:
        """Run a step on ``tokens``, of shape (micro-batches, samples, context + 1), and return the loss. Collective."""
        batches = [(part[:, :-1], part[:, 1:]) for part in tokens]
        done, _, step_s, _ = self.training.timed_step(batches, tokens.shape[0] * tokens.shape[1], together)
        self.steps.append((step_s, np.array(self.training.timer.timed)))
        return done.loss


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    comm = session.comm
    harness.at_least(chosen, steps=1, chunks=2, layers=1, hidden=1, context=1, samples=1)
    if comm.size < 2:
        raise UsageError("a pipeline needs at least 2 ranks; choose --ranks 2")
    config = ModelConfig(
        layers=chosen.layers, hidden=chosen.hidden, heads=max(1, chosen.hidden // 64), vocabulary=VOCABULARY
    )
    model = models.build(config, "float32", context=chosen.context)
    comm.barrier()
    seconds = agree(comm, pass_seconds(model, chosen.samples))
    message_s = time_of_message(comm, chosen.samples * chosen.context * chosen.hidden)
    rows: list[tuple[str, dict[str, np.ndarray]]] = []
    for microbatches in dict.fromkeys(chosen.microbatches):
        rows += _alternate(chosen, comm, model, microbatches, seconds, message_s)
    if all(name.startswith(ONE_RANK) for name, _ in rows):
        raise UsageError("no schedule supports these sizes; choose another schedule, or more --layers")
    names = [name for name, _ in rows]
    arrays = {key: np.array([figures[key] for _, figures in rows]) for key in rows[0][1]}
    dims = dict.fromkeys(arrays, "contenders") | {"replayed": "contenders, rounds"}
    dims |= dict.fromkeys(("time_s", "span_s", "busy_s", "idle_s"), "contenders, rounds, ranks")
    return Results(arrays, dims, {"contenders": ";".join(names), "message_s": message_s})


def _alternate(
    chosen: argparse.Namespace,
    comm: Communicator,
    model: Model,
    microbatches: int,
    seconds: Sequence[PassSeconds],
    message_s: float,
) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Train with every schedule and on one rank in turns; return names and figures. Collective."""
    everything = StagePlacement((range(len(model.stages)),), (0,))
    contenders = [Contender(solo(), model, "sequential", microbatches, everything)]
    for name in chosen.only:
        try:
            at = place(name, comm.size, microbatches, chosen.chunks, seconds)
        except ConfigurationError as error:
            if comm.rank == 0:
                print(f"left out: {name} with {microbatches} micro-batches: {error}")
            continue
        contenders.append(Contender(comm, model, name, microbatches, at))
    draw = np.random.default_rng(microbatches)
    with without_collection():
        for _ in range(WARM_UP + chosen.steps):
            shape = (microbatches, chosen.samples, chosen.context + 1)
            tokens = draw.integers(0, VOCABULARY, shape).astype(np.uint8)
            order = draw.permutation(len(contenders)).tolist()
            losses = {index: contenders[index].step(tokens, comm) for index in order}
            check_losses([losses[index] for index in range(len(contenders))], contenders)
    return [
        (f"{contender.schedule if number else ONE_RANK}, m = {microbatches}", figures(contender, comm, message_s))
        for number, contender in enumerate(contenders)
    ]


def place(schedule: str, ranks: int, microbatches: int, chunks: int, seconds: Sequence[PassSeconds]) -> StagePlacement:
    """Return the placement of the model's layers with the fastest slowest rank. Raises ConfigurationError."""
    row = SCHEDULES[schedule]
    count = ranks * check_schedule(schedule, ranks, microbatches, chunks if row.most is None else 1)
    if len(seconds) < count:
        raise ConfigurationError(f"the model has {len(seconds)} layers for {count} stages; give more --layers")
    times = [layer.forward + (layer.input + layer.weight if row.splits else layer.backward) for layer in seconds]
    owners = row.place([range(stage, stage + 1) for stage in range(count)], ranks).ranks
    balanced = partition(times, owners, StageDevices.alike(ranks), None)
    assert balanced is not None, "there is no limit of memory"
    return row.place(balanced.chunks, ranks)


def time_of_message(comm: Communicator, elements: int) -> float:
    """Return the seconds of a float32 message between ranks 0 and 1: half of a round trip. Collective.

    It is the first decile of `TURNS` round trips, so that interrupted ranks do not count.
    """
    values, peer = np.zeros(elements, np.float32), 1 - comm.rank

    def round_trip() -> None:
        for sender in (0, 1) if comm.rank < 2 else ():
            (comm.send if comm.rank == sender else comm.recv)(values, peer, _TAG)

    taken = [harness.seconds(round_trip, comm) / 2 for _ in range(TURNS)]
    return float(comm.broadcast_object(float(np.percentile(taken, 10))))


def check_losses(losses: Sequence[float], contenders: Sequence[Contender]) -> None:
    """Raise SystemExit if a contender's loss differs from the loss of the first contender. Local."""
    for loss, contender in zip(losses, contenders, strict=True):
        if not abs(loss - losses[0]) <= AGREEMENT * abs(losses[0]):
            raise SystemExit(f"{contender.schedule} has loss {loss} and one rank has {losses[0]} on the same batches")


def figures(contender: Contender, comm: Communicator, message_s: float) -> dict[str, np.ndarray]:
    """Return the arrays of a contender. Collective over ``comm``."""
    kept = contender.steps[WARM_UP:]
    mine = (contender.training.operations, [step_s for step_s, _ in kept], np.array([spans for _, spans in kept]))
    operations, step_s, spans = zip(*comm.allgather_object(mine), strict=True)
    shares = np.array([shares_of(ops, rows) for ops, rows in zip(operations, spans, strict=True)])
    span_s, busy_s, idle_s = shares.transpose(1, 2, 0)  # (3, ranks, rounds) -> three of (rounds, ranks)
    arrays = {"time_s": np.array(step_s).T, "span_s": span_s, "busy_s": busy_s, "idle_s": idle_s}
    if len(contender.placement.ranks) == 1:  # one rank without a pipeline: no bubble
        return arrays | {"replayed": np.zeros(len(kept)), "simulated": np.zeros(()), "closed": np.full((), np.nan)}
    costs = costs_of(contender.placement, operations, spans, message_s)
    timeline = simulate_lists(operations, contender.placement, costs)
    replayed = [replay(timeline, [rows[step] for rows in spans]) for step in range(len(kept))]
    closed = closed_form(contender, comm.size, costs)
    bubbles = {"replayed": np.array(replayed), "simulated": np.array(timeline.bubble), "closed": np.array(closed)}
    return arrays | bubbles


def shares_of(operations: Sequence[Operation], spans: Spans) -> np.ndarray:
    """Return the seconds of one rank in each step: span, computing, and waiting in the span; shape (3, steps)."""
    begin_s, end_s = spans[..., 0], spans[..., 1]
    computes = np.array([op.kind in COMPUTE for op in operations])
    receives = np.array([op.kind in RECEIVES for op in operations])
    first_s, last_s = begin_s[:, computes].min(axis=1), end_s[:, computes].max(axis=1)
    waits = receives & (begin_s >= first_s[:, None]) & (end_s <= last_s[:, None])
    took_s = end_s - begin_s
    return np.array([last_s - first_s, took_s[:, computes].sum(axis=1), np.where(waits, took_s, 0).sum(axis=1)])


def costs_of(
    placement: StagePlacement, operations: Sequence[Sequence[Operation]], spans: Sequence[Spans], message_s: float
) -> StepCosts:
    """Return the costs of each layer's passes: the mean over a step's micro-batches, the median over the steps."""
    seconds = np.zeros((len(PASSES), placement.units.stop))
    for ops, rows in zip(operations, spans, strict=True):
        took_s = rows[..., 1] - rows[..., 0]
        for key in {(op.kind, op.unit) for op in ops if op.kind in PASSES}:
            at = [index for index, op in enumerate(ops) if (op.kind, op.unit) == key]
            seconds[PASSES.index(key[0]), key[1]] = np.median(took_s[:, at].mean(axis=1))
    forward_s, backward_s, input_s, weight_s = seconds.tolist()
    link = LinkCost(latency_s=message_s)
    return StepCosts(forward_s=forward_s, backward_s=backward_s, input_s=input_s, weight_s=weight_s, link=link)


def replay(timeline: StepTimeline, spans: Sequence[np.ndarray]) -> float:
    """Return the simulated bubble with the measured seconds of every pass. ``spans``: one step's spans by rank."""
    took_s = np.concatenate([rows[:, 1] - rows[:, 0] for rows in spans])
    program = replace(timeline.program, seconds=np.where(timeline.program.work >= 0, took_s, 0.0))
    return StepTimeline(program, programs.run(program)).bubble


def closed_form(contender: Contender, ranks: int, costs: StepCosts) -> float:
    """Return the bubble in closed form for the mean stage, or NaN if the schedule has no formula."""
    forward_s, backward_s, input_s, weight_s = map(
        sum, (costs.forward_s, costs.backward_s, costs.input_s, costs.weight_s)
    )
    if not input_s:
        input_s = weight_s = backward_s / 2
    bubble = registry.bubble(
        contender.schedule,
        ranks,
        contender.microbatches,
        chunks=len(contender.placement.chunks) // ranks,
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
    )
    return np.nan if bubble is None else bubble


def longest(results: Results, name: str) -> np.ndarray:
    """Return an array of (contenders, rounds, ranks) for the rank with the longest span: (contenders, rounds)."""
    at = results.arrays["span_s"].argmax(axis=2)[..., None]
    return np.take_along_axis(results.arrays[name], at, axis=2)[..., 0]


def bubbles(results: Results) -> np.ndarray:
    """Return the measured bubbles of the rank with the longest span, of shape (contenders, rounds)."""
    return longest(results, "idle_s") / longest(results, "span_s")


def ratios(results: Results) -> harness.Ratios:
    """Return step times relative to the ideal: the time of one rank on the same micro-batches, over the ranks."""
    times, names, ideal, values = harness.slowest(results), results.names(), np.empty(0), {}
    for name, row in zip(names, times, strict=True):
        if name.startswith(ONE_RANK):
            ideal = row / results.arrays["time_s"].shape[2]
        else:
            values[name] = row / ideal
    return values


def lines(results: Results) -> Sequence[str]:
    times, arrays, relative = harness.slowest(results), results.arrays, ratios(results)
    span_s, measured = longest(results, "span_s"), bubbles(results)
    overhead = (span_s - longest(results, "busy_s") - longest(results, "idle_s")) / span_s
    rows = [["", "ms", "quartiles", "x ideal", "measured", "simulated", "replayed", "closed form", "overhead"]]
    for index, name in enumerate(results.names()):
        low, middle, high = np.percentile(1e3 * times[index], [25, 50, 75])
        row = [name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}"]
        if name in relative:
            shares = (measured[index], arrays["simulated"][index], arrays["replayed"][index], arrays["closed"][index])
            texts = [MISSING if np.isnan(share).any() else f"{np.median(share):.1%}" for share in shares]
            row += [f"{np.median(relative[name]):.3f}", *texts, f"{np.median(overhead[index]):.1%}"]
        rows.append(row + [MISSING] * (len(rows[0]) - len(row)))
    return aligned(rows)


def plot(results: Results, file: Path) -> None:
    """Draw the bubble of each schedule against the number of micro-batches."""
    rows: dict[str, list[tuple[int, int]]] = {}
    for index, name in enumerate(results.names()):
        schedule, _, count = name.partition(", m = ")
        rows.setdefault(schedule, []).append((int(count), index))
    rows.pop(ONE_RANK)
    measured = 100 * bubbles(results)
    with drawing(file, 2.6 * len(rows) + 1, 4.2) as figure:
        panels: Any = figure.subplots(1, len(rows), squeeze=False, sharey=True)[0]
        for axis, (schedule, points) in zip(panels, rows.items(), strict=True):
            counts, indices = zip(*sorted(points), strict=True)
            low, middle, high = np.percentile(measured[list(indices)], [25, 50, 75], axis=1)
            spread = [middle - low, high - middle]
            axis.errorbar(counts, middle, yerr=spread, fmt="o", color="black", capsize=3, label="measured")
            for key, style in (("simulated", "-"), ("closed", "--")):
                axis.plot(counts, 100 * results.arrays[key][list(indices)], style, label=key)
            axis.set(title=schedule, xlabel="micro-batches", xscale="log")
            axis.set_xticks(counts, [str(count) for count in counts])
        panels[0].set_ylabel("bubble (% of the longest span)")
        panels[0].legend(fontsize=8)
        panels[0].set_ylim(bottom=0)
