"""Attention inside packed documents: equal to attention of each document alone and to a mask. Positions and errors."""

import numpy as np
import pytest

from harness.marks import cases
from harness.models.documents import documents_of, random_places, spans
from hpcdist.errors import DataError
from hpcdist.models.arena import Arena
from hpcdist.models.attention import flash, kernels, tiles
from hpcdist.models.attention.flash import LocalAttention
from hpcdist.models.attention.tiles import LONG
from hpcdist.models.documents import PackedTokens, unpacked
from stubs.gpu import host_kernels


def attention(qkv, kv, dy, size, places=None, **options):
    saved = Arena().saved(0)
    saved.documents = None if places is None else documents_of(places)
    y = LocalAttention().forward(qkv, size, saved, kv=kv, **options).copy()
    result = LocalAttention().backward(dy, saved)
    return [y, *(part.copy() for part in (result if kv is not None else (result,)))]


def check(places, heads, shared, causal, rng, dtype="float64", window=0):
    size, (batch, context) = 4, places.shape
    qkv = (2 * rng.standard_normal((batch, context, (heads if shared else 3 * heads) * size))).astype(dtype)
    kv = rng.standard_normal((batch, context, 2 * shared * size)).astype(dtype) if shared else None
    dy = rng.standard_normal((batch, context, heads * size)).astype(dtype)
    got = attention(qkv, kv, dy, size, places, causal=causal, window=window)
    for sample, local_data in spans(places):
        part = np.s_[sample : sample + 1, local_data]
        alone = attention(
            *(None if x is None else x[part].copy() for x in (qkv, kv, dy)), size, causal=causal, window=window
        )
        for one, want in zip(got, alone, strict=True):
            assert np.abs(one[part] - want).max() <= (1e-13 if dtype == "float64" else 1e-5) * (1 + np.abs(want).max())


@cases(
    "heads, shared, causal, context, most",
    (3, 0, True, 50, 20),
    (4, 2, False, 33, 0),
    (2, 1, True, 200, 190),
    (2, 0, False, 130, 4),
    (2, 0, True, LONG + 90, 0),
)
def test_attention_stays_within_each_document(heads, shared, causal, context, most, rng):
    check(random_places(rng, 3, context, most), heads, shared, causal, rng)
    check(random_places(rng, 2, context, most), heads, shared, causal, rng, "float32")


@cases("shared, context, most, window", (0, 150, 0, 7), (2, LONG + 90, 400, 150))
def test_windows_inside_documents(shared, context, most, window, rng):
    check(random_places(rng, 3, context, most), 2, shared, True, rng, window=window)


@pytest.mark.parametrize("shared", [0, 2])
def test_gpu_kernels_match_for_documents(shared, rng, monkeypatch):
    places = random_places(rng, 3, 90)
    host_kernels.install(monkeypatch, flash, kernels, tiles)
    check(places, 4, shared, True, rng)
    check(places, 4, shared, False, rng)


def test_sample_of_one_document_has_the_bits_of_unpacked_attention(rng):
    qkv, dy = rng.standard_normal((2, 70, 24)), rng.standard_normal((2, 70, 8))
    whole = np.arange(70) + np.zeros((2, 1), np.int64)
    for one, want in zip(attention(qkv, None, dy, 4, whole), attention(qkv, None, dy, 4), strict=True):
        assert (one == want).all()


def test_sample_that_begins_within_a_document_is_rejected():
    with pytest.raises(DataError, match="starts inside a document: .* count the positions"):
        unpacked(PackedTokens.of(np.zeros((1, 3), np.uint8), np.array([[1, 0, 1]])))
