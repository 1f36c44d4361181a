"""The lock-step parameter server with compressed gradients: push payloads, pull uncompressed parameters.

A worker encodes the gradients of each range, tensor by tensor, and sends them as one message (`PayloadTransport`). A
server decodes and adds in float32, in the order of the workers. A colocated server does not encode local gradients.
There is one compression error per worker and element, and the sum adds no further error.

With n values and c bytes of payload per value, a dedicated worker sends c n per step instead of 4 n, and its servers
send 4 n to it. If all p ranks serve, each sends (c + 4) n (p-1)/p. With ``communication.algorithm = "hierarchical"``,
the workers of a node sum in float32 first, and one worker of the node encodes and sends the sum.

A step has the same bits in every run, and all workers have the same parameters, as if one process encoded and decoded
for every worker. Another number of servers gives the same bits only if tensors are cut alike, because each
piece of a tensor has a separate scale. Colocated servers give other bits than dedicated ones.

The rank that encodes has residuals of all ranges, so that other servers may serve the ranges after a restore. If this
rank serves a range after a restore, the residuals are added in full to the next gradient. In the first
``compression.warmup_steps`` updates, gradients are not compressed.
"""

from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import segments
from hpcdist.collectives.algorithms.ring import reduce_to_leader
from hpcdist.collectives.segments import scratch
from hpcdist.compression.compressor import align
from hpcdist.strategies.compressed.reduction import GradientCoder
from hpcdist.strategies.data.residuals import with_loss_scale, without_loss_scale
from hpcdist.strategies.parameter_server.messages import MessageTransport, ReceiveQueue
from hpcdist.strategies.parameter_server.transport import GRADIENT, ServerTopology

_BYTES: Final = np.dtype(np.uint8)


class PayloadTransport(MessageTransport):
    """Parameter-server transport of compressed gradients. Construction is collective over the world."""

    def __init__(self, topology: ServerTopology, coder: GradientCoder, *, compresses: bool) -> None:
        # owes: a restored checkpoint may have compression residuals for the ranges that this rank serves.
        self.coder, self.compresses, self.loss_scale, self.owes = coder, compresses, 1.0, False
        super().__init__(topology)
        self._payloads: dict[Range, Array] = {}

    def begin(self, *, compresses: bool) -> None:
        """Prepare for a step. ``compresses``: True to compress the gradients of this step, equal on all ranks."""
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
        # The buffers must not be reused before `settle`.
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
        # Sums all workers' gradients in ``total``. On entry, a worker has its gradients there.
        message, place = self.coder.message(part), total
        if self.speaks and self.speakers[0] != self.topology.rank:  # another worker comes first in rank order
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
        # Add compression residuals, restored for a range that this rank serves.
        if self.owes and self.coder.feedback is not None:
            owed = self.coder.feedback.compensate(part, values)
            values[...] = owed
            owed[...] = 0
