"""What a clipped update of a GPT's parameters costs on one core, beside PyTorch's optimizers and a memcpy.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py
    OMP_NUM_THREADS=1 python benchmarks/optimizers.py --layers 12 --hidden 768 -o optimizers.h5 --plot optimizers.png

Each contender has its own parameters, all with the same values, and in each round its turn, in an order that is drawn
anew: the norm of its gradient, then the update, clipped. Right before each turn an array as long is copied. An update
has words to move: n for the norm, and to read the gradient, to read and write the weights and each slot; the copy moves
2 n of them. Medians are printed, and the ratio of norm and update to copies of as many words: below 1 where several
arrays at once go faster than one. Times are CPU seconds, of one thread. The weights of both libraries are compared
after the last round. Needs the extra `reference`; all goes to the HDF5 file.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from hpcdist import models
from hpcdist.arrays.layout import Layout
from hpcdist.arrays.ranges import Range
from hpcdist.arrays.store import FlatStore
from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files
from hpcdist.models.config import ModelConfig
from hpcdist.optim import norms, optimizer
from hpcdist.optim.config import OptimizerConfig
from hpcdist.telemetry.provenance import provenance

SCHEMA, VERSION = "hpcdist.benchmark.optimizers", 1
PHASES = ("memcpy", "norm", "update")
STEPS = 10_000  # of the schedule, which is constant
COMMON = dict(learning_rate=1e-3, warmup_steps=0, decay="constant", clip_norm=1.0)
CONFIGS = {
    "adamw": OptimizerConfig(name="adamw", beta1=0.9, beta2=0.95, weight_decay=0.1, **COMMON),
    "sgd": OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.1, **COMMON),
    "lamb": OptimizerConfig(name="lamb", weight_decay=0.1, **COMMON),
    "lars": OptimizerConfig(name="lars", momentum=0.9, weight_decay=0.1, **COMMON),
}
# PyTorch's, and what it is compared with
TORCH = {"PyTorch adamw": ("adamw", "fused"), "PyTorch adamw, foreach": ("adamw", "foreach"),
         "PyTorch sgd": ("sgd", "fused"), "PyTorch sgd, foreach": ("sgd", "foreach")}  # fmt: skip
AGREE = 1e-4  # norm of the difference of the weights over that of what has moved, in float32


class Contender(Protocol):
    """One optimizer over parameters of its own."""

    words: int  # of memory that a parameter's norm and update have to move

    def load(self, values: np.ndarray) -> None:
        """Take ``values`` (elements,), of the flat space, for the gradient."""

    def norm(self) -> None:
        """Compute the norm of the gradient, and what clips it."""

    def update(self) -> None:
        """Step."""

    def weights(self) -> np.ndarray:
        """Return the weights (elements,), padding included."""


class Ours:
    """An optimizer of this library, as an owner calls it."""

    def __init__(self, name: str, layout: Layout, start: np.ndarray) -> None:
        self._whole, self._dtype = Range(0, layout.size), np.dtype(np.float32)
        self._rule = optimizer.build(CONFIGS[name], layout, self._whole, self._dtype, total_steps=STEPS)
        self._master, self._gradient = FlatStore(layout, self._dtype), FlatStore(layout, self._dtype)
        self._master.array[...] = start
        # Layer-wise, the direction is written and read again, and so are the weights read.
        slots = 2 * len(self._rule.slots)
        self.words = 1 + 1 + 2 + slots + (3 if self._rule.needs_norms else 0)

    def load(self, values: np.ndarray) -> None:
        """Take ``values`` for the gradient."""
        self._gradient.array[...] = values

    def norm(self) -> None:
        """Compute the norm of the gradient."""
        self._scale = norms.clip_scale(norms.sum_of_squares(self._gradient), 1.0)

    def update(self) -> None:
        """Step, with the norms of tensors where the rule needs them."""
        rule = self._rule
        rule.begin_step()
        rule.direction(self._whole, self._master, self._gradient, self._scale)
        norms = rule.partial_norms() if rule.needs_norms else None
        rule.apply(self._whole, self._master, self._gradient, None, norms)

    def weights(self) -> np.ndarray:
        """Return the weights."""
        return self._master.array


class Theirs:
    """An optimizer of PyTorch over views of two flat arrays, with its own clipping."""

    def __init__(self, name: str, layout: Layout, start: np.ndarray) -> None:
        of, how = TORCH[name]
        config = CONFIGS[of]
        self._flat, self._gradient = start.copy(), np.zeros_like(start)
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for segment in layout.segments:
            where, shape = segment.range.slice, segment.spec.shape
            tensor = torch.from_numpy(self._flat[where]).view(shape)
            tensor.grad = torch.from_numpy(self._gradient[where]).view(shape)
            groups[segment.spec.adapted].append(tensor)
        self._all = [tensor for group in groups.values() for tensor in group]
        decays = {True: config.weight_decay, False: 0.0}
        params = [{"params": group, "weight_decay": decays[adapted]} for adapted, group in groups.items()]
        rate, options = config.learning_rate, {how: True}
        if of == "adamw":
            betas = config.beta1, config.beta2
            self._rule: torch.optim.Optimizer = torch.optim.AdamW(params, rate, betas, config.epsilon, **options)
        else:
            self._rule = torch.optim.SGD(params, rate, config.momentum, **options)
        self.words = 1 + 1 + 2 + 2 * (2 if of == "adamw" else 1)

    def load(self, values: np.ndarray) -> None:
        """Take ``values`` for the gradient."""
        self._gradient[...] = values

    def norm(self) -> None:
        """Compute the norm of the gradient, and scale it."""
        torch.nn.utils.clip_grad_norm_(self._all, 1.0, foreach=True)

    def update(self) -> None:
        """Step."""
        self._rule.step()

    def weights(self) -> np.ndarray:
        """Return the weights."""
        return self._flat


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(contenders: dict[str, Contender], size: int, rounds: int) -> np.ndarray:
    """Return CPU seconds (contenders, rounds, phases)."""
    order, drawn = np.random.default_rng(1), np.random.default_rng(2)
    source, copy = np.ones(size, np.float32), np.ones(size, np.float32)
    names, times = list(contenders), np.zeros((len(contenders), rounds, len(PHASES)))
    for turn in range(-2, rounds):  # two rounds to compile and to touch all memory
        gradient = drawn.standard_normal(size, np.float32)
        for place in order.permutation(len(names)):
            contender = contenders[names[place]]
            contender.load(gradient)
            found = [_seconds(lambda: np.copyto(copy, source)), _seconds(contender.norm), _seconds(contender.update)]
            if turn >= 0:
                times[place, turn] = found
    return times


def check(contenders: dict[str, Contender], start: np.ndarray) -> dict[str, float]:
    """Return how far PyTorch's weights are from ours, over how far ours moved. Raises HpcdistError beyond `AGREE`."""
    found = {}
    for name in set(contenders) & set(TORCH):
        ours = contenders[TORCH[name][0]].weights() if TORCH[name][0] in contenders else None
        if ours is None:
            continue
        apart = np.linalg.norm(contenders[name].weights() - ours) / np.linalg.norm(ours - start)
        found[name] = float(apart)
        if not apart < AGREE:
            raise HpcdistError(f"{name} is {apart:.2e} of the way from ours; they are to agree to {AGREE}")
    return found


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 4, "hidden": 256, "heads": 4, "context": 256, "rounds": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"(default {value})")
    every = [*CONFIGS, *TORCH]
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="those to measure")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    chosen = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # it has been read by now
        parser.error("set OMP_NUM_THREADS=1: one thread each is compared")
    return chosen


def plot(path: Path, names: list[str], medians: np.ndarray, copies: np.ndarray) -> None:
    """Draw the milliseconds of norm and update, and copies of as many words."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(names) + 1.2), layout="constrained")
    places = np.arange(len(names))[::-1]
    axes.barh(places, 1e3 * medians[:, 1], label="norm")
    axes.barh(places, 1e3 * medians[:, 2], left=1e3 * medians[:, 1], label="update")
    axes.plot(1e3 * copies, places, "k|", markersize=18, label="memcpy of as many words")
    axes.set_yticks(places, names)
    axes.set_xlabel("ms, one thread (median)")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, compare, print and save."""
    options = arguments()
    if options.output is not None:
        files.check_place(options.output)
    torch.set_num_threads(1)
    config = ModelConfig(layers=options.layers, hidden=options.hidden, heads=options.heads)
    model = models.build(config, "float32", context=options.context)
    store, layout = FlatStore(model.layout, model.dtype), model.layout
    model.initialise(store, 0)
    contenders: dict[str, Contender] = {
        name: (Ours if name in CONFIGS else Theirs)(name, layout, store.array) for name in options.only
    }
    times = measure(contenders, layout.size, options.rounds)
    apart = check(contenders, store.array)
    words = np.array([contender.words for contender in contenders.values()])
    copies = times[:, :, 0] / 2 * words[:, None]  # of as many words
    ratios = np.median(times[:, :, 1:].sum(axis=2) / copies, axis=1)
    medians = np.median(times, axis=1)
    print(f"{layout.parameters} parameters, {options.rounds} rounds; medians of CPU milliseconds")
    print(f"{'':24}" + "".join(f"{name:>9}" for name in PHASES) + f"{'words':>7}{'over memcpy':>12}{'apart':>10}")
    for name, own, moved, ratio in zip(contenders, medians, words, ratios, strict=True):
        far = f"{apart[name]:10.1e}" if name in apart else ""
        print(f"{name:24}" + "".join(f"{1e3 * value:9.3f}" for value in own) + f"{moved:7d}{ratio:12.2f}{far}")
    if options.plot is not None:
        plot(options.plot, list(contenders), medians, np.median(copies, axis=1))
    if options.output is not None:
        files.write_contiguous(
            options.output,
            {"time_s": times, "words": words},
            {
                **provenance(anonymous=options.anonymous),
                "contenders": ";".join(contenders),
                "phases": ";".join(PHASES),
                "parameters": layout.parameters,
                "torch": str(torch.__version__),
            },
            {
                "time_s": {"dims": "contenders, rounds, phases", "long_name": "CPU seconds of one thread"},
                "words": {"dims": "contenders", "long_name": "words of 4 bytes to be moved for each parameter"},
            },
            schema=SCHEMA,
            version=VERSION,
        )


if __name__ == "__main__":
    try:
        main()
    except HpcdistError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
