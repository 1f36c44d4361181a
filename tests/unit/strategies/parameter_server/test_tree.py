"""Sums on servers in the tree of logical shards: the bits of one process for any workers and buffers."""

import numpy as np
import pytest

from hpcdist.arrays.layout import Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.algorithms.fixed_tree import halves
from hpcdist.strategies.parameter_server.transport import PartialSums, ShardTree, slots_of

LAYOUT = Layout.of([TensorSpec(0, "w", (40,)), TensorSpec(1, "w", (24,))])
WHOLE = Range(0, LAYOUT.size)


def tree_sum(rows, node):
    """Return the sum by the definition of the tree."""
    if node.size == 1:
        return rows[node.start]
    left, right = halves(node)
    return tree_sum(rows, left) + tree_sum(rows, right)


def worker_pushes(tree, worker, rows):
    """Return the partial sums of a worker that computes its ``rows`` in turn in the same memory, in two ranges."""
    gradients = FlatStore(LAYOUT, rows.dtype)
    partials = PartialSums(tree, worker, gradients, lambda slot: FlatStore(LAYOUT, rows.dtype))
    for turn in range(tree.rounds):
        local_data = tree.own[worker]
        gradients.array[...] = rows[local_data.start + turn] if turn < local_data.size else np.nan
        for part in (LAYOUT.units[1], LAYOUT.units[0]):
            partials.add(turn, part)
    return partials.of(WHOLE)


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6, 7, 8, 12, 13])
def test_sums_have_the_bits_of_the_tree_for_any_number_of_workers(shards, rng):
    rows = rng.standard_normal((shards, LAYOUT.size)).astype(np.float32)
    expected = tree_sum(rows, Range(0, shards)).tobytes()
    for workers in range(1, shards + 1):
        tree = ShardTree(shards, workers)
        addends = [addend for worker in range(workers) for addend in worker_pushes(tree, worker, rows)]
        assert len(addends) == sum(map(len, tree.nodes))
        target = np.empty_like(rows[0])
        tree.total(addends, target, lasting=True)
        assert target.tobytes() == expected
        local_data = addends[-1]  # what a colocated server takes for its target
        tree.total(addends, local_data, lasting=True)
        assert local_data.tobytes() == expected


@pytest.mark.parametrize(("shards", "workers"), [(4, 2), (6, 4), (7, 3), (8, 8), (13, 5)])
def test_sums_with_few_buffers_have_the_same_bits(shards, workers, rng):
    rows = rng.standard_normal((shards, LAYOUT.size)).astype(np.float32)
    tree = ShardTree(shards, workers)
    addends = [addend.copy() for worker in range(workers) for addend in worker_pushes(tree, worker, rows)]
    buffers = np.empty((2, LAYOUT.size), np.float32)

    def arrivals():
        for number, addend in enumerate(addends):
            buffers[number % 2] = addend  # what was in it is gone
            yield buffers[number % 2]

    target = np.empty_like(rows[0])
    tree.total(arrivals(), target, lasting=False)
    assert target.tobytes() == tree_sum(rows, Range(0, shards)).tobytes()


@pytest.mark.parametrize(
    ("shards", "workers", "slots"), [(1, 1, 0), (4, 4, 0), (8, 4, 1), (8, 2, 2), (8, 1, 3), (7, 1, 2)]
)
def test_worker_keeps_few_partial_sums(shards, workers, slots):
    assert max(slots_of(ShardTree(shards, workers), worker) for worker in range(workers)) == slots
