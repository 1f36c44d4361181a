"""DGC and 1-bit Adam over real messages: the bits of ranks that are threads, including a skipped step."""

import numpy as np
import pytest

from harness.compressed.optimizers import pad_values, seat_of, step
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.compressed.config import CompressionConfig
from hpcdist.strategies.data import catalogue

STEPS = 5


def make_exchange(comm, name):
    if name == "dgc":
        keys = {"name": "sgd", "learning_rate": 0.1, "clip_norm": 3.0}
        return catalogue.dgc(seat_of(comm, keys), CompressionConfig(density=0.1, warmup_steps=4))
    return catalogue.onebit(seat_of(comm, {"name": "adamw", "learning_rate": 0.01}), CompressionConfig(warmup_steps=2))


def run(comm, name):
    """Return the parameters and the state of this rank after some steps, and the outcome of the last step."""
    rng, exchange = np.random.default_rng(3), make_exchange(comm, name)
    given = np.array([[pad_values(rng.standard_normal) for _ in range(comm.size)] for _ in range(STEPS)])
    given[STEPS - 1, comm.size - 1] = np.inf
    lines = [step(exchange, gradients[comm.rank]) for gradients in given[: STEPS - 1]]
    before = [piece.array.tobytes() for piece in exchange.wanted()]
    with pytest.raises(NonFiniteError):
        step(exchange, given[STEPS - 1, comm.rank])
    assert [piece.array.tobytes() for piece in exchange.wanted()] == before
    return [repr(lines).encode(), exchange.parameters.array.tobytes(), *before]


@pytest.mark.parametrize("name", ["dgc", "onebit"])
@pytest.mark.full_except("dgc", "onebit")
def test_messages_give_the_bits_of_threads(comm, name):
    result = run(comm, name)
    threads = run_threads(comm.size, lambda thread: run(thread, name)) if comm.rank == 0 else None
    assert result == comm.broadcast_object(threads)[comm.rank]
    assert comm.allgather_object(result[1]) == [result[1]] * comm.size
