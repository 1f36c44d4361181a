"""The ``[parallel]`` section of a recipe: degrees, strategy, schedule, partition.

Light: imports `reporting` and the table of schedules, no array library and no MPI.
"""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, at_least, check_section, one_of, rule
from hpcdist.strategies.decentralised.config import STRATEGIES as DECENTRALISED
from hpcdist.strategies.schedule.generate.registry import NAMES, SCHEDULES, check_schedule

PARTITIONS: Final = ("parameters", "flops", "measured")
DEFAULT_PARTITION: Final = "flops"
SUMMING: Final = ("allreduce", "zero1", "zero2", "zero3", "parameter_server")  # they sum gradients, the others mix
STRATEGIES: Final = (*SUMMING, *DECENTRALISED)
CONTEXT_METHODS: Final = ("auto", "ring", "all_to_all")
PIECE_TOKENS: Final = 4  # pieces of samples that are cut over context ranks begin at multiples of it
_HOLDING: Final = [name for name, row in SCHEDULES.items() if row.splits or row.folded]
_CUTS: Final = ("stage_units", "stage_speeds", "stage_memory_bytes", f"partition!={DEFAULT_PARTITION}")

RULES: Final = (
    *at_least(0, "parallel.data", expected="give a number of ranks, or 0 for all that are left"),
    *at_least(
        1, *(f"parallel.{name}" for name in ("pipeline", "tensor", "context", "expert", "microbatches", "chunks"))
    ),
    one_of("parallel.context_method", CONTEXT_METHODS),
    rule("parallel.context_method!=auto with parallel.context=1", NO_EFFECT, "no sample is cut; remove it"),
    one_of("parallel.strategy", STRATEGIES),
    one_of("parallel.schedule", ("auto", *NAMES)),
    rule("parallel.schedule_file= with parallel.schedule=file", cure="the schedule 'file' needs one"),
    rule("parallel.schedule_file with parallel.schedule!=file", "no other reads it", "set parallel.schedule = 'file'"),
    rule("parallel.chunks>1 with parallel.schedule=file", "it says itself how many chunks a rank has", "leave it out"),
    # gossip and local_sgd step by the norm of what one rank has
    *(
        rule(f"parallel.strategy!={'|'.join(SUMMING)} with parallel.{axis}>1", UNBUILT)
        for axis in ("pipeline", "tensor")
    ),
    rule(
        "parallel.recompute with parallel.schedule={holding}",
        "what a weight gradient needs stays in memory until it is computed",
        "set it to false, or choose gpipe, 1f1b or interleaved",
        holding=_HOLDING,
    ),
    rule(
        "parallel.sequence_parallel with parallel.tensor=1",
        "nothing is cut",
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
        rule(f"parallel.{cut} with parallel.stage_units", NO_EFFECT, "these cut by hand; remove one of them")
        for cut in _CUTS[1::2]
    ),
    rule(
        "parallel.stage_speeds with parallel.pipeline?",
        cure="give one for each pipeline rank, relative to each other, as [2, 1] where the first is twice as fast",
        relation=lambda speeds, ranks: len(speeds) != ranks,
    ),
    rule(
        "parallel.stage_memory_bytes with parallel.pipeline?",
        cure="give one number for all pipeline ranks, or one for each, 0 for no limit",
        relation=lambda limits, ranks: len(limits) not in (1, ranks),
    ),
)


def exchanges_heads(ranks: int, heads: int, shared: int) -> bool:
    """Return whether ``ranks`` can exchange query ``heads``, and the ``shared`` ones of keys, for tokens."""
    return heads % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)


def resolve_context_method(method: str, ranks: int, heads: int, shared: int, *, ring: bool = True) -> str:
    """Return ``method``, or for "auto" the one that sends less: heads in all, and shared ones of keys and values.

    Without a ``ring``, as in 16 bits on a GPU, heads are exchanged. In keys of a sample, a layer sends 6 (c - 1) / c on
    a ring, and about 4 (1 + heads / shared) (c - 1) / c^2 by exchange.
    """
    if method != "auto" or not ring:
        return method if ring else "all_to_all"
    sent = max(shared, ranks)  # heads of keys and values that travel: several ranks may need the same one
    exchange = exchanges_heads(ranks, heads, shared) and 4 * (heads + sent) < 6 * ranks * shared
    return "all_to_all" if exchange else "ring"


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
    ``context`` ranks share the tokens of each sample; ``context_method`` says how their attention meets those of the
    others: keys and values travel round a "ring", or heads are exchanged for tokens, "all_to_all"; "auto" takes the one
    that sends less, of those that the heads allow.
    ``expert`` consecutive replicas share out the experts of each block, and send each other the tokens for them.

    A pipeline is cut by ``partition``: so that the slowest rank has as few parameters, operations or measured seconds
    as can be, or into ``stage_units`` units (layers, and what is before and behind them) a chunk. ``stage_speeds`` are
    those of the pipeline ranks relative to each other, ``stage_memory_bytes`` what each may use: one for all, or each
    its own, 0 for no limit.
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
        check_section(RULES, "parallel", self)
        check_schedule(self.order, self.pipeline, self.microbatches, self.chunks)
