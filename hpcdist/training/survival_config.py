"""The ``[survival]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass

from hpcdist.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig:
    """What a job that `hpcdist run --survive` started does to outlive its ranks; without that it has no effect.

    Where ranks have parts of the state, each keeps a copy of its own, and its partner another, renewed every
    ``every_steps`` steps: so many steps are repeated after a death at the most. They are compared with their digests
    every ``check_every_steps`` steps (0: when they are needed). With fewer than ``least_ranks`` left the job ends, to
    be started again from its newest checkpoint.
    """

    every_steps: int = 1
    check_every_steps: int = 0
    least_ranks: int = 1

    def __post_init__(self) -> None:
        for name, least in (("every_steps", 1), ("check_every_steps", 0), ("least_ranks", 1)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"survival.{name} = {getattr(self, name)}; it must be at least {least}")
