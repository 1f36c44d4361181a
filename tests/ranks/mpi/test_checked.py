"""The checked mode and the scale over real messages: if calls differ, all ranks fail, and later calls work."""

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.arrays.dtypes import FLOATS
from hpcdist.collectives import ALLREDUCE, SHARDED
from hpcdist.errors import BufferHandoverError, CommunicationError


@pytest.fixture
def checking(comm):
    """A communicator in checked mode, used by one test only."""
    local_data = comm.dup("checked")
    local_data.checked = True
    yield local_data
    collectives.release(local_data)
    local_data.free()


@pytest.mark.parametrize("algorithm", ["native", "ring", "node_shared", "all_to_all", "hierarchical"])
@pytest.mark.full_except("native", "ring")
def test_rank_differing_calls_fail_on_every_rank(checking, algorithm):
    comm = checking
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    odd = comm.rank == comm.size - 1
    shares = SHARDED["ring"].shares(comm, 64, 8)
    differ = {
        "size": lambda: collectives.allreduce(comm, np.zeros(65 if odd else 64), algorithm),
        "dtype": lambda: collectives.allreduce(comm, np.zeros(64, np.int64 if odd else np.float64), algorithm),
        "op": lambda: collectives.allreduce(comm, np.zeros(64), algorithm, "max" if odd else "sum"),
        "algorithm": lambda: collectives.allreduce(comm, np.zeros(64), "rabenseifner" if odd else algorithm),
    }
    if odd:
        differ["call"] = lambda: SHARDED["ring"].all_gather(comm, np.zeros(64), shares)
    else:
        differ["call"] = lambda: collectives.allreduce(comm, np.zeros(64), algorithm)
    for call in differ.values():
        with pytest.raises(CommunicationError, match="made different collective calls") as caught:
            call()
        assert f"rank {comm.size - 1}: " in str(caught.value) and str(caught.value).count(__file__) == 2
    buffer = np.full(64, 2.0**comm.rank)
    collectives.allreduce(comm, buffer, algorithm)  # nothing of the calls before is left in the way
    assert (buffer == 2.0**comm.size - 1).all()


def test_rank_that_rejects_a_buffer_notifies_the_others(checking):
    odd = checking.rank == checking.size - 1
    with pytest.raises(BufferHandoverError if odd else CommunicationError, match="1-D contiguous"):
        collectives.allreduce(checking, np.zeros(8)[::2] if odd else np.zeros(4), "ring")


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize("algorithm", ALLREDUCE)
@pytest.mark.full_except("ring-float32", "ring_bidirectional-float64")
def test_rank_results_are_scaled_once(comm, algorithm, dtype):
    for count in (0, 1, 3000):
        buffer = np.full(count, comm.rank + 1, dtype)
        collectives.allreduce(comm, buffer, algorithm, scale=0.5)
        assert (buffer == comm.size * (comm.size + 1) / 4).all()
