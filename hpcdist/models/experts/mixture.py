"""Mixture of experts: tokens sorted by expert, and one matrix product per expert over its rows.

The forward pass copies each token to a row of each of its k experts, and applies each expert to its rows. It then sums
each token's k results, weighted by their gates. On a GPU, the host waits once for the number of rows per expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.attention.tiles import Pieces, consecutive_positions
from hpcdist.models.config import ModelConfig
from hpcdist.models.experts import kernels, router
from hpcdist.models.experts.router import RouterState
from hpcdist.models.layers.linear import add_to_rows, column_sums
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES
from hpcdist.models.stage import ActivationOperation, Gradients, Operations, Parameters, Saved

UP: Final = "experts.up"
DOWN: Final = "experts.down"
ACTIVATION: Final = "experts.activation"


class ExpertTensors(NamedTuple):
    """Weights and biases of this rank's experts, one array per expert. Each weight has the shape (outputs, inputs)."""

    weights: Sequence[Array]
    biases: Sequence[Array] | None


class ExpertGradients(NamedTuple):
    """Pairs (gradient array, add) of this rank's experts. If ``add`` is False, the gradient overwrites the array."""

    weights: Sequence[tuple[Array, bool]]
    biases: Sequence[tuple[Array, bool]] | None


class StayingRows:
    """Token exchange if each rank has all experts: no tokens are sent. Base class of exchanges between ranks."""

    attends = False  # True if ranks compute together, even ranks without samples

    def send_buffer(self, starts: np.ndarray, like: Array, parameters: Parameters, saved: Saved) -> Array:
        """Return the array to fill with the rows for `send_out`. ``starts``: first row of each expert, and the end."""
        return saved.empty("experts.rows", (int(starts[-1]), like.shape[1]), like.dtype)

    def send_out(
        self, rows: Array, starts: np.ndarray, parameters: Parameters, saved: Saved, *, back: bool = False
    ) -> Callable[[], tuple[Array, np.ndarray]]:
        """Start to send token rows to the ranks of their experts. Return a function that waits for incoming rows."""
        if not back:
            saved.keep("experts.received", rows)
        # The function returns the received rows, sorted by expert, and the first row of each local expert. If `back`,
        # `rows` are gradients.
        return lambda: (rows, starts)

    def tensors(self, parameters: Parameters, prefix: str, saved: Saved) -> ExpertTensors:
        """Return the tensors of this rank's experts for the linear layer named ``prefix``, which is `UP` or `DOWN`."""
        weights, biases = parameters[f"{prefix}.weight"], parameters.get(f"{prefix}.bias")
        return ExpertTensors([*matrices(weights)], None if biases is None else [bias.reshape(-1) for bias in biases])

    def gradients(self, parameters: Parameters, gradients: Gradients, prefix: str, saved: Saved) -> ExpertGradients:
        """Return the gradient arrays of this rank's experts for layer ``prefix``. Call this before `send_out`."""
        weights, add = gradients.into(f"{prefix}.weight")
        into = [(gradient, add) for gradient in matrices(weights)]
        if f"{prefix}.bias" not in parameters:
            return ExpertGradients(into, None)
        biases, add = gradients.into(f"{prefix}.bias")
        return ExpertGradients(into, [(gradient.reshape(-1), add) for gradient in biases])

    def result_buffer(
        self, name: str, shape: tuple[int, int], dtype: Any, saved: Saved, *, back: bool = False
    ) -> Array:
        """Return an uninitialised array for the expert outputs that the caller will pass to `bring_back`.

        ``name``: key of the array in ``saved``. ``back``: True in the backward pass, where the rows are gradients.
        """
        return (saved.scratch if back else saved.empty)(name, shape, dtype)

    def bring_back(self, rows: Array, name: str, saved: Saved, *, back: bool = False) -> Array:
        """Send the expert outputs ``rows`` back to the ranks of their tokens.

        Return the outputs for this rank's tokens, in the row order of `send_out`. ``name``: key of the result in
        ``saved``.
        """
        return rows


class WholeExperts:
    """Input and output of experts whose matrices are not sharded. Tensor-parallel experts derive from this class."""

    first = True  # True on the rank that adds terms which must be added once
    writes_whole = True  # True on the rank that writes the gradients of unsharded tensors

    def enter(self, x: Array, saved: Saved) -> Array:
        """Return the tokens of all tensor-parallel ranks, (batch, context, hidden). ``x``: tokens of this rank."""
        return x

    def partial(self, shape: tuple[int, ...], dtype: Any, saved: Saved) -> Array:
        """Return an uninitialised array for this rank's term of the expert output, which `leave` sums over ranks."""
        return saved.empty("experts.y", shape, dtype)

    def leave(self, partial: Array, saved: Saved) -> Array:
        """Sum the expert outputs ``partial`` over the tensor-parallel ranks. Return the sums for this rank's tokens."""
        return partial

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Return the output gradients of all tensor-parallel ranks. ``dy``: output gradients of this rank's tokens."""
        return dy

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Sum the input gradients ``dx`` over the tensor-parallel ranks. Return the sums for this rank's tokens."""
        return dx

    def sum_gates(self, dgates: Array) -> Array:
        """Sum ``dgates``, the gradients of the gates, over the tensor-parallel ranks in place. Return ``dgates``."""
        return dgates


class WholeSamples:
    """Position of this rank's tokens in samples that are not sharded. Context parallelism replaces this class."""

    def placed(self, tokens: int) -> tuple[int, Pieces]:
        """Return (tokens in a whole sample, ranges of this rank: (first row, end row, position in the sample))."""
        return tokens, consecutive_positions(tokens)

    def join(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens per expert before each local token range, tokens per expert in each sample).

        ``counts``: tokens per expert in each local range. Both results also count the tokens of other ranks.
        """
        return np.zeros(counts.shape, np.int64), counts[:, 0]


HERE: Final = StayingRows()
WHOLE: Final = WholeExperts()
UNCUT: Final = WholeSamples()


@dataclass(frozen=True)
class LocalExperts:
    """Router and experts for every transformer block. Implements `hpcdist.models.stage.ExpertsOperation`."""

    # E experts of inner width f, hidden width h, before sharding: `router.weight` (E, h), `experts.up.weight` (E, f,
    # h), or (E, 2, f, h) for gates and values, `experts.down.weight` (E, h, f).
    config: ModelConfig
    predictions: Callable[[int], int]  # number of targets of a sample, from its number of tokens
    state: RouterState  # biases and statistics of the router
    travel: StayingRows = HERE  # sends token rows to the ranks of their experts, and results back
    borders: WholeExperts = WHOLE  # gathers and sums inputs and outputs over tensor-parallel ranks
    samples: WholeSamples = UNCUT  # positions of this rank's tokens in the samples

    @property
    def attends(self) -> bool:
        return self.travel.attends

    def begin(
        self, parameters: Parameters, x: Array, activation: ActivationOperation, saved: Saved
    ) -> Callable[[], Array]:
        x = self.borders.enter(x, saved)
        tokens, places, gates, starts = self._route(parameters, x, saved)
        rows = self.travel.send_buffer(starts, tokens, parameters, saved)
        on_device = is_device(x)
        (kernels.spread if on_device else _spread)(tokens, places, rows)
        arrival = self.travel.send_out(rows, starts, parameters, saved)

        def finish() -> Array:
            out = self._multiply(parameters, *arrival(), activation, saved)
            saved.keep("experts.collected", out)
            y = self.borders.partial(x.shape, x.dtype, saved)
            (kernels.collect if on_device else _collect)(out, places, gates, y.reshape(tokens.shape))
            return self.borders.leave(y, saved)

        return finish

    def _multiply(
        self, parameters: Parameters, rows: Array, starts: np.ndarray, activation: ActivationOperation, saved: Saved
    ) -> Array:
        up, down = (self.travel.tensors(parameters, prefix, saved) for prefix in (UP, DOWN))
        wide = saved.empty(f"{UP}.y", (len(rows), matrices(parameters[f"{UP}.weight"]).shape[1]), rows.dtype)
        _products(up, rows, starts, wide)
        active = activation.forward(wide, self.config.activation, saved, name=ACTIVATION)
        out = self.travel.result_buffer(f"{DOWN}.y", rows.shape, rows.dtype, saved)
        _products(down if self.borders.first else down._replace(biases=None), active, starts, out)
        return self.travel.bring_back(out, "experts.out", saved)

    def begin_backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, activation: ActivationOperation, saved: Saved
    ) -> Callable[[], Array]:
        dy = self.borders.leave_backward(dy, saved)
        places, out, starts = saved["experts.places"], saved["experts.collected"], saved["experts.starts"]
        tokens: Array = saved["experts.x"].reshape(-1, dy.shape[-1])
        dgates = saved.scratch("experts.dgates", places.shape, dy.dtype)
        on_device = is_device(dy)
        backward = kernels.collect_backward if on_device else _collect_backward
        backward(dy.reshape(tokens.shape), places, saved["experts.gates"], out, dgates)
        into = [self.travel.gradients(parameters, gradients, prefix, saved) for prefix in (UP, DOWN)]
        arrival = self.travel.send_out(out, starts, parameters, saved, back=True)
        shape = dy.shape

        def finish() -> Array:
            drows = self._multiply_backward(parameters, into, *arrival(), activation, saved)
            dx = self._router_backward(parameters, gradients, tokens, self.borders.sum_gates(dgates), saved)
            (kernels.collect_onto if on_device else _collect_onto)(drows, places, dx)
            return self.borders.enter_backward(dx.reshape(shape), saved)

        return finish

    def _multiply_backward(
        self,
        parameters: Parameters,
        into: Sequence[ExpertGradients],
        dout: Array,
        starts: np.ndarray,
        activation: ActivationOperation,
        saved: Saved,
    ) -> Array:
        travel, active, rows = self.travel, saved[f"{ACTIVATION}.y"], saved["experts.received"]
        up, down = (travel.tensors(parameters, prefix, saved) for prefix in (UP, DOWN))
        into_up, into_down = into
        dactive = saved.scratch(f"{DOWN}.dx", active.shape, active.dtype)
        whole = self.borders.writes_whole
        _products_backward(down, into_down, dout, active, starts, dactive, saved, biased=whole)
        dwide = activation.backward(dactive, saved, name=ACTIVATION)
        drows = travel.result_buffer(f"{UP}.dx", rows.shape, rows.dtype, saved, back=True)
        _products_backward(up, into_up, dwide, rows, starts, drows, saved)
        return travel.bring_back(drows, "experts.drows", saved, back=True)

    def _route(self, parameters: Parameters, x: Array, saved: Saved) -> tuple[Array, Array, Array, np.ndarray]:
        # k experts per token. Returns (tokens, row of each choice, its gate, first row of each expert).
        config, tokens = self.config, x.reshape(-1, x.shape[-1])
        logits = saved.empty("experts.logits", (len(tokens), config.experts), x.dtype)
        namespace(x).matmul(tokens, parameters["router.weight"].T, out=logits)
        shape = len(tokens), config.experts_per_token
        chosen = saved.empty("experts.chosen", shape, np.int32)
        gates, places = saved.empty("experts.gates", shape, x.dtype), saved.empty("experts.places", shape, np.int32)
        router.choose(logits, self.state.bias_of(saved.layer, x), config.router, chosen, gates)
        whole, pieces = self.samples.placed(x.shape[1])
        sizes = np.full(len(x), whole) if saved.documents is None else saved.documents.filled
        runs = backend.place(_runs(pieces, x.shape[1], sizes), "gpu" if is_device(x) else "cpu")
        counts = router.count(chosen, runs, config.experts)
        before, loads = self.samples.join(counts)
        rooms = np.array([router.capacity(config, size) for size in sizes.tolist()], np.int64)
        starts = router.place(chosen, runs, counts, before, rooms, places)
        saved.keep("experts.x", x)
        saved.keep("experts.starts", starts)
        saved.keep("experts.routed", (sizes, runs, loads, counts.sum(axis=(0, 1))))
        return tokens, places, gates, starts

    def _router_backward(
        self, parameters: Parameters, gradients: Gradients, tokens: Array, dgates: Array, saved: Saved
    ) -> Array:
        config, chosen, logits = self.config, saved["experts.chosen"], saved["experts.logits"]
        sizes, runs, loads, counts = saved["experts.routed"]
        seen = self.state.seen_of(saved.layer)
        seen[: config.experts] += counts
        seen[config.experts] += counts.sum() - saved["experts.starts"][-1]
        of_token = saved.scale * np.array([self.predictions(size) / size for size in sizes.tolist()], np.float64)
        shares = loads / (config.experts_per_token * sizes[:, None])
        router.gradient_of_logits(
            *(logits, chosen, saved["experts.gates"], dgates, config.router, runs),
            np.column_stack([shares, config.balance_loss * of_token, config.z_loss * of_token]),
            self.state.figures_of(saved.layer, logits),
        )
        matmul = namespace(logits).matmul
        dweight, add = gradients.into("router.weight")
        product = saved.scratch("linear.dweight", dweight.shape, dweight.dtype) if add else dweight
        if self.borders.writes_whole:
            matmul(logits.T, tokens, out=product)
        else:
            product[...] = 0
        if add:
            dweight += product
        dx = saved.scratch("experts.dx", tokens.shape, tokens.dtype)
        if self.borders.first:
            matmul(logits, parameters["router.weight"], out=dx)
        else:
            dx[...] = 0
        return dx


def with_experts(operations: Operations, config: ModelConfig, predictions: Callable[[int], int]) -> Operations:
    """Return ``operations``, with experts if ``config`` has experts. ``predictions(n)``: targets among n tokens."""
    if not config.experts:
        return operations
    return replace(operations, experts=LocalExperts(config, predictions, RouterState(config)))


def _runs(pieces: Pieces, tokens: int, sizes: np.ndarray) -> np.ndarray:
    # Row ranges [first, end) without padding, of shape (samples, ranges, 2). `pieces` has (first row, end row, position
    # in the sample) of each range. `tokens` is the rows of a sample on this rank, `sizes` the tokens of each whole
    # sample.
    start, end, place = np.array(pieces).T
    first = tokens * np.arange(len(sizes))[:, None] + start
    return np.stack([first, first + np.clip(sizes[:, None] - place, 0, end - start)], axis=-1)


def _slices(starts: np.ndarray) -> Iterator[tuple[int, slice]]:
    return ((e, slice(start, end)) for e, (start, end) in enumerate(pairwise(starts.tolist())) if start < end)


def matrices(stacked: Array) -> Array:
    """Return a view, of shape (experts, outputs, inputs), of ``stacked``, the weights of all experts."""
    return stacked.reshape(len(stacked), -1, stacked.shape[-1])


def _products(tensors: ExpertTensors, rows: Array, starts: np.ndarray, y: Array) -> None:
    matmul = namespace(rows).matmul
    for e, where in _slices(starts):
        matmul(rows[where], tensors.weights[e].T, out=y[where])
        if tensors.biases is not None:
            add_to_rows(y[where], tensors.biases[e])


def _products_backward(
    tensors: ExpertTensors,
    into: ExpertGradients,
    dy: Array,
    x: Array,
    starts: np.ndarray,
    dx: Array,
    saved: Saved,
    *,
    biased: bool = True,
) -> None:
    idle = set(np.flatnonzero(np.diff(starts) == 0).tolist())
    for index, (weight, add) in enumerate(into.weights):
        if index in idle and not add:
            weight[...] = 0
    for index, (bias, add) in enumerate(into.biases or ()):
        if not (add or (biased and index not in idle)):
            bias[...] = 0
    matmul = namespace(dy).matmul
    for e, where in _slices(starts):
        weight, add = into.weights[e]
        product = saved.scratch("linear.dweight", weight.shape, weight.dtype) if add else weight
        matmul(dy[where].T, x[where], out=product)
        if add:
            weight += product
        if into.biases is not None and biased:
            column_sums(dy[where], *into.biases[e])
        matmul(dy[where], tensors.weights[e], out=dx[where])


@jit
def _spread(tokens: Any, places: Any, rows: Any) -> None:
    for t in range(places.shape[0]):
        for j in range(places.shape[1]):
            if places[t, j] >= 0:
                rows[places[t, j]] = tokens[t]


@jit
def _collect(rows: Any, places: Any, gates: Any, y: Any) -> None:
    for t in range(places.shape[0]):
        y[t] = 0
        for j in range(places.shape[1]):
            if places[t, j] >= 0:
                gate, row = gates[t, j], rows[places[t, j]]
                for c in range(y.shape[1]):
                    y[t, c] += gate * row[c]


@jit(fastmath=REORDER)
def _collect_backward(dy: Any, places: Any, gates: Any, rows: Any, dgates: Any) -> None:
    for t in range(places.shape[0]):
        for j in range(places.shape[1]):
            dgate = rows.dtype.type(0)
            if places[t, j] >= 0:
                gate, row, from_y = gates[t, j], rows[places[t, j]], dy[t]
                for c in range(row.size):
                    dgate += row[c] * from_y[c]
                for c in range(row.size):
                    row[c] = gate * from_y[c]
            dgates[t, j] = dgate


@jit
def _collect_onto(rows: Any, places: Any, dx: Any) -> None:
    for t in range(places.shape[0]):
        for j in range(places.shape[1]):
            if places[t, j] >= 0:
                row = rows[places[t, j]]
                for c in range(row.size):
                    dx[t, c] += row[c]


for _dtype in SAMPLE_DTYPES:
    _rows, _gates, _places = np.ones((1, 2), _dtype), np.ones((1, 1), _dtype), np.zeros((1, 1), np.int32)
    _spread.sample(lambda x=_rows, p=_places: (x, p, x.copy()))
    _collect.sample(lambda x=_rows, p=_places, g=_gates: (x, p, g, x.copy()))
    _collect_backward.sample(lambda x=_rows, p=_places, g=_gates: (x, p, g, x.copy(), g.copy()))
    _collect_onto.sample(lambda x=_rows, p=_places: (x, p, x.copy()))
