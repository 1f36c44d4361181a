"""The ``[parallel]`` section of a recipe. Light: imports nothing but the errors."""

from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError

STRATEGIES: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server", "gossip", "local_sgd")
SCHEDULES: Final = ("auto", "sequential", "gpipe", "1f1b")
WITH_TENSOR: Final = ("allreduce", "zero1", "zero2", "zero3")
WITH_PIPELINE: Final = ("allreduce", "zero1")  # the others exchange gradients while micro-batches are still under way
# Names that mean something, but have no code behind them in this version: refused, never ignored.
UNBUILT_STRATEGIES: Final = ()
UNBUILT_SCHEDULES: Final = ("interleaved", "zb-h1")
UNBUILT_DEGREES: Final = ("context",)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is laid out over the ranks.

    The degrees multiply to the number of ranks; ``data = 0`` takes what the others leave. ``strategy`` says how the
    replicas of the data axis turn gradients into parameters, ``schedule`` in which order micro-batches are computed
    (``auto``: 1f1b in a pipeline, else sequential). ``microbatches`` without a pipeline is gradient accumulation: less
    memory for activations, the same result. ``recompute``, in a pipeline, keeps only the input of a micro-batch and
    computes its activations again before its backward. ``tensor`` ranks compute each layer of a gpt together;
    ``sequence_parallel`` cuts what lies between their products by tokens.
    """

    data: int = 0
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    strategy: str = "allreduce"
    schedule: str = "auto"
    microbatches: int = 1
    recompute: bool = False
    sequence_parallel: bool = False

    @property
    def order(self) -> str:
        """The schedule, with ``auto`` resolved."""
        if self.schedule != "auto":
            return self.schedule
        return "1f1b" if self.pipeline > 1 else "sequential"

    def __post_init__(self) -> None:
        if self.data < 0:
            raise ConfigurationError(f"parallel.data = {self.data}; give a number of ranks, or 0 for all that are left")
        for name in ("pipeline", "tensor", "context", "microbatches"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"parallel.{name} = {value}; it must be at least 1")
            if value > 1 and name in UNBUILT_DEGREES:
                raise ConfigurationError(
                    f"parallel.{name} = {value} is known, but not built in this version; set it to 1"
                )
        _choose("strategy", self.strategy, STRATEGIES, UNBUILT_STRATEGIES)
        _choose("schedule", self.schedule, SCHEDULES, UNBUILT_SCHEDULES)
        self._check_pipeline()
        self._check_tensor()

    def _check_pipeline(self) -> None:
        if self.pipeline > 1 and self.schedule == "sequential":
            raise ConfigurationError(
                f"parallel.schedule = 'sequential' with parallel.pipeline = {self.pipeline}: all stages but one would "
                "wait; choose 1f1b or gpipe"
            )
        if self.pipeline > 1 and self.strategy not in WITH_PIPELINE:
            raise ConfigurationError(
                f"parallel.strategy = {self.strategy!r} with parallel.pipeline = {self.pipeline} is known, but not "
                f"built in this version; a pipeline goes with {' or '.join(WITH_PIPELINE)}"
            )
        kept = self.microbatches > 1 and (self.pipeline > 1 or self.order == "gpipe")
        if self.recompute and not kept:
            raise ConfigurationError(
                "parallel.recompute = true saves nothing here: every micro-batch goes back right after it came; set it "
                "to false, or use a pipeline (or parallel.schedule = 'gpipe') of several parallel.microbatches"
            )

    def _check_tensor(self) -> None:
        if self.tensor > 1 and self.strategy not in WITH_TENSOR:
            raise ConfigurationError(
                f"parallel.strategy = {self.strategy!r} with parallel.tensor = {self.tensor} is not built in this "
                f"version; choose one of {', '.join(WITH_TENSOR)}, or parallel.tensor = 1"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ConfigurationError(
                "parallel.sequence_parallel = true with parallel.tensor = 1 cuts nothing; set it to false, or use "
                "several tensor ranks"
            )


def _choose(name: str, value: str, built: tuple[str, ...], unbuilt: tuple[str, ...]) -> None:
    if value in unbuilt:
        raise ConfigurationError(
            f"parallel.{name} = {value!r} is known, but not built in this version; choose one of {', '.join(built)}"
        )
    if value not in built:
        raise ConfigurationError(f"parallel.{name} = {value!r}; choose one of {', '.join(built)}")
