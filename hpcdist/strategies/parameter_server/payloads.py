"""Gradients that come to their servers compressed; parameters go back as they are.

A worker that speaks encodes what it pushes of each range, tensor by tensor, and sends that as one message. A server
decodes and adds in float32, in the order of the workers, its own gradients in their turn and uncompressed: they do not
travel. There is one error of the compressor for each worker and element, none of the sum.

With n values, c bytes of a payload for each, and float32 parameters, a dedicated worker sends c n a step, 4 n without
compression, and its servers 4 n to it in both cases. Where all of p ranks serve, each sends (c + 4) n (p-1)/p. With
``communication.algorithm = "hierarchical"`` the workers of a node sum in float32 first, and only the one that speaks
for them encodes.

What is lost is kept by whoever encodes, for all ranges, so that other servers may serve them after a restore. What is
then owed of a range that the rank serves itself now is paid in full with its next gradient.
"""

from typing import Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array
from hpcdist.arrays.ranges import Range
from hpcdist.collectives import workspace
from hpcdist.collectives.leader import reduce_to_leader
from hpcdist.collectives.workspace import scratch
from hpcdist.compression.compressor import align
from hpcdist.strategies.compressed.coder import Coder
from hpcdist.strategies.compressed.owing import scaled, unscaled
from hpcdist.strategies.parameter_server.messages import Arrivals, Messages
from hpcdist.strategies.parameter_server.transport import GRADIENT, Site

_BYTES: Final = np.dtype(np.uint8)


class Payloads(Messages):
    """See `transport.Transport`. Making it is collective over the world.

    What is pushed is encoded by ``coder`` where the step ``compresses``; gradients are then multiplied by
    ``loss_scale``. ``owes``: there may be residuals of ranges that this rank serves.
    """

    def __init__(self, site: Site, coder: Coder, *, compresses: bool) -> None:
        self.coder, self.compresses, self.loss_scale, self.owes = coder, compresses, 1.0, False
        super().__init__(site)
        self._payloads: dict[Range, Array] = {}

    def begin(self, *, compresses: bool) -> None:
        """Take note of how the gradients of the next step travel, as all ranks do (local)."""
        if compresses != self.compresses:
            self.compresses = compresses
            self._arrivals = self._receiver()

    def _receiver(self) -> Arrivals:
        if not self.compresses:
            return super()._receiver()
        sizes = [self.coder.message(part).nbytes for part in self.site.own]
        order = [(size, worker) for size in sizes if size for worker in self._heard()]
        return Arrivals(self.comm, order, _BYTES, self.site.seat.on)

    def push(self, part: Range) -> None:
        """Encode the gradients of a range and begin to send them, unless this rank serves it."""
        if not self.compresses:
            super().push(part)
            return
        self._arrivals.begin()
        gradients, server = self.gradients.range(part), self.site.owners[part]
        if self._node is not None:
            reduce_to_leader(self._node, gradients)
        if not self.speaks or server == self.site.rank:
            return
        payload = self._payload(part)
        if payload.size:
            self.coder.encode(unscaled(gradients, self.loss_scale), part, payload)
            self._sent.append(self.comm.isend(payload, server, GRADIENT))

    def _payload(self, part: Range) -> Array:
        """Return where the payloads of ``part`` are written: they stay there until `settle` (local)."""
        if not self._payloads:
            leaving = [each for each, server in self.site.messages if server != self.site.rank]
            sizes = [self.coder.message(each).nbytes for each in leaving]
            whole = workspace.count(backend.empty(sum(map(align, sizes)), _BYTES, self.site.seat.on))
            start = 0
            for each, size in zip(leaving, sizes, strict=True):
                self._payloads[each] = whole[start : start + size]
                start += align(size)
        return self._payloads[part]

    def collect(self, part: Range) -> None:
        """Sum what is pushed of an own range over the workers that speak, the first one's first."""
        if not self.compresses:
            super().collect(part)
            return
        self._arrivals.begin()
        gradients = self.gradients.range(part)
        total = unscaled(gradients, self.loss_scale)
        if self.speaks:
            self._pay(part, total)
        self._add_all(part, total)
        scaled(total, gradients, self.loss_scale)

    def _add_all(self, part: Range, total: Array) -> None:
        """Sum the workers' payloads, and what is in ``total`` if this rank is one of them, into it."""
        message, place = self.coder.message(part), total
        if self.speaks and self.speakers[0] != self.site.rank:  # its turn comes later
            place = scratch("parameter_server.sum", total.size, total.dtype, total)
        is_first = True
        for worker in self.speakers if message.nbytes else ():
            if worker == self.site.rank:
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
        """Add to own gradients all that is owed of a range that this rank serves: it need not travel (local)."""
        if self.owes and self.coder.feedback is not None:
            owed = self.coder.feedback.compensate(part, values)
            values[...] = owed
            owed[...] = 0
