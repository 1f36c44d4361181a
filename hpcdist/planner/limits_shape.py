"""What is wrong with a layout beside memory: its degrees on a grid, and the order of its micro-batches."""

from collections.abc import Iterator
from typing import NamedTuple

from hpcdist.planner.cluster import Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.layout import Layout
from hpcdist.planner.shape import inner
from hpcdist.strategies.schedule.generate.registry import SCHEDULES


class Problem(NamedTuple):
    """A limit by its name, and what a person reads of it."""

    limit: str
    text: str


def grid_problems(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> Iterator[Problem]:
    """Yield what is wrong with the degrees, whatever micro-batches there are and in which order (local)."""
    yield from _devices(layout, cluster)
    yield from _tensor(description, layout)
    yield from _context(description, layout)
    yield from _experts(description, layout)
    yield from _layers(description, layout, layout.pipeline, "")
    yield from _replicas(layout, global_batch)


def order_problems(description: Description, layout: Layout, global_batch: int) -> Iterator[Problem]:
    """Yield what is wrong with the schedule, its chunks and its micro-batches on a possible grid (local)."""
    if layout.chunks > 1:
        parts = layout.pipeline * layout.chunks
        yield from _layers(description, layout, parts, f" x chunks {layout.chunks} = {parts} parts")
    yield from _passes(layout)
    yield from _batch(layout, global_batch)


def _devices(layout: Layout, cluster: Cluster) -> Iterator[Problem]:
    if layout.devices > cluster.devices:
        axes = ("data", "pipeline", "tensor", "context")
        product = " x ".join(f"{name} {getattr(layout, name)}" for name in axes)
        servers = f" + {layout.servers} servers" if layout.servers else ""
        yield Problem(
            "devices",
            f"{product}{servers} = {layout.devices} devices, {layout.devices - cluster.devices} more than the "
            f"{cluster.devices} of {cluster.name}",
        )
    if layout.computes_in not in cluster.device.peak_flops:
        yield Problem(
            "precision",
            f"the device {cluster.device.name!r} of {cluster.name} has no peak for {layout.computes_in}; choose a "
            f"precision of {', '.join(cluster.device.peak_flops)}, or add it to the cluster's file",
        )
    if layout.servers and layout.strategy != "parameter_server":
        yield Problem(
            "devices",
            f"servers = {layout.servers} with the strategy {layout.strategy!r} would have nothing to do; choose "
            "'parameter_server', or set it to 0",
        )
    if layout.expert > 1 and layout.data % layout.expert:
        yield Problem(
            "experts",
            f"expert = {layout.expert} does not divide data = {layout.data}, over whose devices experts are cut: "
            f"{layout.data % layout.expert} are left over",
        )


def _tensor(description: Description, layout: Layout) -> Iterator[Problem]:
    ranks, shape = layout.tensor, description.shape
    if layout.sequence_parallel and ranks == 1:
        yield Problem("tokens", "sequence_parallel with tensor = 1 cuts nothing; use several tensor devices, or not")
    if ranks == 1:
        return
    if shape is None:
        yield Problem("heads", f"tensor = {ranks}: {description.name} is no transformer, and has no heads to cut")
        return
    for limit, name, size in (
        ("heads", "heads", shape.heads),
        ("kv heads", "heads of keys and values", shape.kv_heads),
    ):
        if size and size % ranks:
            yield Problem(limit, f"tensor = {ranks} {_left(size, ranks, name)}; choose one of {_divisors(size)}")
    columns = inner(shape)
    published = layout.implementation == "megatron"
    if shape.heads % ranks == 0 and (columns % ranks if published else columns < ranks):
        yield Problem("feed-forward", f"tensor = {ranks} {_left(columns, ranks, 'columns of the feed-forward')}")
    if not published and shape.vocabulary < ranks:  # the published one pads it
        yield Problem("vocabulary", f"tensor = {ranks} {_left(shape.vocabulary, ranks, 'rows of the embedding')}")
    tokens = description.tokens // layout.context
    if layout.sequence_parallel and (tokens % ranks if published else tokens < ranks):
        yield Problem("tokens", f"sequence_parallel: tensor = {ranks} {_left(tokens, ranks, 'tokens of a device')}")


def _context(description: Description, layout: Layout) -> Iterator[Problem]:
    ranks = layout.context
    if ranks == 1:
        return
    if description.shape is None:
        yield Problem("tokens", f"context = {ranks}: {description.name} is no transformer, and has no tokens to cut")
    elif description.tokens % ranks:
        yield Problem("tokens", f"context = {ranks} {_left(description.tokens, ranks, 'tokens of a sample')}")


def _experts(description: Description, layout: Layout) -> Iterator[Problem]:
    if layout.expert == 1:
        return
    experts = description.shape.experts if description.shape else 1
    if experts == 1:
        yield Problem("experts", f"expert = {layout.expert}: {description.name} has no experts to cut")
    elif experts % layout.expert:
        yield Problem("experts", f"expert = {layout.expert} {_left(experts, layout.expert, 'experts')}")


def _layers(description: Description, layout: Layout, parts: int, more: str) -> Iterator[Problem]:
    """Blocks are cut evenly in the published implementation; hpcdist cuts between any two units."""
    if parts == 1:
        return
    cut = f"pipeline {layout.pipeline}{more}"
    if layout.implementation == "megatron" and description.shape is not None:
        layers = description.shape.layers
        if layers < parts:
            yield Problem("layers", f"{cut}: {layers} layers are {parts - layers} too few")
        elif layers % parts:
            yield Problem(
                "layers",
                f"{cut} does not divide {layers} layers: {layers % parts} are left over; choose a product among "
                f"{_divisors(layers)}",
            )
    elif description.stages < parts:
        yield Problem("layers", f"{cut}: {description.stages} units are {parts - description.stages} too few")


def _passes(layout: Layout) -> Iterator[Problem]:
    schedule, pipeline, chunks = SCHEDULES[layout.schedule], layout.pipeline, layout.chunks
    if pipeline > 1 and not schedule.pipelines:
        yield Problem(
            "schedule", f"the schedule {layout.schedule!r} with pipeline = {pipeline}: all stages but one would wait"
        )
    if pipeline == 1 and chunks > 1:
        yield Problem("schedule", f"chunks = {chunks} with pipeline = 1: there is nothing to interleave with")
    elif pipeline > 1 and (chunks < schedule.least or chunks > (schedule.most or chunks)):
        most = f" to {schedule.most}" if schedule.most not in (None, schedule.least) else ""
        least = f"{schedule.least}{most}" if schedule.most else f"{schedule.least} or more"
        s = "" if least == "1" else "s"
        yield Problem("schedule", f"the schedule {layout.schedule!r} has {least} chunk{s} a stage, and not {chunks}")
    if schedule.splits and layout.recompute != "none":
        yield Problem(
            "schedule",
            f"recompute = {layout.recompute!r} with the schedule {layout.schedule!r}: what a weight's gradient needs "
            "stays until it is computed; choose 'none', or gpipe, 1f1b or interleaved",
        )


def _replicas(layout: Layout, global_batch: int) -> Iterator[Problem]:
    data = layout.data
    if global_batch < data:
        yield Problem(
            "batch",
            f"a global batch of {global_batch} samples is {data - global_batch} too few for data = {data}: each "
            "replica needs one",
        )
    elif layout.implementation == "megatron" and global_batch % data:
        yield _undivided(f"data = {data}", data, global_batch)


def _batch(layout: Layout, global_batch: int) -> Iterator[Problem]:
    data, microbatch, pipeline = layout.data, layout.microbatch, layout.pipeline
    share = -(-global_batch // data)
    many = layout.microbatches(global_batch)
    if microbatch > share:
        yield Problem(
            "micro-batches",
            f"microbatch = {microbatch} is {microbatch - share} more than the {share} samples that a replica has of "
            f"the global batch of {global_batch}",
        )
    elif layout.implementation == "megatron" and global_batch % data == 0 and global_batch % (data * microbatch):
        whole = data * microbatch
        yield _undivided(f"data {data} x microbatch {microbatch} = {whole} samples", whole, global_batch)
    elif pipeline > 1 and layout.implementation != "megatron" and global_batch % many:
        yield Problem(
            "micro-batches",
            f"{many} micro-batches of the pipeline do not divide the global batch of {global_batch}: "
            f"{global_batch % many} samples are left over",
        )
    if layout.schedule != "interleaved" or pipeline == 1:
        return
    if many < pipeline:
        yield Problem(
            "micro-batches",
            f"micro-batches: {many}, which is {pipeline - many} too few for the schedule 'interleaved' with pipeline = "
            f"{pipeline}",
        )
    elif layout.implementation == "megatron" and many % pipeline:
        yield Problem(
            "micro-batches",
            f"{many} micro-batches are no multiple of pipeline = {pipeline}, as the schedule 'interleaved' needs: "
            f"{many % pipeline} are left over",
        )


def _undivided(what: str, size: int, global_batch: int) -> Problem:
    left = global_batch % size
    nearest = [batch for batch in (global_batch - left, global_batch - left + size) if batch]
    return Problem(
        "batch",
        f"{what} does not divide the global batch of {global_batch}: {left} are left over; the nearest that it divides "
        f"is {' or '.join(map(str, nearest))}",
    )


def _left(size: int, ranks: int, name: str) -> str:
    """Return how ``ranks`` fail to divide ``size``."""
    if size < ranks:
        return f"is {ranks - size} more than the {size} {name}"
    return f"does not divide the {size} {name}: {size % ranks} are left over"


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
