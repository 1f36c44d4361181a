"""Router of a mixture of experts: scores, choice, capacity and load balancing.

The scores of E experts for a token come from its logits l = W x: "softmax" (Shazeer et al., arXiv:1701.06538), or the
"sigmoid" of each logit (DeepSeek-V3, arXiv:2412.19437). The k largest scores select the experts. The gates are these k
scores divided by their sum; for k = 1, the score (Switch, arXiv:2101.03961). For T tokens without padding:

    capacity           At most ceil(c k T / E) tokens per expert and sample, earlier tokens first; c = 0: no limit.
    balance loss       a E sum_e f_e P_e, with f_e the share of choices of expert e before drops, and P_e the mean of
                       its normalised scores (arXiv:2412.19437, eq. 17)
    z loss             z mean of (log sum exp l)^2 over the tokens (ST-MoE, arXiv:2202.08906)

Both losses are means over samples, weighted by the number of targets. The reported loss excludes them. Balancing
without a loss (Wang et al., arXiv:2408.15664) adds a bias per expert to the scores for the choice only. A step adds
``balance_rate * sign(mean load - load of the expert)`` to the bias.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device
from hpcdist.arrays.jit import jit
from hpcdist.models.config import ModelConfig
from hpcdist.models.experts import kernels
from hpcdist.models.layers.vector_math import SAMPLE_DTYPES, exp

EXTRA: Final = 4  # entries of `RouterState.seen` after the loads: dropped choices, entropy, balance loss, z loss


class RouterState:
    """State of the routers of all layers: load-balancing biases, one per expert, and statistics."""

    def __init__(self, config: ModelConfig) -> None:
        self.experts, self.per_token = config.experts, config.experts_per_token
        self.rate, self.first_layer = config.balance_rate, 1
        self.bias = np.zeros((config.layers, config.experts))
        # As in `take`. Choices are counted before drops, entropy is in nats, losses exclude their coefficients.
        self.seen = np.zeros((config.layers, config.experts + EXTRA))
        self._bias_there: Array | None = None
        self._figures_there: Array | None = None

    def bias_of(self, layer: int, like: Array) -> Array:
        """Return a view of the router biases of ``layer``, one per expert, on the device of ``like``."""
        bias = self.bias
        if is_device(like):
            if self._bias_there is None:
                self._bias_there = backend.place(self.bias, "gpu")
            bias = self._bias_there
        return bias[layer - self.first_layer]

    def figures_of(self, layer: int, like: Array) -> Array:
        """Return a view of the sums (entropy, balance loss, z loss) of ``layer``, on the device of ``like``."""
        if not is_device(like):
            return self.seen_of(layer)[self.experts + 1 :]
        if self._figures_there is None:
            self._figures_there = backend.zeros((len(self.seen), EXTRA - 1), self.seen.dtype, "gpu")
        return self._figures_there[layer - self.first_layer]

    def seen_of(self, layer: int) -> np.ndarray:
        """Return a view of the host statistics of ``layer``, with the columns of `take`."""
        row: np.ndarray = self.seen[layer - self.first_layer]
        return row

    def take(self) -> np.ndarray:
        """Return the router statistics since the last call of `take`, and reset the statistics to 0.

        A row per layer: tokens that chose each expert, dropped choices, sums of entropy, balance loss and z loss.
        """
        if self._figures_there is not None:
            self.seen[:, self.experts + 1 :] += backend.to_host(self._figures_there)
            self._figures_there = None
        taken, self.seen[...] = self.seen.copy(), 0
        return taken

    def balance(self, loads: np.ndarray) -> None:
        """Update the router biases after a step in which ``loads[l, e]`` tokens chose expert e of layer l."""
        if self.rate:
            self.bias += self.rate * np.sign(loads.sum(axis=1, keepdims=True) - self.experts * loads)
            self._bias_there = None

    def state(self) -> dict[str, Any]:
        """Return the router biases as a dict of JSON values, or {} if no router uses a bias."""
        return {"router_bias": self.bias.tolist()} if self.rate or self.bias.any() else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the biases from ``state``, a result of `state`. Ignore biases of a model with other sizes."""
        rows = state.get("router_bias", [])
        if [len(row) for row in rows] == [self.experts] * len(self.bias):
            self.bias[...] = rows
            self._bias_there = None


def capacity(config: ModelConfig, context: int) -> int:
    """Return the largest number of tokens that an expert accepts from a sample of ``context`` tokens."""
    even = config.experts_per_token * context / config.experts
    return min(context, math.ceil(config.capacity_factor * even - 1e-9)) if config.capacity_factor else context


def choose(logits: Array, bias: Array, kind: str, chosen: Array, gates: Array) -> None:
    """Choose k of E experts for each token, from the router ``logits`` of shape (tokens, E).

    ``bias``: addend of the scores for the choice, but not for the gates. ``kind``: score function, "softmax" or
    "sigmoid". Outputs, of shape (tokens, k): expert indices ``chosen``, and weights ``gates`` of these experts.
    """
    (kernels.choose if is_device(logits) else _choose)(logits, bias, kind == "sigmoid", chosen, gates)


def count(chosen: Array, token_ranges: Array, experts: int) -> np.ndarray:
    """Count the tokens of each range that chose each expert. Return an int32 array (samples, ranges, experts).

    ``chosen``: expert indices (tokens, k). ``token_ranges``: (first, end) of each range, of shape (samples, ranges, 2).
    """
    counts = backend.zeros(
        (*token_ranges.shape[:2], experts), np.dtype(np.int32), "gpu" if is_device(chosen) else "cpu"
    )
    (kernels.count if is_device(chosen) else _count)(chosen, token_ranges, counts)
    return backend.to_host(counts)


def place(
    chosen: Array,
    token_ranges: Array,
    counts: np.ndarray,
    before: np.ndarray,
    capacities: np.ndarray,
    buffer_rows: Array,
) -> np.ndarray:
    """Assign each (token, expert) pair a row of a buffer sorted by expert. Return each expert's first row, and the end.

    ``chosen``, ``token_ranges``: as for `count`. ``counts``, ``before``: numbers of pairs per expert in and before each
    range. ``capacities[s]``: largest number of pairs per expert in sample s; later pairs are dropped.
    ``buffer_rows[t, j]``: output, the row of choice j of token t, or -1 if the pair is dropped.
    """
    # Shapes: `counts` (from `count`) and `before` (samples, ranges, experts). The rows of an expert are in token order.
    kept = np.clip(capacities[:, None, None] - before, 0, counts).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(kept.sum(axis=(0, 1)))])
    by_run = kept.reshape(-1, kept.shape[-1])
    first = starts[:-1] + np.cumsum(by_run, axis=0) - by_run
    table = np.stack([first.reshape(kept.shape), kept], axis=-1)
    buffer_rows[...] = -1
    if is_device(chosen):
        kernels.place(chosen, token_ranges, backend.place(table, "gpu"), buffer_rows)
    else:
        _place(chosen, token_ranges, table, buffer_rows)
    return starts


def gradient_of_logits(
    logits: Array,
    chosen: Array,
    gates: Array,
    dgates: Array,
    kind: str,
    token_ranges: Array,
    table: np.ndarray,
    loss_sums: Array,
) -> None:
    """Overwrite the router ``logits`` with their gradient, and add the loss statistics of all tokens to ``loss_sums``.

    ``chosen``, ``gates``, ``kind``: as for `choose`. ``dgates``: gradient of ``gates``. ``token_ranges``: as for
    `count`. ``table``: one row per sample, with each expert's fraction of the choices, then the coefficients of the
    balance loss and the z loss. ``loss_sums``: sums of entropy, balance loss and z loss.
    """
    # Tokens outside the ranges are padding, with gradient 0.
    on_device = is_device(logits)
    run = kernels.choose_backward if on_device else _choose_backward
    there = backend.place(table, "gpu") if on_device else table
    run(logits, chosen, gates, dgates, kind == "sigmoid", token_ranges, there, loss_sums)


@jit
def _scores(logits: Any, sigmoid: Any, scores: Any, soft: Any) -> Any:
    most = logits[0]
    for e in range(1, logits.size):
        most = max(most, logits[e])
    total = logits.dtype.type(0)
    for e in range(logits.size):
        soft[e] = exp(logits[e] - most)
        total += soft[e]
    one = logits.dtype.type(1)
    sum_of_scores = logits.dtype.type(0)
    for e in range(logits.size):
        soft[e] /= total
        scores[e] = one / (one + exp(-logits[e])) if sigmoid else soft[e]
        sum_of_scores += scores[e]
    return sum_of_scores, most + np.log(total)


@jit
def _choose(logits: Any, bias: Any, sigmoid: Any, chosen: Any, gates: Any) -> None:
    tokens, count = chosen.shape
    scores, soft = np.empty(logits.shape[1], logits.dtype), np.empty(logits.shape[1], logits.dtype)
    for t in range(tokens):
        _scores(logits[t], sigmoid, scores, soft)
        total = logits.dtype.type(0)
        for j in range(count):
            best = -1
            for e in range(scores.size):
                taken = False
                for before in range(j):
                    taken = taken or chosen[t, before] == e
                # A NaN compares false: then the first unused experts are chosen, and the NaN shows in the gates.
                if not taken and (best < 0 or scores[e] + bias[e] > scores[best] + bias[best]):
                    best = e
            chosen[t, j] = best
            gates[t, j] = scores[best]
            total += scores[best]
        if count > 1:
            for j in range(count):
                gates[t, j] /= total


@jit
def _count(chosen: Any, runs: Any, counts: Any) -> None:
    for s in range(runs.shape[0]):
        for p in range(runs.shape[1]):
            for t in range(runs[s, p, 0], runs[s, p, 1]):
                for j in range(chosen.shape[1]):
                    counts[s, p, chosen[t, j]] += 1


@jit
def _place(chosen: Any, runs: Any, table: Any, places: Any) -> None:
    rows = np.zeros(table.shape[2], np.int64)
    for s in range(runs.shape[0]):
        for p in range(runs.shape[1]):
            rows[:] = 0
            for t in range(runs[s, p, 0], runs[s, p, 1]):
                for j in range(chosen.shape[1]):
                    e = chosen[t, j]
                    if rows[e] < table[s, p, e, 1]:
                        places[t, j] = table[s, p, e, 0] + rows[e]
                    rows[e] += 1


@jit
def _choose_backward(
    logits: Any,
    chosen: Any,
    gates: Any,
    dgates: Any,
    sigmoid: Any,
    runs: Any,
    table: Any,
    figures: Any,
) -> None:
    count, experts = chosen.shape[1], logits.shape[1]
    zero, one = logits.dtype.type(0), logits.dtype.type(1)
    scores, soft = np.empty(experts, logits.dtype), np.empty(experts, logits.dtype)
    dscores, even = np.empty_like(scores), np.empty_like(scores)
    end = 0
    for s in range(runs.shape[0]):
        balance, z = table[s, experts], table[s, experts + 1]
        for e in range(experts):  # gradient of the sample's balance loss for a normalised score of a token
            even[e] = balance * experts * table[s, e]
        for p in range(runs.shape[1]):
            for t in range(end, runs[s, p, 0]):
                logits[t] = 0
            end = runs[s, p, 1]
            for t in range(runs[s, p, 0], end):
                row = logits[t]
                total, log_sum = _scores(row, sigmoid, scores, soft)
                inside = zero
                for e in range(experts):
                    share = scores[e] / total
                    inside += even[e] * share
                    if share > 0:
                        figures[0] -= share * np.log(share)
                    figures[1] += experts * table[s, e] * share
                figures[2] += log_sum * log_sum
                # Softmax scores are normalised: their sum is 1 for any logits.
                for e in range(experts):
                    dscores[e] = (even[e] - inside) / total if sigmoid else even[e]
                if count == 1:
                    dscores[chosen[t, 0]] += dgates[t, 0]
                else:
                    of_gates, sum_of_chosen = zero, zero
                    for j in range(count):
                        of_gates += dgates[t, j] * gates[t, j]
                        sum_of_chosen += scores[chosen[t, j]]
                    for j in range(count):
                        dscores[chosen[t, j]] += (dgates[t, j] - of_gates) / sum_of_chosen
                inside = zero
                for e in range(experts):
                    inside += dscores[e] * scores[e]
                slope = logits.dtype.type(2 * z) * log_sum
                for e in range(experts):
                    slope_of_score = dscores[e] * (one - scores[e]) if sigmoid else dscores[e] - inside
                    row[e] = slope_of_score * scores[e] + slope * soft[e]
    logits[end:] = 0


_runs, _table = np.zeros((1, 1, 2), np.int64), np.zeros((1, 1, 2, 2), np.int64)
_chosen = np.zeros((1, 1), np.int32)
for _dtype in SAMPLE_DTYPES:
    _logits, _gates = np.ones((1, 2), _dtype), np.ones((1, 1), _dtype)
    _choose.sample(lambda x=_logits, g=_gates: (x, np.zeros(2), False, _chosen.copy(), g.copy()))
    _choose_backward.sample(
        lambda x=_logits, g=_gates: (x.copy(), _chosen, g, g, False, _runs, np.ones((1, 4)), np.zeros(EXTRA - 1))
    )
_count.sample(lambda: (_chosen, _runs, np.zeros((1, 1, 2), np.int32)))
_place.sample(lambda: (_chosen, _runs, _table, _chosen.copy()))
