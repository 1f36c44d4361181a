"""Graphs of ranks: doubly stochastic for any size, connected, with the reported spectral gap."""

import math

import numpy as np
import pytest

from harness.marks import cases
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.decentralised.config import DecentralisedConfig, parse_edges
from hpcdist.strategies.decentralised.gossip import build
from hpcdist.training.recipe.recipe import load

NAMES = ("ring", "torus", "exponential", "one_peer", "complete")
SIZES = range(1, 17)


def tree(size):
    """Return the edges of a binary tree, which is neither regular nor has a cycle."""
    return ", ".join(f"{(rank - 1) // 2}-{rank}" for rank in range(1, size))


def graphs(size):
    return [build(name, size) for name in NAMES] + ([build("edges", size, tree(size))] if size > 1 else [])


def matrices(graph):
    return [graph.matrix(number) for number in range(max(1, len(graph.rounds)))]


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_doubly_stochastic_and_connected(size):
    for graph in graphs(size):
        reached = np.eye(size)
        for weights in matrices(graph):
            assert (weights >= 0).all() and (np.diag(weights) > 0).all(), graph.name
            np.testing.assert_allclose(weights.sum(axis=0), 1.0, rtol=1e-14, err_msg=graph.name)
            np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-14, err_msg=graph.name)
            reached = weights @ reached
        assert (np.linalg.matrix_power(reached, size) > 0).all(), f"{graph.name} is not connected"


@pytest.mark.parametrize("size", SIZES)
def test_spectral_gap_matches_the_matrices(size):
    mean = np.full((size, size), 1.0 / size)
    for graph in graphs(size):
        product = np.eye(size)
        for weights in matrices(graph):
            product = weights @ product
        rho = float(np.linalg.norm(product - mean, 2))  # of a cycle of rounds
        rho = rho if rho > 1e-12 else 0.0
        assert graph.gap == pytest.approx(1.0 - rho ** (1 / max(1, len(graph.rounds))), abs=1e-7), graph.name
        assert graph.gap > 0, graph.name


def test_spectral_gaps_of_known_graphs():
    for size in (3, 4, 7, 16):
        eigenvalues = (1 + 2 * np.cos(2 * math.pi * np.arange(1, size) / size)) / 3
        assert build("ring", size).gap == pytest.approx(1 - np.abs(eigenvalues).max())
    for power in (1, 2, 3, 4):  # Ying et al., arXiv:2110.13363: 2 / (1 + ceil(log2 p)), and exact in log2 p rounds
        assert build("exponential", 1 << power).gap == pytest.approx(2 / (1 + power))
        assert build("one_peer", 1 << power).gap == 1.0
    assert build("one_peer", 6).gap < 1.0


def test_number_of_neighbours_matches_the_costs():
    def degree(name, size):
        return max((len(taken) for rows in build(name, size).rounds for taken in rows), default=0)

    for size in SIZES:
        assert degree("ring", size) == min(2, size - 1)
        assert degree("exponential", size) == math.ceil(math.log2(size))
        assert degree("one_peer", size) == min(1, size - 1)
    assert [degree("torus", size) for size in (4, 6, 9, 12, 16)] == [2, 3, 4, 4, 4]


def test_sources_and_targets_match():
    for graph in graphs(7):
        for number in range(len(graph.rounds)):
            taken = {(peer, rank) for rank in range(7) for peer, _ in graph.sources(rank, number)}
            assert taken == {(rank, peer) for rank in range(7) for peer in graph.targets(rank, number)}


def test_torus_of_a_prime_size_is_a_ring():
    for size in (2, 3, 5, 7, 11):
        torus = build("torus", size)
        assert "ring of" in torus.described() and "prime" in torus.described()
        assert np.array_equal(torus.matrix(), build("ring", size).matrix())
    assert build("torus", 12).name == "torus of 3 x 4 ranks"


def test_disconnected_edges_are_rejected_with_the_components():
    with pytest.raises(ConfigurationError, match=r"groups .* \{0, 1\} and \{2\} and \{3, 4\} never") as refused:
        build("edges", 5, "0-1, 4-3")
    assert refused.value.exit_code == 78
    with pytest.raises(ConfigurationError, match="3-9 names rank 9, but there are only 4 data ranks"):
        build("edges", 4, "0-1 1-2 3-9")
    assert build("edges", 3, "0-1,1-0 1-2").name == "graph of 3 ranks and 2 edges"


@cases(
    "keys, words",
    ({"graph": "star"}, "decentralised.graph = 'star'; choose one of ring"),
    ({"order": "both"}, "decentralised.order = 'both'"),
    ({"moments": "drop"}, "decentralised.moments = 'drop'"),
    ({"period": 0}, "decentralised.period = 0; it must be at least 1"),
    ({"report_every": -1}, "decentralised.report_every = -1; it must be at least 0"),
    ({"outer_learning_rate": 0.0}, "decentralised.outer_learning_rate = 0.0"),
    ({"outer_learning_rate": math.nan}, "decentralised.outer_learning_rate = nan"),
    ({"outer_momentum": 1.0}, "decentralised.outer_momentum = 1.0"),
    ({"graph": "edges"}, "decentralised.edges = '' with decentralised.graph = 'edges'; give them"),
    ({"edges": "0-1"}, "decentralised.edges = '0-1' with decentralised.graph = 'ring'; set"),
    ({"graph": "edges", "edges": "0-1-2"}, "'0-1-2' is not an edge"),
    ({"graph": "edges", "edges": "0-1, 1--2"}, "'1--2' is not an edge"),
    ({"graph": "edges", "edges": "0-1, 2-2"}, "2-2 joins a rank to itself"),
    ({"graph": "edges", "edges": "0-1, 1-2, 1-0"}, "ranks 1 and 0 is listed twice"),
    ({"graph": "edges", "edges": "0-1, 0-1"}, "ranks 0 and 1 is listed twice"),
)
def test_invalid_sections_are_rejected(keys, words):
    with pytest.raises(ConfigurationError) as refused:
        DecentralisedConfig(**keys)
    assert words in str(refused.value)


def recipe_of(keys, strategy, optimizer):
    """Return a recipe with the keys of the section. Raises if it is rejected."""
    given = {"parallel.strategy": strategy, "optimizer.name": optimizer}
    given |= {f"decentralised.{key}": str(value) for key, value in keys.items()}
    return load(None, [f"{key}={value}" for key, value in given.items()], {}).recipe


def test_keys_without_effect_are_rejected():
    recipe_of({}, "allreduce", "adamw")
    for keys, strategy, needed in (
        ({"graph": "torus"}, "allreduce", "gossip"),
        ({"period": 2}, "gossip", "local_sgd"),
        ({"order": "adapt_first"}, "local_sgd", "gossip"),
        ({"outer_momentum": 0.9}, "zero3", "local_sgd"),
    ):
        with pytest.raises(ConfigurationError, match=f"has no effect .* set parallel.strategy = '{needed}'"):
            recipe_of(keys, strategy, "sgd")
    with pytest.raises(ConfigurationError, match="moments = 'reset' with optimizer.name = 'lamb'"):
        recipe_of({"moments": "reset"}, "local_sgd", "lamb")
    recipe_of({"moments": "reset"}, "local_sgd", "lars")


def test_edges_are_parsed_as_pairs():
    assert parse_edges("0-1, 1-2  10-3") == ((0, 1), (1, 2), (10, 3))
    assert parse_edges("") == ()
