"""Layout of a training over devices: parallel degrees, sharding, micro-batches and schedule."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from hpcdist.constants import HALVES, PRECISIONS
from hpcdist.planner.kernels import KERNELS, Kernels
from hpcdist.reporting.nearest import nearest
from hpcdist.strategies.schedule.registry import SCHEDULES

PARAMETER_SERVER = "parameter_server"  # the only strategy with servers
STRATEGIES = ("allreduce", "zero1", "zero2", "zero3", PARAMETER_SERVER)
RECOMPUTE = ("none", "selective", "full")
OBJECTIVES = ("time", "energy", "cost", "energy-delay")  # of a search
IMPLEMENTATIONS = tuple(KERNELS)
COMPRESSIONS = ("none", "bfloat16", "int8", "int4", "topk", "powersgd", "onebit")
ALGORITHMS = ("auto", "ring", "tree", "hierarchical")
LIBRARIES = ("", "mpi", "nccl")
_DEGREES = ("data", "pipeline", "tensor", "context", "expert", "microbatch", "chunks")
_COUNTS = ("servers", "optimizer_slots")
_SHARES = ("overlap", "tensor_overlap")
_CHOICES = {
    "strategy": STRATEGIES,
    "recompute": RECOMPUTE,
    "precision": PRECISIONS,
    "implementation": IMPLEMENTATIONS,
    "compression": COMPRESSIONS,
    "algorithm": ALGORITHMS,
    "schedule": tuple(SCHEDULES),
    "main_gradients": ("float32", "working"),
    "activations": ("float32", "working"),
    "library": LIBRARIES,
}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Parallel sizes, pipeline schedule and precision of a training, and name of the training program."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1  # consecutive ranks, on the data and context axes, that shard the experts
    strategy: str = "allreduce"
    servers: int = 0  # dedicated parameter servers, in addition to all other devices
    microbatch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"  # "none", "selective" (attention only, arXiv:2205.05198) or "full" (whole blocks)
    sequence_parallel: bool = False
    precision: str = "bfloat16"
    main_gradients: str = "float32"  # for Megatron: "float32", or "working" for the working precision
    activations: str = "working"  # "working" precision, or "float32" as in hpcdist on CPUs
    optimizer_slots: int = 2  # state values per parameter
    compression: str = "none"
    algorithm: str = "auto"  # of collectives on the data axis
    implementation: str = "hpcdist"  # training program, one of `IMPLEMENTATIONS`
    library: str = ""  # "mpi", "nccl", or "" for the program's usual library
    overlap: float = 1.0  # fraction of data-axis messages that may overlap computation
    tensor_overlap: float = 0.0  # fraction of backward tensor-axis messages that may overlap computation
    gradient_fusion: bool = True  # for Megatron: matrix products add weight gradients to accumulated gradients

    def but(self, **changed: Any) -> "ParallelLayout":
        """Return a copy of the layout with the keyword arguments as new values of fields."""
        layout = object.__new__(ParallelLayout)  # faster than `dataclasses.replace`
        layout.__dict__.update(self.__dict__, **changed)
        if len(layout.__dict__) > len(self.__dict__):
            raise TypeError(
                f"ParallelLayout has no field {', '.join(changed.keys() - self.__dict__.keys())}; its fields are "
                f"{', '.join(self.__dict__)}"
            )
        return layout

    @property
    def kernels(self) -> Kernels:
        """The `Kernels` object, with assumptions about the training program ``implementation``."""
        return KERNELS[self.implementation]

    @property
    def channels(self) -> bool:
        """True if collectives use all links of a node at once. NCCL does, MPI does not."""
        return self.library == "nccl" if self.library else self.kernels.library == "nccl"

    @property
    def computes_in(self) -> str:
        """Data type of activations, of activation gradients, and of matrix products."""
        return "float32" if self.activations == "float32" and self.precision in HALVES else self.precision

    @property
    def devices(self) -> int:
        """Number of devices: data * pipeline * tensor * context + servers."""
        return self.data * self.pipeline * self.tensor * self.context + self.servers

    @property
    def options(self) -> list[str]:
        """List of texts that name the options that are in use, such as "full recomputation"."""
        words = {
            f"experts / {self.expert}": self.expert > 1,
            f"{self.recompute} recomputation": self.recompute != "none",
            "sequence parallel": self.sequence_parallel,
            f"gradients as {self.compression}": self.compression != "none",
        }
        return [text for text, is_so in words.items() if is_so]

    def invalid_fields(self) -> Iterator[str]:
        """Yield an error message for each field with an invalid value."""
        for names, least in ((_DEGREES, 1), (_COUNTS, 0)):
            for name in names:
                if (value := getattr(self, name)) < least:
                    yield f"{name} = {value}; it must be at least {least}"
        for name in _SHARES:
            if not 0.0 <= (value := getattr(self, name)) <= 1.0:
                yield f"{name} = {value}; it is a share and must be from 0 to 1"
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                near = nearest(str(value), choices)
                hint = f"did you mean {near!r}? " if near else ""
                accepted = ", ".join(choice or repr(choice) for choice in choices)
                yield f"{name} = {value!r}; {hint}choose one of {accepted}"

    def microbatches(self, global_batch: int) -> int:
        """Return the number of micro-batches per replica in a step. The last micro-batch may be smaller."""
        return -(-global_batch // (self.data * self.microbatch))


@lru_cache(maxsize=65536)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of ``number``, including 1 and ``number``, in ascending order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


# Option of `hpcdist plan` -> recipe key that it sets. --context is an option of the model.
OPTION_KEYS = {
    "data": "parallel.data",
    "pipeline": "parallel.pipeline",
    "tensor": "parallel.tensor",
    "context_ranks": "parallel.context",
    "expert_ranks": "parallel.expert",
    "strategy": "parallel.strategy",
    "zero": "parallel.strategy",
    "schedule": "parallel.schedule",
    "chunks": "parallel.chunks",
    "sequence_parallel": "parallel.sequence_parallel",
    "precision": "precision.mode",
    "activations": "precision.activations",
    "compression": "communication.compression",
    "algorithm": "communication.algorithm",
    "batch": "run.global_batch",
    "steps": "run.steps",
}
_RENAMED = {"context": "context_ranks", "expert": "expert_ranks"}
# Option of `hpcdist plan` -> field of the layout. --zero sets the strategy.
LAYOUT_FIELDS = {_RENAMED.get(item.name, item.name): item.name for item in fields(ParallelLayout)} | {"zero": "zero"}
# Options of the layout that no recipe key sets. The names of the options and of the fields are equal.
PLANNER_OPTIONS = tuple(name for name in LAYOUT_FIELDS if name not in OPTION_KEYS)
# Field of the layout -> setting of a search (`SearchSpec`) that lists the values to try.
SEARCH_SETTINGS = {
    "pipeline": "pipelines",
    "tensor": "tensors",
    "context": "contexts",
    "expert": "experts",
    "strategy": "strategies",
    "microbatch": "microbatches",
    "schedule": "schedules",
    "chunks": "chunks",
    "recompute": "recompute",
    "sequence_parallel": "sequence_parallel",
    "compression": "compressions",
}
