"""Products of data, pipeline, tensor, context and expert ranks with ZeRO: each cell is the run of one process.

The cells have every pair of values of the parameters that go together. HPCDIST_TEST_LAYOUTS=all makes 20 steps in each.
"""

import pytest

from harness.combinations import covering
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.expert import shared

RANKS, CELLS = (1, 2, 3, 4, 6, 8), 80


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(CELLS // 10))
def test_a_product_is_the_run_of_one_process(text, monkeypatch, part):
    """Ten cells each: which there are is decided when the first is run, not when tests are collected."""
    monkeypatch.setattr(shared, "WORTH_ROWS", 0)  # experts are lent wherever it evens out loads
    cells = covering(RANKS, CELLS)
    for cell in cells[part * 10 :][: 10 if part + 1 < CELLS // 10 else len(cells)]:
        expected = cell.alone(text)
        for own in run_threads(cell.ranks, lambda comm, cell=cell: cell.trained(comm, text)):
            cell.check(own, expected)
