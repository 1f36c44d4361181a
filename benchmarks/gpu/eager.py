"""A training step of a GPT in 16-bit floats on one GPU, beside PyTorch eager with its fused attention.

    python -m benchmarks gpu.eager --layers 12 --hidden 1024 --context 1024 --samples 8 -o gpu_eager.h5

Both have the same weights and see the same batches, a step each by turns, each timed by the clock from a device that
has nothing to do to one that is done. Ours keeps a float32 master of its 16-bit weights; PyTorch's weights are 16-bit
alone and its AdamW is the fused one, which is the least work that it can do. Losses of the first step must agree.
Operations a second are counted by the closed form of 6 N + 6 L T H a token. "x torch" below 1: ours is faster; the
target is at most 1.25. Without a GPU, or a PyTorch that sees it, it leaves with 69.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.gpu.card import card
from benchmarks.harness import Results
from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step.contenders import cross_entropy, load_torch, torch_twin
from hpcdist.bench.step.request import StepShape
from hpcdist.comm.start import Session
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.config import ModelConfig
from hpcdist.models.runtime.arena import Arena
from hpcdist.optim import optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.master_weights import MasterWeights

SCHEMA, ON = "hpcdist.benchmark.gpu_eager", "gpu"

WARM_UP: Final = 3  # kernels are compiled, memory is taken
AGREEMENT: Final = {"bfloat16": 2e-2, "float16": 5e-3}  # of the losses of the first step
SIZES: Final = {"layers": 12, "hidden": 1024, "heads": 16, "context": 1024, "samples": 8, "vocabulary": 256}
NAMES: Final = ("ours", "torch")
RATE: Final = 1e-4
OPTIONS: Final = {**SIZES, "steps": 30, "dtype": AGREEMENT}


class Ours:
    """The built-in model: 16-bit weights, gradients and activations, and a float32 master."""

    def __init__(self, shape: StepShape, dtype: str, steps: int) -> None:
        sizes = {name: getattr(shape, name) for name in ("layers", "hidden", "heads", "vocabulary")}
        self.model = models.build(ModelConfig(**sizes), dtype, context=shape.context)
        layout, whole = self.model.layout, Range(0, self.model.layout.size)
        self.start = FlatStore(layout, np.dtype("float32"))
        self.model.initialise(self.start, seed=1)
        self._weights, self._gradient = (FlatStore(layout, dtype_of(dtype), on="gpu") for _ in range(2))
        config = OptimizerConfig(name="adamw", learning_rate=RATE, warmup_steps=0, weight_decay=0.0)
        inner = optimizer.build(config, layout, whole, self.start.dtype, total_steps=steps, on="gpu")
        self._master, self._whole = MasterWeights(inner, layout, whole, ledger=None, on="gpu"), whole
        self._master.weights.copy_from(self.start)
        self._master.round_into(self._weights)
        self._views, self._into = self.model.bind(self._weights), self.model.bind_gradients(self._gradient)
        self._arena = Arena(on="gpu")

    def step(self, x: np.ndarray, targets: np.ndarray) -> float:
        """Make a step and return its mean loss."""
        model, scale = self.model, 1.0 / targets.size
        for stage in self._into:
            stage.begin_step()
        there = backend.place(x, "gpu"), backend.place(targets, "gpu")
        logits = model.forward(self._views, there[0], self._arena)
        saved = self._arena.saved(model.stages[-1].layer)
        loss = model.loss.forward(logits, there[1], model.operations, saved)
        model.backward(self._views, self._into, scale, self._arena)
        self._master.begin_step()
        self._master.direction(self._whole, self._weights, self._gradient)
        self._master.apply(self._whole, self._weights, self._gradient)
        return float(loss) * scale


class Eager:
    """The same model in PyTorch."""

    def __init__(self, shape: StepShape, ours: Ours, dtype: str, where: str) -> None:
        library, self._where = load_torch(), where
        self._module = torch_twin(shape, ours.model, ours.start).to(where, getattr(library, dtype))
        self._optimizer = library.optim.AdamW(self._module.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(self, x: np.ndarray, targets: np.ndarray) -> float:
        """Make a step and return its mean loss."""
        library = load_torch()
        there, answers = (library.from_numpy(array).to(self._where) for array in (x, targets))
        self._optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self._module(there).float(), answers)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def timed(shape: StepShape, dtype: str, steps: int, where: str = "cuda") -> Results:
    """Return seconds and losses of each step of both. Raises SystemExit where the first losses differ."""
    drawn, ours = np.random.default_rng(2), Ours(shape, dtype, WARM_UP + steps)
    sides: dict[str, Any] = {"ours": ours, "torch": Eager(shape, ours, dtype, where)}
    rows: list[list[tuple[float, float]]] = []
    for _ in range(WARM_UP + steps):
        tokens = drawn.integers(0, shape.vocabulary, (shape.samples, shape.context + 1))
        batch, row = (tokens[:, :-1].copy(), tokens[:, 1:].copy()), list[tuple[float, float]]()
        for side in sides.values():
            losses: list[float] = []

            def step(side: Any = side, losses: list[float] = losses, batch: Any = batch) -> None:
                losses.append(side.step(*batch))
                device.synchronise()  # what comes behind the loss: PyTorch works on the same stream, the default one

            row.append((harness.seconds(step), losses[0]))
        rows.append(row)
        first, other = (loss for _, loss in rows[0])
        if not abs(first - other) <= AGREEMENT[dtype] * abs(other):
            raise SystemExit(f"the first loss is {first}, and {other} in PyTorch")
    figures = np.array(rows[WARM_UP:]).transpose(1, 2, 0)  # (sides, seconds and loss, steps)
    arrays = {f"{name}_{kind}": figures[n, k] for n, name in enumerate(NAMES) for k, kind in enumerate(("s", "loss"))}
    about = vars(shape) | {"parameters": ours.model.layout.parameters}
    return Results(arrays, dict.fromkeys(arrays, "steps"), about)


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return seconds and losses. Raises MissingCapabilityError without a PyTorch that sees the GPU."""
    device.choose(0)
    if not load_torch().cuda.is_available():
        raise MissingCapabilityError("this PyTorch sees no GPU; install one that is built for CUDA")
    results = timed(StepShape(**{name: getattr(chosen, name) for name in SIZES}), chosen.dtype, chosen.steps)
    return Results(results.arrays, results.dims, {**results.attributes, **card(), "dtype": chosen.dtype})


def lines(results: Results) -> Sequence[str]:
    about = results.attributes
    tokens = about["samples"] * about["context"]
    flops = tokens * (6.0 * about["parameters"] + 6.0 * about["layers"] * about["context"] * about["hidden"])
    times = np.array([results.arrays[f"{name}_s"] for name in NAMES])
    more = {
        "tokens/s": [f"{tokens / own:,.0f}" for own in np.median(times, axis=1)],
        "TFLOP/s": [f"{flops / own / 1e12:.2f}" for own in np.median(times, axis=1)],
    }
    return harness.time_table(times, NAMES, base=1, more=more)


def ratios(results):
    return {"ours": results.arrays["ours_s"] / results.arrays["torch_s"]}
