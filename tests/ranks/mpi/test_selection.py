"""Algorithm selection over real MPI: all ranks select the same algorithm, and its result has the algorithm's bits."""

import numpy as np
import pytest

from hpcdist import collectives
from hpcdist.collectives import autotune
from hpcdist.collectives.node import shared_memory

MAX_BYTES = 16384
FLOAT = np.dtype(np.float32)


@pytest.fixture
def cache(monkeypatch, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder / "cache" / "hpcdist" / "tuning"


def _request(comm, kind):
    return autotune.TuningRequest(
        max_bytes=MAX_BYTES,
        dtype=FLOAT,
        kind=kind,
        buffer="shared",
        allocate=lambda size: shared_memory.allocate(comm, size, FLOAT),
        budget_s=0.2,
    )


def _select(comm, kind):
    result = autotune.select(comm, comm, _request(comm, kind), "the MPI library of this test")
    collectives.release(comm)
    return result


def test_rank_selections_are_agreed_and_cached(comm, cache):
    first, second = (_select(comm, autotune.ALLREDUCE_KIND) for _ in range(2))
    everyone = comm.allgather_object((first.text, first.rows, second.text, second.rows))
    assert all(one == everyone[0] for one in everyone)
    assert first.text == second.text
    if comm.size == 1:
        assert (first.text, first.source) == ("native", "default")
        return
    assert (first.source, second.source) == ("measured", "cache")
    assert all({"native", row.chosen} <= set(row.measured) for row in first.rows)
    assert first.machine is not None and first.machine.links["node"].latency_s > 0
    if comm.rank == 0:
        assert len(list(cache.iterdir())) == 1


def test_rank_auto_has_the_bits_of_the_selected_algorithm(comm, cache, rng):
    choice = _select(comm, autotune.ALLREDUCE_KIND).choice
    for nbytes in (4, 64, 1000, 1024, 4096, 10000, MAX_BYTES, 4 * MAX_BYTES):
        inputs = rng.standard_normal((comm.size, nbytes // 4)).astype(np.float32)
        auto, forced = inputs[comm.rank].copy(), inputs[comm.rank].copy()
        collectives.allreduce(comm, auto, str(choice))
        collectives.allreduce(comm, forced, choice.at(nbytes))
        assert auto.tobytes() == forced.tobytes()
        np.testing.assert_allclose(auto, inputs.astype(np.float64).sum(axis=0), rtol=1e-4, atol=1e-5)


def test_rank_selection_for_shards_is_agreed(comm, cache):
    result = _select(comm, autotune.SHARDED_KIND)
    assert result.text in collectives.SHARDED
    assert set(comm.allgather_object(result.text)) == {result.text}
