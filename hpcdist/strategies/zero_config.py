"""The ``[zero]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from hpcdist.errors import ConfigurationError

STAGES: Final = {"zero1": 1, "zero2": 2, "zero3": 3}  # strategy -> stage


@dataclass(frozen=True)
class Degrees:
    """Over how many data ranks parameters, gradients and optimizer state are cut; each divides the next."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Over how many ranks ZeRO cuts what, and what it does not cut.

    ``parameters``, ``gradients`` and ``optimizer`` are sharding degrees; 0 is what the stage says: (1, 1, p) in zero1,
    (1, p, p) in zero2, (p, p, p) in zero3, on p data ranks. Each must divide the next, and the last p. Groups are
    blocks of consecutive data ranks: the number of ranks of a node as ``parameters`` keeps the gathers of zero3 inside
    the nodes. A unit (layer) of fewer than ``persistent_below`` elements stays gathered where others are cut; its
    optimizer state is cut all the same. With ``shared_parameters`` the ranks of a node keep one copy of the parameters
    in memory that they share, and nothing is gathered inside a node (zero1 and zero2, on CPUs).
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    persistent_below: int = 0
    shared_parameters: bool = False

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "optimizer"):
            if getattr(self, name) < 0:
                raise ConfigurationError(
                    f"zero.{name} = {getattr(self, name)}; give a number of data ranks, or 0 for what the stage says"
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

    def check_beside(self, strategy: str, pipeline: int, device: str) -> None:
        """Raise ConfigurationError for keys that would be ignored, or cannot be, with these others (local)."""
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if not changed:
            return
        named = f"zero.{changed[0]} = {getattr(self, changed[0])!r}"
        if strategy not in STAGES:
            raise ConfigurationError(
                f"{named} has no effect with parallel.strategy = {strategy!r}; remove it, or choose the strategy "
                f"{', '.join(STAGES)}"
            )
        if pipeline > 1:
            raise ConfigurationError(
                f"{named} with parallel.pipeline = {pipeline} is not built in this version; remove it, or set "
                "parallel.pipeline = 1"
            )
        if self.persistent_below and self.parameters <= 1 and (self.parameters or strategy != "zero3"):
            raise ConfigurationError(
                f"zero.persistent_below = {self.persistent_below} has no effect where no parameters are cut; remove "
                "it, or choose the strategy zero3"
            )
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

    def degrees(self, stage: int, ranks: int) -> Degrees:
        """Return the degrees on ``ranks`` data ranks (local). Raises ConfigurationError, with the whole equation."""
        names = ("zero.parameters", "zero.gradients", "zero.optimizer")
        given = (self.parameters, self.gradients, self.optimizer)
        by_stage = (ranks if stage >= 3 else 1, ranks if stage >= 2 else 1, ranks)
        found = [own or default for own, default in zip(given, by_stage, strict=True)]
        for (name, degree), (above, multiple) in pairwise(zip((*names, "data ranks"), (*found, ranks), strict=True)):
            if multiple % degree:
                equation = " | ".join(f"{name} {degree}" for name, degree in zip(names, found, strict=True))
                raise ConfigurationError(
                    f"{equation} | {ranks} data ranks: each must divide the next, but {name} {degree} does not divide "
                    f"{above} {multiple}; choose among the divisors of {ranks}: "
                    f"{[divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]}"
                )
        return Degrees(*found)
