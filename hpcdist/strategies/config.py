"""The ``[parallel]`` section of a recipe: degrees, strategy, schedule, partition, tensor parallelism.

Light: imports the errors, the model's configuration and the table of schedules, no array library and no MPI.
`check_partition` refuses keys of the pipeline's partition that are wrong or would be ignored; `check_tensor_parallel`
refuses models that cannot be cut over a tensor axis, before anything is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hpcdist.errors import ConfigurationError
from hpcdist.models.config import TRANSFORMERS, ModelConfig
from hpcdist.strategies.schedule.generate.registry import FILE, NAMES, SCHEDULES, check_schedule

PARTITIONS: Final = ("parameters", "flops", "measured")
DEFAULT_PARTITION: Final = "flops"


def check_partition(
    pipeline: int,
    partition: str,
    stage_units: Sequence[int],
    stage_speeds: Sequence[int],
    stage_memory_bytes: Sequence[int],
) -> None:
    """Raise ConfigurationError where a key is wrong, or would be ignored (local)."""
    if partition not in PARTITIONS:
        raise ConfigurationError(f"parallel.partition = {partition!r}; choose one of {', '.join(PARTITIONS)}")
    lists = {"stage_units": stage_units, "stage_speeds": stage_speeds, "stage_memory_bytes": stage_memory_bytes}
    changed = {name: list(given) for name, given in lists.items() if given}
    if pipeline == 1 and (changed or partition != DEFAULT_PARTITION):
        name, given = next(iter(changed.items()), ("partition", repr(partition)))
        raise ConfigurationError(
            f"parallel.{name} = {given} has no effect with parallel.pipeline = 1, where one rank has all units; remove "
            "it, or use several pipeline ranks"
        )
    for name, given in changed.items():
        least = 0 if name == "stage_memory_bytes" else 1
        if min(given) < least:
            raise ConfigurationError(f"parallel.{name} = {given}; each must be at least {least}")
    if stage_units and (partition != DEFAULT_PARTITION or stage_speeds):
        name = "stage_speeds" if stage_speeds else "partition"
        raise ConfigurationError(
            f"parallel.{name} has no effect with parallel.stage_units = {list(stage_units)}, which cuts by hand; "
            "remove one of them"
        )
    if stage_speeds and len(stage_speeds) != pipeline:
        raise ConfigurationError(
            f"parallel.stage_speeds = {list(stage_speeds)} for parallel.pipeline = {pipeline}; give one for each "
            "pipeline rank, relative to each other, as [2, 1] where the first is twice as fast"
        )
    if stage_memory_bytes and len(stage_memory_bytes) not in (1, pipeline):
        raise ConfigurationError(
            f"parallel.stage_memory_bytes = {list(stage_memory_bytes)} for parallel.pipeline = {pipeline}; give one "
            "number for all pipeline ranks, or one for each, 0 for no limit"
        )


def check_tensor_parallel(config: ModelConfig, ranks: int, context: int, sequence_parallel: bool) -> None:
    """Raise ConfigurationError for a model that cannot be cut over ``ranks`` (local)."""
    if ranks == 1:
        return
    if config.kind not in TRANSFORMERS:
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.kind = {config.kind!r} is not built in this version: set it to 1, "
            f"or train a {' or an '.join(TRANSFORMERS)}"
        )
    if config.kv_heads and config.kv_heads % ranks:
        divisors = [count for count in range(1, config.kv_heads + 1) if config.kv_heads % count == 0]
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.kv_heads = {config.kv_heads}: every rank takes as many of them, "
            f"with the queries that share them; choose one of {divisors} ranks, or a multiple of {ranks} heads"
        )
    if config.heads % ranks:
        divisors = [count for count in range(1, config.heads + 1) if config.heads % count == 0]
        raise ConfigurationError(
            f"parallel.tensor = {ranks} with model.heads = {config.heads}: every rank takes as many heads; choose one "
            f"of {divisors} ranks, or a multiple of {ranks} heads"
        )
    for name, key, size in (
        ("a row of the embedding", "model.vocabulary", config.vocabulary),
        ("a column of the feed-forward", "model.feed_forward", config.inner),
        *((("a token of a sample", "data.context", context),) if sequence_parallel else ()),
    ):
        if size < ranks:
            raise ConfigurationError(
                f"parallel.tensor = {ranks} with {key} = {size}: each rank needs at least {name}; use at most {size} "
                "tensor ranks"
            )


STRATEGIES: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server", "gossip", "local_sgd")
WITH_TENSOR: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server")
WITH_PIPELINE: Final = WITH_TENSOR  # gossip and local_sgd step by the norm of what one rank has
# Names that mean something, but have no code behind them in this version: refused, never ignored.
UNBUILT_STRATEGIES: Final = ()
UNBUILT_DEGREES: Final = ("context",)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Section ``[parallel]``: the layout of the work over the ranks.

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
    partition: str = DEFAULT_PARTITION
    stage_units: tuple[int, ...] = ()
    stage_speeds: tuple[int, ...] = ()
    stage_memory_bytes: tuple[int, ...] = ()

    @property
    def recomputes_layers(self) -> bool:
        """Whether layers are recomputed one by one, since every backward follows its forward at once."""
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
        """Whether ranks of the world are servers or workers; in a product of axes they are along the data axis."""
        return self.strategy == "parameter_server" and self.pipeline * self.tensor == 1

    @property
    def chunks_each(self) -> int:
        """Number of chunks of each rank of the pipeline; for a schedule file, as it says."""
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
