"""Clipped updates of a GPT's parameters on one core, beside PyTorch's optimizers and a memcpy.

    python -m benchmarks optimizers
    python -m benchmarks optimizers --layers 12 --hidden 768 -o optimizers.h5

Each contender has its own parameters, all with the same values, and in each round its turn: the norm of its gradient,
then the update, clipped. Right before each turn an array as long is copied. An update has words to move: n for the
norm, and to read the gradient, to read and write the weights and each slot; the copy moves 2 n of them. Told is norm
and update over copies of as many words: below 1 where several arrays at once go faster than one. Times are CPU seconds,
of one thread. The weights of both libraries are compared after the last round. Needs the extra `reference`.
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
# PyTorch's, and what it is compared with
TORCH: Final = {"PyTorch adamw": ("adamw", "fused"), "PyTorch adamw, foreach": ("adamw", "foreach"),
                "PyTorch sgd": ("sgd", "fused"), "PyTorch sgd, foreach": ("sgd", "foreach")}  # fmt: skip
AGREE: Final = 1e-4  # norm of the difference of the weights over that of what has moved, in float32
OPTIONS: Final = {"layers": 4, "hidden": 256, "heads": 4, "context": 256, "rounds": 30, "only": (*CONFIGS, *TORCH)}


class Ours:
    """An optimizer of this library over parameters of its own; ``words`` are what norm and update move of each."""

    def __init__(self, name: str, layout: Layout, start: np.ndarray) -> None:
        self._whole, dtype = Range(0, layout.size), np.dtype(np.float32)
        self._rule = optimizer.build(CONFIGS[name], layout, self._whole, dtype, total_steps=STEPS)
        self._master, self._gradient = FlatStore(layout, dtype), FlatStore(layout, dtype)
        self.weights, self.gradient = self._master.array, self._gradient.array
        self.weights[...] = start
        # Layer-wise, the direction is written and read again, and so are the weights read.
        self.words = 1 + 1 + 2 + 2 * len(self._rule.slots) + (3 if self._rule.needs_norms else 0)

    def norm(self) -> None:
        """Compute the norm of the gradient, and what clips it."""
        self._scale = norms.clip_scale(norms.sum_of_squares(self._gradient), 1.0)

    def update(self) -> None:
        """Step, with the norms of tensors where the rule needs them."""
        rule = self._rule
        rule.begin_step()
        rule.direction(self._whole, self._master, self._gradient, self._scale)
        of_tensors = rule.partial_norms() if rule.needs_norms else None
        rule.apply(self._whole, self._master, self._gradient, None, of_tensors)


class Theirs:
    """An optimizer of PyTorch over views of two flat arrays, with its own clipping."""

    def __init__(self, name: str, layout: Layout, start: np.ndarray) -> None:
        import torch

        self._torch = torch
        torch.set_num_threads(1)
        kind, implementation = TORCH[name]
        config = CONFIGS[kind]
        self.weights, self.gradient = start.copy(), np.zeros_like(start)
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for segment in layout.segments:
            place, shape = segment.range.slice, segment.spec.shape
            tensor = torch.from_numpy(self.weights[place]).view(shape)
            tensor.grad = torch.from_numpy(self.gradient[place]).view(shape)
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
        """Compute the norm of the gradient, and scale it."""
        self._torch.nn.utils.clip_grad_norm_(self._all, 1.0, foreach=True)

    def update(self) -> None:
        """Step."""
        self._rule.step()


def measure(chosen: argparse.Namespace, session: Session) -> Results:
    """Return the times of all contenders. Raises HpcdistError where weights are not the same."""
    import torch

    config = ModelConfig(layers=chosen.layers, hidden=chosen.hidden, heads=chosen.heads)
    model = models.build(config, "float32", context=chosen.context)
    store, layout = FlatStore(model.layout, model.dtype), model.layout
    model.initialise(store, 0)
    made = {name: (Ours if name in CONFIGS else Theirs)(name, layout, store.array) for name in chosen.only}
    drawn, source, copy = np.random.default_rng(2), *(np.ones(layout.size, np.float32) for _ in range(2))
    gradient = np.empty(layout.size, np.float32)

    def turn(contender: Ours | Theirs) -> list[float]:
        contender.gradient[...] = gradient
        calls: list[Callable[[], object]] = [lambda: np.copyto(copy, source), contender.norm, contender.update]
        return [harness.seconds(call, clock=time.process_time) for call in calls]

    def draw() -> None:
        gradient[...] = drawn.standard_normal(layout.size, np.float32)

    values = harness.alternate(
        {name: lambda contender=contender: turn(contender) for name, contender in made.items()},
        chosen.rounds,
        begin=draw,
    )
    check(made, store.array)
    words = np.array([contender.words for contender in made.values()])
    about = {"contenders": ";".join(made), "phases": ";".join(PHASES), "parameters": layout.parameters}
    dims = {"time_s": "contenders, rounds, phases", "words": "contenders"}
    arrays = {"time_s": np.array(list(values.values())), "words": words}
    return Results(arrays, dims, about | {"torch": str(torch.__version__)})


def check(made: dict[str, Any], start: np.ndarray) -> None:
    """Raise HpcdistError where PyTorch's weights are further from ours than `AGREE` of how far ours moved."""
    for name in [name for name in TORCH if name in made and TORCH[name][0] in made]:
        ours = made[TORCH[name][0]].weights
        apart = np.linalg.norm(made[name].weights - ours) / np.linalg.norm(ours - start)
        if not apart < AGREE:
            raise HpcdistError(f"{name} is {apart:.2e} of the way from ours; they are to agree to {AGREE}")


def ratios(results: Results) -> harness.Ratios:
    """Return norm and update over copies of as many words, in the same turn."""
    times, words = results.arrays["time_s"], results.arrays["words"]
    copies = times[:, :, 0] / 2 * words[:, None]
    return dict(zip(results.names(), times[:, :, 1:].sum(axis=2) / copies, strict=True))


def lines(results: Results) -> Sequence[str]:
    rows = [["", *(f"{name} ms" for name in PHASES), "words", "x memcpy", "interval"]]
    medians = 1e3 * np.median(results.arrays["time_s"], axis=1)
    for (name, samples), own, words in zip(
        ratios(results).items(), medians, results.arrays["words"].tolist(), strict=True
    ):
        ratio, low, high = harness.interval(samples)
        rows.append([name, *(f"{value:.3f}" for value in own), f"{words}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"])
    return [f"{results.attributes['parameters']} parameters; CPU time", *aligned(rows)]
