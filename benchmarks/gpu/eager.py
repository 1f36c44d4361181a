"""Training step of a GPT on one GPU, compared with PyTorch (eager and compiled, with fused attention).

    python -m benchmarks gpu.eager --layers 12 --hidden 1024 --context 1024 --samples 8 -o gpu_eager.h5
    python -m benchmarks gpu.eager --dtype float32 --sides eager

All contenders have the same weights and batches, and alternate step by step. A step is timed by the host clock, from an
idle device to an idle device. In 16 bits, hpcdist keeps float32 master weights; PyTorch has only 16-bit weights and the
fused AdamW. Losses of the first step must agree. Operations are counted as 6 N + 6 L T H per token (N parameters
without embeddings, L layers, T context, H hidden size). "MFU" is their rate relative to the fastest matrix product of
the same dtype in the same run. "x eager" below 1: hpcdist is faster; the target is at most 1.25.
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
from hpcdist.arrays.matmul_peak import MatrixProduct
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step.contenders import cross_entropy, load_torch, torch_twin
from hpcdist.bench.step.request import StepShape
from hpcdist.comm.start import Session
from hpcdist.errors import MissingCapabilityError
from hpcdist.models.arena import Arena
from hpcdist.models.config import ModelConfig
from hpcdist.optim import optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.master_weights import MasterWeights

SCHEMA, ON = "hpcdist.benchmark.gpu_eager", "gpu"

WARM_UP: Final = 3  # untimed steps: kernels are compiled, memory is allocated
AGREEMENT: Final = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}  # relative difference of the first losses
SIZES: Final = {"layers": 12, "hidden": 1024, "heads": 16, "context": 1024, "samples": 8, "vocabulary": 256}
SIDES: Final = ("eager", "compiled")  # contenders of PyTorch
RATE: Final = 1e-4
PRODUCT: Final = {"cuda": 8192, "cpu": 64}  # side of the square matrices whose product gives the peak
OPTIONS: Final = {**SIZES, "steps": 30, "dtype": AGREEMENT, "sides": SIDES, "where": PRODUCT}


class Ours:
    """hpcdist's model. With 16-bit weights, gradients and activations it has float32 master weights."""

    def __init__(self, shape: StepShape, dtype: str, steps: int) -> None:
        sizes = {name: getattr(shape, name) for name in ("layers", "hidden", "heads", "vocabulary")}
        self.model = models.build(ModelConfig(**sizes), dtype, context=shape.context)
        layout, whole = self.model.layout, Range(0, self.model.layout.size)
        self.start = FlatStore(layout, np.dtype("float32"))
        self.model.initialise(self.start, seed=1)
        self._weights, self._gradient = (FlatStore(layout, dtype_of(dtype), on="gpu") for _ in range(2))
        config = OptimizerConfig(name="adamw", learning_rate=RATE, warmup_steps=0, weight_decay=0.0)
        inner = optimizer.build(config, layout, whole, self.start.dtype, total_steps=steps, on="gpu")
        self._optimizer: Any = inner
        self._whole = whole
        if dtype == "float32":
            self._weights.copy_from(self.start)
        else:
            self._optimizer = MasterWeights(inner, layout, whole, ledger=None, on="gpu")
            self._optimizer.weights.copy_from(self.start)
            self._optimizer.round_into(self._weights)
        self._views, self._into = self.model.bind(self._weights), self.model.bind_gradients(self._gradient)
        self._arena = Arena(on="gpu")

    def step(self, x: np.ndarray, targets: np.ndarray) -> float:
        model, scale = self.model, 1.0 / targets.size
        for stage in self._into:
            stage.begin_step()
        inputs = backend.place(x, "gpu"), backend.place(targets, "gpu")
        logits = model.forward(self._views, inputs[0], self._arena)
        saved = self._arena.saved(model.stages[-1].layer)
        loss = model.loss.forward(logits, inputs[1], model.operations, saved)
        model.backward(self._views, self._into, scale, self._arena)
        self._optimizer.begin_step()
        self._optimizer.direction(self._whole, self._weights, self._gradient)
        self._optimizer.apply(self._whole, self._weights, self._gradient)
        return float(loss) * scale


class Torch:
    def __init__(self, shape: StepShape, ours: Ours, dtype: str, where: str, compiled: bool) -> None:
        library, self._where = load_torch(), where
        module = torch_twin(shape, ours.model, ours.start).to(where, getattr(library, dtype))
        self._module = library.compile(module) if compiled else module
        self._optimizer = library.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step(self, x: np.ndarray, targets: np.ndarray) -> float:
        library = load_torch()
        inputs, answers = (library.from_numpy(array).to(self._where) for array in (x, targets))
        self._optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self._module(inputs).float(), answers)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def timed(shape: StepShape, dtype: str, steps: int, where: str = "cuda", names: Sequence[str] = ("eager",)) -> Results:
    """Measure seconds and losses of each step of all contenders. Raises SystemExit if the first losses differ."""
    drawn, ours = np.random.default_rng(2), Ours(shape, dtype, WARM_UP + steps)
    sides: dict[str, Any] = {"ours": ours}
    sides |= {name: Torch(shape, ours, dtype, where, name == "compiled") for name in names}
    product, peak = MatrixProduct(dtype_of(dtype), "gpu", PRODUCT[where]), list[float]()
    rows: list[list[tuple[float, float]]] = []
    for _ in range(WARM_UP + steps):
        tokens = drawn.integers(0, shape.vocabulary, (shape.samples, shape.context + 1))
        batch, row = (tokens[:, :-1].copy(), tokens[:, 1:].copy()), list[tuple[float, float]]()
        for side in sides.values():
            losses: list[float] = []

            def step(side: Any = side, losses: list[float] = losses, batch: Any = batch) -> None:
                losses.append(side.step(*batch))
                device.synchronise()  # includes the work after the loss; PyTorch uses the same default stream

            row.append((harness.seconds(step), losses[0]))
        peak.append(product.flops / product.run())
        rows.append(row)
        (_, expected), *others = rows[0]
        for name, (_, loss) in zip(list(sides)[1:], others, strict=True):
            if not abs(expected - loss) <= AGREEMENT[dtype] * abs(loss):
                raise SystemExit(f"first losses differ: {expected} in hpcdist, {loss} in PyTorch, {name}")
    figures = np.array(rows[WARM_UP:]).transpose(1, 2, 0)  # (sides, seconds and loss, steps)
    arrays = {f"{name}_{kind}": figures[n, k] for n, name in enumerate(sides) for k, kind in enumerate(("s", "loss"))}
    arrays["product_flops"] = np.array(peak)
    about = vars(shape) | {"parameters": ours.model.layout.parameters, "contenders": ",".join(sides)}
    return Results(arrays, dict.fromkeys(arrays, "steps"), about)


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    device.choose(0)
    if chosen.where == "cuda" and not load_torch().cuda.is_available():
        raise MissingCapabilityError("this PyTorch sees no GPU; install one that is built for CUDA")
    shape = StepShape(**{name: getattr(chosen, name) for name in SIZES})
    results = timed(shape, chosen.dtype, chosen.steps, chosen.where, chosen.sides)
    return Results(results.arrays, results.dims, {**results.attributes, **card(), "dtype": chosen.dtype})


def lines(results: Results) -> Sequence[str]:
    about = results.attributes
    tokens = about["samples"] * about["context"]
    # Embedding rows are looked up, not multiplied.
    multiplied_parameters = about["parameters"] - (about["vocabulary"] + about["context"]) * about["hidden"]
    flops = tokens * (6.0 * multiplied_parameters + 6.0 * about["layers"] * about["context"] * about["hidden"])
    names = results.names()
    times, peak = np.array([results.arrays[f"{name}_s"] for name in names]), results.arrays["product_flops"].max()
    medians = np.median(times, axis=1)
    more = {
        "tokens/s": [f"{tokens / median_s:,.0f}" for median_s in medians],
        "TFLOP/s": [f"{flops / median_s / 1e12:.2f}" for median_s in medians],
        "MFU": [f"{flops / median_s / peak:.1%}" for median_s in medians],
    }
    base = min(1, len(names) - 1)
    title = f"{about['parameters'] / 1e6:.0f} M parameters; {peak / 1e12:.4g} TFLOP/s in products of matrices"
    return [title, *harness.time_table(times, names, base=base, more=more)]


def ratios(results: Results) -> harness.Ratios:
    ours = results.arrays["ours_s"]
    return {f"over {name}": ours / results.arrays[f"{name}_s"] for name in results.names() if name != "ours"}
