"""Key-value cache: a GPT computes only the newest token of each text, from the stored keys and values of the others.

`CachedDecoder` runs the stages of a model with three other operations: attention that reads the cache, and positions
of tokens that do not start at 0. The logits equal the logits of the whole text up to rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hpcdist.arrays import backend
from hpcdist.arrays.backend import Array, is_device, namespace
from hpcdist.arrays.jit import jit
from hpcdist.models.arena import Arena
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.attention.tiles import heads_of
from hpcdist.models.config import Rotation
from hpcdist.models.layers.embedding import LocalPositions
from hpcdist.models.layers.linear import LocalLinear, affine
from hpcdist.models.layers.rotary import LocalRotary, rotary_table, turn
from hpcdist.models.layers.vector_math import REORDER, SAMPLE_DTYPES
from hpcdist.models.model import Model
from hpcdist.models.stage import Parameters, Saved

FEW_ROWS: Final = 4  # rows of one pass over a weight


class Cache:
    """Keys and values of ``texts`` texts in all layers, and the texts of the current call."""

    def __init__(self, texts: int, context: int) -> None:
        self.texts, self.context = texts, context
        self.tokens: list[list[int]] = [[] for _ in range(texts)]  # tokens whose keys and values are stored
        self.rows: Sequence[int] = ()  # texts of the current call; a call with several tokens has one text
        self._arrays: dict[int, Array] = {}

    @property
    def ends(self) -> list[int]:
        """Number of tokens of each text in the current call, with the newest token."""
        return [len(self.tokens[text]) for text in self.rows]

    def of(self, layer: int, keys: Array) -> Array:  # (2, texts, key heads, context, head size)
        """Return the keys and values of ``layer``. ``keys``: array (..., key heads, tokens, head size) of its dtype."""
        if layer not in self._arrays:
            shape = (2, self.texts, keys.shape[-3], self.context, keys.shape[-1])
            self._arrays[layer] = namespace(keys).empty(shape, keys.dtype)
        return self._arrays[layer]


class CachedAttention(LocalAttention):
    """Causal attention of new tokens over the keys and values in a `Cache`. Only for forward passes."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def forward(
        self, qkv: Array, head_size: int, saved: Saved, *, kv: Array | None = None, window: int = 0, **options: Any
    ) -> Array:
        heads, cache, first = heads_of(qkv, kv, head_size), self._cache, 1 if kv is None else 0
        source = qkv if kv is None else kv
        keys, values = (heads.view(source, first + part, of_queries=False)[:, :, 0] for part in (0, 1))
        stored = cache.of(saved.layer, keys)
        if heads.context > 1:
            (text,) = cache.rows
            stored[0, text, :, : heads.context], stored[1, text, :, : heads.context] = keys[0], values[0]
            return super().forward(qkv, head_size, saved, kv=kv, window=window, **options)
        queries, xp = heads.view(qkv, 0, of_queries=True)[:, :, :, 0], namespace(qkv)
        y = saved.empty("attention.y", (heads.batch, 1, heads.queries * head_size), qkv.dtype)
        outputs = y.reshape(heads.batch, heads.shared, heads.group, head_size)
        for row, (text, end) in enumerate(zip(cache.rows, cache.ends, strict=True)):
            stored[0, text, :, end - 1], stored[1, text, :, end - 1] = keys[row, :, 0], values[row, :, 0]
            seen = slice(max(0, end - window) if window else 0, end)
            scores = xp.empty((heads.shared, heads.group, seen.stop - seen.start), qkv.dtype)
            backend.matmul(queries[row], stored[0, text, :, seen].swapaxes(1, 2), scores)
            scores *= qkv.dtype.type(heads.scale)
            scores -= scores.max(axis=-1, keepdims=True)
            xp.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            backend.matmul(scores, stored[1, text, :, seen], outputs[row])
        return y


class CachedLinear(LocalLinear):
    """Linear layers of the newest tokens of a few texts. Each weight is read once for `FEW_ROWS` texts."""

    def forward(self, parameters: Parameters, prefix: str, x: Array, saved: Saved, *, biased: bool = True) -> Array:
        return affine(parameters, prefix, x, saved, self.low_rank, biased=biased, product=few_rows_product)


def few_rows_product(a: Array, b: Array, out: Array) -> None:
    """Write the matrix product ``a @ b`` to ``out``, fast if ``a`` has 2 to 8 rows and ``b`` is a transposed weight."""
    # A BLAS copies the weight to packed panels first, which takes longer than the product of a few rows.
    if is_device(a) or not 1 < len(a) <= 2 * FEW_ROWS or a.dtype.name not in SAMPLE_DTYPES:
        backend.matmul(a, b, out)
    else:
        _few_rows_product(a, b.T, out, np.zeros(FEW_ROWS, a.dtype))


@jit(fastmath=REORDER)
def _few_rows_product(a: Any, weight: Any, out: Any, zeros: Any) -> None:
    rows, columns = a.shape
    for first in range(0, rows, 4):
        i, j, k = min(first + 1, rows - 1), min(first + 2, rows - 1), min(first + 3, rows - 1)
        x, y, z, t = a[first], a[i], a[j], a[k]
        for output in range(weight.shape[0]):
            w = weight[output]
            p, q, r, s = zeros[0], zeros[1], zeros[2], zeros[3]
            for column in range(columns):
                v = w[column]
                p += v * x[column]
                q += v * y[column]
                r += v * z[column]
                s += v * t[column]
            out[first, output], out[i, output], out[j, output], out[k, output] = p, q, r, s


for _dtype in SAMPLE_DTYPES:
    _square = np.ones((FEW_ROWS, FEW_ROWS), _dtype)
    _few_rows_product.sample(lambda x=_square: (x, x, x.copy(), x[0]))


class CachedPositions(LocalPositions):
    """Learned positions of the newest token of each text."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def forward(self, parameters: Parameters, prefix: str, y: Array, context: int, saved: Saved) -> Array:
        if context > 1:
            return super().forward(parameters, prefix, y, context, saved)
        for row, end in enumerate(self._cache.ends):
            y[row] += parameters[f"{prefix}.weight"][end - 1 : end]
        return y


class CachedRotary(LocalRotary):
    """Rotary positions of the newest token of each text."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def forward(self, x: Array, rotation: Rotation, rotated: int, saved: Saved) -> Array:
        if x.shape[1] > 1:
            return super().forward(x, rotation, rotated, saved)
        table = rotary_table(self._cache.context, rotation, x)
        for row, end in enumerate(self._cache.ends):
            turn(x[row : row + 1], rotated, table[end - 1 : end], 1)
        return x


class CachedDecoder:
    """Next-token logits of ``texts`` texts, from a GPT without a capacity of experts. Local."""

    def __init__(self, model: Model, parameters: Sequence[Parameters], arena: Arena, texts: int, context: int) -> None:
        self._model, self._parameters, self._arena = model, parameters, arena
        self._cache = cache = Cache(texts, context)
        linear = CachedLinear(getattr(model.operations.linear_column, "low_rank", None))
        self._operations = replace(
            model.operations,
            attention=CachedAttention(cache),
            positions=CachedPositions(cache),
            rotary=CachedRotary(cache),
            linear_column=linear,
            linear_row=linear,
        )

    def logits(self, texts: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Return {number of a text: logits of its next token}. ``texts``: {number: all tokens of the text}.

        Only the last ``context`` tokens of a text count. A text that is longer is computed as a whole in each call.
        """
        cache, result, newest = self._cache, dict[int, np.ndarray](), []
        for text, tokens in texts.items():
            window = list(tokens[-cache.context :])
            continues = len(window) > 1 and cache.tokens[text] == window[:-1]
            cache.tokens[text] = window
            if continues:
                newest.append(text)
            else:
                result[text] = self._run([text], [window])[0]
        if newest:
            rows = self._run(newest, [cache.tokens[text][-1:] for text in newest])
            result |= dict(zip(newest, rows, strict=True))
        return result

    def _run(self, texts: Sequence[int], tokens: Sequence[Sequence[int]]) -> np.ndarray:  # (texts, vocabulary)
        self._cache.rows = texts
        on = "gpu" if backend.is_device(next(iter(self._parameters[0].values()))) else "cpu"
        inputs = backend.place(np.array(tokens, np.int64), on)
        outputs = self._model.outputs(self._parameters, inputs, self._arena, self._operations, only_last=True)
        return backend.to_host(outputs[:, -1])
