"""The address space: offsets, units, look-up, and stores over parts of the space."""

import numpy as np
import pytest

from hpcdist.arrays.backend import Ledger
from hpcdist.arrays.layout import ALIGN_ELEMENTS, Layout, TensorSpec
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore


def example_layout():
    return Layout.of(
        [
            TensorSpec(0, "tokens", (5, 7)),
            TensorSpec(0, "positions", (3, 7)),
            TensorSpec(1, "empty", (0, 4)),
            TensorSpec(1, "weight", (33,)),
            TensorSpec(2, "scale", (), adapted=False),
        ]
    )


def test_segments_are_aligned_disjoint_and_ordered():
    layout = example_layout()
    assert all(segment.range.start % ALIGN_ELEMENTS == 0 for segment in layout.segments)
    assert layout.parameters == 35 + 21 + 0 + 33 + 1
    assert layout.size == 64 + 32 + 0 + 64 + 32
    taken = [i for segment in layout.segments for i in range(segment.range.start, segment.range.stop)]
    assert len(set(taken)) == len(taken) == layout.parameters


def test_units_tile_the_address_space():
    units = example_layout().units
    assert list(units) == [0, 1, 2]
    assert [(u.start, u.stop) for u in units.values()] == [(0, 96), (96, 160), (160, 192)]


def test_within_returns_all_segments_that_overlap_a_range():
    layout = example_layout()
    for start in range(0, layout.size, 5):
        for stop in range(start, layout.size + 1, 7):
            expected = {
                segment.key: (max(start, segment.range.start), min(stop, segment.range.stop))
                for segment in layout.segments
                if max(start, segment.range.start) < min(stop, segment.range.stop)
            }
            results = {s.key: (t.start, t.stop) for s, t in layout.within(Range(start, stop))}
            assert results == expected


def test_duplicate_tensor_names_are_rejected():
    with pytest.raises(ValueError, match="two tensors are called 1.w"):
        Layout.of([TensorSpec(1, "w", (2,)), TensorSpec(1, "w", (3,))])


def test_concatenated_shards_equal_the_store(rng):
    layout = example_layout()
    full = FlatStore(layout, np.float32)
    full.array[...] = rng.standard_normal(layout.size)
    for parts in (1, 2, 3, 5):
        shards = [FlatStore(layout, np.float32, part) for part in split(layout.size, parts, 4)]
        for shard in shards:
            shard.copy_from(full)
        assert np.array_equal(np.concatenate([shard.array for shard in shards]), full.array)


def test_store_with_several_ranges_returns_each_range(rng):
    layout = example_layout()
    full = FlatStore(layout, np.float64)
    full.array[...] = rng.standard_normal(layout.size)
    ranges = split(layout.size, 7, 8)
    some = FlatStore(layout, np.float64, ranges[1::2])
    some.copy_from(full)
    for part in ranges[1::2]:
        assert np.array_equal(some.range(part), full.range(part))
        inner = Range(part.start, part.start + part.size // 2)
        assert np.array_equal(some.range(inner), full.range(inner))
    assert some.size == some.array.size == sum(part.size for part in ranges[1::2])
    back = FlatStore(layout, np.float64, ranges[0::2])
    back.copy_from(full)
    restored = FlatStore(layout, np.float64)
    restored.copy_from(some)
    restored.copy_from(back)
    assert np.array_equal(restored.array, full.array)
    touched = [(segment.key, where) for segment, where in some.tensors()]
    assert touched == [(s.key, w) for part in ranges[1::2] for s, w in layout.within(part)]
    with pytest.raises(AssertionError, match="not inside"):
        some.range(Range(ranges[1].start, ranges[2].stop))


def test_views_share_memory_and_start_zero():
    store = FlatStore(example_layout(), np.float64)
    assert not store.array.any()
    store.view("0.positions")[...] = 3.0
    assert store.array.sum() == 63.0 and store.view("0.positions").shape == (3, 7)
    store.zero()
    assert not store.array.any()


def test_ledger_counts_arrays_until_they_are_freed():
    ledger = Ledger()
    store = FlatStore(example_layout(), np.float32, category="gradients", ledger=ledger)
    other = ledger.track(np.zeros(10, np.float64), "activations")
    assert ledger.current["gradients"] == 192 * 4 and ledger.current["activations"] == 80
    del store, other
    assert ledger.current["gradients"] == 0 and ledger.current["activations"] == 0
    assert ledger.peak["gradients"] == 192 * 4
