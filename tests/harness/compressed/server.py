"""A compressed parameter server without a model: one rank of it, and the reference computed by one process."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.trainings import residuals_of
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.reduction import round_into, widen
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.compression.compressor import RandomKey
from hpcdist.optim import optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.build import server_exchange
from hpcdist.strategies.compressed.config import SUMMED, CompressionConfig
from hpcdist.strategies.compressed.registry import Compression, compressor
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.config import ParameterServerConfig
from hpcdist.strategies.parameter_server.partition import Roles, partition_keys

SOME = CompressionConfig(density=0.1)
STEPS, SEED = 10, 5
UNEVEN = Layout.of(
    [
        TensorSpec(0, "embedding", (40, 24)),
        TensorSpec(0, "bias", (5,)),
        TensorSpec(1, "weight", (33, 17)),
        TensorSpec(1, "norm", (24,)),
    ]
)
EVEN = Layout.of([TensorSpec(layer, "weight", (23, 17)) for layer in range(4)])  # that no number of servers cuts
SGD = OptimizerConfig(name="sgd", momentum=0.9, learning_rate=0.1, warmup_steps=0, clip_norm=0.0)


@dataclass(frozen=True)
class Case:
    """A run: the servers, the compression and the nodes."""

    ranks: int
    servers: ParameterServerConfig
    name: str = "none"
    config: CompressionConfig = SOME
    layout: Layout = UNEVEN
    per_node: int | None = None
    working: str | None = None
    loss_scale: float = 1.0
    on: str = "cpu"

    @property
    def roles(self) -> Roles:
        return Roles.of(self.servers, self.ranks)

    @property
    def algorithm(self) -> str:
        return "ring" if self.per_node is None else "hierarchical"

    def voices(self) -> list[list[int]]:
        """Return the groups of workers whose gradients are summed before the first of each group sends them."""
        workers, per = list(self.roles.workers), self.per_node or 1
        nodes = sorted({rank // per for rank in workers})
        return [[rank for rank in workers if rank // per == node] for node in nodes]


def colocated(servers: int = 0, **keys: Any) -> ParameterServerConfig:
    return ParameterServerConfig(placement="colocated", servers=servers, **keys)


def dedicated(servers: int = 1, **keys: Any) -> ParameterServerConfig:
    return ParameterServerConfig(servers=servers, **keys)


class Job:
    """One rank of a case. Gradients are the test's values plus a small part of the parameters."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        layers = [SimpleNamespace(layer=layer) for layer in case.layout.units]
        model: Any = SimpleNamespace(layout=case.layout, dtype=np.dtype(np.float32), stages=layers, skips=())
        part = case.roles.part_of(comm)
        self.case, self.comm = case, comm
        self.context = RankContext(
            world=comm,
            data=part,
            pipeline=part.split(part.rank),
            model=model,
            optimizer=SGD,
            total_steps=STEPS,
            algorithm=case.algorithm,
            computes=comm.rank in case.roles.workers,
            working=None if case.working is None else dtype_of(case.working),
            on=case.on,
        )
        compression = None if case.name == "none" else Compression(case.name, case.config, SEED)
        self.exchange = server_exchange(self.context, case.servers, None, compression)
        initial = FlatStore(case.layout, np.dtype(np.float32))
        initial.array[...] = start(case.layout)
        self.exchange.load_initial(initial)
        for name in ("compressed.widened", "parameter_server.sum"):  # as another run would leave it
            scratch(name, case.layout.size, np.dtype(np.float32), self.exchange.parameters.array)[...] = np.nan
        self.sums: list[np.ndarray] = []

    def step(self, gradient: np.ndarray) -> bool:
        """Make a step from the ``gradient`` of all parameters. Return True if it was finite and applied."""
        this = self.exchange
        this.begin(this.plan())
        this.scaled_by(self.case.loss_scale)
        if self.context.computes:
            scaled = (gradient + np.float32(0.1) * float32(this.parameters.array)) * np.float32(self.case.loss_scale)
            kept = np.empty(scaled.shape, this.gradients.dtype)
            round_into(kept, scaled)
            this.gradients.array[...] = backend.place(kept, self.case.on)
        for op in this.plan():
            if op.kind is not Kind.AGREE:
                this.handlers[op.kind](op)
                continue
            if not np.isfinite(this.agree(np.array([this.norm_squared()]))[0]):
                return False
            self.sums.append(np.zeros(self.case.layout.size, np.float32))
            for part in this.update.parts:
                self.sums[-1][part.slice] = float32(this.gradients.range(part))
            this.begin_update(1.0 / self.case.loss_scale)
        return True

    def look(self) -> None:
        """Copy to the host the values that a thread can read from its device."""
        this = self.exchange
        self.weights, self.owed = float32(this.parameters.array), np.zeros(0, np.float32)
        if (residuals := residuals_of(this)) is not None:
            self.owed = float32(residuals.array)


def float32(values: backend.Array) -> np.ndarray:
    received = np.empty(values.shape, np.float32)
    widen(backend.to_host(values), received)
    return received


def start(layout: Layout) -> np.ndarray:
    return zero_padding(layout, np.random.default_rng(1).standard_normal(layout.size))


def zero_padding(layout: Layout, drawn: np.ndarray) -> np.ndarray:
    """Return ``drawn`` with zeros in the padding."""
    received = np.zeros(drawn.shape, np.float32)
    for segment in layout.segments:
        received[..., segment.range.slice] = drawn[..., segment.range.slice]
    return received


def gradients(rng: np.random.Generator, case: Case, steps: int = STEPS) -> np.ndarray:  # (steps, ranks, size)
    return zero_padding(case.layout, rng.standard_t(3, (steps, case.ranks, case.layout.size)))


class OneProcess:
    """The reference: all ranks of a case in one process."""

    def __init__(self, case: Case) -> None:
        self.case, layout = case, case.layout
        self.made = compressor(case.name, case.config)
        ranges = {layer: layout.units[layer] for layer in layout.units}
        result = partition_keys(layout, len(case.roles.servers)).messages(ranges)
        self.messages = [(part, case.roles.servers[index]) for part, index in result]
        self.residual = np.zeros((len(case.voices()), layout.size), np.float32)
        self.parameters = FlatStore(layout, np.dtype(np.float32))
        self.parameters.array[...] = start(layout)
        self.working = np.zeros(layout.size, dtype_of(case.working or "float32"))
        round_into(self.working, self.parameters.array)
        whole = Range(0, layout.size)
        self.whole, self.optimizer = whole, optimizer.build(SGD, layout, whole, np.dtype(np.float32), total_steps=STEPS)
        self.steps, self.sums = 0, []

    def sent(self, voice: int, where: Range, values: np.ndarray) -> np.ndarray:
        given = values
        if self.case.config.error_feedback:
            given = (self.residual[voice, where.slice] + values).astype(np.float32)
        payload = np.zeros(self.made.payload_bytes(given.size), np.uint8)
        key = RandomKey(SEED, self.steps, 0 if self.case.name in SUMMED else voice, where.start // 16)
        self.made.encode(given, payload, key)
        out = np.empty_like(given)
        self.made.decode(payload, out)
        if self.case.config.error_feedback:
            self.residual[voice, where.slice] = given - out
        return out

    def step(self, given: np.ndarray) -> None:
        case, scale = self.case, np.float32(self.case.loss_scale)
        total = np.zeros(case.layout.size, np.float32)
        dense = self.steps < case.config.warmup_steps
        pushed = []
        for members in case.voices():
            rows = []
            for rank in members:
                kept = np.empty_like(self.working)
                round_into(kept, (given[rank] + np.float32(0.1) * float32(self.working)) * scale)
                rows.append(float32(kept) / scale)
            assert len(rows) < 3  # a ring adds three in another order
            pushed.append(sum(rows[1:], rows[0]))
        for part, server in self.messages:
            for _, where in case.layout.within(part):
                for voice, members in enumerate(case.voices()):
                    values = pushed[voice][where.slice]
                    local_data = members[0] == server or dense
                    values = values if local_data else self.sent(voice, where, values)
                    total[where.slice] = values if voice == 0 else total[where.slice] + values
        kept = np.empty_like(self.working)
        round_into(kept, total * scale)
        total = float32(kept)
        self.sums.append(total.copy())
        self.optimizer.begin_step()
        directions = FlatStore(case.layout, np.dtype(np.float32))
        directions.array[...] = total
        self.optimizer.direction(self.whole, self.parameters, directions, 1.0 / case.loss_scale)
        self.optimizer.apply(self.whole, self.parameters, directions, None, None)
        round_into(self.working, self.parameters.array)
        self.steps += 1
