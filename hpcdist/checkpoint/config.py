"""The ``[checkpoint]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

GROUPS: Final = ("rank", "node")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run is saved, apart from its end: every ``every_steps`` steps (0: not), keeping the newest ``keep``.

    ``writers`` says who writes files: every "rank", one rank of a "node", or so many ranks (a number). The others send
    them what they hold.
    """

    every_steps: int = 0
    keep: int = 2
    writers: str = "rank"

    def __post_init__(self) -> None:
        if self.every_steps < 0:
            raise ConfigurationError(
                f"checkpoint.every_steps = {self.every_steps}; give a number of steps, or 0 to save at the end only"
            )
        if self.keep < 1:
            raise ConfigurationError(f"checkpoint.keep = {self.keep}; at least 1 checkpoint must be kept")
        if self.writers not in GROUPS and not (self.writers.isascii() and self.writers.strip("0").isdecimal()):
            raise ConfigurationError(
                f"checkpoint.writers = {self.writers!r}; choose 'rank', 'node', or a number of ranks of at least 1"
            )
