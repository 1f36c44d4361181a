"""Checkpoint copies on partner ranks: stored, verified, and restored into another layout."""

import numpy as np
import pytest

from harness.inputs import FLOAT
from harness.inputs import LARGE as LAYOUT
from hpcdist.arrays.ranges import Range, split
from hpcdist.arrays.store import FlatStore
from hpcdist.checkpoint.partner import PartnerStore, recover
from hpcdist.checkpoint.restoring import messages
from hpcdist.checkpoint.restoring.reshard import reshard
from hpcdist.strategies.core.exchange import pieces_of


def state(comm, rng):
    """Return a state with the same values on all ranks and zeros in the padding."""
    store = FlatStore(LAYOUT, FLOAT)
    for segment, values in zip(LAYOUT.segments, comm.broadcast_object(draw_segments(rng)), strict=True):
        store.range(segment.range)[...] = values
    return store


def draw_segments(rng):
    return [rng.standard_normal(segment.range.size).astype(np.float32) for segment in LAYOUT.segments]


@pytest.mark.parametrize("where", ["shared", "messages"])
def test_partner_copies_are_verified_and_restored_in_another_layout(comm, rng, monkeypatch, where):
    if where == "messages":
        comm.declared_node = comm.rank  # a node for each rank
    monkeypatch.setattr(messages, "WINDOW_BYTES", 16 << 10)
    monkeypatch.setattr(messages, "LONG_BYTES", 1 << 10)
    part = split(LAYOUT.size, comm.size, 4)[comm.rank]
    kept, store = PartnerStore(comm), FlatStore(LAYOUT, FLOAT, part)
    for step in range(4):
        whole = state(comm, rng)
        store.copy_from(whole)
        kept.keep(step, pieces_of({"parameters": store}, [part]), {"step": step})
        store.zero()
    assert kept.checked() == ""
    assert kept.copies.generations[0].shared == (where == "shared" or comm.size == 1)
    for lost in (None, 0, comm.size - 1):  # as if a rank had come new
        new = lost == comm.rank and comm.size > 1
        result = recover(comm, None if new else comm.rank, None if new else kept.copies)
        assert result.step == 3 and result.scalars == {"step": 3}
        for cut in (Range(0, LAYOUT.size), part, split(LAYOUT.size, 7, 4)[comm.rank]):
            into = FlatStore(LAYOUT, FLOAT, cut)
            expected = pieces_of({"parameters": into}, [cut])
            received = reshard(comm, result.held, expected)
            assert into.array.tobytes() == whole.array[cut.slice].tobytes()
            if cut == part and not new:
                assert received == 0
    comm.barrier()


def test_damaged_copy_falls_back_to_the_previous_generation(comm, rng, capfd):
    part = split(LAYOUT.size, comm.size, 4)[comm.rank]
    kept, first = PartnerStore(comm), state(comm, rng)
    kept.keep(1, pieces_of({"parameters": first}, [part]), {})
    kept.keep(2, pieces_of({"parameters": state(comm, rng)}, [part]), {})
    if comm.rank == 0:
        kept.copies.find(2, 0).data[1] ^= 4
    comm.barrier()
    assert bool(kept.checked()) == (comm.rank == 0)
    result = recover(comm, comm.rank, kept.copies)
    into = FlatStore(LAYOUT, FLOAT)
    reshard(comm, result.held, pieces_of({"parameters": into}, into.parts))
    assert result.step == 1 and into.array.tobytes() == first.array.tobytes()
    assert ("rank 0's state after step 2 is damaged" in capfd.readouterr().err) == (comm.rank == 0)
