"""Activations and their gradients between neighbours of a pipeline, and how long their memory must live."""

from hpcdist.arrays.backend import Array
from hpcdist.comm.communicator import Request
from hpcdist.models.arena import Arena
from hpcdist.models.stage import Saved
from hpcdist.strategies.seat import Seat

# Places in the arena, beside the layers of the model, which count from 0.
RECEIVED, GRADIENT_IN, ACTIVATION_OUT, GRADIENT_OUT = -1, -2, -3, -4


class Neighbours:
    """The messages of one pipeline stage. A message is named by its micro-batch and direction, whatever the order.

    Sends never block. Shapes follow from the model and the number of samples, which both sides know: no hand-shake.
    """

    def __init__(self, seat: Seat, arena: Arena) -> None:
        self._comm, self._arena = seat.pipeline, arena
        self._dtype = seat.dtype
        first, last = seat.units[0], seat.units[-1]
        self._input_of = seat.model.stages[first - 1].output_shape if first else None
        self._output_of = seat.model.stages[last].output_shape
        self._inputs: dict[int, Array] = {}
        self._outbox: list[tuple[Request, Saved]] = []  # under way, and memory that only the message needs
        self._activations: dict[int, Request] = {}  # under way, out of memory that the backward needs too

    def recv_activation(self, microbatch: int, samples: int) -> None:
        """Receive the input of this stage from the previous one; it is kept until `forget`."""
        if samples:
            assert self._input_of is not None
            saved = self._arena.saved(RECEIVED, microbatch)
            x = saved.empty("x", self._input_of(samples), self._dtype)
            self._comm.recv(x.reshape(-1), self._comm.rank - 1, 2 * microbatch)
            self._inputs[microbatch] = x

    def received(self, microbatch: int, inputs: Array) -> Array:
        """Return the input of this stage: ``inputs``, those of the data, on the first."""
        return inputs if self._input_of is None else self._inputs[microbatch]

    def forget(self, microbatch: int) -> None:
        """Give back the memory of the input and of the gradient that came in."""
        if self._inputs.pop(microbatch, None) is not None:
            self._arena.saved(RECEIVED, microbatch).release()
        self._arena.saved(GRADIENT_IN, microbatch).release()

    def send_activation(self, microbatch: int, y: Array, *, copy: bool) -> None:
        """Send the output of this stage to the next one; ``copy`` where ``y`` will be gone before the backward."""
        if copy:
            self._send_copy(ACTIVATION_OUT, microbatch, y, self._comm.rank + 1, 2 * microbatch)
        else:
            self._activations[microbatch] = self._comm.isend(y.reshape(-1), self._comm.rank + 1, 2 * microbatch)

    def recv_gradient(self, microbatch: int, samples: int) -> Array:
        """Receive the gradient of the output from the next stage, which then has had the output."""
        sent = self._activations.pop(microbatch, None)
        dy = self._arena.saved(GRADIENT_IN, microbatch).empty("dy", self._output_of(samples), self._dtype)
        self._comm.recv(dy.reshape(-1), self._comm.rank + 1, 2 * microbatch + 1)
        if sent is not None:
            sent.wait()
        return dy

    def send_gradient(self, microbatch: int, dx: Array) -> None:
        """Send the gradient of the input to the previous stage, from a copy: the memory of ``dx`` is free at once."""
        self._send_copy(GRADIENT_OUT, microbatch, dx, self._comm.rank - 1, 2 * microbatch + 1)

    def finish(self) -> None:
        """Wait for all that is under way, at the end of a list."""
        for request in self._activations.values():
            request.wait()
        self._activations.clear()
        for request, saved in self._outbox:
            request.wait()
            saved.release()
        self._outbox.clear()
        for microbatch in list(self._inputs):
            self.forget(microbatch)

    def _send_copy(self, place: int, microbatch: int, values: Array, peer: int, tag: int) -> None:
        self._reap()
        saved = self._arena.saved(place, microbatch)
        message = saved.empty("message", values.shape, self._dtype)
        message[...] = values
        self._outbox.append((self._comm.isend(message.reshape(-1), peer, tag), saved))

    def _reap(self) -> None:
        """Give back the memory of messages that are through."""
        under_way = []
        for request, saved in self._outbox:
            if request.test():
                saved.release()
            else:
                under_way.append((request, saved))
        self._outbox = under_way
