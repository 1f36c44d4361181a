"""The ``[parallel]`` section of a recipe. Light: imports nothing but the errors and the table of schedules."""

from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.strategies.partition_config import DEFAULT as PARTITION
from hpcdist.strategies.partition_config import check_partition
from hpcdist.strategies.schedule.catalogue import FILE, NAMES, SCHEDULES
from hpcdist.strategies.schedule.catalogue import check as check_schedule

STRATEGIES: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server", "gossip", "local_sgd")
WITH_TENSOR: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server")
WITH_PIPELINE: Final = WITH_TENSOR  # gossip and local_sgd step by the norm of what one rank has
# Names that mean something, but have no code behind them in this version: refused, never ignored.
UNBUILT_STRATEGIES: Final = ()
UNBUILT_DEGREES: Final = ("context",)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is laid out over the ranks.

    The degrees multiply to the number of ranks; ``data = 0`` takes what the others leave. ``strategy`` says how the
    replicas of the data axis turn gradients into parameters, ``schedule`` in which order micro-batches are computed
    (``auto``: 1f1b in a pipeline, else sequential); ``chunks`` is how many parts of the model a pipeline rank has,
    where the schedule leaves that open, and ``schedule_file`` has the passes of the schedule ``file``. ``microbatches``
    without a pipeline is gradient accumulation: less memory for activations, the same result. ``recompute`` computes
    activations again for the backward: of a micro-batch in a pipeline only its input is kept; where it goes back right
    after it came, input and output of each layer are. ``tensor``
    ranks compute each layer of a gpt together; ``sequence_parallel`` cuts what lies between their products by tokens.

    A pipeline is cut by ``partition``: so that the slowest rank has as few parameters, operations or measured seconds
    as can be, or into ``stage_units`` units (layers, and what is before and behind them) a chunk. ``stage_speeds`` are
    those of the pipeline ranks relative to each other, ``stage_memory_bytes`` what each may use: one for all, or each
    its own, 0 for no limit.
    """

    data: int = 0
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    strategy: str = "allreduce"
    schedule: str = "auto"
    chunks: int = 1
    schedule_file: str = ""
    microbatches: int = 1
    recompute: bool = False
    sequence_parallel: bool = False
    partition: str = PARTITION
    stage_units: tuple[int, ...] = ()
    stage_speeds: tuple[int, ...] = ()
    stage_memory_bytes: tuple[int, ...] = ()

    @property
    def recomputes_layers(self) -> bool:
        """Whether layers are computed again one by one, since every micro-batch goes back right after it came."""
        at_once = self.microbatches == 1 or self.order in ("sequential", "1f1b")
        return self.recompute and self.pipeline == 1 and at_once

    @property
    def order(self) -> str:
        """The schedule, with ``auto`` resolved."""
        if self.schedule != "auto":
            return self.schedule
        return "1f1b" if self.pipeline > 1 else "sequential"

    @property
    def has_roles(self) -> bool:
        """Whether ranks of the world are servers or workers; in a product of axes they are so along the data axis."""
        return self.strategy == "parameter_server" and self.pipeline * self.tensor == 1

    @property
    def chunks_each(self) -> int:
        """How many chunks each rank of the pipeline has; a file says so itself."""
        return check_schedule(self.order, self.pipeline, self.microbatches, self.chunks)

    def __post_init__(self) -> None:
        if self.data < 0:
            raise ConfigurationError(f"parallel.data = {self.data}; give a number of ranks, or 0 for all that are left")
        for name in ("pipeline", "tensor", "context", "microbatches", "chunks"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"parallel.{name} = {value}; it must be at least 1")
            if value > 1 and name in UNBUILT_DEGREES:
                raise ConfigurationError(
                    f"parallel.{name} = {value} is known, but not built in this version; set it to 1"
                )
        _choose("strategy", self.strategy, STRATEGIES, UNBUILT_STRATEGIES)
        _choose("schedule", self.schedule, ("auto", *NAMES), ())
        self._check_pipeline()
        self._check_tensor()
        check_partition(self.pipeline, self.partition, self.stage_units, self.stage_speeds, self.stage_memory_bytes)

    def _check_pipeline(self) -> None:
        if (self.order == FILE) != bool(self.schedule_file):
            raise ConfigurationError(
                f"parallel.schedule_file = {self.schedule_file!r} with parallel.schedule = {self.schedule!r}: the "
                "schedule 'file' needs one, and no other reads it"
            )
        if self.order == FILE and self.chunks > 1:
            raise ConfigurationError(
                f"parallel.chunks = {self.chunks} with parallel.schedule = 'file', which says itself how many chunks a "
                "rank has; leave it out"
            )
        check_schedule(self.order, self.pipeline, self.microbatches, self.chunks)
        if self.pipeline > 1 and self.strategy not in WITH_PIPELINE:
            raise ConfigurationError(
                f"parallel.strategy = {self.strategy!r} with parallel.pipeline = {self.pipeline} is known, but not "
                f"built in this version; a pipeline goes with {', '.join(WITH_PIPELINE)}"
            )
        self._check_recompute()

    def _check_recompute(self) -> None:
        row = SCHEDULES.get(self.order)
        if self.recompute and row is not None and (row.splits or row.folded):
            raise ConfigurationError(
                f"parallel.recompute = true with parallel.schedule = {self.schedule!r}: what a weight gradient needs "
                "stays in memory until it is computed; set it to false, or choose gpipe, 1f1b or interleaved"
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
