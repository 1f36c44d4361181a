"""The ``[zero]`` section of a recipe: sharding degrees, what stays whole, prefetch and offload.

Light: imports nothing but the errors and `reporting`. `STAGES` has the stage (1, 2 or 3) of each strategy by its name.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, at_least, check_section, one_of, rule

STAGES: Final = {"zero1": 1, "zero2": 2, "zero3": 3}  # strategy -> stage
PLACES: Final = ("none", "host", "file")  # where states may be offloaded to
DEGREES: Final = ("zero.parameters", "zero.gradients", "zero.optimizer")
OFFLOADED: Final = ("zero.offload_optimizer", "zero.offload_parameters")

RULES: Final = (
    *(one_of(key, PLACES) for key in OFFLOADED),
    rule(
        "zero.offload_parameters with zero.offload_optimizer=none",
        "the optimizer state is larger, and used once a step",
        "offload it first",
    ),
    *(rule(f"zero.offload_parameters with {degree}", UNBUILT) for degree in DEGREES),
    *(
        rule(f"zero.offload_directory= with {key}=file", cure="name a directory, best on a disk of the node")
        for key in OFFLOADED
    ),
    rule("zero.offload_directory with zero.offload_optimizer!=file where zero.offload_parameters!=file", NO_EFFECT),
    *at_least(0, *DEGREES, expected="give a number of data ranks, or 0 for what the stage says"),
    *at_least(0, "zero.prefetch", expected="give a number of units to gather ahead, or 0 for each in its turn"),
    *at_least(0, "zero.persistent_below", expected="give a number of elements, or 0 to cut every unit"),
    *(
        rule(
            f"zero.shared_parameters with {degree}",
            "one copy of the parameters on a node goes with the degrees of zero1 and zero2 as they are",
        )
        for degree in DEGREES
    ),
)


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
        check_section(RULES, "zero", self)

    def degrees(self, stage: int, ranks: int) -> ShardingDegrees:
        """Return the degrees on ``ranks`` data ranks (local). Raises ConfigurationError, with the whole equation."""
        own_degrees = (self.parameters, self.gradients, self.optimizer)
        by_stage = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks)
        degrees = [own or default for own, default in zip(own_degrees, by_stage, strict=True)]
        for (name, degree), (above, multiple) in pairwise(
            zip((*DEGREES, "data ranks"), (*degrees, ranks), strict=True)
        ):
            if multiple % degree:
                equation = " | ".join(f"{name} {degree}" for name, degree in zip(DEGREES, degrees, strict=True))
                raise ConfigurationError(
                    f"{equation} | {ranks} data ranks: each must divide the next, but {name} {degree} does not divide "
                    f"{above} {multiple}; choose among the divisors of {ranks}: "
                    f"{[divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]}"
                )
        return ShardingDegrees(*degrees)
