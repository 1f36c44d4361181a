"""The ``[checkpoint]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass

from hpcdist.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run is saved, apart from its end: every ``every_steps`` steps (0: not), keeping the newest ``keep``."""

    every_steps: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ConfigurationError(
                f"checkpoint.every_steps = {self.every_steps}; give a number of steps, or 0 to save at the end only"
            )
        if self.keep < 1:
            raise ConfigurationError(f"checkpoint.keep = {self.keep}; at least 1 checkpoint must be kept")
