"""Forward and backward of the GPT against PyTorch eager, one thread each, alternating in one run.

    OMP_NUM_THREADS=1 python benchmarks/model_step.py [--layers 4 --hidden 128 --heads 4 --context 128 --batch 8]

Prints one JSON line: medians in seconds, tokens/s and the ratio of speeds (above 1: hpcdist is faster), after the
losses of both were compared. Needs the extra `reference`.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hpcdist import models
from hpcdist.arrays.store import FlatStore
from hpcdist.models.config import ModelConfig
from hpcdist.models.model import Model
from hpcdist.models.runtime.arena import Arena


class Block(nn.Module):
    """The block as one writes it in PyTorch."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, context, hidden)."""
        batch, context, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, context, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Reference(nn.Module):
    """The same GPT, with parameters in the order of the layout."""

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(context, config.hidden)
        self.blocks = nn.ModuleList(Block(config.hidden, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, context, vocabulary)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def load(self, model: Model, store: FlatStore) -> None:
        """Copy the parameters of ``store``."""
        names = {"scale": "weight"}
        shapes, state = {key: value.shape for key, value in self.state_dict().items()}, {}
        for segment in model.layout.segments:
            module, name = segment.spec.name.rsplit(".", 1)
            place = f"blocks.{segment.spec.layer - 1}." if 0 < segment.spec.layer < len(model.stages) - 1 else ""
            key = f"{place}{module}.{names.get(name, name)}"
            # Query, key and value are one matrix there.
            state[key] = torch.tensor(store.view(segment.key)).reshape(shapes[key])
        self.load_state_dict(state)


def ours(model: Model, store: FlatStore, x: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """Return a function that does forward and backward and returns the mean loss."""
    parameters, gradients = model.bind(store), model.bind_gradients(FlatStore(model.layout, model.dtype))
    arena = Arena()

    def step() -> float:
        for stage in gradients:
            stage.begin_step()
        logits = model.forward(parameters, x, arena)
        saved = arena.saved(model.stages[-1].layer)
        loss = model.loss.forward(logits, targets, model.operations, saved) / targets.size
        model.backward(parameters, gradients, 1 / targets.size, arena)
        return loss

    return step


def theirs(reference: Reference, x: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """The same in PyTorch."""
    wide_x, wide_targets = (torch.tensor(array.astype(np.int64)) for array in (x, targets))

    def step() -> float:
        reference.zero_grad(set_to_none=True)
        logits = reference(wide_x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wide_targets.flatten())
        loss.backward()
        return float(loss.detach())

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "context": 128, "batch": 8, "steps": 40}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # numpy's BLAS has read it by now
        parser.error("set OMP_NUM_THREADS=1: one thread each is compared")
    torch.set_num_threads(1)
    config = ModelConfig(layers=chosen.layers, hidden=chosen.hidden, heads=chosen.heads)
    model = models.build(config, "float32", context=chosen.context)
    store = FlatStore(model.layout, model.dtype)
    model.initialise(store, 0)
    reference = Reference(config, chosen.context)
    reference.load(model, store)
    tokens = (
        np.random.default_rng(0).integers(0, config.vocabulary, (chosen.batch, chosen.context + 1)).astype(np.uint8)
    )
    steps = {
        "hpcdist": ours(model, store, tokens[:, :-1], tokens[:, 1:]),
        "pytorch": theirs(reference, tokens[:, :-1], tokens[:, 1:]),
    }
    losses = [step() for step in steps.values() for _ in range(3)]  # warm, compiled
    assert max(losses) - min(losses) < 1e-5 * losses[0], f"the losses differ: {losses}"
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(chosen.steps):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    count = chosen.batch * chosen.context
    print(
        json.dumps(
            vars(chosen)
            | {
                **{f"{name}_s": round(value, 6) for name, value in medians.items()},
                **{f"{name}_tokens_per_s": round(count / value) for name, value in medians.items()},
                "ratio": round(medians["pytorch"] / medians["hpcdist"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
