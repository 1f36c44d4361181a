"""Embedding and cross entropy of a vocabulary split over ranks: the numbers of the whole, by loops and arrays."""

import numpy as np
import pytest

from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.ranges import split
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import DataError
from hpcdist.models.arena import Arena
from hpcdist.models.layers.embedding import LocalCrossEntropy, LocalEmbedding
from hpcdist.strategies.tensor import vocabulary
from hpcdist.strategies.tensor.axis import Borders, TensorAxis
from hpcdist.strategies.tensor.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding
from stubs.gpu import host_kernels

CLASSES, TOKENS, HIDDEN = 37, 50, 6
LIMITS = {"float32": 3e-6, "float64": 1e-14}


@pytest.fixture(params=["loops", "kernels"])
def path(request, monkeypatch):
    """The compiled loops, and the kernels and array expressions of a GPU, both on numpy memory."""
    if request.param == "kernels":
        host_kernels.install(monkeypatch, vocabulary)


class Into:
    def __init__(self, view, add):
        self.view, self.add = view, add

    def into(self, name):
        return self.view, self.add

    def wants(self, name):
        return True


def _each(ranks, run):
    """Return the results of ``run(borders, local_data)`` on each of ``ranks`` ranks.

    ``local_data`` is a range of the classes.
    """
    parts = split(CLASSES, ranks, itemsize=1, align_bytes=1)
    return run_threads(ranks, lambda comm: run(Borders(TensorAxis(comm, "native")), parts[comm.rank]))


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_split_loss_and_gradient_match_the_whole(ranks, dtype, path, rng):
    logits = (4 * rng.standard_normal((TOKENS, CLASSES))).astype(dtype)
    targets = np.where(rng.random(TOKENS) < 0.3, -1, rng.integers(0, CLASSES, TOKENS))
    targets[:3] = -1, 0, CLASSES - 1
    whole, saved = logits.copy(), Arena().saved(0)
    want = LocalCrossEntropy().forward(whole, targets, saved)
    gradient = LocalCrossEntropy().backward(0.25, saved)

    def run(borders, local_data):
        mine, kept = logits[:, local_data.slice].copy(), Arena().saved(0)
        operation = VocabularyCrossEntropy(borders, local_data, CLASSES)
        loss = operation.forward(mine, targets, kept)
        assert operation.backward(0.25, kept) is mine
        return loss, mine

    result = _each(ranks, run)
    assert [loss for loss, _ in result[1:]] == [0.0] * (ranks - 1)
    assert abs(result[0][0] - want) <= LIMITS[dtype] * TOKENS
    got = np.concatenate([mine for _, mine in result], axis=1)
    assert np.abs(got - gradient).max() <= LIMITS[dtype] and not got[targets < 0].any()


def test_16_bit_values_are_summed_in_float32_over_the_ranks(gpu, rng):
    """Each element of the gradient and of the table is within one rounding to bfloat16 of the exact value."""
    kind, unit = dtype_of("bfloat16"), 2.0**-8
    logits, targets = (4 * rng.standard_normal((TOKENS, CLASSES))).astype(kind), rng.integers(0, CLASSES, TOKENS)
    tokens, dy = rng.integers(0, 5, TOKENS), rng.standard_normal((TOKENS, HIDDEN)).astype(kind)
    exact = np.exp(logits.astype(np.float64) - logits.astype(np.float64).max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    loss = -np.log(exact[np.arange(TOKENS), targets]).sum()
    exact[np.arange(TOKENS), targets] -= 1
    sums = np.zeros((CLASSES, HIDDEN))
    np.add.at(sums, tokens, dy.astype(np.float64))

    def run(borders, local_data):
        place, kept = (lambda array: backend.place(array, "gpu")), Arena(on="gpu").saved(0)
        operation = VocabularyCrossEntropy(borders, local_data, CLASSES)
        own_loss = operation.forward(place(logits[:, local_data.slice].copy()), place(targets), kept)
        gradient = operation.backward(1.0, kept)
        embedding, table = (
            VocabularyEmbedding(borders, local_data, CLASSES),
            place(np.zeros((local_data.size, HIDDEN), kind)),
        )
        embedding.forward({"t.weight": table}, "t", place(tokens), kept)
        embedding.backward(Into(table, True), "t", place(dy), kept)
        return float(own_loss), gradient.get(), table.get()

    result = _each(3, run)
    assert abs(sum(row[0] for row in result) - loss) <= 1e-5 * loss
    gradient, table = np.concatenate([row[1] for row in result], axis=1), np.concatenate([row[2] for row in result])
    for got, want in ((gradient, exact), (table, sums)):
        assert (np.abs(got.astype(np.float64) - want) <= unit * np.abs(want) + 1e-5).all()


@pytest.mark.parametrize("bad", [CLASSES, -2])
def test_target_out_of_range_is_rejected_on_every_rank(bad):
    def run(borders, local_data):
        with pytest.raises(DataError, match=f"target {bad} is outside"):
            VocabularyCrossEntropy(borders, local_data, CLASSES).forward(
                np.zeros((2, local_data.size)), np.array([0, bad]), Arena().saved(0)
            )
        return True

    assert _each(2, run) == [True, True]


def test_nan_stays_visible_on_every_rank(path, rng):
    logits = rng.standard_normal((TOKENS, CLASSES)).astype(np.float32)
    logits[5, 30] = np.nan
    targets = rng.integers(0, CLASSES, TOKENS)

    def run(borders, local_data):
        mine, kept = logits[:, local_data.slice].copy(), Arena().saved(0)
        operation = VocabularyCrossEntropy(borders, local_data, CLASSES)
        with np.errstate(invalid="ignore"):
            loss = operation.forward(mine, targets, kept)
        return loss, operation.backward(1.0, kept)

    result = _each(2, run)
    assert np.isnan(result[0][0])
    for _, gradient in result:
        assert np.isnan(gradient[5]).any() and np.isfinite(np.delete(gradient, 5, axis=0)).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_split_rows_and_their_sums_match_the_whole(ranks, path, rng):
    table, dy = rng.standard_normal((CLASSES, HIDDEN)), rng.standard_normal((5, 10, HIDDEN))
    tokens = rng.integers(0, CLASSES, (5, 11)).astype(np.uint16)[:, 1:]
    want, saved = np.full_like(table, np.nan), Arena().saved(0)
    rows = LocalEmbedding().forward({"t.weight": table}, "t", tokens, saved)
    LocalEmbedding().backward(Into(want, False), "t", dy, saved)

    def run(borders, local_data):
        operation, kept, view = (
            VocabularyEmbedding(borders, local_data, CLASSES),
            Arena().saved(0),
            np.full_like(want, np.nan),
        )
        y = operation.forward({"t.weight": table[local_data.slice]}, "t", tokens, kept)
        for add in (False, True):
            operation.backward(Into(view[local_data.slice], add), "t", dy, kept)
        return y.copy(), view[local_data.slice]

    result = _each(ranks, run)
    assert all((y == rows).all() for y, _ in result)
    np.testing.assert_allclose(np.concatenate([part for _, part in result]), 2 * want, atol=1e-13)
