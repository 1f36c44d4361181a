"""A training step of a GPT in 16-bit floats on one GPU, beside PyTorch eager with its fused attention.

    python benchmarks/gpu_eager.py [--layers 12] [--hidden 1024] [--context 1024] [--samples 8] [-o gpu_eager.h5]

Both have the same weights and see the same batches, a step each by turns, each timed by the clock from a device that
has nothing to do to one that is done. Ours keeps a float32 master of its 16-bit weights; PyTorch's weights are 16-bit
alone and its AdamW is the fused one, which is the least work that it can do. Losses of the first step must agree.
Prints one JSON line: medians in seconds, tokens/s, operations a second by the closed form of 6 N + 6 L T H a token, and
the ratio (above 1: ours is faster; the target is at least 0.8). Without a GPU, or a PyTorch that sees it, it leaves
with 69.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist import models
from hpcdist.arrays import backend
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.arrays.gpu import device
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.bench.step.contenders import cross_entropy, load_torch, torch_twin
from hpcdist.bench.step.request import StepShape
from hpcdist.errors import HpcdistError, MissingCapabilityError
from hpcdist.hdf5 import files
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.models.runtime.arena import Arena
from hpcdist.optim import optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.optim.master_weights import MasterWeights
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.gpu_eager", 1
WARM_UP = 3  # kernels are compiled, memory is taken
AGREEMENT = {"bfloat16": 2e-2, "float16": 5e-3}  # of the losses of the first step


def gpt(shape: StepShape, dtype: str) -> Model:
    """Return the built-in model."""
    sizes = {name: getattr(shape, name) for name in ("layers", "hidden", "heads", "vocabulary")}
    return models.build(ModelConfig(**sizes), dtype, context=shape.context)


class Ours:
    """The built-in model: 16-bit weights, gradients and activations, and a float32 master."""

    def __init__(self, shape: StepShape, dtype: str, rate: float, steps: int) -> None:
        self.model = gpt(shape, dtype)
        layout, whole = self.model.layout, Range(0, self.model.layout.size)
        self.start = FlatStore(layout, np.dtype("float32"))
        self.model.initialise(self.start, seed=1)
        self._weights, self._gradient = (FlatStore(layout, dtype_of(dtype), on="gpu") for _ in range(2))
        config = OptimizerConfig(name="adamw", learning_rate=rate, warmup_steps=0, weight_decay=0.0)
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

    def __init__(self, shape: StepShape, ours: Ours, dtype: str, rate: float, where: str) -> None:
        library, self._where = load_torch(), where
        self._module = torch_twin(shape, ours.model, ours.start).to(where, getattr(library, dtype))
        given = {"lr": rate, "weight_decay": 0.0, "fused": True}
        self._optimizer = library.optim.AdamW(self._module.parameters(), **given)

    def step(self, x: np.ndarray, targets: np.ndarray) -> float:
        """Make a step and return its mean loss."""
        library = load_torch()
        there, answers = (library.from_numpy(array).to(self._where) for array in (x, targets))
        self._optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(self._module(there).float(), answers)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def timed_s(side: Any, batch: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Return the seconds of a step, and its loss. The host is given the loss last, so the device is done."""
    begin = time.perf_counter()
    loss = side.step(*batch)
    device.synchronise()  # what comes behind the loss: PyTorch works on the same stream, the default one
    return time.perf_counter() - begin, loss


def measure(shape: StepShape, dtype: str, steps: int, where: str = "cuda") -> dict[str, np.ndarray]:
    """Return seconds and losses of each step of both. Raises SystemExit where the first losses differ."""
    rate, drawn = 1e-4, np.random.default_rng(2)
    ours = Ours(shape, dtype, rate, WARM_UP + steps)
    sides = {"ours": ours, "torch": Eager(shape, ours, dtype, rate, where)}
    found: dict[str, list[float]] = {f"{name}_{what}": [] for name in sides for what in ("s", "loss")}
    for _ in range(WARM_UP + steps):
        tokens = drawn.integers(0, shape.vocabulary, (shape.samples, shape.context + 1))
        for name, side in sides.items():
            taken_s, loss = timed_s(side, (tokens[:, :-1].copy(), tokens[:, 1:].copy()))
            found[f"{name}_s"].append(taken_s)
            found[f"{name}_loss"].append(loss)
        one, other = found["ours_loss"][0], found["torch_loss"][0]
        if not abs(one - other) <= AGREEMENT[dtype] * abs(other):
            raise SystemExit(f"the first loss is {one}, and {other} in PyTorch")
    return {name: np.array(values[WARM_UP:]) for name, values in found.items()}


def report(shape: StepShape, parameters: int, found: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the figures to print."""
    medians = {name: float(np.median(found[f"{name}_s"])) for name in ("ours", "torch")}
    tokens = shape.samples * shape.context
    operations = tokens * (6.0 * parameters + 6.0 * shape.layers * shape.context * shape.hidden)
    figures: dict[str, Any] = {f"{name}_s": round(value, 6) for name, value in medians.items()}
    figures |= {f"{name}_tokens_per_s": round(tokens / value) for name, value in medians.items()}
    figures |= {f"{name}_tflop_per_s": round(operations / value / 1e12, 2) for name, value in medians.items()}
    return {"parameters": parameters, **figures, "ratio": round(medians["torch"] / medians["ours"], 3)}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 12, "hidden": 1024, "heads": 16, "context": 1024, "samples": 8, "vocabulary": 256}
    for name, default in (*sizes.items(), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=tuple(AGREEMENT), default="bfloat16")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file for the raw figures")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args(arguments)
    shape = StepShape(**{name: getattr(options, name) for name in sizes})
    try:
        device.choose(0)
        if not load_torch().cuda.is_available():
            raise MissingCapabilityError("this PyTorch sees no GPU; install one that is built for CUDA")
        found = measure(shape, options.dtype, options.steps)
    except HpcdistError as error:
        print(f"gpu_eager: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(json.dumps(report(shape, gpt(shape, options.dtype).layout.parameters, found)))
    if options.output is not None:
        with files.edit(options.output, SCHEMA, VERSION) as file:
            for name, values in found.items():
                file[name] = values
                file[name].attrs.update({"units": "s" if name.endswith("_s") else "nats", "dims": "steps"})
            file.attrs.update(provenance(anonymous=options.anonymous) | vars(shape))


if __name__ == "__main__":
    main()
