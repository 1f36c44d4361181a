"""The permutation: every index once, and a different order for each key."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.training.data.sampler import ROUNDS, feistel_order

keys = st.lists(st.integers(0, 2**64 - 1), min_size=ROUNDS, max_size=ROUNDS).map(
    lambda words: np.array(words, np.uint64)
)


@settings(max_examples=50)
@given(size=st.integers(1, 3000), key=keys)
def test_permute_is_a_bijection(size, key):
    places = feistel_order(np.arange(size), size, key)
    assert places.dtype == np.int64
    assert np.array_equal(np.sort(places), np.arange(size))


@settings(max_examples=50)
@given(size=st.integers(1, 2**62), key=keys, data=st.data())
def test_permute_computes_single_indices(size, key, data):
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=8)), np.int64)
    places = feistel_order(indices, size, key)
    assert len(set(places.tolist())) == len(indices)
    assert np.all((places >= 0) & (places < size))
    alone = [int(feistel_order(indices[i : i + 1], size, key)[0]) for i in range(len(indices))]
    assert alone == places.tolist()


def test_permute_of_every_small_size_is_a_bijection():
    key = np.arange(ROUNDS, dtype=np.uint64)
    for size in range(1, 300):
        assert len(set(feistel_order(np.arange(size), size, key).tolist())) == size


def test_permute_has_no_correlation_with_the_order(rng):
    size = 20_000
    orders = [feistel_order(np.arange(size), size, rng.integers(0, 2**64, ROUNDS, np.uint64)) for _ in range(2)]
    for order in orders:
        # Correlations of a random order are about 1 / sqrt(size) = 0.007.
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert np.count_nonzero(orders[0] == orders[1]) < 20  # 1 is expected
