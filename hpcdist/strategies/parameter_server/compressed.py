"""The lock-step parameter server with compressed gradients: push payloads, pull parameters as they are.

A worker that speaks encodes what it pushes of each range, tensor by tensor, and sends that as one message
(`PayloadTransport`). A server decodes and adds in float32, in the order of the workers, its own gradients in their
turn and uncompressed: they do not travel. There is one error of the compressor for each worker and element, none of
the sum.

With n values, c bytes of a payload for each, and float32 parameters, a dedicated worker sends c n a step, 4 n without
compression, and its servers 4 n to it in both cases. Where all of p ranks serve, each sends (c + 4) n (p-1)/p. With
``communication.algorithm = "hierarchical"`` the workers of a node sum in float32 first, and only the one that speaks
for them encodes.

A step has the same bits in every repetition, and all workers have the same parameters. They are those of one process
that encodes and decodes for every worker. For another number of servers they are the same only where tensors are cut
alike: each piece of a tensor is encoded by itself, with its own scale. Colocated servers are other bits than
dedicated ones, since what a rank serves itself is not encoded.

Residuals of error feedback are those of the rank that encodes, a worker or the one that speaks for its node, and of
all ranges, so that other servers may serve them after a restore. What is then owed of a range that the rank
serves itself now is paid in full with its next gradient. In the first ``compression.warmup_steps`` updates gradients
travel as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import segments
from hpcdist.collectives.algorithms.ring import reduce_to_leader
from hpcdist.collectives.segments import scratch
from hpcdist.comm.communicator import Communicator
from hpcdist.compression.compressor import align
from hpcdist.strategies.compressed.config import SUMMED, CompressionConfig
from hpcdist.strategies.compressed.error_feedback import (
    ErrorFeedbackExchange,
    Residuals,
    with_loss_scale,
    without_loss_scale,
)
from hpcdist.strategies.compressed.reduction import GradientCoder
from hpcdist.strategies.compressed.registry import compressor
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.parameter_server.lockstep import LockStepExchange
from hpcdist.strategies.parameter_server.messages import MessageTransport, ReceiveQueue
from hpcdist.strategies.parameter_server.partition import Roles
from hpcdist.strategies.parameter_server.transport import GRADIENT, ServerTopology
from hpcdist.strategies.schedule.operations import Operation

_BYTES: Final = np.dtype(np.uint8)


class PayloadTransport(MessageTransport):
    """Message transport of payloads. Construction is collective over the world.

    What is pushed is encoded by ``coder`` where the step ``compresses``; gradients are then multiplied by
    ``loss_scale``. ``owes``: there may be residuals of ranges that this rank serves.
    """

    def __init__(self, topology: ServerTopology, coder: GradientCoder, *, compresses: bool) -> None:
        self.coder, self.compresses, self.loss_scale, self.owes = coder, compresses, 1.0, False
        super().__init__(topology)
        self._payloads: dict[Range, Array] = {}

    def begin(self, *, compresses: bool) -> None:
        """Record whether the gradients of the next step are compressed, the same on all ranks (local)."""
        if compresses != self.compresses:
            self.compresses = compresses
            self._arrivals = self._receiver()

    def _receiver(self) -> ReceiveQueue:
        if not self.compresses:
            return super()._receiver()
        sizes = [self.coder.message(part).nbytes for part in self.topology.own]
        order = [(size, worker) for size in sizes if size for worker in self._heard()]
        return ReceiveQueue(self.comm, order, _BYTES, self.topology.context.on)

    def push(self, part: Range) -> None:
        """Encode the gradients of a range and begin to send them, unless this rank serves it."""
        if not self.compresses:
            super().push(part)
            return
        self._arrivals.begin()
        gradients, server = self.gradients.range(part), self.topology.owners[part]
        if self._node is not None:
            reduce_to_leader(self._node, gradients)
        if not self.speaks or server == self.topology.rank:
            return
        payload = self._payload(part)
        if payload.size:
            self.coder.encode(without_loss_scale(gradients, self.loss_scale), part, payload)
            self._sent.append(self.comm.isend(payload, server, GRADIENT))

    def _payload(self, part: Range) -> Array:
        """Return the memory for the payloads of ``part``, which stay there until `settle` (local)."""
        if not self._payloads:
            leaving = [leaving_part for leaving_part, server in self.topology.messages if server != self.topology.rank]
            sizes = [self.coder.message(leaving_part).nbytes for leaving_part in leaving]
            whole = segments.count_in_ledger(backend.empty(sum(map(align, sizes)), _BYTES, self.topology.context.on))
            start = 0
            for leaving_part, size in zip(leaving, sizes, strict=True):
                self._payloads[leaving_part] = whole[start : start + size]
                start += align(size)
        return self._payloads[part]

    def collect(self, part: Range) -> None:
        """Sum the pushes of an own range over the speaking workers, in their order."""
        if not self.compresses:
            super().collect(part)
            return
        self._arrivals.begin()
        gradients = self.gradients.range(part)
        total = without_loss_scale(gradients, self.loss_scale)
        if self.speaks:
            self._pay(part, total)
        self._add_all(part, total)
        with_loss_scale(total, gradients, self.loss_scale)

    def _add_all(self, part: Range, total: Array) -> None:
        """Add the workers' payloads to ``total``, which holds this rank's own gradients, if it is a worker."""
        message, place = self.coder.message(part), total
        if self.speaks and self.speakers[0] != self.topology.rank:  # its turn comes later
            place = scratch("parameter_server.sum", total.size, total.dtype, total)
        is_first = True
        for worker in self.speakers if message.nbytes else ():
            if worker == self.topology.rank:
                for unit in () if is_first else message.units:
                    where = unit.where.shift(-part.start).slice
                    total[where] += place[where]
                place = total
            elif is_first:
                self.coder.decode(self._arrivals.take(), part, place)
            else:
                self.coder.add(self._arrivals.take(), part, place)
            is_first = False

    def _pay(self, part: Range, values: Array) -> None:
        """Add the residuals of a range that this rank serves in full: its own gradients do not travel (local)."""
        if self.owes and self.coder.feedback is not None:
            owed = self.coder.feedback.compensate(part, values)
            values[...] = owed
            owed[...] = 0


@dataclass(frozen=True)
class PushCompression:
    """The compressor ``name``, its keys, and the seed of the run, from which all draws follow."""

    name: str
    config: CompressionConfig
    seed: int


class CompressedServerExchange(ErrorFeedbackExchange, LockStepExchange):
    """Parameter server in lock-step with compressed pushes. Collective over the world."""

    def __init__(
        self, context: RankContext, roles: Roles, servers: Communicator | None, compression: PushCompression
    ) -> None:
        config = self.config = compression.config
        encoder = compressor(compression.name, config)

        def carry(topology: ServerTopology) -> PayloadTransport:
            coder = GradientCoder(context.layout, encoder, compression.seed, 0)
            return PayloadTransport(topology, coder, compresses=config.warmup_steps == 0)

        super().__init__(context, roles, servers, carry=carry)
        assert isinstance(self.transport, PayloadTransport)
        self._payloads, self._coder = self.transport, self.transport.coder
        speakers, speaks = self._payloads.speakers, self._payloads.speaks
        speaker = speakers.index(self.topology.rank) if speaks else 0
        if compression.name not in SUMMED:  # which draw the same indices on all ranks
            self._coder.rank = speaker
        if config.error_feedback:
            can_roll_back = context.working is not None  # else a norm that is not finite ends the run
            parts = context.parts if speaks else ()
            self.residuals = Residuals(context, speaker, len(speakers), parts, can_roll_back=can_roll_back)
            self._coder.feedback = self.residuals.feedback

    @property
    def is_compressing(self) -> bool:
        """Whether the gradients of the next update are compressed (local)."""
        return self.sharded_update.optimizer.count >= self.config.warmup_steps

    def begin(self, operations: Sequence[Operation]) -> None:
        """Undo the encoding of a step that was given up (local)."""
        self._give_up()
        self._coder.step = self.sharded_update.optimizer.count
        self._payloads.begin(compresses=self.is_compressing)

    def scaled_by(self, loss_scale: float) -> None:
        """Record the loss scale of the step that begins (local)."""
        self._payloads.loss_scale = loss_scale

    def push(self, op: Operation) -> None:
        """Begin to send the gradients of a range to their server."""
        self._is_open = True
        super().push(op)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step, and commit its residuals."""
        if self._payloads.compresses:
            self._payloads.owes = False
        super().begin_update(scale)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, once the pieces are there."""
        super().restore(state)
        self._payloads.owes = True
