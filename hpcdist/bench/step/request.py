"""Request of the benchmark of training steps: the shape of a GPT, its contenders, and the number of steps.

Imports neither NumPy nor h5py, for a quick `hpcdist bench step --list`.
"""

from dataclasses import dataclass
from typing import Final

OURS: Final = "hpcdist"
RECOMPUTING: Final = "hpcdist, recomputing"
WRAPPED_TORCH: Final = "wrapped PyTorch"
WRAPPED_JAX: Final = "wrapped JAX"
EAGER: Final = "PyTorch eager"
COMPILED: Final = "torch.compile"
CONTENDERS: Final = {  # name -> description
    OURS: "the built-in model; on several ranks with the node_shared allreduce if ranks can share memory",
    RECOMPUTING: "the built-in model with recomputation: it stores the input of each block for the backward pass",
    WRAPPED_TORCH: "the model as a PyTorch module, wrapped by hpcdist.adapters.torch.model and trained by hpcdist",
    WRAPPED_JAX: "the model as JAX functions, wrapped by hpcdist.adapters.jax.model and trained by hpcdist",
    EAGER: "the PyTorch module trained in PyTorch: fused AdamW, clipping; on several ranks with DDP over gloo",
    COMPILED: "like PyTorch eager, with torch.compile",
}
PHASES: Final = ("forward", "backward", "communication", "clipping", "update")
COMPARED: Final = 100  # number of steps whose losses must agree
SAME: Final = 1e-4  # largest relative difference of losses that agree


@dataclass(frozen=True)
class StepShape:
    """Shape of a GPT, and the number ``samples`` of samples per rank and training step."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    context: int = 256
    samples: int = 8
    vocabulary: int = 256


@dataclass(frozen=True)
class StepRequest:
    """Settings of a benchmark of training steps."""

    shape: StepShape
    names: tuple[str, ...]  # implementations to measure
    ranks: int
    steps: int  # timed steps of each implementation
    warmup: int  # untimed steps before the timed steps
    profiled: int  # further steps of built-in models, with timed operations
    seed: int = 0
    threads: int = 1

    @property
    def num_turns(self) -> int:
        """Number of warmup and timed steps of each implementation, without the profiled steps."""
        return self.steps + self.warmup
