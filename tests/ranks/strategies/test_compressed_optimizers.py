"""DGC and 1-bit Adam over real messages: the bits of ranks that are threads, a step included that is given up."""

import numpy as np
import pytest

from harness.compressed.optimizers import padded, seat_of, step
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.compressed.dgc import DgcExchange
from hpcdist.strategies.compressed.onebit import OneBitExchange

STEPS = 5


def made(comm, name):
    if name == "dgc":
        keys = {"name": "sgd", "learning_rate": 0.1, "clip_norm": 3.0}
        return DgcExchange(seat_of(comm, keys), CompressionConfig(density=0.1, warmup_steps=4))
    return OneBitExchange(seat_of(comm, {"name": "adamw", "learning_rate": 0.01}), CompressionConfig(warmup_steps=2))


def run(comm, name):
    """The parameters and the state of this rank after some steps, and how the last of them ended."""
    rng, exchange = np.random.default_rng(3), made(comm, name)
    given = np.array([[padded(rng.standard_normal) for _ in range(comm.size)] for _ in range(STEPS)])
    given[STEPS - 1, comm.size - 1] = np.inf
    told = [step(exchange, gradients[comm.rank]) for gradients in given[: STEPS - 1]]
    before = [piece.array.tobytes() for piece in exchange.wanted()]
    with pytest.raises(NonFiniteError):
        step(exchange, given[STEPS - 1, comm.rank])
    assert [piece.array.tobytes() for piece in exchange.wanted()] == before
    return [repr(told).encode(), exchange.parameters.array.tobytes(), *before]


@pytest.mark.parametrize("name", ["dgc", "onebit"])
@pytest.mark.full_except("dgc", "onebit")
def test_messages_bring_the_bits_that_threads_have(comm, name):
    found = run(comm, name)
    threads = run_threads(comm.size, lambda thread: run(thread, name)) if comm.rank == 0 else None
    assert found == comm.broadcast_object(threads)[comm.rank]
    assert comm.allgather_object(found[1]) == [found[1]] * comm.size
