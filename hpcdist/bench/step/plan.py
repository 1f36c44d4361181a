"""Plan of a benchmark of training steps: the gpt, its data, its contenders, and the sample of one step. Light."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hpcdist.errors import UsageError


@dataclass(frozen=True)
class StepSample:
    """A step on one rank, from a barrier to its end.

    ``loss`` is the mean over the tokens of the whole batch, or of this rank's (``own_loss``). ``phases`` has seconds by
    the names of `hpcdist.bench.step.plan.PHASES`; what is missing was not told apart.
    """

    loss: float
    own_loss: bool
    step_s: float
    cpu_s: float
    phases: Mapping[str, float]


# name -> what it is
OURS: Final = "hpcdist"
RECOMPUTING: Final = "hpcdist, recomputing"
WRAPPED_TORCH: Final = "wrapped PyTorch"
WRAPPED_JAX: Final = "wrapped JAX"
EAGER: Final = "PyTorch eager"
COMPILED: Final = "torch.compile"
CONTENDERS: Final = {
    OURS: "the built-in model; several ranks reduce gradients by the algorithm that shares memory, where they can",
    RECOMPUTING: "the same, which keeps the input of a block and computes the rest of it again in backward",
    WRAPPED_TORCH: "the PyTorch model through hpcdist.adapters.torch.model, trained as the built-in one",
    WRAPPED_JAX: "the same model as functions of JAX, through hpcdist.adapters.jax.model",
    EAGER: "the PyTorch model as one trains it in PyTorch: AdamW (fused), clipping; several ranks by DDP over gloo",
    COMPILED: "the same behind torch.compile",
}
PHASES: Final = ("forward", "backward", "communication", "clipping", "update")
COMPARED: Final = 100  # steps over which losses have to agree
SAME: Final = 1e-4  # relative
CHOICES: Final = 4  # of successors of each token: a text that can be learnt


@dataclass(frozen=True)
class StepShape:
    """A gpt, and the samples of each rank in a step."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    context: int = 256
    samples: int = 8
    vocabulary: int = 256


@dataclass(frozen=True)
class StepRequest:
    """What the caller asks for; ``steps`` are timed, after ``warmup`` that are only compared."""

    shape: StepShape
    names: tuple[str, ...]
    ranks: int
    steps: int
    warmup: int
    profiled: int
    seed: int = 0
    threads: int = 1

    @property
    def every(self) -> int:
        """Steps of a contender that are not profiled."""
        return self.steps + self.warmup


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return the contenders of these names, all for none. Raises UsageError."""
    for name in names:
        if name not in CONTENDERS:
            raise UsageError(f"--only {name!r} is unknown; choose from {', '.join(map(repr, CONTENDERS))}")
    return tuple(name for name in CONTENDERS if not names or name in names)


def token_type(shape: StepShape) -> "np.dtype[Any]":
    """Return the smallest integers that all tokens fit in."""
    return np.min_scalar_type(shape.vocabulary - 1)


def batches(wanted: StepRequest, steps: int) -> Iterator[np.ndarray]:
    """Yield the tokens (ranks samples, context + 1) of so many steps: the same on every rank.

    Each token is followed by one of `CHOICES` others, so that losses fall as they do in a training.
    """
    shape = wanted.shape
    draw = np.random.default_rng([wanted.seed, 1])
    successors: np.ndarray = draw.integers(0, shape.vocabulary, (shape.vocabulary, CHOICES))
    samples = wanted.ranks * shape.samples
    for _ in range(steps):
        tokens = np.empty((samples, shape.context + 1), token_type(shape))
        tokens[:, 0] = draw.integers(0, shape.vocabulary, samples)
        taken: np.ndarray = draw.integers(0, CHOICES, (samples, shape.context + 1))
        for place in range(1, shape.context + 1):
            tokens[:, place] = successors[tokens[:, place - 1], taken[:, place]]
        yield tokens
