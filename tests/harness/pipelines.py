"""A model whose stages also take outputs of earlier stages, a step of it on a pipeline, and random pass orders."""

import random
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from harness.rank_run import seat
from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.classifiers import Dense
from hpcdist.models.model import Model
from hpcdist.models.stage import Gradients, Operations, Parameters, Saved
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import build_executor
from hpcdist.strategies.core.grid import ProcessGrid
from hpcdist.strategies.core.operations import Kind, StagePlacement
from hpcdist.strategies.data import catalogue
from hpcdist.strategies.schedule.operation_list import generated, insert_exchange
from hpcdist.strategies.schedule.passes import Passes, expand
from hpcdist.strategies.schedule.verify.proof import verify

WIDTH, SAMPLES, UNITS = 6, 7, 8
TAKES = {3: (0, 1), 5: (0,), 6: (2, 4)}  # 4 -> 6 past one unit, 0 to two units


class Taking(Dense):
    """A dense layer that adds outputs of earlier layers to its output."""

    def __init__(self, layer: int, takes: tuple[int, ...], outputs: int = WIDTH) -> None:
        super().__init__(layer, WIDTH, outputs, "" if outputs != WIDTH else "gelu", 0.0)
        self.takes = takes

    def forward(self, parameters: Parameters, x: Array, operations: Operations, saved: Saved) -> Array:
        y = super().forward(parameters, x, operations, saved)
        for source in self.takes:
            y += saved[f"skip.{source}"] * (1 + source)
        return y

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, operations: Operations, saved: Saved
    ) -> Array | None:
        for source in self.takes:
            saved.empty(f"skip.{source}.gradient", dy.shape, dy.dtype)[...] = dy * (1 + source)
        return super().backward(parameters, gradients, dy, operations, saved)


def model() -> Model:
    stages = [Taking(layer, TAKES.get(layer, ())) for layer in range(UNITS - 1)]
    return Model([*stages, Taking(UNITS - 1, (), 3)], "float64", tokens_per_sample=1)


@dataclass(frozen=True)
class Plan:
    placement: StagePlacement
    passes: tuple[Passes, ...]
    microbatches: int
    recompute: bool = False


def data() -> tuple[np.ndarray, np.ndarray]:
    noise = np.random.default_rng(11)
    return noise.standard_normal((SAMPLES, WIDTH)), noise.integers(0, 3, SAMPLES)


def run(
    comm: Communicator,
    plan: Plan,
    on: str = "cpu",
    built: Model | None = None,
    samples: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[float, float, dict[str, bytes]]:
    """Run one step without its update. Return the training loss, the evaluation loss and the local gradients.


    The defaults of ``built`` and ``samples`` are `model` and `data`.
    """
    built = built or model()
    axes = {"data": comm.split(comm.rank), "pipeline": comm, "placement": plan.placement}
    context = seat(comm, built, OptimizerConfig(name="sgd", learning_rate=1e-3), algorithm="native", on=on, **axes)
    exchange = catalogue.allreduce(context)
    for unit, part in context.ranges.items():
        initial = FlatStore(built.layout, built.dtype, part)
        built.initialise_stage(unit, initial, seed=3)
        exchange.load_initial(initial)
    executor = build_executor(context, exchange)
    executor.copies.refresh()
    steps = expand(plan.passes[comm.rank], plan.placement, comm.rank, recompute=plan.recompute)
    steps = insert_exchange(steps + executor.copies.after_backward(), exchange.plan(), context.ranges)
    steps += executor.copies.after_update()
    everyone = comm.allgather_object(steps)
    units = {unit: built.layout.units[stage.layer] for unit, stage in enumerate(built.stages)}
    grid = ProcessGrid(pipeline=comm.size)
    verified = {"grid": grid, "units": units, "microbatches": plan.microbatches, "placement": plan.placement}
    verify(everyone, needs=built.needs, **verified)
    whole = tuple(backend.place(values, on) for values in samples or data())
    ends = [0, *accumulate(len(part) for part in np.array_split(range(SAMPLES), plan.microbatches))]
    cut = [tuple(values[first:end] for values in whole) for first, end in pairwise(ends)]
    gradients: dict[str, bytes] = {}

    def look(scale: float) -> None:
        for segment, where in exchange.gradients.tensors():
            gradients[segment.key] = backend.to_host(exchange.gradients.range(where)).tobytes()

    exchange.begin_update = look  # type: ignore[method-assign]
    steps = [op for op in steps if op.kind.name not in ("DIRECTION", "APPLY", "NORMS")]
    loss = executor.run(steps, cut, SAMPLES, 1, np.zeros(0)).loss
    assert not executor.arena._live, f"{sorted(executor.arena._live)} are never given back"
    evaluated = comm.allgather_object(executor.evaluate(*whole))
    assert not any(loss for rank, loss in enumerate(evaluated) if rank != plan.placement.ranks[-1])
    assert not executor.arena._live, f"{sorted(executor.arena._live)} are never given back by an evaluation"
    return loss, sum(evaluated), gradients


def schedule_passes(name: str, ranks: int, chunks: int, microbatches: int) -> Plan:
    """Return the passes of a schedule over chunks of equal size."""
    written = generated(name, ranks, microbatches, chunks)
    each = np.array_split(range(UNITS), ranks * chunks)
    placement = written.place([range(int(part[0]), int(part[-1]) + 1) for part in each])
    return Plan(replace(placement, skips=model().skips), written.passes, microbatches)


def run_single_process(microbatches: int, on: str = "cpu") -> tuple[float, float, dict[str, bytes]]:
    """Run the same step on one rank. Local."""
    return run(solo(), schedule_passes("sequential", 1, 1, microbatches), on)


PASSES = {True: (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), False: (Kind.FORWARD, Kind.BACKWARD)}


def parts(units: int, chunks: int, draw: random.Random) -> list[range]:
    cuts = [0, *sorted(draw.sample(range(1, units), chunks - 1)), units]
    return [range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]


def random_legal_order(
    placement: StagePlacement, microbatches: int, split: bool, draw: random.Random
) -> tuple[Passes, ...]:
    """Return a random order of all passes that respects their dependencies. Each rank runs its passes of the order.


    Each chunk takes micro-batches in order in every kind of pass, so that gradient sums have the same bits.
    """
    last = len(placement.chunks) - 1
    done = {(way, chunk): 0 for way in PASSES[split] for chunk in range(last + 1)}
    result: tuple[Passes, ...] = tuple([] for _ in range(placement.stages))
    back = PASSES[split][1]

    def ready(way: Kind, chunk: int) -> bool:
        number = done[way, chunk]
        if number == microbatches:
            return False
        if way is Kind.FORWARD:
            return chunk == 0 or done[way, chunk - 1] > number
        if way is Kind.BACKWARD_WEIGHT:
            return done[back, chunk] > number
        return done[Kind.FORWARD, chunk] > number and (chunk == last or done[back, chunk + 1] > number)

    while choices := [key for key in done if ready(*key)]:
        way, chunk = draw.choice(choices)
        rank = placement.ranks[chunk]
        local = [number for number, owner in enumerate(placement.ranks) if owner == rank].index(chunk)
        result[rank].append((way, done[way, chunk], local))
        done[way, chunk] += 1
    return result
