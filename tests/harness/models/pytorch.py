"""PyTorch modules that tests wrap, a plain training of them, and a training of the wrapped model under any layout."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from harness.rank_run import EXCHANGES, RankRun
from hpcdist.adapters.torch.model import wrap
from hpcdist.arrays.dtypes import dtype_of
from hpcdist.comm.communicator import Communicator
from hpcdist.models.model import Model
from hpcdist.optim.config import OptimizerConfig
from hpcdist.strategies.config import ParallelConfig
from hpcdist.strategies.core.operations import looped
from hpcdist.strategies.schedule.executor import StepResult

VOCABULARY, CONTEXT, HIDDEN = 23, 6, 16
RATE, BETAS, EPSILON, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
NORMS = {"weight_decay": 0.5, "rate_factor": 2.0}  # of norm scales and their biases, a group of their own
OPTIMIZER = OptimizerConfig(
    learning_rate=RATE,
    weight_decay=DECAY,
    clip_norm=0.0,
    warmup_steps=0,
    decay="constant",
    epsilon=EPSILON,
    groups=(f"*norm*: {' '.join(f'{name}={value}' for name, value in NORMS.items())}",),
)


class Embed(nn.Module):
    """Maps tokens (samples, context) to (samples, context, hidden)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(CONTEXT, HIDDEN) * 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    """A block of a transformer, with a mask as a buffer."""

    def __init__(self, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.projection = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(dropout)
        )
        self.heads = heads
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, context, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(samples, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, attn_mask=self.mask)
        x = x + self.projection(mixed.transpose(1, 2).reshape(samples, context, hidden))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """The last norm, and logits by a matrix that may be shared with the embedding."""

    def __init__(self, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.logits = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied is not None:
            self.logits.weight = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


def gpt(seed: int, *, blocks: int = 2, tied: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Return a small language model whose children are the stages."""
    torch.manual_seed(seed)
    embed = Embed()
    return nn.Sequential(
        embed, *(Block(dropout=dropout) for _ in range(blocks)), Head(embed.tokens.weight if tied else None)
    )


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all tokens."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def tokens(rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = rng.integers(0, VOCABULARY, (samples, CONTEXT + 1)).astype(np.uint16)
    return drawn[:, :-1], drawn[:, 1:]


def wrap_model(module: Any, x: np.ndarray, **options: Any) -> Model:
    """Return the wrapped model of a language model ``module``."""
    return wrap(module, token_loss, example=x[:1], tokens_per_sample=CONTEXT, **options)


def train_plain(module: nn.Module, batches: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """Train ``module`` as a plain PyTorch script does. Return the losses."""
    norms = [parameter for name, parameter in module.named_parameters() if "norm" in name]
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [p for name, p in module.named_parameters() if p.dim() < 2 and "norm" not in name]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
        {"params": norms, "weight_decay": NORMS["weight_decay"], "lr": RATE * NORMS["rate_factor"]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON)
    losses = []
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(module(torch.from_numpy(x.astype(np.int64))), torch.from_numpy(y.astype(np.int64)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a training over ranks."""

    strategy: str = "allreduce"
    pipeline: int = 1
    microbatches: int = 1
    schedule: str = "auto"
    chunks: int = 1
    recompute: bool = False
    working: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Training(RankRun):
    """A wrapped model under a layout. Building one is collective over ``comm``."""

    def __init__(self, comm: Communicator, model: Model, layout: Layout, seed: int = 0) -> None:
        has_norms = any("norm" in segment.key for segment in model.layout.segments)
        parallel = ParallelConfig(
            strategy=layout.strategy,
            pipeline=layout.pipeline,
            schedule=layout.schedule,
            microbatches=layout.microbatches,
            chunks=layout.chunks,
            recompute=layout.recompute,
        )
        super().__init__(
            comm,
            EXCHANGES[layout.strategy],
            model=model,
            parallel=parallel,
            optimizer=OPTIMIZER if has_norms else replace(OPTIMIZER, groups=()),
            seed=seed,
            total_steps=100,
            algorithm="native",
            working=None if layout.working is None else dtype_of(layout.working),
            placement=_placement(model, layout),
        )

    def mine(self, values: np.ndarray) -> np.ndarray:
        """Return this replica's share of a batch."""
        return np.concatenate(self.share(values))

    def advance(self, x: np.ndarray, y: np.ndarray) -> StepResult:
        """Make a step on a batch that all ranks hold. Collective."""
        first = sum(len(part) for part in np.array_split(x, self.context.data.size)[: self.context.data.rank])
        self.number += 1
        parts = [*zip(self.share(x), self.share(y), strict=True)]
        return self.executor.run(self.operations, parts, len(x), self.number, np.zeros(0), first_sample=first)

    def parameters(self) -> dict[str, np.ndarray]:
        """Return all whole parameters by name, from the pieces that the ranks would save. Collective."""
        shapes = {segment.key: segment.spec.shape for segment in self.model.layout.segments}
        return {
            tensor: values.reshape(shapes[tensor])
            for (kind, tensor), values in self.state().items()
            if kind == "parameters"
        }


def _placement(model: Model, layout: Layout) -> Any:
    count, parts = len(model.stages), layout.pipeline * layout.chunks
    if parts == 1:
        return None
    bounds = [count * part // parts for part in range(parts + 1)]
    chunks = [range(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
    return looped(chunks, layout.pipeline)


def compare(
    training: Training,
    build: Callable[[], nn.Sequential],
    batches: list[tuple[np.ndarray, np.ndarray]],
    tolerance: float,
) -> None:
    """Train, and compare losses and parameters with a plain training of the module that ``build`` returns.

    Collective.
    """
    twin = build()
    expected = train_plain(twin, batches)
    np.testing.assert_allclose([training.advance(x, y).loss for x, y in batches], expected, rtol=tolerance)
    state, theirs = training.parameters(), dict(twin.named_parameters())
    assert {key.split(".", 1)[1] for key in state} == set(theirs)
    norm = math.sqrt(sum(float((value.detach().double() ** 2).sum()) for value in theirs.values()))
    squared = 0.0
    for key, values in state.items():
        squared += float(((values - theirs[key.split(".", 1)[1]].detach().numpy()) ** 2).sum())
    assert math.sqrt(squared) <= tolerance * norm, f"{math.sqrt(squared) / norm:.1e} of the norm of the model"
