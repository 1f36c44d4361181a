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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

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

ACTIVATION = "experts.activation"


class StayingRows:
    """Rows of experts that are all on this rank: what a strategy replaces that has them on several. Local."""

    keeps_output = True  # whether the output of the experts is what `bring_back` returns
    attends = False  # whether ranks compute together

    def send_out(
        self, rows: Array, starts: np.ndarray, saved: Saved, *, back: bool = False
    ) -> tuple[Array, np.ndarray]:
        """Return the rows of the experts of this rank, sorted by expert, and where those of each begin. Here: as given.

        ``back``: gradients of the rows of the forward, whose places are the same.
        """
        if not back:
            saved.keep("experts.received", rows)
        return rows, starts

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

    def forward(self, parameters: Parameters, x: Array, activation: ActivationOperation, saved: Saved) -> Array:
        """Return y of the shape of x, (batch, context, hidden) or this rank's part of that, which is kept unchanged."""
        x = self.borders.enter(x, saved)
        tokens, places, gates, starts = self._route(parameters, x, saved)
        rows = saved.empty("experts.rows", (int(starts[-1]), tokens.shape[1]), x.dtype)
        on_device = is_device(x)
        (kernels.spread if on_device else _spread)(tokens, places, rows)
        rows, starts = self.travel.send_out(rows, starts, saved)
        wide = _products(parameters, "experts.up", rows, starts, saved)
        active = activation.forward(wide, self.config.activation, saved, name=ACTIVATION)
        biased, keep = self.borders.first, self.travel.keeps_output
        out = _products(parameters, "experts.down", active, starts, saved, biased=biased, keep=keep)
        out = self.travel.bring_back(out, "experts.out", saved)
        saved.keep("experts.collected", out)
        y = self.borders.partial(x.shape, x.dtype, saved)
        (kernels.collect if on_device else _collect)(out, places, gates, y.reshape(tokens.shape))
        return self.borders.leave(y, saved)

    def backward(
        self, parameters: Parameters, gradients: Gradients, dy: Array, activation: ActivationOperation, saved: Saved
    ) -> Array:
        """Write or add all gradients, those of the balance and z losses too; return dx, a scratch array."""
        dy = self.borders.leave_backward(dy, saved)
        places, out = saved["experts.places"], saved["experts.collected"]
        tokens: Array = saved["experts.x"].reshape(-1, dy.shape[-1])
        dgates = saved.scratch("experts.dgates", places.shape, dy.dtype)
        on_device = is_device(dy)
        backward = kernels.collect_backward if on_device else _collect_backward
        backward(dy.reshape(tokens.shape), places, saved["experts.gates"], out, dgates)
        dout, starts = self.travel.send_out(out, saved["experts.starts"], saved, back=True)
        active, rows, whole = saved[f"{ACTIVATION}.y"], saved["experts.received"], self.borders.writes_whole
        dactive = _products_backward(parameters, gradients, "experts.down", dout, active, starts, saved, biased=whole)
        dwide = activation.backward(dactive, saved, name=ACTIVATION)
        drows = _products_backward(parameters, gradients, "experts.up", dwide, rows, starts, saved)
        drows = self.travel.bring_back(drows, "experts.drows", saved, back=True)
        dx = self._router_backward(parameters, gradients, tokens, self.borders.sum_gates(dgates), saved)
        (kernels.collect_onto if on_device else _collect_onto)(drows, places, dx)
        return self.borders.enter_backward(dx.reshape(dy.shape), saved)

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


def _products(
    parameters: Parameters,
    prefix: str,
    rows: Array,
    starts: np.ndarray,
    saved: Saved,
    *,
    biased: bool = True,
    keep: bool = True,
) -> Array:
    """Return rows weight^T + bias (rows, outputs), each row with the weight of its expert, kept as ``PREFIX.y``.

    Without ``keep`` it is a scratch array.
    """
    weights, biases = parameters[f"{prefix}.weight"], parameters.get(f"{prefix}.bias") if biased else None
    weights = weights.reshape(len(weights), -1, weights.shape[-1])  # (experts, outputs, inputs)
    y = (saved.empty if keep else saved.scratch)(f"{prefix}.y", (len(rows), weights.shape[1]), rows.dtype)
    matmul = namespace(rows).matmul
    for e, own in _slices(starts):
        matmul(rows[own], weights[e].T, out=y[own])
        if biases is not None:
            add_to_rows(y[own], biases[e].reshape(-1))
    return y


def _products_backward(
    parameters: Parameters,
    gradients: Gradients,
    prefix: str,
    dy: Array,
    x: Array,
    starts: np.ndarray,
    saved: Saved,
    *,
    biased: bool = True,
) -> Array:
    """Write or add the gradients of the weights and biases of all experts; return dy weight, a scratch array.

    Unless ``biased``, the gradients of biases are another rank's.
    """
    weights = parameters[f"{prefix}.weight"]
    into, add = gradients.into(f"{prefix}.weight")
    shape = len(weights), -1, weights.shape[-1]
    weights, into = weights.reshape(shape), into.reshape(shape)
    biases, add_bias = gradients.into(f"{prefix}.bias") if f"{prefix}.bias" in parameters else (None, False)
    if biases is not None and not (biased or add_bias):
        biases[...] = 0
    for e in np.flatnonzero(np.diff(starts) == 0).tolist():
        if not add:
            into[e] = 0
        if biases is not None and biased and not add_bias:
            biases[e] = 0
    dx = saved.scratch(f"{prefix}.dx", x.shape, x.dtype)
    product = saved.scratch("linear.dweight", into.shape[1:], into.dtype) if add else None
    matmul = namespace(dy).matmul
    for e, own in _slices(starts):
        matmul(dy[own].T, x[own], out=into[e] if product is None else product)
        if product is not None:
            into[e] += product
        if biases is not None and biased:
            column_sums(dy[own], biases[e].reshape(-1), add_bias)
        matmul(dy[own], weights[e], out=dx[own])
    return dx


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
