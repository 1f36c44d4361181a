"""Clipped updates of a GPT's parameters on one core, compared with PyTorch's optimizers and with a memcpy.

    python -m benchmarks optimizers
    python -m benchmarks optimizers --layers 12 --hidden 768 -o optimizers.h5

A turn copies an array of n parameters, computes the gradient norm, and applies the clipped update. Words to move: n for
the norm, n for the gradient, and 2 n for the weights and for each slot; the copy moves 2 n. The result is norm + update
relative to a copy of as many words; below 1 is possible, since several arrays at once can be faster. Times are CPU
seconds of one thread. After the last round the weights must agree. Needs the extra `reference`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from benchmarks import harness
from benchmarks.harness import Results
from hpcdist import models
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.comm.start import Session
from hpcdist.errors import HpcdistError
from hpcdist.models.config import ModelConfig
from hpcdist.optim import norms, optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.reporting.table import aligned

SCHEMA, COMMITTED = "hpcdist.benchmark.optimizers", "training/2026-11-22-optimizers.h5"
SMALL = {"rounds": 8}

PHASES: Final = ("memcpy", "norm", "update")
STEPS: Final = 10_000  # of the schedule, which is constant
COMMON: Final[dict[str, Any]] = {"learning_rate": 1e-3, "warmup_steps": 0, "decay": "constant", "clip_norm": 1.0}
CONFIGS: Final = {
    "adamw": OptimizerConfig(name="adamw", beta1=0.9, beta2=0.95, weight_decay=0.1, **COMMON),
    "sgd": OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.1, **COMMON),
    "lamb": OptimizerConfig(name="lamb", weight_decay=0.1, **COMMON),
    "lars": OptimizerConfig(name="lars", momentum=0.9, weight_decay=0.1, **COMMON),
}
# PyTorch's optimizers: the config to compare with, and the implementation
TORCH: Final = {"PyTorch adamw": ("adamw", "fused"), "PyTorch adamw, foreach": ("adamw", "foreach"),
                "PyTorch sgd": ("sgd", "fused"), "PyTorch sgd, foreach": ("sgd", "foreach")}  # fmt: skip
AGREE: Final = 1e-4  # largest norm of the weights' difference, relative to the norm of their change, in float32
OPTIONS: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 256, "rounds": 30, "only": (*CONFIGS, *TORCH)}


class Ours:
    """An optimizer of hpcdist with separate parameters. ``words`` is the number of words moved per parameter."""

    def __init__(self, name: str, layout: Layout, start: np.ndarray) -> None:
        self._whole, dtype = Range(0, layout.size), np.dtype(np.float32)
        self._rule = optimizer.build(CONFIGS[name], layout, self._whole, dtype, total_steps=STEPS)
        self._master, self._gradient = FlatStore(layout, dtype), FlatStore(layout, dtype)
        self.weights, self.gradient = self._master.array, self._gradient.array
        self.weights[...] = start
        # Layer-wise rules also write and read the direction, and read the weights again.
        self.words = 1 + 1 + 2 + 2 * len(self._rule.slots) + (3 if self._rule.needs_norms else 0)

    def norm(self) -> None:
        self._scale = norms.clip_scale(norms.sum_of_squares(self._gradient), 1.0)

    def update(self) -> None:
        rule = self._rule
        rule.begin_step()
        rule.direction(self._whole, self._master, self._gradient, self._scale)
        of_tensors = rule.partial_norms() if rule.needs_norms else None
        rule.apply(self._whole, self._master, self._gradient, None, of_tensors)


class Theirs:
    """An optimizer of PyTorch over views of two flat arrays, with PyTorch's clipping."""

    def __init__(self, name: str, layout: Layout, start: np.ndarray) -> None:
        import torch

        self._torch = torch
        torch.set_num_threads(1)
        kind, implementation = TORCH[name]
        config = CONFIGS[kind]
        self.weights, self.gradient = start.copy(), np.zeros_like(start)
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for segment in layout.segments:
            tensor_slice, shape = segment.range.slice, segment.spec.shape
            tensor = torch.from_numpy(self.weights[tensor_slice]).view(shape)
            tensor.grad = torch.from_numpy(self.gradient[tensor_slice]).view(shape)
            groups[segment.spec.adapted].append(tensor)
        self._all = [tensor for group in groups.values() for tensor in group]
        decays = {True: config.weight_decay, False: 0.0}
        params = [{"params": group, "weight_decay": decays[adapted]} for adapted, group in groups.items()]
        rate, more = config.learning_rate, {implementation: True}
        if kind == "adamw":
            betas = config.beta1, config.beta2
            self._rule: Any = torch.optim.AdamW(params, rate, betas, config.epsilon, **more)
        else:
            self._rule = torch.optim.SGD(params, rate, config.momentum, **more)
        self.words = 1 + 1 + 2 + 2 * (2 if kind == "adamw" else 1)

    def norm(self) -> None:
        self._torch.nn.utils.clip_grad_norm_(self._all, 1.0, foreach=True)

    def update(self) -> None:
        self._rule.step()


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Time all contenders. Raises HpcdistError if the weights differ."""
    import torch

    config = ModelConfig(layers=chosen.layers, hidden=chosen.hidden, heads=chosen.heads)
    model = models.build(config, "float32", context=chosen.context)
    store, layout = FlatStore(model.layout, model.dtype), model.layout
    model.initialise(store, 0)
    optimizers = {name: (Ours if name in CONFIGS else Theirs)(name, layout, store.array) for name in chosen.only}
    drawn, source, copy = np.random.default_rng(2), *(np.ones(layout.size, np.float32) for _ in range(2))
    gradient = np.empty(layout.size, np.float32)

    def timed_phases(contender: Ours | Theirs) -> list[float]:
        contender.gradient[...] = gradient
        calls: list[Callable[[], object]] = [lambda: np.copyto(copy, source), contender.norm, contender.update]
        return [harness.seconds(call, clock=time.process_time) for call in calls]

    def draw() -> None:
        gradient[...] = drawn.standard_normal(layout.size, np.float32)

    values = harness.alternate(
        {name: lambda contender=contender: timed_phases(contender) for name, contender in optimizers.items()},
        chosen.rounds,
        begin=draw,
    )
    check(optimizers, store.array)
    words = np.array([contender.words for contender in optimizers.values()])
    about = {"contenders": ";".join(optimizers), "phases": ";".join(PHASES), "parameters": layout.parameters}
    dims = {"time_s": "contenders, rounds, phases", "words": "contenders"}
    arrays = {"time_s": np.array(list(values.values())), "words": words}
    return Results(arrays, dims, about | {"torch": str(torch.__version__)})


def check(optimizers: dict[str, Any], start: np.ndarray) -> None:
    """Raise HpcdistError if PyTorch's weights differ by more than `AGREE`, relative to the change of the weights."""
    for name in [name for name in TORCH if name in optimizers and TORCH[name][0] in optimizers]:
        ours = optimizers[TORCH[name][0]].weights
        apart = np.linalg.norm(optimizers[name].weights - ours) / np.linalg.norm(ours - start)
        if not apart < AGREE:
            raise HpcdistError(f"{name} differs from hpcdist by {apart:.2e} of the weights' change; limit {AGREE}")


def ratios(results: Results) -> harness.Ratios:
    times, words = results.arrays["time_s"], results.arrays["words"]
    copies = times[:, :, 0] / 2 * words[:, None]
    return dict(zip(results.names(), times[:, :, 1:].sum(axis=2) / copies, strict=True))


def lines(results: Results) -> Sequence[str]:
    rows = [["", *(f"{name} ms" for name in PHASES), "words", "x memcpy", "interval"]]
    medians = 1e3 * np.median(results.arrays["time_s"], axis=1)
    for (name, samples), phase_ms, words in zip(
        ratios(results).items(), medians, results.arrays["words"].tolist(), strict=True
    ):
        ratio, low, high = harness.interval(samples)
        rows.append(
            [name, *(f"{value:.3f}" for value in phase_ms), f"{words}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"]
        )
    return [f"{results.attributes['parameters']} parameters; CPU time", *aligned(rows)]
