"""The ``[parallel]`` section of a recipe. Light: imports `reporting`, the table of schedules and the ZeRO stages."""

from dataclasses import dataclass
from typing import Final

from hpcdist.reporting.rules import NO_EFFECT, UNBUILT, rule
from hpcdist.reporting.schema import check_section, key
from hpcdist.strategies.data.config import STAGES
from hpcdist.strategies.decentralised.config import STRATEGIES as DECENTRALISED
from hpcdist.strategies.schedule.registry import NAMES, SCHEDULES, check_schedule

PARTITIONS: Final = ("parameters", "flops", "measured")
DEFAULT_PARTITION: Final = "flops"
# Settings with which tensor ranks have partial gradients of unsharded tensors.
PARTIAL: Final = ("parallel.sequence_parallel", "model.query_key_norm=head with parallel.tensor>1")
SUMMING: Final = ("allreduce", *STAGES, "parameter_server")  # strategies that sum gradients
STRATEGIES: Final = (*SUMMING, *DECENTRALISED)
CONTEXT_METHODS: Final = ("auto", "ring", "all_to_all")
PIECE_TOKENS: Final = 4  # pieces of samples on context ranks begin at multiples of this
_HOLDING: Final = [name for name, row in SCHEDULES.items() if row.splits or row.folded]
_CUTS: Final = ("stage_units", "stage_speeds", "stage_memory_bytes", f"partition!={DEFAULT_PARTITION}")

RULES: Final = (
    rule("parallel.context_method!=auto with parallel.context=1", NO_EFFECT, "no sample is divided; remove it"),
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
    *(
        rule(
            f"parallel.{cut} with parallel.pipeline=1",
            NO_EFFECT,
            "one rank has all units; remove it, or use several pipeline ranks",
        )
        for cut in _CUTS
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


def exchanges_heads(ranks: int, query_heads: int, key_heads: int) -> bool:
    """Return True if all-to-all attention can divide the attention heads evenly among ``ranks`` ranks.

    ``query_heads``: number of query heads. ``key_heads``: number of key heads, which is also the number of value heads.
    """
    return query_heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


def resolve_context_method(method: str, ranks: int, query_heads: int, key_heads: int, *, ring: bool = True) -> str:
    """Return ``method``, or for "auto" the attention method that sends fewer bytes: "ring" or "all_to_all".

    ``ranks``: number of context ranks. ``query_heads``, ``key_heads``: numbers of query heads and key heads.
    """
    if method != "auto" or not ring:
        return method if ring else "all_to_all"
    # With c ranks and K bytes of keys per sample, a layer sends 6 K (c - 1) / c bytes by "ring", and by "all_to_all"
    # about 4 K (1 + query_heads / key_heads) (c - 1) / c^2 bytes.
    sent = max(key_heads, ranks)  # key and value heads to send: several ranks may need the same head
    exchange = exchanges_heads(ranks, query_heads, key_heads) and 4 * (query_heads + sent) < 6 * ranks * key_heads
    return "all_to_all" if exchange else "ring"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Section ``[parallel]``: the layout of the work over the ranks."""

    data: int = key(0, "Number of data ranks (replicas of the model). 0: all ranks that the other degrees leave.", ge=0)
    pipeline: int = key(1, "Pipeline ranks, each of which holds a part of the model.", ge=1)
    tensor: int = key(1, "Ranks that compute each layer together. Must divide model.heads.", ge=1)
    context: int = key(1, "Ranks that share the tokens of each sample. It need not divide data.context.", ge=1)
    context_method: str = key(
        "auto",
        "Attention across context ranks: pass keys and values round a ring, or exchange heads.",
        choices=CONTEXT_METHODS,
    )
    expert: int = key(1, "Ranks that share the experts. Must divide data x context and model.experts.", ge=1)
    strategy: str = key("allreduce", "How replicas turn their gradients into new parameters.", choices=STRATEGIES)
    schedule: str = key(
        "auto", "Order of the micro-batches. auto: 1f1b in a pipeline, else sequential.", choices=("auto", *NAMES)
    )
    chunks: int = key(1, "Model parts per pipeline rank; interleaved needs at least 2.", ge=1)
    schedule_file: str = key(
        "", "File with the forward and backward passes, written by `hpcdist schedule --dump`.", path=True
    )
    microbatches: int = key(1, "Micro-batches per step. Without a pipeline: gradient accumulation.", ge=1)
    recompute: bool = key(False, "Recompute activations in the backward pass, to save memory.")
    sequence_parallel: bool = key(False, "Divide norms, residuals and dropout by tokens over the tensor ranks.")
    partition: str = key(
        DEFAULT_PARTITION,
        "Cost by which a pipeline is balanced: the cost of its slowest stage is minimised.",
        choices=PARTITIONS,
    )
    stage_units: tuple[int, ...] = key(
        (), "Number of units in each chunk (units: layers, embedding, head), to set the partition by hand.", ge=1
    )
    stage_speeds: tuple[int, ...] = key((), "Relative speeds of the pipeline ranks, as [2, 1].", ge=1)
    stage_memory_bytes: tuple[int, ...] = key(
        (), "Memory limit of a pipeline rank in bytes: one for all, or one per rank. 0: no limit.", ge=0
    )

    @property
    def recomputes_layers(self) -> bool:
        """True if activations are recomputed layer by layer. False if they are never recomputed, or all at once."""
        at_once = self.microbatches == 1 or self.order in ("sequential", "1f1b")
        return self.recompute and self.pipeline == 1 and at_once

    @property
    def order(self) -> str:
        """Name of the schedule. If the recipe says ``auto``, name of the schedule that ``auto`` selects."""
        if self.schedule != "auto":
            return self.schedule
        return "1f1b" if self.pipeline > 1 else "sequential"

    @property
    def has_roles(self) -> bool:
        """True if ranks have different roles: parameter server, worker or both."""
        return self.strategy == "parameter_server" and self.pipeline * self.tensor == 1

    @property
    def chunks_each(self) -> int:
        """Number of model chunks per pipeline rank. With a schedule file, the number of chunks in the file."""
        return check_schedule(self.order, self.pipeline, self.microbatches, self.chunks)

    def __post_init__(self) -> None:
        check_section(RULES, "parallel", self)
        check_schedule(self.order, self.pipeline, self.microbatches, self.chunks)
