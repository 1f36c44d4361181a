"""Gathers for jobs whose ranks may die: the same values, by calls that report a death."""

import numpy as np

from hpcdist.arrays.ranges import Range
from hpcdist.comm.mpi import ulfm


def test_gathers_that_report_deaths_return_the_same_values(comm, monkeypatch):
    monkeypatch.setattr(ulfm, "is_enabled", lambda mpi: True)
    values = [("x" * (7 * rank), {"rank": rank}, None) for rank in range(comm.size)]
    assert comm.allgather_object(values[comm.rank]) == values
    ends = [rank * (rank + 1) for rank in range(comm.size + 1)]
    parts = [Range(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    array = np.full(ends[-1], -1.0)
    array[parts[comm.rank].slice] = comm.rank
    comm.all_gather(array, parts)
    assert all((array[part.slice] == rank).all() for rank, part in enumerate(parts))
    mapped = comm.nodes().intra.shared(64 + comm.rank)
    assert mapped.is_shared == all(comm.nodes().intra.allgather_object(mapped.is_shared))
