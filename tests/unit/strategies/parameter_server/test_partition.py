"""Keys tile the parameter space, belong to one server each, and balance the servers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist import models
from hpcdist.arrays.layout import ALIGN_ELEMENTS, Layout, TensorSpec
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.collectives.algorithms.fixed_tree import halves
from hpcdist.errors import ConfigurationError
from hpcdist.models.config import ModelConfig
from hpcdist.strategies.parameter_server.partition import BALANCE, partition_keys
from hpcdist.strategies.parameter_server.transport import PartialSums, ShardTree, slots_of


def layout_of(*sizes):
    return Layout.of([TensorSpec(index // 3, f"w{index}", (size,)) for index, size in enumerate(sizes)])


def loads(result):
    return [sum(part.size for part in result.parts(server)) for server in range(result.servers)]


def check(layout, servers):
    result = partition_keys(layout, servers)
    assert result == partition_keys(layout, servers), "the same on every rank"
    assert [0, *(key.stop for key in result.keys)] == [*(key.start for key in result.keys), layout.size], "keys tile"
    assert all(key.start % ALIGN_ELEMENTS == 0 for key in result.keys)
    assert set(result.owners) == set(range(servers)), "every server has a key"
    ascending = sorted(part for server in range(servers) for part in result.parts(server))
    assert [0, *(part.stop for part in ascending)] == [*(part.start for part in ascending), layout.size]
    burden = loads(result)
    assert max(burden) - min(burden) <= max(BALANCE * layout.size / servers, ALIGN_ELEMENTS)
    check_messages(layout, result)
    return result


def check_messages(layout, result):
    messages = result.messages(layout.units)
    assert sum(part.size for part, _ in messages) == layout.size
    assert all(
        any(part.intersect(local_data) == part for local_data in result.parts(server)) for part, server in messages
    )
    inside = [
        next(layer for layer, unit in layout.units.items() if part.intersect(unit) == part) for part, _ in messages
    ]
    assert inside == sorted(inside, reverse=True), "in the order in which backward completes the layers"


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 9))
@pytest.mark.full
def test_keys_tile_any_layout_for_any_number_of_servers(sizes, servers):
    layout = layout_of(*sizes)
    if layout.size // ALIGN_ELEMENTS < servers:
        with pytest.raises(ConfigurationError, match=f"{servers} parameter servers, but .* to at most"):
            partition_keys(layout, servers)
    else:
        check(layout, servers)


@pytest.mark.parametrize("servers", range(1, 9))
@pytest.mark.parametrize("config", [ModelConfig(), ModelConfig(layers=1, hidden=64, heads=2), ModelConfig(kind="mlp")])
def test_models_are_balanced_within_1_percent(config, servers):
    inputs = {"context": 64} if config.kind == "gpt" else {"features": 96, "classes": 10}
    layout = models.build(config, "float32", **inputs).layout
    result = check(layout, servers)
    assert max(loads(result)) <= 1.01 * layout.size / servers
    assert len(result.keys) <= len(layout.segments) + 130 * servers, "no more cuts than the balance needs"


def test_one_server_has_whole_tensors_and_one_message_per_layer():
    layout = layout_of(100, 5, 64, 300, 1, 2)
    result = partition_keys(layout, 1)
    assert result.parts(0) == [Range(0, layout.size)]
    assert result.messages(layout.units) == [(layout.units[1], 0), (layout.units[0], 0)]
    assert len(result.keys) == len(layout.segments)


@pytest.mark.parametrize("rows", [9, 10, 11])
def test_tensor_ranks_with_fewer_rows_have_the_same_keys(rows):
    whole = TensorSpec(0, "table", (rows, 40), cut=0)
    halves = [Range(0, -(-rows // 2)), Range(-(-rows // 2), rows)]
    layouts = [Layout.of([whole.shard(half, halves[0].size), TensorSpec(1, "norm", (50,))]) for half in halves]
    first, last = (check(layout, 2) for layout in layouts)
    assert first == last


def test_largest_keys_are_assigned_first_to_the_least_loaded():
    layout = layout_of(64, 128, 64)  # 128 to server 0, then both of 64 to server 1
    assert partition_keys(layout, 2).owners == (1, 0, 1)


def test_empty_tensors_have_no_keys():
    assert len(partition_keys(layout_of(64, 0, 64), 2).keys) == 2


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 9))
def test_whole_tensors_have_one_server(sizes, servers):
    layout = layout_of(*sizes)
    if len(sizes) < servers:
        with pytest.raises(ConfigurationError, match=f"{servers} parameter servers.* {len(sizes)} tensors.*at most"):
            partition_keys(layout, servers, whole=True)
        return
    result = partition_keys(layout, servers, whole=True)
    assert [key.start for key in result.keys] == [segment.range.start for segment in layout.segments]
    check_messages(layout, result)
    assert result.fullest == max(loads(result)) * servers / layout.size
    # Graham 1969, LPT: at most 4/3 - 1/(3 m) of the best, which is no better than even or than the longest key.
    best = max(layout.size / servers, max(key.size for key in result.keys))
    assert max(loads(result)) <= 4 / 3 * best + max(key.size for key in result.keys)


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
