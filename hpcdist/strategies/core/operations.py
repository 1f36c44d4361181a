"""The operations of a training step: entries of the list that one rank executes in order.

Schedules generate the compute operations, an exchange the others. Executor, verifier and simulator read the same list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from hpcdist.arrays.ranges import Range


@dataclass(frozen=True)
class StagePlacement:
    """Assignment of model chunks (ranges of layers) to pipeline ranks."""

    chunks: tuple[range, ...]  # in model order; embedding and head are layers too
    ranks: tuple[int, ...]  # ranks[i] computes chunks[i]
    skips: tuple[tuple[int, int], ...] = ()  # skip connections: (layer, later layer that uses its output)

    def __post_init__(self) -> None:
        assert len(self.chunks) == len(self.ranks) > 0, "one rank for each chunk"
        assert all(before.stop == after.start for before, after in zip(self.chunks, self.chunks[1:], strict=False))
        assert all(self.chunks) and set(self.ranks) == set(range(max(self.ranks) + 1)), "every rank needs a unit"
        assert all(source + 1 < target for source, target in self.skips), "the unit before is no skip connection"

    @property
    def stages(self) -> int:
        """Number of pipeline ranks."""
        return max(self.ranks) + 1

    @property
    def units(self) -> range:
        return range(self.chunks[0].start, self.chunks[-1].stop)

    def of(self, rank: int) -> tuple[range, ...]:
        """Return a tuple of the model chunks (ranges of layers) of ``rank``, in model order."""
        return tuple(chunk for chunk, owner in zip(self.chunks, self.ranks, strict=True) if owner == rank)

    def rank_of(self, unit: int) -> int:
        return self._ranks[unit]

    def crosses(self, unit: int) -> bool:
        """Return True if model layer ``unit`` receives the output of the previous layer from another rank."""
        return unit > self.chunks[0].start and self._ranks[unit] != self._ranks[unit - 1]

    def skips_into(self, unit: int) -> list[int]:
        """Return a list of the layers whose outputs go to layer ``unit`` over skip connections, in ascending order."""
        return sorted(source for source, target in self.skips if target == unit)

    def skips_from(self, unit: int) -> list[int]:
        """Return a list of layers that get the output of layer ``unit`` over skip connections, in ascending order."""
        return sorted(target for source, target in self.skips if source == unit)

    def edge(self, source: int, target: int) -> int:
        """Return an integer that identifies the connection from model layer ``source`` to model layer ``target``."""
        return target if source in (-1, target - 1) else self.units.stop + self.skips.index((source, target))

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {unit: rank for chunk, rank in zip(self.chunks, self.ranks, strict=True) for unit in chunk}


def looped(parts: Sequence[range], ranks: int) -> StagePlacement:
    """Return the `StagePlacement` that puts chunk i of ``parts`` (layer ranges) on rank i modulo ``ranks``."""
    assert len(parts) % ranks == 0, f"{len(parts)} chunks for {ranks} ranks"
    return StagePlacement(tuple(parts), tuple(number % ranks for number in range(len(parts))))


def folded(parts: Sequence[range], ranks: int) -> StagePlacement:
    """Return the `StagePlacement` that puts chunks i and 2 * ``ranks`` - 1 - i of ``parts`` on rank i."""
    assert len(parts) == 2 * ranks, f"{len(parts)} chunks for {ranks} ranks"
    return StagePlacement(tuple(parts), (*range(ranks), *reversed(range(ranks))))


class Kind(Enum):
    """Type of an operation in a rank's operation list."""

    FORWARD = "forward"  # (microbatch, unit): one unit of the model
    BACKWARD = "backward"  # (microbatch, unit): both gradients of one unit
    BACKWARD_INPUT = "backward_input"  # (microbatch, unit): the input gradient, and weight gradients computed with it
    BACKWARD_WEIGHT = "backward_weight"  # (microbatch, unit): the remaining weight gradients
    # (microbatch, unit): the input of a unit whose predecessor is on another rank, and the gradient of that input
    SEND_ACTIVATION = "send_activation"  # to the rank of the unit
    RECV_ACTIVATION = "recv_activation"  # from the rank of the unit before
    SEND_GRADIENT = "send_gradient"  # to the rank of the unit before
    RECV_GRADIENT = "recv_gradient"  # from the rank of the unit
    GATHER = "gather"  # (unit): gather its whole parameters over the data axis, before each use or after the update
    START_GATHER = "start_gather"  # (unit): start a GATHER, in flight until WAIT_GATHER
    WAIT_GATHER = "wait_gather"  # (unit): complete a START_GATHER
    FREE = "free"  # (unit): free its whole parameters; the shards stay (`CutGatherer.free`)
    ADD = "add"  # (microbatch, range): add gradients to earlier micro-batches, before they are overwritten
    REDUCE = "reduce"  # (range): sum gradients over the replicas
    COMBINE = "combine"  # (range): sum the shards left by REDUCE over the replicas with the same shard
    START = "start"  # (range): start a REDUCE, in flight until WAIT
    POLL = "poll"  # make progress on operations in flight if no thread does
    WAIT = "wait"  # (range): complete a START
    DEFER = "defer"  # (range): start a REDUCE, in flight until the SETTLE of the next step
    SETTLE = "settle"  # (range): complete the DEFER of the previous step
    KEEP = "keep"  # (range): keep gradients on this rank for its own update
    MIX_START = "mix_start"  # (range): start swapping parameters with graph neighbours, in flight until MIX_WAIT
    MIX_WAIT = "mix_wait"  # (range): complete a MIX_START
    MIX = "mix"  # (range): replace parameters by a weighted mean with the neighbours' parameters
    AVERAGE = "average"  # (range): replace parameters by their mean over all replicas, in steps that average
    PUSH = "push"  # (range): send gradients from a worker to the server that owns them
    COLLECT = "collect"  # (range): on a server, receive the gradients that workers push
    PUBLISH = "publish"  # (range): on a server, send new parameters to the workers
    PULL = "pull"  # (range): on a worker, receive new parameters
    COPY_GRADIENT = "copy_gradient"  # send the gradient of a tied tensor's copy to the stage that owns the tensor
    COPY_VALUE = "copy_value"  # send the new value of a tied tensor to its copy
    SUM_ROWS = "sum_rows"  # sum partial gradients of unsharded tensors over the tensor axis
    AGREE = "agree"  # agree on loss, norm, overflow and stop requests; comes after every REDUCE
    COMPRESS = "compress"  # (range): exchange gradient payloads, after AGREE
    DIRECTION = "direction"  # (range): turn gradients into update directions; fused optimizers do this in APPLY
    NORMS = "norms"  # sum norms of tensors that several ranks share, for layer-wise rates
    APPLY = "apply"  # (range): update parameters along the directions
    REFRESH = "refresh"  # (unit): send its new parameters to the ranks that keep shards of them
    COMMIT = "commit"  # make the new parameters, shared by the ranks of a node, the current ones


COMPUTE: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
USES: Final = COMPUTE[:3]  # kinds that read parameters; weight gradients need only saved activations
MESSAGES: Final = (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
# Kinds that take complete gradients.
EXCHANGED: Final = (Kind.ADD, Kind.REDUCE, Kind.START, Kind.DEFER, Kind.PUSH, Kind.KEEP)
# Kinds that start an operation in the background -> kinds that wait for it.
ENDS: Final = {
    Kind.START: Kind.WAIT,
    Kind.DEFER: Kind.SETTLE,
    Kind.START_GATHER: Kind.WAIT_GATHER,
    Kind.MIX_START: Kind.MIX_WAIT,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation of one rank in a step, such as a forward pass, a message or a reduction."""

    kind: Kind
    microbatch: int = -1
    unit: int = -1  # model unit (layer, embedding or head)
    range: Range | None = None
    recompute: bool = False  # FORWARD that runs again because its activations were freed
    source: int = -1  # unit where a skip connection starts; only in messages over skip connections

    @property
    def part(self) -> Range:
        """Range of the flat parameter vector on which the operation works."""
        assert self.range is not None, self
        return self.range

    def touches(self, part: Range) -> bool:
        """Return True if the operation's flat parameter range overlaps the range ``part``."""
        return self.range is not None and bool(self.range.intersect(part))

    def __str__(self) -> str:
        fields = [str(n) for n in (self.microbatch, self.unit) if n >= 0]
        if self.range is not None:
            fields.append(f"[{self.range.start}:{self.range.stop}]")
        if self.source >= 0:
            fields.append(f"from {self.source}")
        if self.recompute:
            fields.append("again")
        return f"{self.kind.name}({', '.join(fields)})"
