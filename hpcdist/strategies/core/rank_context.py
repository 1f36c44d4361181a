"""Context of one rank in a run: its communicators, its stages of the model, and the memory of its stores."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array, Ledger
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range, cut
from hpcdist.arrays.store import Allocate, FlatStore
from hpcdist.collectives.dispatch import parse_algorithm
from hpcdist.collectives.node import shared_memory
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads.communicator import solo
from hpcdist.models.model import Model
from hpcdist.optim import optimizer as optimizers
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.master_weights import MasterWeights
from hpcdist.optim.optimizer import Optimizer
from hpcdist.strategies.context.axis import ContextAxis
from hpcdist.strategies.core.operations import StagePlacement

_FEW_BYTES: Final = 128
_IN_SHARED_MEMORY: Final = {"node_shared", "hierarchical"}  # algorithms that work in place on shared buffers


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Everything that a strategy needs on one rank: communicators, model, optimizer and settings."""

    world: Communicator  # all training ranks, including parameter servers
    data: Communicator  # ranks that have replicas of this rank's stages
    pipeline: Communicator  # ranks that divide the stages of one replica
    model: Model
    optimizer: OptimizerConfig
    total_steps: int
    algorithm: str = "native"
    bucket_bytes: int = 4 << 20
    overlap: str = "none"
    on: str = "cpu"  # device of the arrays, "cpu" or "gpu"
    ledger: Ledger | None = None
    computes: bool = True  # False on a dedicated server
    # 16-bit dtype of stored and sent parameters and gradients; None: no mixed precision
    working: "np.dtype[np.generic] | None" = None
    placement: StagePlacement | None = None
    tensor: Communicator = field(default_factory=solo)  # ranks that hold shards of the same tensors
    context_axis: ContextAxis | None = None  # ranks that divide the tokens of a sample
    batch: Communicator | None = None  # ranks of ``data`` with different samples; None: all
    experts: Communicator = field(default_factory=solo)  # ranks that divide the experts of this rank's stages
    portion: str = ""  # tensors of the strategy: "expert", "dense" (all others), or "" for all
    every_microbatch: bool = False  # exchange gradients after each micro-batch

    @property
    def samplers(self) -> Communicator:
        """Communicator of the ranks that have this rank's layers and process different samples."""
        return self.data if self.batch is None else self.batch

    @property
    def speaks(self) -> bool:
        """True if this rank is rank 0 on both the tensor axis and the context axis."""
        return self.tensor.rank == 0 and (self.context_axis is None or self.context_axis.rank == 0)

    @property
    def placed(self) -> StagePlacement:
        """Assignment of model layers to pipeline ranks. By default, one rank has all layers."""
        return self.placement or StagePlacement((range(len(self.model.stages)),), (0,), self.model.skips)

    @property
    def chunks(self) -> tuple[range, ...]:
        """This rank's model chunks, each a range of consecutive layers."""
        return self.placed.of(self.pipeline.rank)

    @property
    def computed_units(self) -> tuple[int, ...]:
        """Indices of this rank's model layers, in model order."""
        return tuple(unit for chunk in self.chunks for unit in chunk)

    @property
    def units(self) -> tuple[int, ...]:
        """Indices of this rank's model layers, in model order. Layers without tensors of this strategy are left out."""
        return tuple(unit for unit in self.computed_units if self._range(unit))

    @property
    def members(self) -> Communicator:
        """Communicator of the replicas of this rank's layers, and of dedicated parameter servers if there are any."""
        return self.world if self.pipeline.size * self.tensor.size == 1 else self.data

    @property
    def expert_norms(self) -> Communicator | None:
        """Communicator over which norms of expert tensors must be summed, or None if no sum is needed."""
        return self.experts if self.portion == "expert" and self.experts.size > 1 else None

    @property
    def layout(self) -> Layout:
        """Position of each of the model's tensors in one flat parameter vector."""
        return self.model.layout

    @property
    def dtype(self) -> "np.dtype[np.generic]":
        """Dtype in which parameters and gradients are stored and sent."""
        return self.model.dtype if self.working is None else self.working

    @property
    def master_dtype(self) -> "np.dtype[np.generic]":
        """Dtype of the parameters that the optimizer updates: float32 for 16-bit models."""
        return accumulation_dtype(self.model.dtype)

    @property
    def parts(self) -> tuple[Range, ...]:
        """Ranges of this rank's layers in the flat parameter vector, with adjacent ranges joined."""
        joined: list[Range] = []
        for part in self.ranges.values():
            if joined and joined[-1].stop == part.start:
                joined[-1] = Range(joined[-1].start, part.stop)
            else:
                joined.append(part)
        return tuple(joined)

    @property
    def part(self) -> Range:
        """Range of this rank's layers in the flat parameter vector. The layers must be consecutive."""
        (part,) = self.parts
        return part

    @property
    def ranges(self) -> dict[int, Range]:
        """Range of each of this rank's layers in the flat parameter vector, keyed by layer number."""
        return {unit: self._range(unit) for unit in self.units}

    def _range(self, unit: int) -> Range:
        return self.layout.range_of(self.model.stages[unit].layer, self.portion)

    @property
    def agree_algorithm(self) -> str:
        """Name of the algorithm for allreduces of a few numbers, such as the loss and the gradient norm."""
        small = parse_algorithm(self.algorithm).at(_FEW_BYTES) if "<=" in self.algorithm else self.algorithm
        # "node_shared" needs pure data parallelism.
        suits = small == "native" or (small == "node_shared" and self.data.size == self.world.size)
        return small if suits else "recursive_doubling"

    def store(
        self, category: str, parts: Range | Sequence[Range] | None = None, allocate: Allocate | None = None
    ) -> FlatStore:
        """Return a `FlatStore` of zeros for the flat parameter ranges ``parts`` (default: this rank's layers).

        ``category``: name in memory reports. ``allocate``: function that allocates the memory, or None.
        """
        return FlatStore(
            self.layout,
            self.dtype,
            self.parts if parts is None else parts,
            on=self.on,
            allocate=allocate,
            category=category,
            ledger=None if allocate else self.ledger,
        )

    def for_replicas(self, category: str, over: Communicator | None = None) -> Allocate | None:
        """Return an allocator of node-shared memory, or None if allreduces do not use such memory. Local.

        ``category``: name in memory reports. ``over``: communicator that shares the memory (default: data axis).
        """
        names = {row.partition("<=")[0] for row in self.algorithm.split(",")}
        if self.on != "cpu" or self.data.size == 1 or not names & _IN_SHARED_MEMORY:
            return None

        def allocate(size: int, dtype: "np.dtype[np.generic]") -> Array:
            return self.counted(shared_memory.allocate(over or self.data, size, np.dtype(dtype)), category)

        return allocate

    def counted(self, array: Array, category: str) -> Array:
        """Count the memory of ``array`` under ``category`` in memory reports, and return the array. Local."""
        return array if self.ledger is None else self.ledger.track(array, category)

    def build_optimizer(self, parts: Range | Sequence[Range]) -> Optimizer:
        """Return a new optimizer for the flat parameter ranges ``parts``. Local."""
        built = optimizers.build(
            self.optimizer,
            self.layout,
            parts,
            np.dtype(self.master_dtype),
            total_steps=self.total_steps,
            ledger=self.ledger,
            on=self.on,
        )
        if self.working is None:
            return built
        return MasterWeights(built, self.layout, parts, ledger=self.ledger, on=self.on)


def groups_of_layers(layers: Iterable[Range], least_size: int, within: Range) -> Iterator[Range]:
    """Yield ranges of whole layers that cover the flat range ``within``, from the last range to the first.

    Each range has at least ``least_size`` elements, except the range at the start of ``within``. ``layers``: flat range
    of each layer.
    """
    stop = within.stop
    for layer in sorted(filter(within.intersect, layers), reverse=True):
        if stop - layer.start >= least_size or layer.start == within.start:
            yield Range(layer.start, stop)
            stop = layer.start


def buckets_of_layers(
    layout: Layout, itemsize: int, bucket_bytes: int, within: Range | None = None, layers: Iterable[Range] = ()
) -> list[Range]:
    """Return a list of buckets of at most ``bucket_bytes`` bytes that cover a flat parameter range, last bucket first.

    ``within``: flat range to cover (default: all). ``layers``: flat ranges of layers (default: all in ``layout``).
    """
    longest = max(1, bucket_bytes // itemsize)
    # Groups of layers with at least ``bucket_bytes`` bytes are cut into buckets of at most ``bucket_bytes`` bytes.
    groups = groups_of_layers(layers or layout.units.values(), longest, within or Range(0, layout.size))
    return [bucket for group in groups for bucket in reversed(list(cut(group, longest)))]


def buckets_of_rank(context: RankContext, itemsize: int) -> list[Range]:
    """Return a list of the communication buckets of this rank's layers, from the last layer to the first.

    ``itemsize``: bytes per element.
    """
    units = [*context.ranges.values()]
    return [
        bucket
        for part in reversed(context.parts)
        for bucket in buckets_of_layers(context.layout, itemsize, context.bucket_bytes, part, units)
    ]
