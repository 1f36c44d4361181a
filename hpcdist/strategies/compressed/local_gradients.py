"""Gradients that stay with their rank until all have agreed on the step, and then travel through a momentum.

For compressors that take the place of an optimizer's momentum: what they send is no sum of gradients, and they keep
state that no step may touch which is not made. So the order of a step is: gradients are complete and nothing is sent
(KEEP), all ranks agree that loss and gradients are finite (AGREE), payloads travel and become the directions of this
step (COMPRESS), and the update follows. A step that is not made has encoded nothing, and nothing has to be taken back.

The norm of the sum of the gradients is then not known. Gradients are divided by the samples of the whole batch, and
what is told as the gradient norm is sqrt(sum over the ranks of |g_r|^2): the norm of their sum, were those of different
ranks orthogonal, as noise is; where all ranks have the same gradient, theirs has sqrt(P) times that norm. Clipping goes
by the same estimate (Lin et al., arXiv:1712.01887, section 3.2): each of P replicas clips its own gradient at
``optimizer.clip_norm`` / sqrt(P), its stages and the parts of its tensor axis together by one factor. (A rank that
clips the mean gradient of its own samples at clip_norm, which is P g_r, clips sqrt(P) times harder.)
"""

from dataclasses import replace

import numpy as np

from hpcdist.compression import dgc
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.schedule.operations import Kind, Operation
from hpcdist.strategies.seat import Seat


class LocalGradients(AllreduceExchange):
    """What such exchanges share. The owner steps by ``optimizer``, which has no momentum of its own."""

    def __init__(self, seat: Seat, optimizer: OptimizerConfig) -> None:
        super().__init__(replace(seat, optimizer=optimizer))
        self._replica = 0.0  # the squared norm of this replica's gradients, all stages together
        self.carries_out = {**self.carries_out, Kind.KEEP: self.keep, Kind.COMPRESS: self.compress}

    def keep(self, op: Operation) -> None:
        """Leave the gradients as they are (local)."""

    def compress(self, op: Operation) -> None:
        """Make directions of the range out of the gradients of all ranks. Collective over the data axis."""
        raise NotImplementedError

    def norm_squared(self) -> float:
        """Return the squared norm of this rank's own gradients.

        Local, or collective over the world where replicas that are to be clipped have several ranks each.
        """
        own, seat = self.owner.norm_squared(), self.seat
        if seat.optimizer.clip_norm and seat.pipeline.size * seat.tensor.size > 1:
            replicas = np.zeros(seat.data.size)
            replicas[seat.data.rank] = own
            self._replica = float(self.agree(replicas)[seat.data.rank])
        else:
            self._replica = own
        return own

    def clip_factor(self) -> float:
        """Return what this rank multiplies its finite gradients by, one factor for all ranks of its replica (local)."""
        limit = self.seat.optimizer.clip_norm
        return dgc.clip_factor(self._replica, limit, self.seat.data.size) if limit else 1.0
