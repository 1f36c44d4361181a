"""Layouts that cannot be: which limit each one breaks, by how much, and what to change.

A limit has a short name, by which a search counts what it refused, and a text. Memory comes last, and only where all
else is right: what an impossible layout would take means nothing.
"""

import difflib
from collections.abc import Iterator
from typing import Final

from hpcdist.planner import layout as known
from hpcdist.planner import memory as taken
from hpcdist.planner.cluster import Cluster
from hpcdist.planner.description import Description
from hpcdist.planner.estimate import Memory
from hpcdist.planner.layout import Layout
from hpcdist.planner.limits_built import unbuilt
from hpcdist.planner.limits_shape import Problem, grid_problems, order_problems
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

__all__ = [
    "Problem",
    "flags",
    "grid_problems",
    "memory_problem",
    "order_problems",
    "problems",
    "shape_problems",
    "too_large",
    "unbuilt",
    "value_problems",
]

DEGREES: Final = ("data", "pipeline", "tensor", "context", "expert", "microbatch", "chunks")
COUNTS: Final = ("servers", "optimizer_slots")
SHARES: Final = ("overlap", "tensor_overlap")
GB: Final = 1e9
# Beyond what anybody trains: a slip of the keyboard is told at once, and not planned for hours.
MOST: Final = {"layers": 10_000, "hidden": 1 << 20, "context": 1 << 27, "vocabulary": 1 << 30}
MOST_SAMPLES: Final = 1 << 40
MOST_DEVICES: Final = 10_000_000
_CHOICES: Final = {
    "strategy": known.STRATEGIES,
    "recompute": known.RECOMPUTE,
    "precision": known.PRECISIONS,
    "implementation": known.IMPLEMENTATIONS,
    "compression": known.COMPRESSIONS,
    "algorithm": known.ALGORITHMS,
    "schedule": tuple(SCHEDULES),
    "main_gradients": ("float32", "working"),
    "activations": ("float32", "working"),
    "library": known.LIBRARIES,
}


def problems(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> tuple[str, ...]:
    """Return why the layout cannot be, a text for each limit; nothing for one that can (local)."""
    found = tuple(shape_problems(description, layout, cluster, global_batch))
    if not found:
        full = memory_problem(taken.memory(description, layout, cluster, global_batch))
        found = (full,) if full else ()
    return tuple(one.text for one in found)


def flags(layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    """Return what is possible, and seldom wise: messages of an axis that is used all the time between nodes (local)."""
    found, node = [], cluster.node.devices
    if layout.tensor > node:
        found.append(
            f"tensor = {layout.tensor} is wider than a node of {node} devices: every product waits for messages "
            "between nodes"
        )
    return tuple(found)


def shape_problems(description: Description, layout: Layout, cluster: Cluster, global_batch: int) -> Iterator[Problem]:
    """Yield what is wrong beside memory, of values that mean nothing first, and then of those alone (local)."""
    wrong = (*too_large(description, layout.devices, global_batch), *value_problems(layout, global_batch))
    if wrong:
        yield from wrong
        return
    yield from grid_problems(description, layout, cluster, global_batch)
    yield from order_problems(description, layout, global_batch)


def too_large(description: Description, devices: int, global_batch: int) -> Iterator[Problem]:
    """Yield sizes that nothing has, by how much (local)."""
    for name, most in MOST.items() if description.shape else ():
        size = getattr(description.shape, name)
        if size > most:
            yield Problem("value", f"{name} = {size}, {size - most} more than the {most} that a plan is made for")
    if global_batch > MOST_SAMPLES:
        yield Problem(
            "value", f"a global batch of {global_batch} samples; a plan is made for at most {MOST_SAMPLES} of them"
        )
    if devices > MOST_DEVICES:
        yield Problem("value", f"{devices} devices; a plan is made for at most {MOST_DEVICES} of them")


def value_problems(layout: Layout, global_batch: int) -> Iterator[Problem]:
    """Yield values that mean nothing anywhere (local)."""
    for name in DEGREES:
        value = getattr(layout, name)
        if value < 1:
            yield Problem("value", f"{name} = {value}; it must be at least 1")
    for name in COUNTS:
        value = getattr(layout, name)
        if value < 0:
            yield Problem("value", f"{name} = {value}; it must be at least 0")
    if global_batch < 1:
        yield Problem("value", f"a global batch of {global_batch} samples; it must be at least 1")
    for name in SHARES:
        value = getattr(layout, name)
        if not 0.0 <= value <= 1.0:
            yield Problem("value", f"{name} = {value}; it is a share, from 0 to 1")
    for name, choices in _CHOICES.items():
        value = getattr(layout, name)
        if value not in choices:
            close = difflib.get_close_matches(str(value), choices, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            yield Problem(
                "value", f"{name} = {value!r}; {hint}choose one of {', '.join(one or repr(one) for one in choices)}"
            )


def memory_problem(memory: Memory, limit_bytes: float = 0.0) -> Problem | None:
    """Return what is too much, where it is, for the device or for a ``limit_bytes`` below it (local). 0: none."""
    limit = min(memory.limit_bytes, limit_bytes) if limit_bytes else memory.limit_bytes
    if memory.bytes <= limit:
        return None
    largest = memory.breaks_first
    return Problem(
        "memory",
        f"{memory.bytes / GB:.2f} GB on a device of {limit / GB:.2f} GB (10^9 bytes): "
        f"{(memory.bytes - limit) / GB:.2f} GB too much, with {largest} of {memory.terms[largest] / GB:.2f} GB the "
        f"most, on stage {memory.stage}",
    )
