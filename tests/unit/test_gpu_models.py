"""Models on the double of a GPU: the numbers of the CPU, and one scalar a micro-batch on the way to the host."""

from types import ModuleType

import numpy as np
import pytest

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.store import FlatStore
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig

GPT = {"layers": 2, "hidden": 12, "heads": 3, "vocabulary": 11}
CASES = {
    "gpt": (ModelConfig(**GPT), {"context": 7}),
    "gpt tied": (ModelConfig(**GPT, tied=True), {"context": 7}),
    "gpt, more than one block of queries": (ModelConfig(**GPT), {"context": 70}),
    "mlp gelu": (ModelConfig(kind="mlp", layers=2, hidden=9), {"features": 5, "classes": 4}),
    "mlp relu, bytes": (ModelConfig(kind="mlp", layers=1, hidden=9, activation="relu"), {"features": 5, "classes": 4}),
}
MICROBATCHES = 2
BOUNDS = {"float32": 1e-5, "float64": 1e-12}


def batches_of(case: str, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    config, inputs = CASES[case]
    found = []
    for samples in range(3, 3 + MICROBATCHES):
        if config.kind == "gpt":
            tokens = rng.integers(0, config.vocabulary, (samples, inputs["context"] + 1)).astype(np.uint8)
            found.append((tokens[:, :-1].copy(), tokens[:, 1:].copy()))
        else:
            x = rng.integers(0, 256, (samples, inputs["features"])).astype(np.uint8)
            found.append((x if "bytes" in case else x / 64 - 2, rng.integers(0, inputs["classes"], samples)))
    return found


class Run:
    """A model on ``on`` with parameters that are larger than initial ones, so that every path matters."""

    def __init__(self, case: str, dtype: str, on: str, seed: int) -> None:
        config, inputs = CASES[case]
        self.model = models.build(config, dtype, **inputs)
        start = FlatStore(self.model.layout, self.model.dtype)
        drawn = np.random.default_rng(seed)
        for segment in self.model.layout.segments:
            start.view(segment.key)[...] = drawn.standard_normal(segment.spec.shape) * 0.5
        self.store, self.gradient = (FlatStore(self.model.layout, self.model.dtype, on=on) for _ in range(2))
        self.store.array[...] = backend.place(start.array, on)
        self.parameters, self.into = self.model.bind(self.store), self.model.bind_gradients(self.gradient)
        self.arena = Arena(on=on)

    def step(self, batches: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        """Return the loss of each micro-batch; the gradient is left in its store."""
        for stage in self.into:
            stage.begin_step()
        losses = []
        for number, (x, targets) in enumerate(batches):
            logits = self.model.forward(self.parameters, x, self.arena, number)
            saved = self.arena.saved(self.model.stages[-1].layer, number)
            losses.append(self.model.loss.forward(logits, targets, self.model.operations, saved))
            self.model.backward(self.parameters, self.into, 0.25, self.arena, number)
        for stage in self.into:
            stage.finish()
        return losses


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_are_those_of_the_cpu(
    gpu: ModuleType, case: str, dtype: str, rng: np.random.Generator
) -> None:
    batches, seed = batches_of(case, rng), int(rng.integers(1 << 30))
    host, device = Run(case, dtype, "cpu", seed), Run(case, dtype, "gpu", seed)
    expected = host.step(batches)
    placed = [(backend.place(x, "gpu"), backend.place(targets, "gpu")) for x, targets in batches]
    gpu.LOG.clear()
    losses = device.step(placed)
    assert gpu.LOG.sites() == {(gpu.D2H, "cross_entropy.forward"): MICROBATCHES}
    assert gpu.LOG.nbytes(gpu.D2H) == 8 * MICROBATCHES
    np.testing.assert_allclose(losses, expected, rtol=BOUNDS[dtype])
    got, want = device.gradient.array.get(), host.gradient.array
    assert np.linalg.norm(got - want) <= BOUNDS[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_and_logits_are_those_of_the_cpu(gpu: ModuleType, case: str, rng: np.random.Generator) -> None:
    (x, targets), seed = batches_of(case, rng)[0], int(rng.integers(1 << 30))
    host, device = Run(case, "float64", "cpu", seed), Run(case, "float64", "gpu", seed)
    placed, answers = backend.place(x, "gpu"), backend.place(targets, "gpu")
    gpu.LOG.clear()
    logits = device.model.logits(device.parameters, placed, device.arena)
    assert gpu.LOG.events == []
    loss = device.model.evaluate(device.parameters, placed, answers, device.arena)
    assert gpu.LOG.sites() == {(gpu.D2H, "cross_entropy.forward"): 1}
    np.testing.assert_allclose(loss, host.model.evaluate(host.parameters, x, targets, host.arena), rtol=1e-12)
    np.testing.assert_allclose(logits.get(), host.model.logits(host.parameters, x, host.arena), rtol=1e-10, atol=1e-12)


def test_the_second_step_takes_no_memory(gpu: ModuleType, rng: np.random.Generator) -> None:
    run = Run("gpt tied", "float32", "gpu", 0)
    placed = [(backend.place(x, "gpu"), backend.place(y, "gpu")) for x, y in batches_of("gpt tied", rng)]
    run.step(placed)
    blocks = len(run.arena._blocks)
    run.step(placed)
    assert len(run.arena._blocks) == blocks
