"""Compressed optimizer exchanges stepped without a model: given gradients in, parameters out."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness.rank_run import seat
from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.layout import Layout
from hpcdist.comm.communicator import Communicator
from hpcdist.models.config import ModelConfig
from hpcdist.optim import norms
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.core.operations import Kind
from hpcdist.strategies.core.rank_context import RankContext
from hpcdist.strategies.data.exchange import DataExchange

MODEL = ModelConfig(layers=1, hidden=8, heads=2, vocabulary=20)
CONSTANT = {"decay": "constant", "warmup_steps": 0}


def layout() -> Layout:
    return models.build(MODEL, "float32", context=4).layout


def seat_of(comm: Communicator, optimizer: dict[str, Any], bucket_bytes: int = 4000, on: str = "cpu") -> RankContext:
    model = models.build(MODEL, "float32", context=4)
    return seat(comm, model, OptimizerConfig(**{**CONSTANT, **optimizer}), bucket_bytes=bucket_bytes, on=on)


def pad_values(drawn: Callable[[int], np.ndarray]) -> np.ndarray:  # (size,), zero where the layout pads
    """Return ``drawn`` as float32 values with zeros in the padding, tensor by tensor."""
    space = layout()
    received = np.zeros(space.size, np.float32)
    for segment in space.segments:
        received[segment.range.slice] = drawn(segment.range.size)
    return received


def step(exchange: DataExchange, gradient: np.ndarray) -> float:
    """Take one step, as the executor does, and return the gradient norm. Collective."""
    exchange.begin([])
    exchange.gradients.array[...] = backend.place(gradient, exchange.context.on)
    for op in exchange.plan():
        if op.kind is Kind.AGREE:
            norm_squared = float(exchange.agree(np.array([exchange.norm_squared()]))[0])
            exchange.begin_update(norms.clip_scale(norm_squared, exchange.context.optimizer.clip_norm))
        else:
            exchange.handlers[op.kind](op)
    return float(norm_squared**0.5)


def steps(exchange: DataExchange, gradients: Sequence[np.ndarray]) -> np.ndarray:  # (steps, size)
    """Return the parameters after each step."""
    results = []
    for gradient in gradients:
        step(exchange, gradient)
        results.append(backend.to_host(exchange.parameters.array).copy())
    return np.array(results)
