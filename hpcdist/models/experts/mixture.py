"""Feed-forwards of a mixture of experts: tokens sorted by expert, and one matrix product an expert over its rows.

For N tokens of width h with k experts each, forward and backward are four steps, none of which loops over tokens in
Python:

    route      logits of the N tokens; their experts and gates, and the row of each choice, sorted by expert
    spread     row <- token of the choice                                        (rows, h), rows = k N without drops
    multiply   up, activation, down: a BLAS call on the rows of each expert      (rows, f)
    collect    token <- sum of its k rows times their gates                      (N, h)

On a GPU the host waits once in the forward, for how often each expert was chosen: products are of so many rows.

The operations are those of k dense feed-forwards of width f, and of the router. Kept from forward to backward beside
the input are k N (2 h + f + f') numbers, with f' = 2 f for "swiglu", and N (E + 3 k + h) small ones and the output.

`StayingRows`, `WholeExperts` and `WholeSamples` do nothing: strategies that have experts on several ranks, or parts of
all of them, or of samples, replace them by all-to-alls, by sums, and by a message of how often experts were chosen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.attention.tiles import Pieces, one_piece
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
    """Weights (outputs, inputs) of the experts whose rows are here, in the order of their rows, and their biases."""

    weights: Sequence[Array]
    biases: Sequence[Array] | None


class ExpertGradients(NamedTuple):
    """Destinations of the gradients of `ExpertTensors`, and for each whether to add to what is there."""

    weights: Sequence[tuple[Array, bool]]
    biases: Sequence[tuple[Array, bool]] | None


class StayingRows:
    """Rows of experts that are all on this rank: what a strategy replaces that has them on several. Local."""

    attends = False  # whether ranks compute together

    def send_buffer(self, starts: np.ndarray, like: Array, parameters: Parameters, saved: Saved) -> Array:
        """Return memory for the rows of the tokens ``like`` (N, h), of which expert e has ``starts[e]`` and on."""
        return saved.empty("experts.rows", (int(starts[-1]), like.shape[1]), like.dtype)

    def send_out(
        self, rows: Array, starts: np.ndarray, parameters: Parameters, saved: Saved, *, back: bool = False
    ) -> Callable[[], tuple[Array, np.ndarray]]:
        """Begin to send the rows of tokens to their experts; return a call that waits for those of the experts here.

        It returns them sorted by expert, and where those of each begin. Here: as given. ``back``: gradients of the rows
        of the forward, whose places are the same.
        """
        if not back:
            saved.keep("experts.received", rows)
        return lambda: (rows, starts)

    def tensors(self, parameters: Parameters, prefix: str, saved: Saved) -> ExpertTensors:
        """Return the tensors of the experts whose rows `send_out` brings."""
        weights, biases = parameters[f"{prefix}.weight"], parameters.get(f"{prefix}.bias")
        return ExpertTensors([*matrices(weights)], None if biases is None else [each.reshape(-1) for each in biases])

    def gradients(self, parameters: Parameters, gradients: Gradients, prefix: str, saved: Saved) -> ExpertGradients:
        """Return where the gradients of `tensors` go, before their rows are sent."""
        weights, add = gradients.into(f"{prefix}.weight")
        into = [(each, add) for each in matrices(weights)]
        if f"{prefix}.bias" not in parameters:
            return ExpertGradients(into, None)
        biases, add = gradients.into(f"{prefix}.bias")
        return ExpertGradients(into, [(each.reshape(-1), add) for each in biases])

    def result_buffer(
        self, name: str, shape: tuple[int, int], dtype: Any, saved: Saved, *, back: bool = False
    ) -> Array:
        """Return memory for what experts make of their rows, which `bring_back` takes."""
        return (saved.scratch if back else saved.empty)(name, shape, dtype)

    def bring_back(self, rows: Array, name: str, saved: Saved, *, back: bool = False) -> Array:
        """Return the rows of the tokens of this rank for those of its experts, in the order of `send_out`."""
        return rows


class WholeExperts:
    """Borders of experts that no tensor axis cuts: what a strategy replaces that cuts them. Local."""

    first = True  # whether this rank adds what must be added once
    writes_whole = True  # whether it has the gradients of tensors that are not cut

    def enter(self, x: Array, saved: Saved) -> Array:
        """Return all tokens of ``x`` (batch, context, hidden), which stay until backward."""
        return x

    def partial(self, shape: tuple[int, ...], dtype: Any, saved: Saved) -> Array:
        """Return uninitialised memory for this rank's summand of the output."""
        return saved.empty("experts.y", shape, dtype)

    def leave(self, partial: Array, saved: Saved) -> Array:
        """Return this rank's part of the sum of the ranks' summands."""
        return partial

    def leave_backward(self, dy: Array, saved: Saved) -> Array:
        """Return the gradient of all tokens."""
        return dy

    def enter_backward(self, dx: Array, saved: Saved) -> Array:
        """Return this rank's part of the sum of the ranks' gradients of all tokens."""
        return dx

    def sum_gates(self, dgates: Array) -> Array:
        """Return the sum of the ranks' gradients of the gates, in place."""
        return dgates


class WholeSamples:
    """Samples whose tokens are all on this rank: what a strategy replaces that cuts them. Local."""

    def placed(self, tokens: int) -> tuple[int, Pieces]:
        """Return how many tokens whole samples have, and the pieces of which the ``tokens`` here are."""
        return tokens, one_piece(tokens)

    def join(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the choices of each expert in front of each piece, and in whole samples (samples, experts).

        ``counts`` (samples, pieces, experts) are those in the pieces here.
        """
        return np.zeros(counts.shape, np.int64), counts[:, 0]


HERE: Final = StayingRows()
WHOLE: Final = WholeExperts()
UNCUT: Final = WholeSamples()


@dataclass(frozen=True)
class LocalExperts:
    """Router and experts of each block; ``predictions`` says how many targets a sample of so many tokens has.

    Its tensors are ``router.weight`` (E, h), ``experts.up.weight`` (E, [2,] f, h), ``experts.down.weight`` (E, h, f)
    and, where linears have one, biases ``experts.up.bias`` (E, [2,] f) and ``experts.down.bias`` (E, h). A rank may
    have some of the experts, to which ``travel`` brings the rows, or parts of all of them, within ``borders``, or parts
    of ``samples``.
    """

    config: ModelConfig
    predictions: Callable[[int], int]
    state: RouterState
    travel: StayingRows = HERE
    borders: WholeExperts = WHOLE
    samples: WholeSamples = UNCUT

    @property
    def attends(self) -> bool:
        """Whether ranks compute together, those without samples too."""
        return self.travel.attends

    def begin(
        self, parameters: Parameters, x: Array, activation: ActivationOperation, saved: Saved
    ) -> Callable[[], Array]:
        """Route x (batch, context, hidden), or this rank's part of that, which is kept unchanged, and send its tokens.

        Return the call that waits for tokens, and returns y of the shape of x.
        """
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
        """Return what the experts make of the rows of all tokens here, in the order of `StayingRows.send_out`."""
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
        """Send the gradients of the tokens' rows to their experts; return the call that waits for them.

        It writes or adds all gradients, those of the balance and z losses too, and returns dx, a scratch array.
        """
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
        """Write or add the gradients of the experts; return those of the rows of this rank's tokens."""
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
        """Return the tokens (N, h), and of each the rows and gates of its choices (N, k); where each expert begins."""
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
        """Write or add the gradient of the router; return that of the tokens (N, h), a scratch array."""
        config, chosen, logits = self.config, saved["experts.chosen"], saved["experts.logits"]
        sizes, runs, loads, own = saved["experts.routed"]
        seen = self.state.seen_of(saved.layer)
        seen[: config.experts] += own
        seen[config.experts] += own.sum() - saved["experts.starts"][-1]
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
    """Return ``operations`` with the experts of ``config``, where it has some; see `LocalExperts`."""
    if not config.experts:
        return operations
    return replace(operations, experts=LocalExperts(config, predictions, RouterState(config)))


def _runs(pieces: Pieces, tokens: int, sizes: np.ndarray) -> np.ndarray:
    """Return the runs of `router.count` of samples of which ``sizes`` tokens are routed, ``tokens`` of each here."""
    start, end, place = np.array(pieces).T
    first = tokens * np.arange(len(sizes))[:, None] + start
    return np.stack([first, first + np.clip(sizes[:, None] - place, 0, end - start)], axis=-1)


def _slices(starts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and their slice."""
    return ((e, slice(start, end)) for e, (start, end) in enumerate(pairwise(starts.tolist())) if start < end)


def matrices(stacked: Array) -> Array:
    """View weights (experts, ..., inputs) as (experts, outputs, inputs)."""
    return stacked.reshape(len(stacked), -1, stacked.shape[-1])


def _products(tensors: ExpertTensors, rows: Array, starts: np.ndarray, y: Array) -> None:
    """Write rows weight^T + bias to y (rows, outputs), each row with the weight of its expert."""
    matmul = namespace(rows).matmul
    for e, own in _slices(starts):
        matmul(rows[own], tensors.weights[e].T, out=y[own])
        if tensors.biases is not None:
            add_to_rows(y[own], tensors.biases[e])


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
    """Write or add the gradients of the weights and biases of all experts, and write dy weight to dx.

    Unless ``biased``, the gradients of biases are another rank's.
    """
    none = set(np.flatnonzero(np.diff(starts) == 0).tolist())
    for place, (weight, add) in enumerate(into.weights):
        if place in none and not add:
            weight[...] = 0
    for place, (bias, add) in enumerate(into.biases or ()):
        if not (add or (biased and place not in none)):
            bias[...] = 0
    matmul = namespace(dy).matmul
    for e, own in _slices(starts):
        weight, add = into.weights[e]
        product = saved.scratch("linear.dweight", weight.shape, weight.dtype) if add else weight
        matmul(dy[own].T, x[own], out=product)
        if add:
            weight += product
        if into.biases is not None and biased:
            column_sums(dy[own], *into.biases[e])
        matmul(dy[own], tensors.weights[e], out=dx[own])


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
    """Overwrite ``rows`` with their gradient, and write that of the gates, 0 of those that were dropped."""
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
