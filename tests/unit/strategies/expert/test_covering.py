"""Products of data, pipeline, tensor, context and expert ranks with ZeRO: each cell matches one process.


The cells contain every compatible pair of parameter values. HPCDIST_TEST_LAYOUTS=all makes 20 steps in each cell.
"""

import pytest

from harness.combinations import covering
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.strategies.expert import shared

RANKS, CELLS = (1, 2, 3, 4, 6, 8), 80


@pytest.mark.matrix
@pytest.mark.parametrize("part", range(CELLS // 10))
def test_products_with_experts_match_one_process(text, monkeypatch, part):
    """Each test runs ten cells. The cells are computed at the first run, not at collection."""
    monkeypatch.setattr(shared, "WORTH_ROWS", 0)  # experts are lent wherever it evens out loads
    cells = covering(RANKS, CELLS)
    for cell in cells[part * 10 :][: 10 if part + 1 < CELLS // 10 else len(cells)]:
        expected = cell.alone(text)
        for local_values in run_threads(cell.ranks, lambda comm, cell=cell: cell.trained(comm, text)):
            cell.check(local_values, expected)
