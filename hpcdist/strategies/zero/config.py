"""The ``[zero]`` section of a recipe: sharding degrees, what stays whole, prefetch and offload.

Light: imports nothing but the errors. `STAGES` has the stage (1, 2 or 3) of each strategy by its name.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError

STAGES: Final = {"zero1": 1, "zero2": 2, "zero3": 3}  # strategy -> stage
_ONLY: Final = {  # keys that not all stages know -> those that do
    "persistent_below": "zero3",
    "prefetch": "zero3",
    "offload_parameters": "zero3",
    "keep_parameters": "zero3",
    "keep_gradients": "zero2 or zero3",
    "shared_parameters": "zero1 or zero2",
}
PLACES: Final = ("none", "host", "file")  # where states may be offloaded to


@dataclass(frozen=True)
class ShardingDegrees:
    """Number of data ranks over which parameters, gradients and optimizer state are cut; each divides the next."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Section ``[zero]``: sharding degrees, and what is not cut.

    ``parameters``, ``gradients`` and ``optimizer`` are sharding degrees; 0 is what the stage says: (1, 1, p) in zero1,
    (1, p, p) in zero2, (p, p, p) in zero3, on p data ranks. Each must divide the next, and the last p. Groups are
    blocks of consecutive data ranks: the number of ranks of a node as ``parameters`` keeps the gathers of zero3 inside
    the nodes. A unit (layer) of fewer than ``persistent_below`` elements stays gathered where others are cut; its
    optimizer state is cut all the same. With ``shared_parameters`` the ranks of a node keep one copy of the parameters
    in memory that they share, and nothing is gathered inside a node (zero1 and zero2, on CPUs). With ``prefetch`` the
    next so many units are gathered while one is computed, in memory of their own (zero3, by communication.overlap).

    With several micro-batches a step, as in a pipeline, gradients that are cut are reduced after each of them, and
    parameters that are cut gathered for each use. ``keep_gradients`` adds them up whole and reduces once a step, and
    ``keep_parameters`` gathers once a step, for the memory of the whole stage.

    ``offload_optimizer`` keeps the optimizer state on the "host" of a GPU, or in a "file", and updates it block by
    block on the host; ``offload_parameters`` does so with the shards of parameters and gradients too (zero3). Files are
    made in ``offload_directory``, best on a disk of the node: each rank has its own, without a name. A relative one
    counts from the directory of the recipe, as ``data.path`` does, or else from the current directory.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    persistent_below: int = 0
    shared_parameters: bool = False
    prefetch: int = 0
    keep_gradients: bool = False
    keep_parameters: bool = False
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    offload_directory: str = ""

    def __post_init__(self) -> None:
        self._check_offload()
        for name in ("parameters", "gradients", "optimizer"):
            if getattr(self, name) < 0:
                raise ConfigurationError(
                    f"zero.{name} = {getattr(self, name)}; give a number of data ranks, or 0 for what the stage says"
                )
        if self.prefetch < 0:
            raise ConfigurationError(
                f"zero.prefetch = {self.prefetch}; give a number of units to gather ahead, or 0 for each in its turn"
            )
        if self.persistent_below < 0:
            raise ConfigurationError(
                f"zero.persistent_below = {self.persistent_below}; give a number of elements, or 0 to cut every unit"
            )
        if self.shared_parameters and (self.parameters or self.gradients or self.optimizer):
            raise ConfigurationError(
                "zero.shared_parameters = true keeps one copy of the parameters on a node, and goes with the degrees "
                "of zero1 and zero2 as they are: set zero.parameters, zero.gradients and zero.optimizer to 0"
            )

    def _check_offload(self) -> None:
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) not in PLACES:
                raise ConfigurationError(f"zero.{name} = {getattr(self, name)!r}; choose one of {', '.join(PLACES)}")
        if self.offload_parameters != "none" and self.offload_optimizer == "none":
            raise ConfigurationError(
                f"zero.offload_parameters = {self.offload_parameters!r} with zero.offload_optimizer = 'none': the "
                "optimizer state is larger, and used once a step; offload it first"
            )
        if self.offload_parameters != "none" and (self.parameters or self.gradients or self.optimizer):
            raise ConfigurationError(
                f"zero.offload_parameters = {self.offload_parameters!r} with sharding degrees of their own is not "
                "built in this version; set zero.parameters, zero.gradients and zero.optimizer to 0"
            )
        in_file = "file" in (self.offload_optimizer, self.offload_parameters)
        if in_file and not self.offload_directory:
            raise ConfigurationError(
                "zero.offload_directory = '' with a state offloaded to a file; name a directory, best on a disk of the "
                "node"
            )
        if self.offload_directory and not in_file:
            raise ConfigurationError(
                f"zero.offload_directory = {self.offload_directory!r} has no effect where nothing is offloaded to a "
                "file; remove it, or set zero.offload_optimizer = 'file'"
            )

    def _check_kept(self, strategy: str) -> None:
        cut = self.gradients > 1 if self.gradients else strategy != "zero1"
        if self.keep_gradients and not cut:
            raise ConfigurationError(
                "zero.keep_gradients = true has no effect where no gradients are cut; remove it, or choose the "
                "strategy zero2 or zero3"
            )
        for name in ("keep_gradients", "keep_parameters"):
            if getattr(self, name) and self.offload_parameters != "none":
                raise ConfigurationError(
                    f"zero.{name} = true with zero.offload_parameters = {self.offload_parameters!r}: what does not fit "
                    "would be kept in memory; set one of them to its default"
                )

    def _check_offload_beside(self, strategy: str, device: str) -> None:
        if self.offload_parameters != "none" and strategy != "zero3":
            raise ConfigurationError(
                f"zero.offload_parameters = {self.offload_parameters!r} with parallel.strategy = {strategy!r}, which "
                "keeps the parameters whole in memory; choose zero3, or set it to 'none'"
            )
        if self.offload_parameters != "none" and self.persistent_below:
            raise ConfigurationError(
                f"zero.offload_parameters = {self.offload_parameters!r} with zero.persistent_below = "
                f"{self.persistent_below} is not built in this version; set one of them to its default"
            )
        if "host" in (self.offload_optimizer, self.offload_parameters) and device != "gpu":
            raise ConfigurationError(
                f"a state offloaded to the host with run.device = {device!r} is where it was; choose 'file' for "
                "zero.offload_optimizer and zero.offload_parameters, 'none', or run.device = 'gpu'"
            )

    def check_beside(self, strategy: str, pipeline: int, device: str) -> None:
        """Raise ConfigurationError for keys that would be ignored, or cannot be, with these others (local)."""
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if not changed:
            return
        named = f"zero.{changed[0]} = {getattr(self, changed[0])!r}"
        if strategy not in STAGES:
            raise ConfigurationError(
                f"{named} has no effect with parallel.strategy = {strategy!r}; remove it, or choose the strategy "
                f"{_ONLY.get(changed[0], ' or '.join(STAGES))}"
            )
        whole = {name for name in changed if name.startswith(("shared", "offload"))}
        if pipeline > 1 and whole:
            name = min(whole)
            raise ConfigurationError(
                f"zero.{name} = {getattr(self, name)!r} with parallel.pipeline = {pipeline} is not built in this "
                "version; remove it, or set parallel.pipeline = 1"
            )
        self._check_kept(strategy)
        for key in ("persistent_below", "prefetch", "keep_parameters"):
            if getattr(self, key) and self.parameters <= 1 and (self.parameters or strategy != "zero3"):
                raise ConfigurationError(
                    f"zero.{key} = {getattr(self, key)} has no effect where no parameters are cut; remove it, or "
                    "choose the strategy zero3"
                )
        self._check_offload_beside(strategy, device)
        if self.shared_parameters and strategy == "zero3":
            raise ConfigurationError(
                "zero.shared_parameters = true keeps the parameters whole, and parallel.strategy = 'zero3' cuts them; "
                "choose zero1 or zero2"
            )
        if self.shared_parameters and device != "cpu":
            raise ConfigurationError(
                f"zero.shared_parameters = true with run.device = {device!r}: ranks share the memory of CPUs; set it "
                "to false, or run.device = 'cpu'"
            )

    def check_compressed(self, name: str) -> None:
        """Raise ConfigurationError where gradients that are compressed as ``name`` cannot be cut (local)."""
        if name == "powersgd":
            raise ConfigurationError(
                "communication.compression = 'powersgd' with a strategy of ZeRO: its factors are of whole tensors, "
                "which all ranks rebuild, and ZeRO sums cuts of them; choose int8, another quantised or a sparse one, "
                "or parallel.strategy = 'allreduce'"
            )
        if self.offload_parameters != "none":
            raise ConfigurationError(
                f"communication.compression = {name!r} with zero.offload_parameters = {self.offload_parameters!r} is "
                "not built in this version; set one of them to 'none'"
            )

    def check_compressed_parameters(self, way: str, strategy: str) -> None:
        """Raise ConfigurationError where parameters cannot be gathered as ``compression.parameters`` says (local)."""
        if strategy not in STAGES or (self.parameters <= 1 and (self.parameters or strategy != "zero3")):
            raise ConfigurationError(
                f"compression.parameters = {way!r} with parallel.strategy = {strategy!r}, where every rank keeps the "
                "parameters whole: what it keeps, and steps, would be rounded; choose zero3, set zero.parameters to "
                "the ranks of a node, or compression.parameters to 'none'"
            )
        for key, off in (("prefetch", 0), ("offload_parameters", "none")):
            if getattr(self, key) != off:
                raise ConfigurationError(
                    f"compression.parameters = {way!r} with zero.{key} = {getattr(self, key)!r} is not built in this "
                    f"version; set zero.{key} to {off!r}, or compression.parameters to 'none'"
                )

    def degrees(self, stage: int, ranks: int) -> ShardingDegrees:
        """Return the degrees on ``ranks`` data ranks (local). Raises ConfigurationError, with the whole equation."""
        names = ("zero.parameters", "zero.gradients", "zero.optimizer")
        own_degrees = (self.parameters, self.gradients, self.optimizer)
        by_stage = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks)
        degrees = [own or default for own, default in zip(own_degrees, by_stage, strict=True)]
        for (name, degree), (above, multiple) in pairwise(zip((*names, "data ranks"), (*degrees, ranks), strict=True)):
            if multiple % degree:
                equation = " | ".join(f"{name} {degree}" for name, degree in zip(names, degrees, strict=True))
                raise ConfigurationError(
                    f"{equation} | {ranks} data ranks: each must divide the next, but {name} {degree} does not divide "
                    f"{above} {multiple}; choose among the divisors of {ranks}: "
                    f"{[divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]}"
                )
        return ShardingDegrees(*degrees)
