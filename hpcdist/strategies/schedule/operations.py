"""The operations of a training step as data: the entries of the list that one rank executes in order.

Schedules generate the compute operations, an exchange the others; the executor runs the list, the verifier and the
simulator read the same list. `Kind` is what an entry does; the sets below it are the kinds that compute, use
parameters, send messages, or end what was started. `StagePlacement` is the rank of the pipeline that computes each
stage of the model: chunks of consecutive stages, in turns around the ranks (`looped`) or forth and back (`folded`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from hpcdist.arrays.ranges import Range


@dataclass(frozen=True)
class StagePlacement:
    """Pipeline rank of each of the ``chunks``: consecutive units, in the order of the model.

    ``skips`` are the pairs (unit, later unit that takes its output too) of a model that has some.
    """

    chunks: tuple[range, ...]
    ranks: tuple[int, ...]
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.chunks) == len(self.ranks) > 0, "one rank for each chunk"
        assert all(before.stop == after.start for before, after in zip(self.chunks, self.chunks[1:], strict=False))
        assert all(self.chunks) and set(self.ranks) == set(range(max(self.ranks) + 1)), "nobody without a unit"
        assert all(source + 1 < target for source, target in self.skips), "the unit before is no skip connection"

    @property
    def stages(self) -> int:
        """Number of ranks of the pipeline."""
        return max(self.ranks) + 1

    @property
    def units(self) -> range:
        """All units of the model."""
        return range(self.chunks[0].start, self.chunks[-1].stop)

    def of(self, rank: int) -> tuple[range, ...]:
        """Return the chunks of ``rank``, by their local number: ascending."""
        return tuple(chunk for chunk, owner in zip(self.chunks, self.ranks, strict=True) if owner == rank)

    def rank_of(self, unit: int) -> int:
        """Return the rank that computes ``unit``."""
        return self._ranks[unit]

    def crosses(self, unit: int) -> bool:
        """Whether the input of ``unit`` comes from another rank: that of the unit before."""
        return unit > self.chunks[0].start and self._ranks[unit] != self._ranks[unit - 1]

    def skips_into(self, unit: int) -> list[int]:
        """Return the units whose outputs ``unit`` takes beside that of the one before it, ascending."""
        return sorted(source for source, target in self.skips if target == unit)

    def skips_from(self, unit: int) -> list[int]:
        """Return the units that take the output of ``unit`` beside the one behind it, ascending."""
        return sorted(target for source, target in self.skips if source == unit)

    def edge(self, source: int, target: int) -> int:
        """Return the number of a connection: that of the target, from the unit before it; skips come behind those."""
        return target if source in (-1, target - 1) else self.units.stop + self.skips.index((source, target))

    @cached_property
    def _ranks(self) -> dict[int, int]:
        return {unit: rank for chunk, rank in zip(self.chunks, self.ranks, strict=True) for unit in chunk}


def looped(parts: Sequence[range], ranks: int) -> StagePlacement:
    """Return the placement of ``parts``, v for each of ``ranks``, one after the other, v times around."""
    assert len(parts) % ranks == 0, f"{len(parts)} chunks for {ranks} ranks"
    return StagePlacement(tuple(parts), tuple(number % ranks for number in range(len(parts))))


def folded(parts: Sequence[range], ranks: int) -> StagePlacement:
    """Return the placement of ``parts``, two for each of ``ranks``, to the last rank and back."""
    assert len(parts) == 2 * ranks, f"{len(parts)} chunks for {ranks} ranks"
    return StagePlacement(tuple(parts), (*range(ranks), *reversed(range(ranks))))


class Kind(Enum):
    """Kind of an operation."""

    FORWARD = "forward"  # (microbatch, unit): one unit of the model
    BACKWARD = "backward"  # (microbatch, unit): both gradients of one unit
    BACKWARD_INPUT = "backward_input"  # (microbatch, unit): the gradient of its input, and what is done at once
    BACKWARD_WEIGHT = "backward_weight"  # (microbatch, unit): the gradients of its weights that are left
    # (microbatch, unit): the input of a unit whose predecessor is on another rank, and the gradient of that input
    SEND_ACTIVATION = "send_activation"  # to the rank of the unit
    RECV_ACTIVATION = "recv_activation"  # from the rank of the unit before
    SEND_GRADIENT = "send_gradient"  # to the rank of the unit before
    RECV_GRADIENT = "recv_gradient"  # from the rank of the unit
    GATHER = "gather"  # (unit): its parameters, whole, over the data axis
    START_GATHER = "start_gather"  # (unit): the same, but it goes on beside what follows, until WAIT_GATHER
    WAIT_GATHER = "wait_gather"  # (unit): the end of a START_GATHER
    FREE = "free"  # (unit): memory of its whole parameters is given back; the shards stay (`zero.plain.PlainZero.free`)
    ADD = "add"  # (microbatch, range): gradients to those of earlier micro-batches, before they are overwritten
    REDUCE = "reduce"  # (range): gradients over the replicas
    COMBINE = "combine"  # (range): what REDUCEs have left of gradients, over the replicas that have the same part of it
    START = "start"  # (range): the same, but it goes on beside what follows, until WAIT
    POLL = "poll"  # progress of what was started, where no thread makes it
    WAIT = "wait"  # (range): the end of a START
    DEFER = "defer"  # (range): the same as START, but it goes on until the SETTLE of the next step
    SETTLE = "settle"  # (range): the end of a DEFER of the step before
    KEEP = "keep"  # (range): gradients stay with this rank, which updates by its own
    MIX_START = "mix_start"  # (range): parameters to neighbours on a graph, and theirs here, until MIX_WAIT
    MIX_WAIT = "mix_wait"  # (range): the end of a MIX_START
    MIX = "mix"  # (range): parameters become a weighted mean of the own ones and the neighbours'
    AVERAGE = "average"  # (range): parameters become their mean over all replicas, where that is due
    PUSH = "push"  # (range): gradients from a worker to the server that owns them
    COLLECT = "collect"  # (range): a server takes what the workers push
    PUBLISH = "publish"  # (range): a server gives new parameters to the workers
    PULL = "pull"  # (range): a worker takes them
    COPY_GRADIENT = "copy_gradient"  # gradient of the copy of a tied tensor to the stage that owns it
    COPY_VALUE = "copy_value"  # the new value of a tied tensor back to its copy
    SUM_ROWS = "sum_rows"  # of tensors that all ranks of the tensor axis have: each has the gradient of its own tokens
    AGREE = "agree"  # loss, found-inf, norm and the wish to stop; every REDUCE comes before it
    COMPRESS = "compress"  # (range): payloads of gradients are exchanged, after all ranks have agreed on the step
    DIRECTION = "direction"  # (range): gradients become update directions
    NORMS = "norms"  # norms of tensors that several ranks share, for layer-wise rates
    APPLY = "apply"  # (range): parameters take a step along them
    REFRESH = "refresh"  # (unit): its new parameters to the shards that are kept of them
    COMMIT = "commit"  # the new parameters, which ranks of a node share, take the place of the old ones


COMPUTE: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
USES: Final = COMPUTE[:3]  # kinds that read parameters: the gradients of weights need saved activations, not weights
MESSAGES: Final = (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
# Kinds that take gradients, which must be complete.
EXCHANGED: Final = (Kind.ADD, Kind.REDUCE, Kind.START, Kind.DEFER, Kind.PUSH, Kind.KEEP)
# Kinds that start an exchange beside the computation -> the kind that waits for its end.
ENDS: Final = {
    Kind.START: Kind.WAIT,
    Kind.DEFER: Kind.SETTLE,
    Kind.START_GATHER: Kind.WAIT_GATHER,
    Kind.MIX_START: Kind.MIX_WAIT,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """Entry of an operation list. ``unit`` is an index into the stages of the model, -1 where there is none.

    ``recompute`` marks a FORWARD that is run a second time because its activations were dropped. ``source`` is the unit
    whose output a message brings to ``unit``, or brings the gradient of, where that is not the one before: a skip
    connection.
    """

    kind: Kind
    microbatch: int = -1
    unit: int = -1
    range: Range | None = None
    recompute: bool = False
    source: int = -1

    @property
    def part(self) -> Range:
        """The range of an operation whose kind has one."""
        assert self.range is not None, self
        return self.range

    def touches(self, part: Range) -> bool:
        """Return whether its range, if it has one, has elements of ``part``."""
        return self.range is not None and bool(self.range.intersect(part))

    def __str__(self) -> str:
        where = [str(n) for n in (self.microbatch, self.unit) if n >= 0]
        if self.range is not None:
            where.append(f"[{self.range.start}:{self.range.stop}]")
        if self.source >= 0:
            where.append(f"from {self.source}")
        if self.recompute:
            where.append("again")
        return f"{self.kind.name}({', '.join(where)})"
