"""Layout options of `hpcdist plan`: one for each field of `hpcdist.planner.layout.ParallelLayout`."""

from typing import Final

import click

from hpcdist.cli.plan_sections import LAYOUT, Command, Number, Sectioned, choice, count
from hpcdist.planner.layout import (
    ALGORITHMS,
    COMPRESSIONS,
    IMPLEMENTATIONS,
    LIBRARIES,
    PRECISIONS,
    RECOMPUTE,
    STRATEGIES,
)
from hpcdist.strategies.schedule.generate.registry import SCHEDULES

# Options that are fields of a `Layout` under another name.
RENAMED: Final = {"context_ranks": "context", "expert_ranks": "expert"}
LAYOUT_OPTIONS: Final = (
    *("data", "pipeline", "tensor", "context_ranks", "expert_ranks", "strategy", "zero", "servers", "microbatch"),
    *("schedule", "chunks", "recompute", "sequence_parallel", "precision", "main_gradients", "compression"),
    *("activations", "optimizer_slots", "algorithm", "implementation", "library", "gradient_fusion", "overlap"),
    "tensor_overlap",
)
_OPTIONS: Final = (
    count("--data", section=LAYOUT, text="Replicas.  [default: what --devices leaves]"),
    count("--pipeline", section=LAYOUT, text="Stages.  [default: 1]"),
    count("--tensor", section=LAYOUT, text="Devices that compute each layer together.  [default: 1]"),
    count("--context-ranks", section=LAYOUT, text="Devices that share the tokens of a sample.  [default: 1]"),
    count("--expert-ranks", section=LAYOUT, text="Data devices that share the experts.  [default: 1]"),
    choice("--strategy", section=LAYOUT, of=STRATEGIES, text="How replicas meet.  [default: allreduce]"),
    click.option(
        "--zero",
        cls=Sectioned,
        section=LAYOUT,
        type=click.IntRange(0, 3),
        metavar="N",
        help="Its stage: --strategy zeroN, or allreduce for 0.",
    ),
    count("--servers", section=LAYOUT, text="Dedicated parameter servers beside the other devices."),
    count("--microbatch", section=LAYOUT, text="Samples of a micro-batch.  [default: 1]"),
    choice(
        "--schedule", section=LAYOUT, of=tuple(SCHEDULES), text="Order of the passes of a pipeline.  [default: 1f1b]"
    ),
    count(
        "--chunks", section=LAYOUT, text="Parts of the model on each pipeline device.  [default: as the schedule has]"
    ),
    choice(
        "--recompute", section=LAYOUT, of=RECOMPUTE, text="What is computed again: attention, or all.  [default: none]"
    ),
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        cls=Sectioned,
        section=LAYOUT,
        default=None,
        help="Cut by tokens what lies between the products of tensor devices.",
    ),
    choice("--precision", section=LAYOUT, of=PRECISIONS, text="Type of the numbers.  [default: bfloat16]"),
    choice(
        "--main-gradients",
        section=LAYOUT,
        of=("float32", "working"),
        text="Type in which gradients are summed.  [default: float32]",
    ),
    choice(
        "--activations",
        section=LAYOUT,
        of=("working", "float32"),
        text="Type in which layers compute, and keep what they do.  [default: working]",
    ),
    click.option(
        "--optimizer-slots",
        cls=Sectioned,
        section=LAYOUT,
        type=click.IntRange(0, 2),
        metavar="N",
        help="Numbers that the optimizer keeps of a parameter: 2 for Adam, 1 for momentum.  [default: 2]",
    ),
    choice("--compression", section=LAYOUT, of=COMPRESSIONS, text="How gradients travel.  [default: none]"),
    choice("--algorithm", section=LAYOUT, of=ALGORITHMS, text="Of the exchange.  [default: auto, the fastest]"),
    choice(
        "--implementation",
        section=LAYOUT,
        of=IMPLEMENTATIONS,
        text="Whose kernels and memory.  [default: megatron on a GPU that nobody has measured, else hpcdist]",
    ),
    choice(
        "--library",
        section=LAYOUT,
        of=tuple(name for name in LIBRARIES if name),
        text="Whose collectives.  [default: as the implementation]",
    ),
    click.option(
        "--gradient-fusion/--no-gradient-fusion",
        cls=Sectioned,
        section=LAYOUT,
        default=None,
        help="Of megatron: products add to the gradients of before.  [default: gradient-fusion]",
    ),
    click.option(
        "--tensor-overlap",
        cls=Sectioned,
        section=LAYOUT,
        type=Number(0.0, 1.0),
        metavar="X",
        help="Share of the tensor messages that may hide behind the backward.  [default: 0]",
    ),
    click.option(
        "--overlap",
        cls=Sectioned,
        section=LAYOUT,
        type=Number(0.0, 1.0),
        metavar="X",
        help="Share of the exchange that may hide behind computation.  [default: 1]",
    ),
)


def layout(command: Command) -> Command:
    """Add the options of the layout."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
