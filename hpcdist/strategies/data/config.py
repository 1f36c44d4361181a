"""The ``[zero]`` section of a recipe: sharding degrees, prefetch and offload.

Light: imports no arrays. `STAGES` maps a strategy to its ZeRO stage (1, 2 or 3).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, rule
from hpcdist.reporting.schema import check_section, key
from hpcdist.strategies.core.grid import ShardingDegrees

STAGES: Final = {"zero1": 1, "zero2": 2, "zero3": 3}  # strategy -> stage
PLACES: Final = ("none", "host", "file")  # locations of offloaded state
DEGREES: Final = ("zero.parameters", "zero.gradients", "zero.optimizer")
OFFLOADED: Final = ("zero.offload_optimizer", "zero.offload_parameters")

RULES: Final = (
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
    """Section ``[zero]``: sharding degrees, prefetch and offload."""

    parameters: int = key(0, "Ranks that shard the parameters. Must divide gradients. 0: set by the strategy.", ge=0)
    gradients: int = key(0, "Ranks that shard the gradients. Must divide optimizer. 0: set by the strategy.", ge=0)
    optimizer: int = key(
        0, "Ranks that shard the optimizer state. Must divide the data ranks. 0: all data ranks.", ge=0
    )
    persistent_below: int = key(
        0, "Do not shard the parameters of layers with fewer elements than this. 0: shard all layers.", ge=0
    )
    shared_parameters: bool = key(False, "Keep one copy of the parameters per node, in shared memory.")
    prefetch: int = key(0, "Number of layers to gather ahead. Each needs its own memory.", ge=0)
    keep_gradients: bool = key(False, "Reduce gradients once per step, not after each micro-batch. Needs more memory.")
    keep_parameters: bool = key(False, "Gather parameters once per step, not for each use. Needs more memory.")
    offload_optimizer: str = key(
        "none", "Where to keep the optimizer state: on the device, on the host of a GPU, or in files.", choices=PLACES
    )
    offload_parameters: str = key(
        "none",
        "Where to keep parameter and gradient shards: on the device, on the host of a GPU, or in files.",
        choices=PLACES,
    )
    offload_directory: str = key("", "Directory of the offloaded files. Use a disk of the node.", path=True)

    def __post_init__(self) -> None:
        check_section(RULES, "zero", self)

    def degrees(self, stage: int, ranks: int) -> ShardingDegrees:
        """Return the sharding degrees of ZeRO stage ``stage`` on ``ranks`` data ranks. Raises ConfigurationError."""
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
