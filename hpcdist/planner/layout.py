"""Layout of a training over devices: parallel degrees, sharding, micro-batches and schedule.

Light: imports nothing. The tuples beside the class are the values that a field may have, and `LAYOUT_FIELDS` is how
options of `hpcdist plan`, which are keywords of `hpcdist.plan`, call the fields.
"""

from dataclasses import dataclass, fields
from typing import Any

PARAMETER_SERVER = "parameter_server"  # the strategy that servers are for
STRATEGIES = ("allreduce", "zero1", "zero2", "zero3", PARAMETER_SERVER)
RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("float32", "float64", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
IMPLEMENTATIONS = ("hpcdist", "megatron")
COMPRESSIONS = ("none", "bfloat16", "int8", "int4", "topk", "powersgd", "onebit")
ALGORITHMS = ("auto", "ring", "tree", "hierarchical")
LIBRARIES = ("", "mpi", "nccl")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """One way to train on ``data x pipeline x tensor x context`` devices, and ``servers`` more.

    Ranks count as in `hpcdist.strategies.core.grid`: tensor fastest, then context, then data, then pipeline; ``expert``
    parallelism cuts experts over consecutive ranks of data x context. A micro-batch has ``microbatch`` samples;
    ``schedule`` and ``chunks`` are those of `hpcdist.strategies.schedule`. ``recompute`` "selective" computes attention
    again (arXiv:2205.05198), "full" whole blocks. ``main_gradients``, of "megatron" alone: "float32", or the "working"
    type; ``activations`` are kept and sent in the "working" type, or in "float32" as this toolkit does on processors.
    The optimizer keeps ``optimizer_slots`` numbers a parameter: 2 for Adam and LAMB, 1 for momentum.

    ``implementation`` says whose memory and kernels: "hpcdist" (`hpcdist.models.counts`: attention in tiles) or
    "megatron" (the published formulas of arXiv:2205.05198, with scores in memory); ``library`` whose collectives: "mpi"
    (one ring or tree, or a hierarchy), "nccl" (one for each link of a node), "": as the implementation. ``algorithm``
    is that of the data axis alone: an operation there that has none of the name takes the fastest, and a flag says so.
    ``overlap`` is the share of the data axis's messages that may hide behind computation; what does not fit in there
    is exposed all the same.
    ``tensor_overlap`` is the same for the tensor axis's messages of the backward, behind gradients that do not wait for
    them (arXiv:2205.05198, section 6.2): this toolkit hides none. ``gradient_fusion``: of "megatron" alone, whose
    products add gradients of weights to those of the micro-batches before, since the end of 2021.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    strategy: str = "allreduce"
    servers: int = 0
    microbatch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    precision: str = "bfloat16"
    main_gradients: str = "float32"
    activations: str = "working"
    optimizer_slots: int = 2
    compression: str = "none"
    algorithm: str = "auto"
    implementation: str = "hpcdist"
    library: str = ""
    overlap: float = 1.0
    tensor_overlap: float = 0.0
    gradient_fusion: bool = True

    def but(self, **changed: Any) -> "ParallelLayout":
        """Return this layout with other values of the fields that are ``changed`` (local).

        It is `dataclasses.replace` in a sixth of its time: a search makes a hundred thousand of them.
        """
        layout = object.__new__(ParallelLayout)
        layout.__dict__.update(self.__dict__, **changed)
        if len(layout.__dict__) > len(self.__dict__):
            raise TypeError(f"a layout has no {', '.join(changed.keys() - self.__dict__.keys())}")
        return layout

    @property
    def channels(self) -> bool:
        """Whether rings and trees go over all links of a node at once: ``library`` "nccl", or as the implementation."""
        return self.library == "nccl" if self.library else self.implementation == "megatron"

    @property
    def computes_in(self) -> str:
        """The type of activations, of their gradients, and of what products are made of."""
        return "float32" if self.activations == "float32" and self.precision in HALVES else self.precision

    @property
    def devices(self) -> int:
        """Number of devices, servers included."""
        return self.data * self.pipeline * self.tensor * self.context + self.servers

    @property
    def options(self) -> list[str]:
        """Words for all but the degrees, the strategy and the schedule."""
        words = {
            f"experts / {self.expert}": self.expert > 1,
            f"{self.recompute} recomputation": self.recompute != "none",
            "sequence parallel": self.sequence_parallel,
            f"gradients as {self.compression}": self.compression != "none",
        }
        return [text for text, is_so in words.items() if is_so]

    def microbatches(self, global_batch: int) -> int:
        """Return how many micro-batches a replica computes in a step, the last one perhaps smaller."""
        return -(-global_batch // (self.data * self.microbatch))


_RENAMED = {"context": "context_ranks", "expert": "expert_ranks"}  # --context is that of a model
# Option of the layout -> the field that it sets; --zero is the strategy.
LAYOUT_FIELDS = {_RENAMED.get(item.name, item.name): item.name for item in fields(ParallelLayout)} | {"zero": "zero"}
