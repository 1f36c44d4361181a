"""Ranks on axes."""

import pytest

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.threads import run_threads
from hpcdist.errors import ConfigurationError
from hpcdist.strategies.grid import Axes, Grid


def test_data_takes_what_the_others_leave() -> None:
    assert Grid.of(12, pipeline=2, tensor=3).data == 2
    assert Grid.of(4).data == 4


@pytest.mark.parametrize("degrees", [{"data": 3}, {"data": 5}, {"pipeline": 3}, {"tensor": 8}])
def test_a_wrong_product_prints_the_equation(degrees: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"parallel.data \d+ x parallel.pipeline .* but the world has 4 ranks"):
        Grid.of(4, **degrees)


def test_every_rank_has_its_own_place() -> None:
    grid = Grid(data=2, pipeline=3, tensor=2)
    places = [tuple(grid.coordinates(rank).values()) for rank in range(grid.size)]
    assert len(set(places)) == grid.size
    assert grid.coordinates(1) == {"tensor": 1, "context": 0, "data": 0, "pipeline": 0}, "tensor is fastest"
    assert grid.coordinates(4)["pipeline"] == 1, "pipeline is slowest"


def test_the_data_axis_joins_equal_places() -> None:
    def body(comm: Communicator) -> list[int]:
        return Axes(Grid(data=2, tensor=2), comm).data.allgather_object(comm.rank)

    assert run_threads(4, body) == [[0, 2], [1, 3], [0, 2], [1, 3]]
