"""The ``[parallel]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

STRATEGIES: Final = ("allreduce",)
SCHEDULES: Final = ("sequential",)
# Names that mean something, but have no code behind them in this version: refused, never ignored.
UNBUILT_STRATEGIES: Final = ("zero1", "zero2", "zero3", "parameter_server", "gossip", "local_sgd")
UNBUILT_SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zb-h1")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is laid out over the ranks.

    The degrees multiply to the number of ranks; ``data = 0`` takes what the others leave. ``strategy`` says how the
    replicas of the data axis turn gradients into parameters, ``schedule`` in which order micro-batches are computed.
    ``microbatches`` without a pipeline is gradient accumulation: less memory for activations, the same result.
    """

    data: int = 0
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    strategy: str = "allreduce"
    schedule: str = "sequential"
    microbatches: int = 1

    def __post_init__(self) -> None:
        if self.data < 0:
            raise ConfigurationError(f"parallel.data = {self.data}; give a number of ranks, or 0 for all that are left")
        for name in ("pipeline", "tensor", "context", "microbatches"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"parallel.{name} = {value}; it must be at least 1")
            if value > 1 and name != "microbatches":
                raise ConfigurationError(
                    f"parallel.{name} = {value} is known, but not built in this version; set it to 1"
                )
        _choose("strategy", self.strategy, STRATEGIES, UNBUILT_STRATEGIES)
        _choose("schedule", self.schedule, SCHEDULES, UNBUILT_SCHEDULES)


def _choose(name: str, value: str, built: tuple[str, ...], unbuilt: tuple[str, ...]) -> None:
    if value in unbuilt:
        raise ConfigurationError(
            f"parallel.{name} = {value!r} is known, but not built in this version; choose one of {', '.join(built)}"
        )
    if value not in built:
        raise ConfigurationError(f"parallel.{name} = {value!r}; choose one of {', '.join(built)}")
