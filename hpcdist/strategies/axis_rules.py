"""Recipe rules for the axes within a replica: tensor, context and expert parallelism."""

from collections.abc import Iterator
from typing import Final

from hpcdist.arrays.ranges import split
from hpcdist.models.config import FOREIGN, TRANSFORMERS
from hpcdist.reporting.rules import UNBUILT, Rule, rule
from hpcdist.reporting.units import counted
from hpcdist.strategies.compressed.rules import COMPRESSED, IN_16_BITS
from hpcdist.strategies.config import PIECE_TOKENS
from hpcdist.strategies.data.config import OFFLOADED, STAGES

LOCK_STEP: Final = (
    "choose allreduce, zero1, zero2, zero3, or a parameter server with consistency = 'bsp' and no backup workers, or "
    "leave it out"
)


def of_tensor() -> Iterator[Rule]:
    """Yield the `Rule` objects that reject recipes with unsupported uses of tensor parallelism."""
    yield rule(
        f"parallel.tensor>1 with model.kind!={'|'.join(TRANSFORMERS)}",
        UNBUILT,
        f"set it to 1, or train a {' or an '.join(TRANSFORMERS)}",
    )
    for key, what in (("model.kv_heads", "kv_heads, with the query heads that share them"), ("model.heads", "heads")):
        yield rule(
            f"parallel.tensor>1 with {key}",
            f"each tensor rank must hold the same number of {what}",
            lambda ranks, heads: (
                f"choose one of {[count for count in range(1, heads + 1) if heads % count == 0]} ranks, or a multiple "
                f"of {ranks} heads"
            ),
            relation=lambda ranks, heads: heads % ranks,
        )
    for term, what in (
        ("model.vocabulary?", "a row of the embedding"),
        ("feed-forward column?", "a column of the feed-forward"),
        ("data.context? where parallel.sequence_parallel", "a token of a sample"),
    ):
        yield rule(
            f"parallel.tensor>1 with {term}",
            f"each rank needs at least {what}",
            lambda _, size: f"use at most {counted(size, 'tensor rank')}",
            relation=lambda ranks, size: size < ranks,
        )
    for term in ("run.logical_shards", "data.shares!=even", "communication.delayed", "zero.shared_parameters"):
        yield rule(f"{term} with parallel.tensor>1", UNBUILT)


def _fewest_tokens(tokens: int, ranks: int) -> int:
    parts = split(tokens, 2 * ranks, itemsize=1, align_bytes=PIECE_TOKENS)
    return min(parts[rank].size + parts[-1 - rank].size for rank in range(ranks))


def of_context() -> Iterator[Rule]:
    """Yield the `Rule` objects that reject recipes with unsupported uses of context parallelism."""
    yield rule(
        f"parallel.context>1 with model.kind!={'|'.join((*TRANSFORMERS, *FOREIGN))}",
        UNBUILT,
        f"set it to 1, or train a {' or an '.join(TRANSFORMERS)}",
    )
    foreign = f"parallel.context>1 with model.kind={'|'.join(FOREIGN)}"
    for term in ("pipeline>1", "recompute", "context_method=all_to_all->ring"):
        yield rule(f"parallel.{term} with {foreign}", UNBUILT)
    yield rule(f"run.device!=cpu with {foreign}", UNBUILT)
    yield rule(
        "parallel.context>1 with data.context?",
        f"pieces of a sample start at multiples of {PIECE_TOKENS} tokens, so some rank would have no tokens",
        lambda _, tokens: f"use at most {counted(-(-tokens // PIECE_TOKENS), 'context rank')}, or longer samples",
        relation=lambda ranks, tokens: tokens <= PIECE_TOKENS * (ranks - 1),
    )
    rings = "parallel.context_method = 'ring'"
    for term, ring in (
        ("parallel.context_method=all_to_all", rings),
        ("precision.activations=working", f"precision.activations = 'float32' and {rings}"),
    ):
        yield rule(
            f"{term} with parallel.context>1 with query head?",
            "each rank must get the same number of heads",
            f"set {ring}, which has no such limit, or choose a number of ranks that divides the heads",
            relation=lambda _, ranks, heads: heads % ranks,
        )
        yield rule(
            f"{term} with parallel.context>1 with shared head?",
            "the key and value heads cannot be divided equally among the ranks",
            f"set {ring}, or choose a divisor or a multiple of those heads",
            relation=lambda _, ranks, shared: shared % ranks and ranks % shared,
        )
    yield rule(
        "parallel.context_method=ring with parallel.context>1 with precision.activations=working",
        "ring attention does not support 16-bit activations",
        "set parallel.context_method = 'all_to_all', or precision.activations = 'float32'",
    )
    yield rule(
        "parallel.sequence_parallel with parallel.tensor>1 with parallel.context>1 with data.context?",
        "each tensor rank needs at least one token of its context rank",
        "choose longer samples, or fewer ranks",
        relation=lambda _, tensor, ranks, tokens: _fewest_tokens(tokens, ranks) < tensor,
    )
    for term in (
        f"parallel.strategy!={'|'.join(('allreduce', *STAGES))}",
        "communication.compression",
        "compression.parameters",
        "run.logical_shards",  # the sum over a sample would depend on the cuts between context ranks
        "run.noise_scale_every_steps",  # a rank has only part of a sample's gradient
        "data.shares!=even",
        "parallel.stage_memory_bytes",
        "--survive?",
    ):
        yield rule(f"{term} with parallel.context>1", UNBUILT)


def of_packed() -> Iterator[Rule]:
    """Yield the `Rule` objects that reject settings that packed documents do not support."""
    yield rule(
        f"data.packed with model.kind!={'|'.join(TRANSFORMERS)}",
        UNBUILT,
        f"set it to false, or train a {' or an '.join(TRANSFORMERS)}",
    )
    yield rule("data.packed with own steps", "a step averages over the tokens of all replicas", LOCK_STEP)
    yield rule(
        "run.noise_scale_every_steps with data.packed", "micro-batches with equal samples have different token counts"
    )


def of_experts() -> Iterator[Rule]:
    """Yield the `Rule` objects that reject unsupported settings of mixture-of-experts models and expert parallelism."""
    yield rule("model.balance_rate with own steps", "router biases follow the loads of the whole batch", LOCK_STEP)
    shared = "parallel.expert>1"
    yield rule(
        f"{shared} with model.experts=0",
        "the model has no experts",
        "set it to 1, or model.experts to a multiple of {0}",
    )
    yield rule(
        f"{shared} with model.experts",
        "each expert rank must hold the same number of the {1} experts",
        lambda ranks, experts: (
            f"choose one of {[count for count in range(1, experts + 1) if experts % count == 0]} expert ranks, or set "
            f"model.experts to a multiple of {ranks}"
        ),
        relation=lambda ranks, experts: experts % ranks,
    )
    for term in (
        f"parallel.strategy!=allreduce|{'|'.join(STAGES)}",
        *("communication.overlap", "communication.delayed", COMPRESSED, "compression.parameters"),
        *(f"zero.{name}" for name in ("parameters", "gradients", "optimizer", "persistent_below", "prefetch")),
        *("zero.shared_parameters", *OFFLOADED, "run.logical_shards", "data.shares!=even", IN_16_BITS),
        "parallel.partition=measured->flops",
        *("run.suspicious_factor", "run.recompute_every_steps", "chaos.corrupt", "chaos.overflow"),
    ):
        yield rule(f"{term} with {shared}", UNBUILT)
    yield rule(
        f"run.noise_scale_every_steps with {shared}",
        "an expert's gradient covers the tokens of several replicas, so there is no gradient per replica",
    )
    yield rule(f"{shared} with --survive?", "the experts of a dead rank are lost", "set it to 1, or use --restarts")
