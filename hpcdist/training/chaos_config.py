"""The ``[chaos]`` section of a recipe. Light: imports nothing but the errors."""

import math
from dataclasses import dataclass, fields

from hpcdist.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Stragglers that are made on purpose, to see what a strategy does with them.

    Each step of one of the ``slow_ranks`` (of the world) is slow with ``slow_probability``: its forward and backward
    take ``slow_factor`` times as long. Which steps are slow follows from (``seed``, rank, step) alone, so a repetition
    has the same. With ``step_s`` above 0 computing is stretched by sleep on every rank: it takes ``step_s`` seconds on
    an even share of the batch (more or less on a larger or smaller one), and more only where it takes longer by itself.
    """

    slow_ranks: tuple[int, ...] = ()
    slow_factor: float = 3.0
    slow_probability: float = 1.0
    step_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if any(rank < 0 for rank in self.slow_ranks) or len(set(self.slow_ranks)) < len(self.slow_ranks):
            raise ConfigurationError(
                f"chaos.slow_ranks = {list(self.slow_ranks)}; give ranks of the world, from 0 on, each once"
            )
        if not (math.isfinite(self.slow_factor) and self.slow_factor >= 1):
            raise ConfigurationError(f"chaos.slow_factor = {self.slow_factor}; it must be finite and at least 1")
        if not 0 <= self.slow_probability <= 1:
            raise ConfigurationError(f"chaos.slow_probability = {self.slow_probability}; it must be between 0 and 1")
        if not (math.isfinite(self.step_s) and self.step_s >= 0):
            raise ConfigurationError(f"chaos.step_s = {self.step_s}; it must be finite and at least 0")
        if self.seed < 0:
            raise ConfigurationError(f"chaos.seed = {self.seed}; it must be at least 0")
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        if self.slow_ranks:
            return
        for item in fields(self):
            given = getattr(self, item.name)
            if item.name not in ("slow_ranks", "step_s") and given != item.default:
                raise ConfigurationError(
                    f"chaos.{item.name} = {given} has no effect without chaos.slow_ranks; name the ranks that shall be "
                    "slow, or remove it"
                )

    @property
    def on(self) -> bool:
        """Whether anything is slower than it is by itself."""
        return bool(self.slow_ranks) or self.step_s > 0

    def check_world(self, world: int, computing: int) -> None:
        """Raise ConfigurationError for slow ranks that are none of the first ``computing`` of ``world`` ranks."""
        for rank in self.slow_ranks:
            if rank >= world:
                raise ConfigurationError(
                    f"chaos.slow_ranks = {list(self.slow_ranks)} on {world} rank{'s' if world > 1 else ''}: there is "
                    f"no rank {rank}; " + (f"use ranks 0 to {world - 1}" if world > 1 else "use rank 0")
                )
            if rank >= computing:
                raise ConfigurationError(
                    f"chaos.slow_ranks = {list(self.slow_ranks)}: rank {rank} only serves, so no step of it can be "
                    f"slow; use ranks 0 to {computing - 1}"
                )

    def described(self) -> str:
        """Return, for people, what is done to a run; "" where nothing is."""
        said = []
        if self.step_s:
            said.append(f"computing takes {self.step_s:g} s a step by sleep")
        if self.slow_ranks:
            ranks = ", ".join(map(str, self.slow_ranks))
            plural = "s" if len(self.slow_ranks) > 1 else ""
            often = "" if self.slow_probability == 1 else f" with probability {self.slow_probability:g} a step"
            said.append(f"rank{plural} {ranks} {self.slow_factor:g} times slower{often}")
        return "; ".join(said)
