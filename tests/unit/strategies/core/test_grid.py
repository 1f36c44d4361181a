"""The positions of ranks on the axes."""

import pytest

from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.core.grid import GridCommunicators, ProcessGrid, rank_map, spread_groups


def test_data_degree_fills_the_remaining_ranks():
    assert ProcessGrid.of(12, pipeline=2, tensor=3).data == 2
    assert ProcessGrid.of(4).data == 4


@pytest.mark.parametrize("degrees", [{"data": 3}, {"data": 5}, {"pipeline": 3}, {"tensor": 8}])
def test_wrong_product_prints_the_equation(degrees):
    with pytest.raises(ConfigurationError, match=r"parallel.data \d+ x parallel.pipeline .* but the world has 4 ranks"):
        ProcessGrid.of(4, **degrees)


def test_every_rank_has_unique_coordinates():
    grid = ProcessGrid(data=2, pipeline=3, tensor=2)
    places = [tuple(grid.coordinates(rank).values()) for rank in range(grid.size)]
    assert len(set(places)) == grid.size
    assert grid.coordinates(1) == {"tensor": 1, "context": 0, "data": 0, "pipeline": 0}, "tensor is fastest"
    assert grid.coordinates(4)["pipeline"] == 1, "pipeline is slowest"


def test_data_axis_joins_ranks_with_equal_other_coordinates():
    def body(comm):
        return GridCommunicators(ProcessGrid(data=2, tensor=2), comm).data.allgather_object(comm.rank)

    assert run_threads(4, body) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_rank_map_shows_stages_and_nodes():
    nodes = [range(4), range(4, 8)]
    assert rank_map(ProcessGrid(pipeline=2, data=2, tensor=2), nodes) == [
        "stage 0: node 0 [0-1] [2-3]",
        "stage 1: node 1 [4-5] [6-7]",
    ]
    assert rank_map(ProcessGrid(pipeline=4, data=2), nodes)[1] == "stage 1: node 0 [2] [3]"
    assert rank_map(ProcessGrid(data=2, tensor=4), nodes) == ["stage 0: node 0 [0-3]; node 1 [4-7]"]
    (line,) = rank_map(ProcessGrid(data=32, tensor=2), [range(64)])
    assert line == "stage 0: node 0 [0-1] [2-3] [4-5] [6-7] ... [56-57] [58-59] [60-61] [62-63]"


def test_tensor_groups_across_nodes_are_reported():
    nodes = [range(3), range(3, 6), range(6, 8)]
    assert spread_groups(ProcessGrid(data=8), nodes) == ""
    assert spread_groups(ProcessGrid(data=4, tensor=2), [range(4), range(4, 8)]) == ""
    warning = spread_groups(ProcessGrid(data=4, tensor=2), nodes)
    assert "ranks [2-3]" in warning and "1 of 4 groups" in warning and "multiple of parallel.tensor = 2" in warning
    assert rank_map(ProcessGrid(data=4, tensor=2), nodes) == [
        "stage 0: node 0 [0-1]; node 0+1 [2-3]; node 1 [4-5]; node 2 [6-7]"
    ]
