"""Linear layers and embeddings: values, gradients, accumulation."""

import numpy as np
import pytest

from hpcdist.errors import DataError
from hpcdist.models.arena import Arena
from hpcdist.models.layers.embedding import LocalEmbedding, LocalPositions
from hpcdist.models.layers.linear import LocalLinear, column_sums


class Into:
    def __init__(self, views, add):
        self.views, self.add = views, add

    def into(self, name):
        return self.views[name], self.add

    def wants(self, name):
        return name in self.views


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("leading", "inputs", "outputs"), [((1,), 1, 1), ((3,), 5, 2), ((2, 3), 7, 11)])
def test_linear_matches_the_formula(leading, inputs, outputs, bias, dtype, rng):
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
    LocalLinear().backward_weight(narrow, Into(views, True), "l", dy.astype(dtype), saved)
    for name, view in views.items():
        np.testing.assert_allclose(view, 2 * want[name], atol=2 * limit)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("count", "columns"), [(0, 3), (1, 1), (7, 5), (8, 33), (2049, 70)])
def test_column_sums_have_the_rounding_error_of_eight_partial_sums(count, columns, dtype, rng):
    rows = rng.standard_normal((count, columns)).astype(dtype)
    into = np.full(columns, np.nan, dtype)
    bound = (count // 8 + 10) * np.finfo(dtype).eps * np.abs(rows).sum(0, dtype=np.float64)
    for add in (False, True):
        column_sums(rows, into, add)
        assert (np.abs(into - (1 + add) * rows.sum(0, dtype=np.float64)) <= (1 + add) * bound).all()
    if count:
        rows[count // 2, 0] = np.nan
        column_sums(rows, into, False)
        assert np.isnan(into[0]) and np.isfinite(into[1:]).all()


def test_position_gradients_are_summed_over_samples(rng):
    table, dy = rng.standard_normal((9, 5)), rng.standard_normal((11, 6, 5))
    y, saved = rng.standard_normal((11, 6, 5)), Arena().saved(0)
    want = y + table[:6]
    assert (LocalPositions().forward({"p.weight": table}, "p", y, 6, saved) == want).all()
    views = {"p.weight": np.full_like(table, np.nan)}
    for add in (False, True):
        LocalPositions().backward(Into(views, add), "p", dy, saved)
        np.testing.assert_allclose(views["p.weight"][:6], (1 + add) * dy.sum(0), atol=1e-13)
        assert not views["p.weight"][6:].any()


@pytest.mark.parametrize("integers", [np.uint8, np.uint16, np.uint32])
def test_embedding_looks_up_rows_and_sums_gradients(integers, rng):
    table = rng.standard_normal((9, 5)).astype(np.float32)
    tokens = rng.integers(0, 9, (4, 8)).astype(integers)[:, 1:]  # as data gives them: no memory of one piece
    dy = rng.standard_normal((4, 7, 5)).astype(np.float32)
    saved = Arena().saved(0)
    assert (LocalEmbedding().forward({"t.weight": table}, "t", tokens, saved) == table[tokens]).all()
    want = np.zeros((9, 5))
    np.add.at(want, tokens.astype(int), dy)
    views = {"t.weight": np.full_like(table, np.nan)}
    for add in (False, True):
        LocalEmbedding().backward(Into(views, add), "t", dy, saved)
        np.testing.assert_allclose(views["t.weight"], (1 + add) * want, atol=1e-5)


def test_token_outside_the_table_is_rejected():
    with pytest.raises(DataError, match=r"token 9 is outside \[0, 9\)"):
        LocalEmbedding().forward({"t.weight": np.zeros((9, 2))}, "t", np.array([[1, 9]]), Arena().saved(0))
