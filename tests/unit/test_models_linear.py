"""Linear layers and embeddings: values, gradients, accumulation."""

import numpy as np
import pytest

from hpcdist.errors import DataError
from hpcdist.models.arena import Arena
from hpcdist.models.embedding import LocalEmbedding
from hpcdist.models.linear import LocalLinear


class Into:
    def __init__(self, views, add):
        self.views, self.add = views, add

    def into(self, name):
        return self.views[name], self.add


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("leading", "inputs", "outputs"), [((1,), 1, 1), ((3,), 5, 2), ((2, 3), 7, 11)])
def test_linear_against_the_formula(leading, inputs, outputs, bias, dtype, rng):
    x, dy = rng.standard_normal((*leading, inputs)), rng.standard_normal((*leading, outputs))
    parameters = {"l.weight": rng.standard_normal((outputs, inputs))}
    if bias:
        parameters["l.bias"] = rng.standard_normal(outputs)
    rows, drows = x.reshape(-1, inputs), dy.reshape(-1, outputs)
    want = {"l.weight": drows.T @ rows, "l.bias": drows.sum(0)}
    y, dx = x @ parameters["l.weight"].T + parameters.get("l.bias", 0), dy @ parameters["l.weight"]
    narrow = {name: value.astype(dtype) for name, value in parameters.items()}
    limit = 1e-5 if dtype == "float32" else 1e-13
    saved = Arena().saved(0)
    np.testing.assert_allclose(LocalLinear().forward(narrow, "l", x.astype(dtype), saved), y, atol=limit)
    views = {name: np.full_like(value, np.nan) for name, value in narrow.items()}
    got = LocalLinear().backward(narrow, Into(views, False), "l", dy.astype(dtype), saved)
    np.testing.assert_allclose(got, dx, atol=limit)
    assert LocalLinear().backward(narrow, Into(views, True), "l", dy.astype(dtype), saved, False) is None
    for name, view in views.items():
        np.testing.assert_allclose(view, 2 * want[name], atol=2 * limit)


@pytest.mark.parametrize("integers", [np.uint8, np.uint16, np.uint32])
def test_embedding_looks_up_and_sums_back(integers, rng):
    table = rng.standard_normal((9, 5)).astype(np.float32)
    tokens = rng.integers(0, 9, (4, 7)).astype(integers)
    dy = rng.standard_normal((4, 7, 5)).astype(np.float32)
    saved = Arena().saved(0)
    assert (LocalEmbedding().forward({"t.weight": table}, "t", tokens, saved) == table[tokens]).all()
    want = np.zeros((9, 5))
    np.add.at(want, tokens.astype(int), dy)
    views = {"t.weight": np.full_like(table, np.nan)}
    for add in (False, True):
        LocalEmbedding().backward(Into(views, add), "t", dy, saved)
        np.testing.assert_allclose(views["t.weight"], (1 + add) * want, atol=1e-5)


def test_a_token_outside_the_table_is_refused():
    with pytest.raises(DataError, match=r"token 9 is outside \[0, 9\)"):
        LocalEmbedding().forward({"t.weight": np.zeros((9, 2))}, "t", np.array([[1, 9]]), Arena().saved(0))
