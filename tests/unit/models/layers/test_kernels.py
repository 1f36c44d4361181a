"""Kernels are compiled for the types that models use, and stages compute through the operation table only."""

from dataclasses import fields, replace

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays import jit
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.attention import kernels
from hpcdist.models.config import ModelConfig
from hpcdist.models.layers import convolution, dropout, embedding, linear, norm, vector_math
from hpcdist.models.model import LOCAL
from hpcdist.models.stage import Operations

MODULES = (kernels, convolution, dropout, embedding, vector_math, linear, norm)
CONFIGS = {
    "gpt": ModelConfig(layers=1, hidden=8, heads=2, dropout=0.1),
    "options": ModelConfig(
        layers=1, hidden=8, heads=2, kv_heads=1, positions="rotary", norm="rms", activation="swiglu", bias=False
    ),
}


def _kernels():
    return [value for module in MODULES for value in vars(module).values() if isinstance(value, jit.Kernel)]


def _step(model, rng):
    store, gradient = FlatStore(model.layout, model.dtype), FlatStore(model.layout, model.dtype)
    model.initialise(store, 0)
    tokens = rng.integers(0, 256, (2, 9)).astype(np.uint8)
    parameters, into, arena = model.bind(store), model.bind_gradients(gradient), Arena()
    for stage in into:
        stage.begin_step()
    logits = model.forward(parameters, tokens[:, :-1], arena, draw=dropout.Draw(0, 1, 0))
    model.loss.forward(logits, tokens[:, 1:], model.operations, arena.saved(model.stages[-1].layer))
    model.backward(parameters, into, 1.0, arena)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.full_except("options-float64")
def test_kernel_samples_cover_the_types_of_a_step(config, dtype, rng):
    kernels = _kernels()
    assert {kernel.function.__module__ for kernel in kernels} >= {module.__name__ for module in MODULES}
    for kernel in kernels:
        assert kernel._samples, f"{kernel.__name__} has no sample: `hpcdist warmup` would leave it out"
        for arguments in kernel._samples:
            kernel(*arguments())
    before = [len(kernel.compiled.signatures) for kernel in kernels]
    _step(models.build(CONFIGS[config], dtype, context=8), rng)
    after = [len(kernel.compiled.signatures) for kernel in kernels]
    assert [kernel.__name__ for kernel, old, new in zip(kernels, before, after, strict=True) if old != new] == []


class Counted:
    def __init__(self, inner):
        self.inner, self.calls = inner, {"forward": 0, "backward": 0}

    def forward(self, *args, **options):
        self.calls["forward"] += 1
        return self.inner.forward(*args, **options)

    def backward(self, *args, **options):
        self.calls["backward"] += 1
        return self.inner.backward(*args, **options)


def test_replaced_operation_table_sees_every_call(rng):
    counted = {field.name: Counted(getattr(LOCAL, field.name)) for field in fields(Operations)}
    model = models.build(ModelConfig(layers=2, hidden=8, heads=2), "float32", context=8)
    model.operations = replace(LOCAL, **counted)
    _step(model, rng)
    expected = {"linear_column": 5, "linear_row": 4, "embed": 1, "norm": 5, "attention": 2, "activation": 2}
    expected |= {"cross_entropy": 1, "positions": 1, "rotary": 0, "dropout": 5, "experts": 0}
    assert {name: one.calls for name, one in counted.items()} == {
        name: {"forward": count, "backward": count} for name, count in expected.items()
    }
