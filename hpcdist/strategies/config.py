"""The ``[parallel]`` section of a recipe. Imports only `reporting` and the table of schedules."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, at_least, check_section, one_of, rule
from hpcdist.strategies.decentralised.config import STRATEGIES as DECENTRALISED
from hpcdist.strategies.schedule.generate.registry import NAMES, SCHEDULES, check_schedule

PARTITIONS: Final = ("parameters", "flops", "measured")
DEFAULT_PARTITION: Final = "flops"
SUMMING: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server")  # strategies that sum gradients
STRATEGIES: Final = (*SUMMING, *DECENTRALISED)
CONTEXT_METHODS: Final = ("auto", "ring", "all_to_all")
PIECE_TOKENS: Final = 4  # pieces of samples on context ranks begin at multiples of this
_HOLDING: Final = [name for name, row in SCHEDULES.items() if row.splits or row.folded]
_CUTS: Final = ("stage_units", "stage_speeds", "stage_memory_bytes", f"partition!={DEFAULT_PARTITION}")

RULES: Final = (
    *at_least(0, "parallel.data", expected="give a number of ranks, or 0 for all remaining ranks"),
    *at_least(
        1, *(f"parallel.{name}" for name in ("pipeline", "tensor", "context", "expert", "microbatches", "chunks"))
    ),
    one_of("parallel.context_method", CONTEXT_METHODS),
    rule("parallel.context_method!=auto with parallel.context=1", NO_EFFECT, "no sample is divided; remove it"),
    one_of("parallel.strategy", STRATEGIES),
    one_of("parallel.schedule", ("auto", *NAMES)),
    rule("parallel.schedule_file= with parallel.schedule=file", cure="name the schedule file"),
    rule(
        "parallel.schedule_file with parallel.schedule!=file",
        "only the schedule 'file' reads it",
        "set parallel.schedule = 'file'",
    ),
    rule("parallel.chunks>1 with parallel.schedule=file", "the file sets the number of chunks", "leave it out"),
    # gossip and local_sgd need the gradient norm of a whole replica on one rank
    *(
        rule(f"parallel.strategy!={'|'.join(SUMMING)} with parallel.{axis}>1", UNBUILT)
        for axis in ("pipeline", "tensor")
    ),
    rule(
        "parallel.recompute with parallel.schedule={holding}",
        "the input of a weight gradient stays in memory until it is computed",
        "set it to false, or choose gpipe, 1f1b or interleaved",
        holding=_HOLDING,
    ),
    rule(
        "parallel.sequence_parallel with parallel.tensor=1",
        "no tensor axis divides the layers",
        "set it to false, or use several tensor ranks",
    ),
    one_of("parallel.partition", PARTITIONS),
    *(
        rule(
            f"parallel.{cut} with parallel.pipeline=1",
            NO_EFFECT,
            "one rank has all units; remove it, or use several pipeline ranks",
        )
        for cut in _CUTS
    ),
    *(
        rule(f"parallel.{name}", cure=f"each must be at least {least}", relation=lambda v, least=least: min(v) < least)
        for name, least in (("stage_units", 1), ("stage_speeds", 1), ("stage_memory_bytes", 0))
    ),
    *(
        rule(f"parallel.{cut} with parallel.stage_units", NO_EFFECT, "stage_units sets the partition; remove one key")
        for cut in _CUTS[1::2]
    ),
    rule(
        "parallel.stage_speeds with parallel.pipeline?",
        cure="give one relative speed per pipeline rank, such as [2, 1] if the first is twice as fast",
        relation=lambda speeds, ranks: len(speeds) != ranks,
    ),
    rule(
        "parallel.stage_memory_bytes with parallel.pipeline?",
        cure="give one limit for all pipeline ranks, or one per rank; 0 means no limit",
        relation=lambda limits, ranks: len(limits) not in (1, ranks),
    ),
)


def exchanges_heads(ranks: int, heads: int, shared: int) -> bool:
    """Return True if all-to-all attention can divide the attention heads evenly among ``ranks`` ranks.

    ``heads``: number of query heads. ``shared``: number of key heads.
    """
    return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)


def resolve_context_method(method: str, ranks: int, heads: int, shared: int, *, ring: bool = True) -> str:
    """Return the attention ``method``; "auto" becomes "ring" or "all_to_all", whichever sends fewer bytes.

    ``heads``: number of query heads. ``shared``: number of key heads.
    """
    if method != "auto" or not ring:
        return method if ring else "all_to_all"
    # With c ranks and K bytes of keys per sample, a layer sends 6 K (c - 1) / c bytes by "ring", and by "all_to_all"
    # about 4 K (1 + heads / shared) (c - 1) / c^2 bytes.
    sent = max(shared, ranks)  # key and value heads to send: several ranks may need the same head
    exchange = exchanges_heads(ranks, heads, shared) and 4 * (heads + sent) < 6 * ranks * shared
    return "all_to_all" if exchange else "ring"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Section ``[parallel]``: the layout of the work over the ranks.

    The product of the axis degrees is the number of ranks. With ``data = 0``, the data degree follows from the others.

    - ``schedule``: order of the passes (``auto``: 1f1b in a pipeline, else sequential).
    - ``chunks``: number of model parts per pipeline rank. ``microbatches``: number of micro-batches per step.
    - ``recompute``: recompute activations in the backward pass, to store fewer activations.
    - ``tensor``: number of ranks that compute each layer together. With ``sequence_parallel``, each rank has separate
      tokens outside matrix products.
    - ``context``: number of ranks that divide the tokens of each sample.
    - ``expert``: number of consecutive replicas that divide the experts of each block.
    - ``partition``: quantity to minimise on the slowest pipeline rank: parameters, FLOPs or measured time.
    - ``stage_units``: number of layers, with embedding and head, in each chunk.
    - ``stage_memory_bytes``: one memory limit for all ranks or one per rank; 0: no limit.
    """

    data: int = 0
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    context_method: str = "auto"
    expert: int = 1
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
        """True if activations are recomputed layer by layer; False if never, or for a whole rank at once."""
        at_once = self.microbatches == 1 or self.order in ("sequential", "1f1b")
        return self.recompute and self.pipeline == 1 and at_once

    @property
    def order(self) -> str:
        """Name of the schedule; ``auto`` is replaced by the schedule that it selects."""
        if self.schedule != "auto":
            return self.schedule
        return "1f1b" if self.pipeline > 1 else "sequential"

    @property
    def has_roles(self) -> bool:
        """True for a parameter-server strategy: each rank is a server, a worker or both, without other axes."""
        return self.strategy == "parameter_server" and self.pipeline * self.tensor == 1

    @property
    def chunks_each(self) -> int:
        """Number of model chunks per pipeline rank; for a schedule file, the number in that file."""
        return check_schedule(self.order, self.pipeline, self.microbatches, self.chunks)

    def __post_init__(self) -> None:
        check_section(RULES, "parallel", self)
        check_schedule(self.order, self.pipeline, self.microbatches, self.chunks)
