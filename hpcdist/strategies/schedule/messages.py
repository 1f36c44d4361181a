"""Point-to-point messages of a pipeline: activations and their gradients, and the lifetime of their buffers.

A message is named by its micro-batch, its unit and its direction. Receives are posted ahead of their use, so that
what arrives goes straight to its place; a buffer is given back only when its send has finished.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from hpcdist.arrays.backend import Array
from hpcdist.comm.communicator import Request
from hpcdist.errors import CommunicationError, ScheduleError
from hpcdist.models.runtime.arena import Arena
from hpcdist.models.stage import Saved
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.pipeline.tied import TIES
from hpcdist.strategies.schedule.operations import MESSAGES, Kind, Operation

# Places in the arena, beside the layers of the model, which count from 0: four for each connection of units.
RECEIVED, GRADIENT_IN, ACTIVATION_OUT, GRADIENT_OUT = range(4)
AHEAD: Final = 2  # receives that are posted before their turn: in steady state one of each direction
LAST_TAG: Final = 32767  # that every MPI library knows

Crossing = tuple[int, int]  # (micro-batch, connection that crosses ranks: see `StagePlacement.edge`)


class StageMessages:
    """Messages of one pipeline rank, each named by its micro-batch, its unit and its direction.

    Sends never block. Receives are posted ahead of their turn, so that no message waits for its receiver. Shapes follow
    from the model and the number of samples, which both sides know; that they do, construction checks once. Collective
    over the pipeline, then; all else is between two ranks. What travels has the type in which stages compute, also
    where parameters and their gradients have 16 bits.
    """

    def __init__(self, context: RankContext, arena: Arena) -> None:
        self._comm, self._arena, self._model, self._dtype = context.pipeline, arena, context.model, context.model.dtype
        self._placement = context.placed
        self._edges = len(context.model.stages) + len(context.placed.skips)
        self._window = (LAST_TAG + 1 - TIES) // (2 * self._edges)  # micro-batches whose tags differ
        self._awaited: deque[tuple[Operation, int]] = deque()  # (receive, samples), in the order of the list
        self._posted: dict[tuple[Kind, int, int], tuple[Request, Array]] = {}
        self._activations: dict[Crossing, Request] = {}  # sent out of memory that the backward needs too
        self._outbox: list[tuple[Request, Saved]] = []  # under way, and memory that only the message needs
        self._received: set[Crossing] = set()
        self._agree_on_shapes()

    def _agree_on_shapes(self) -> None:
        if self._comm.size == 1:
            return
        place = self._placement
        crossing = [(unit - 1, unit) for unit in place.units if place.crosses(unit)]
        crossing += [pair for pair in place.skips if place.rank_of(pair[0]) != place.rank_of(pair[1])]
        mine = {pair: (self._model.stages[pair[0]].output_shape(1), str(self._dtype)) for pair in crossing}
        for rank, theirs in enumerate(self._comm.allgather_object(mine)):
            if theirs != mine:
                raise CommunicationError(
                    f"pipeline rank {rank} sends and receives activations {theirs}, rank {self._comm.rank} {mine}; "
                    "give every rank the same recipe and the same version"
                )

    def begin(self, operations: Sequence[Operation], samples: Sequence[int]) -> None:
        """Post the first receives of a list; ``samples`` are those of each micro-batch.

        Raises ScheduleError, before any is posted, where tags would not tell its messages apart.
        """
        if len(samples) > self._window:
            self._check_order(operations)
        kinds = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)
        self._awaited.extend(
            (op, samples[op.microbatch]) for op in operations if op.kind in kinds and samples[op.microbatch]
        )
        self._post()

    def _check_order(self, operations: Sequence[Operation]) -> None:
        """Check that micro-batches of the same tag come in order; the other side checks its list too."""
        latest: dict[tuple[Kind, int], Operation] = {}  # (kind, tag)
        for op in operations:
            if op.kind in MESSAGES:
                before = latest.setdefault((op.kind, self._tag(op)), op)
                if before.microbatch > op.microbatch:
                    raise ScheduleError(
                        f"pipeline rank {self._comm.rank}: {op} comes behind {before}, and the tags of {self._window} "
                        "micro-batches differ; take them through a chunk in their order, or take fewer"
                    )
                latest[op.kind, self._tag(op)] = op

    def _post(self) -> None:
        while self._awaited and len(self._posted) < AHEAD:
            op, samples = self._awaited.popleft()
            place = RECEIVED if op.kind is Kind.RECV_ACTIVATION else GRADIENT_IN
            shape = self._model.stages[_before(op)].output_shape(samples)
            values = self._memory(place, op.microbatch, self._edge(op)).empty("message", shape, self._dtype)
            request = self._comm.irecv(values.reshape(-1), self._peer(op), self._tag(op))
            self._posted[op.kind, op.microbatch, self._edge(op)] = request, values

    def receive(self, op: Operation) -> Array:
        """Return the activation, or the gradient, of ``op``; it is kept until `forget`, or `forget_gradient`."""
        edge = self._edge(op)
        request, values = self._posted.pop((op.kind, op.microbatch, edge))
        self._post()
        request.wait()
        if op.kind is Kind.RECV_ACTIVATION:
            self._received.add((op.microbatch, edge))
        else:
            sent = self._activations.pop((op.microbatch, edge), None)
            if sent is not None:
                sent.wait()  # it has arrived: this is the answer
        return values

    def forget(self, microbatch: int, unit: int) -> None:
        """Release the memory of the input of ``unit``, where it came from another rank."""
        if (microbatch, unit) in self._received:
            self._received.remove((microbatch, unit))
            self._memory(RECEIVED, microbatch, unit).release()

    def forget_gradient(self, microbatch: int, unit: int) -> None:
        """Release the memory of the gradient of the input of ``unit``, which came from another rank, or was kept."""
        self._memory(GRADIENT_IN, microbatch, unit).release()

    def keep(self, microbatch: int, unit: int, dx: Array) -> Array:
        """Return a copy of ``dx``, the gradient of the input of ``unit``, that lives until `forget_gradient`."""
        copy = self._memory(GRADIENT_IN, microbatch, unit).empty("message", dx.shape, dx.dtype)
        copy[...] = dx
        return copy

    def send_activation(self, op: Operation, y: Array, *, copy: bool) -> None:
        """Send the input of a unit to its rank; ``copy`` where ``y`` will be gone before the backward."""
        if copy:
            self._send_copy(ACTIVATION_OUT, op, y)
        else:
            request = self._comm.isend(y.reshape(-1), self._peer(op), self._tag(op))
            self._activations[op.microbatch, self._edge(op)] = request

    def send_gradient(self, op: Operation, dx: Array) -> None:
        """Send the gradient of the input of a unit, from a copy: the memory of ``dx`` is free at once."""
        self._send_copy(GRADIENT_OUT, op, dx)

    def poll(self) -> None:
        """Make progress on what is under way: an MPI library without a progress thread moves nothing by itself."""
        for request, _ in self._posted.values():
            request.test()
        self._reap()

    def finish(self) -> None:
        """Wait for all that is under way, at the end of a list."""
        for request in self._activations.values():
            request.wait()
        self._activations.clear()
        for request, saved in self._outbox:
            request.wait()
            saved.release()
        self._outbox.clear()
        for microbatch, unit in list(self._received):
            self.forget(microbatch, unit)

    def _memory(self, place: int, microbatch: int, unit: int) -> Saved:
        return self._arena.saved(-1 - 4 * unit - place, microbatch)

    def _edge(self, op: Operation) -> int:
        return self._placement.edge(op.source, op.unit)

    def _peer(self, op: Operation) -> int:
        ends = self._placement.rank_of(_before(op)), self._placement.rank_of(op.unit)
        return ends[op.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)]

    def _tag(self, op: Operation) -> int:
        back = op.kind in (Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        # Far apart micro-batches share a tag: they pass the same connection in their order, see `_check_order`.
        return TIES + 2 * (op.microbatch % self._window * self._edges + self._edge(op)) + back

    def _send_copy(self, place: int, op: Operation, values: Array) -> None:
        self._reap()
        saved = self._memory(place, op.microbatch, self._edge(op))
        message = saved.empty("message", values.shape, self._dtype)
        message[...] = values
        self._outbox.append((self._comm.isend(message.reshape(-1), self._peer(op), self._tag(op)), saved))

    def _reap(self) -> None:
        """Free the memory of messages that are sent."""
        under_way = []
        for request, saved in self._outbox:
            if request.test():
                saved.release()
            else:
                under_way.append((request, saved))
        self._outbox = under_way


def _before(op: Operation) -> int:
    """Return the unit whose output a message is, or is the gradient of."""
    return op.unit - 1 if op.source < 0 else op.source
