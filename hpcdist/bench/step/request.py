"""Request of a benchmark of training steps: a gpt, the contenders that train it, and how long.

Light: no array, no file, so that `hpcdist bench step --list` loads none.
"""

from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True)
class StepShape:
    """Shape of a gpt, and the samples of each rank in a step."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    context: int = 256
    samples: int = 8
    vocabulary: int = 256


@dataclass(frozen=True)
class StepRequest:
    """Request of the caller; ``steps`` are timed, after ``warmup`` that are only compared."""

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
