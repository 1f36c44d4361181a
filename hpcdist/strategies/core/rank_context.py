"""Context of one rank in a run: its communicators, its stages of the model, and the memory that is made for it.

Every strategy gets a `RankContext` when it is made: the axes (world, data, pipeline, tensor), the model and its
layout, the optimizer's configuration, the collective algorithm, and the device and dtype of its stores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hpcdist.arrays.backend import Array
from hpcdist.arrays.dtypes import accumulation_dtype
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.memory import Ledger
from hpcdist.arrays.ranges import Range
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
from hpcdist.strategies.schedule.operations import StagePlacement

_FEW_BYTES: Final = 128
_IN_SHARED_MEMORY: Final = {"node_shared", "hierarchical"}  # algorithms that work on buffers where they lie


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Context of a rank, for its strategy: communicators, model, optimizer and settings.

    ``world`` joins all who agree on a step, ``data`` the replicas of these stages, which sum their gradients,
    ``pipeline`` the stages of this replica, ``tensor`` those who compute these stages together, each with its part of
    the tensors, which ``model`` has. Where samples are cut, ``context`` joins those of the replicas that have the other
    tokens of the same samples, and ``batch`` those that have other samples. ``placement`` says which stages of
    ``model`` each rank of the pipeline computes; None: the one rank all. A rank that only serves ``computes`` nothing.
    ``working`` is the 16-bit type in which parameters and gradients are kept and sent, while updates step a float32
    master; None: the type that the model computes in.

    ``experts`` joins the replicas that have the other experts of these stages. ``portion`` says which of the tensors
    a strategy looks after: all (""), those of experts ("expert"), or the others ("dense"). With ``every_microbatch`` it
    takes gradients after each, since that is so of the other portion.
    """

    world: Communicator
    data: Communicator
    pipeline: Communicator
    model: Model
    optimizer: OptimizerConfig
    total_steps: int
    algorithm: str = "native"
    bucket_bytes: int = 4 << 20
    overlap: str = "none"
    on: str = "cpu"
    ledger: Ledger | None = None
    computes: bool = True
    working: "np.dtype[np.generic] | None" = None
    placement: StagePlacement | None = None
    tensor: Communicator = field(default_factory=solo)
    context: ContextAxis | None = None
    batch: Communicator | None = None
    experts: Communicator = field(default_factory=solo)
    portion: str = ""
    every_microbatch: bool = False

    @property
    def samplers(self) -> Communicator:
        """Ranks that take other samples of a batch: all replicas, but where these share samples."""
        return self.data if self.batch is None else self.batch

    @property
    def speaks(self) -> bool:
        """Whether this rank counts samples for those that see the same ones."""
        return self.tensor.rank == 0 and (self.context is None or self.context.rank == 0)

    @property
    def placed(self) -> StagePlacement:
        """Stages of each rank of the pipeline."""
        return self.placement or StagePlacement((range(len(self.model.stages)),), (0,), self.model.skips)

    @property
    def chunks(self) -> tuple[range, ...]:
        """Stages of this rank, as ranges of consecutive ones."""
        return self.placed.of(self.pipeline.rank)

    @property
    def units(self) -> tuple[int, ...]:
        """Stages of this rank, in the order of the model; never none, but in a portion that they have nothing of."""
        return tuple(unit for chunk in self.chunks for unit in chunk if self._range(unit))

    @property
    def members(self) -> Communicator:
        """Ranks that compute and serve these stages: the world or, in a product of axes, the data axis."""
        return self.world if self.pipeline.size * self.tensor.size == 1 else self.data

    @property
    def expert_norms(self) -> Communicator | None:
        """Ranks over which norms of tensors are summed, since each has its experts of them; None for none."""
        return self.experts if self.portion == "expert" and self.experts.size > 1 else None

    @property
    def layout(self) -> Layout:
        """The flat space of the whole model."""
        return self.model.layout

    @property
    def dtype(self) -> "np.dtype[np.generic]":
        """Type in which parameters and gradients are kept and sent."""
        return self.model.dtype if self.working is None else self.working

    @property
    def master_dtype(self) -> "np.dtype[np.generic]":
        """Type in which an update steps parameters: float32 where stages compute in 16 bits."""
        return accumulation_dtype(self.model.dtype)

    @property
    def parts(self) -> tuple[Range, ...]:
        """Ranges of the flat space of the stages of this rank: one, or one for each of its chunks."""
        joined: list[Range] = []
        for part in self.ranges.values():
            if joined and joined[-1].stop == part.start:
                joined[-1] = Range(joined[-1].start, part.stop)
            else:
                joined.append(part)
        return tuple(joined)

    @property
    def part(self) -> Range:
        """The one range of the flat space of a rank that has one chunk."""
        (part,) = self.parts
        return part

    @property
    def ranges(self) -> dict[int, Range]:
        """The range of each of this rank's stages, by its index in the model."""
        return {unit: self._range(unit) for unit in self.units}

    def _range(self, unit: int) -> Range:
        return self.layout.part_of(self.model.stages[unit].layer, self.portion)

    @property
    def agree_algorithm(self) -> str:
        """Allreduce algorithm for a few numbers.

        They do not deserve a ring: log2(p) messages, whose bytes are counted unless nothing is. Of a choice by size it
        is that for small buffers, if it suits them on the world too.
        """
        small = parse_algorithm(self.algorithm).at(_FEW_BYTES) if "<=" in self.algorithm else self.algorithm
        suits = small == "native" or (small == "node_shared" and self.data.size == self.world.size)
        return small if suits else "recursive_doubling"

    def store(
        self, category: str, parts: Range | Sequence[Range] | None = None, allocate: Allocate | None = None
    ) -> FlatStore:
        """Return zeroed memory for ``parts``, by default for all stages of this rank (local)."""
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
        """Return an allocator of memory that replicas on a node share, None where no collective would use it (local).

        What it returns is collective over ``over``, by default ``data``. Buffers that are summed or handed round there
        then need no copy.
        """
        names = {row.partition("<=")[0] for row in self.algorithm.split(",")}  # of a choice by size, each of its rows
        if self.on != "cpu" or self.data.size == 1 or not names & _IN_SHARED_MEMORY:
            return None

        def allocate(size: int, dtype: "np.dtype[np.generic]") -> Array:
            return self.counted(shared_memory.allocate(over or self.data, size, np.dtype(dtype)), category)

        return allocate

    def counted(self, array: Array, category: str) -> Array:
        """Enter ``array`` in the ledger of this rank, if it has one, and return it (local)."""
        return array if self.ledger is None else self.ledger.track(array, category)

    def build_optimizer(self, parts: Range | Sequence[Range]) -> Optimizer:
        """Return the optimizer of ``parts``, with zeroed state and, for 16-bit parameters, a float32 master (local)."""
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
