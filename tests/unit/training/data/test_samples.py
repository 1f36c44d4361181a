"""Samples: adjacent windows, positions in a text, rows of a table."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.cli import tune
from hpcdist.training.data.samples import ArraySlice, NextTokenSamples, TableRows, TokenWindows, slice_of


@settings(max_examples=40)
@given(length=st.integers(2, 200), context=st.integers(1, 50))
def test_every_window_at_every_shift_is_inside_the_text(length, context):
    if length <= context:
        return
    tokens = np.arange(length, dtype=np.uint32)
    for shifting in (False, True):
        windows = TokenWindows(tokens, context, shifting)
        assert windows.count >= 1
        assert windows.shifts >= 1
        for shift in range(windows.shifts):
            x, y = windows.take(np.arange(windows.count), shift)
            assert x.shape == y.shape == (windows.count, context)
            assert np.array_equal(x.ravel(), shift + np.arange(windows.count * context))
            assert np.array_equal(y, x + 1)
    whole = TokenWindows(tokens, context, shifting=False)
    assert length - 1 - whole.count * context < context  # less than a window is left out


def test_windows_keep_the_type_and_are_contiguous(rng):
    for dtype in (np.uint8, np.uint16, np.uint32):
        tokens = rng.integers(0, 200, 100).astype(dtype)
        x, y = TokenWindows(tokens, 8, shifting=True).take(np.array([3, 0]), 2)
        assert x.dtype == y.dtype == dtype
        assert x.flags.c_contiguous
        assert y.flags.c_contiguous
        assert np.array_equal(x, [tokens[26:34], tokens[2:10]])
        assert np.array_equal(y, [tokens[27:35], tokens[3:11]])


def test_next_token_samples_of_every_position(rng):
    tokens = rng.integers(0, 256, 50).astype(np.uint8)
    places = NextTokenSamples(tokens, 7)
    assert places.count == 43
    x, y = places.take(np.array([0, 42]), 0)
    assert np.array_equal(x, [tokens[:7], tokens[42:49]])
    assert np.array_equal(y, [tokens[7], tokens[49]])


def test_rows_are_flattened(rng):
    x, y = rng.random((10, 2, 3), np.float32), np.arange(10)
    inputs, targets = TableRows(x, y, 4, 9).take(np.array([4, 0]), 0)
    assert np.array_equal(inputs, x[[8, 4]].reshape(2, 6))
    assert targets.tolist() == [8, 4]
    assert TableRows(x, y, 4, 9).take(np.empty(0, np.int64), 0)[0].shape == (0, 6)


@pytest.mark.parametrize("index", [slice(None), slice(2, 5), slice(-3, None), slice(0, 100), slice(1, 6, 2)])
def test_array_part_slices_like_an_array(index):
    whole = np.arange(20)
    lazy = ArraySlice(whole, 5, 13)
    assert len(lazy) == 8
    assert np.array_equal(lazy[index], whole[5:13][index])
    assert np.array_equal(slice_of(whole, 5, 13)[index], lazy[index])


def test_warmup_includes_the_sample_kernel(monkeypatch):
    modules = []
    monkeypatch.setattr(importlib, "import_module", modules.append)
    tune._import_kernels()
    assert {"hpcdist.training.data.samples", "hpcdist.models.layers.linear"} <= set(modules)
