"""The same code on a real GPU: skipped, with the reason, where there is none."""

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays import backend, device
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.solo import solo
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.optim import optimizer as optimizers
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.allreduce import AllreduceExchange
from hpcdist.strategies.schedule.executor import Executor
from hpcdist.strategies.schedule.generators import interleave, sequential

STEPS, SAMPLES = 10, 4


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Make a GPU current."""
    try:
        device.choose(0)
    except MissingCapabilityError as error:
        pytest.skip(str(error))


def losses(on: str, data: np.ndarray, optimizer: str) -> list[float]:
    model = models.build(ModelConfig(layers=2, hidden=32, heads=2), "float32", context=data.shape[-1] - 1)
    layout = model.layout
    initial = FlatStore(layout, np.float32)
    model.initialise(initial, seed=1)
    parameters, gradients = FlatStore(layout, np.float32, on=on), FlatStore(layout, np.float32, on=on)
    parameters.array[...] = backend.place(initial.array, on)
    config = OptimizerConfig(name=optimizer, learning_rate=1e-2, warmup_steps=0)
    rule = optimizers.build(config, layout, Range(0, layout.size), np.dtype("float32"), total_steps=STEPS, on=on)
    exchange = AllreduceExchange(solo(), parameters, gradients, rule, algorithm="ring", clip_norm=1.0)
    executor = Executor(model, parameters, gradients, exchange, Arena(on=on))
    operations = interleave(sequential(len(model.stages), 1), exchange.plan(), executor.units)
    batches = [backend.place(step, on) for step in data]
    return [
        executor.run(operations, [(batch[:, :-1], batch[:, 1:])], SAMPLES, step, np.zeros(2)).loss
        for step, batch in enumerate(batches)
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "lamb"])
def test_gpu_losses_are_those_of_the_cpu(optimizer: str, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, (STEPS, SAMPLES, 17)).astype(np.uint8)
    np.testing.assert_allclose(losses("gpu", data, optimizer), losses("cpu", data, optimizer), rtol=1e-4)


def test_gpu_messages_travel_through_the_host_where_mpi_takes_no_device_pointers(rng: np.random.Generator) -> None:
    values = rng.standard_normal(1000).astype(np.float32)
    sent = backend.place(values, "gpu")
    received = backend.zeros(1000, np.dtype("float32"), "gpu")
    comm = solo()
    comm.send(sent, 0)
    comm.recv(received, 0)
    assert np.array_equal(backend.to_host(received), values)
