"""The ``[zero]`` section of a recipe: sharding degrees, prefetch and offload.

Light: imports no arrays. `STAGES` maps a strategy to its ZeRO stage (1, 2 or 3).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, at_least, check_section, one_of, rule
from hpcdist.strategies.core.traits import ShardingDegrees

STAGES: Final = {"zero1": 1, "zero2": 2, "zero3": 3}  # strategy -> stage
PLACES: Final = ("none", "host", "file")  # locations of offloaded state
DEGREES: Final = ("zero.parameters", "zero.gradients", "zero.optimizer")
OFFLOADED: Final = ("zero.offload_optimizer", "zero.offload_parameters")

RULES: Final = (
    *(one_of(key, PLACES) for key in OFFLOADED),
    rule(
        "zero.offload_parameters with zero.offload_optimizer=none",
        "the optimizer state is larger, and is used only once per step",
        "offload the optimizer state first",
    ),
    *(rule(f"zero.offload_parameters with {degree}", UNBUILT) for degree in DEGREES),
    *(
        rule(f"zero.offload_directory= with {key}=file", cure="name a directory, best on a disk of the node")
        for key in OFFLOADED
    ),
    rule("zero.offload_directory with zero.offload_optimizer!=file where zero.offload_parameters!=file", NO_EFFECT),
    *at_least(0, *DEGREES, expected="give a number of data ranks, or 0 for the default of the strategy"),
    *at_least(0, "zero.prefetch", expected="give a number of layers to gather ahead, or 0 to gather at use"),
    *at_least(0, "zero.persistent_below", expected="give a number of elements, or 0 to shard every layer"),
    *(
        rule(
            f"zero.shared_parameters with {degree}",
            "a shared copy of the parameters needs the default degrees of zero1 or zero2",
        )
        for degree in DEGREES
    ),
)


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Section ``[zero]``: sharding degrees, prefetch and offload.

    - ``parameters``, ``gradients``, ``optimizer``: sharding degrees. On p data ranks, the defaults (0) are (1, 1, p)
      for zero1, (1, p, p) for zero2 and (p, p, p) for zero3. Each degree must divide the next, and the last must divide
      p. Groups are consecutive data ranks: if ``parameters`` is the number of ranks per node, zero3 gathers only within
      nodes.
    - ``persistent_below``: layers with fewer elements shard only the optimizer state.
    - ``shared_parameters``: the ranks of a node keep one copy of the parameters in shared memory, and gather nothing
      within the node (zero1 and zero2 on CPUs).
    - ``prefetch``: number of layers to gather ahead, each into separate memory (zero3; needs
      ``communication.overlap``).
    - ``keep_gradients``: accumulate unsharded gradients, and reduce once per step, not after each micro-batch.
    - ``keep_parameters``: gather once per step, not for each use. Both keys need memory for unsharded arrays of the
      whole pipeline stage.
    - ``offload_optimizer``: keep the optimizer state on the "host" of a GPU or in a "file". The host updates it block
      by block.
    - ``offload_parameters``: also offload the shards of parameters and gradients (zero3).
    - ``offload_directory``: place of each rank's unnamed file, on a disk of the node. A relative path counts from the
      directory of the recipe, like ``data.path``, or else from the current directory.
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
        check_section(RULES, "zero", self)

    def degrees(self, stage: int, ranks: int) -> ShardingDegrees:
        """Return ZeRO stage ``stage``'s sharding degrees on ``ranks`` data ranks. Raises ConfigurationError. Local."""
        settings = (self.parameters, self.gradients, self.optimizer)
        by_stage = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks)
        degrees = [setting or default for setting, default in zip(settings, by_stage, strict=True)]
        for (name, degree), (above, multiple) in pairwise(
            zip((*DEGREES, "data ranks"), (*degrees, ranks), strict=True)
        ):
            if multiple % degree:
                degree_list = ", ".join(f"{name} = {degree}" for name, degree in zip(DEGREES, degrees, strict=True))
                raise ConfigurationError(
                    f"ZeRO sharding degrees {degree_list} on {ranks} data ranks: each degree must divide the next, and "
                    f"the last must divide the number of data ranks, but {name} = {degree} does not divide {above} = "
                    f"{multiple}; choose degrees among the divisors of {ranks}: "
                    f"{[divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]}"
                )
        return ShardingDegrees(*degrees)
