"""Check a layout: yield each violated limit, by how much, and a change that helps.

Order: values, degrees on the grid (`grid_problems`), micro-batches (`order_problems`), and memory last, because an
impossible layout has no memory.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from hpcdist.models import config as models_config
from hpcdist.optim.config import OptimizerConfig
from hpcdist.planner.cluster.hardware import Cluster
from hpcdist.planner.estimate import MemoryEstimate
from hpcdist.planner.layout import OPTION_KEYS, ParallelLayout, divisors
from hpcdist.planner.memory.activations import HALF_BYTES, context_share, itemsize
from hpcdist.planner.model.description import ModelDescription
from hpcdist.planner.model.transformer import inner
from hpcdist.reporting.rules import Rule, section_values
from hpcdist.strategies import rules
from hpcdist.strategies.compressed.config import MOMENTUM_OPTIMIZERS
from hpcdist.strategies.config import PIECE_TOKENS, exchanges_heads
from hpcdist.strategies.config import RULES as PARALLEL_RULES
from hpcdist.strategies.schedule.registry import SCHEDULES


class LayoutProblem(NamedTuple):
    """Violated limit that makes a layout impossible: name of the limit, and message for the user."""

    limit: str
    text: str


def grid_problems(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> Iterator[LayoutProblem]:
    """Yield a problem for each data, pipeline, tensor, context or expert size of ``layout`` that is impossible.

    Sizes must suit the model ``description``, the devices of ``cluster``, and ``global_batch`` samples per step.
    """
    yield from _devices(layout, cluster)
    yield from _tensor(description, layout)
    yield from _context(description, layout)
    yield from _experts(description, layout)
    yield from _layers(description, layout, layout.pipeline, "")
    yield from _replicas(layout, global_batch)


def order_problems(description: ModelDescription, layout: ParallelLayout, global_batch: int) -> Iterator[LayoutProblem]:
    """Yield a problem if the schedule, the number of chunks or the micro-batch size of ``layout`` is impossible.

    Schedule and sizes must suit the model ``description`` and a step of ``global_batch`` samples.
    """
    if layout.chunks > 1:
        parts = layout.pipeline * layout.chunks
        yield from _layers(description, layout, parts, f" x chunks {layout.chunks} = {parts} parts")
    yield from _passes(layout)
    yield from _batch(layout, global_batch)


def _devices(layout: ParallelLayout, cluster: Cluster) -> Iterator[LayoutProblem]:
    if layout.devices > cluster.devices:
        axes = ("data", "pipeline", "tensor", "context")
        product = " x ".join(f"{name} {getattr(layout, name)}" for name in axes)
        servers = f" + {layout.servers} servers" if layout.servers else ""
        yield LayoutProblem(
            "devices",
            f"{product}{servers} = {layout.devices} devices, {layout.devices - cluster.devices} more than the "
            f"{cluster.devices} of {cluster.name}",
        )
    if layout.computes_in not in cluster.device.peak_flops:
        yield LayoutProblem(
            "precision",
            f"the device {cluster.device.name!r} of {cluster.name} has no peak FLOP rate for {layout.computes_in}; "
            f"choose a precision of {', '.join(cluster.device.peak_flops)}, or add the peak to the cluster's file",
        )
    if layout.servers and layout.strategy != "parameter_server":
        yield LayoutProblem(
            "devices",
            f"servers = {layout.servers} has no effect with the strategy {layout.strategy!r}; choose "
            "'parameter_server', or set servers to 0",
        )
    if left := layout.data * layout.context % layout.expert:
        yield LayoutProblem(
            "experts",
            f"expert = {layout.expert} does not divide data {layout.data} x context {layout.context}, the devices that "
            f"experts are sharded over: {left} are left over",
        )


def _tensor(description: ModelDescription, layout: ParallelLayout) -> Iterator[LayoutProblem]:
    ranks, shape = layout.tensor, description.shape
    if layout.sequence_parallel and ranks == 1:
        yield LayoutProblem("tokens", "sequence_parallel with tensor = 1 has no effect; use tensor > 1, or turn it off")
    if ranks == 1:
        return
    if shape is None:
        yield LayoutProblem("heads", f"tensor = {ranks}: {description.name} is not a transformer and has no heads")
        return
    for limit, name, size in (
        ("heads", "heads", shape.heads),
        ("kv heads", "heads of keys and values", shape.kv_heads),
    ):
        if size and size % ranks:
            yield LayoutProblem(
                limit, f"tensor = {ranks} {_left(size, ranks, name)}; choose one of {[*divisors(size)]}"
            )
    columns = inner(shape)
    published = layout.kernels.splits_evenly
    if shape.heads % ranks == 0 and (columns % ranks if published else columns < ranks):
        yield LayoutProblem("feed-forward", f"tensor = {ranks} {_left(columns, ranks, 'columns of the feed-forward')}")
    if not published and shape.vocabulary < ranks:  # Megatron-LM pads the vocabulary
        yield LayoutProblem("vocabulary", f"tensor = {ranks} {_left(shape.vocabulary, ranks, 'rows of the embedding')}")
    tokens = description.tokens // layout.context
    if layout.sequence_parallel and (tokens % ranks if published else tokens < ranks):
        yield LayoutProblem(
            "tokens", f"sequence_parallel: tensor = {ranks} {_left(tokens, ranks, 'tokens of a device')}"
        )


def _context(description: ModelDescription, layout: ParallelLayout) -> Iterator[LayoutProblem]:
    ranks = layout.context
    if ranks == 1:
        return
    if description.shape is None:
        yield LayoutProblem(
            "tokens", f"context = {ranks}: {description.name} is not a transformer and has no tokens to shard"
        )
    elif layout.kernels.rotates_keys:
        if description.tokens <= PIECE_TOKENS * (ranks - 1):
            yield LayoutProblem(
                "tokens",
                f"context = {ranks} {_left(description.tokens, ranks, 'tokens of a sample')}, in pieces of at least "
                f"{PIECE_TOKENS}",
            )
        unit = next(unit for unit in description.units if unit.attention)
        share, _ = context_share(unit, layout, 1)
        if itemsize(layout) == HALF_BYTES and not exchanges_heads(ranks, share.heads, share.shared):
            yield LayoutProblem(
                "heads",
                f"context = {ranks} {_left(share.heads, ranks, 'heads of a device')}, and ring attention has no 16-bit "
                "kernels: choose activations = 'float32', or a divisor of the heads",
            )
    elif description.tokens % ranks:
        yield LayoutProblem("tokens", f"context = {ranks} {_left(description.tokens, ranks, 'tokens of a sample')}")


def _experts(description: ModelDescription, layout: ParallelLayout) -> Iterator[LayoutProblem]:
    if layout.expert == 1:
        return
    experts = description.shape.experts if description.shape else 1
    if experts == 1:
        yield LayoutProblem("experts", f"expert = {layout.expert}: {description.name} has no experts")
    elif experts % layout.expert:
        yield LayoutProblem("experts", f"expert = {layout.expert} {_left(experts, layout.expert, 'experts')}")


def _layers(description: ModelDescription, layout: ParallelLayout, parts: int, suffix: str) -> Iterator[LayoutProblem]:
    if parts == 1:
        return
    split = f"pipeline {layout.pipeline}{suffix}"
    if layout.kernels.splits_evenly and description.shape is not None:
        layers = description.shape.layers
        if layers % parts and layout.kernels.counts_ends:
            layers += 2
        if layers < parts:
            yield LayoutProblem("layers", f"{split}: {layers} layers are {parts - layers} too few")
        elif layers % parts:
            yield LayoutProblem(
                "layers",
                f"{split} does not divide {layers} layers: {layers % parts} are left over; choose a product among "
                f"{[*divisors(layers)]}",
            )
    elif description.stages < parts:
        yield LayoutProblem("layers", f"{split}: {description.stages} units are {parts - description.stages} too few")


def _passes(layout: ParallelLayout) -> Iterator[LayoutProblem]:
    schedule, pipeline, chunks = SCHEDULES[layout.schedule], layout.pipeline, layout.chunks
    if pipeline > 1 and not schedule.pipelines:
        yield LayoutProblem(
            "schedule",
            f"the schedule {layout.schedule!r} with pipeline = {pipeline}: only one pipeline rank computes at a time",
        )
    if pipeline == 1 and chunks > 1:
        yield LayoutProblem("schedule", f"chunks = {chunks} with pipeline = 1: there are no stages to interleave")
    elif pipeline > 1 and (chunks < schedule.least or chunks > (schedule.most or chunks)):
        most = f" to {schedule.most}" if schedule.most not in (None, schedule.least) else ""
        least = f"{schedule.least}{most}" if schedule.most else f"{schedule.least} or more"
        s = "" if least == "1" else "s"
        yield LayoutProblem(
            "schedule", f"the schedule {layout.schedule!r} has {least} chunk{s} per stage, not {chunks}"
        )
    if schedule.splits and layout.recompute != "none":
        yield LayoutProblem(
            "schedule",
            f"recompute = {layout.recompute!r} with the schedule {layout.schedule!r}: its split backward keeps "
            "activations for weight gradients; choose 'none', or gpipe, 1f1b or interleaved",
        )


def _replicas(layout: ParallelLayout, global_batch: int) -> Iterator[LayoutProblem]:
    data = layout.data
    if global_batch < data:
        yield LayoutProblem(
            "batch",
            f"a global batch of {global_batch} samples is {data - global_batch} too few for data = {data}: each "
            "replica needs a sample",
        )
    elif layout.kernels.splits_evenly and global_batch % data:
        yield _undivided(f"data = {data}", data, global_batch)


def _batch(layout: ParallelLayout, global_batch: int) -> Iterator[LayoutProblem]:
    data, microbatch, pipeline = layout.data, layout.microbatch, layout.pipeline
    share = -(-global_batch // data)
    many = layout.microbatches(global_batch)
    if microbatch > share:
        yield LayoutProblem(
            "micro-batches",
            f"microbatch = {microbatch} is {microbatch - share} more than the {share} samples that a replica has of "
            f"the global batch of {global_batch}",
        )
    elif layout.kernels.splits_evenly and global_batch % data == 0 and global_batch % (data * microbatch):
        whole = data * microbatch
        yield _undivided(f"data {data} x microbatch {microbatch} = {whole} samples", whole, global_batch)
    elif pipeline > 1 and not layout.kernels.splits_evenly and global_batch % many:
        yield LayoutProblem(
            "micro-batches",
            f"{many} micro-batches of the pipeline do not divide the global batch of {global_batch}: "
            f"{global_batch % many} samples are left over",
        )
    if layout.schedule != "interleaved" or pipeline == 1:
        return
    if many < pipeline:
        yield LayoutProblem(
            "micro-batches",
            f"micro-batches: {many}, which is {pipeline - many} too few for the schedule 'interleaved' with pipeline = "
            f"{pipeline}",
        )
    elif layout.kernels.splits_evenly and many % pipeline:
        yield LayoutProblem(
            "micro-batches",
            f"{many} micro-batches are not a multiple of pipeline = {pipeline}, as the schedule 'interleaved' needs: "
            f"{many % pipeline} are left over",
        )


def _undivided(divisor_text: str, size: int, global_batch: int) -> LayoutProblem:
    left = global_batch % size
    nearest = [batch for batch in (global_batch - left, global_batch - left + size) if batch]
    return LayoutProblem(
        "batch",
        f"{divisor_text} does not divide the global batch of {global_batch}: {left} are left over; the nearest "
        f"multiples are {' or '.join(map(str, nearest))}",
    )


def _left(size: int, ranks: int, name: str) -> str:
    if size < ranks:
        return f"is {ranks - size} more than the {size} {name}"
    return f"does not divide the {size} {name}: {size % ranks} are left over"


GB: Final = 1e9
# Sizes above these limits are typing errors; they would take hours to plan.
MOST: Final = {**models_config.MOST, "context": models_config.MOST_CONTEXT}
MOST_SAMPLES: Final = 1 << 40
WORTH_16_BITS: Final = 2.0  # bfloat16 / float32 peak above which a float32 plan suggests bfloat16
MOST_DEVICES: Final = 10_000_000


def flags(layout: ParallelLayout, cluster: Cluster) -> tuple[str, ...]:
    """Return warnings about slow choices in a valid ``layout``, such as tensor ranks on several nodes."""
    texts, node = [], cluster.node.devices
    if layout.tensor > node:
        texts.append(
            f"tensor = {layout.tensor} is wider than a node of {node} devices: every matrix product waits for messages "
            "between nodes"
        )
    if layout.computes_in != layout.precision:
        texts.append(
            f"{layout.precision} with float32 activations: matrix products are float32, so compute time and activation "
            "memory are as in float32; on a GPU set precision.activations = 'working' "
            "(--activations working)"
        )
    peaks = cluster.device.peak_flops
    if layout.precision == "float32" and peaks.get("bfloat16", 0.0) >= WORTH_16_BITS * peaks.get("float32", math.inf):
        texts.append(
            f"matrix products are float32: bfloat16 products have {peaks['bfloat16'] / peaks['float32']:.0f} times the "
            f"peak on {cluster.device.name}; set precision.mode = 'bfloat16' with precision.activations = 'working' "
            "(--precision bfloat16 --activations working), which keeps a float32 master"
        )
    return tuple(texts)


def shape_problems(
    description: ModelDescription, layout: ParallelLayout, cluster: Cluster, global_batch: int
) -> Iterator[LayoutProblem]:
    """Yield a `LayoutProblem` for each violated limit of ``layout``, except device memory.

    ``description``: the model to train. ``global_batch``: number of samples per step.
    """
    invalid = tuple(LayoutProblem("value", text) for text in layout.invalid_fields())
    wrong = (*size_problems(description, layout.devices, global_batch), *invalid)
    if wrong:
        yield from wrong
        return
    yield from grid_problems(description, layout, cluster, global_batch)
    yield from order_problems(description, layout, global_batch)


def size_problems(description: ModelDescription, devices: int, global_batch: int) -> Iterator[LayoutProblem]:
    """Yield a problem for each size of the model, and for ``devices`` and ``global_batch``, above the planner's limits.

    ``description``: sizes of the model. ``global_batch``: number of samples per step.
    """
    for name, most in MOST.items() if description.shape else ():
        size = getattr(description.shape, name)
        if size > most:
            yield LayoutProblem("value", f"{name} = {size}, {size - most} more than the {most} that a plan is made for")
    if global_batch < 1:
        yield LayoutProblem("value", f"a global batch of {global_batch} samples; it must be at least 1")
    if global_batch > MOST_SAMPLES:
        yield LayoutProblem(
            "value", f"a global batch of {global_batch} samples; a plan is made for at most {MOST_SAMPLES} of them"
        )
    if devices > MOST_DEVICES:
        yield LayoutProblem("value", f"{devices} devices; a plan is made for at most {MOST_DEVICES} of them")


def memory_problem(memory: MemoryEstimate, limit_bytes: float = 0.0) -> LayoutProblem | None:
    """Return a problem if ``memory`` exceeds the device memory or a positive ``limit_bytes``, else None."""
    limit = min(memory.limit_bytes, limit_bytes) if limit_bytes else memory.limit_bytes
    if memory.bytes <= limit:
        return None
    largest = memory.largest_term
    return LayoutProblem(
        "memory",
        f"{memory.bytes / GB:.2f} GB on a device of {limit / GB:.2f} GB (10^9 bytes): "
        f"{(memory.bytes - limit) / GB:.2f} GB too much on stage {memory.stage}; the largest term is {largest} with "
        f"{memory.terms[largest] / GB:.2f} GB",
    )


# Possible layouts that this version of hpcdist cannot run, by the rules of recipes.
_KEYS: Final = {  # field of a layout -> recipe key with the same meaning
    **{name: OPTION_KEYS[name] for name in ("pipeline", "tensor", "strategy", "chunks", "schedule")},
    **{name: OPTION_KEYS[name] for name in ("sequence_parallel", "compression", "precision")},
    "context": "parallel.context",
    "expert": "parallel.expert",
    "recompute": "parallel.recompute",
}
_relevant: Final = attrgetter(*_KEYS)
_FOLLOWING: Final = (
    "communication.overlap",
    "parameter_server.placement",
    "optimizer.name",
    "compression.warmup_steps",
)
_DEFAULTS: Final = {**rules.DEFAULTS, **section_values("optimizer", OptimizerConfig())}
_SELECTIVE: Final = (
    "recompute = 'selective' is not built in this version: tiled attention always recomputes its scores; choose 'none' "
    "or 'full'"
)


def _may_refuse(rule: Rule) -> bool:
    # True if the recipe rule can reject a layout of the planner, so that the rule must be checked.
    constant = {key: value for key, value in _DEFAULTS.items() if key not in (*_KEYS.values(), *_FOLLOWING)}
    derived_values = rules.derived({**_DEFAULTS, **dict.fromkeys(_KEYS.values(), "")})
    conditions = {**rule.conditions, **rule.given}
    return conditions.keys() <= derived_values.keys() and all(
        condition.matches(constant[key]) for key, condition in conditions.items() if key in constant
    )


_RULES: Final = tuple(filter(_may_refuse, (*PARALLEL_RULES, *rules.RULES)))


def unsupported(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the reasons why hpcdist cannot run ``layout``. A layout of another program, such as Megatron, gives ()."""
    return () if layout.kernels.is_published else refusals(layout)


def refusals(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the reasons why hpcdist cannot run ``layout``, even if the layout is for another program."""
    return _refusals(*_relevant(layout), overlaps=layout.overlap > 0 and layout.data > 1, dedicated=layout.servers > 0)


@lru_cache(maxsize=1 << 14)
def _refusals(*fields: Any, overlaps: bool, dedicated: bool) -> tuple[str, ...]:
    values = {**_DEFAULTS, **dict(zip(_KEYS.values(), fields, strict=True))}
    recompute, compression = values["parallel.recompute"], values["communication.compression"]
    values["parallel.recompute"] = recompute == "full"
    if values["parallel.pipeline"] == 1:
        values["parallel.schedule"] = "auto"
    if overlaps:
        values["communication.overlap"] = "thread"
    if values["parallel.strategy"] == "parameter_server" and not dedicated:
        values["parameter_server.placement"] = "colocated"
    if compression in MOMENTUM_OPTIMIZERS:
        values |= {"optimizer.name": MOMENTUM_OPTIMIZERS[compression], "compression.warmup_steps": 1}
    values = rules.derived(values)
    reasons = tuple(filter(None, (rule.refusal(values) for rule in _RULES)))
    return (*reasons, _SELECTIVE) if recompute == "selective" else reasons
