"""Point-to-point messages of a pipeline: activations, their gradients, and the lifetime of message buffers."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.comm.transport import LARGEST_TAG, Request
from hpcdist.errors import CommunicationError, ScheduleError
from hpcdist.models.arena import Arena
from hpcdist.models.stage import Saved
from hpcdist.strategies.core.operations import MESSAGES, Kind, Operation
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.core.tied import TIES

# Slots in the arena, in addition to the layers of the model, which count from 0: four per connection of units.
RECEIVED, GRADIENT_IN, ACTIVATION_OUT, GRADIENT_OUT = range(4)
AHEAD: Final = 2  # receives posted in advance: in steady state one per direction

Crossing = tuple[int, int]  # (micro-batch, connection that crosses ranks: see `StagePlacement.edge`)


class StageMessages:
    """Pipeline messages of one rank: activations and gradients. Construction is collective over the pipeline."""

    def __init__(self, context: RankContext, arena: Arena) -> None:
        self._comm, self._arena, self._model, self._dtype = context.pipeline, arena, context.model, context.model.dtype
        self._placement = context.placed
        self._edges = len(context.model.stages) + len(context.placed.skips)
        self._window = (LARGEST_TAG + 1 - TIES) // (2 * self._edges)  # number of micro-batches with different tags
        self._awaited: deque[tuple[Operation, int]] = deque()  # (receive, samples), in the order of the list
        self._posted: dict[tuple[Kind, int, int], tuple[Request, Array]] = {}
        self._activations: dict[Crossing, Request] = {}  # sent from memory that the backward pass also needs
        self._outbox: list[tuple[Request, Saved]] = []  # in flight, with memory that only the message needs
        self._received: set[Crossing] = set()
        self._agree_on_shapes()

    def _agree_on_shapes(self) -> None:
        if self._comm.size == 1:
            return
        placement = self._placement
        crossing = [(unit - 1, unit) for unit in placement.units if placement.crosses(unit)]
        crossing += [pair for pair in placement.skips if placement.rank_of(pair[0]) != placement.rank_of(pair[1])]
        local_shapes = {pair: (self._model.stages[pair[0]].output_shape(1), str(self._dtype)) for pair in crossing}
        for rank, peer_shapes in enumerate(self._comm.allgather_object(local_shapes)):
            if peer_shapes != local_shapes:
                raise CommunicationError(
                    f"pipeline ranks disagree on the shapes of activation messages (per sample): rank {rank} has "
                    f"{peer_shapes}, rank {self._comm.rank} has {local_shapes}; use the same recipe and the same "
                    "hpcdist version on all ranks"
                )

    def begin(self, operations: Sequence[Operation], samples: Sequence[int]) -> None:
        """Queue all receives in ``operations``, and post the first ones. ``samples``: samples of each micro-batch."""
        if len(samples) > self._window:
            self._check_order(operations)
        kinds = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
        self._awaited.extend(
            (op, samples[op.microbatch]) for op in operations if op.kind in kinds and samples[op.microbatch]
        )
        self._post()

    def _check_order(self, operations: Sequence[Operation]) -> None:
        latest: dict[tuple[Kind, int], Operation] = {}  # (kind, tag)
        for op in operations:
            if op.kind in MESSAGES:
                before = latest.setdefault((op.kind, self._tag(op)), op)
                if before.microbatch > op.microbatch:
                    raise ScheduleError(
                        f"pipeline rank {self._comm.rank}: {op} and the earlier {before} have the same message tag, "
                        f"because tags repeat after {self._window} micro-batches; pass micro-batches through each "
                        f"chunk in ascending order, or use at most {self._window} micro-batches"
                    )
                latest[op.kind, self._tag(op)] = op

    def _post(self) -> None:
        while self._awaited and len(self._posted) < AHEAD:
            op, samples = self._awaited.popleft()
            slot = RECEIVED if op.kind is Kind.RECV_ACTIVATION else GRADIENT_IN
            shape = self._model.stages[_before(op)].output_shape(samples)
            values = self._memory(slot, op.microbatch, self._edge(op)).empty("message", shape, self._dtype)
            request = self._comm.irecv(values.reshape(-1), self._peer(op), self._tag(op))
            self._posted[op.kind, op.microbatch, self._edge(op)] = request, values

    def receive(self, op: Operation) -> Array:
        """Wait for the message of the receive operation ``op``, and return the received array."""
        edge = self._edge(op)
        request, values = self._posted.pop((op.kind, op.microbatch, edge))
        self._post()
        request.wait()
        if op.kind is Kind.RECV_ACTIVATION:
            self._received.add((op.microbatch, edge))
        else:
            sent = self._activations.pop((op.microbatch, edge), None)
            if sent is not None:
                sent.wait()  # complete: the gradient answers this activation
        return values

    def forget(self, microbatch: int, unit: int) -> None:
        """Free the received input of the layer or skip connection ``unit`` for one micro-batch."""
        if (microbatch, unit) in self._received:
            self._received.remove((microbatch, unit))
            self._memory(RECEIVED, microbatch, unit).release()

    def forget_gradient(self, microbatch: int, unit: int) -> None:
        """Free the input gradient of the layer or skip connection ``unit`` for one micro-batch."""
        self._memory(GRADIENT_IN, microbatch, unit).release()

    def keep(self, microbatch: int, unit: int, dx: Array) -> Array:
        """Return a copy of ``dx``, the input gradient of layer ``unit`` in one micro-batch.

        `forget_gradient` frees the copy.
        """
        copy = self._memory(GRADIENT_IN, microbatch, unit).empty("message", dx.shape, dx.dtype)
        copy[...] = dx
        return copy

    def send_activation(self, op: Operation, y: Array, *, copy: bool) -> None:
        """Send ``y``, the input of layer ``op.unit``, to the rank that runs layer ``op.unit``."""
        if copy:
            self._send_copy(ACTIVATION_OUT, op, y)
        else:
            request = self._comm.isend(y.reshape(-1), self._peer(op), self._tag(op))
            self._activations[op.microbatch, self._edge(op)] = request

    def send_gradient(self, op: Operation, dx: Array) -> None:
        """Send ``dx``, the input gradient of layer ``op.unit``, to the rank that computed this layer's input."""
        self._send_copy(GRADIENT_OUT, op, dx)

    def poll(self) -> None:
        """Test the messages in flight, so that they make progress. Do not wait."""
        for request, _ in self._posted.values():
            request.test()
        self._reap()

    def finish(self) -> None:
        """Wait until all sent messages are complete, and free all received inputs."""
        for request in self._activations.values():
            request.wait()
        self._activations.clear()
        for request, saved in self._outbox:
            request.wait()
            saved.release()
        self._outbox.clear()
        for microbatch, unit in list(self._received):
            self.forget(microbatch, unit)

    def _memory(self, slot: int, microbatch: int, unit: int) -> Saved:
        return self._arena.saved(-1 - 4 * unit - slot, microbatch)

    def _edge(self, op: Operation) -> int:
        return self._placement.edge(op.source, op.unit)

    def _peer(self, op: Operation) -> int:
        ends = self._placement.rank_of(_before(op)), self._placement.rank_of(op.unit)
        return ends[op.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)]

    def _tag(self, op: Operation) -> int:
        back = op.kind in (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        # Distant micro-batches share a tag: they pass the same connection in ascending order, see `_check_order`.
        return TIES + 2 * (op.microbatch % self._window * self._edges + self._edge(op)) + back

    def _send_copy(self, slot: int, op: Operation, values: Array) -> None:
        self._reap()
        saved = self._memory(slot, op.microbatch, self._edge(op))
        message = saved.empty("message", values.shape, self._dtype)
        message[...] = values
        self._outbox.append((self._comm.isend(message.reshape(-1), self._peer(op), self._tag(op)), saved))

    def _reap(self) -> None:
        in_flight = []
        for request, saved in self._outbox:
            if request.test():
                saved.release()
            else:
                in_flight.append((request, saved))
        self._outbox = in_flight


def _before(op: Operation) -> int:
    return op.unit - 1 if op.source < 0 else op.source
