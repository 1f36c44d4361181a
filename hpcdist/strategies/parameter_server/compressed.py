"""A parameter server in lock-step to which workers push compressed gradients: `payloads` says how they travel.

A step has the same bits in every repetition, and all workers have the same parameters. They are those of one process
that encodes and decodes for every worker. For another number of servers they are the same only where tensors are cut
alike: each piece of a tensor is encoded by itself, with its own scale. Colocated servers are other bits than dedicated
ones, since what a rank serves itself is not encoded.

Error feedback is the worker's, or, where one speaks for a node, that one's. Mirrors get float32 sums, as without
compression; residuals are not mirrored. In the first ``compression.warmup_steps`` updates gradients travel as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdist.comm.communicator import Communicator
from hpcdist.strategies.compressed.catalogue import compressor
from hpcdist.strategies.compressed.coder import Coder
from hpcdist.strategies.compressed.config import SUMMED, CompressionConfig
from hpcdist.strategies.compressed.owing import Owing
from hpcdist.strategies.compressed.residuals import Residuals
from hpcdist.strategies.parameter_server.lockstep import LockStepExchange
from hpcdist.strategies.parameter_server.payloads import Payloads
from hpcdist.strategies.parameter_server.roles import Roles
from hpcdist.strategies.parameter_server.transport import Site
from hpcdist.strategies.schedule.operations import Operation
from hpcdist.strategies.seat import Seat


@dataclass(frozen=True)
class Compression:
    """The compressor ``name``, its keys, and the seed of the run, from which all draws follow."""

    name: str
    config: CompressionConfig
    seed: int


@dataclass(frozen=True)
class Voice:
    """One of the ``size`` workers that speak to servers."""

    rank: int
    size: int


class CompressedServerExchange(Owing, LockStepExchange):
    """Workers push payloads, servers sum what they say in float32, workers pull. Collective over the world."""

    def __init__(
        self,
        seat: Seat,
        roles: Roles,
        servers: Communicator | None,
        compression: Compression,
        *,
        mirrored: bool = False,
    ) -> None:
        config = self.config = compression.config
        made = compressor(compression.name, config)

        def carry(site: Site) -> Payloads:
            coder = Coder(seat.layout, made, compression.seed, 0)
            return Payloads(site, coder, compresses=config.warmup_steps == 0)

        super().__init__(seat, roles, servers, carry=carry, mirrored=mirrored)
        assert isinstance(self.transport, Payloads)
        self._payloads, self._coder = self.transport, self.transport.coder
        speakers, speaks = self._payloads.speakers, self._payloads.speaks
        voice = Voice(speakers.index(self.site.rank) if speaks else 0, len(speakers))
        if compression.name not in SUMMED:  # which draw the same indices on all ranks
            self._coder.rank = voice.rank
        if config.error_feedback:
            can_roll_back = seat.working is not None  # else a norm that is not finite ends the run
            parts = seat.parts if speaks else ()
            self.residuals = Residuals(seat, voice, parts, can_roll_back=can_roll_back)
            self._coder.feedback = self.residuals.feedback

    @property
    def is_compressing(self) -> bool:
        """Whether the gradients of the next update are compressed (local)."""
        return self.owner.optimizer.count >= self.config.warmup_steps

    def begin(self, operations: Sequence[Operation]) -> None:
        """Forget a step that was given up (local)."""
        self._give_up()
        self._coder.step = self.owner.optimizer.count
        self._payloads.begin(compresses=self.is_compressing)

    def scaled_by(self, loss_scale: float) -> None:
        """Take note of the loss scale of the step that begins (local)."""
        self._payloads.loss_scale = loss_scale

    def push(self, op: Operation) -> None:
        """Begin to bring the gradients of a range to their server."""
        self._is_open = True
        super().push(op)

    def begin_update(self, scale: float) -> None:
        """Begin the update of the step: what was encoded of its gradients counts."""
        if self._payloads.compresses:
            self._payloads.owes = False
        super().begin_update(scale)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned, once the pieces are there."""
        super().restore(state)
        self._payloads.owes = True
